"""Saddle-free Newton as Optax transformations: a solver and a rule, put together.

One update, from x with loss f, gradient g and curvature H:

    problem ← g, H, f at x          model ← solver(problem)          s ← rule(model): a step, taken or refused

A step that is not finite, in the parameters' own dtypes, is the update 0 and leaves momentum and curvature alone.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import checks, space
from saddlefree.model import Answers
from saddlefree.problem import Frozen, from_update, trainable
from saddlefree.rules.base import Rule, asked_by, check_rule, decide
from saddlefree.rules.escape import Escaping
from saddlefree.rules.escape import escape as Escape  # noqa: N812 (the parameter `escape=` would hide it)
from saddlefree.rules.fixed import fixed_rate
from saddlefree.rules.line_search import line_search
from saddlefree.rules.next_batch import next_batch
from saddlefree.rules.noise_aware import noise_aware
from saddlefree.rules.plane import adaptive_plane
from saddlefree.rules.search import damping_search
from saddlefree.solvers.base import Solver, check_solver
from saddlefree.solvers.lanczos import lanczos
from saddlefree.space import Number, Space, Tree, Vector, evaluate_schedule

_DEFAULT = lanczos(num_products=10)
DEFAULT_ADAPTIVE = lanczos(num_products=8, damping_form="sqrt", memory=1, recycle=40, refresh_every=100)


class SaddleFreeState(NamedTuple):
    """The state of `saddle_free_newton` and `adaptive_saddle_free_newton`; `diagnostics` reads it."""

    count: jax.Array  # type: ignore[assignment]  # Optax's name, which hides tuple.count
    solver: Any
    rule: Any
    previous: Vector  # the last step that was taken, in working precision; () where it is not used
    figures: dict[str, jax.Array]
    rejected_steps: jax.Array
    nonfinite_steps: jax.Array
    average: Tree  # of the parameters that are not frozen, in working precision; () where it is not asked for


class ScaleBySaddleFreeState(NamedTuple):
    """The state of `scale_by_saddle_free`; `diagnostics` reads it."""

    count: jax.Array  # type: ignore[assignment]  # Optax's name, which hides tuple.count
    solver: Any
    previous: Vector
    figures: dict[str, jax.Array]
    nonfinite_steps: jax.Array


def saddle_free_newton(
    learning_rate: Number = 1.0,
    momentum: Number | None = None,
    damping: Number = 1e-2,
    solver: Solver = _DEFAULT,
    *,
    weight_decay: Number | None = None,
    max_increase: Number | None = None,
    max_step: Number | None = None,
    frozen: Frozen = None,
    escape: Escape | None = None,
    averaging: float | None = None,
    packed: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Saddle-free Newton with a given learning rate: x ← x − η (|H| + λI)⁻¹ g + μ·(previous update).

    Args:
      learning_rate: η ≥ 0, a number or a schedule.
      momentum: μ in [0, 1), a number or a schedule; None is no momentum, and keeps no vector.
      damping: λ ≥ 0, a number or a schedule; 0 is the pseudo-inverse.
      solver: what computes the direction.
      weight_decay: None, or a number ≥ 0 or schedule; decoupled, −η·weight_decay·x is added to the update.
      max_increase: None, or a number ≥ 0 or schedule: a step is refused if it makes the loss f worse than
        f + max_increase·|f|. It costs two evaluations of the loss a step, one where `value=` is passed.
      max_step: None, or a number > 0 or schedule: a step is shortened where its root mean square exceeds it.
      frozen: parameters that stay as they are: a pytree of bools, a prefix of one, or a function from parameters to it.
      escape: `escape(…)` searches for negative curvature every few steps, to leave saddles; None does not.
      averaging: None, or γ ≥ 0: an average of the parameters is kept, which `averaged_params` reads and describes; 8 is
        a good choice for mini-batches.
      packed: one flat vector for all parameters, which compiles faster. False keeps every leaf by itself: for
        parameters that are sharded over devices, which one vector would gather.

    `update` takes `value_fn=`, a function of the parameters that returns the loss of this step's batch, and optionally
    `value=` and `grad=` (what is known already at the parameters), `curvature_fn=` (another function, whose Hessian is
    used), `matvec=` (the product itself), `residual_fn=` (residuals whose half squared norm is the loss, for
    `row_space`; `value_fn=` may then be left out) and `refresh=` (a bool, for `low_rank`).

    >>> import saddlefree as sf
    >>> loss = lambda x: 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4  # a saddle at 0, minima at (0, ±1)
    >>> tx = sf.saddle_free_newton(solver=sf.exact(), damping=0.1)
    >>> x = jnp.array([1.0, 0.01])
    >>> state = tx.init(x)
    >>> update = jax.jit(lambda g, state, x: tx.update(g, state, x, value_fn=loss))
    >>> for _ in range(30):
    ...     updates, state = update(jax.grad(loss)(x), state, x)
    ...     x = optax.apply_updates(x, updates)
    >>> x.round(3)
    Array([0., 1.], dtype=float32)
    """
    if isinstance(damping, Rule):
        raise ValueError(
            f"damping must be a number or a schedule: use adaptive_saddle_free_newton(solver, rule={damping})"
        )
    rule = fixed_rate(learning_rate, momentum, damping, max_increase, max_step)
    return _newton(solver, rule, weight_decay, frozen, escape, averaging, packed)


@checks.removed(
    damping="initial_damping=… for the first λ, or rule=damping_search(…) or another rule",
    step="rule=adaptive_plane(…) or rule=fixed_rate(…)",
    max_increase="rule=damping_search(max_increase=…), or that of another rule",
    learning_rate="saddle_free_newton(learning_rate=…): the adaptive optimiser finds its own",
    momentum="saddle_free_newton(momentum=…): the adaptive optimiser finds its own",
)
def adaptive_saddle_free_newton(
    solver: Solver = DEFAULT_ADAPTIVE,
    initial_damping: Number = 1e-2,
    *,
    rule: Rule | None = None,
    weight_decay: Number | None = None,
    frozen: Frozen = None,
    escape: Escape | None = None,
    averaging: float | None = None,
    packed: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Saddle-free Newton that finds learning rate, momentum and damping by itself.

    With a solver that answers any damping without new products (`lanczos`, the default, `exact`, `low_rank`) the
    damping is the best of several that are tried on a full batch, and the one that the next batch asks for on
    mini-batches (`noise_aware`, which tells them apart; the default solver then makes products now and then only).
    With others learning rate and momentum minimise a saddle-free quadratic model in the plane of the direction and the
    previous update, and the damping follows the agreement of model and loss (`adaptive_plane`, the paper's Appendix
    A.4). With `quasi_newton`, which knows λ = 0 only, the learning rate is found by a line search (`line_search`). A
    step that makes the loss much worse is refused.

    Args:
      solver: what computes the direction.
      initial_damping: λ of the first step, > 0 for `noise_aware`, otherwise ≥ 0.
      rule: a rule to be used instead, such as `levenberg_marquardt(…)`; `initial_damping` is then not used.
      weight_decay: None, or a number ≥ 0 or schedule; decoupled, −η·weight_decay·x is added to the update after the
        model and the loss have judged it.
      frozen: parameters that stay as they are: a pytree of bools, a prefix of one, or a function from parameters to it.
      escape: `escape(…)` searches for negative curvature every few steps, to leave saddles; None does not.
      averaging: None, or γ ≥ 0: an average of the parameters is kept, which `averaged_params` reads.
      packed: one flat vector for all parameters, which compiles faster; False for sharded parameters.

    `update` takes the arguments of `saddle_free_newton`'s.

    >>> import saddlefree as sf
    >>> loss = lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2  # Rosenbrock's valley
    >>> tx = sf.adaptive_saddle_free_newton(solver=sf.exact())
    >>> x = jnp.array([-1.0, 1.0])
    >>> state = tx.init(x)
    >>> update = jax.jit(lambda g, state, x: tx.update(g, state, x, value_fn=loss))
    >>> for _ in range(60):
    ...     updates, state = update(jax.grad(loss)(x), state, x)
    ...     x = optax.apply_updates(x, updates)
    >>> x.round(2)
    Array([1., 1.], dtype=float32)
    """
    check_solver(solver)
    if rule is None:
        rule = default_rule(solver, initial_damping)
    return _newton(solver, rule, weight_decay, frozen, escape, averaging, packed)


def scale_by_saddle_free(
    solver: Solver = _DEFAULT, damping: Number = 1e-2, *, frozen: Frozen = None, packed: bool = True
) -> optax.GradientTransformationExtraArgs:
    """The direction alone, (|H| + λI)⁻¹ g, to be chained with other transformations.

    Args:
      solver: what computes the direction.
      damping: λ ≥ 0, a number or a schedule.
      frozen: parameters whose direction is 0: a pytree of bools, a prefix of one, or a function from parameters to it.
      packed: one flat vector for all parameters, which compiles faster; False for sharded parameters.

    `update` takes the arguments of `saddle_free_newton`'s. What arrives as updates is the right-hand side g. Of
    `low_rank(base=…)` the base's update is part of the direction, so that a chained rate scales it too.

    >>> import saddlefree as sf
    >>> loss = lambda x: 0.5 * jnp.sum(jnp.array([4.0, -1.0]) * x**2)
    >>> tx = optax.chain(sf.scale_by_saddle_free(sf.exact(), damping=0.0), optax.scale_by_learning_rate(0.5))
    >>> x = jnp.array([1.0, 1.0])
    >>> tx.update(jax.grad(loss)(x), tx.init(x), x, value_fn=loss)[0]
    Array([-0.5,  0.5], dtype=float32)
    """
    check_solver(solver)
    if solver.uses_previous:
        raise ValueError(
            "scale_by_saddle_free does not know the updates that are made: memory must be 0, and momentum None, got "
            f"{solver}"
        )
    checks.number("damping", damping, 0)
    checks.switch("packed", packed)
    if asked_by(damping) > solver.answers:
        raise ValueError(f"damping must be 0 beside {type(solver).__name__}, which answers λ = 0 only, got {damping!r}")

    def init(params: Tree) -> ScaleBySaddleFreeState:
        layout = _layout(params, frozen, packed)
        figures = _empty_figures(("damping", "result", *solver.stats), layout)
        return ScaleBySaddleFreeState(_zero(), solver.init(layout), (), figures, _zero())

    def update(
        updates: Tree, state: ScaleBySaddleFreeState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, ScaleBySaddleFreeState]:
        _check_kind(state, ScaleBySaddleFreeState)
        problem = from_update(updates, params, frozen, packed, None, False, extra)
        layout, count = problem.space, optax.safe_increment(state.count)
        if not layout.size:
            return space.zeros_like(updates), state._replace(count=count)
        _check_state(init, params, state)
        lam = evaluate_schedule(damping, state.count, layout.dtype)
        model, memory = solver.model(problem, lam[None], state.solver)
        answer = model.answer(lam)
        finite = layout.finite_update(answer.whole)
        direction = space.where(finite, answer.whole, space.zeros_like(problem.gradient))
        return _as_updates(layout, direction, params), state._replace(
            count=count,
            solver=memory,
            figures={"damping": lam, "result": answer.result, **model.stats, **answer.stats},
            nonfinite_steps=state.nonfinite_steps + (~finite).astype(jnp.int32),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _newton(
    solver: Solver,
    rule: Rule,
    weight_decay: Number | None,
    frozen: Frozen,
    escape: Escape | None,
    averaging: float | None,
    packed: bool,
) -> optax.GradientTransformationExtraArgs:
    """A solver and a rule, put together; see the head of this file."""
    check_solver(solver)
    check_rule(rule, solver)
    if weight_decay is not None:
        checks.number("weight_decay", weight_decay, 0)
    checks.switch("packed", packed)
    if escape is not None:
        checks.kind("escape", escape, Escape, "None or escape(…)")
        rule = Escaping(rule, escape)
    if averaging is not None:
        checks.constant("averaging", averaging, 0)
    names = ["damping", "learning_rate", "momentum", "result", *rule.measures * ["value"], *rule.figures, *solver.stats]
    remembers = solver.uses_previous or rule.has_momentum

    def init(params: Tree) -> SaddleFreeState:
        layout = _layout(params, frozen, packed)
        return SaddleFreeState(
            count=_zero(),
            solver=solver.init(layout),
            rule=rule.init(layout),
            previous=layout.zeros() if remembers else (),
            figures=_empty_figures(names, layout),
            rejected_steps=_zero(),
            nonfinite_steps=_zero(),
            average=() if averaging is None else space.zeros_like(space.to_working(layout.like)),
        )

    def update(
        updates: Tree, state: SaddleFreeState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, SaddleFreeState]:
        _check_kind(state, SaddleFreeState)
        previous = state.previous if remembers else None
        problem = from_update(updates, params, frozen, packed, previous, rule.uses_products, extra)
        layout, count = problem.space, optax.safe_increment(state.count)
        if not layout.size:
            return space.zeros_like(updates), state._replace(count=count)
        _check_state(init, params, state)
        problem = dataclasses.replace(problem, noisy=rule.noisy(problem, state.rule, state.count))
        dampings = rule.dampings(state.rule, state.count, layout.dtype)
        model, memory = solver.model(problem, dampings, state.solver)
        proposal = rule.propose(problem, model, state.rule, state.count)
        step = proposal.step
        if weight_decay is not None:
            # An adaptive rate may be negative, where the previous step takes over; a decay never grows weights.
            decay = evaluate_schedule(weight_decay, state.count, layout.dtype) * jnp.maximum(proposal.learning_rate, 0)
            step = space.axpy(-decay, layout.pack(layout.like), step)
        decision = decide(rule, problem, proposal, step, state.count)
        figures: dict[str, Any] = {
            "damping": proposal.damping,
            "learning_rate": proposal.learning_rate,
            "momentum": proposal.momentum,
            "result": proposal.answer.result,
            "value": proposal.before,
            "reduction_ratio": proposal.ratio,
            **proposal.figures,
            **model.stats,
            **proposal.answer.stats,
        }
        taken = space.where(decision.taken, step, space.zeros_like(step))
        return _as_updates(layout, taken, params), SaddleFreeState(
            count=count,
            solver=memory,
            rule=rule.learn(state.rule, state.count, proposal, decision.taken),
            previous=space.where(decision.taken, proposal.step, state.previous) if remembers else (),
            figures={name: jnp.asarray(figures[name]).astype(state.figures[name].dtype) for name in names},
            rejected_steps=state.rejected_steps + decision.refused.astype(jnp.int32),
            nonfinite_steps=state.nonfinite_steps + (~decision.finite).astype(jnp.int32),
            average=() if averaging is None else _averaged(state.average, layout, averaging, count),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _averaged(average: Tree, layout: Space, averaging: Number, count: jax.Array) -> Tree:
    """The average with the present parameters in it, the count-th of them; see `averaged_params`."""
    gamma = evaluate_schedule(averaging, count, layout.dtype)
    # Those that an update sees, whatever a chained transformation does to its result.
    difference = space.sub(space.to_working(layout.like), average)
    return space.axpy((gamma + 1) / (gamma + count.astype(layout.dtype)), difference, average)


def default_rule(solver: Solver, initial_damping: Number = 1e-2) -> Rule:
    """The rule that a solver goes with, by how many λ it answers."""
    if solver.answers == Answers.ZERO:
        return line_search()
    if solver.answers == Answers.ANY:
        # Where curvature is kept and gradients are averaged over many batches, small corrections of λ suffice.
        keeps = getattr(solver, "refresh_every", None) is not None
        verdict = next_batch(rate=0.05, decay_steps=1e6) if keeps else next_batch()
        return noise_aware(damping_search(initial_damping), verdict)
    return adaptive_plane(initial_damping)


def _layout(params: Tree, frozen: Frozen, packed: bool) -> Space:
    """The space of the trainable parameters."""
    layout = Space(trainable(checks.arrays(params), frozen), packed)
    if packed and any(map(_is_sharded, layout.leaves)):
        raise ValueError("packed must be False for parameters that are sharded over devices, got True")
    return layout


def _is_sharded(leaf: jax.Array) -> bool:
    # On an automatic mesh a traced value does not show its sharding.
    if isinstance(leaf, jax.core.Tracer):
        return any(axis is not None for axis in jax.typeof(leaf).sharding.spec)
    return not leaf.sharding.is_fully_replicated


def _as_updates(layout: Space, step: Vector, params: Tree) -> Tree:
    """`step` in the parameters' dtypes, and 0 for those that are frozen."""
    return space.fill(layout.unpack(step), jax.tree.map(jnp.zeros_like, params))


def _empty_figures(names: Any, layout: Space) -> dict[str, jax.Array]:
    whole = ("products", "result")
    return {name: jnp.zeros((), jnp.int32 if name in whole else layout.dtype) for name in names}


def _check_kind(state: Any, kind: type) -> None:
    """Refuses the state of another transformation."""
    if not isinstance(state, kind):
        raise ValueError(f"state must come from tx.init(params) of this optimiser, got {type(state).__name__}")


def _check_state(init: Any, params: Tree, state: Any) -> None:
    """Refuses the state of other parameters, or of another optimiser."""
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)  # noqa: E731
    if shapes(jax.eval_shape(init, params)) != shapes(state):
        raise ValueError(
            "state must come from tx.init(params) with these parameters and this optimiser, got one of another "
            "structure or shape; call tx.init(params) again"
        )


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)
