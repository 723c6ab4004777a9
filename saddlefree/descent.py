"""The compiled parts of `minimise`: a chunk of steps, the way from one stage to the next, and the way off a saddle.

A run has stages, each a solver with its rule. A step, and when a stage ends, depend on the state alone, so that where a
chunk ends, and where a run is interrupted, changes no bit.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import checks, space, spectrum
from saddlefree.convolutions import laid_out
from saddlefree.curvature import hessian
from saddlefree.optimiser import adaptive_saddle_free_newton
from saddlefree.residuals import half_square
from saddlefree.rules.base import Rule
from saddlefree.rules.line_search import NOISE, LineSearchState
from saddlefree.solvers.base import Solver
from saddlefree.space import Space, Tree, Vector

CHUNK = 256
"""The most steps of a chunk."""
PATIENCE = 30
"""Steps without progress after which a run has stalled."""
PRODUCTS = 60
"""The most products of a search for negative curvature."""
THRESHOLD = 1e-6
"""An eigenvalue counts as negative below −1e-6 of the largest, or where rounding is more than that, below −100 ε."""
TRIALS = 24
"""The lengths that are tried along negative curvature, on either side."""

RUNNING, SMALL, IDLE, NONFINITE, SWITCH = range(5)
"""What a step finds: nothing to stop for; a gradient within the tolerance; no progress; a non-finite number; the end of
a stage."""

Row = dict[str, jax.Array]
COLUMNS = ("value", "gradient_norm", "damping", "learning_rate", "products", "evaluations", "escape", "stage")
"""What a row holds."""


class Reason(enum.IntEnum):
    """Why a stage ended.

    >>> Reason.SLOW.message
    'the loss fell too slowly'
    """

    NONE = 0
    SLOW = 1
    STUCK = 2

    @property
    def message(self) -> str:
        """The same in words."""
        return _REASONS[self]


_REASONS = {
    Reason.NONE: "it has not ended",
    Reason.SLOW: "the loss fell too slowly",
    Reason.STUCK: "no step made progress",
}


class Stage(NamedTuple):
    """A part of a run.

    Attributes:
      solver, rule: what makes its steps.
      pace: it ends where over `window` steps ln f falls by less than `pace` a step, ≥ 0; 0 never.
      window: steps, ≥ 1.
      following: the stage after it, an index; None where it is the last. A stage that is stuck ends too.
    """

    solver: Solver
    rule: Rule
    pace: float = 0.0
    window: int = 10
    following: int | None = None

    @property
    def name(self) -> str:
        """That of its solver."""
        return type(self.solver).__name__


class MinimiseState(NamedTuple):
    """All that a run needs to go on, as a pytree."""

    params: Tree
    value: jax.Array
    gradient: Tree
    norm: jax.Array  # ‖gradient‖
    optimisers: tuple[Any, ...]  # the state of each stage's optimiser
    stage: jax.Array  # the index of the present one
    entered: jax.Array  # loss where it began
    window: tuple[jax.Array, jax.Array]  # loss where the window began, and the steps since
    stuck: jax.Array  # stages in a row that ended without progress worth mentioning
    best_params: Tree
    best_value: jax.Array
    first_norm: jax.Array  # ‖gradient‖ at the start
    reference: tuple[jax.Array, jax.Array]  # loss and gradient norm when progress was last made
    idle: jax.Array  # steps since then
    steps: jax.Array
    key: jax.Array
    code: jax.Array  # what the last step found
    taken: jax.Array  # the steps of each stage
    reasons: jax.Array  # why each stage ended last, a `Reason`
    checked: jax.Array  # products of all searches for negative curvature


class Curvature(NamedTuple):
    """What a search for negative curvature found."""

    negative: jax.Array  # whether the smallest eigenvalue is negative
    vector: Vector  # its eigenvector
    rounded: jax.Array  # whether the gradient is as small as rounding of the parameters allows
    products: jax.Array
    key: jax.Array  # of the next search


class Escape(NamedTuple):
    """The lowest loss along negative curvature."""

    state: MinimiseState  # after the step to it
    row: Row
    lower: jax.Array  # whether it is lower than that of the saddle


class Program:
    """The functions of one problem, compiled when they are first called.

    Args:
      fn: the loss, or residuals where `residuals` holds.
      stages: of the run; it begins with the first.
      residuals: the loss is then ½‖fn(params)‖².
    """

    def __init__(self, fn: Callable[[Tree], Any], stages: tuple[Stage, ...], residuals: bool):
        self.stages = stages
        self.txs = tuple(adaptive_saddle_free_newton(stage.solver, rule=stage.rule) for stage in stages)
        self.value_fn = checks.scalar_valued("value_fn", half_square(fn) if residuals else fn)
        self.known = {"value_fn": self.value_fn, **({"residual_fn": fn} if residuals else {})}
        self.start: Callable[[Tree, jax.Array, jax.Array | None], MinimiseState] = jax.jit(self._start)
        self.judge: Callable[[int, MinimiseState, jax.Array], MinimiseState] = jax.jit(self._judge, static_argnums=0)
        self.enter: Callable[[int, MinimiseState], MinimiseState] = jax.jit(self._enter, static_argnums=0)
        self.examine: Callable[[MinimiseState], Curvature] = jax.jit(self._examine)
        self.escape: Callable[[MinimiseState, Curvature], Escape] = jax.jit(self._escape)
        self.run: Callable[[int, MinimiseState, jax.Array, jax.Array], tuple[MinimiseState, Row]] = jax.jit(
            self._run, static_argnums=0, donate_argnums=1
        )

    def _evaluate(self, params: Tree) -> tuple[jax.Array, Tree, jax.Array]:
        """Loss, gradient and its norm."""
        value, gradient = laid_out(jax.value_and_grad(self.value_fn))(params)
        return value.astype(space.scalar_dtype(params)), gradient, _norm(gradient)

    def _start(self, params: Tree, key: jax.Array, tolerance: jax.Array | None) -> MinimiseState:
        value, gradient, norm = self._evaluate(params)
        zero, none = jnp.zeros((), jnp.int32), jnp.zeros(len(self.stages), jnp.int32)
        best = jnp.where(jnp.isfinite(value), value, jnp.inf)
        state = MinimiseState(
            params=params,
            value=value,
            gradient=gradient,
            norm=norm,
            optimisers=tuple(tx.init(params) for tx in self.txs),
            stage=zero,
            entered=best,
            window=(best, zero),
            stuck=zero,
            best_params=params,
            best_value=best,
            first_norm=norm,
            reference=(best, jnp.where(jnp.isfinite(norm), norm, jnp.inf)),
            idle=zero,
            steps=zero,
            key=key,
            code=zero,
            taken=none,
            reasons=none,
            checked=zero,
        )
        return self._judge(0, state, default_tolerance(norm) if tolerance is None else tolerance)

    def _judge(self, index: int, state: MinimiseState, tolerance: jax.Array) -> MinimiseState:
        """The state with its code, and with the reason where the stage ends."""
        stage = self.stages[index]
        small = (state.norm <= tolerance) & (state.value <= state.best_value + NOISE * jnp.abs(state.best_value))
        idle = state.idle >= PATIENCE
        code = jnp.where(small, SMALL, jnp.where(idle, IDLE, RUNNING))
        if stage.following is not None:
            (first, count), before = state.window, state.reasons[index]
            full = count >= stage.window
            fallen = jnp.log(first) - jnp.log(jnp.maximum(state.value, jnp.finfo(first.dtype).tiny))
            slow = full & (fallen < stage.pace * stage.window) & (first > 0) if stage.pace else jnp.array(False)
            stuck = idle & (state.stuck < len(self.stages) - 1)
            code = jnp.where((code == IDLE) & stuck, SWITCH, jnp.where((code == RUNNING) & slow, SWITCH, code))
            reason = jnp.where(code == SWITCH, jnp.where(idle, Reason.STUCK, Reason.SLOW), before).astype(jnp.int32)
            state = state._replace(
                reasons=state.reasons.at[index].set(reason),
                window=space.where(full, (state.value, jnp.zeros_like(count)), state.window),
            )
        finite = jnp.isfinite(state.value) & jnp.isfinite(state.norm)
        return state._replace(code=jnp.where(finite, code, NONFINITE).astype(jnp.int32))

    def _enter(self, index: int, state: MinimiseState) -> MinimiseState:
        """The state at the beginning of a stage."""
        optimisers = list(state.optimisers)
        optimisers[index] = self.txs[index].init(state.params)
        zero = jnp.zeros((), jnp.int32)
        again = jnp.where(state.value > 0.9 * state.entered, state.stuck + 1, 1)
        return state._replace(
            optimisers=tuple(optimisers),
            stage=jnp.full((), index, jnp.int32),
            stuck=jnp.where(state.idle >= PATIENCE, again, 0).astype(jnp.int32),
            entered=state.value,
            window=(state.value, zero),
            idle=zero,
            code=zero,
        )

    def _run(
        self, index: int, state: MinimiseState, tolerance: jax.Array, count: jax.Array
    ) -> tuple[MinimiseState, Row]:
        """At most `count` steps of a stage, and a row of figures for each."""
        _, row = jax.eval_shape(lambda state: self._step(index, state), state)
        rows = jax.tree.map(lambda x: jnp.zeros((CHUNK, *x.shape), x.dtype), row)
        Carry = tuple[MinimiseState, Row, jax.Array]

        def unfinished(carry: Carry) -> jax.Array:
            state, _, done = carry
            return (done < count) & (state.code == RUNNING)

        def iterate(carry: Carry) -> Carry:
            state, rows, done = carry
            state, row = self._step(index, state)
            rows = jax.tree.map(lambda column, x: column.at[done].set(x), rows, row)
            return self._judge(index, state, tolerance), rows, done + 1

        state, rows, _ = jax.lax.while_loop(unfinished, iterate, (state, rows, jnp.zeros((), jnp.int32)))
        return state, rows

    def _step(self, index: int, state: MinimiseState) -> tuple[MinimiseState, Row]:
        updates, optimiser = self.txs[index].update(
            state.gradient, state.optimisers[index], state.params, value=state.value, **self.known
        )
        params = optax.apply_updates(state.params, updates)
        if isinstance(optimiser.rule, LineSearchState):
            # The search has been at the point that it chose; where it chose none, the parameters are the old ones.
            found, layout = optimiser.rule, Space(params)
            value = jnp.where(found.known, found.value, state.value)
            # Chosen before it is unpacked: one kernel in place of one for each leaf.
            packed = space.where(found.known, found.gradient, layout.pack(state.gradient))
            gradient, evaluations = layout.unpack(packed), optimiser.figures["evaluations"]
            norm = jnp.where(found.known, space.norm(packed), state.norm)
        else:
            value, gradient, norm = self._evaluate(params)
            evaluations = jnp.asarray(self.stages[index].rule.evaluations + 1, value.dtype)
        optimisers = (*state.optimisers[:index], optimiser, *state.optimisers[index + 1 :])
        new = self._moved(state, params, value, gradient, norm)._replace(optimisers=optimisers)
        figures = optimiser.figures
        return new, self._row(
            new, figures["damping"], figures["learning_rate"], figures["products"], evaluations, jnp.array(False)
        )

    def _moved(
        self, state: MinimiseState, params: Tree, value: jax.Array, gradient: Tree, norm: jax.Array
    ) -> MinimiseState:
        """The state after a step to `params`."""
        reference, lowest = state.reference
        visible = 4 * jnp.finfo(value.dtype).eps * jnp.abs(reference)
        progress = (value < reference - visible) | (norm < 0.9 * lowest)
        better = value < state.best_value
        return state._replace(
            params=params,
            value=value,
            gradient=gradient,
            norm=norm,
            best_params=space.where(better, params, state.best_params),
            best_value=jnp.where(better, value, state.best_value),
            reference=(
                jnp.where(progress, jnp.fmin(value, reference), reference),
                jnp.where(progress, jnp.fmin(norm, lowest), lowest),
            ),
            idle=jnp.where(progress, 0, state.idle + 1).astype(jnp.int32),
            steps=state.steps + 1,
            taken=state.taken.at[state.stage].add(1),
            window=(state.window[0], state.window[1] + 1),
        )

    def _row(
        self,
        state: MinimiseState,
        damping: jax.Array,
        learning_rate: jax.Array,
        products: jax.Array,
        evaluations: jax.Array,
        escape: jax.Array,
    ) -> Row:
        evaluations = evaluations.astype(jnp.int32)
        figures = state.value, state.norm, damping, learning_rate, products, evaluations, escape, state.stage
        return dict(zip(COLUMNS, figures, strict=True))

    def _examine(self, state: MinimiseState) -> Curvature:
        """Products from a random start give the smallest eigenvalue."""
        layout = Space(state.params)
        x = layout.pack(layout.like)
        key, following = jax.random.split(state.key)
        product = hessian(self.value_fn, state.params)
        count = spectrum.krylov_size(PRODUCTS, x)
        basis, T, products = spectrum.lanczos_decomposition(
            lambda v: layout.pack(product(layout.unpack(v))), space.random_normal(key, x), count
        )
        values, vectors = jnp.linalg.eigh(T.dense())
        largest = jnp.max(jnp.abs(values))
        threshold = max(THRESHOLD, 100 * float(jnp.finfo(layout.dtype).eps))
        # The gradient of the nearest parameters that there are differs by as much.
        rounded = state.norm <= 10 * jnp.finfo(layout.dtype).eps * largest * space.norm(x)
        vector = space.combine(basis, vectors[:, 0])
        return Curvature(values[0] < -threshold * largest, vector, rounded, products.astype(jnp.int32), following)

    def _escape(self, state: MinimiseState, found: Curvature) -> Escape:
        """The lowest of several losses along the eigenvector of the smallest eigenvalue."""
        layout = Space(state.params)
        lengths = jnp.maximum(1, space.norm(layout.pack(layout.like))) * 0.5 ** jnp.arange(TRIALS, dtype=layout.dtype)
        lengths = jnp.concatenate([lengths, -lengths])

        def attempt(i: jax.Array, best: Tree) -> Tree:
            params = layout.unpack(layout.moved(space.scale(lengths[i], found.vector)))
            # With its gradient, though one is enough: the loss is compiled once.
            value, gradient, norm = self._evaluate(params)
            return space.where((value < best[1]) | (i == 0), (params, value, gradient, norm), best)

        begin = state.params, jnp.full_like(state.value, jnp.inf), state.gradient, state.norm
        params, value, gradient, norm = jax.lax.fori_loop(0, lengths.size, attempt, begin)
        zero = jnp.zeros((), jnp.int32)
        new = self._moved(state, params, value, gradient, norm)._replace(
            optimisers=tuple(tx.init(params) for tx in self.txs),
            reference=(value, norm),
            window=(value, zero),
            idle=zero,
            stuck=zero,
            key=found.key,
            code=jnp.full((), RUNNING, jnp.int32),
            checked=state.checked + found.products,
        )
        none = jnp.zeros((), layout.dtype)
        evaluations = jnp.asarray(lengths.size, jnp.int32)
        row = self._row(new, none, none, found.products, evaluations, jnp.array(True))
        return Escape(new, row, value < state.value)


def default_tolerance(first_norm: jax.Array) -> jax.Array:
    """10 ε times the norm of the gradient at the start."""
    return 10 * jnp.finfo(first_norm.dtype).eps * first_norm


def _norm(gradient: Tree) -> jax.Array:
    """‖gradient‖; packed, because what compiles would otherwise grow with the leaves."""
    return space.norm(Space(gradient).pack(gradient))


@functools.lru_cache(maxsize=16)
def program(fn: Callable[[Tree], Any], stages: tuple[Stage, ...], residuals: bool) -> Program:
    """The program of a function and its stages; the last ones are kept."""
    return Program(fn, stages, residuals)
