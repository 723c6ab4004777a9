"""Many steps: no memory is lost, nothing is compiled again; the same seed gives the same bits in another process."""

import hashlib
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import psutil
import pytest
from odd import SOAK
from problems import network_batch, network_loss, network_params

import saddlefree as sf

STEPS = 100_000 if SOAK else 300
OPTIMISERS = {
    "adaptive": sf.adaptive_saddle_free_newton(sf.lanczos(num_products=3, memory=1, recycle=4)),
    "over-adam": sf.saddle_free_newton(0.1, solver=sf.low_rank(rank=2, base=optax.adam(1e-3))),
    "quasi-newton": sf.adaptive_saddle_free_newton(sf.quasi_newton(memory=5)),
}


@pytest.mark.parametrize("name", OPTIMISERS if SOAK else ["adaptive"])
def test_many_steps(name, count):
    tx, (x, y) = OPTIMISERS[name], network_batch(jax.random.key(0))

    @jax.jit
    def step(params, state, shift):
        value_fn = lambda params: network_loss(params, (x, y + shift))  # noqa: E731
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    params = network_params(jax.random.key(1))
    state = tx.init(params)
    shifts = np.random.default_rng(0).normal(scale=1e-3, size=97).astype(np.float32)
    process = psutil.Process()
    for number in range(STEPS):
        params, state = step(params, state, shifts[number % 97])
        if number == STEPS // 10:
            jax.block_until_ready(params)
            arrays, memory = len(jax.live_arrays()), process.memory_info().rss
    jax.block_until_ready(params)
    grown = process.memory_info().rss - memory
    count("steps of long runs", STEPS)
    count(f"kilobytes of memory that {name} gained after its first tenth", max(grown, 0) // 1024)
    assert step._cache_size() == 1
    assert len(jax.live_arrays()) == arrays
    assert grown < 20e6
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params))
    assert sf.diagnostics(state)["steps"] == STEPS


def digest():
    """Of parameters and state after a few steps with something random in them."""
    solver = sf.series(num_terms=2, scale=sf.power_iteration(num_iterations=2))
    tx = sf.saddle_free_newton(0.5, 0.5, 0.1, solver)
    params, batch = network_params(jax.random.key(0)), network_batch(jax.random.key(1))

    @jax.jit
    def step(params, state):
        value_fn = lambda params: network_loss(params, batch)  # noqa: E731
        updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(6):
        params, state = step(params, state)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state)))).hexdigest()


def test_same_seed_same_bits():
    """In this process and in another."""
    code = "import jax, test_long; jax.config.update('jax_numpy_dtype_promotion', 'strict'); print(test_long.digest())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.strip() == digest()
