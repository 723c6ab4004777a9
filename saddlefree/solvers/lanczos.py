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
from saddlefree.solvers import kept, recycling
from saddlefree.solvers.base import Solver, keep_finite, middle
from saddlefree.solvers.low_rank import Average, accumulated, mean
from saddlefree.solvers.recycling import Recycled
from saddlefree.space import Space, Vector


class LanczosState(NamedTuple):
    """What is remembered; () where it is not asked for."""

    updates: Vector  # those before the previous one
    recycled: Any  # Ritz pairs
    kept: Any  # see `kept.Kept`


class Found(NamedTuple):
    """What products have shown: a basis B, BᵀHB = S diag(θ) Sᵀ, and the solver's next state."""

    basis: Vector
    values: jax.Array
    vectors: jax.Array
    slope: jax.Array  # SᵀBᵀg
    alive: jax.Array  # the basis vectors that are not zero
    made: jax.Array  # the Krylov vectors among them, and 0 once the space was exhausted, where the direction is exact
    products: jax.Array
    state: LanczosState


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
      refresh_every: None, or T ≥ 1, beside `recycle`. Where a rule finds that batches differ (`noise_aware`), products
        are made 1, 2, 4, … steps apart, and from then on in every T-th step. Each step then takes the kept Ritz pairs,
        at most 20 of them, with a gradient averaged over batches (β = 0.9), and what they do not span moves as Adam
        does, at a rate that the next batch judges (`next_batch_rate`). Of more than 400,000 parameters fewer pairs are
        kept, as many as hold 16 million numbers, and at least 10. `update` may say `refresh=` itself. Under `vmap`,
        products of one are paid for by all. The state has up to 24 + m + `memory` vectors more.
      tolerance: stop growing the basis when the last vectors' share of the direction falls below this number in
        (0, 1); m is then the largest number of products. None takes all m.
      two_pass: keep three vectors instead of m, by running twice without re-orthogonalisation: 2m − 1 products.

    The statistics hold `error`, the last (up to four) vectors' share as an estimate of the relative error, often a few
    times too small (with `two_pass` what the Ritz values' residuals say where that is more, often ten times too large);
    the extreme Ritz values of the space of this step, which with `recycle` holds little of the curvature that is known
    already; and `negative_share`, the share of ‖g‖² in directions of negative curvature. With `refresh_every`,
    `bulk_rate` is the rate of Adam outside of the kept pairs, 0 where every step makes products.

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
    refresh_every: int | None = None
    tolerance: float | None = None
    two_pass: bool = False

    def __post_init__(self) -> None:
        checks.integer("num_products", self.num_products, low=1)
        checks.choice("damping_form", self.damping_form, ("abs", "sqrt"))
        checks.integer("memory", self.memory, low=0)
        checks.integer("recycle", self.recycle, low=0)
        checks.switch("two_pass", self.two_pass)
        if self.tolerance is not None:
            checks.constant("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        if self.refresh_every is not None:
            checks.integer("refresh_every", self.refresh_every, low=1)
            if not self.recycle:
                raise ValueError(
                    "recycle must be at least 1 beside refresh_every: its Ritz pairs are used between products, got 0"
                )
        if self.recycle and self.tolerance is not None:
            raise ValueError(f"recycle takes all products: tolerance must be None beside it, got {self.tolerance!r}")
        if self.two_pass and (self.tolerance is not None or self.memory or self.recycle):
            raise ValueError(
                "two_pass keeps no basis: tolerance must be None, memory and recycle 0 beside it, "
                f"got tolerance={self.tolerance!r}, memory={self.memory!r}, recycle={self.recycle!r}"
            )

    @property
    def stats(self) -> tuple[str, ...]:  # type: ignore[override]
        """With the rate of what kept pairs do not span, where pairs are kept."""
        rate = () if self.refresh_every is None else ("bulk_rate",)
        return ("products", "error", "smallest_ritz", "largest_ritz", "negative_share", *rate)

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
        steps = spectrum.krylov_size(self.num_products, layout.zeros())
        recycle = self.recycle if self.refresh_every is None else kept.capacity(layout, self.recycle)
        return LanczosState(
            space.stack(layout.zeros(), self.memory - 1) if self.memory > 1 else (),
            recycling.empty(layout, recycle) if recycle else (),
            () if self.refresh_every is None else kept.empty(layout, steps + self.memory, self.recycle),
        )

    def model(self, problem: Problem, dampings: jax.Array, state: LanczosState) -> tuple[Model, LanczosState]:
        """Builds the basis, or takes the pairs that are kept."""
        steps = spectrum.krylov_size(self.num_products, problem.gradient)
        if self.two_pass:
            return self._two_pass(problem.product(), problem.gradient, dampings, steps), state
        if self.refresh_every is not None and problem.noisy is not None:
            return self._sparing(problem, problem.noisy, dampings, steps, state, self.refresh_every)
        found = self._found(problem, problem.gradient, middle(dampings), steps, state)
        return self._spectral(found, steps), found.state

    def _spectral(self, found: Found, steps: int) -> Spectral:
        stats = self._stats(found.values, found.vectors, found.alive, found.slope, found.products)
        basis, values, vectors, slope = found[:4]
        return Spectral(basis, values, vectors, slope, stats, self.damping_form, measured=steps, error_count=found.made)

    def _found(self, problem: Problem, start: Vector, damping: jax.Array, steps: int, state: LanczosState) -> Found:
        """The space of H and `start`, by new products."""
        matvec, g = problem.product(), problem.gradient
        updates, new = self._remembered(problem, state)
        added = 0 if updates is None else space.length(updates)
        if self.recycle:
            found = recycling.krylov_space(matvec, start, updates, steps, state.recycled, damping)
            basis, matrix, products = found.basis, found.matrix, jnp.asarray(steps, jnp.int32)
            new = new._replace(recycled=recycling.merged(state.recycled, found))
            projected, alive = space.project(basis, g), jnp.any(matrix != 0, axis=1)
            exhausted = jnp.asarray(steps == space.size(g))
        else:
            stop = None if self.tolerance is None else self._suffices(damping, self.tolerance)
            basis, T, products = spectrum.lanczos_decomposition(matvec, start, steps, stop, spare=added)
            matrix, alive = jnp.pad(T.dense(), (0, added)), jnp.pad(T.reached(), (0, added))
            if updates is not None:
                basis, matrix = spectrum.extend(matvec, basis, matrix, steps, updates)
                alive = alive.at[steps:].set(jnp.any(matrix[steps:] != 0, axis=1))
            projected = jnp.zeros_like(matrix[0]).at[0].set(space.norm(g))
            exhausted = jnp.any(T.off_diagonal == 0)
            if stop is not None:  # which ends with a zero, too
                exhausted &= (products == steps) | ~stop(T, products)
        values, vectors = jnp.linalg.eigh(matrix)
        slope = vectors.T @ projected
        new = keep_finite(new, state, matrix, projected)
        made = jnp.where(exhausted, 0, products)
        return Found(basis, values, vectors, slope, alive, made, products + added, new)

    def _sparing(
        self,
        problem: Problem,
        noisy: jax.Array,
        dampings: jax.Array,
        steps: int,
        state: LanczosState,
        longest: int,
    ) -> tuple[kept.Either, LanczosState]:
        """Products in each step; where batches differ, now and then."""
        g, (age, interval, average, along, bulk, buffer, pairs) = problem.gradient, state.kept
        finite = jnp.isfinite(space.peak(g))
        average = accumulated(finite, g, average, kept.AVERAGING)
        due = finite & (age >= interval if problem.refresh is None else problem.refresh)
        fresh = ~noisy | due

        def build(old: tuple[Found, Recycled, Average]) -> tuple[Found, Recycled, Average]:
            start = space.where(noisy, mean(finite, average), g)
            found = self._found(problem, start, middle(dampings), steps, old[0].state)
            used = jax.tree.map(lambda x, kept: x[: len(kept)], found.state.recycled, old[1])
            return found, used, Average(space.project(used.basis, average.total), average.weight)

        state = state._replace(kept=())
        shapes = jax.eval_shape(lambda state: self._found(problem, g, dampings[0], steps, state), state)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes._replace(basis=(), state=()))
        # A buffer for the basis, because zeros would be written anew in each step.
        nothing = nothing._replace(basis=buffer, state=state)
        found, pairs, projected = space.when(fresh, build, (nothing, pairs, along))
        slope = space.project(pairs.basis, g)
        along = space.where(fresh, projected, accumulated(finite, slope, along, kept.AVERAGING))
        assert problem.loss is not None  # a rule that tells of noise compares losses
        moved, bulk = kept.moved(noisy, problem.space, pairs.basis, slope, g, problem.loss(None), bulk)
        known = kept.Pairs(pairs, mean(finite, along), slope, g, moved)
        model = kept.Either(self._spectral(found, steps), known, noisy)
        # Soon after the start, or after a full batch, H changes fast and little of it is known.
        longer = jnp.minimum(2 * interval, longest)
        interval = jnp.where(noisy, jnp.where(due, longer, interval), 1)
        new = kept.Kept(jnp.where(fresh, 0, age) + 1, interval, average, along, bulk, found.basis, pairs)
        return model, found.state._replace(kept=new)

    def _two_pass(self, matvec: Any, g: Vector, dampings: jax.Array, steps: int) -> Tabulated:
        T = spectrum.lanczos_coefficients(matvec, g, steps)
        values, vectors = jnp.linalg.eigh(T.dense())
        weights = model.inverse(values, dampings[0], self.damping_form)
        parts = weights * vectors[0]
        coordinates = vectors @ parts
        direction = spectrum.lanczos_combination(matvec, g, space.norm(g) * coordinates)
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
            **({} if self.refresh_every is None else {"bulk_rate": jnp.zeros_like(extreme)}),
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
