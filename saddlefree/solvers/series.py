"""The paper's solver: (|H| + λI)⁻¹ g as a power series in I − H²/V (Section 3, Algorithms 1 and 2).

Symbols: Z = I − H²/V, δ = λ/√V, K terms, N the order of acceleration. Since |H| = √V (I − Z)^½,

    (|H| + λI)⁻¹ g = V^{-½} Σ_k c_k Z^k g,    where Σ_k c_k z^k = 1/(√(1−z) + δ);

λ = 0 is the paper's own series, c_k = binom(2k, k)/4^k. All c_k are positive, so for V > λmax(H²) each truncation is
positive definite, whatever λ, and grows towards the limit from below.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saddlefree import checks, space
from saddlefree.acceleration import Accelerator
from saddlefree.model import Answers, Tabulated
from saddlefree.problem import Problem
from saddlefree.scale import Scale, lanczos_bound
from saddlefree.solvers.base import Solver, keep_finite
from saddlefree.space import Space, Vector


@dataclasses.dataclass(frozen=True)
class series(Solver):
    """The first K terms of the series, on request extrapolated by an accelerator.

    It takes 2(K − 1) products beyond those of the scale. Without acceleration three vectors are alive whatever K is,
    with it 2N + a few.

    Args:
      num_terms: K ≥ 1; K = 1 is gradient descent with the step 1/(√V + λ).
      acceleration: such as `sablonniere(order=N)` with 2N + 1 ≤ K; None sums the terms.
      scale: the choice of V; `lower_bound(initial=100.0)` is the paper's.

    A rule that tries several λ costs no further product: the powers are shared, and each λ has its own sum. The
    statistics hold `scale`, V, and `error`, an estimate of the relative error from the ratio of the last two powers
    (for an accelerated series that of the plain one, from which it starts).

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([1.0, -0.5]))
    >>> solver = series(num_terms=18, acceleration=sf.sablonniere(order=2), scale=sf.fixed_scale(1.2))
    >>> direction = sf.solve(solver, lambda v: H @ v, jnp.ones(2), damping=0.1).direction
    >>> [round(float(x), 2) for x in direction]  # exactly: 1/1.1 = 0.91 and 1/0.6 = 1.67
    [0.91, 1.65]
    """

    num_terms: int
    acceleration: Accelerator | None = None
    scale: Scale = lanczos_bound()

    stats = ("products", "scale", "error")
    answers = Answers.STATED

    def __post_init__(self) -> None:
        checks.integer("num_terms", self.num_terms, low=1)
        checks.kind("scale", self.scale, Scale, "a scale such as lanczos_bound()")
        if self.acceleration is not None:
            checks.kind("acceleration", self.acceleration, Accelerator, "None or one such as shanks(order=2)")
        if self._num_pushed > self.num_terms:
            raise ValueError(
                f"num_terms must be a whole number ≥ {self._num_pushed} for {self.acceleration}, "
                f"got {self.num_terms}; take more terms or a lower order"
            )

    @property
    def _num_pushed(self) -> int:
        return 0 if self.acceleration is None else self.acceleration.num_sums

    def init(self, layout: Space) -> Any:
        """The scale's state."""
        return self.scale.init(layout.zeros())

    def model(self, problem: Problem, dampings: jax.Array, state: Any) -> tuple[Tabulated, Any]:
        """Sums the series, one sum for each λ."""
        matvec, gradient, accelerator = problem.product(), problem.gradient, self.acceleration
        measured = self.scale.measure(matvec, gradient, state)
        # A larger V is always admissible; this one keeps δ in the coefficients' range where H all but vanishes.
        V = jnp.maximum(measured.V, (jnp.max(dampings) / LARGEST_DELTA) ** 2)
        c = jax.vmap(lambda damping: coefficients(self.num_terms, damping / jnp.sqrt(V)), out_axes=1)(dampings)
        first_pushed = self.num_terms - self._num_pushed

        def squared(power: Vector) -> Vector:
            # As a loop H is compiled once, where two calls would be compiled twice.
            product = jax.lax.scan(lambda v, _: (matvec(v), None), power, None, length=2)[0]
            return space.axpy(-1 / V, product, power)

        def push(table: Any, term: Vector, total: Vector, due: bool | jax.Array) -> Any:
            if accelerator is None or due is False:
                return table
            if due is True:
                return accelerator.push(table, term, total)
            return jax.lax.cond(due, lambda: accelerator.push(table, term, total), lambda: table)

        def absorb(sums: list, power: Vector, c_k: jax.Array, due: bool | jax.Array) -> list:
            """The sums with the next power of Z in them."""
            terms = [space.scale(c, power) for c in c_k]
            totals = [space.axpy(1, term, total) for term, (total, _) in zip(terms, sums, strict=True)]
            tables = [push(table, a, s, due) for a, s, (_, table) in zip(terms, totals, sums, strict=True)]
            return list(zip(totals, tables, strict=True))

        def advance(carry: tuple[Vector, list], numbered: tuple[jax.Array, jax.Array]) -> tuple[tuple, jax.Array]:
            (old, sums), (k, c_k) = carry, numbered
            power = squared(old)
            ratio = space.norm(power) * space.reciprocal(space.norm(old))
            return (power, absorb(sums, power, c_k, True if first_pushed <= len(powers) else k >= first_pushed)), ratio

        # The powers Z⁰g and, where the scale came with H²g, Z¹g cost no further product.
        powers = [gradient]
        if measured.squared is not None:
            powers.append(space.axpy(-1 / V, measured.squared, gradient))
        powers = powers[: self.num_terms]
        table = accelerator and accelerator.init(gradient, first_pushed)
        sums = [(space.zeros_like(gradient), table) for _ in dampings]
        for k, power in enumerate(powers):
            sums = absorb(sums, power, c[k], k >= first_pushed)
        ratio = space.norm(power) * space.reciprocal(space.norm(gradient))
        if self.num_terms > len(powers):
            numbered = jnp.arange(len(powers), self.num_terms), c[len(powers) :]
            (power, sums), ratios = jax.lax.scan(advance, (power, sums), numbered)
            ratio = ratios[-1]

        limits = [total if accelerator is None else accelerator.limit(table) for total, table in sums]
        # What is left is at most c_K ‖Z^K g‖/(1 − r) while the powers shrink by the ratio r.
        left = jnp.clip(1 - ratio, jnp.finfo(V.dtype).eps, 1)
        lengths = jnp.stack([space.norm(total) for total, _ in sums])
        errors = ratio * c[-1] * space.norm(power) / left * space.reciprocal(lengths)
        products = measured.products + 2 * (self.num_terms - len(powers))
        stats = {"products": jnp.asarray(products, jnp.int32), "scale": V}
        directions = [space.scale(1 / jnp.sqrt(V), limit) for limit in limits]
        found = Tabulated(dampings, directions, gradient, errors, stats)
        return found, keep_finite(measured.state, state, V, *directions)


LARGEST_DELTA = 100.0


def coefficients(num_terms: int, delta: jax.Array) -> jax.Array:
    """c_0 … c_{K−1} of 1/(√(1−z) + δ) = Σ c_k z^k, for any δ in [0, 100], traced or not, in δ's dtype.

    c_k = (2/π) ∫₀^∞ u²/(u² + δ²) (1 + u²)^{−k−1} du. With u = eˢ the trapezoid rule converges exponentially, and
    nothing cancels: a constant table times 1/(1 + (δ/u)²). (The recursion (1 − δ²) c_k = c_{k−1} + (−1)^k binom(½, k)
    amplifies rounding by (1 − δ²)^{−k} and has no answer at δ = 1.)

    >>> coefficients(4, jnp.array(0.0)).round(4)  # binom(2k, k)/4^k
    Array([1.    , 0.5   , 0.375 , 0.3125], dtype=float32)
    """
    u, table = _coefficient_table(num_terms, np.dtype(delta.dtype))
    return jnp.matmul(jnp.asarray(table), 1 / (1 + jnp.square(delta / jnp.asarray(u))), precision="highest")


@functools.cache
def _coefficient_table(num_terms: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The nodes u and (2/π)·step·u·(1 + u²)^{−k−1}, one row for each k."""
    step, reach = (0.25, 18.0) if dtype == np.float32 else (0.14, 42.0)
    u = np.exp(np.arange(-reach, reach + step / 2, step))
    k = np.arange(num_terms)[:, None]
    table = 2 / np.pi * step * np.exp(np.log(u) - (k + 1) * np.log1p(u**2))
    return u.astype(dtype), table.astype(dtype)
