"""Low rank: curvature that is decomposed now and then, and used in every step.

Symbols: M a diagonal metric (the identity, or Adam's √v̂ + ε), m the averaged gradient, Ĥ = M₀^{−½} H M₀^{−½} with the
metric M₀ of the last refresh, and Ĥ_k = Q diag(θ) Qᵀ what k products tell of it. Between refreshes a step costs one
gradient and two products with the k × P matrix Q:

    d = M^{−½} (|Ĥ_k| + λI)⁻¹ M^{−½} m,    (|Ĥ_k| + λI)⁻¹ u = u/λ + Q diag(1/(|θ| + λ) − 1/λ) Qᵀu.

It is positive definite for every M. Where Ĥ_k says nothing it is SGD with momentum, or Adam, at the rate η/λ.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, spectrum, tree
from saddlefree.solvers.base import Solution, System
from saddlefree.tree import Tree


class LowRankState(NamedTuple):
    """The decomposition and the averages."""

    count: jax.Array  # type: ignore[assignment]  # Optax's name, which hides tuple.count
    basis: Tree  # Q, k stacked vectors
    values: jax.Array  # θ
    average: Tree  # m, before its bias is corrected
    second: Tree  # v, or () where the metric is the identity


@dataclasses.dataclass(frozen=True)
class low_rank:
    """The step of SGD with momentum, or of Adam, with a curvature of rank k in it that is refreshed every T steps.

    Args:
      rank: k ≥ 0, the products of a refresh and the vectors it keeps; 0 is SGD with momentum, or Adam.
      refresh_every: T ≥ 1. `update` may say `refresh=` itself, an unbatched bool, which takes the place of the count;
        under `vmap` it should, because a count that is mapped makes each step pay for a refresh.
      averaging: β in [0, 1) of the averaged gradient, which takes the place of an optimiser's momentum: m ← β m + g,
        and with Adam's metric m ← β m + (1 − β) g.
      metric: "identity" or "adam".
      second_moment: β₂ in [0, 1) of Adam's metric.
      epsilon: ε > 0 of Adam's metric.
      max_step: the direction is shortened where its root mean square exceeds this number > 0.
      unroll: products in one turn of the compiled loop, or True for no loop at all.

    A refresh starts Lanczos from the averaged gradient and the old basis together, so that what was found once is found
    again and sharpened.

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
        checks.unrolling(self.unroll)

    @property
    def averages(self) -> bool:
        """It has a momentum of its own."""
        return True

    def init(self, gradient: Tree) -> LowRankState:
        """No curvature and no averages; the first step refreshes."""
        zeros = tree.zeros_like(gradient)
        return LowRankState(
            jnp.zeros((), jnp.int32),
            tree.stack(gradient, self.rank),
            jnp.zeros(self.rank, tree.scalar_dtype(gradient)),
            zeros,
            zeros if self.metric == "adam" else (),
        )

    def solve(self, system: System, state: LowRankState) -> Solution:
        """Refreshes where it is time, and applies what is known."""
        state, m, root = self._averaged(system.gradient, state)
        u = jax.tree.map(jnp.multiply, root, m)
        due = state.count % self.refresh_every == 0 if system.refresh is None else jnp.asarray(system.refresh)
        if self.rank:
            basis, values = jax.lax.cond(
                due,
                lambda: self._refresh(system, root, u, state.basis),
                lambda: (state.basis, state.values),
            )
            state = state._replace(basis=basis, values=values)
        lam = system.damping
        gain = 1 / (jnp.abs(state.values) + lam) - 1 / lam
        correction = spectrum.combine(state.basis, gain * spectrum.project(state.basis, u))
        direction = jax.tree.map(jnp.multiply, root, tree.axpy(1 / lam, u, correction))
        length = tree.norm(direction) / jnp.sqrt(jnp.asarray(max(tree.size(m), 1), lam.dtype))
        direction = tree.scale(jnp.minimum(1, self.max_step * tree.reciprocal(length)), direction)
        stats = {
            "products": jnp.where(due, self.rank, 0).astype(jnp.int32),
            "smallest_ritz": jnp.min(state.values, initial=0),
            "largest_ritz": jnp.max(state.values, initial=0),
        }
        return Solution(direction, stats, state._replace(count=state.count + 1))

    def _averaged(self, g: Tree, state: LowRankState) -> tuple[LowRankState, Tree, Tree]:
        """The state with the new averages, m with its bias corrected, and M^{−½}."""
        beta, beta2 = self.averaging, self.second_moment
        if self.metric == "identity":
            m = tree.axpy(beta, state.average, g)
            return state._replace(average=m), m, jax.tree.map(jnp.ones_like, g)
        average = jax.tree.map(lambda m, x: beta * m + (1 - beta) * x, state.average, g)
        second = jax.tree.map(lambda v, x: beta2 * v + (1 - beta2) * x**2, state.second, g)
        n = (state.count + 1).astype(tree.scalar_dtype(g))
        m = tree.scale(1 / (1 - beta**n), average)
        v = tree.scale(1 / (1 - beta2**n), second)
        root = jax.tree.map(lambda v: 1 / jnp.sqrt(jnp.sqrt(v) + self.epsilon), v)
        return state._replace(average=average, second=second), m, root

    def _refresh(self, system: System, root: Tree, u: Tree, old: Tree) -> tuple[Tree, jax.Array]:
        """k products with M^{−½} H M^{−½}: the Ritz vectors, stacked, and values."""
        matvec = system.curvature()
        scaled = lambda v: jax.tree.map(jnp.multiply, root, matvec(jax.tree.map(jnp.multiply, root, v)))  # noqa: E731
        share = jnp.full(self.rank, self.rank**-0.5, tree.scalar_dtype(u))
        start = tree.axpy(1, tree.normalise(u), spectrum.combine(old, share))
        basis, T, _ = spectrum.lanczos_decomposition(scaled, start, self.rank, self.unroll)
        values, vectors = jnp.linalg.eigh(T.dense())
        return jax.tree.map(lambda Q: jnp.tensordot(vectors.T.astype(Q.dtype), Q, axes=1), basis), values
