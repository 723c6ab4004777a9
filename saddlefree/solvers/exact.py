"""Exact saddle-free Newton: the Hessian as a matrix, its eigenvalues made positive one by one.

For what is small enough, and as the truth that other solvers are measured against:

    (|H| + λI)⁻¹ g = Q diag(1/(|hᵢ| + λ)) Qᵀ g,    H = Q diag(hᵢ) Qᵀ.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.curvature import MatVec
from saddlefree.model import Spectral
from saddlefree.problem import Problem
from saddlefree.solvers.base import Solver, keep_finite
from saddlefree.space import Scalar, Space, Vector


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
        paper's text has the weights the other way round); None keeps none.
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
    average: Scalar | None = None
    absolute: bool = True
    max_size: int = 4096
    chunk: int = 64

    stats = ("products", "smallest_eigenvalue", "largest_eigenvalue")

    def __post_init__(self) -> None:
        checks.constant("threshold", self.threshold, 0)
        checks.constant("replacement", self.replacement, 0, open_low=True)
        if self.average is not None:
            checks.constant("average", self.average, 0, 1, open_high=True)
        checks.switch("absolute", self.absolute)
        checks.integer("max_size", self.max_size, low=1)
        checks.integer("chunk", self.chunk, low=1)

    def init(self, layout: Space) -> MovingAverage | tuple[()]:
        """The moving average of the Hessian, where one is kept."""
        if layout.size > self.max_size:
            raise ValueError(
                f"exact decomposes a dense matrix and takes at most max_size={self.max_size} parameters, got "
                f"{layout.size}; raise max_size, or use a solver that needs products only, such as lanczos"
            )
        if self.average is None:
            return ()
        return MovingAverage(jnp.zeros((layout.size, layout.size), layout.dtype), jnp.zeros((), layout.dtype))

    def model(self, problem: Problem, dampings: jax.Array, state: Any) -> tuple[Spectral, Any]:
        """Decomposes the matrix."""
        g, restore = space.ravel(problem.gradient)
        H = dense(problem.product(), g, restore, self.chunk)
        if self.average is not None:
            beta = jnp.asarray(self.average, H.dtype)
            new = MovingAverage(beta * state.matrix + (1 - beta) * H, beta * state.weight + (1 - beta))
            H, state = new.matrix / new.weight, keep_finite(new, state, new, g)
        values, vectors = jnp.linalg.eigh((H + H.T) / 2)
        stats = {
            "products": jnp.asarray(g.size, jnp.int32),
            "smallest_eigenvalue": values[0],
            "largest_eigenvalue": values[-1],
        }
        used = jnp.where(jnp.abs(values) < self.threshold, jnp.asarray(self.replacement, values.dtype), values)
        model = Spectral(None, used, vectors, vectors.T @ g, stats, absolute=self.absolute, restore=restore)
        return model, state


def dense(matvec: MatVec, g: jax.Array, restore: Callable[[jax.Array], Vector], chunk: int) -> jax.Array:
    """The matrix behind `matvec`, column by column, `chunk` of them at a time."""
    identity = jnp.eye(g.size, dtype=g.dtype)
    return jax.lax.map(lambda column: space.ravel(matvec(restore(column)))[0], identity, batch_size=chunk)
