"""The compiled parts of `minimise`: a chunk of steps, and the way off a saddle.

A step depends on the state alone, so that where a chunk ends, and where a run is interrupted, changes no bit.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import checks, space, spectrum
from saddlefree.curvature import hessian
from saddlefree.optimiser import adaptive_saddle_free_newton
from saddlefree.residuals import half_square
from saddlefree.rules.base import Rule
from saddlefree.rules.line_search import NOISE, LineSearchState
from saddlefree.solvers.base import Solver
from saddlefree.space import Space, Tree

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

RUNNING, SMALL, IDLE, NONFINITE = range(4)
"""What a step finds: nothing to stop for; a gradient within the tolerance; no progress; a non-finite number."""

Row = dict[str, jax.Array]
COLUMNS = ("value", "gradient_norm", "damping", "learning_rate", "products", "evaluations", "escape")
"""What a row holds."""


class MinimiseState(NamedTuple):
    """All that a run needs to go on, as a pytree."""

    params: Tree
    value: jax.Array
    gradient: Tree
    norm: jax.Array  # ‖gradient‖
    optimiser: Any
    best_params: Tree
    best_value: jax.Array
    first_norm: jax.Array  # ‖gradient‖ at the start
    reference: tuple[jax.Array, jax.Array]  # loss and gradient norm when progress was last made
    idle: jax.Array  # steps since then
    steps: jax.Array
    key: jax.Array
    code: jax.Array  # what the last step found


class Escape(NamedTuple):
    """What a search for negative curvature found."""

    state: MinimiseState  # after the escape step, where there is one
    row: Row
    negative: jax.Array  # whether the smallest eigenvalue is negative
    lower: jax.Array  # whether the loss is lower along its eigenvector


class Program:
    """The functions of one problem, compiled when they are first called.

    Args:
      fn: the loss, or residuals where `residuals` holds.
      solver, rule: of the optimiser.
      residuals: the loss is then ½‖fn(params)‖².
    """

    def __init__(self, fn: Callable[[Tree], Any], solver: Solver, rule: Rule, residuals: bool):
        self.tx = adaptive_saddle_free_newton(solver, rule=rule)
        self.rule = rule
        self.value_fn = checks.scalar_valued("value_fn", half_square(fn) if residuals else fn)
        self.known = {"value_fn": self.value_fn, **({"residual_fn": fn} if residuals else {})}
        self.start: Callable[[Tree, jax.Array], MinimiseState] = jax.jit(self._start)
        self.judge: Callable[[MinimiseState, jax.Array], MinimiseState] = jax.jit(self._judge)
        self.escape: Callable[[MinimiseState], Escape] = jax.jit(self._escape)
        self.run: Callable[[MinimiseState, jax.Array, jax.Array], tuple[MinimiseState, Row]] = jax.jit(
            self._run, donate_argnums=0
        )

    def _evaluate(self, params: Tree) -> tuple[jax.Array, Tree, jax.Array]:
        """Loss, gradient and its norm."""
        value, gradient = jax.value_and_grad(self.value_fn)(params)
        return value.astype(space.scalar_dtype(params)), gradient, space.norm(space.to_working(gradient))

    def _start(self, params: Tree, key: jax.Array) -> MinimiseState:
        value, gradient, norm = self._evaluate(params)
        zero = jnp.zeros((), jnp.int32)
        best = jnp.where(jnp.isfinite(value), value, jnp.inf)
        optimiser = self.tx.init(params)
        reference = best, jnp.where(jnp.isfinite(norm), norm, jnp.inf)
        return MinimiseState(
            params, value, gradient, norm, optimiser, params, best, norm, reference, zero, zero, key, zero
        )

    def _judge(self, state: MinimiseState, tolerance: jax.Array) -> MinimiseState:
        """The state with its code."""
        small = (state.norm <= tolerance) & (state.value <= state.best_value + NOISE * jnp.abs(state.best_value))
        code = jnp.where(small, SMALL, jnp.where(state.idle >= PATIENCE, IDLE, RUNNING))
        finite = jnp.isfinite(state.value) & jnp.isfinite(state.norm)
        return state._replace(code=jnp.where(finite, code, NONFINITE).astype(jnp.int32))

    def _run(self, state: MinimiseState, tolerance: jax.Array, count: jax.Array) -> tuple[MinimiseState, Row]:
        """At most `count` steps, and a row of figures for each."""
        _, row = jax.eval_shape(self._step, state)
        rows = jax.tree.map(lambda x: jnp.zeros((CHUNK, *x.shape), x.dtype), row)
        Carry = tuple[MinimiseState, Row, jax.Array]

        def unfinished(carry: Carry) -> jax.Array:
            state, _, done = carry
            return (done < count) & (state.code == RUNNING)

        def iterate(carry: Carry) -> Carry:
            state, rows, done = carry
            state, row = self._step(state)
            rows = jax.tree.map(lambda column, x: column.at[done].set(x), rows, row)
            return self._judge(state, tolerance), rows, done + 1

        state, rows, _ = jax.lax.while_loop(unfinished, iterate, (state, rows, jnp.zeros((), jnp.int32)))
        return state, rows

    def _step(self, state: MinimiseState) -> tuple[MinimiseState, Row]:
        updates, optimiser = self.tx.update(
            state.gradient, state.optimiser, state.params, value=state.value, **self.known
        )
        params = optax.apply_updates(state.params, updates)
        if isinstance(optimiser.rule, LineSearchState):
            # The search has been at the point that it chose; where it chose none, the parameters are the old ones.
            found, layout = optimiser.rule, Space(params)
            value, gradient = space.where(
                found.known, (found.value, layout.unpack(found.gradient)), (state.value, state.gradient)
            )
            norm, evaluations = space.norm(space.to_working(gradient)), optimiser.figures["evaluations"]
        else:
            value, gradient, norm = self._evaluate(params)
            evaluations = jnp.asarray(self.rule.evaluations + 1, value.dtype)
        new = self._moved(state, params, value, gradient, norm)._replace(optimiser=optimiser)
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
        figures = state.value, state.norm, damping, learning_rate, products, evaluations, escape
        return dict(zip(COLUMNS, figures, strict=True))

    def _escape(self, state: MinimiseState) -> Escape:
        """Products from a random start give the smallest eigenvalue; along its vector the lowest of several losses."""
        layout = Space(state.params)
        x = layout.pack(layout.like)
        key, following = jax.random.split(state.key)
        product = hessian(self.value_fn, state.params)
        count = spectrum.krylov_size(PRODUCTS, x)
        basis, T, products = spectrum.lanczos_decomposition(
            lambda v: layout.pack(product(layout.unpack(v))), space.random_normal(key, x), count
        )
        values, vectors = jnp.linalg.eigh(T.dense())
        v = space.combine(basis, vectors[:, 0])
        threshold = max(THRESHOLD, 100 * float(jnp.finfo(layout.dtype).eps))
        negative = values[0] < -threshold * jnp.max(jnp.abs(values))
        lengths = jnp.maximum(1, space.norm(x)) * 0.5 ** jnp.arange(TRIALS, dtype=layout.dtype)
        lengths = jnp.concatenate([lengths, -lengths])

        def after(length: jax.Array) -> Tree:
            return layout.unpack(layout.moved(space.scale(length, v)))

        losses = jax.lax.map(lambda length: self.value_fn(after(length)).astype(layout.dtype), lengths)
        best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
        lower = losses[best] < state.value
        params = after(lengths[best])
        value, gradient, norm = self._evaluate(params)
        new = self._moved(state, params, value, gradient, norm)._replace(
            optimiser=self.tx.init(params), reference=(value, norm), idle=jnp.zeros((), jnp.int32), key=following
        )
        new = new._replace(code=jnp.full((), RUNNING, jnp.int32))
        zero = jnp.zeros((), layout.dtype)
        evaluations = jnp.asarray(2 * TRIALS + 1, jnp.int32)
        return Escape(new, self._row(new, zero, zero, products, evaluations, jnp.array(True)), negative, lower)


@functools.lru_cache(maxsize=16)
def program(fn: Callable[[Tree], Any], solver: Solver, rule: Rule, residuals: bool) -> Program:
    """The program of a function, a solver and a rule; the last ones are kept."""
    return Program(fn, solver, rule, residuals)
