"""λ by trial: several values on one model, and the one with the lowest loss, or with the longest step that is good."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answer, Answers, Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, measured, reduction_ratio
from saddlefree.rules.levenberg_marquardt import LearnedDamping
from saddlefree.space import Number, evaluate_schedule


class Trials(NamedTuple):
    """Steps at several λ, and the loss after each."""

    dampings: jax.Array
    answers: Answer
    losses: jax.Array

    def proposal(self, problem: Problem, index: jax.Array | int) -> Proposal:
        """One of them."""
        damping, answer = self.dampings[index], space.get(self.answers, index)
        one, zero = jnp.ones_like(damping), jnp.zeros_like(damping)
        proposal = Proposal(space.scale(-1, answer.whole), damping, one, zero, answer, after=self.losses[index])
        return measured(proposal, problem, answer.predicted)


@dataclasses.dataclass(frozen=True)
class damping_search(LearnedDamping):
    """Several λ around the last one, on one model, and the one with the lowest loss is kept:

        λ ← argmin f(x − d(λᵢ)),    λᵢ = λ·spreadⁱ,    i = −reach … reach.

    A model answers all of them without a new product (one sum each for `series`), so that a search costs 2·reach + 1
    evaluations of the loss. After a refused step λ ← λ·spread^{reach + 1}. Learning rate and momentum need no rule: the
    step is the model's own minimiser, over previous updates too where the solver keeps them (`lanczos(memory=…)`).

    The lowest loss after one step may be myopic. With `target` = ρ* the longest step is taken that the model still
    describes,

        λ ← min {λᵢ : ρ(λᵢ) ≥ ρ*},    ρ(λ) = (f(x − d(λ)) − f(x)) / m(−d(λ)),

    and the one with the lowest loss where no λᵢ fulfils it (the radius search of Webb, Jerad & Cartis 2026).

    Args:
      initial: λ before the first step, > 0.
      spread: the ratio of neighbouring trials, > 1.
      reach: trials on either side, ≥ 1.
      minimum: > 0.
      maximum: ≥ minimum.
      max_increase: a step is refused if it makes the loss f worse than f + max_increase·|f|; None never refuses.
      target: ρ* in (0, 1), 0.1 to 0.25 as a rule; None takes the lowest loss.

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
    target: Number | None = None

    figures = ("reduction_ratio",)
    asks = Answers.STATED
    measures = True

    def __post_init__(self) -> None:
        checks.number("initial_damping", self.initial, 0, open_low=True)
        checks.constant("spread", self.spread, 1, open_low=True)
        checks.integer("reach", self.reach, low=1)
        checks.constant("minimum", self.minimum, 0, open_low=True)
        checks.constant("maximum", self.maximum, float(self.minimum))
        if self.max_increase is not None:
            checks.number("max_increase", self.max_increase, 0)
        if self.target is not None:
            checks.number("target", self.target, 0, 1, open_low=True, open_high=True)

    @property
    def evaluations(self) -> int:
        """One for each trial."""
        return 2 * self.reach + 1

    def dampings(self, state: jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
        """λ and its neighbours."""
        powers = self.spread ** jnp.arange(-self.reach, self.reach + 1, dtype=dtype)
        return self.bounded(state * powers, count)

    def propose(self, problem: Problem, model: Model, state: jax.Array, count: jax.Array) -> Proposal:
        """The best of the trials."""
        trials = self.trials(problem, model, self.dampings(state, count, problem.space.dtype))
        return trials.proposal(problem, self.best(problem, trials, count))

    def trials(self, problem: Problem, model: Model, dampings: jax.Array) -> "Trials":
        """The losses at all λ."""
        assert problem.loss is not None
        loss = problem.loss

        def attempt(damping: jax.Array) -> tuple[Answer, jax.Array]:
            answer = model.answer(damping)
            return answer, loss(space.scale(-1, answer.whole))

        # Kept, because an answer may take a factorisation.
        return Trials(dampings, *jax.lax.map(attempt, dampings))

    def best(self, problem: Problem, trials: "Trials", count: jax.Array) -> jax.Array:
        """The index of the lowest loss, or of the longest step that is good."""
        losses = trials.losses
        best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
        if self.target is not None:
            ratios = reduction_ratio(problem.loss(None), losses, trials.answers.predicted)  # type: ignore[misc]
            good = ratios >= evaluate_schedule(self.target, count, losses.dtype)
            # λ ascends: the first is the smallest.
            best = jnp.where(jnp.any(good), jnp.argmax(good), best)
        return best

    def learn(self, state: jax.Array, count: jax.Array, proposal: Proposal, taken: jax.Array) -> jax.Array:
        """The best λ is the middle of the next trials; where none was good, one beyond them."""
        return self.bounded(jnp.where(taken, proposal.damping, state * self.spread ** (self.reach + 1)), count)
