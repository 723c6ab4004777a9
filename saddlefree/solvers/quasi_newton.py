"""Quasi-Newton: an inverse Hessian that is learned from gradients alone, without products.

With s = x − x₋ and y = g − g₋ from one point to the next, M ≈ H⁻¹ is changed so that M y = s. Methods differ in what
they change besides. Further symbols: b = sᵀM⁻¹s/(yᵀs), h = yᵀMy/(yᵀs), a = bh − 1 ≥ 0.

    M ← (1/τ) [M − My(My)ᵀ/(yᵀMy) + φ (yᵀMy) vvᵀ] + ssᵀ/(yᵀs),    v = s/(yᵀs) − My/(yᵀMy)

BFGS has φ = τ = 1. Self-scaled BFGS has φ = 1, τ = min(1, 1/b). Self-scaled Broyden (Al-Baali 1998; Al-Baali & Khalfan
2005; Urbán, Stefanou & Pons 2024) chooses both from a, b and h, see `_self_scaled_broyden`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answer, Answers, Result
from saddlefree.problem import Problem
from saddlefree.solvers import factors
from saddlefree.solvers.base import Solver
from saddlefree.solvers.factors import Terms
from saddlefree.space import Space, Vector

Update = Literal["ssbroyden", "ssbfgs", "bfgs"]


class Last(NamedTuple):
    """The last point, and the counters."""

    x: Vector
    gradient: Vector  # g
    direction: Vector  # M g
    seen: jax.Array  # whether there is a last point
    scale: jax.Array  # yᵀs/(yᵀy) of the last pair, with which a matrix begins anew
    pairs: jax.Array  # since the beginning, or since M was reset
    resets: jax.Array
    skipped: jax.Array


class DenseState(NamedTuple):
    """M = factor·matrix + terms; with `begun` False the matrix stands for the identity."""

    last: Last
    matrix: jax.Array  # (P, P); (0, 0) where memory is limited for ever
    begun: jax.Array
    factor: jax.Array
    terms: Terms

    def dense(self) -> jax.Array:
        """M as one matrix."""
        base = jnp.where(self.begun, self.matrix, jnp.eye(self.matrix.shape[0], dtype=self.matrix.dtype))
        return self.factor * base + factors.dense(self.terms)


class LimitedState(NamedTuple):
    """The last pairs, each divided by √(yᵀs), in a ring; those that are not there yet are 0."""

    last: Last
    s: Vector
    y: Vector


class Pair(NamedTuple):
    """What the step from the last point tells."""

    s: Vector
    y: Vector
    root: jax.Array  # √(yᵀs)
    scale: jax.Array  # yᵀs/(yᵀy); that of the pair before where this one is not usable, 1/‖g‖ where there is none
    b: jax.Array  # sᵀM⁻¹s/(yᵀs) where s = −αMg, otherwise 0: not known
    usable: jax.Array
    moved: jax.Array  # whether s or y is not 0
    finite: jax.Array  # whether x and g are


@dataclasses.dataclass(frozen=True)
class Direction:
    """d = M g, for λ = 0; the model's change is −½ gᵀd, since M⁻¹ is its curvature."""

    direction: Vector
    gradient: Vector
    stats: dict[str, jax.Array]

    def answer(self, damping: jax.Array) -> Answer:
        """d, whatever λ is: a pair of solver and rule that asks for λ > 0 is refused at construction."""
        d = self.direction
        result = jnp.where(space.all_finite(d), Result.FINE, Result.NONFINITE).astype(jnp.int32)
        return Answer(d, -space.dot(self.gradient, d) / 2, result, {})


@dataclasses.dataclass(frozen=True)
class quasi_newton(Solver):
    """d = M g with M ≈ H⁻¹ learned from the gradients of earlier steps: no products, one gradient a step.

    M begins as I/‖g‖ and is scaled by yᵀs/(yᵀMy) before its first update (Shanno & Phua 1978). It stays symmetric
    and positive definite. The step may be anything: where s is not −αMg (momentum, weight decay, chained
    transformations) M is updated by BFGS, where yᵀs is not safely positive it is left as it is (`skipped` counts), and
    where d is not a direction of descent, or the last one gave no step, M begins anew as yᵀs/(yᵀy) I (`resets` counts).

    Args:
      memory: None keeps M as a matrix: P² numbers and one product with it a step. A whole number ≥ 1 keeps as many
        updates instead, two vectors each: with "bfgs" the last pairs (s, y), by L-BFGS, which is BFGS with
        M = yᵀs/(yᵀy) I before the oldest of them; otherwise M = f·I + Σ wⱼvⱼvⱼᵀ, in places for the next multiple of 16
        updates, half of which are dropped where all are taken (see `factors`).
      update: "ssbroyden", "ssbfgs" or "bfgs". None is "ssbroyden" for a matrix and "bfgs" where memory is a number.
      whole_after: with `memory` and a self-scaled update, how many updates M learns before it becomes a matrix, ≥ 0:
        early steps are then as cheap as with a memory, and late ones forget nothing. None is never.
      max_bytes: the most that matrix or pairs may take, ≥ 1; it is checked before they are allocated.

    It answers λ = 0 only, and goes with `line_search`, the rule that `adaptive_saddle_free_newton` takes for it, or
    with `fixed_rate(…, damping=0)`.

    >>> import optax
    >>> import saddlefree as sf
    >>> valley = lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
    >>> tx, x = sf.adaptive_saddle_free_newton(sf.quasi_newton()), jnp.array([-1.0, 1.0])
    >>> state, update = tx.init(x), jax.jit(lambda g, state, x: tx.update(g, state, x, value_fn=valley))
    >>> for _ in range(50):
    ...     updates, state = update(jax.grad(valley)(x), state, x)
    ...     x = optax.apply_updates(x, updates)
    >>> x.round(2), int(sf.diagnostics(state)["products"])
    (Array([1., 1.], dtype=float32), 0)
    """

    memory: int | None = None
    update: Update | None = None
    whole_after: int | None = None
    max_bytes: int = 2**30

    stats = ("products", "resets", "skipped")
    answers = Answers.ZERO
    needs = "it learns from the gradients of earlier steps, and one call has none; use it in an optimiser"

    def __post_init__(self) -> None:
        names = ("ssbroyden", "ssbfgs", "bfgs")
        if self.memory is not None:
            checks.integer("memory", self.memory, low=1)
        if self.update is not None:
            checks.choice("update", self.update, names)
        if self.whole_after is not None:
            checks.integer("whole_after", self.whole_after, low=0)
            if self.memory is None or self._in_pairs:
                raise ValueError(
                    f"whole_after={self.whole_after} goes with a memory and update='ssbroyden' or 'ssbfgs', got "
                    f"memory={self.memory} and update={self.update!r}: pass both, or leave it out"
                )
        checks.integer("max_bytes", self.max_bytes, low=1)

    @property
    def _in_pairs(self) -> bool:
        """Whether memory holds pairs, by L-BFGS, and not terms."""
        return self.memory is not None and self.update in (None, "bfgs")

    @property
    def _has_matrix(self) -> bool:
        return self.memory is None or self.whole_after is not None

    def init(self, layout: Space) -> DenseState | LimitedState:
        """The identity, to be scaled by the first gradient."""
        size, width = layout.size, jnp.dtype(layout.dtype).itemsize
        side, updates = size if self._has_matrix else 0, _updates(size) if self.memory is None else self.memory
        needed = width * size * (side + 2 * updates)
        if needed > self.max_bytes:
            if self.memory is None:
                cure = "memory=100, which keeps pairs in place of a matrix"
            else:
                cure = "a smaller memory" if self.whole_after is None else "whole_after=None, which makes no matrix"
            raise ValueError(
                f"quasi_newton needs {needed:,} bytes for {size:,} parameters, more than max_bytes={self.max_bytes:,}: "
                f"pass {cure}, or a larger max_bytes"
            )
        zero, one = jnp.zeros((), jnp.int32), jnp.ones((), layout.dtype)

        def last(zeros: Any) -> Last:
            return Last(zeros(), zeros(), zeros(), jnp.array(False), one, zero + 0, zero + 0, zero + 0)

        if self.memory is not None and self._in_pairs:
            ring = lambda: space.stack(layout.zeros(), self.memory)  # noqa: E731
            return LimitedState(last(layout.zeros), ring(), ring())
        terms = factors.empty(updates, size, layout.dtype)
        matrix = jnp.zeros((side, side), layout.dtype)
        return DenseState(last(lambda: jnp.zeros(size, layout.dtype)), matrix, jnp.array(False), one + 0, terms)

    def model(self, problem: Problem, dampings: jax.Array, state: Any) -> tuple[Direction, Any]:
        """Learns from the step since the last point."""
        x, rounding = problem.space.pack(problem.space.like), problem.space.rounding
        if isinstance(state, DenseState):
            (x, _), (g, restore) = space.ravel(x), space.ravel(problem.gradient)
            direction, state = self._dense(x, g, state, rounding)
            direction = restore(direction)
        else:
            direction, state = self._limited(x, problem.gradient, state, rounding)
        last = state.last
        counters = {name: getattr(last, name).astype(problem.space.dtype) for name in ("resets", "skipped")}
        stats = {"products": jnp.zeros((), jnp.int32), **counters}
        return Direction(direction, problem.gradient, stats), state

    def _dense(self, x: jax.Array, g: jax.Array, state: DenseState, rounding: float) -> tuple[jax.Array, DenseState]:
        """M g and the new M, by one product with the old M.

        The product is M g; M y follows from the last direction, and the product of the new M with g from those of the
        vectors that are added to it.
        """
        last, terms = state.last, state.terms
        pair = _pair(last, x, g, rounding)
        based = g
        if self._has_matrix:
            based = space.when(state.begun, lambda _: jnp.dot(state.matrix, g, precision="highest"), g)
        Mg = state.factor * based + factors.product(terms, g)
        My = Mg - last.direction
        h = space.dot(space.scale(1 / pair.root, pair.y), space.scale(1 / pair.root, My))
        sound = (h > 0) & jnp.isfinite(h)
        h, b = jnp.where(sound, h, 1), pair.b
        # The first pair scales M so that yᵀMy = yᵀs.
        first = jnp.where(last.pairs == 0, 1 / h, 1)
        h, b = h * first, b / first
        phi, tau = self._coefficients(b, h, g.size)
        learns = pair.usable & sound
        factor = jnp.where(learns, first / tau, jnp.where(last.seen, 1, pair.scale))
        s, My = space.scale(1 / pair.root, pair.s), space.scale(first / pair.root, My)
        # ssᵀ − MyMyᵀ/(τh) + (φh/τ)vvᵀ with v = s − My/h, as a matrix in the space of s and My.
        spread = phi * h / tau
        rows = [[1 + spread, -spread / h], [-spread / h, spread / h**2 - 1 / (tau * h)]]
        vectors, weights = factors.diagonalised(s, My, jnp.stack([jnp.stack(row) for row in rows]))
        vectors = jnp.where(learns, vectors, 0)
        d = factor * Mg + jnp.where(learns, weights * (vectors @ g), 0) @ vectors
        d, new, reset = _finished(last, pair, x, g, d, learns, pair.usable & ~sound)
        terms = factors.joined(terms, factor, vectors, weights, learns)
        terms = space.where(reset, factors.cleared(terms), terms)
        total = jnp.where(reset, new.scale, factor * state.factor)
        state = DenseState(new, state.matrix, state.begun & ~reset, total, terms)
        return self._made_room(g, d, state)

    def _made_room(self, g: jax.Array, d: jax.Array, state: DenseState) -> tuple[jax.Array, DenseState]:
        """Where there is no place for another update, the terms are added to the matrix, or half of them dropped."""

        def gathered(old: DenseState) -> DenseState:
            one = jnp.ones_like(old.factor)
            return DenseState(old.last, old.dense(), jnp.array(True), one, factors.cleared(old.terms))

        def compressed(old: tuple[jax.Array, DenseState]) -> tuple[jax.Array, DenseState]:
            _, state = old
            terms = factors.compressed(state.terms, state.factor)
            d = state.factor * g + factors.product(terms, g)
            return d, state._replace(terms=terms, last=state.last._replace(direction=d))

        full, whole = factors.is_full(state.terms), jnp.array(self.memory is None)
        if self.whole_after is not None:
            whole = state.begun | (state.last.pairs >= self.whole_after)
        if self._has_matrix:
            state = space.when(full & whole, gathered, state)
        return (d, state) if self.memory is None else space.when(full & ~whole, compressed, (d, state))

    def _coefficients(self, b: jax.Array, h: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """φ and τ; those of BFGS where b is not known."""
        one, known = jnp.ones_like(b), b > 0
        b = jnp.where(known, b, 1)
        if self.update == "bfgs":
            return one, one
        phi, tau = (one, jnp.minimum(1, 1 / b)) if self.update == "ssbfgs" else _self_scaled_broyden(b, h, size)
        return jnp.where(known, phi, 1), jnp.where(known, tau, 1)

    def _limited(self, x: Vector, g: Vector, state: LimitedState, rounding: float) -> tuple[Vector, LimitedState]:
        """M g by the two loops of L-BFGS (Nocedal 1980), the newest pair included."""
        last, capacity = state.last, space.length(state.s)
        pair = _pair(last, x, g, rounding)
        index = last.pairs % capacity

        def put(ring: Vector, vector: Vector) -> Vector:
            new = space.scale(1 / pair.root, vector)
            return space.put(ring, space.where(pair.usable, new, space.get(ring, index)), index)

        S, Y = put(state.s, pair.s), put(state.y, pair.y)
        count = last.pairs + pair.usable.astype(jnp.int32)
        kept = jnp.minimum(count, capacity)

        def backward(i: jax.Array, carry: tuple[Vector, jax.Array]) -> tuple[Vector, jax.Array]:
            q, overlaps = carry
            j = (count - 1 - i) % capacity
            overlap = space.dot(space.get(S, j), q)
            return space.axpy(-overlap, space.get(Y, j), q), overlaps.at[j].set(overlap)

        def forward(i: jax.Array, d: Vector) -> Vector:
            j = (count - kept + i) % capacity
            return space.axpy(overlaps[j] - space.dot(space.get(Y, j), d), space.get(S, j), d)

        zero = jnp.zeros((), jnp.int32)
        q, overlaps = jax.lax.fori_loop(zero, kept, backward, (g, jnp.zeros(capacity, last.scale.dtype)))
        d = jax.lax.fori_loop(zero, kept, forward, space.scale(pair.scale, q))
        d, new, _ = _finished(last, pair, x, g, d, pair.usable, jnp.array(False))
        return d, LimitedState(new, S, Y)


def _updates(size: int) -> int:
    """How many updates are kept as terms before they become a part of the matrix."""
    return min(max(size // 8, 16), 512)


def _pair(last: Last, x: Vector, g: Vector, rounding: float) -> Pair:
    """s and y, and whether they can be used. Written with unit vectors, so that no square under- or overflows."""
    s, y, d = space.sub(x, last.x), space.sub(g, last.gradient), last.direction
    lengths, cosines = space.lengths_and_cosines(s, y, d, g, last.gradient, x, last.x)
    s_length, y_length, d_length, g_length, last_g_length, x_length, last_x_length = lengths
    cosine, eps = cosines[0, 1], jnp.finfo(lengths.dtype).eps
    # y is the difference of two rounded gradients.
    visible = 2 * eps * jnp.maximum(g_length, last_g_length)
    usable = last.seen & (cosine > eps) & (cosine * y_length > visible) & (s_length > 0)
    usable &= jnp.isfinite(s_length) & jnp.isfinite(y_length)
    # Where s = −αMg, M⁻¹s = −αg.
    aligned = -cosines[0, 2]
    apart = space.axpy(aligned * space.reciprocal(d_length), d, space.scale(space.reciprocal(s_length), s))
    off = jnp.sqrt(space.dot(apart, apart))
    exact = (off * s_length <= 8 * rounding * (x_length + last_x_length)) & (off < 0.1) & (aligned > 0)
    alpha = aligned * s_length * space.reciprocal(d_length)
    safe = jnp.where(usable, cosine * y_length, 1)
    b = -alpha * cosines[0, 4] * last_g_length / safe
    # The first direction has length 1, whatever the units of the loss are.
    begin = jnp.where((g_length > 0) & jnp.isfinite(g_length), space.reciprocal(g_length), 1)
    scale = jnp.where(usable, s_length * cosine * space.reciprocal(y_length), jnp.where(last.seen, last.scale, begin))
    root = jnp.where(usable, jnp.sqrt(safe) * jnp.sqrt(s_length), 1)
    moved = (s_length > 0) | (y_length > 0)
    finite = jnp.isfinite(x_length) & jnp.isfinite(g_length)
    b = jnp.where(usable & exact & jnp.isfinite(b), b, 0)
    return Pair(s, y, root, scale, b, usable, moved, finite)


def _finished(
    last: Last, pair: Pair, x: Vector, g: Vector, d: Vector, learns: jax.Array, failed: jax.Array
) -> tuple[Vector, Last, jax.Array]:
    """The direction, the state of this point, and whether M begins anew."""
    (d_length, g_length), cosines = space.lengths_and_cosines(d, g)
    descends, zero = cosines[0, 1] > jnp.finfo(last.scale.dtype).eps, g_length == 0
    # The same point again: the last direction was of no use.
    stuck = last.seen & ~pair.moved & (last.pairs > 0) & ~zero
    reset = pair.finite & (failed | stuck | ~(jnp.isfinite(d_length) & (descends | zero)))
    d = space.where(reset, space.scale(pair.scale, g), d)
    skipped = last.seen & pair.moved & ~learns
    new = Last(
        x,
        g,
        d,
        jnp.array(True),
        pair.scale,
        jnp.where(reset, 0, last.pairs + learns.astype(jnp.int32)),
        last.resets + reset.astype(jnp.int32),
        last.skipped + skipped.astype(jnp.int32),
    )
    return d, space.where(pair.finite, new, last), reset


def _self_scaled_broyden(b: jax.Array, h: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """φ and τ of the self-scaled Broyden method, from b and h.

    c = √(a/(1+a)),  r⁻ = min(1, h(1−c)),  θ = max((r⁻−1)/a, min(1/r⁻, (1−b)/b)), and θ = 0 where a < √ε or P = 1;
    σ = 1 + θa,  q = σ^{1/(1−P)},  r = min(1, 1/b);  τ = r·min(q, 1/θ) where θ > 0, otherwise min(rq, σ);
    φ = (1−θ)/(1+aθ).
    """
    a = jnp.maximum(b * h - 1, 0)
    simple = (a < jnp.sqrt(jnp.finfo(a.dtype).eps)) | (size == 1)
    a = jnp.where(simple, 1, a)
    c = jnp.sqrt(a / (1 + a))
    # 1 − c without cancellation.
    low = jnp.minimum(1, h / ((1 + a) * (1 + c)))
    theta = jnp.maximum((low - 1) / a, jnp.minimum(1 / low, (1 - b) / b))
    sigma = 1 + theta * a
    q = sigma ** (1 / (1 - max(size, 2)))
    r = jnp.minimum(1, 1 / b)
    positive = theta > 0
    tau = jnp.where(positive, r * jnp.minimum(q, 1 / jnp.where(positive, theta, 1)), jnp.minimum(r * q, sigma))
    return jnp.where(simple, 1, (1 - theta) / sigma), jnp.where(simple, r, tau)
