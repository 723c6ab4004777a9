"""λ by trial: several values on one model, and the one with the lowest loss."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answers, Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, measured
from saddlefree.rules.levenberg_marquardt import LearnedDamping
from saddlefree.space import Number, Vector


@dataclasses.dataclass(frozen=True)
class damping_search(LearnedDamping):
    """Several λ around the last one, on one model, and the one with the lowest loss is kept:

        λ ← argmin f(x − d(λᵢ)),    λᵢ = λ·spreadⁱ,    i = −reach … reach.

    A model answers all of them without a new product (one sum each for `series`), so that a search costs 2·reach + 1
    evaluations of the loss. After a refused step λ ← λ·spread^{reach + 1}. Learning rate and momentum need no rule: the
    step is the model's own minimiser, over previous updates too where the solver keeps them (`lanczos(memory=…)`).

    Args:
      initial: λ before the first step, > 0.
      spread: the ratio of neighbouring trials, > 1.
      reach: trials on either side, ≥ 1.
      minimum: > 0.
      maximum: ≥ minimum.
      max_increase: a step is refused if it makes the loss f worse than f + max_increase·|f|; None never refuses.

    >>> rule = damping_search(initial=1.0, spread=10.0, reach=1)
    >>> rule.dampings(jnp.array(1.0), jnp.array(0), jnp.float32).round(3)
    Array([ 0.1,  1. , 10. ], dtype=float32)
    """

    initial: Number = 1e-2
    spread: float = 2.0
    reach: int = 2
    minimum: float = 1e-10
    maximum: float = 1e6
    max_increase: Number | None = 0.2

    figures = ("reduction_ratio",)
    asks = Answers.STATED
    measures = True

    def __post_init__(self) -> None:
        checks.number("initial_damping", self.initial, 0, open_low=True)
        checks.number("spread", self.spread, 1, open_low=True)
        checks.integer("reach", self.reach, low=1)
        checks.number("minimum", self.minimum, 0, open_low=True)
        checks.number("maximum", self.maximum, float(self.minimum))
        if self.max_increase is not None:
            checks.number("max_increase", self.max_increase, 0)

    @property
    def evaluations(self) -> int:
        """One for each trial."""
        return 2 * self.reach + 1

    def dampings(self, state: jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
        """λ and its neighbours."""
        powers = self.spread ** jnp.arange(-self.reach, self.reach + 1, dtype=dtype)
        return self.bounded(state * powers, count)

    def propose(self, problem: Problem, model: Model, state: jax.Array, count: jax.Array) -> Proposal:
        """The best of the trials, by the loss itself."""
        assert problem.loss is not None
        dampings = self.dampings(state, count, problem.space.dtype)

        def step(damping: jax.Array) -> Vector:
            return space.scale(-1, model.answer(damping).whole)

        losses = jax.lax.map(lambda damping: problem.loss(step(damping)), dampings)
        best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
        damping = dampings[best]
        one, zero = jnp.ones_like(damping), jnp.zeros_like(damping)
        answer = model.answer(damping)
        proposal = Proposal(step(damping), damping, one, zero, answer, after=losses[best])
        return measured(proposal, problem, answer.predicted)

    def learn(self, state: jax.Array, count: jax.Array, proposal: Proposal, taken: jax.Array) -> jax.Array:
        """The best λ is the middle of the next trials; where none was good, one beyond them."""
        return self.bounded(jnp.where(taken, proposal.damping, state * self.spread ** (self.reach + 1)), count)
