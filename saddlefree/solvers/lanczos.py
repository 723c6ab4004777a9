"""Lanczos: (|H| + λI)⁻¹ g in the Krylov space of H and g, where m products go furthest.

m products give an orthonormal basis B of span{g, Hg, …, H^{m−1}g} and the small matrix A = BᵀHB = S diag(θ) Sᵀ. In it

    d(λ) = B f(A) Bᵀg = B S diag(f(θ)) Sᵀ Bᵀg,    f(θ) = 1/(|θ| + λ)  or  (θ² + λ²)^{−½},

for every λ, without a new product. The series of as many products is a worse choice from the same space. With `recycle`
the space is a better one, preconditioned by what earlier steps learned of H (see `recycling`).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, spectrum, tree
from saddlefree.curvature import MatVec
from saddlefree.solvers import recycling
from saddlefree.solvers.base import Solution, Solver, Subspace, System, solved
from saddlefree.tree import Tree

Form = Literal["abs", "sqrt"]


class LanczosState(NamedTuple):
    """What is remembered; () where it is not asked for."""

    updates: Tree  # those before the previous one
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
      tolerance: stop growing the basis when the last four vectors' share of the direction falls below this number in
        (0, 1); m is then the largest number of products. None takes all m.
      two_pass: keep three vectors instead of m, by running twice without re-orthogonalisation: 2m − 1 products.
      unroll: products in one turn of the compiled loop, or True for no loop at all.

    The statistics hold `error`, the last four vectors' share as an estimate of the relative error (often a few times
    too small), the extreme Ritz values and `negative_share`, the share of ‖g‖² in directions of negative curvature.

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

    def __post_init__(self) -> None:
        checks.integer("num_products", self.num_products, low=1)
        if self.damping_form not in ("abs", "sqrt"):
            raise ValueError(f"damping_form must be 'abs' or 'sqrt', got {self.damping_form!r}")
        checks.integer("memory", self.memory, low=0)
        checks.integer("recycle", self.recycle, low=0)
        if self.tolerance is not None:
            checks.number("tolerance", self.tolerance, 0, 1, open_low=True, open_high=True)
        if self.recycle and self.tolerance is not None:
            raise ValueError(f"recycle takes all products: tolerance must be None beside it, got {self.tolerance!r}")
        if self.two_pass and (self.tolerance is not None or self.memory or self.recycle):
            raise ValueError(
                "two_pass keeps no basis: tolerance must be None, memory and recycle 0 beside it, "
                f"got tolerance={self.tolerance!r}, memory={self.memory!r}, recycle={self.recycle!r}"
            )
        checks.unrolling(self.unroll)

    @property
    def keeps_basis(self) -> bool:
        """Whether its solutions have a subspace, in which every λ can be tried."""
        return not self.two_pass

    @property
    def remembers(self) -> bool:
        """Whether it uses the previous update."""
        return self.memory > 0

    def weights(self, values: jax.Array, damping: jax.Array) -> jax.Array:
        """f(θ), and 0 where that would be 1/0."""
        return tree.reciprocal(jnp.abs(values) + damping if self.damping_form == "abs" else jnp.hypot(values, damping))

    def init(self, gradient: Tree) -> LanczosState:
        """Nothing to remember yet, and room for it."""
        return LanczosState(
            tree.stack(gradient, self.memory - 1) if self.memory > 1 else (),
            recycling.nothing(gradient, self.recycle) if self.recycle else (),
        )

    def solve(self, system: System, state: LanczosState) -> Solution:
        """Builds the basis and applies f to the small matrix."""
        matvec, g = system.curvature(), system.gradient
        steps = spectrum.krylov_size(self.num_products, g)
        return (
            self._two_pass(matvec, system, steps, state)
            if self.two_pass
            else self._one_pass(matvec, system, steps, state)
        )

    def _one_pass(self, matvec: MatVec, system: System, steps: int, before: LanczosState) -> Solution:
        g, damping = system.gradient, system.damping
        updates, state = self._remembered(system, before)
        if self.recycle:
            space = recycling.krylov_space(matvec, g, updates, steps, before.recycled, damping, self.unroll)
            state = state._replace(recycled=recycling.merged(before.recycled, space))
            basis, matrix, products = space.basis, space.matrix, jnp.asarray(steps, jnp.int32)
            projected = spectrum.project(basis, g)
        else:
            stop = None if self.tolerance is None else self._suffices(damping, self.tolerance)
            basis, T, products = spectrum.lanczos_decomposition(matvec, g, steps, self.unroll, stop, spare=self.memory)
            matrix = jnp.pad(T.dense(), (0, self.memory))
            if self.memory:
                basis, matrix = spectrum.extend(matvec, basis, matrix, steps, updates, self.unroll)
            projected = jnp.zeros_like(matrix[0]).at[0].set(tree.norm(g))
        values, vectors = jnp.linalg.eigh(matrix)
        subspace = Subspace(basis, values, vectors, vectors.T @ projected)
        weights = self.weights(values, damping)
        coordinates = (vectors @ (weights * subspace.slope))[:steps]
        share = subspace.slope * tree.reciprocal(tree.norm(g))
        stats = self._stats(values, share, products + self.memory, _last_share(coordinates, products))
        return solved(subspace.combine(weights), stats, state, before, subspace)

    def _two_pass(self, matvec: MatVec, system: System, steps: int, state: LanczosState) -> Solution:
        g = system.gradient
        T = spectrum.lanczos_coefficients(matvec, g, steps, self.unroll)
        values, vectors = jnp.linalg.eigh(T.dense())
        coordinates = vectors @ (self.weights(values, system.damping) * vectors[0])
        direction = spectrum.lanczos_combination(matvec, g, tree.norm(g) * coordinates, self.unroll)
        products = jnp.asarray(2 * steps - 1, jnp.int32)
        return Solution(direction, self._stats(values, vectors[0], products, _last_share(coordinates, steps)), state)

    def _stats(
        self, values: jax.Array, share: jax.Array, products: jax.Array, error: jax.Array
    ) -> dict[str, jax.Array]:
        """`share`: the coordinates of g/‖g‖ along the Ritz vectors."""
        return {
            "products": products,
            "error": error,
            "smallest_ritz": values[0],
            "largest_ritz": values[-1],
            "negative_share": jnp.sum(jnp.where(values < 0, share**2, 0)),
        }

    def _remembered(self, system: System, state: LanczosState) -> tuple[Tree, LanczosState]:
        """The previous updates, the latest first, and the state with those of them to remember."""
        previous = tree.zeros_like(system.gradient) if system.previous is None else system.previous
        latest = jax.tree.map(lambda x: x[None], previous)
        if self.memory <= 1:
            return latest if self.memory else tree.stack(previous, 0), state
        updates = jax.tree.map(lambda x, older: jnp.concatenate([x, older]), latest, state.updates)
        return updates, state._replace(updates=jax.tree.map(lambda x: x[:-1], updates))

    def _suffices(self, damping: jax.Array, tolerance: float) -> spectrum.Stop:
        """Whether the last of the first j coordinates of f(T)e₁ are small."""

        def stop(T: spectrum.Tridiagonal, j: jax.Array) -> jax.Array:
            values, vectors = jnp.linalg.eigh(T._replace(off_diagonal=T.off_diagonal.at[j - 1].set(0)).dense())
            coordinates = vectors @ (self.weights(values, damping) * vectors[0])
            return _last_share(coordinates, j) < tolerance

        return stop


def _last_share(coordinates: jax.Array, count: jax.Array | int) -> jax.Array:
    """The norm of the last four of `count` coordinates over that of all; a single one may vanish by chance."""
    index = jnp.arange(coordinates.size, dtype=jnp.int32)
    last = jnp.where((index >= count - 4) & (index < count), coordinates, 0)
    return jnp.linalg.norm(last) * tree.reciprocal(jnp.linalg.norm(coordinates))
