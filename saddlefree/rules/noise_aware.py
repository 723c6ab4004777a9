"""λ by trial on a full batch, and by the next batch where batches differ."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answers, Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, Rule, measured
from saddlefree.rules.next_batch import NextBatchState, next_batch, sensitivity
from saddlefree.rules.search import damping_search
from saddlefree.solvers.base import forwarded
from saddlefree.solvers.kept import sides
from saddlefree.space import Space, Vector


class NoiseAwareState(NamedTuple):
    """λ of either rule and the last step, the last batch's loss, and how much batches differ."""

    searched: jax.Array  # λ of the search
    judged: NextBatchState
    value: jax.Array  # the last batch's loss at the parameters that it led to; ∞ where it was not evaluated
    first: jax.Array  # the first finite loss; ∞ before
    noise: jax.Array
    noisy: jax.Array  # whether that counts as noise


_SHARE = 0.1
"""Of the largest |θ|: where noise begins, λ is at least as much."""
_EVERY = 4
"""Where batches differ, the loss after a step is evaluated in every so many steps."""
_ROUNDING = 8
"""Losses of one batch differ by no more than this many ε√(f f₀), f₀ the first loss."""


@dataclasses.dataclass(frozen=True)
class noise_aware(Rule):
    """Several λ are tried while batches agree, and the next batch judges λ while they do not.

    At the parameters that a step has led to, the batch before has the loss f₋ of its trial and the new one f. On a
    full batch they are equal up to rounding; on mini-batches they are not:

        ν ← max((|f − f₋| − 8ε√(F f₀)) / F, ν/2),    F = max(|f|, |f₋|),

    f₀ the first loss: a sum of squares that has fallen far below f₀ has a rounding error of about ε√(F f₀). Until ν is
    above `threshold` the λ with the lowest loss is taken (`damping_search`). From there on, until ν is below a tenth of
    it, that λ would follow the noise of its own batch, and λ is the one that the next batch asks for (`next_batch`);
    the loss after this one step is then evaluated in every fourth step, in which alone a step can be refused and ν
    changes. Each of the two has its own λ; where noise begins that of the second is raised to a tenth of the largest
    |θ|, if the solver reports that. `lanczos(refresh_every=…)` spares products where there is noise.
    The figure `noise` is ν, and `verdict` the cosine.

    Args:
      search: a `damping_search`; its bounds and its refusal hold for both.
      verdict: a `next_batch`; of it `rate`, `decay_steps` and `refusal` count.
      threshold: > 0; twice the rounding of the parameters where that is more, 0.016 in bfloat16. A chained
        transformation or a weight decay that changes the loss by more than this share counts as noise.

    >>> import saddlefree as sf
    >>> def noise(batches):
    ...     tx, x = sf.adaptive_saddle_free_newton(sf.exact(), rule=noise_aware()), jnp.zeros(1)
    ...     state = tx.init(x)
    ...     for target in batches:
    ...         loss = lambda x: jnp.sum((x - target) ** 4)
    ...         updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
    ...         x = x + updates
    ...     return bool(sf.diagnostics(state)["noise"] > 1e-2)
    >>> noise([1.0, 1.0, 1.0]), noise([1.0, 1.1, 0.9])
    (False, True)
    """

    search: damping_search = damping_search()
    verdict: next_batch = next_batch()
    threshold: float = 1e-3

    figures = ("reduction_ratio", "verdict", "noise")
    asks = Answers.ANY
    measures = True
    max_increase = forwarded("search.max_increase")
    evaluations = forwarded("search.evaluations")

    def __post_init__(self) -> None:
        checks.kind("search", self.search, damping_search, "damping_search(…)")
        checks.kind("verdict", self.verdict, next_batch, "next_batch(…)")
        checks.constant("threshold", self.threshold, 0, open_low=True)

    def init(self, layout: Space) -> NoiseAwareState:
        """The search's λ, no step and no noise."""
        unknown = lambda: jnp.full((), jnp.inf, layout.dtype)  # noqa: E731
        judged = NextBatchState(self.search.init(layout), layout.zeros())
        none = jnp.zeros((), layout.dtype)
        return NoiseAwareState(self.search.init(layout), judged, unknown(), unknown(), none, jnp.array(False))

    def dampings(self, state: NoiseAwareState, count: jax.Array, dtype: Any) -> jax.Array:
        """Those of the search, or where batches differed last as many around the verdict's λ, to shape a model."""
        return self.search.dampings(jnp.where(state.noisy, state.judged.damping, state.searched), count, dtype)

    def noisy(self, problem: Problem, state: NoiseAwareState, count: jax.Array) -> jax.Array:
        """Whether ν is above the threshold, or a tenth of it where there was noise before."""
        begin, end = (max(least, 2 * problem.space.rounding) for least in (self.threshold, self.threshold / 10))
        return self._noise(problem, state) > jnp.where(state.noisy, end, begin)

    def propose(self, problem: Problem, model: Model, state: NoiseAwareState, count: jax.Array) -> Proposal:
        """The best of the trials, or the one step that the next batch asks for."""
        loss = problem.loss
        assert loss is not None
        before, noise, noisy = loss(None), self._noise(problem, state), self.noisy(problem, state, count)
        cosine, damping = self.verdict.judge(problem, state.judged, count)
        # What a search took for its own batch is far too small for the next ones.
        damping = self.search.bounded(jnp.where(state.noisy, damping, self._lifted(damping, model)), count)
        agreeing, differing = sides(model)

        def step(damping: jax.Array) -> Vector:
            return space.scale(-1, agreeing.answer(damping).whole)

        def judged() -> Proposal:
            answer, change = jax.jvp(differing.answer, (damping,), (damping,))
            one, zero = jnp.ones_like(damping), jnp.zeros_like(damping)
            made = Proposal(space.scale(-1, answer.whole), damping, one, zero, answer)
            # Where it is not evaluated, the loss counts as unchanged.
            after = jax.lax.cond(_evaluated(count), lambda: loss(made.step), lambda: before)
            made = measured(made._replace(after=after), problem, answer.predicted)
            return made._replace(sensitivity=space.scale(-1, change.whole))

        def searched() -> Proposal:
            best = self.search.propose(problem, agreeing, state.searched, count)
            return best._replace(sensitivity=sensitivity(step, best.damping))

        proposal = jax.lax.cond(noisy, judged, searched)
        return proposal._replace(figures={"verdict": jnp.where(noisy, cosine, 0), "noise": noise, "noisy": noisy})

    def _lifted(self, damping: jax.Array, model: Model) -> jax.Array:
        """λ, or a share of the largest |θ| where that is more and the solver reports a finite one."""
        extremes = [jnp.abs(x) for name, x in model.stats.items() if name.startswith(("smallest_", "largest_"))]
        finite = [jnp.where(jnp.isfinite(x), _SHARE * x, 0) for x in extremes]
        return functools.reduce(jnp.maximum, finite, damping)

    def _noise(self, problem: Problem, state: NoiseAwareState) -> jax.Array:
        """ν, which stays as it is where one of the losses is not known."""
        assert problem.loss is not None
        value = problem.loss(None)
        known = jnp.isfinite(value) & jnp.isfinite(state.value)
        last = jnp.where(known, state.value, 0)
        size = jnp.maximum(jnp.abs(value), jnp.abs(last))
        # Two square roots, because a product of two losses may overflow.
        rounding = _ROUNDING * jnp.finfo(size.dtype).eps * jnp.sqrt(size) * jnp.sqrt(jnp.abs(state.first))
        excess = jnp.maximum(jnp.abs(value - last) - rounding, 0) * space.reciprocal(size)
        return jnp.where(known, jnp.maximum(excess, state.noise / 2), state.noise)

    def learn(self, state: NoiseAwareState, count: jax.Array, proposal: Proposal, taken: jax.Array) -> NoiseAwareState:
        """As the search or the verdict, and the loss that the next batch's is compared with."""
        noise, noisy, before = proposal.figures["noise"], proposal.figures["noisy"], jnp.asarray(proposal.before)
        judged = self.verdict.learn(state.judged, count, proposal, taken)
        judged = judged._replace(damping=jnp.where(noisy, judged.damping, state.judged.damping))
        searched = self.search.learn(state.searched, count, proposal, taken)
        searched = jnp.where(noisy, state.searched, searched)
        value = jnp.where(taken, jnp.asarray(proposal.after), before)
        known = jnp.isfinite(value) & (~noisy | _evaluated(count))
        first = jnp.where(jnp.isfinite(state.first), state.first, before)
        return NoiseAwareState(searched, judged, jnp.where(known, value, jnp.inf), first, noise, noisy)


def _evaluated(count: jax.Array) -> jax.Array:
    """Whether the loss after a step is evaluated where batches differ; not batched, so that a branch is one."""
    return count % _EVERY == 0
