"""What `minimise` and `least_squares` choose where the user chooses nothing: the stages of a run.

The choice follows from the number of parameters P, from the residuals where there are any, and from what a run sees on
its way (`Stage.pace`, and steps without progress), never from the clock.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from saddlefree.descent import Stage
from saddlefree.optimiser import DEFAULT_ADAPTIVE
from saddlefree.optimiser import default_rule as rule_of_batches
from saddlefree.residuals import ResidualFn, count, pointwise
from saddlefree.rules.base import Rule, check_rule
from saddlefree.rules.noise_aware import noise_aware
from saddlefree.rules.search import damping_search
from saddlefree.solvers.base import Solver, check_solver
from saddlefree.solvers.quasi_newton import quasi_newton
from saddlefree.solvers.row_space import row_space
from saddlefree.space import Space

DENSE = 1_000
"""The most parameters for which a quasi-Newton matrix is kept whole from the start."""
MEMORY = 200
"""The updates of a quasi-Newton matrix that are kept for more parameters."""
FEW = 600
"""The most residuals, or parameters, for which Gauss-Newton steps are the first stage."""
PASSES = 100
"""The same where each of them takes a pass over all residuals."""
LEAST = 20
"""The fewest updates that are worth keeping: with less memory than that, |H| is the only stage."""
PACE = 0.02
"""How much ln f must fall in a Gauss-Newton step, on average, for these to go on."""

ON_FULL_BATCHES = dataclasses.replace(DEFAULT_ADAPTIVE, refresh_every=None)
"""The default solver of an optimiser without what it keeps for mini-batches."""
GAUSS_NEWTON = damping_search(spread=10.0, reach=1, share=0.5, lengths=6)
"""The rule of Gauss-Newton steps."""


def default_rule(solver: Solver) -> Rule:
    """The rule that a solver goes with on a full batch, where there is no other batch to judge by."""
    rule = rule_of_batches(solver)
    return rule.search if isinstance(rule, noise_aware) else rule


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
    """The stages of `minimise`: a self-scaled Broyden method, and |H| where that is stuck."""
    solver, last = quasi_newton(), Stage(ON_FULL_BATCHES, default_rule(ON_FULL_BATCHES))
    if layout.size > DENSE:
        # Two vectors an update; half as much again while they are compressed.
        vector = layout.size * jnp.dtype(layout.dtype).itemsize
        memory = min(MEMORY, solver.max_bytes // (3 * vector))
        if memory < LEAST:
            return (last,)
        # While terms are added to the matrix there are three more of its size.
        whole = layout.size * vector <= solver.max_bytes // 4
        solver = quasi_newton(memory, "ssbroyden", layout.size // 2 if whole else None)
    return Stage(solver, default_rule(solver), following=1), last._replace(following=0)


def choose_for_residuals(residual_fn: ResidualFn, layout: Space) -> tuple[Stage, ...]:
    """The stages of `least_squares`: where Gauss-Newton steps are cheap, these are first while they pay."""
    rest = choose(layout)
    solver, rows = row_space(), count(residual_fn, layout.like)
    needed = rows * layout.size * jnp.dtype(layout.dtype).itemsize
    # Otherwise each row or column of the Jacobian is a pass over all residuals.
    most = FEW if isinstance(residual_fn, pointwise) else PASSES
    if min(rows, layout.size) > most or needed > solver.max_bytes // 2:
        return rest
    first = Stage(solver, GAUSS_NEWTON, pace=PACE, following=1)
    after = [stage._replace(following=None if stage.following is None else stage.following + 1) for stage in rest]
    return first, *after
