"""What every solver is: a way from products with H to the direction (|H| + λI)⁻¹ g."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, tree
from saddlefree.curvature import MatVec, block_of
from saddlefree.spectrum import combine
from saddlefree.tree import Scalar, Tree


class System(NamedTuple):
    """What is to be solved: (|H| + λI) d = g."""

    # Prepares the product with H, or with its block for a gradient whose other leaves are None. Called only where
    # products are needed.
    curvature: Callable[..., MatVec]
    gradient: Tree
    damping: jax.Array
    previous: Tree = None  # the previous update, where there was one
    refresh: Any = None  # a bool: whether what a solver refreshes now and then is due


class Subspace(NamedTuple):
    """H and g as an orthonormal basis B sees them: BᵀHB = S diag(θ) Sᵀ."""

    basis: Tree  # B, stacked
    values: jax.Array  # θ
    vectors: jax.Array  # S
    slope: jax.Array  # SᵀBᵀg

    def combine(self, weights: jax.Array) -> Tree:
        """B S diag(w) SᵀBᵀg."""
        return combine(self.basis, self.vectors @ (weights * self.slope))

    def predicted_change(self, weights: jax.Array) -> jax.Array:
        """m(s) = gᵀs + ½ sᵀHs of the step s = −B S diag(w) SᵀBᵀg."""
        return jnp.sum((self.values * weights / 2 - 1) * weights * self.slope**2)


class Solution(NamedTuple):
    """A direction and how it was found."""

    direction: Tree  # ≈ (|H| + λI)⁻¹ g, shaped like g
    stats: dict[str, jax.Array]  # scalars, such as the products used
    state: Any  # what the solver remembers for its next call; as before where the direction is not finite
    subspace: Subspace | None = None  # where the solver works in one


def solved(
    direction: Tree, stats: dict[str, jax.Array], state: Any, before: Any, subspace: Subspace | None = None
) -> Solution:
    """The solution, with the state from `before` where the direction is not finite."""
    return Solution(direction, stats, tree.where(tree.all_finite(direction), state, before), subspace)


class Solver:
    """A frozen dataclass, equal and hashable by value; its memory is handed in and out, never kept.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class gradient_descent(Solver):
    ...     def init(self, gradient):
    ...         return ()
    ...
    ...     def solve(self, system, state):
    ...         return Solution(tree.scale(1 / system.damping, system.gradient), {}, state)
    >>> solve(gradient_descent(), lambda v: v, jnp.array([1.0]), damping=0.5).direction
    Array([2.], dtype=float32)
    """

    @property
    def keeps_basis(self) -> bool:
        """Whether its solutions have a subspace, in which every λ can be tried by its `weights`."""
        return False

    @property
    def averages(self) -> bool:
        """Whether it averages gradients, which takes the place of momentum."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether it uses the previous update."""
        return False

    def weights(self, values: jax.Array, damping: jax.Array) -> jax.Array:
        """f(θ) for the eigenvalues θ of its subspace; only where `keeps_basis`."""
        raise NotImplementedError

    def init(self, gradient: Tree) -> Any:
        """The state before the first call, for gradients shaped like this one."""
        raise NotImplementedError

    def solve(self, system: System, state: Any) -> Solution:
        """The direction, and the state for the next call, which a non-finite number must never enter."""
        raise NotImplementedError


def check_solver(solver: Any) -> None:
    """Refuses what is not a solver."""
    checks.kind("solver", solver, Solver, "a solver such as lanczos(), or your own that inherits from Solver")


def solve(solver: Solver, matvec: MatVec, gradient: Tree, damping: Scalar = 1e-2, state: Any = None) -> Solution:
    """One call of a solver: `direction` ≈ (|H| + λI)⁻¹ g, a saddle-free preconditioner for any purpose.

    Args:
      solver: such as `series` or `exact`.
      matvec: v ↦ H v for vectors shaped like `gradient`, as `hessian` and `gauss_newton` return it.
      gradient: g, a pytree of real arrays.
      damping: λ ≥ 0.
      state: `Solution.state` of an earlier call, to go on from there.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([2.0, -0.5]))
    >>> sf.solve(sf.exact(), lambda v: H @ v, jnp.array([1.0, 1.0]), damping=0.0).direction
    Array([0.5, 2. ], dtype=float32)
    """
    check_solver(solver)
    checks.number("damping", damping, 0)
    checks.real_parameters(gradient)
    g = tree.to_working(gradient)
    state = solver.init(g) if state is None else state

    def curvature(part: Tree = None) -> MatVec:
        return block_of(matvec, gradient if part is None else part, gradient)

    system = System(curvature, g, jnp.asarray(damping, tree.scalar_dtype(g)))
    solution = solver.solve(system, state)
    return solution._replace(direction=tree.cast_like(solution.direction, gradient), subspace=None)
