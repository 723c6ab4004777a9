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

from saddlefree import checks, tree
from saddlefree.acceleration import Accelerator
from saddlefree.scale import Scale, lanczos_bound
from saddlefree.solvers.base import Solution, Solver, System, solved
from saddlefree.tree import Tree


@dataclasses.dataclass(frozen=True)
class series(Solver):
    """The first K terms of the series, on request extrapolated by an accelerator.

    It takes 2(K − 1) products beyond those of the scale. Without acceleration three vectors are alive whatever K is,
    with it 2N + a few.

    Args:
      num_terms: K ≥ 1; K = 1 is gradient descent with the step 1/(√V + λ).
      acceleration: such as `sablonniere(order=N)` with 2N + 1 ≤ K; None sums the terms.
      scale: the choice of V; `lower_bound(initial=100.0)` is the paper's.
      unroll: terms in one turn of the compiled loop, or True for no loop at all: compiling then takes longer with
        each term, but convolutions on a CPU run several times faster outside of a loop.

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
    unroll: int | bool = 1

    def __post_init__(self) -> None:
        checks.integer("num_terms", self.num_terms, low=1)
        checks.unrolling(self.unroll)
        if self._num_pushed > self.num_terms:
            raise ValueError(
                f"num_terms must be a whole number ≥ {self._num_pushed} for {self.acceleration}, "
                f"got {self.num_terms}; take more terms or a lower order"
            )

    @property
    def _num_pushed(self) -> int:
        return 0 if self.acceleration is None else self.acceleration.num_sums

    def init(self, gradient: Tree) -> Any:
        """The scale's state."""
        return self.scale.init(gradient)

    def solve(self, system: System, state: Any) -> Solution:
        """Sums the series."""
        matvec, gradient, damping = system.curvature(), system.gradient, system.damping
        accelerator = self.acceleration
        measured = self.scale.measure(matvec, gradient, state, self.unroll)
        # A larger V is always admissible; this one keeps δ in the coefficients' range where H all but vanishes.
        V = jnp.maximum(measured.V, (damping / LARGEST_DELTA) ** 2)
        c = coefficients(self.num_terms, damping / jnp.sqrt(V))

        def absorb(power: Tree, total: Tree, table: Any, c_k: jax.Array, push: bool) -> tuple[Tree, Tree, Any]:
            term = tree.scale(c_k, power)
            total = tree.axpy(1, term, total)
            if accelerator is not None and push:
                table = accelerator.push(table, term, total)
            return power, total, table

        def advance(carry: tuple[Tree, Tree, Any], c_k: jax.Array, push: bool) -> tuple[tuple[Tree, Tree, Any], None]:
            power, total, table = carry
            power = tree.axpy(-1 / V, matvec(matvec(power)), power)
            return absorb(power, total, table, c_k, push), None

        # The powers Z⁰g and, where the scale came with H²g, Z¹g cost no further product.
        powers = [gradient]
        if measured.squared is not None:
            powers.append(tree.axpy(-1 / V, measured.squared, gradient))
        powers = powers[: self.num_terms]
        first_pushed = self.num_terms - self._num_pushed
        carry = gradient, tree.zeros_like(gradient), accelerator and accelerator.init(gradient, first_pushed)
        for k, power in enumerate(powers):
            carry = absorb(power, *carry[1:], c[k], push=k >= first_pushed)
        turn = max(first_pushed, len(powers))
        for c_k, push in ((c[len(powers) : turn], False), (c[turn:], True)):
            if len(c_k):
                carry, _ = jax.lax.scan(functools.partial(advance, push=push), carry, c_k, unroll=self.unroll)

        _, total, table = carry
        limit = total if accelerator is None else accelerator.limit(table)
        products = measured.products + 2 * (self.num_terms - len(powers))
        stats = {"products": jnp.asarray(products, jnp.int32), "scale": V}
        return solved(tree.scale(1 / jnp.sqrt(V), limit), stats, measured.state, state)


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
    return jnp.asarray(table) @ (1 / (1 + jnp.square(delta / jnp.asarray(u))))


@functools.cache
def _coefficient_table(num_terms: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The nodes u and (2/π)·step·u·(1 + u²)^{−k−1}, one row for each k."""
    step, reach = (0.25, 18.0) if dtype == np.float32 else (0.14, 42.0)
    u = np.exp(np.arange(-reach, reach + step / 2, step))
    k = np.arange(num_terms)[:, None]
    table = 2 / np.pi * step * np.exp(np.log(u) - (k + 1) * np.log1p(u**2))
    return u.astype(dtype), table.astype(dtype)
