"""Low rank: curvature that is decomposed now and then, and used in every step.

Symbols: g the gradient, m the averaged gradient, B the orthonormal basis that k products build, BᵀHB = S diag(θ) Sᵀ and
Q = B S, so that H_k = Q diag(θ) Qᵀ. Between decompositions a step costs one gradient and a few products with the k × P
matrix B. What the basis does not span is the work of a base:

    without one, plain gradient descent:   d = (|H_k| + λI)⁻¹ m = m/λ + Q (1/(|θ| + λ) − 1/λ) Qᵀm,
    with one:                              d = Q (|θ| + λ)⁻¹ Qᵀm,    u = base(g − QQᵀg),    rest = u − QQᵀu,

and the step is −η d + rest: η and λ govern the subspace, the base's own rate the rest (as in FOSI, Sivan et al. 2024).
The base also runs on the whole of g, in a state of its own, so that a rule can bound the step by what the base alone
would do.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import checks, model, space, spectrum
from saddlefree.model import Answer, Model, Rest, Result
from saddlefree.problem import Problem
from saddlefree.solvers import bases
from saddlefree.solvers.base import Solver
from saddlefree.space import Space, Vector


class Decomposition(NamedTuple):
    """H_k of the last refresh; zeros before the first one."""

    basis: Vector  # B, k stacked vectors
    values: jax.Array  # θ
    vectors: jax.Array  # S


class Average(NamedTuple):
    """Σ_t (1 − β) β^{n−t} g_t and the sum of its weights."""

    total: Vector
    weight: jax.Array


class LowRankState(NamedTuple):
    """The decomposition, the averages and the base's state."""

    age: jax.Array  # steps since the last refresh
    curvature: Decomposition
    average: Average | tuple[()]
    along: Average | tuple[()]  # of Bᵀg, beside a base: what B says of the average, without a pass over B
    base: Any  # the states of the base
    mean_gradient_norm: jax.Array


@checks.removed(
    metric="base=optax.adam(rate)",
    second_moment="base=optax.adam(rate, b2=…)",
    epsilon="base=optax.adam(rate, eps=…)",
    max_step="saddle_free_newton(max_step=…)",
)
@dataclasses.dataclass(frozen=True)
class low_rank(Solver):
    """Curvature of rank k, refreshed every T steps, over any Optax optimiser for the rest.

    Args:
      rank: k ≥ 0, the products of a refresh and the vectors it keeps; no more than there are parameters.
      refresh_every: T ≥ 1. `update` may say `refresh=` itself, a bool, which takes the place of the count. Where Python
        knows it (a static argument) no product is in a branch.
      averaging: β in [0, 1) of the averaged gradient m, which takes the place of a rule's momentum; None: m = g.
      base: an Optax optimiser such as `optax.adam(1e-3)`, with its own learning rate, for what the basis does not span;
        None: gradient descent at the rate η/λ. It runs in working precision, on the parameters' own tree; with many
        leaves `optax.flatten(optax.adam(1e-3))` compiles faster.
      surprise: a number > 1, or None for never. A gradient that is so many times longer than on average says that the
        basis is out of date, and it is then refreshed at once, but not within T/10 steps of the last time.

    A refresh starts Lanczos from the averaged gradient and the old basis together, so that what was found once is found
    again and sharpened. Under `vmap`, a refresh of one is paid for by all: `surprise=None`, or `refresh=` in `update`,
    makes them refresh in the same step.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([10.0, -4.0, 0.0]))
    >>> direction = sf.solve(low_rank(rank=3), lambda v: H @ v, jnp.ones(3), damping=1.0).direction
    >>> [round(float(x), 3) for x in direction]
    [0.091, 0.2, 1.0]

    Over Adam, with the rate that Adam has alone:

    >>> tx = sf.saddle_free_newton(solver=sf.low_rank(rank=2, base=optax.adam(1e-3)))
    >>> x = jnp.array([1.0, 1.0, 1.0])
    >>> loss = lambda x: 0.5 * x @ H @ x
    >>> updates, _ = tx.update(jax.grad(loss)(x), tx.init(x), x, value_fn=loss)
    >>> bool(0 < jnp.max(jnp.abs(updates)) <= 3.001e-3)
    True
    """

    rank: int = 20
    refresh_every: int = 100
    averaging: float | None = 0.9
    base: optax.GradientTransformation | None = None
    surprise: float | None = 4.0

    stats = ("products", "smallest_ritz", "largest_ritz")

    def __post_init__(self) -> None:
        checks.integer("rank", self.rank, low=0)
        checks.integer("refresh_every", self.refresh_every, low=1)
        if self.averaging is not None:
            checks.constant("averaging", self.averaging, 0, 1, open_high=True)
        if self.base is not None and not (hasattr(self.base, "init") and hasattr(self.base, "update")):
            raise ValueError(f"base must be None or an Optax optimiser such as optax.adam(1e-3), got {self.base!r}")
        if self.surprise is not None:
            checks.constant("surprise", self.surprise, 1, open_low=True)

    @property
    def has_momentum(self) -> bool:  # type: ignore[override]
        """The averaged gradient is the momentum."""
        return self.averaging is not None

    def _rank(self, layout: Space) -> int:
        return min(self.rank, max(layout.size, 1))

    def init(self, layout: Space) -> LowRankState:
        """No curvature and no averages; the first step refreshes."""
        k, dtype = self._rank(layout), layout.dtype
        return LowRankState(
            jnp.asarray(self.refresh_every, jnp.int32),
            Decomposition(space.stack(layout.zeros(), k), jnp.zeros(k, dtype), jnp.zeros((k, k), dtype)),
            () if self.averaging is None else Average(layout.zeros(), jnp.zeros((), dtype)),
            () if self.averaging is None or self.base is None else Average(jnp.zeros(k, dtype), jnp.zeros((), dtype)),
            () if self.base is None else bases.init(self.base, layout),
            jnp.zeros((), dtype),
        )

    def model(self, problem: Problem, dampings: jax.Array, state: LowRankState) -> tuple[Model, LowRankState]:
        """Refreshes where it is time, and takes what is known."""
        g = problem.gradient
        length = space.norm(g)
        finite = jnp.isfinite(length)
        m, average = g, state.average
        if self.averaging is not None and average:
            average = accumulated(finite, g, average, self.averaging)
            m = mean(finite, average)
        due, state = self._due(finite, length, problem.refresh, state)
        curvature, along = self._refreshed(due, problem, m, average, state)
        stats = {
            "products": jnp.where(due, self._rank(problem.space), 0).astype(jnp.int32),
            "smallest_ritz": jnp.min(curvature.values) if self.rank else jnp.zeros_like(length),
            "largest_ritz": jnp.max(curvature.values) if self.rank else jnp.zeros_like(length),
        }
        state = state._replace(curvature=curvature, average=average)
        if self.base is None:
            return LowRankModel(curvature, g, m, finite, stats), state
        slope = coordinates = space.project(curvature.basis, g)
        if self.averaging is not None and along:
            along = space.where(due, along, accumulated(finite, slope, along, self.averaging))
            coordinates = mean(finite, along)
        moved, base = bases.run(self.base, problem.space, curvature.basis, slope, g, finite, state.base)
        return BasedModel(curvature, coordinates, slope, moved, finite, stats), state._replace(along=along, base=base)

    def _due(
        self, finite: jax.Array, length: jax.Array, refresh: Any, state: LowRankState
    ) -> tuple[jax.Array, LowRankState]:
        """Whether to refresh now."""
        mean = state.mean_gradient_norm
        due = state.age >= self.refresh_every
        if self.surprise is not None:
            rested = state.age >= self.refresh_every // 10
            due |= rested & (length > self.surprise * mean) & (mean > 0)
        due = finite & (due if refresh is None else refresh)
        new_mean = jnp.where(mean > 0, 0.9 * mean + 0.1 * length, length)
        return due, state._replace(
            age=jnp.where(due, 0, state.age) + 1, mean_gradient_norm=jnp.where(finite, new_mean, mean)
        )

    def _refreshed(
        self, due: jax.Array, problem: Problem, m: Vector, average: Any, state: LowRankState
    ) -> tuple[Decomposition, Average | tuple[()]]:
        """The decomposition, a new one where it is due, and what its basis then says of the average."""
        old = state.curvature, state.along
        if not self.rank or problem.refresh is False:
            return old

        def decomposed(old: tuple[Decomposition, Any]) -> tuple[Decomposition, Any]:
            new = self._decomposed(problem, m, old[0])
            along = average._replace(total=space.project(new.basis, average.total)) if old[1] else ()
            return new, along

        return space.where(due, decomposed(old), old) if problem.refresh is True else space.when(due, decomposed, old)

    def _decomposed(self, problem: Problem, m: Vector, old: Decomposition) -> Decomposition:
        """k products with H, or the old decomposition where they are not finite."""
        k = self._rank(problem.space)
        recycled = space.combine(old.basis, jnp.sum(old.vectors, axis=1) * k**-0.5)
        start = space.axpy(1, space.normalise(m), recycled)
        basis, T, _ = spectrum.lanczos_decomposition(problem.product(), start, k)
        # Beyond the end of an exhausted space the basis is zero, and any eigenvalue will do: one of H's own range.
        T = T._replace(diagonal=jnp.where(T.reached(), T.diagonal, T.diagonal[0]))
        values, vectors = jnp.linalg.eigh(T.dense())
        # It is used in many steps, whose base sees what the basis leaves of a gradient.
        new = Decomposition(spectrum.sharpened(basis), values, vectors)
        return space.where(jnp.all(jnp.isfinite(values)), new, old)


def accumulated(finite: jax.Array, g: Vector, old: Average, beta: float) -> Average:
    """The average with one more vector in it, the old one where that is not finite."""

    # Guarded number by number, in the pass that makes them.
    def add(a: jax.Array, b: jax.Array | float) -> jax.Array:
        return jnp.where(finite, beta * a + (1 - beta) * b, a)

    return Average(jax.tree.map(add, old.total, g), add(old.weight, 1.0))


def mean(finite: jax.Array, average: Average) -> Vector:
    """m, with its bias corrected; NaN where the last vector was not finite."""
    return space.scale(jnp.where(finite, space.reciprocal(average.weight), jnp.nan), average.total)


@dataclasses.dataclass(frozen=True)
class LowRankModel:
    """H_k, and gradient descent for what it does not span; see the head of this file."""

    curvature: Decomposition
    gradient: Vector
    average: Vector
    finite: jax.Array
    stats: dict[str, jax.Array]

    def answer(self, damping: jax.Array) -> Answer:
        """d(λ), by two products with the basis."""
        coordinates = space.project(self.curvature.basis, self.average)
        inside, curved, code = _within(self.curvature, coordinates, damping, self.finite)
        # QQᵀm comes along in one pass over the basis.
        both = space.combine(self.curvature.basis, jnp.stack([inside, coordinates]))
        direction, outside = space.get(both, 0), space.sub(self.average, space.get(both, 1))
        # Where the basis spans m, what is left is rounding, which a small λ would magnify.
        rounding = 10 * spectrum.ORTHOGONAL * jnp.finfo(inside.dtype).eps * space.peak(self.average)
        missed = space.peak(outside) > rounding
        direction = space.axpy(jnp.where(missed, space.reciprocal(damping), 0), outside, direction)
        code = jnp.where(missed & (damping == 0), jnp.maximum(code, Result.SINGULAR), code)
        return Answer(direction, curved / 2 - space.dot(self.gradient, direction), code.astype(jnp.int32), {})


@dataclasses.dataclass(frozen=True)
class BasedModel:
    """H_k, and a base for what it does not span; see the head of this file.

    Attributes:
      curvature: H_k.
      coordinates: Bᵀm.
      slope: Bᵀg.
      moved: the base's update.
      finite: whether g is finite.
      stats: see `Model`.
    """

    curvature: Decomposition
    coordinates: jax.Array
    slope: jax.Array
    moved: bases.Moved
    finite: jax.Array
    stats: dict[str, jax.Array]

    def answer(self, damping: jax.Array) -> Answer:
        """d(λ) and u − QQᵀu, by one product with the basis."""
        inside, curved, code = _within(self.curvature, self.coordinates, damping, self.finite)
        both = space.combine(self.curvature.basis, jnp.stack([inside, self.moved.inside]))
        rest = Rest(space.sub(self.moved.update, space.get(both, 1)), self.moved.largest)
        return Answer(space.get(both, 0), curved / 2 - self.slope @ inside, code, {}, rest)


def _within(
    curvature: Decomposition, coordinates: jax.Array, damping: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """d(λ) inside of the basis from the coordinates Bᵀm: its own coordinates, dᵀH_k d, and the result."""
    _, values, vectors = curvature
    slope = vectors.T @ coordinates
    d = model.inverse(values, damping) * slope
    code = model.result_code(jnp.abs(values) + damping, model.cutoff(values), slope, finite)
    return vectors @ d, jnp.sum(values * d**2), code
