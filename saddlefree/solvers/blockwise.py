"""Blockwise: a solver for each layer by itself, with the diagonal blocks of the Hessian alone.

With H_bb the block of the parameters in group b,

    d_b = (|H_bb| + λI)⁻¹ g_b    for each b.

What couples one group to another is left out. In return a layer with small gradients gets the products that it needs,
and a dense solver's P³ becomes the sum of P_b³.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import tree
from saddlefree.solvers.base import Solution, Solver, Subspace, System, check_solver
from saddlefree.tree import Tree

Path = tuple[Any, ...]
"""The keys that lead to a leaf, as in `jax.tree_util.tree_flatten_with_path`."""


def layer(path: Path) -> Path:
    """The group of a leaf: all but the last key of its path, so that a layer's weights and biases stay together."""
    return path[:-1]


class Subspaces(NamedTuple):
    """The subspaces of all groups, as one."""

    parts: tuple[Subspace, ...]

    @property
    def values(self) -> jax.Array:
        """θ of one group after the other."""
        return jnp.concatenate([part.values for part in self.parts])

    def combine(self, weights: jax.Array) -> Tree:
        """B S diag(w) SᵀBᵀg in each group."""
        return _joined([part.combine(w) for part, w in self._split(weights)])

    def predicted_change(self, weights: jax.Array) -> jax.Array:
        """The sum of what each group's model predicts."""
        return jnp.sum(jnp.stack([part.predicted_change(w) for part, w in self._split(weights)]))

    def _split(self, weights: jax.Array) -> list[tuple[Subspace, jax.Array]]:
        pieces, start = [], 0
        for part in self.parts:
            pieces.append((part, weights[start : start + part.values.size]))
            start += part.values.size
        return pieces


@dataclasses.dataclass(frozen=True)
class blockwise(Solver):
    """Any solver, for each group of parameters by itself: the block-diagonal curvature of the paper's Section 4.3.

    Args:
      solver: what solves each block; `exact(average=0.95)` gives dense blocks with a moving average.
      group: function from a leaf's path to its group, anything hashable; leaves of one group form a block. Without it
        a layer is a group: the leaves that share all but the last key of their path.

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

    def __post_init__(self) -> None:
        check_solver(self.solver)
        if not callable(self.group):
            raise ValueError(f"group must be a function from a leaf's path to its group, got {self.group!r}")

    @property
    def keeps_basis(self) -> bool:
        """As its solver."""
        return self.solver.keeps_basis

    @property
    def averages(self) -> bool:
        """As its solver."""
        return self.solver.averages

    @property
    def remembers(self) -> bool:
        """As its solver."""
        return self.solver.remembers

    def weights(self, values: jax.Array, damping: jax.Array) -> jax.Array:
        """As its solver."""
        return self.solver.weights(values, damping)

    def init(self, gradient: Tree) -> tuple[Any, ...]:
        """A state for each block."""
        return tuple(self.solver.init(block) for block in self._blocks(gradient))

    def solve(self, system: System, state: tuple[Any, ...]) -> Solution:
        """Solves block by block."""
        solutions = []
        for g, memory in zip(self._blocks(system.gradient), state, strict=True):
            block = system._replace(
                curvature=lambda part=None, g=g: system.curvature(g if part is None else part),
                gradient=g,
                previous=None if system.previous is None else tree.select(g, system.previous),
            )
            solutions.append(self.solver.solve(block, memory))
        direction = _joined([solution.direction for solution in solutions])
        stats = {name: _reduced(name, [s.stats[name] for s in solutions]) for name in solutions[0].stats}
        subspaces: Any = Subspaces(tuple(s.subspace for s in solutions)) if self.keeps_basis else None  # type: ignore[misc]
        return Solution(direction, stats, tuple(s.state for s in solutions), subspaces)

    def _blocks(self, gradient: Tree) -> list[Tree]:
        """The gradient once for each group, with None for the leaves of others."""
        leaves, treedef = jax.tree.flatten_with_path(gradient)
        groups = [self.group(path) for path, _ in leaves]
        return [
            jax.tree.unflatten(treedef, [x if g == name else None for g, (_, x) in zip(groups, leaves, strict=True)])
            for name in dict.fromkeys(groups)
        ]


def _joined(blocks: list[Tree]) -> Tree:
    """One tree from trees that each have None for the others' leaves."""
    first, *others = blocks
    for block in others:
        first = tree.fill(first, block)
    return first


def _reduced(name: str, values: list[jax.Array]) -> jax.Array:
    numbers = jnp.stack(values)
    if name == "products":
        return jnp.sum(numbers, dtype=numbers.dtype)
    return jnp.min(numbers) if name.startswith("smallest") else jnp.max(numbers)
