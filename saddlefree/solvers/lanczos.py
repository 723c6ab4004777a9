"""Lanczos: (|H| + λI)⁻¹ g in the Krylov space of H and g, where m products go furthest.

m products give an orthonormal basis B of span{g, Hg, …, H^{m−1}g} and the small matrix A = BᵀHB = S diag(θ) Sᵀ. In it

    d(λ) = B f(A) Bᵀg = B S diag(f(θ)) Sᵀ Bᵀg,    f(θ) = 1/(|θ| + λ)  or  (θ² + λ²)^{−½},

for every λ, without a new product. The series of as many products is a worse choice from the same space. With `recycle`
the space is a better one, preconditioned by what earlier steps learned of H (see `recycling`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, model, space, spectrum
from saddlefree.model import Answers, Form, Model, Spectral, Tabulated
from saddlefree.problem import Problem
from saddlefree.solvers import recycling
from saddlefree.solvers.base import Solver, keep_finite, middle
from saddlefree.space import Space, Vector


class LanczosState(NamedTuple):
    """What is remembered; () where it is not asked for."""

    updates: Vector  # those before the previous one
    recycled: Any  # Ritz pairs


@dataclasses.dataclass(frozen=True)
class lanczos(Solver):
    """The best direction from m products: an orthonormal Krylov basis of H and g, and f of the small matrix.

    Args:
      num_products: m ≥ 1, one product each.
      damping_form: "abs" is 1/(|h| + λ), as in all other solvers; "sqrt" is (h² + λ²)^{−½}, which lies between it and
        √2 times it, is smooth at h = 0 and converges in fewer products.
      memory: how many previous updates, ≥ 0, are added to the basis, one product each. The direction then holds the
        best momentum along with the best step; it takes effect in an optimiser, which knows the previous updates.
      recycle: k ≥ 0, how many Ritz vectors are kept from call to call, k vectors more in memory. They precondition the
        Krylov space, so that few products suffice where H changes slowly, as from step to step of an optimiser.
      tolerance: stop growing the basis when the last vectors' share of the direction falls below this number in
        (0, 1); m is then the largest number of products. None takes all m.
      two_pass: keep three vectors instead of m, by running twice without re-orthogonalisation: 2m − 1 products.
      unroll: products in one iteration of the compiled loop, or True for no loop at all.

    The statistics hold `error`, the last (up to four) vectors' share as an estimate of the relative error, often a few
    times too small (with `two_pass` what the Ritz values' residuals say where that is more, often ten times too large);
    the extreme Ritz values of the space of this step, which with `recycle` holds little of the curvature that is known
    already; and `negative_share`, the share of ‖g‖² in directions of negative curvature.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([2.0, -0.5, 1.0]))
    >>> solution = sf.solve(lanczos(num_products=3), lambda v: H @ v, jnp.ones(3), damping=0.0)
    >>> [round(float(x), 4) for x in solution.direction]
    [0.5, 2.0, 1.0]
    >>> round(float(solution.stats["negative_share"]), 4)
    0.3333

    With `recycle` the state keeps the largest of the Ritz values, and their vectors, for the next call:

    >>> solution = sf.solve(lanczos(num_products=3, recycle=2), lambda v: H @ v, jnp.ones(3), damping=0.0)
    >>> [round(float(x), 3) for x in solution.state.recycled.values]
    [2.0, 1.0]
    """

    num_products: int = 10
    damping_form: Form = "abs"
    memory: int = 0
    recycle: int = 0
    tolerance: float | None = None
    two_pass: bool = False
    unroll: int | bool = 1

    stats = ("products", "error", "smallest_ritz", "largest_ritz", "negative_share")

    def __post_init__(self) -> None:
        checks.integer("num_products", self.num_products, low=1)
        checks.choice("damping_form", self.damping_form, ("abs", "sqrt"))
        checks.integer("memory", self.memory, low=0)
        checks.integer("recycle", self.recycle, low=0)
        checks.switch("two_pass", self.two_pass)
        if self.tolerance is not None:
            checks.constant("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        if self.recycle and self.tolerance is not None:
            raise ValueError(f"recycle takes all products: tolerance must be None beside it, got {self.tolerance!r}")
        if self.two_pass and (self.tolerance is not None or self.memory or self.recycle):
            raise ValueError(
                "two_pass keeps no basis: tolerance must be None, memory and recycle 0 beside it, "
                f"got tolerance={self.tolerance!r}, memory={self.memory!r}, recycle={self.recycle!r}"
            )
        checks.unrolling(self.unroll)

    @property
    def answers(self) -> Answers:  # type: ignore[override]
        """Any λ, unless there is no basis."""
        return Answers.ONE if self.two_pass else Answers.ANY

    @property
    def uses_previous(self) -> bool:  # type: ignore[override]
        """Where previous updates join the basis."""
        return self.memory > 0

    @property
    def has_momentum(self) -> bool:  # type: ignore[override]
        """The previous update in the basis is the momentum."""
        return self.memory > 0

    def init(self, layout: Space) -> LanczosState:
        """No updates and no Ritz pairs."""
        return LanczosState(
            space.stack(layout.zeros(), self.memory - 1) if self.memory > 1 else (),
            recycling.empty(layout, self.recycle) if self.recycle else (),
        )

    def model(self, problem: Problem, dampings: jax.Array, state: LanczosState) -> tuple[Model, LanczosState]:
        """Builds the basis."""
        matvec, g = problem.product(), problem.gradient
        steps = spectrum.krylov_size(self.num_products, g)
        if self.two_pass:
            return self._two_pass(matvec, g, dampings, steps), state
        updates, new = self._remembered(problem, state)
        added = 0 if updates is None else space.length(updates)
        if self.recycle:
            found = recycling.krylov_space(matvec, g, updates, steps, state.recycled, middle(dampings), self.unroll)
            basis, matrix, products = found.basis, found.matrix, jnp.asarray(steps, jnp.int32)
            new = new._replace(recycled=recycling.merged(state.recycled, found))
            projected, alive = space.project(basis, g), jnp.any(matrix != 0, axis=1)
            exhausted = jnp.asarray(steps == space.size(g))
        else:
            stop = None if self.tolerance is None else self._suffices(middle(dampings), self.tolerance)
            basis, T, products = spectrum.lanczos_decomposition(matvec, g, steps, self.unroll, stop, spare=added)
            matrix, alive = jnp.pad(T.dense(), (0, added)), jnp.pad(T.reached(), (0, added))
            if updates is not None:
                basis, matrix = spectrum.extend(matvec, basis, matrix, steps, updates, self.unroll)
                alive = alive.at[steps:].set(jnp.any(matrix[steps:] != 0, axis=1))
            projected = jnp.zeros_like(matrix[0]).at[0].set(space.norm(g))
            exhausted = jnp.any(T.off_diagonal == 0)
            if stop is not None:  # which ends with a zero, too
                exhausted &= (products == steps) | ~stop(T, products)
        values, vectors = jnp.linalg.eigh(matrix)
        slope = vectors.T @ projected
        stats = self._stats(values, vectors, alive, slope, products + added)
        # In a space that is exhausted the direction is exact.
        made = jnp.where(exhausted, 0, products)
        result = Spectral(basis, values, vectors, slope, stats, self.damping_form, measured=steps, error_count=made)
        return result, keep_finite(new, state, matrix, projected)

    def _two_pass(self, matvec: Any, g: Vector, dampings: jax.Array, steps: int) -> Tabulated:
        T = spectrum.lanczos_coefficients(matvec, g, steps, self.unroll)
        values, vectors = jnp.linalg.eigh(T.dense())
        weights = model.inverse(values, dampings[0], self.damping_form)
        parts = weights * vectors[0]
        coordinates = vectors @ parts
        direction = spectrum.lanczos_combination(matvec, g, space.norm(g) * coordinates, self.unroll)
        # Without re-orthogonalisation the last share may be small by chance: a Ritz value is known to β_m |s_m|.
        doubt = T.off_diagonal[-1] * jnp.abs(vectors[-1]) * weights
        doubt = jnp.linalg.norm(doubt * parts) * space.reciprocal(jnp.linalg.norm(parts))
        error = jnp.maximum(model.last_share(coordinates, steps), doubt)
        error = jnp.where(jnp.any(T.off_diagonal == 0), 0, error)
        products = jnp.asarray(2 * steps - 1, jnp.int32)
        stats = self._stats(values, vectors, T.reached(), vectors[0], products)
        size = jnp.abs(values) + dampings[0]
        code = model.result_code(size, model.cutoff(values), vectors[0], jnp.array(True))
        return Tabulated(dampings, [direction], g, error[None], stats, code == model.Result.SINGULAR)

    def _stats(
        self, values: jax.Array, vectors: jax.Array, alive: jax.Array, slope: jax.Array, products: jax.Array
    ) -> dict[str, jax.Array]:
        """`alive`: the basis vectors that are not zero; `slope`: the coordinates of g along the Ritz vectors."""
        # A space that was exhausted has zero vectors, whose Ritz values say nothing of H.
        met = alive.astype(values.dtype) @ vectors**2 > 1e-3
        share = slope * space.reciprocal(jnp.linalg.norm(slope))
        extreme = jnp.where(jnp.any(met), 1, 0).astype(values.dtype)
        return {
            "products": products,
            "smallest_ritz": extreme * jnp.min(values, initial=jnp.max(values), where=met),
            "largest_ritz": extreme * jnp.max(values, initial=jnp.min(values), where=met),
            "negative_share": jnp.sum(jnp.where(values < -model.cutoff(values), share**2, 0)),
        }

    def _remembered(self, problem: Problem, state: LanczosState) -> tuple[Vector | None, LanczosState]:
        """The previous updates, the latest first, and the state with those of them to remember."""
        if not self.memory or problem.previous is None:
            return None, state
        latest = jax.tree.map(lambda x: x[None], problem.previous)
        if self.memory == 1:
            return latest, state
        updates = jax.tree.map(lambda x, older: jnp.concatenate([x, older]), latest, state.updates)
        return updates, state._replace(updates=jax.tree.map(lambda x: x[:-1], updates))

    def _suffices(self, damping: jax.Array, tolerance: float) -> spectrum.Stop:
        """Whether the last of the first j coordinates of f(T)e₁ are small."""

        def stop(T: spectrum.Tridiagonal, j: jax.Array) -> jax.Array:
            values, vectors = jnp.linalg.eigh(T._replace(off_diagonal=T.off_diagonal.at[j - 1].set(0)).dense())
            coordinates = vectors @ (model.inverse(values, damping, self.damping_form) * vectors[0])
            return model.last_share(coordinates, j) < tolerance

        return stop
