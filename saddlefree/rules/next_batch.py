"""λ by the next batch: it judges the step of the last one, which has not seen it.

A batch cannot tell how far its own model holds elsewhere: the step that lowers its own loss most follows its noise. The
next batch can. Its gradient at the new parameters gives the derivative of its loss in the log λ of the step that led
there, by one inner product.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answers, Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, measured
from saddlefree.rules.fixed import fixed_rate
from saddlefree.rules.levenberg_marquardt import LearnedDamping
from saddlefree.space import Number, Space, Vector, evaluate_schedule


class NextBatchState(NamedTuple):
    """What the next batch judges."""

    damping: jax.Array  # λ
    sensitivity: Vector  # ∂s/∂log λ of the last step s that was taken; 0 before the first


@dataclasses.dataclass(frozen=True)
class next_batch(LearnedDamping):
    """λ by the gradient of the next batch. With g its gradient after the step s(λ) of the batch before,

        ∂f/∂log λ = ⟨g, ∂s/∂log λ⟩,    log λ ← log λ − κ_t cos(g, ∂s/∂log λ),    κ_t = κ/(1 + t/τ)

    in step t. The gradient is computed anyway, and the derivative of the step follows from the model: no product and no
    loss are evaluated for it. The solver's model must answer any λ (`lanczos`, `exact`, `low_rank`, `row_space`).

    Over a run in mini-batches λ rises, as a learning rate decays: a verdict looks one step ahead and favours short
    steps, the more so as batches of one epoch exclude each other's examples. κ_t makes λ rise as a power of t, where a
    constant κ would end the run early. On a full batch `damping_search` is better.

    Args:
      initial: λ before the first step, > 0. λ changes by a factor of exp(κ) a step at most: one that is far too small
        makes long steps at first.
      rate: κ > 0, or a schedule in place of κ.
      decay_steps: τ > 0; a large number keeps κ as it is.
      minimum: of λ, > 0.
      maximum: of λ, ≥ minimum.
      max_increase: None, or a number ≥ 0: a step is refused if it makes its own batch's loss f worse than
        f + max_increase·|f|. It costs one evaluation of the loss, two where `value=` is not passed.
      refusal: λ is multiplied by this number, ≥ 1, after a refused step, or one that met a non-finite number.
      learning_rate: η ≥ 0, or a schedule.

    The figure `verdict` is the cosine: positive where a smaller λ would have been better for the new batch.

    >>> import saddlefree as sf
    >>> tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=next_batch(initial=1.0, rate=1.0, decay_steps=1.0))
    >>> batches = [lambda x: jnp.sum((x - 1) ** 2) / 2, lambda x: jnp.sum((x + 1) ** 2) / 2]
    >>> x = jnp.zeros(1)
    >>> state, dampings = tx.init(x), []
    >>> for loss in batches:  # the step to ½ leads away from the second minimum: a larger λ would have been better
    ...     updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
    ...     x = x + updates
    ...     dampings.append(round(float(sf.diagnostics(state)["damping"]), 3))
    >>> dampings
    [1.0, 1.649]
    """

    initial: Number = 1.0
    rate: Number = 0.3
    decay_steps: float = 200.0
    minimum: float = 1e-10
    maximum: float = 1e6
    max_increase: Number | None = None
    refusal: Number = 2.0
    learning_rate: Number = 1.0

    figures = ("step_scale", "verdict")
    asks = Answers.ANY

    def __post_init__(self) -> None:
        checks.number("initial", self.initial, 0, open_low=True)
        checks.number("rate", self.rate, 0, open_low=True)
        checks.constant("decay_steps", self.decay_steps, 0, open_low=True)
        checks.constant("minimum", self.minimum, 0, open_low=True)
        checks.constant("maximum", self.maximum, 0)
        checks.at_least_minimum(self.maximum, self.minimum)
        checks.number("refusal", self.refusal, 1)
        self._steps()

    def _steps(self) -> fixed_rate:
        return fixed_rate(self.learning_rate, max_increase=self.max_increase)

    def init(self, layout: Space) -> NextBatchState:  # type: ignore[override]
        """λ, and no step."""
        return NextBatchState(super().init(layout), layout.zeros())

    def dampings(self, state: NextBatchState, count: jax.Array, dtype: Any) -> jax.Array:
        """λ before the verdict: close enough to shape a model that answers any."""
        return self.bounded(state.damping, count)[None]

    def propose(self, problem: Problem, model: Model, state: NextBatchState, count: jax.Array) -> Proposal:
        """−η d(λ), with λ by this batch's verdict of the last step."""
        verdict, damping = self.judge(problem, state, count)
        steps = self._steps()
        proposal = steps.along(problem, model, damping, count)
        proposal = proposal._replace(
            sensitivity=sensitivity(lambda damping: steps.along(problem, model, damping, count).step, damping),
            figures={**proposal.figures, "verdict": verdict},
        )
        return measured(proposal, problem, None) if self.measures else proposal

    def judge(self, problem: Problem, state: NextBatchState, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The cosine, 0 where there is none, and the λ that follows from it."""
        assert problem.loss_gradient is not None
        cosine = space.cosine(problem.loss_gradient, state.sensitivity)
        cosine = jnp.where(jnp.isfinite(cosine), cosine, 0)
        kappa, tau = (evaluate_schedule(x, count, cosine.dtype) for x in (self.rate, self.decay_steps))
        kappa = kappa / (1 + count.astype(cosine.dtype) / tau)
        return cosine, self.bounded(state.damping * jnp.exp(-kappa * cosine), count)

    def learn(self, state: NextBatchState, count: jax.Array, proposal: Proposal, taken: jax.Array) -> NextBatchState:
        """λ and the step to be judged; after a refused step the one before it is judged once more."""
        refusal = evaluate_schedule(self.refusal, count, state.damping.dtype)
        damping = self.bounded(proposal.damping * jnp.where(taken, 1, refusal), count)
        usable = taken & space.all_finite(proposal.sensitivity)
        return NextBatchState(damping, space.where(usable, proposal.sensitivity, state.sensitivity))


def sensitivity(step: Callable[[jax.Array], Vector], damping: jax.Array) -> Vector:
    """∂s/∂log λ of a step as a function of λ.

    >>> sensitivity(lambda damping: -1 / (1 + damping), jnp.array(1.0))  # λ/(1 + λ)²
    Array(0.25, dtype=float32, weak_type=True)
    """
    # With λ as the tangent the derivative is one in log λ.
    return jax.jvp(step, (damping,), (damping,))[1]
