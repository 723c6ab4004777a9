"""Minimising a smooth function from start to end: `minimise`, and `least_squares` for residuals.

Compiled chunks of steps are driven from the host. How long a chunk is follows from the clock, and changes no bit of
the result. Where the user chooses no solver, a run has stages, each with a solver of its own (`stages`). Where the
gradient is small, or no step makes progress, the smallest eigenvalue of the Hessian is measured from a random start, so
that a saddle is not taken for a minimum.
"""

import enum
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from saddlefree import checks, descent, space, stages
from saddlefree.descent import MinimiseState, Reason, Stage
from saddlefree.residuals import ResidualFn
from saddlefree.rules.base import Rule
from saddlefree.solvers.base import Solver
from saddlefree.space import Space, Tree


class Status(enum.IntEnum):
    """Why a run ended.

    >>> print(Status.STEPS.message)
    all steps were used (max_steps)
    """

    CONVERGED = 0
    STALLED = 1
    STEPS = 2
    TIME = 3
    STOPPED = 4
    NONFINITE = 5
    SADDLE = 6

    @property
    def message(self) -> str:
        """The same in words."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.CONVERGED: "the gradient is within the tolerance, and no negative curvature was found",
    Status.STALLED: "no step makes progress: the loss has stalled on rounding; float64 would help where it is not used",
    Status.STEPS: "all steps were used (max_steps)",
    Status.TIME: "the time was used (seconds)",
    Status.STOPPED: "the callback ended it",
    Status.NONFINITE: "the loss or its gradient is not finite; the best parameters before that are returned",
    Status.SADDLE: "the curvature is negative in a direction along which no lower loss was found",
}


Rows = dict[str, np.ndarray]
"""Columns of figures, one entry for each step."""


class Progress(NamedTuple):
    """What a callback is given."""

    steps: int
    value: float
    gradient_norm: float
    params: Tree
    seconds: float


class Minimum(NamedTuple):
    """The result of `minimise`.

    >>> Minimum._fields
    ('params', 'value', 'status', 'steps', 'history', 'summary', 'state')
    """

    params: Tree  # the best that were found
    value: jax.Array  # their loss
    status: Status
    steps: int  # all of them, those before `state=` too
    history: dict[str, np.ndarray]  # one entry for each step of this call
    summary: str  # which solvers were used, for how many steps and why they were left, and why the run ended
    state: MinimiseState  # for `state=`


class Descent:
    """A run that is driven by hand: `start`, then `advance` as often as one likes. `minimise` is made of it.

    Args:
      fn: the loss, or residuals where `residuals` holds.
      stages: of the run, as `saddlefree.stages` chooses them.
      residuals: the loss is then ½‖fn(params)‖².
      tolerance: see `minimise`.

    The state's structure is the same in all stages, and its bits do not depend on how steps are divided into calls.

    >>> from saddlefree import quasi_newton, stages
    >>> run = Descent(lambda x: jnp.sum(jnp.cosh(x)), stages.single(quasi_newton()))
    >>> state = run.start(jnp.ones(3))
    >>> state, rows, status = run.advance(state, 4)
    >>> rows["value"].shape, status
    ((4,), None)
    """

    def __init__(
        self,
        fn: Callable[[Tree], Any],
        stages: tuple[Stage, ...],
        residuals: bool = False,
        tolerance: float | None = None,
    ):
        self.stages, self.tolerance = stages, tolerance
        self._program = descent.program(fn, stages, residuals)

    def start(self, params: Tree, seed: int | jax.Array = 0) -> MinimiseState:
        """The state before the first step. It holds copies."""
        # Weak types would be lost in the first step, and the second compiled anew.
        params = jax.tree.map(lambda x: jnp.array(x, x.dtype), params)
        dtype = space.scalar_dtype(params)
        tolerance = None if self.tolerance is None else jnp.asarray(self.tolerance, dtype)
        return jax.tree.map(jnp.array, self._program.start(params, jax.random.PRNGKey(seed), tolerance))

    def resumed(self, state: MinimiseState) -> MinimiseState:
        """A copy of a state, judged by this run's tolerance; a run that has stalled gets another chance."""
        state = jax.tree.map(jnp.array, state)
        state = state._replace(idle=jnp.where(state.code == descent.IDLE, 0, state.idle))
        if int(state.code) == descent.SWITCH:
            return state
        return self._program.judge(int(state.stage), state, self._limit(state))

    def advance(self, state: MinimiseState, count: int) -> tuple[MinimiseState, Rows, Status | None]:
        """At most `count` ≥ 0 steps, across the ends of stages; fewer where a status says why the run has ended.

        The state that is handed in must not be used again: its memory is. With a status it may be handed in once more,
        to no effect.
        """
        found: list[Rows] = []
        end, limit, status = int(state.steps) + count, self._limit(state), None
        while status is None:
            code, stage, before = int(state.code), int(state.stage), int(state.steps)
            if code == descent.NONFINITE:
                status = Status.NONFINITE
            elif code in (descent.SMALL, descent.IDLE):
                seen = self._program.examine(state)
                escape = self._program.escape(state, seen) if seen.negative else None
                status = self._verdict(code, seen, escape)
                if escape is None or status is not None:
                    state = state._replace(checked=state.checked + seen.products)
                elif before < end:
                    state = escape.state
                    found.append({name: np.asarray(x)[None] for name, x in escape.row.items()})
            elif before < end and code == descent.SWITCH:
                state = self._program.enter(_following(self.stages[stage]), state)
            elif before < end:
                left = jnp.asarray(min(end - before, descent.CHUNK), jnp.int32)
                state, rows = self._program.run(stage, state, limit, left)
                found.append({name: np.asarray(column)[: int(state.steps) - before] for name, column in rows.items()})
            if before >= end:
                break
        return state, _joined(found), status

    def summary(self, state: MinimiseState, status: Status | None = None) -> str:
        """One line: the solvers that were used, for how many steps, why they were left, and why the run ended."""
        parts = []
        for stage, taken, reason in zip(self.stages, state.taken.tolist(), state.reasons.tolist(), strict=True):
            why = f" until {Reason(reason).message}" if reason else ""
            parts += [f"{stage.name}: {taken:,} steps{why}"] if taken else []
        checked = [f"{int(state.checked)} products to look for saddles"] if int(state.checked) else []
        return "; ".join([*parts, *checked, *([] if status is None else [status.message])])

    def _verdict(self, code: int, seen: descent.Curvature, escape: descent.Escape | None) -> Status | None:
        """Why a run ends that makes no progress, or None where negative curvature leads down."""
        if escape is not None:
            return None if escape.lower else Status.SADDLE
        settled = code == descent.SMALL or (self.tolerance is None and bool(seen.rounded))
        return Status.CONVERGED if settled else Status.STALLED

    def _limit(self, state: MinimiseState) -> jax.Array:
        limit = descent.default_tolerance(state.first_norm) if self.tolerance is None else self.tolerance
        return jnp.asarray(limit, state.norm.dtype)


def _following(stage: Stage) -> int:
    assert stage.following is not None
    return stage.following


def _joined(rows: list[Rows]) -> Rows:
    return {name: np.concatenate([part[name] for part in rows] or [np.zeros(0)]) for name in descent.COLUMNS}


def minimise(
    value_fn: Callable[[Tree], jax.Array],
    params: Tree,
    *,
    solver: Solver | None = None,
    rule: Rule | None = None,
    max_steps: int = 10_000,
    tolerance: float | None = None,
    seconds: float | None = None,
    callback: Callable[[Progress], Any] | None = None,
    every: int = 10,
    progress: bool = False,
    seed: int = 0,
    state: MinimiseState | None = None,
) -> Minimum:
    """Minimises a smooth function of the parameters, full batch, until it converges or something runs out.

    Args:
      value_fn: function of the parameters that returns the loss, the same one whenever it is called.
      params: a pytree of real arrays, where it starts; not changed.
      solver: what computes directions; None takes several in turn (`saddlefree.stages`): `quasi_newton`, and `lanczos`
        where that is stuck.
      rule: how far to go; None is the rule that `adaptive_saddle_free_newton` takes for the solver.
      max_steps: the most steps of this call, ≥ 0.
      tolerance: it has converged where ‖gradient‖ ≤ tolerance ≥ 0; None is 10 ε times the norm at the start, or, where
        no step makes progress, 10 ε ‖H‖ ‖params‖, which is what rounding of the parameters does to the gradient.
      seconds: None, or the time that this call may take, > 0, compilation included.
      callback: None, or a function of `Progress`, called every so many steps; a true result ends the run.
      every: steps between two calls of `callback`, ≥ 1.
      progress: whether to write a line to stderr every two seconds.
      seed: of the random starts that look for negative curvature.
      state: `state` of an earlier result, to go on from there, bit for bit as if it had not stopped; of `params` only
        shapes and dtypes are then used.

    `status` tells why it ended (`Status`, its `message` in words). `history` has for each step `value` and
    `gradient_norm` after it, `damping`, `learning_rate`, and what it cost: `products` with the Hessian and
    `evaluations` of the loss, alone or with its gradient; `stage` numbers the solvers that were taken in turn, which
    `summary` names. A step with `escape` left a saddle along negative curvature.
    The programs of the last calls are kept, so that the same function and solver are not compiled again.

    >>> import saddlefree as sf
    >>> valley = lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
    >>> result = sf.minimise(valley, jnp.array([-1.0, 1.0]))
    >>> result.params.round(3), result.status.name
    (Array([1., 1.], dtype=float32), 'CONVERGED')
    >>> saddle = lambda x: 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4  # minima at (0, ±1)
    >>> abs(sf.minimise(saddle, jnp.array([1.0, 0.0])).params).round(3)
    Array([0., 1.], dtype=float32)
    """
    params = checks.arrays(params)
    checks.real_parameters(params)
    chosen = stages.given(solver, rule, lambda: stages.choose(Space(params)))
    limits = max_steps, tolerance, seconds
    return _driven(value_fn, False, params, chosen, limits, (callback, every, progress), seed, state)


def least_squares(
    residual_fn: ResidualFn,
    params: Tree,
    *,
    solver: Solver | None = None,
    rule: Rule | None = None,
    max_steps: int = 10_000,
    tolerance: float | None = None,
    seconds: float | None = None,
    callback: Callable[[Progress], Any] | None = None,
    every: int = 10,
    progress: bool = False,
    seed: int = 0,
    state: MinimiseState | None = None,
) -> Minimum:
    """Minimises ½‖r(params)‖², full batch; like `minimise`, with solvers that see the residuals r.

    Args:
      residual_fn: function of the parameters that returns residuals, an array or a pytree of them; `pointwise(…)` where
        each depends on one point of the data, which is cheaper.
      params: a pytree of real arrays, where it starts; not changed.
      solver: None is `row_space()`, while it pays, where the smaller of residuals and parameters is at most 600, or 100
        without `pointwise`; then, and otherwise, as in `minimise`. Any other solver works too.
      rule: as in `minimise`, and so are all further arguments.
      max_steps: the most steps of this call, ≥ 0.
      tolerance: it has converged where ‖Jᵀr‖ ≤ tolerance ≥ 0; None is 10 ε times the norm at the start.
      seconds: None, or the time that this call may take, > 0.
      callback: None, or a function of `Progress`; a true result ends the run.
      every: steps between two calls of `callback`, ≥ 1.
      progress: whether to write a line to stderr every two seconds.
      seed: of the random starts that look for negative curvature.
      state: `state` of an earlier result.

    >>> import saddlefree as sf
    >>> valley = lambda x: jnp.array([1 - x[0], 10 * (x[1] - x[0] ** 2)])
    >>> result = sf.least_squares(valley, jnp.array([-1.0, 1.0]))
    >>> result.params.round(3), result.status.name
    (Array([1., 1.], dtype=float32), 'CONVERGED')
    """
    params = checks.arrays(params)
    checks.real_parameters(params)
    chosen = stages.given(solver, rule, lambda: stages.choose_for_residuals(residual_fn, Space(params)))
    limits = max_steps, tolerance, seconds
    return _driven(residual_fn, True, params, chosen, limits, (callback, every, progress), seed, state)


def _driven(
    fn: Callable[[Tree], Any],
    residuals: bool,
    params: Tree,
    chosen: tuple[Stage, ...],
    limits: tuple[int, float | None, float | None],
    reports: tuple[Callable[[Progress], Any] | None, int, bool],
    seed: int,
    state: MinimiseState | None,
) -> Minimum:
    """The host's loop."""
    begun = time.perf_counter()
    (max_steps, tolerance, seconds), (callback, every, progress) = limits, reports
    checks.integer("max_steps", max_steps, low=0)
    checks.integer("every", every, low=1)
    if tolerance is not None:
        checks.number("tolerance", tolerance, 0)
    if seconds is not None:
        checks.number("seconds", seconds, 0, open_low=True)
    run = Descent(fn, chosen, residuals, tolerance)
    state = run.start(Space(params).like, seed) if state is None else run.resumed(state)
    clock = _Clock(begun, seconds, progress)
    history: list[Rows] = []
    first, status = int(state.steps), None
    while status is None:
        taken = int(state.steps) - first
        if clock.is_over():
            status = Status.TIME
        else:
            count = min(clock.steps(), max_steps - taken)
            if callback is not None:
                count = min(count, every - taken % every)
            state, rows, status = run.advance(state, count)
            history.append(rows)
            done = int(state.steps) - first
            clock.tick(state, done - taken)
            if callback is not None and done > taken and done % every == 0 and callback(clock.report(state)):
                status = status or Status.STOPPED
            if done >= max_steps:
                status = status or Status.STEPS
    summary = run.summary(state, status)
    clock.end(state, summary)
    settled = status == Status.CONVERGED
    return Minimum(
        state.params if settled else state.best_params,
        state.value if settled else state.best_value,
        status,
        int(state.steps),
        _joined(history),
        summary,
        state,
    )


class _Clock:
    """How much time is left, how many steps that is, and when to report."""

    def __init__(self, begun: float, seconds: float | None, shown: bool):
        self.begun, self.seconds, self.shown = begun, seconds, shown
        self.count = 1
        self.last = self.reported = time.perf_counter()

    def passed(self) -> float:
        return time.perf_counter() - self.begun

    def is_over(self) -> bool:
        return self.seconds is not None and self.passed() >= self.seconds

    def steps(self) -> int:
        """So many that a chunk takes a fraction of a second."""
        return self.count

    def tick(self, state: MinimiseState, done: int) -> None:
        """After a chunk."""
        now = time.perf_counter()
        each, self.last = (now - self.last) / max(done, 1), now
        aim = 0.25 if self.seconds is None else min(0.25, max(self.seconds - self.passed(), 0) / 2)
        # The first chunk is compiled, which says nothing of its steps.
        self.count = max(1, min(4 * self.count, int(aim / max(each, 1e-9))))
        if self.shown and now - self.reported > 2:
            self.reported = now
            self._write(state, "\r")

    def report(self, state: MinimiseState) -> Progress:
        """For a callback, with parameters that it may keep: the next chunk writes into the state's."""
        params = jax.tree.map(jnp.array, state.params)
        return Progress(int(state.steps), float(state.value), float(state.norm), params, self.passed())

    def end(self, state: MinimiseState, summary: str) -> None:
        """The last line."""
        if self.shown:
            self._write(state, f"\n{summary}\n")

    def _write(self, state: MinimiseState, end: str) -> None:
        figures = f"step {int(state.steps):>7,}  loss {float(state.value):.6e}  gradient {float(state.norm):.1e}"
        sys.stderr.write(f"\r{figures}  {self.passed():.1f} s{end}")
        sys.stderr.flush()
