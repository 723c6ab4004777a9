"""Losses that are a formula: no data, no network."""

import jax
import jax.numpy as jnp

from saddlefree.lab.task import Task, Tree


def saddle(_: str | None) -> Task:
    """f(x, y) = ½(x² − y²) + ¼y⁴: a saddle at 0, minima of −¼ at (0, ±1)."""

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        return jnp.array([0.9, 0.05]) + 0.01 * jax.random.normal(key, (2,)), None

    def value(x: jax.Array) -> jax.Array:
        return 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4

    return Task(init, None, {"train": (), "val": (), "test": ()}, value=value)
