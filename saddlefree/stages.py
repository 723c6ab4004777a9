"""What `minimise` and `least_squares` choose where the user chooses nothing: the stages of a run.

The choice follows from the number of parameters P, from the residuals where there are any, and from what a run sees on
its way (`Stage.pace`, and steps without progress), never from the clock.
"""

from collections.abc import Callable

import jax.numpy as jnp

from saddlefree.descent import Stage
from saddlefree.optimiser import DEFAULT_ADAPTIVE, default_rule
from saddlefree.residuals import ResidualFn, count, pointwise
from saddlefree.rules.base import Rule, check_rule
from saddlefree.rules.search import damping_search
from saddlefree.solvers.base import Solver, check_solver
from saddlefree.solvers.quasi_newton import quasi_newton
from saddlefree.solvers.row_space import row_space
from saddlefree.space import Space

DENSE = 5_000
"""The most parameters, or residuals, for which a matrix of their number squared is the default."""
PASSES = 100
"""The most passes over all residuals in a step that are the default."""


def single(solver: Solver, rule: Rule | None = None) -> tuple[Stage, ...]:
    """One stage: the solver, and the rule that it goes with unless one is given."""
    check_solver(solver)
    rule = default_rule(solver) if rule is None else rule
    check_rule(rule, solver)
    return (Stage(solver, rule),)


def given(solver: Solver | None, rule: Rule | None, default: Callable[[], tuple[Stage, ...]]) -> tuple[Stage, ...]:
    """One stage where the user chooses a solver or a rule, otherwise the default."""
    if solver is not None:
        return single(solver, rule)
    return default() if rule is None else single(default()[0].solver, rule)


def choose(layout: Space) -> tuple[Stage, ...]:
    """The stages of `minimise`."""
    lanczos = Stage(DEFAULT_ADAPTIVE, default_rule(DEFAULT_ADAPTIVE))
    if layout.size > DENSE:
        return (lanczos,)
    solver = quasi_newton()
    # Where a quasi-Newton matrix is stuck, |H| goes on, and hands over again where it is stuck itself.
    return Stage(solver, default_rule(solver), following=1), lanczos._replace(following=0)


def choose_for_residuals(residual_fn: ResidualFn, layout: Space) -> tuple[Stage, ...]:
    """The stages of `least_squares`: Gauss-Newton with exact linear algebra first, where the matrices are little."""
    rest = choose(layout)
    solver, rows = row_space(), count(residual_fn, layout.like)
    needed = rows * layout.size * jnp.dtype(layout.dtype).itemsize
    # Otherwise each row or column of the Jacobian is a pass over all residuals.
    most = DENSE if isinstance(residual_fn, pointwise) else PASSES
    if min(rows, layout.size) > most or needed > solver.max_bytes // 2:
        return rest
    first = Stage(solver, damping_search(target=0.25), pace=0.05, following=1)
    after = [stage._replace(following=stage.following and stage.following + 1) for stage in rest]
    return first, *after
