"""Saddle-free Newton as Optax transformations: solver × damping × step, put together.

One update, from x with loss f, gradient g and curvature H:

    λ ← damping rule           d ← solver: (|H| + λI)⁻¹ g          s ← step rule: −η d + μ·(previous update)
    ρ ← (f(x + s) − f(x)) / m(s), m the quadratic model            refused where f(x + s) > f(x) + max_increase·|f(x)|

f(x + s), and with it ρ and refusal, are evaluated only where the damping rule learns from ρ or `max_increase` is given.
A non-finite loss, gradient, product or direction gives the update 0 and leaves momentum and curvature state alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import checks, tree
from saddlefree.curvature import MatVec, block_of, hessian
from saddlefree.damping import Damping, damping_search, fixed_damping, levenberg_marquardt
from saddlefree.escape import escape as Escape  # noqa: N812 (the parameter `escape=` would hide it)
from saddlefree.solvers.base import Solver, System, check_solver
from saddlefree.solvers.lanczos import lanczos
from saddlefree.step import Step, adaptive_step, fixed_step, predicted_change, reduction_ratio, search
from saddlefree.tree import Number, Tree

Frozen = Tree | Callable[[Tree], Tree] | None
"""Which parameters stay as they are: a pytree of bools (or a prefix of one), or a function from parameters to it."""

_DEFAULT = lanczos(num_products=10)
_DEFAULT_ADAPTIVE = lanczos(num_products=8, damping_form="sqrt", memory=1, recycle=40)


class SaddleFreeState(NamedTuple):
    """The state of `saddle_free_newton` and `adaptive_saddle_free_newton`; `diagnostics` reads it."""

    count: jax.Array  # type: ignore[assignment]  # Optax's name, which hides tuple.count
    solver: Any
    damping: Any
    previous: Tree  # the last update that was made, in working precision; None where nothing uses it
    figures: dict[str, jax.Array]
    rejected_steps: jax.Array
    nonfinite_steps: jax.Array
    escape: Any = None  # the search for a way off saddles, where there is one


class ScaleBySaddleFreeState(NamedTuple):
    """The state of `scale_by_saddle_free`; `diagnostics` reads it."""

    count: jax.Array  # type: ignore[assignment]  # Optax's name, which hides tuple.count
    solver: Any
    figures: dict[str, jax.Array]
    nonfinite_steps: jax.Array


def saddle_free_newton(
    learning_rate: Number = 1.0,
    momentum: Number = 0.0,
    damping: Number | Damping = 1e-2,
    solver: Solver = _DEFAULT,
    *,
    weight_decay: Number = 0.0,
    max_increase: Number | None = None,
    frozen: Frozen = None,
    escape: Escape | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Saddle-free Newton with a given learning rate: x ← x − η (|H| + λI)⁻¹ g + μ·(previous update).

    Args:
      learning_rate: η ≥ 0, a number or a schedule.
      momentum: μ in [0, 1), a number or a schedule.
      damping: λ ≥ 0, a number, a schedule, or the rule `levenberg_marquardt(…)`.
      solver: what computes the direction.
      weight_decay: ≥ 0, a number or a schedule; decoupled, −η·weight_decay·x is added to the update.
      max_increase: None, or a number ≥ 0 or schedule: a step is refused if it makes the loss f worse than
        f + max_increase·|f|. It costs two evaluations of the loss a step, one where `value=` is passed.
      frozen: parameters that stay as they are: a pytree of bools, a prefix of one, or a function from parameters to it.
      escape: `escape(…)` looks for a way off saddles now and then; None does not, and costs nothing.

    `update` takes `value_fn=`, a function of the parameters that returns the loss of this step's batch, and optionally
    `value=` and `grad=` (what is known already at the parameters), `curvature_fn=` (another function, whose Hessian is
    used), `matvec=` (the product itself) and `refresh=` (a bool, for `low_rank`).

    >>> import saddlefree as sf
    >>> loss = lambda x: 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4  # a saddle at 0, minima at (0, ±1)
    >>> tx = sf.saddle_free_newton(solver=sf.exact(), damping=0.1)
    >>> x = jnp.array([1.0, 0.01])
    >>> state = tx.init(x)
    >>> for _ in range(30):
    ...     updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
    ...     x = optax.apply_updates(x, updates)
    >>> x.round(3)
    Array([0., 1.], dtype=float32)
    """
    check_solver(solver)
    if solver.averages:
        checks.number("momentum beside a solver with an averaged gradient", momentum, 0, 0)
    rule: Any = damping if hasattr(damping, "learns") else fixed_damping(damping)
    return _newton(solver, rule, fixed_step(learning_rate, momentum), weight_decay, max_increase, frozen, escape)


def adaptive_saddle_free_newton(
    solver: Solver = _DEFAULT_ADAPTIVE,
    initial_damping: Number = 1e-2,
    *,
    damping: Damping | None = None,
    step: Step | None = None,
    weight_decay: Number = 0.0,
    max_increase: Number | None = 0.2,
    frozen: Frozen = None,
    escape: Escape | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Saddle-free Newton that finds learning rate, momentum and damping by itself (the paper's Appendix A.4).

    With a solver that keeps its basis (`lanczos`, the default) the damping is the best of several that are tried on it
    (`damping_search`), and learning rate and momentum come from the basis. With others, learning rate and momentum
    minimise a saddle-free quadratic model in the plane of the direction and the previous update (`adaptive_step`), and
    the damping follows the agreement of model and loss (`levenberg_marquardt`). A step that makes the loss much worse
    is refused.

    Args:
      solver: what computes the direction.
      initial_damping: λ ≥ 0 of the first step.
      damping: a rule to be used instead; `initial_damping` is then not used.
      step: a rule to be used instead; `damping_search` is then not the default.
      weight_decay: ≥ 0, a number or a schedule; decoupled, −η·weight_decay·x is added to the update after the model and
        the loss have judged it.
      max_increase: a step is refused if it makes the loss f worse than f + max_increase·|f|; None never refuses.
      frozen: parameters that stay as they are: a pytree of bools, a prefix of one, or a function from parameters to it.
      escape: `escape(…)` looks for a way off saddles now and then; None does not, and costs nothing.

    `update` takes the arguments of `saddle_free_newton`'s.

    >>> import saddlefree as sf
    >>> loss = lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2  # Rosenbrock's valley
    >>> tx = sf.adaptive_saddle_free_newton(solver=sf.exact())
    >>> x = jnp.array([-1.0, 1.0])
    >>> state = tx.init(x)
    >>> for _ in range(60):
    ...     updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
    ...     x = optax.apply_updates(x, updates)
    >>> x.round(2)
    Array([1., 1.], dtype=float32)
    """
    check_solver(solver)
    if damping is None:
        searches = step is None and solver.keeps_basis
        damping = damping_search(initial_damping) if searches else levenberg_marquardt(initial_damping)
    if step is None and not hasattr(damping, "trials"):
        step = adaptive_step()
    return _newton(solver, damping, step, weight_decay, max_increase, frozen, escape)


def scale_by_saddle_free(
    solver: Solver = _DEFAULT, damping: Number = 1e-2, *, frozen: Frozen = None
) -> optax.GradientTransformationExtraArgs:
    """The direction alone, (|H| + λI)⁻¹ g, to be chained with other transformations.

    Args:
      solver: what computes the direction.
      damping: λ ≥ 0, a number or a schedule.
      frozen: parameters whose direction is 0: a pytree of bools, a prefix of one, or a function from parameters to it.

    `update` takes the arguments of `saddle_free_newton`'s. What arrives as updates is the right-hand side g.

    >>> import saddlefree as sf
    >>> loss = lambda x: 0.5 * jnp.sum(jnp.array([4.0, -1.0]) * x**2)
    >>> tx = optax.chain(sf.scale_by_saddle_free(sf.exact(), damping=0.0), optax.scale_by_learning_rate(0.5))
    >>> x = jnp.array([1.0, 1.0])
    >>> tx.update(jax.grad(loss)(x), tx.init(x), x, value_fn=loss)[0]
    Array([-0.5,  0.5], dtype=float32)
    """
    check_solver(solver)
    rule = fixed_damping(damping)

    def init(params: Tree) -> ScaleBySaddleFreeState:
        trainable = _trainable(params, frozen)
        g = tree.to_working(trainable)
        figures = {"damping": rule.init(tree.scalar_dtype(g)), **_empty_stats(solver, g)}
        return ScaleBySaddleFreeState(_zero(), solver.init(g), figures, _zero())

    def update(
        updates: Tree, state: ScaleBySaddleFreeState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, ScaleBySaddleFreeState]:
        local = _Local(updates, params, frozen, extra)
        lam = rule.value(jnp.zeros((), local.dtype), state.count)
        solution = solver.solve(System(local.curvature, local.g, lam, refresh=extra.get("refresh")), state.solver)
        finite = tree.all_finite(solution.direction)
        return local.as_updates(tree.where(finite, solution.direction, tree.zeros_like(local.g))), state._replace(
            count=optax.safe_increment(state.count),
            solver=solution.state,
            figures={"damping": lam, **solution.stats},
            nonfinite_steps=state.nonfinite_steps + (~finite).astype(jnp.int32),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _newton(
    solver: Solver,
    damping: Damping,
    rule: Step | None,
    weight_decay: Number,
    max_increase: Number | None,
    frozen: Frozen,
    escape: Escape | None,
) -> optax.GradientTransformationExtraArgs:
    """Puts the parts together; see the head of this file."""
    checks.number("weight_decay", weight_decay, 0)
    if max_increase is not None:
        checks.number("max_increase", max_increase, 0)
    if escape is not None:
        checks.kind("escape", escape, Escape, "None or escape(…)")
    trials: Any = getattr(damping, "trials", None)
    if trials and not solver.keeps_basis:
        raise ValueError(f"damping_search needs a solver that keeps its basis, such as lanczos(), got {solver}")
    if trials and rule:
        raise ValueError(
            "damping_search takes the step from the basis and goes with no other rule for it; "
            f"use adaptive_saddle_free_newton(solver, damping=damping_search(…)), got {rule}"
        )
    measures = damping.learns or max_increase is not None
    models = damping.learns or (rule is not None and rule.uses_products)
    remembers = solver.remembers or (rule is not None and rule.uses_previous)

    def init(params: Tree) -> SaddleFreeState:
        trainable = _trainable(params, frozen)
        g = tree.to_working(trainable)
        dtype = tree.scalar_dtype(g)
        names = ["damping", "learning_rate", "momentum"]
        names += measures * ["value"] + (measures and models) * ["reduction_ratio"]
        names += (escape is not None) * ["escape"]
        return SaddleFreeState(
            count=_zero(),
            solver=solver.init(g),
            damping=damping.init(dtype),
            previous=tree.zeros_like(g) if remembers else None,
            figures={**{name: jnp.zeros((), dtype) for name in names}, **_empty_stats(solver, g)},
            rejected_steps=_zero(),
            nonfinite_steps=_zero(),
            escape=None if escape is None else escape.init(),
        )

    def update(
        updates: Tree, state: SaddleFreeState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, SaddleFreeState]:
        local = _Local(updates, params, frozen, extra)
        lam = damping.value(state.damping, state.count)
        # A product that the step needs anyway is linearised once, here, for the solver too.
        matvec: Any = local.curvature() if models and not trials else None

        def curvature(part: Tree = None) -> MatVec:
            return local.curvature(part) if part is not None or matvec is None else matvec

        solution = solver.solve(System(curvature, local.g, lam, state.previous, extra.get("refresh")), state.solver)
        if rule is None:
            subspace: Any = solution.subspace
            dampings = trials(state.damping, state.count)
            lam, proposal = search(subspace, lambda lam: solver.weights(subspace.values, lam), dampings, local.value)
        else:
            proposal = rule.propose(solution.direction, state.previous, local.model_g, matvec, lam, state.count)
        step, figures = proposal.step, {"learning_rate": proposal.learning_rate, "momentum": proposal.momentum}
        finite = tree.all_finite(step)
        leap, way_out = None, None
        if escape is not None:
            leap, way_out = escape.leap(curvature, local.g, lam, state.escape, state.count)
        refused = jnp.array(False)
        ratio = jnp.ones((), local.dtype)
        if measures:
            before = local.value()
            finite &= jnp.isfinite(before)
            after = proposal.after
            if after is None:
                after = local.value(tree.where(finite, step, tree.zeros_like(step)))
            if models:
                predicted = proposal.predicted
                if predicted is None:
                    predicted = predicted_change(matvec, local.model_g, step)
                figures["reduction_ratio"] = ratio = reduction_ratio(before, after, predicted)
            if leap is not None:
                leapt = local.value(tree.axpy(1, leap, step))
                leap = tree.where(leapt < after, leap, tree.zeros_like(leap))
                after = jnp.where(leapt < after, leapt, after)
            good = jnp.isfinite(after)
            if max_increase is not None:
                good &= after - before <= tree.at(max_increase, state.count, local.dtype) * jnp.abs(before)
            refused = finite & ~good
            figures["value"] = before
        if leap is not None:
            step, figures["escape"] = tree.axpy(1, leap, step), tree.norm(leap)
        taken = finite & ~refused
        # An adaptive learning rate may be negative, where the previous update takes over; a decay never grows weights.
        decay = tree.at(weight_decay, state.count, local.dtype) * jnp.maximum(proposal.learning_rate, 0)
        decayed = tree.axpy(-decay, local.x, step)
        return local.as_updates(tree.where(taken, decayed, tree.zeros_like(step))), SaddleFreeState(
            count=optax.safe_increment(state.count),
            solver=solution.state,
            damping=damping.update(state.damping, state.count, lam, ratio, ~taken),
            previous=tree.where(taken, step, state.previous) if remembers else None,
            figures={"damping": lam, **figures, **solution.stats},
            rejected_steps=state.rejected_steps + refused.astype(jnp.int32),
            nonfinite_steps=state.nonfinite_steps + (~finite).astype(jnp.int32),
            escape=way_out,
        )

    return optax.GradientTransformationExtraArgs(init, update)


class _Local:
    """What one update sees of the problem: trainable parameters only, vectors in working precision."""

    def __init__(self, updates: Tree, params: Tree | None, frozen: Frozen, extra: dict[str, Any]):
        if params is None:
            raise ValueError("params must be given to update(): curvature is taken at the parameters")
        given: dict[str, Any] = {
            name: extra.get(name) for name in ("value", "grad", "value_fn", "curvature_fn", "matvec")
        }
        self._params, self._given = params, given
        self.trainable = _trainable(params, frozen)
        if given["matvec"] is None and given["curvature_fn"] is None and given["value_fn"] is None:
            raise ValueError(
                "value_fn must be given to update(): a function of the parameters that returns the loss, as in "
                "tx.update(grads, state, params, value_fn=lambda params: loss(params, batch))"
            )
        self.x = tree.to_working(self.trainable)
        self.g = tree.to_working(tree.select(self.trainable, updates))
        self.model_g = self.g if given["grad"] is None else tree.to_working(tree.select(self.trainable, given["grad"]))
        self.dtype = tree.scalar_dtype(self.g)

    def curvature(self, part: Tree = None) -> MatVec:
        """The product with H, or with the block of the leaves that are not None in `part`, in working precision."""
        part = self.trainable if part is None else part
        if self._given["matvec"] is not None:
            return block_of(self._given["matvec"], part, self._params)
        fn = self._given["curvature_fn"] or self._given["value_fn"]
        return hessian(lambda block: fn(tree.fill(block, self._params)), tree.select(part, self._params))

    def value(self, step: Tree | None = None) -> jax.Array:
        """The loss at the parameters, or after `step`."""
        if step is None and self._given["value"] is not None:
            return jnp.asarray(self._given["value"]).astype(self.dtype)
        if self._given["value_fn"] is None:
            raise ValueError(
                "value_fn must be given to update() where the damping adapts or max_increase is set, also beside "
                "matvec= or curvature_fn=: the loss after the step is compared with the one before"
            )
        params = self._params if step is None else optax.apply_updates(self._params, self.as_updates(step))
        return checks.scalar_valued("value_fn", self._given["value_fn"])(params).astype(self.dtype)

    def as_updates(self, step: Tree) -> Tree:
        """`step` in the parameters' dtypes, and 0 for those that are frozen."""
        return tree.fill(tree.cast_like(step, self.trainable), tree.zeros_like(self._params))


def _trainable(params: Tree, frozen: Frozen) -> Tree:
    """The parameters that are not frozen; those that are become None, which JAX takes for an empty subtree."""
    if frozen is not None:
        mask = frozen(params) if callable(frozen) else frozen
        params = jax.tree.map(lambda f, x: jax.tree.map(lambda leaf: None if f else leaf, x), mask, params)
    checks.real_parameters(params)
    return params


def _empty_stats(solver: Solver, g: Tree) -> dict[str, jax.Array]:
    """Zeros in the shape of the solver's statistics, found by tracing it with the identity as H."""
    lam = jnp.zeros((), tree.scalar_dtype(g))
    stats = jax.eval_shape(
        lambda g: solver.solve(System(lambda part=None: lambda v: v, g, lam), solver.init(g)).stats, g
    )
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), stats)


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)
