"""Exact saddle-free Newton: the Hessian as a matrix, its eigenvalues made positive one by one.

For what is small enough, and as the truth that other solvers are measured against:

    (|H| + λI)⁻¹ g = Q diag(1/(|hᵢ| + λ)) Qᵀ g,    H = Q diag(hᵢ) Qᵀ.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, tree
from saddlefree.curvature import MatVec
from saddlefree.solvers.base import Solution, Solver, System, solved
from saddlefree.tree import Scalar, Tree


class MovingAverage(NamedTuple):
    """Σ_t (1 − β) β^{n−t} H_t and the sum of its weights."""

    matrix: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True)
class exact(Solver):
    """The dense Hessian, decomposed: P products, P² memory and P³ time for P parameters.

    Args:
      threshold: eigenvalues with |h| below it, ≥ 0, are replaced: the paper's rule in place of damping.
      replacement: the eigenvalue, > 0, that takes their place.
      average: decay β in [0, 1) of a moving average of H over steps, C ← β C + (1 − β) H with its bias corrected (the
        paper's text has the weights the other way round); 0 keeps none.
      absolute: False leaves the signs of the eigenvalues, (H + λI)⁻¹ g: plain Newton, which is drawn to saddles.
      max_size: the largest P that it accepts.
      chunk: columns of H that are computed at a time.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([2.0, -0.5]))
    >>> sf.solve(exact(absolute=False), lambda v: H @ v, jnp.ones(2), damping=0.0).direction
    Array([ 0.5, -2. ], dtype=float32)
    >>> sf.solve(exact(threshold=1.0, replacement=4.0), lambda v: H @ v, jnp.ones(2), damping=0.0).direction
    Array([0.5 , 0.25], dtype=float32)
    """

    threshold: Scalar = 0.0
    replacement: Scalar = 1.0
    average: Scalar = 0.0
    absolute: bool = True
    max_size: int = 4096
    chunk: int = 64

    def __post_init__(self) -> None:
        checks.number("threshold", self.threshold, 0)
        checks.number("replacement", self.replacement, 0, open_low=True)
        checks.number("average", self.average, 0, 1, open_high=True)
        checks.integer("max_size", self.max_size, low=1)
        checks.integer("chunk", self.chunk, low=1)

    def init(self, gradient: Tree) -> MovingAverage | tuple[()]:
        """The moving average of the Hessian, where one is kept."""
        size = tree.size(gradient)
        if size > self.max_size:
            raise ValueError(
                f"exact decomposes a dense matrix and takes at most max_size={self.max_size} parameters, got {size}; "
                "raise max_size, or use a solver that needs products only, such as series"
            )
        if not self.average:
            return ()
        dtype = tree.scalar_dtype(gradient)
        return MovingAverage(jnp.zeros((size, size), dtype), jnp.zeros((), dtype))

    def solve(self, system: System, state: Any) -> Solution:
        """Decomposes the matrix and inverts it."""
        g, unravel = tree.ravel(system.gradient)
        H = dense(system.curvature(), g, unravel, self.chunk)
        before = state
        if self.average:
            beta = jnp.asarray(self.average, H.dtype)
            state = MovingAverage(beta * state.matrix + (1 - beta) * H, beta * state.weight + (1 - beta))
            H = state.matrix / state.weight
        values, vectors = jnp.linalg.eigh((H + H.T) / 2)
        size = jnp.abs(values)
        kept = size if self.absolute else values
        used = jnp.where(size < self.threshold, jnp.asarray(self.replacement, size.dtype), kept)
        direction = vectors @ ((vectors.T @ g) / (used + system.damping))
        stats = {
            "products": jnp.asarray(g.size, jnp.int32),
            "smallest_eigenvalue": values[0],
            "largest_eigenvalue": values[-1],
        }
        return solved(unravel(direction), stats, state, before)


def dense(matvec: MatVec, g: jax.Array, unravel: Callable[[jax.Array], Tree], chunk: int) -> jax.Array:
    """The matrix behind `matvec`, column by column, `chunk` of them at a time."""
    identity = jnp.eye(g.size, dtype=g.dtype)
    return jax.lax.map(lambda column: tree.ravel(matvec(unravel(column)))[0], identity, batch_size=chunk)
