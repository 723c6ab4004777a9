"""How far to go along a model's direction: a line search with the strong Wolfe conditions.

φ(t) = f(x − t d/‖d‖). A length t > 0 is accepted where

    φ(t) ≤ φ(0) + δ t φ'(0)   and   |φ'(t)| ≤ σ |φ'(0)|                (strong Wolfe)
    φ(t) ≤ φ(0) + ε |φ(0)|    and   |φ'(t)| ≤ σ |φ'(0)|                (approximate Wolfe, Hager & Zhang 2005)

The second pair, with ε = 1e-6, holds where the loss differs by rounding only: there slopes still tell, and values no
longer do. `optax.scale_by_zoom_linesearch` has both conditions too. It stops at an interval of absolute length, returns
its last trial where none is good, and compiles the loss twice; here each iteration is one evaluation.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answers, Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, Rule, asked_by, measured
from saddlefree.space import Number, Space, Vector, evaluate_schedule

NOISE = 1e-6
"""ε: relative changes of the loss that may be rounding."""


class LineSearchState(NamedTuple):
    """What is known after a step: the loss and its gradient there, so that a driver need not evaluate them again.

    They hold where the step was taken as proposed: without weight decay or another transformation behind it.
    """

    started: jax.Array  # whether a step has been taken
    known: jax.Array  # whether value and gradient are those after the last step
    value: jax.Array
    gradient: Vector


class Point(NamedTuple):
    """A length along the line, the loss there, and its slope."""

    length: jax.Array
    value: jax.Array
    slope: jax.Array


class Search(NamedTuple):
    """Of φ it is known: at `low` it falls, and a good point lies before `high`, where that is finite."""

    trial: jax.Array
    low: Point
    high: Point
    best: Point
    gradient: Vector  # at `best`
    accepted: jax.Array
    halved: jax.Array  # whether the interval has halved twice as it should
    count: jax.Array  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class line_search(Rule):
    """s = −η d(λ) with η by a line search: strong Wolfe, and approximate Wolfe near rounding (see this module).

    The first trial is η = 1, before the first step at most the length 1. Until a good point is enclosed, the length
    grows by a factor of 1.1 to 10; then it is the minimiser of a cubic. A point where loss or gradient are not finite
    lies beyond the good ones. Where the conditions cannot be met, the lowest loss that was found is taken; where no
    trial lowers the loss, or −d does not descend, the step is refused. The loss never rises by more than 1e-6 |f|.

    Args:
      damping: λ ≥ 0, a number or a schedule; 0 goes with `quasi_newton` too, which knows no other.
      decrease: δ in (0, ½).
      curvature: σ in (δ, 1); a smaller one costs more evaluations.
      max_evaluations: the most evaluations of loss and gradient in one step, ≥ 1.

    The figure `evaluations` counts them; the loss at the parameters costs one more where `value=` is not passed.
    `wolfe` is 1 where the conditions hold and 0 otherwise.

    >>> import saddlefree as sf
    >>> tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=line_search())
    >>> x = jnp.array([3.0, 4.0])
    >>> updates, state = tx.update(jnp.cos(x), tx.init(x), x, value_fn=lambda x: jnp.sum(jnp.sin(x)))
    >>> {name: float(sf.diagnostics(state)[name]) for name in ("evaluations", "wolfe", "rejected_steps")}
    {'evaluations': 1.0, 'wolfe': 1.0, 'rejected_steps': 0.0}
    """

    damping: Number = 0.0
    decrease: float = 1e-4
    curvature: float = 0.9
    max_evaluations: int = 20

    figures = ("evaluations", "wolfe")
    max_increase = 2 * NOISE  # the search itself keeps to ε; this one is never met by rounding

    def __post_init__(self) -> None:
        checks.number("damping", self.damping, 0)
        checks.constant("decrease", self.decrease, 0, 0.5, open_low=True, open_high=True)
        checks.constant("curvature", self.curvature, float(self.decrease), 1, open_low=True, open_high=True)
        checks.integer("max_evaluations", self.max_evaluations, low=1)

    @property
    def asks(self) -> Answers:  # type: ignore[override]
        """λ = 0, or one λ."""
        return asked_by(self.damping)

    def init(self, layout: Space) -> LineSearchState:
        """Nothing is known."""
        zero = jnp.zeros((), layout.dtype)
        return LineSearchState(jnp.array(False), jnp.array(False), zero, layout.zeros())

    def dampings(self, state: LineSearchState, count: jax.Array, dtype: Any) -> jax.Array:
        """λ alone."""
        return evaluate_schedule(self.damping, count, dtype)[None]

    def propose(self, problem: Problem, model: Model, state: LineSearchState, count: jax.Array) -> Proposal:
        """The best point of the line that was found."""
        assert problem.loss is not None
        damping = self.dampings(state, count, problem.space.dtype)[0]
        answer, before = model.answer(damping), problem.loss(None)
        d = answer.whole
        length = space.norm(d)
        # Along the unit vector, so that slopes of tiny gradients do not underflow.
        unit = space.scale(space.reciprocal(length), d)
        start = Point(jnp.zeros_like(length), before, -space.dot(problem.loss_gradient, unit))
        first = jnp.where(state.started, length, jnp.minimum(length, 1))
        found = self._search(problem, unit, start, first)
        step = space.scale(-found.best.length, unit)
        lower = found.best.length > 0
        proposal = Proposal(
            # A direction that is not finite is reported as such.
            space.where(jnp.isfinite(length), step, d),
            damping,
            learning_rate=jnp.where(lower, found.best.length * space.reciprocal(length), 0),
            momentum=jnp.zeros_like(length),
            answer=answer,
            after=jnp.where(lower, found.best.value, jnp.inf),
            figures={"evaluations": found.count.astype(before.dtype), "wolfe": found.accepted.astype(before.dtype)},
            gradient=found.gradient,
        )
        return measured(proposal, problem, None)

    def learn(self, state: LineSearchState, count: jax.Array, proposal: Proposal, taken: jax.Array) -> LineSearchState:
        """Loss and gradient after the step."""
        if proposal.gradient is None:
            return state._replace(started=state.started | taken, known=jnp.array(False))
        new = LineSearchState(taken, taken, jnp.asarray(proposal.after), proposal.gradient)
        return space.where(taken, new, state._replace(known=jnp.array(False)))

    def _search(self, problem: Problem, unit: Vector, start: Point, first: jax.Array) -> Search:
        assert problem.value_and_gradient is not None
        evaluate = problem.value_and_gradient
        noise = NOISE * jnp.abs(start.value)
        eps = jnp.finfo(first.dtype).eps
        usable = (start.slope < 0) & jnp.isfinite(start.slope) & jnp.isfinite(start.value) & jnp.isfinite(first)

        def unfinished(search: Search) -> jax.Array:
            width = search.high.length - search.low.length
            apart = width > 4 * eps * search.low.length
            return usable & ~search.accepted & apart & (search.count < self.max_evaluations) & (search.trial > 0)

        def iterate(search: Search) -> Search:
            t = search.trial
            value, gradient = evaluate(space.scale(-t, unit))
            new = Point(t, value, -space.dot(gradient, unit))
            finite = jnp.isfinite(new.value) & jnp.isfinite(new.slope)
            falls = new.value <= start.value + self.decrease * t * start.slope
            near = new.value <= start.value + noise
            accepted = finite & (falls | near) & (jnp.abs(new.slope) <= -self.curvature * start.slope)
            lower = finite & falls & (new.value < search.best.value)
            high = ~finite | ~(falls | near) | (new.value > search.low.value + noise) | (new.slope >= 0)
            nearer = space.where(high, new, search.high)
            farther = space.where(high, search.low, new)
            best = accepted | lower
            width = search.high.length - search.low.length
            halved = nearer.length - farther.length <= width / 2
            return Search(
                _next(farther, nearer, search.low, halved | search.halved, noise),
                farther,
                nearer,
                space.where(best, new, search.best),
                space.where(best, gradient, search.gradient),
                accepted,
                halved,
                search.count + 1,
            )

        infinity = jnp.full_like(first, jnp.inf)
        zero = jnp.zeros((), jnp.int32)
        begin = Search(
            first,
            start,
            Point(infinity, infinity, infinity),
            start,
            problem.loss_gradient,
            jnp.array(False),
            jnp.array(True),
            zero,
        )
        return jax.lax.while_loop(unfinished, iterate, begin)


def _next(low: Point, high: Point, before: Point, halved: jax.Array, noise: jax.Array) -> jax.Array:
    """The next length: inside the interval, or beyond `low` where there is none."""
    # Beyond: where the slope, continued as a line, vanishes.
    gained = low.length - before.length
    rise = low.slope - before.slope
    secant = low.length - low.slope * gained / jnp.where(rise > 0, rise, 1)
    beyond = jnp.clip(jnp.where(rise > 0, secant, 4 * low.length), 1.1 * low.length, 10 * low.length)
    # Inside: where a cubic through both points has its minimum; by slopes alone where values are rounding.
    width = high.length - low.length
    known = jnp.isfinite(width) & jnp.isfinite(high.value) & jnp.isfinite(high.slope)
    rise, slope = ((jnp.where(known, y, 1)) for y in ((high.value - low.value) / width, high.slope))
    rise, slope = rise / -low.slope, slope / -low.slope
    flat = (jnp.abs(high.value - low.value) <= noise) & (slope > 0)
    chord = slope - 1 - 3 * rise
    root = jnp.sqrt(jnp.maximum(chord**2 + slope, 0))
    bottom = slope + 1 + 2 * root
    cubic = 1 - (slope + root - chord) / jnp.where(bottom == 0, 1, bottom)
    share = jnp.where(flat, 1 / (1 + jnp.where(flat, slope, 1)), cubic)
    share = jnp.where(halved, jnp.clip(jnp.nan_to_num(share, nan=0.5), 1e-3, 1 - 1e-3), 0.5)
    inside = low.length + jnp.where(known, share, 0.1) * jnp.where(jnp.isfinite(width), width, 1)
    return jnp.where(jnp.isfinite(high.length), inside, beyond)
