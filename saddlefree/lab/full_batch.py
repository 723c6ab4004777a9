"""Methods for full batches: the library's own runs, and baselines of other authors that have no package.

The library's are driven by `saddlefree.minimisation.Descent`, as `minimise` and `least_squares` drive them: a run may
change its solver on the way, which the host decides between two compiled chunks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from saddlefree import descent, residuals, space, stages
from saddlefree.descent import MinimiseState, Stage
from saddlefree.lab.methods import Circumstances, Method, Values, optax_lbfgs, whole_batch
from saddlefree.lab.task import Batch, Tree
from saddlefree.minimisation import Descent
from saddlefree.space import Space

CHUNK = 128
"""Rows of a Jacobian that are made at a time."""


class RunState(NamedTuple):
    """A run of the library."""

    run: MinimiseState
    model_state: Tree
    ended: Any  # whether it has: with the status that `minimise` would return

    @property
    def params(self) -> Tree:
        """The best so far, which `minimise` returns."""
        return self.run.best_params


def driven(
    name: str, around: Circumstances, choose: Callable[[Callable, Space], tuple[Stage, ...]], *, squares: bool
) -> Method:
    """Steps of `minimise`, or of `least_squares` where `squares` holds.

    Args:
      name: of the entry.
      around: the circumstances.
      choose: (loss or residuals, parameters) to the stages.
      squares: whether it sees residuals.
    """
    whole_batch(name, around)
    task, batch = around.task, around.task.parts["train"]
    fixed = task.init(jax.random.key(0))[1]
    if squares:
        fn = task.residual_fn(fixed, batch)
    else:
        fn = lambda params: task.loss(params, fixed, batch, jax.random.key(0))[0]  # noqa: E731
    made: list[Descent] = []

    def descent_of(params: Tree) -> Descent:
        if not made:
            made.append(Descent(fn, choose(fn, Space(params)), squares, tolerance=0.0))
        return made[0]

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> RunState:
        return RunState(descent_of(params).start(params, seed), model_state, np.array(False))

    def advance(state: RunState, batch: Batch, count: int) -> tuple[RunState, dict[str, np.ndarray]]:
        before = np.asarray(state.run.value)
        run, rows, status = descent_of(state.params).advance(state.run, count)
        # A row has the loss before its step; a run that ends has fewer rows, but one at least.
        losses = np.concatenate([[before], rows["value"]])[: max(1, len(rows["value"]))]
        return RunState(run, state.model_state, np.array(status is not None)), {"loss": losses}

    def step(state: RunState, batch: Batch) -> tuple[RunState, dict[str, Any]]:
        state, figures = advance(state, batch, 1)
        return state, {"loss": figures["loss"][0]}

    def prepare(state: RunState) -> None:
        run = descent_of(state.params)
        program = descent.program(fn, run.stages, squares)
        for index in range(len(run.stages)):
            run.advance(program.enter(index, state.run), 1)
        jax.block_until_ready(program.escape(state.run, program.examine(state.run)))

    return Method(init, step, traceable=False, advance=advance, prepare=prepare, ended=lambda state: bool(state.ended))


def single(name: str, around: Circumstances, solver: Any, rule: Any = None, *, squares: bool = False) -> Method:
    """The same with a given solver."""
    return driven(name, around, lambda fn, layout: stages.single(solver, rule), squares=squares)


def minimise(around: Circumstances) -> Method:
    """What `saddlefree.minimise(value_fn, params)` does."""
    return driven("minimise", around, lambda fn, layout: stages.choose(layout), squares=False)


def least_squares(around: Circumstances) -> Method:
    """What `saddlefree.least_squares(residual_fn, params)` does."""
    return driven("least-squares", around, stages.choose_for_residuals, squares=True)


class NaturalState(NamedTuple):
    """A run of `natural_gradient`."""

    params: Tree
    model_state: Tree
    direction: jax.Array  # φ


def natural_gradient(name: str, v: Values, around: Circumstances, momentum: float) -> Method:
    """Energy natural gradient in the row space, ENGD-W, and with momentum μ SPRING, by a grid of step lengths.

    φ ← μφ − Jᵀ(JJᵀ + λI)⁻¹(r + μJφ), x ← x + αφ, α the best of 2⁰, 2⁻¹, …, 2⁻³⁰ (Guzmán-Cordero et al. 2025;
    Goldshlager et al. 2024). Where P < N it is the same as (JᵀJ + λI)⁻¹Jᵀ(r + μJφ), which is then cheaper.
    """
    whole_batch(name, around)
    lengths = 0.5 ** np.arange(31)

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> NaturalState:
        layout = Space(params)
        return NaturalState(params, model_state, jnp.zeros(layout.size, layout.dtype))

    def step(state: NaturalState, batch: Batch) -> tuple[NaturalState, dict[str, jax.Array]]:
        residual_fn, layout = around.task.residual_fn(state.model_state, batch), Space(state.params)
        loss = residuals.half_square(residual_fn)
        r, J = residuals.jacobian(residual_fn, layout, CHUNK, by_rows=True)
        kept = momentum * state.direction
        aim = r + J @ kept
        if J.shape[0] <= J.shape[1]:
            new = kept - J.T @ _solve(residuals.gram(J), aim, v["damping"])
        else:
            new = kept - _solve(residuals.gram(J.T), J.T @ aim, v["damping"])
        _, restore = space.ravel(layout.zeros())

        def moved(length: jax.Array) -> Tree:
            return layout.unpack(layout.moved(restore(length * new)))

        tried = jnp.asarray(lengths, layout.dtype)
        losses = jax.lax.map(lambda length: loss(moved(length)), tried)
        best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
        good = jnp.isfinite(losses[best]) & space.all_finite(new)
        params = space.where(good, moved(tried[best]), state.params)
        return NaturalState(params, state.model_state, jnp.where(good, new, 0)), {"loss": jnp.sum(r**2) / 2}

    return Method(init, step)


def _solve(matrix: jax.Array, aim: jax.Array, damping: float) -> jax.Array:
    factor = jax.scipy.linalg.cho_factor(matrix + damping * jnp.eye(len(matrix), dtype=matrix.dtype))
    return jax.scipy.linalg.cho_solve(factor, aim)


class TwoPhases(NamedTuple):
    """Adam's state and L-BFGS's."""

    params: Tree
    model_state: Tree
    adam: Any
    lbfgs: Any
    steps: jax.Array


def adam_lbfgs(v: Values, around: Circumstances) -> Method:
    """Adam for `adam_steps` steps, then L-BFGS of Optax, as is usual for physics-informed networks."""
    whole_batch("adam-lbfgs", around)
    adam = optax.adam(v["learning_rate"])
    lbfgs = optax_lbfgs(v["memory"], evaluations=25)

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> TwoPhases:
        zero = jnp.zeros((), jnp.int32)
        state = TwoPhases(params, model_state, adam.init(params), lbfgs.init(params), zero)
        return jax.tree.map(jnp.copy, state)  # L-BFGS keeps the parameters too, and a run donates all of it

    def step(state: TwoPhases, batch: Batch) -> tuple[TwoPhases, dict[str, jax.Array]]:
        def value_fn(params: Tree) -> jax.Array:
            return around.task.loss(params, state.model_state, batch, jax.random.key(0))[0]

        def first(state: TwoPhases) -> tuple[TwoPhases, jax.Array]:
            value, grad = jax.value_and_grad(value_fn)(state.params)
            updates, new = adam.update(grad, state.adam, state.params)
            return state._replace(params=optax.apply_updates(state.params, updates), adam=new), value

        def second(state: TwoPhases) -> tuple[TwoPhases, jax.Array]:
            value, grad = optax.value_and_grad_from_state(value_fn)(state.params, state=state.lbfgs)
            updates, new = lbfgs.update(grad, state.lbfgs, state.params, value=value, grad=grad, value_fn=value_fn)
            return state._replace(params=optax.apply_updates(state.params, updates), lbfgs=new), value

        state, value = jax.lax.cond(state.steps < v["adam_steps"], first, second, state)
        return state._replace(steps=state.steps + 1), {"loss": value}

    return Method(init, step)
