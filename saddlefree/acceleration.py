"""Series accelerators: the limit of a vector sequence from its last few partial sums.

The series solver adds vectors, s_n = a_0 + … + a_n, which converges slowly. An accelerator of order N reads the last
2N + 1 partial sums and returns a better estimate of their limit, by

- a recursion on the vectors themselves: `shanks`, `sablonniere`, `vector_rho`, `topological_rho`; or
- a sum Σ_j w_j s_{n+j} with Σ_j w_j = 1 and scalar weights: `pade`, `levin_t`, `levin_d2`.

It keeps at most 2N + 4 vectors, and never turns a finite last sum into NaN: where it breaks down it returns the last
good value, in the end the last sum itself.

>>> import jax.numpy as jnp
>>> accelerate(shanks(order=1), jnp.array([1.0, 1.5, 1.75]))
Array(2., dtype=float32)
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from saddlefree import checks, space
from saddlefree.space import Vector


@runtime_checkable
class Accelerator(Protocol):
    """What the series solver calls: `init`, exactly `num_sums` times `push`, then `limit`."""

    @property
    def order(self) -> int:
        """N; order 0 returns the last partial sum."""

    @property
    def num_sums(self) -> int:
        """The number of trailing partial sums to push."""

    def init(self, gradient: Vector, start: int) -> Any:
        """The state before the first push.

        Args:
          gradient: the vector y of ⟨y, ·⟩, with the shapes and dtypes of all terms and sums.
          start: the index n ≥ 0 of the first partial sum to be pushed.
        """

    def push(self, state: Any, term: Vector, partial_sum: Vector) -> Any:
        """The state after the next a_n and s_n; works as the body of a `lax` loop."""

    def limit(self, state: Any) -> Vector:
        """The accelerated limit."""


class RecursionState(NamedTuple):
    """The last ascending diagonal of the table."""

    diagonal: Vector  # e_{m−c}^(c) at index c, where s_m was pushed last
    depth: jax.Array  # columns 0, …, depth are good
    pushed: jax.Array
    probe: Vector  # y/‖y‖∞, or None where it is not used


@dataclasses.dataclass(frozen=True, repr=False)
class Recursion:
    """Wynn's kind of recursion: the table

        e_m^(−1) = 0,   e_m^(0) = s_m,   e_m^(c) = e_{m+1}^(c−2) + factor(c) b/⟨Δ, b⟩,   Δ = e_{m+1}^(c−1) − e_m^(c−1),

    with the limit e_0^(2N). Either b = Δ, and b/⟨Δ, b⟩ is the Samelson inverse of Δ (Wynn 1962); or, in the second
    topological form of Brezinski (1975), b = y for odd c and b = e_{m+2}^(c−2) − e_{m+1}^(c−2) for even c.

    A push turns one ascending diagonal c ↦ e_{m−c}^(c) into the next one in place: Algorithm 2 of the paper, whose
    ε^(c+2) must read ε^(c−2). A column, and with it all that would depend on it, is void where ‖Δ‖ is no more than the
    rounding error of its operands, where Δ ⟂ b, or where it overflows; the limit is the last even column before that.
    """

    name: str
    order: int
    factor: Callable[[jax.Array], jax.Array]
    topological: bool = False

    def __post_init__(self) -> None:
        checks.integer("order", self.order, low=0)

    def __repr__(self) -> str:
        return f"{self.name}(order={self.order})"

    @property
    def num_sums(self) -> int:
        """2N + 1."""
        return 2 * self.order + 1

    def init(self, gradient: Vector, start: int) -> RecursionState:
        """An empty table; all depends on differences of indices alone, so `start` does not matter."""
        checks.integer("start", start, low=0)
        probe = _normalise(gradient) if self.topological else None
        return RecursionState(
            space.stack(gradient, self.num_sums), jnp.array(-1, jnp.int32), jnp.array(0, jnp.int32), probe
        )

    def push(self, state: RecursionState, term: Vector, partial_sum: Vector) -> RecursionState:
        """The next ascending diagonal."""
        eps = _eps(partial_sum)

        def column(c: jax.Array, carry: tuple[Vector, ...]) -> tuple[Vector, ...]:
            diagonal, depth, new, old, older = carry
            # All reads come after the write: the other way round XLA would copy the whole stack in each iteration.
            diagonal = space.put(diagonal, new, c - 1)

            # The first difference is known without cancellation: worth a digit, and two for a long series.
            delta = space.where(c == 1, term, space.sub(new, old))
            length = space.peak(delta)
            good = jnp.isfinite(length) & (length > eps * jnp.maximum(space.peak(new), space.peak(old)))

            # Products of unscaled vectors underflow in float32; b/⟨Δ, b⟩ does not depend on the scale of b.
            length = jnp.where(good, length, 1)
            companion = delta = space.scale(1 / length, delta)
            if self.topological:
                step = space.sub(space.get(diagonal, jnp.maximum(c - 2, 0)), older)
                companion = space.where(c % 2 == 1, state.probe, _normalise(step))
            product = space.dot(delta, companion)
            good &= jnp.abs(product) > eps * space.norm(delta) * space.norm(companion)
            coefficient = jnp.asarray(self.factor(c), length.dtype) / jnp.where(good, product, 1) / length
            value = space.axpy(coefficient, companion, older)

            good &= (depth == c - 1) & (state.depth >= c - 1) & space.all_finite(value)
            return diagonal, jnp.where(good, c, depth), value, space.get(diagonal, c), old

        old, older = space.get(state.diagonal, 0), space.zeros_like(partial_sum)
        carry = state.diagonal, jnp.zeros_like(state.depth), partial_sum, old, older
        diagonal, depth, value, _, _ = lax.fori_loop(1, state.pushed + 1, column, carry)
        return RecursionState(space.put(diagonal, value, state.pushed), depth, state.pushed + 1, state.probe)

    def limit(self, state: RecursionState) -> Vector:
        """The highest good even column of the last diagonal."""
        return space.get(state.diagonal, state.depth - state.depth % 2)


def shanks(order: int) -> Recursion:
    """The Shanks transform by the vector ε-algorithm (Wynn 1956, 1962): factor(c) = 1.

    Exact for s_n = s + Σ_i q_iⁿ v_i with at most N vectors v_i and numbers q_i ≠ 1 (McLeod 1971).

    >>> accelerate(shanks(order=1), jnp.array([1.0, 1.5, 1.75]))
    Array(2., dtype=float32)
    """
    return Recursion("shanks", order, jnp.ones_like)


def sablonniere(order: int) -> Recursion:
    """The modified ε-algorithm of Sablonnière (1991), which the paper chose: factor(c) = ⌊c/2⌋ + 1.

    At order 1 it is `vector_rho`, exact for s_n = s + α/(n + β). High orders need digits: for the series of the paper
    (20 random H of size 30, 0.1 ≤ |λ| ≤ 1) rounding moved the limit of the first 2N + 1 sums by, relative to its norm,

        N          1              2              4              8
        float64    2e-16 (4e-16)  3e-15 (6e-15)  1e-12 (3e-12)  1e-08 (2e-07)    median (and largest)
        float32    1e-07 (3e-07)  2e-06 (3e-06)  5e-04 (2e-03)  9e-02 (3e-01)

    and up to seventy times more where four sums come before the window (still at most 3e-01).

    >>> accelerate(sablonniere(order=1), 2 + 1 / jnp.arange(1.0, 4.0)).round(5)
    Array(2., dtype=float32)
    """
    return Recursion("sablonniere", order, _sablonniere_factor)


def vector_rho(order: int) -> Recursion:
    """The vector ρ-algorithm (Wynn 1956; Osada 1991) with x_n = n: factor(c) = x_{m+c} − x_m = c.

    Made for errors like powers of 1/n; for numbers it is exact where s_n is a quotient of polynomials of degree ≤ N.

    >>> n = jnp.arange(1.0, 6.0)
    >>> accelerate(vector_rho(order=2), 2 + n / (n**2 + 1)).round(3)
    Array(2., dtype=float32)
    """
    return Recursion("vector_rho", order, _rho_factor)


def topological_rho(order: int) -> Recursion:
    """The topological ρ-algorithm (Osada 1991) with x_n = n: factor(c) = c, and ⟨y, ·⟩ in place of Samelson's inverse.

    Of Brezinski's two topological forms the second, since it needs no more than the last diagonal.

    >>> n = jnp.arange(1.0, 6.0)
    >>> accelerate(topological_rho(order=2), 2 + n / (n**2 + 1)).round(3)
    Array(2., dtype=float32)
    """
    return Recursion("topological_rho", order, _rho_factor, topological=True)


# Functions with a name, unlike lambdas, leave equal accelerators equal.
def _sablonniere_factor(c: jax.Array) -> jax.Array:
    return c // 2 + 1


def _rho_factor(c: jax.Array) -> jax.Array:
    return c


class WeightedState(NamedTuple):
    """All moments and the latest terms."""

    terms: Vector  # the terms which the weights reach, stacked
    total: Vector  # the last partial sum
    moments: jax.Array  # ⟨y, a_n⟩/‖y‖∞
    pushed: jax.Array
    start: jax.Array
    probe: Vector  # y/‖y‖∞


@dataclasses.dataclass(frozen=True, repr=False)
class Weighted:
    """Σ_j w_j s_{n+j} over the latest sums, with the weights that a transform of scalar series finds for the moments

        μ_n = ⟨y, a_n⟩,    y the gradient.

    The literature leaves open how these transforms extend to vectors. One set of weights for all entries, our choice,
    keeps the result in the Krylov space and independent of the basis; y = g makes all μ_n > 0 while V > λmax(H²).

    The last sum is returned instead where Σ_j |w_j| ≥ 1/eps, so that not one digit is left, or nothing is finite.
    """

    name: str
    order: int
    weights: Callable[[int, jax.Array, jax.Array], jax.Array]  # from N, the first index, and the moments up to a factor
    num_weights: int
    num_sums: int

    def __post_init__(self) -> None:
        checks.integer("order", self.order, low=0)

    def __repr__(self) -> str:
        return f"{self.name}(order={self.order})"

    def init(self, gradient: Vector, start: int) -> WeightedState:
        """No moments and no terms."""
        checks.integer("start", start, low=0)
        return WeightedState(
            terms=space.stack(gradient, max(self.num_weights - 1, 1)),
            total=space.zeros_like(gradient),
            moments=jnp.zeros(self.num_sums, space.scalar_dtype(gradient)),
            pushed=jnp.array(0, jnp.int32),
            start=jnp.array(start, jnp.int32),
            probe=_normalise(gradient),
        )

    def push(self, state: WeightedState, term: Vector, partial_sum: Vector) -> WeightedState:
        """Another moment and another term."""
        # Terms that no weight reaches go to the first place too, which a later one then takes.
        place = jnp.maximum(state.pushed - (self.num_sums - self.num_weights + 1), 0)
        return state._replace(
            terms=space.put(state.terms, term, place),
            total=partial_sum,
            moments=space.put(state.moments, space.dot(state.probe, term), state.pushed),
            pushed=state.pushed + 1,
        )

    def limit(self, state: WeightedState) -> Vector:
        """The weighted sum, as s_last − Σ_j (Σ_{i<j} w_i) a_j: weights are large, and terms smaller than sums."""
        if self.order == 0:
            return state.total
        weights = self.weights(self.order, state.start, _normalise(state.moments))
        sane = jnp.sum(jnp.abs(weights)) * _eps(state.total) < 1
        tails = jnp.cumsum(jnp.where(sane, weights, 0))[:-1]

        def correct(total: jax.Array, terms: jax.Array) -> jax.Array:
            # Not a matrix product, which accelerators would round to fewer digits.
            return total - jnp.sum(tails.astype(total.dtype).reshape(-1, *(1,) * total.ndim) * terms, axis=0)

        corrected = jax.tree.map(correct, state.total, state.terms)
        return space.where(sane & space.all_finite(corrected), corrected, state.total)


def pade(order: int) -> Weighted:
    """The vector Padé-type approximant (Graves-Morris 1994) whose denominator, of degree N, is that of the moments:

        Σ_j γ_j = 1,    Σ_j γ_j μ_{n+1+i+j} = 0 for i < N,    limit Σ_j γ_j s_{n+N+j},    j = 0, …, N.

    The same determinants define the second topological ε-algorithm (Brezinski 1975); for numbers it is `shanks`, at
    order 1 Aitken's Δ². Exact for s_n = s + Σ_i q_iⁿ v_i with at most N vectors v_i, none of them ⟂ y.

    >>> accelerate(pade(order=1), jnp.array([1.0, 1.5, 1.75]))
    Array(2., dtype=float32)
    """
    checks.integer("order", order, low=0)
    return Weighted("pade", order, _pade_weights, order + 1, 2 * order + 1)


def levin_t(order: int) -> Weighted:
    """Levin's t-transform (Levin 1973; Smith & Ford 1982) of the moments, with k = 2N and β = 1:

        w_j ∝ (−1)^j binom(k, j) (n + β + j)^{k−1} / μ_{n+j},    limit Σ_j w_j s_{n+j},    j = 0, …, k.

    >>> log2 = jnp.cumsum((-1.0) ** jnp.arange(7.0) / jnp.arange(1.0, 8.0))
    >>> accelerate(levin_t(order=3), log2).round(5)
    Array(0.69315, dtype=float32)
    """
    checks.integer("order", order, low=0)
    return Weighted("levin_t", order, _levin_t_weights, 2 * order + 1, 2 * order + 1)


def levin_d2(order: int) -> Weighted:
    """The d^(2)-transform (Levin & Sidi 1981; for vectors Osada 1996) of the moments, with R_l = l + 1:

        Σ_l w_l = 1,    Σ_l w_l R_l^{k−i} (∇^{k−1} μ)_l = 0 for k = 1, 2 and i < N,    limit Σ_l w_l s_l

    over the last 2N + 1 sums. The differences ∇μ_l = μ_l − μ_{l−1} are backward, so that the last sum counts (forward
    ones span the same asymptotic remainders), and need a term more: 2N + 2 sums are pushed, the first for its term.

    >>> spiral = jnp.cumsum(jnp.cos(jnp.arange(8.0)) / 2 ** jnp.arange(8.0))
    >>> accelerate(levin_d2(order=3), spiral).round(4)  # (4 − 2 cos 1)/(5 − 4 cos 1)
    Array(1.0284, dtype=float32)
    """
    checks.integer("order", order, low=0)
    return Weighted("levin_d2", order, _levin_d2_weights, 2 * order + 1, 2 * order + 1 + min(order, 1))


def _pade_weights(order: int, start: jax.Array, moments: jax.Array) -> jax.Array:
    del start
    return _annihilate(moments[1 + np.add.outer(np.arange(order), np.arange(order + 1))])


def _levin_t_weights(order: int, start: jax.Array, moments: jax.Array) -> jax.Array:
    k = 2 * order
    signed = jnp.array([(-1) ** j * math.comb(k, j) for j in range(k + 1)], moments.dtype)
    nodes = (start + 1 + jnp.arange(k + 1, dtype=start.dtype)).astype(moments.dtype)
    weights = signed * (nodes / nodes[-1]) ** (k - 1) / moments
    return weights / jnp.sum(weights)


def _levin_d2_weights(order: int, start: jax.Array, moments: jax.Array) -> jax.Array:
    nodes = (start + 2 + jnp.arange(2 * order + 1, dtype=start.dtype)).astype(moments.dtype)
    nodes /= nodes[-1]
    powers = nodes ** -jnp.arange(order, dtype=moments.dtype)[:, None]
    return _annihilate(jnp.concatenate([powers * nodes * moments[1:], powers * nodes**2 * jnp.diff(moments)]))


def _annihilate(remainders: jax.Array) -> jax.Array:
    """w with Σ_j w_j = 1 and Σ_j remainders_ij w_j = 0, of a system equilibrated by columns, then by rows."""
    columns = jnp.max(jnp.abs(remainders), axis=0)
    system = jnp.concatenate([1 / columns[None], remainders / columns])
    rows = jnp.max(jnp.abs(system), axis=1)
    right = jnp.zeros_like(rows).at[0].set(1 / rows[0])
    return jnp.linalg.solve(system / rows[:, None], right) / columns


def accelerate(accelerator: Accelerator, partial_sums: Vector, gradient: Vector = None) -> Vector:
    """The limit of s_0, s_1, … from the last `accelerator.num_sums` of them, in float32 at least.

    Args:
      accelerator: such as `sablonniere(order=N)`.
      partial_sums: a pytree of arrays that stack the sums along a first axis, or a list of pytrees.
      gradient: the vector y of ⟨y, ·⟩; by default s_0, of which the gradient is a multiple.

    >>> accelerate(sablonniere(order=0), [1.0, 1.5, 1.75])
    Array(1.75, dtype=float32)
    """
    if isinstance(partial_sums, list):
        partial_sums = jax.tree.map(lambda *sums: jnp.stack([jnp.asarray(s) for s in sums]), *partial_sums)
    sums = space.to_working(partial_sums)
    found, needed = min(s.shape[0] for s in jax.tree.leaves(sums)), accelerator.num_sums
    if found < needed:
        raise ValueError(f"partial_sums must be at least {needed} for {accelerator}, got {found}")
    first = jax.tree.map(lambda s: s[0], sums)
    return _accelerate(accelerator, sums, first if gradient is None else space.cast_like(gradient, first))


# Compiled once for each accelerator and shape, where an eager loop would be for each call.
@functools.partial(jax.jit, static_argnums=0)
def _accelerate(accelerator: Accelerator, sums: Vector, gradient: Vector) -> Vector:
    length, needed = jax.tree.leaves(sums)[0].shape[0], accelerator.num_sums
    terms = jax.tree.map(lambda s: jnp.concatenate([s[:1], s[1:] - s[:-1]]), sums)
    window = jax.tree.map(lambda x: x[-needed:], (terms, sums))
    state = accelerator.init(gradient, length - needed)
    state, _ = lax.scan(lambda state, pair: (accelerator.push(state, *pair), None), state, window)
    return accelerator.limit(state)


def _normalise(x: Vector) -> Vector:
    """x/‖x‖∞, and 0 where x is 0."""
    return space.scale(space.reciprocal(space.peak(x)), x)


def _eps(x: Vector) -> float:
    return float(jnp.finfo(space.scalar_dtype(x)).eps)
