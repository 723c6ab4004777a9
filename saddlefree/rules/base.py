"""What every rule is: it owns λ, η, μ and refusal.

Symbols: d = d(λ) the model's direction, p the previous step, s = −η d + μ p the step, m(s) = gᵀs + ½ sᵀHs the change of
the loss that the quadratic model predicts, ρ = (f(x + s) − f(x)) / m(s) the reduction ratio.

An update asks a rule four things, in this order: which λ it may need (`dampings`), a step on the model (`propose`),
whether to take it (`decide`, the same for all rules), and what it learns from that (`learn`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answer, Answers, Model
from saddlefree.problem import Problem
from saddlefree.solvers.base import Solver
from saddlefree.space import Number, Space, Vector, evaluate_schedule


class Proposal(NamedTuple):
    """A step, and what is known of it; see `Rule` for an example.

    >>> Proposal._fields[:4]
    ('step', 'damping', 'learning_rate', 'momentum')
    """

    step: Vector
    damping: jax.Array
    learning_rate: jax.Array
    momentum: jax.Array
    answer: Answer
    before: jax.Array | None = None  # f(x), where the rule measures
    after: jax.Array | None = None  # f(x + s)
    ratio: jax.Array | None = None  # ρ
    figures: dict[str, jax.Array] = {}  # noqa: RUF012 (never written)
    gradient: Vector | None = None  # ∇f(x + s), where the rule has computed it
    sensitivity: Vector | None = None  # ∂s/∂log λ, where the rule learns by it


class Rule:
    """A frozen dataclass, equal and hashable by value; what it learns is handed in and out.

    A rule of one's own inherits from this class:

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class unit_length(Rule):
    ...     damping: float = 1e-2
    ...
    ...     def dampings(self, state, count, dtype):
    ...         return jnp.full(1, self.damping, dtype)
    ...
    ...     def propose(self, problem, model, state, count):
    ...         answer = model.answer(self.dampings(state, count, problem.space.dtype)[0])
    ...         rate = space.reciprocal(space.norm(answer.direction))
    ...         step = space.scale(-rate, answer.direction)
    ...         return Proposal(step, jnp.asarray(self.damping), rate, jnp.zeros(()), answer)
    >>> import saddlefree as sf
    >>> tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=unit_length())
    >>> x = jnp.array([3.0, 4.0])
    >>> updates, _ = tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x**2) / 2)
    >>> [round(float(u), 3) for u in updates]
    [-0.6, -0.8]
    """

    figures: tuple[str, ...] = ()
    """The names of figures that it adds to those of every rule."""
    asks: Answers = Answers.ONE
    """For how many λ it needs an answer."""
    uses_products: bool = False
    """Whether it asks for products with the batch's own H."""
    has_momentum: bool = False
    """Whether it adds a multiple of the previous step, so that the model must not."""
    max_increase: Number | None = None
    """A step is refused if it makes the loss f worse than f + max_increase·|f|; None never refuses."""

    @property
    def measures(self) -> bool:
        """Whether it evaluates the loss after the step."""
        return self.max_increase is not None

    @property
    def evaluations(self) -> int:
        """How many losses it evaluates in a step, unless a figure of that name counts them."""
        return int(self.measures)

    def init(self, layout: Space) -> Any:
        """The state before the first step."""
        return ()

    def noisy(self, problem: Problem, state: Any, count: jax.Array) -> jax.Array | None:
        """Whether batches differ, a bool for solvers that spare products where they do; None: it does not find out."""
        return None

    def dampings(self, state: Any, count: jax.Array, dtype: Any) -> jax.Array:
        """The λ that it may ask the next model for, in a vector; the middle one may shape the model."""
        raise NotImplementedError

    def propose(self, problem: Problem, model: Model, state: Any, count: jax.Array) -> Proposal:
        """The step to be judged."""
        raise NotImplementedError

    def learn(self, state: Any, count: jax.Array, proposal: Proposal, taken: jax.Array) -> Any:
        """The state after a step that was taken, or was not."""
        return state


class Decision(NamedTuple):
    """What becomes of a proposal."""

    taken: jax.Array
    refused: jax.Array
    finite: jax.Array


def asked_by(damping: Number) -> Answers:
    """What a rule with this one λ asks for: a λ that is known to be 0 asks for `ZERO`."""
    known = not callable(damping) and not isinstance(damping, jax.core.Tracer)
    return Answers.ZERO if known and damping == 0 else Answers.ONE


def decide(rule: Rule, problem: Problem, proposal: Proposal, step: Vector, count: jax.Array) -> Decision:
    """Refuses a proposal that makes the loss too much worse, or whose `step` is not finite in the parameters' dtypes.

    `step` is what would be applied: the proposal's own, and weight decay.
    """
    finite = problem.space.finite_update(step)
    refused = jnp.array(False)
    if proposal.before is not None and proposal.after is not None:
        before, after = proposal.before, proposal.after
        finite &= jnp.isfinite(before)
        good = jnp.isfinite(after)
        if rule.max_increase is not None:
            good &= after - before <= evaluate_schedule(rule.max_increase, count, before.dtype) * jnp.abs(before)
        refused = finite & ~good
    return Decision(finite & ~refused, refused, finite)


def measured(proposal: Proposal, problem: Problem, predicted: jax.Array | None) -> Proposal:
    """The proposal with f(x), f(x + s), unless they are known, and ρ where m(s) is `predicted`."""
    assert problem.loss is not None
    before = problem.loss(None)
    after = problem.loss(proposal.step) if proposal.after is None else proposal.after
    ratio = None if predicted is None else reduction_ratio(before, after, predicted)
    return proposal._replace(before=before, after=after, ratio=ratio)


def predicted_change(problem: Problem, step: Vector) -> jax.Array:
    """m(s) = gᵀs + ½ sᵀHs, with one product with the batch's own H."""
    return space.dot(problem.loss_gradient, step) + space.dot(step, problem.product()(step)) / 2


def reduction_ratio(before: jax.Array, after: jax.Array, predicted: jax.Array) -> jax.Array:
    """ρ = (f(x+s) − f(x)) / m(s).

    Both changes are lowered by what rounding of the loss can hide (Conn, Gould & Toint 2000, §17.4.2), so that ρ is 1
    where no change can be measured any more. A model that predicts no descent gives −∞ in effect: ρ = −1.

    >>> reduction_ratio(jnp.array(1.0), jnp.array(0.5), jnp.array(-1.0)).round(4)
    Array(0.5, dtype=float32)
    """
    hidden = 10 * jnp.finfo(before.dtype).eps * jnp.abs(before)
    actual, model = after - before - hidden, predicted - hidden
    return jnp.where(model < 0, actual / jnp.where(model < 0, model, 1), jnp.where(after > before, -1.0, 1.0))


def check_rule(rule: Any, solver: Solver) -> None:
    """Refuses what is not a rule, and pairs that cannot work."""
    checks.kind("rule", rule, Rule, "a rule such as damping_search(), or your own that inherits from Rule")
    if rule.asks > solver.answers == Answers.ZERO:
        raise ValueError(
            f"{type(rule).__name__} asks for λ > 0, and {type(solver).__name__} answers λ = 0 only: use line_search(), "
            "or fixed_rate(…, damping=0)"
        )
    if rule.asks == Answers.ANY > solver.answers:
        raise ValueError(
            f"{type(rule).__name__} differentiates the step in λ, and {solver} does not answer every λ: use lanczos(), "
            "exact() or low_rank(), or levenberg_marquardt()"
        )
    if rule.asks > solver.answers:
        raise ValueError(
            f"{type(rule).__name__} asks for several λ, and {solver} answers one: use levenberg_marquardt(), or "
            "lanczos(), which answers any"
        )
    if rule.has_momentum and solver.has_momentum:
        raise ValueError(
            f"momentum must be None beside {solver}, whose direction holds one already (averaging or memory); "
            f"got {rule}"
        )
