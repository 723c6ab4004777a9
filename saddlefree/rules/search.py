"""λ by trial: several values on one model, and the one with the lowest loss, or the smallest that is good enough."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answer, Answers, Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, measured
from saddlefree.rules.levenberg_marquardt import LearnedDamping
from saddlefree.space import Number, evaluate_schedule


class Trials(NamedTuple):
    """Steps at several λ, and the loss after each."""

    dampings: jax.Array
    answers: Answer
    lengths: jax.Array  # η of the step along each direction
    predicted: jax.Array  # m(−η d)
    losses: jax.Array

    def proposal(self, problem: Problem, index: jax.Array | int) -> Proposal:
        """One of them."""
        damping, answer, eta = self.dampings[index], space.get(self.answers, index), self.lengths[index]
        step, zero = space.scale(-eta, answer.whole), jnp.zeros_like(damping)
        proposal = Proposal(step, damping, eta, zero, answer, after=self.losses[index])
        return measured(proposal, problem, self.predicted[index])


@dataclasses.dataclass(frozen=True)
class damping_search(LearnedDamping):
    """Several λ around the last one, on one model, and the one with the lowest loss is kept:

        λ ← argmin f(x − d(λᵢ)),    λᵢ = λ·spreadⁱ,    i = −reach … reach.

    A model answers all of them without a new product (one sum each for `series`), so that a search costs 2·reach + 1
    evaluations of the loss, times `lengths`. After a refused step λ ← λ·spread^{reach + 1}. Learning rate and momentum
    need no rule: the step is the model's own minimiser, over previous updates too where the solver keeps them
    (`lanczos(memory=…)`).

    The lowest loss after one step may be myopic: a large λ removes what is easy to remove, along large eigenvalues, and
    leaves the rest for later. With `share` = c the smallest λ is taken that still makes a part c of the best progress,

        λ ← min {λᵢ : f(x) − f(λᵢ) ≥ c (f(x) − min f)},    f(λ) = min f(x − η d(λ)) over η = 1, ½, …, 2^{1 − lengths}.

    With Gauss-Newton steps (`row_space`) a small λ lowers all residuals alike, and a short step stays where the model
    holds.

    Args:
      initial: λ before the first step, > 0.
      spread: the ratio of neighbouring trials, > 1.
      reach: trials on either side, ≥ 1.
      minimum: > 0.
      maximum: ≥ minimum.
      max_increase: a step is refused if it makes the loss f worse than f + max_increase·|f|; None never refuses.
      share: c in (0, 1], or None, which takes the lowest loss, as 1 does.
      lengths: how many η are tried along each direction, ≥ 1; each costs one evaluation of the loss.

    >>> rule = damping_search(initial=1.0, spread=10.0, reach=1)
    >>> rule.dampings(jnp.array(1.0), jnp.array(0), jnp.float32).round(3)
    Array([ 0.1,  1. , 10. ], dtype=float32)

    Of the same λ the smallest that makes half of the best progress, each with four lengths:

    >>> damping_search(spread=10.0, reach=1, share=0.5, lengths=4).evaluations
    12
    """

    initial: Number = 1e-2
    spread: float = 2.0
    reach: int = 2
    minimum: float = 1e-10
    maximum: float = 1e6
    max_increase: Number | None = 0.2
    share: Number | None = None
    lengths: int = 1

    figures = ("reduction_ratio",)
    asks = Answers.STATED
    measures = True

    def __post_init__(self) -> None:
        checks.number("initial_damping", self.initial, 0, open_low=True)
        checks.constant("spread", self.spread, 1, open_low=True)
        checks.integer("reach", self.reach, low=1)
        checks.constant("minimum", self.minimum, 0, open_low=True)
        checks.constant("maximum", self.maximum, 0)
        checks.at_least_minimum(self.maximum, self.minimum)
        if self.max_increase is not None:
            checks.number("max_increase", self.max_increase, 0)
        if self.share is not None:
            checks.number("share", self.share, 0, 1, open_low=True)
        checks.integer("lengths", self.lengths, low=1)

    @property
    def evaluations(self) -> int:
        """One for each trial."""
        return (2 * self.reach + 1) * self.lengths

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

        lengths = 0.5 ** jnp.arange(self.lengths, dtype=dampings.dtype)

        def attempt(damping: jax.Array) -> tuple[Answer, jax.Array, jax.Array, jax.Array]:
            answer = model.answer(damping)
            d, change = answer.whole, answer.predicted
            if self.lengths == 1:
                return answer, lengths[0], change, loss(space.scale(-1, d))
            losses = jax.lax.map(lambda eta: loss(space.scale(-eta, d)), lengths)
            best = _lowest(losses)
            eta, slope = lengths[best], space.dot(problem.loss_gradient, d)
            # m(−ηd) = −η gᵀd + η² ½dᵀHd, and m(−d) is known.
            return answer, eta, eta**2 * (change + slope) - eta * slope, losses[best]

        # Kept, because an answer may take a factorisation.
        return Trials(dampings, *jax.lax.map(attempt, dampings))

    def best(self, problem: Problem, trials: "Trials", count: jax.Array) -> jax.Array:
        """The index of the lowest loss, or of the smallest λ that makes enough of its progress."""
        losses = trials.losses
        best = _lowest(losses)
        if self.share is None:
            return best
        fallen = problem.loss(None) - losses  # type: ignore[misc]
        enough = fallen >= evaluate_schedule(self.share, count, losses.dtype) * fallen[best]
        # λ ascends: the first is the smallest.
        return jnp.where(fallen[best] > 0, jnp.argmax(enough), best)

    def learn(self, state: jax.Array, count: jax.Array, proposal: Proposal, taken: jax.Array) -> jax.Array:
        """The best λ is the middle of the next trials; where none was good, one beyond them."""
        return self.bounded(jnp.where(taken, proposal.damping, state * self.spread ** (self.reach + 1)), count)


def _lowest(losses: jax.Array) -> jax.Array:
    """The index of the lowest that is finite."""
    return jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
