"""Blockwise: a solver for each layer by itself, with the diagonal blocks of the Hessian alone.

With H_bb the block of the parameters in group b,

    d_b = (|H_bb| + λI)⁻¹ g_b    for each b.

What couples one group to another is left out. In return a layer with small gradients gets the products that it needs,
and a dense solver's P³ becomes the sum of P_b³.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from saddlefree.model import Blocks, reduced
from saddlefree.problem import Problem
from saddlefree.solvers.base import Solver, check_solver, forwarded
from saddlefree.space import Space, Tree

Path = tuple[Any, ...]
"""The keys that lead to a leaf, as in `jax.tree_util.tree_flatten_with_path`."""

_WRAPPERS = ("value", "raw_value", "_value")
"""Attributes under which Flax NNX keeps the array of a parameter."""


def layer(path: Path) -> Hashable:
    """The group of a leaf: its layer, so that weights and biases of a layer stay together.

    That is all but the last key of its path, for parameters of Flax, Haiku and Equinox alike. In a flat dictionary the
    name itself is taken apart: at its last "." or "/", or at the number that it ends with (w1 and b1 are one layer).

    >>> group = lambda tree: {layer(path) for path, _ in jax.tree.leaves_with_path(tree)}
    >>> sorted(group({"dense": {"w": 1.0, "b": 1.0}, "head": {"w": 1.0}}))
    [('dense',), ('head',)]
    >>> sorted(group({"dense/w": 1.0, "dense/b": 1.0, "w2": 1.0, "b2": 1.0}))
    [('2',), ('dense',)]
    """
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    while len(names) > 1 and names[-1] in _WRAPPERS:
        names.pop()
    if len(names) != 1:
        return tuple(names[:-1])
    prefix, separator, _ = names[0].replace("/", ".").rpartition(".")
    if separator:
        return (prefix,)
    number = re.search(r"\d+$", names[0])
    return (number.group(),) if number else ()


@dataclasses.dataclass(frozen=True)
class blockwise(Solver):
    """Any solver, for each group of parameters by itself: the block-diagonal curvature of the paper's Section 4.3.

    Args:
      solver: what solves each block; `exact(average=0.95)` gives dense blocks with a moving average.
      group: function from a leaf's path to its group, anything hashable; leaves of one group form a block. Without it
        a layer is a group (see `saddlefree.solvers.blockwise.layer`).

    A block's product is the derivative of the block's own gradient, so that it spares what lies before the block in the
    model, and all blocks share the forward and backward pass of the loss. Beside `matvec=` a block's product is a whole
    one. Of the statistics, `products` is the sum over blocks, others are the block's with the largest (`smallest_…`:
    smallest) number.

    >>> import saddlefree as sf
    >>> H = jnp.array([[2.0, 0.5, 9.0], [0.5, -2.0, 9.0], [9.0, 9.0, -4.0]])  # 9.0 couples b to w
    >>> def matvec(v):
    ...     w, b = H[:2, :2] @ v["layer"]["w"] + H[:2, 2] * v["head"]["b"], H[2, :2] @ v["layer"]["w"]
    ...     return {"layer": {"w": w}, "head": {"b": b + H[2, 2] * v["head"]["b"]}}
    >>> g = {"layer": {"w": jnp.array([1.0, 1.0])}, "head": {"b": jnp.array(1.0)}}
    >>> solution = sf.solve(blockwise(sf.exact()), matvec, g, damping=0.0)
    >>> float(solution.direction["head"]["b"])
    0.25
    """

    solver: Solver
    group: Callable[[Path], Hashable] = layer

    stats = forwarded("solver.stats")
    answers = forwarded("solver.answers")
    uses_previous = forwarded("solver.uses_previous")
    has_momentum = forwarded("solver.has_momentum")
    needs = forwarded("solver.needs")

    def __post_init__(self) -> None:
        check_solver(self.solver)
        if not callable(self.group):
            raise ValueError(f"group must be a function from a leaf's path to its group, got {self.group!r}")

    def init(self, layout: Space) -> Any:
        """A state for each block."""
        blocks = [Space(part, layout.packed) for part in self._parts(layout.like)]
        # Without parameters one array stands for all states, as a prefix of them, for `optax.tree.map_params`.
        return tuple(self.solver.init(block) for block in blocks) if blocks else jnp.zeros(0)

    def model(self, problem: Problem, dampings: jax.Array, state: tuple[Any, ...]) -> tuple[Blocks, tuple[Any, ...]]:
        """Models block by block."""
        blocks = [problem.block(part) for part in self._parts(problem.space.like)]
        models, states = zip(
            *(self.solver.model(block, dampings, old) for block, old in zip(blocks, state, strict=True)), strict=True
        )
        stats = reduced([model.stats for model in models])
        return Blocks(problem.space, [block.space for block in blocks], list(models), stats), states

    def _parts(self, like: Tree) -> list[Tree]:
        """The parameters once for each group, with None for the leaves of others."""
        leaves, treedef = jax.tree.flatten_with_path(like)
        groups = [self.group(path) for path, _ in leaves]
        return [
            jax.tree.unflatten(treedef, [x if g == name else None for g, (_, x) in zip(groups, leaves, strict=True)])
            for name in dict.fromkeys(groups)
        ]
