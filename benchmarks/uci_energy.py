"""The paper's smallest problem: UCI Energy and its network, 8-12×7-1 with ReLU, 1,057 parameters."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np


def energy() -> tuple[np.ndarray, np.ndarray]:
    """The 588 training rows of the paper's split, standardised by the 692 rows of training and validation."""
    folder = pathlib.Path(os.environ.get("SADDLEFREE_DATA", "data")) / "uci-energy"
    rows, order = np.loadtxt(folder / "data.txt"), np.loadtxt(folder / "permutation.txt").astype(int)
    known = rows[order][:692]
    known = (known - known.mean(0)) / known.std(0)
    return known[:588, :8], known[:588, 8:9]


def network(key: jax.Array) -> list[dict[str, jax.Array]]:
    """Truncated normal weights of standard deviation 1/√fan-in, zero biases."""
    sizes = [8, *[12] * 7, 1]
    init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    keys = jax.random.split(key, len(sizes) - 1)
    return [{"w": init(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def loss(params: list, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """½ mean squared error."""
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return 0.5 * jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)
