"""What every solver is: it learns about the curvature, keeps it from step to step, and builds models of the loss."""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.curvature import MatVec, in_dtypes_of
from saddlefree.model import Answers, Model
from saddlefree.problem import Problem
from saddlefree.space import Scalar, Space, Tree, Vector


class Solver:
    """A frozen dataclass, equal and hashable by value; its memory is handed in and out, never kept.

    A solver of one's own inherits from this class. It says what its statistics are called and how many λ its models
    answer, and defines `init` and `model`:

    >>> import dataclasses
    >>> from saddlefree.model import Tabulated
    >>> @dataclasses.dataclass(frozen=True)
    ... class gradient_descent(Solver):
    ...     stats = ("products", "error")
    ...     answers = Answers.STATED
    ...
    ...     def init(self, layout):
    ...         return ()
    ...
    ...     def model(self, problem, dampings, state):
    ...         directions = [space.scale(1 / damping, problem.gradient) for damping in dampings]
    ...         errors, stats = jnp.zeros(len(dampings)), {"products": jnp.array(0)}
    ...         return Tabulated(dampings, directions, problem.gradient, errors, stats), state
    >>> solve(gradient_descent(), lambda v: v, jnp.array([1.0]), damping=0.5).direction
    Array([2.], dtype=float32)
    """

    stats: tuple[str, ...] = ("products",)
    """The names of the statistics of its models and their answers."""
    answers: Answers = Answers.ANY
    """For how many λ a model has an answer."""
    uses_previous: bool = False
    """Whether it uses the previous step."""
    has_momentum: bool = False
    """Whether momentum is in its model, so that a rule must have none."""
    needs: str | None = None
    """Why `solve` alone cannot serve it, or None."""

    def init(self, layout: Space) -> Any:
        """The state before the first step, for vectors of this layout."""
        raise NotImplementedError

    def model(self, problem: Problem, dampings: jax.Array, state: Any) -> tuple[Model, Any]:
        """The model at this point, and the state for the next one, which a non-finite number must never enter.

        Args:
          problem: gradient and curvature.
          dampings: the λ that the rule may ask for, a vector; its middle one may shape the model.
          state: of the step before.
        """
        raise NotImplementedError


class Solution(NamedTuple):
    """A direction and how it was found.

    >>> import saddlefree as sf
    >>> solution = sf.solve(sf.exact(), lambda v: 2 * v, jnp.ones(2), damping=0.0)
    >>> solution.direction, sorted(solution.stats)
    (Array([0.5, 0.5], dtype=float32), ['largest_eigenvalue', 'products', 'smallest_eigenvalue'])
    """

    direction: Tree  # ≈ (|H| + λI)⁻¹ g, shaped like g
    stats: dict[str, jax.Array]  # scalars, such as the products used
    state: Any  # what the solver remembers for its next call
    result: jax.Array  # a `Result`: 0 is fine


def forwarded(path: str) -> Any:
    """A property that is an attribute of a part, such as `solver.stats`: for what wraps a solver or a rule."""
    return property(operator.attrgetter(path))


def check_solver(solver: Any) -> None:
    """Refuses what is not a solver."""
    checks.kind("solver", solver, Solver, "a solver such as lanczos(), or your own that inherits from Solver")


def solve(solver: Solver, matvec: MatVec, gradient: Tree, damping: Scalar = 1e-2, state: Any = None) -> Solution:
    """One call of a solver: `direction` ≈ (|H| + λI)⁻¹ g, a saddle-free preconditioner for any purpose.

    Args:
      solver: such as `lanczos` or `exact`.
      matvec: v ↦ H v for vectors shaped like `gradient`, as `hessian` and `gauss_newton` return it.
      gradient: g, a pytree of real arrays.
      damping: λ ≥ 0; 0 is the pseudo-inverse.
      state: `Solution.state` of an earlier call, to go on from there.

    `result` is 0 where the direction is as good as the solver's statistics say; `saddlefree.Result` names other codes.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([2.0, -0.5]))
    >>> solution = sf.solve(sf.exact(), lambda v: H @ v, jnp.array([1.0, 1.0]), damping=0.0)
    >>> solution.direction, sf.Result(int(solution.result)).name
    (Array([0.5, 2. ], dtype=float32), 'FINE')
    """
    check_solver(solver)
    if solver.needs is not None:
        raise ValueError(f"solve cannot call {type(solver).__name__}: {solver.needs}")
    checks.number("damping", damping, 0)
    checks.real_parameters(gradient)
    gradient = jax.tree.map(jnp.asarray, gradient)
    layout = Space(gradient)
    state = solver.init(layout) if state is None else state
    lam = jnp.asarray(damping, layout.dtype)

    def operator(part: Tree) -> MatVec:
        zeros = space.zeros_like(gradient)
        return in_dtypes_of(part, lambda v: space.select(part, matvec(space.fill(v, zeros))))

    model, state = solver.model(Problem(layout, layout.pack(gradient), operator), lam[None], state)
    answer = model.answer(lam)
    return Solution(layout.unpack(answer.whole), {**model.stats, **answer.stats}, state, answer.result)


def keep_finite(new: Any, old: Any, *judged: Vector) -> Any:
    """The new state, or the old one where a number in `judged` is not finite."""
    return space.where(space.all_finite(judged), new, old)


def middle(dampings: jax.Array) -> jax.Array:
    """The λ in the middle of those that a rule stated, which may shape a model."""
    return dampings[dampings.shape[0] // 2]
