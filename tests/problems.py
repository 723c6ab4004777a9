"""Small problems that tests share."""

import functools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import saddlefree as sf
from saddlefree.model import Answer

FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"


def cases(count):
    """Settings of a property with `count` examples, ten times as many in `make fuzz`."""
    checks = [hypothesis.HealthCheck.function_scoped_fixture]
    return hypothesis.settings(max_examples=10 * count if FUZZ else count, deadline=None, suppress_health_check=checks)


def network_params(key, sizes=(3, 4, 1), dtype=jnp.float32):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (n, m), dtype) / n**0.5, "b": jnp.zeros(m, dtype)}
        for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def predict(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def network_loss(params, batch):
    """½ mean squared error; its Hessian at random parameters is indefinite."""
    x, y = batch
    return 0.5 * jnp.mean((predict(params, x) - y) ** 2)


def network_residuals(params, batch):
    """Those whose half squared norm is `network_loss`."""
    x, y = batch
    return (predict(params, x) - y) / len(x) ** 0.5


def network_batch(key, n=16, inputs=3, dtype=jnp.float32):
    x = jax.random.normal(key, (n, inputs), dtype)
    return x, jnp.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def symmetric(rng, eigenvalues):
    """A random symmetric matrix with the given eigenvalues, as a NumPy array."""
    Q, _ = np.linalg.qr(rng.normal(size=(len(eigenvalues), len(eigenvalues))))
    return (Q * eigenvalues) @ Q.T


def saddle_free_direction(H, g, damping):
    """(|H| + λI)⁻¹ g by eigendecomposition, in NumPy: the oracle."""
    values, vectors = np.linalg.eigh(H)
    return vectors @ ((vectors.T @ g) / (np.abs(values) + damping))


@functools.partial(jax.jit, static_argnums=0)
def solve(solver, H, g, damping, state=None):
    """`sf.solve` for a matrix, compiled once for each solver and size."""
    return sf.solve(solver, lambda v: H @ v, g, damping, state)


@functools.cache
def compiles(dtype):
    """Whether XLA compiles this dtype here: on a CPU without F16C it does not know float16."""
    try:
        jax.block_until_ready(jax.jit(lambda x: x.astype(jnp.float32) + 1)(jnp.ones(2, dtype)))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def require(dtype):
    """Skips a test where XLA does not compile this dtype."""
    if not compiles(dtype):
        pytest.skip(f"XLA does not compile {dtype} for this processor")


class Given:
    """A model whose direction is given."""

    stats = {}  # noqa: RUF012

    def __init__(self, direction):
        self.direction = direction

    def answer(self, damping):
        zero = jnp.zeros_like(damping)
        return Answer(self.direction, zero, zero.astype(jnp.int32), {})
