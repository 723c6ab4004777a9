"""Low rank: curvature that is decomposed now and then, and used in every step.

Symbols: M a diagonal metric (the identity, or Adam's √v̂ + ε), m the averaged gradient, Ĥ = M₀^{−½} H M₀^{−½} with the
metric M₀ of the last refresh, B the orthonormal basis that k products build there and BᵀĤB = S diag(θ) Sᵀ, so that
Ĥ_k = Q diag(θ) Qᵀ with Q = B S. Between refreshes a step costs one gradient and two products with the k × P matrix B:

    d = M^{−½} (|Ĥ_k| + λI)⁻¹ M^{−½} m,    (|Ĥ_k| + λI)⁻¹ u = u/λ + Q diag(1/(|θ| + λ) − 1/λ) Qᵀu.

It is positive definite for every M. Where Ĥ_k says nothing it is SGD with momentum, or Adam, at the rate η/λ.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, spectrum, tree
from saddlefree.solvers.base import Solution, Solver, System
from saddlefree.tree import Tree

FEW = 32
"""Rows that are worth while to write out."""


class Decomposition(NamedTuple):
    """Ĥ_k of the last refresh."""

    basis: Tree  # B, k stacked vectors
    values: jax.Array  # θ
    vectors: jax.Array  # S


class LowRankState(NamedTuple):
    """The decomposition and the averages."""

    count: jax.Array  # type: ignore[assignment]  # Optax's name, which hides tuple.count
    age: jax.Array  # steps since the last refresh
    curvature: Decomposition
    average: Tree  # m, before its bias is corrected
    second: Tree  # v, or () where the metric is the identity
    usual: jax.Array  # the averaged norm of g


@dataclasses.dataclass(frozen=True)
class low_rank(Solver):
    """The step of SGD with momentum, or of Adam, with a curvature of rank k in it that is refreshed every T steps.

    Args:
      rank: k ≥ 0, the products of a refresh and the vectors it keeps; 0 is SGD with momentum, or Adam.
      refresh_every: T ≥ 1. `update` may say `refresh=` itself, a bool, which takes the place of the count. Where Python
        knows it (a static argument) no product is in a branch, where convolutions are slow on a CPU.
      averaging: β in [0, 1) of the averaged gradient, which takes the place of an optimiser's momentum: m ← β m + g,
        and with Adam's metric m ← β m + (1 − β) g.
      metric: "identity" or "adam".
      second_moment: β₂ in [0, 1) of Adam's metric.
      epsilon: ε > 0 of Adam's metric.
      max_step: the direction is shortened where its root mean square exceeds this number > 0.
      surprise: a number > 1, or None for never. A gradient that is so many times longer than usual says that the
        curvature has outgrown the basis, which is then refreshed at once, but not within T/10 steps of the last time.
      unroll: products in one turn of the compiled loop, or True for no loop at all.

    A refresh starts Lanczos from the averaged gradient and the old basis together, so that what was found once is found
    again and sharpened; it re-orthogonalises where half the digits of orthogonality would be lost (Simon 1984). Under
    `vmap`, a refresh of one is paid for by all: `surprise=None`, or `refresh=` in `update`, keeps them in step.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([10.0, -4.0, 0.0]))
    >>> direction = sf.solve(low_rank(rank=3), lambda v: H @ v, jnp.ones(3), damping=1.0).direction
    >>> [round(float(x), 3) for x in direction]
    [0.091, 0.2, 1.0]
    """

    rank: int = 20
    refresh_every: int = 100
    averaging: float = 0.9
    metric: Literal["identity", "adam"] = "identity"
    second_moment: float = 0.999
    epsilon: float = 1e-8
    max_step: float = 1.0
    surprise: float | None = 4.0
    unroll: int | bool = 1

    def __post_init__(self) -> None:
        checks.integer("rank", self.rank, low=0)
        checks.integer("refresh_every", self.refresh_every, low=1)
        checks.number("averaging", self.averaging, 0, 1, open_high=True)
        if self.metric not in ("identity", "adam"):
            raise ValueError(f"metric must be 'identity' or 'adam', got {self.metric!r}")
        checks.number("second_moment", self.second_moment, 0, 1, open_high=True)
        checks.number("epsilon", self.epsilon, 0, open_low=True)
        checks.number("max_step", self.max_step, 0, open_low=True)
        if self.surprise is not None:
            checks.number("surprise", self.surprise, 1, open_low=True)
        checks.unrolling(self.unroll)

    @property
    def averages(self) -> bool:
        """It has a momentum of its own."""
        return True

    def init(self, gradient: Tree) -> LowRankState:
        """No curvature and no averages; the first step refreshes."""
        zeros, dtype, k = tree.zeros_like(gradient), tree.scalar_dtype(gradient), self.rank
        return LowRankState(
            jnp.zeros((), jnp.int32),
            jnp.asarray(self.refresh_every, jnp.int32),
            Decomposition(tree.stack(gradient, k), jnp.zeros(k, dtype), jnp.zeros((k, k), dtype)),
            zeros,
            zeros if self.metric == "adam" else (),
            jnp.zeros((), dtype),
        )

    def solve(self, system: System, state: LowRankState) -> Solution:
        """Refreshes where it is time, and applies what is known."""
        # Scaled by 1 + 0·usual: of what comes straight from a matrix product, XLA sums the squares in a slower way.
        lam, strength = system.damping, tree.norm(tree.scale(1 + 0 * state.usual, system.gradient))
        finite = jnp.isfinite(strength)
        # Guarded number by number, in the pass that makes them: a choice between two states would copy the basis.
        state, m, root = self._averaged(finite, system.gradient, state)
        due, state = self._due(finite, strength, system.refresh, state)
        u = jax.tree.map(jnp.multiply, root, m)
        basis, values, vectors = curvature = self._refreshed(due, system, root, u, state.curvature)
        gain = 1 / (jnp.abs(values) + lam) - 1 / lam
        coordinates = vectors @ (gain * (vectors.T @ spectrum.project(basis, u)))
        direction = jax.tree.map(jnp.multiply, root, tree.axpy(1 / lam, u, _combined(basis, coordinates)))
        length = tree.norm(direction) / jnp.sqrt(jnp.asarray(max(tree.size(m), 1), lam.dtype))
        within = jnp.minimum(1, self.max_step * tree.reciprocal(length))
        stats = {
            "products": jnp.where(due, self.rank, 0).astype(jnp.int32),
            "smallest_ritz": jnp.min(values, initial=0),
            "largest_ritz": jnp.max(values, initial=0),
        }
        return Solution(
            tree.scale(jnp.where(finite, within, jnp.nan), direction), stats, state._replace(curvature=curvature)
        )

    def _averaged(self, finite: jax.Array, g: Tree, state: LowRankState) -> tuple[LowRankState, Tree, Tree]:
        """The state with the new averages, m with its bias corrected, and M^{−½}."""

        def average(decay: float, share: float, old: Tree, new: Tree) -> Tree:
            return jax.tree.map(lambda a, b: jnp.where(finite, decay * a + share * b, a), old, new)

        beta, beta2 = self.averaging, self.second_moment
        state = state._replace(count=state.count + finite.astype(jnp.int32))
        if self.metric == "identity":
            m = average(beta, 1, state.average, g)
            return state._replace(average=m), m, jax.tree.map(jnp.ones_like, g)
        first = average(beta, 1 - beta, state.average, g)
        second = average(beta2, 1 - beta2, state.second, jax.tree.map(jnp.square, g))
        n = state.count.astype(tree.scalar_dtype(g))
        m = tree.scale(1 / (1 - beta**n), first)
        v = tree.scale(1 / (1 - beta2**n), second)
        root = jax.tree.map(lambda v: 1 / jnp.sqrt(jnp.sqrt(v) + self.epsilon), v)
        return state._replace(average=first, second=second), m, root

    def _due(
        self, finite: jax.Array, strength: jax.Array, refresh: Any, state: LowRankState
    ) -> tuple[jax.Array, LowRankState]:
        """Whether to refresh now."""
        due = state.age >= self.refresh_every
        if self.surprise is not None:
            rested = state.age >= self.refresh_every // 10
            due |= rested & (strength > self.surprise * state.usual) & (state.usual > 0)
        due = finite & (due if refresh is None else refresh)
        usual = jnp.where(state.usual > 0, 0.9 * state.usual + 0.1 * strength, strength)
        return due, state._replace(age=jnp.where(due, 0, state.age) + 1, usual=jnp.where(finite, usual, state.usual))

    def _refreshed(self, due: jax.Array, system: System, root: Tree, u: Tree, old: Decomposition) -> Decomposition:
        """The decomposition, a new one where it is due."""
        if not self.rank or system.refresh is False:
            return old
        if system.refresh is True:
            return tree.where(due, self._decomposed(system, root, u, old), old)

        # A loop of at most one turn leaves the basis where it is, which `cond` alone would copy in each step; `cond`
        # inside the loop keeps the compiler from moving out of it, into each step, what does not depend on the basis.
        def turn(carry: tuple[Decomposition, jax.Array]) -> tuple[Decomposition, jax.Array]:
            old, _ = carry
            return jax.lax.cond(due, lambda: self._decomposed(system, root, u, old), lambda: old), jnp.array(False)

        return jax.lax.while_loop(lambda carry: carry[1], turn, (old, due))[0]

    def _decomposed(self, system: System, root: Tree, u: Tree, old: Decomposition) -> Decomposition:
        """k products with M^{−½} H M^{−½}, or the old decomposition where they are not finite."""
        matvec = system.curvature()
        scaled = lambda v: jax.tree.map(jnp.multiply, root, matvec(jax.tree.map(jnp.multiply, root, v)))  # noqa: E731
        recycled = spectrum.combine(old.basis, jnp.sum(old.vectors, axis=1) * self.rank**-0.5)
        start = tree.axpy(1, tree.normalise(u), recycled)
        basis, T, _ = spectrum.lanczos_decomposition(scaled, start, self.rank, self.unroll, semi=True)
        values, vectors = jnp.linalg.eigh(T.dense())
        return tree.where(jnp.all(jnp.isfinite(values)), Decomposition(basis, values, vectors), old)


def _combined(basis: Tree, coordinates: jax.Array) -> Tree:
    """B y, row by row where there are few: XLA makes one pass of that and what follows, and two of a matrix product."""
    if not 0 < coordinates.size <= FEW:
        return spectrum.combine(basis, coordinates)
    rows = [tree.scale(coordinates[j], tree.get(basis, j)) for j in range(coordinates.size)]
    return functools.reduce(lambda x, y: tree.axpy(1, x, y), rows)
