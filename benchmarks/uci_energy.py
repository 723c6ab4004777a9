"""The paper's smallest problem: UCI Energy and its network, 8-12×7-1 with ReLU, 1,057 parameters."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np


def split() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The paper's 588 training, 104 validation and 76 test rows, standardised by the first 692."""
    folder = pathlib.Path(os.environ.get("SADDLEFREE_DATA", "data")) / "uci-energy"
    if not folder.is_dir():
        raise SystemExit(f"{folder} not found: set SADDLEFREE_DATA to the folder that holds uci-energy/data.txt")
    rows, order = np.loadtxt(folder / "data.txt"), np.loadtxt(folder / "permutation.txt").astype(int)
    rows = rows[order]
    rows = (rows - rows[:692].mean(0)) / rows[:692].std(0)
    parts = {"train": rows[:588], "val": rows[588:692], "test": rows[692:]}
    return {name: (part[:, :8], part[:, 8:9]) for name, part in parts.items()}


def energy() -> tuple[np.ndarray, np.ndarray]:
    """The training rows."""
    return split()["train"]


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
