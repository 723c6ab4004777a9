"""λ by the agreement of model and loss (the paper's Appendix A.4; Moré 1978)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from saddlefree import checks
from saddlefree.model import Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, Rule, measured, predicted_change
from saddlefree.rules.fixed import fixed_rate
from saddlefree.space import Number, Space, evaluate_schedule


class LearnedDamping(Rule):
    """What rules share whose state is λ itself, within bounds."""

    initial: Number
    minimum: Number
    maximum: Number

    def init(self, layout: Space) -> jax.Array:
        """λ itself is the state."""
        return evaluate_schedule(self.initial, jnp.zeros((), jnp.int32), layout.dtype)

    def bounded(self, damping: jax.Array, count: jax.Array) -> jax.Array:
        """λ within its bounds."""
        low, high = (evaluate_schedule(bound, count, damping.dtype) for bound in (self.minimum, self.maximum))
        return jnp.clip(damping, low, high)


class RatioDamping(LearnedDamping):
    """What rules share that learn λ from the reduction ratio."""

    factor: Number
    refusal: Number

    uses_products = True
    measures = True

    def check_damping(self) -> None:
        """Refuses bad numbers."""
        checks.number("initial_damping", self.initial, 0)
        checks.number("factor", self.factor, 0, 1, open_low=True, open_high=True)
        checks.number("minimum", self.minimum, 0)
        checks.number("refusal", self.refusal, 1)
        checks.number("maximum", self.maximum, 0)
        checks.at_least_minimum(self.maximum, self.minimum)
        if self.max_increase is not None:
            checks.number("max_increase", self.max_increase, 0)

    def dampings(self, state: jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
        """λ alone."""
        return self.bounded(state, count)[None]

    def learn(self, state: jax.Array, count: jax.Array, proposal: Proposal, taken: jax.Array) -> jax.Array:
        """λ up or down by ω."""
        omega, refusal = (evaluate_schedule(x, count, state.dtype) for x in (self.factor, self.refusal))
        ratio = jnp.asarray(proposal.ratio)
        change = jnp.where(ratio < 0.25, 1 / omega, jnp.where(ratio > 0.75, omega, 1))
        # λ = 0 would stay so.
        state = jnp.maximum(state, jnp.where(taken, 0, 1e-6))
        return self.bounded(state * jnp.where(taken, change, refusal), count)


@dataclasses.dataclass(frozen=True)
class levenberg_marquardt(RatioDamping):
    """λ by the reduction ratio ρ, the actual change of the loss over the one that the batch's own H predicts:

        λ ← λ/ω  where ρ < ¼,    λ ← ω λ  where ρ > ¾,    clipped to [minimum, maximum];

    after a refused step, or one that met a non-finite number, λ ← `refusal`·λ. The step is −η d(λ) + μ p. It costs one
    product and one loss a step, two where `value=` is not passed.

    Args:
      initial: λ before the first step, ≥ 0.
      factor: ω in (0, 1), or a schedule.
      minimum: ≥ 0. With `maximum`, it keeps λ in bounds on a flat loss, where ρ says nothing.
      maximum: ≥ minimum.
      refusal: ≥ 1.
      max_increase: a step is refused if it makes the loss f worse than f + max_increase·|f|; None never refuses.
      learning_rate: η ≥ 0.
      momentum: μ in [0, 1), or None for no momentum.

    >>> import saddlefree as sf
    >>> tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=levenberg_marquardt(initial=1.0, factor=0.5))
    >>> x = jnp.array([1.0, 3.0])
    >>> _, state = tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x**2) / 2)
    >>> float(state.rule)  # the model was right
    0.5
    """

    initial: Number = 1e-2
    factor: Number = 0.9
    minimum: Number = 1e-8
    maximum: Number = 1e3
    refusal: Number = 2.0
    max_increase: Number | None = 0.2
    learning_rate: Number = 1.0
    momentum: Number | None = None

    figures = ("step_scale", "reduction_ratio")

    def __post_init__(self) -> None:
        self.check_damping()
        self._steps()

    def _steps(self) -> fixed_rate:
        return fixed_rate(self.learning_rate, self.momentum, max_increase=self.max_increase)

    @property
    def has_momentum(self) -> bool:  # type: ignore[override]
        """Unless μ is None."""
        return self.momentum is not None

    def propose(self, problem: Problem, model: Model, state: jax.Array, count: jax.Array) -> Proposal:
        """−η d + μ p, and ρ."""
        proposal = self._steps().along(problem, model, self.bounded(state, count), count)
        return measured(proposal, problem, predicted_change(problem, proposal.step))
