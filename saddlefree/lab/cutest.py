"""Twenty of the CUTEst problems, as `sif2jax` has them in JAX: unconstrained, from 2 to 10,000 variables."""

import jax
import jax.numpy as jnp

from saddlefree.lab.errors import not_installed
from saddlefree.lab.task import Task, Tree


def cutest(_: str | None, *, name: str) -> Task:
    """The problem `name` from its own start, which is the same for every seed."""
    try:
        import sif2jax
    except ModuleNotFoundError:
        raise not_installed("sif2jax", "peers") from None
    found = getattr(sif2jax.cutest, name)()

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(float)), found.y0), None

    def value(x: Tree) -> jax.Array:
        return found.objective(x, found.args)

    return Task(init, None, {"train": (), "val": (), "test": ()}, source="sif2jax", value=value)
