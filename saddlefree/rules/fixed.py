"""The rule with a given learning rate, momentum and damping."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answers, Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, Rule, asked_by, measured
from saddlefree.space import Number, evaluate_schedule


@dataclasses.dataclass(frozen=True)
class fixed_rate(Rule):
    """s = −η d(λ) + μ p, with η, μ and λ as given: numbers or schedules.

    Args:
      learning_rate: η ≥ 0.
      momentum: μ in [0, 1), or None for no momentum, which keeps no vector.
      damping: λ ≥ 0.
      max_increase: None, or a number ≥ 0 or schedule: a step is refused if it makes the loss f worse than
        f + max_increase·|f|. It costs two evaluations of the loss a step, one where `value=` is passed.
      max_step: None, or a number > 0 or schedule: a step is shortened where its root mean square exceeds it.
      max_ratio: beside a solver's base (`low_rank(base=…)`), each entry of the step is clipped to this many times the
        largest entry of the update that the base alone would make of the whole gradient; > 0.

    The figure `step_scale` is the factor by which the step, or its largest entry, was shortened, and 1 otherwise.

    >>> import saddlefree as sf
    >>> tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=fixed_rate(0.5, damping=1.0))
    >>> x = jnp.array([1.0, 3.0])
    >>> tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x**2) / 2)[0]
    Array([-0.25, -0.75], dtype=float32)
    """

    learning_rate: Number = 1.0
    momentum: Number | None = None
    damping: Number = 1e-2
    max_increase: Number | None = None
    max_step: Number | None = None
    max_ratio: Number = 3.0

    figures = ("step_scale",)

    def __post_init__(self) -> None:
        checks.number("learning_rate", self.learning_rate, 0)
        checks.number("damping", self.damping, 0)
        if self.momentum is not None:
            checks.number("momentum", self.momentum, 0, 1, open_high=True)
        if self.max_increase is not None:
            checks.number("max_increase", self.max_increase, 0)
        if self.max_step is not None:
            checks.number("max_step", self.max_step, 0, open_low=True)
        checks.number("max_ratio", self.max_ratio, 0, open_low=True)

    @property
    def has_momentum(self) -> bool:  # type: ignore[override]
        """Unless μ is None."""
        return self.momentum is not None

    @property
    def asks(self) -> Answers:  # type: ignore[override]
        """λ = 0, or one λ."""
        return asked_by(self.damping)

    def dampings(self, state: Any, count: jax.Array, dtype: Any) -> jax.Array:
        """λ alone."""
        return evaluate_schedule(self.damping, count, dtype)[None]

    def propose(self, problem: Problem, model: Model, state: Any, count: jax.Array) -> Proposal:
        """−η d + μ p."""
        damping = self.dampings(state, count, problem.space.dtype)[0]
        proposal = self.along(problem, model, damping, count)
        return measured(proposal, problem, None) if self.measures else proposal

    def along(self, problem: Problem, model: Model, damping: jax.Array, count: jax.Array) -> Proposal:
        """The step at this λ."""
        answer, dtype = model.answer(damping), problem.space.dtype
        eta = evaluate_schedule(self.learning_rate, count, dtype)
        step, shortened = space.scale(-eta, answer.direction), jnp.ones((), dtype)
        if answer.rest is not None:
            step = space.axpy(1, answer.rest.update, step)
            # Also after the cast to the parameters' dtype.
            within = (1 - problem.space.rounding) * answer.rest.largest
            most = evaluate_schedule(self.max_ratio, count, dtype) * within
            shortened = _within(most, space.peak(step))
            # Entry by entry: a single large one would otherwise hold up all others.
            step = jax.tree.map(lambda s: jnp.clip(s, -most.astype(s.dtype), most.astype(s.dtype)), step)
        mu = jnp.zeros((), dtype)
        if self.momentum is not None:
            mu = evaluate_schedule(self.momentum, count, dtype)
            step = space.axpy(mu, problem.previous, step)
        if self.max_step is not None:
            most = evaluate_schedule(self.max_step, count, dtype)
            length = space.norm(step) / max(problem.space.size, 1) ** 0.5
            shortened *= (factor := _within(most, length))
            step = space.scale(factor, step)
        return Proposal(step, damping, eta, mu, answer, figures={"step_scale": shortened})


def _within(most: jax.Array, length: jax.Array) -> jax.Array:
    """The factor that brings `length` down to `most`, at most 1; a length that is not finite stays so."""
    return jnp.where(length > most, most * space.reciprocal(length), 1)
