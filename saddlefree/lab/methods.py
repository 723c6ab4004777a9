"""How optimisers train: built for a task and a number of steps, each is a state and a step to the next one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

import saddlefree as sf
from saddlefree.lab.errors import UserError
from saddlefree.lab.task import Batch, Task, Tree

Values = Mapping[str, Any]


class Method(NamedTuple):
    """How a run begins and goes on. A state has `params` and `model_state`."""

    init: Callable[[Tree, Tree, Any, Batch], Any]  # (parameters, model state, seed, batch) to the state
    step: Callable[[Any, Batch], tuple[Any, dict[str, jax.Array]]]  # to the state and figures, `loss` among them
    traceable: bool = True  # whether steps can be compiled into a loop and mapped over seeds
    advance: Callable[[Any, Batch, int], tuple[Any, dict[str, Any]]] | None = None  # at most so many steps, by the host
    prepare: Callable[[Any], None] | None = None  # compiles what a run may need later on; it leaves the state alone
    ended: Callable[[Any], bool] = lambda state: False  # whether further steps would change nothing


class Circumstances(NamedTuple):
    """What a method may depend on beside its hyperparameters."""

    task: Task
    steps: int  # in the whole run, over which rates decay
    full_batch: bool
    unlooped: bool = False  # loops and branches are slow: a convolutional network on a CPU


def whole_batch(name: str, around: Circumstances) -> None:
    """Refuses mini-batches, for a method that compares losses of two steps."""
    if not around.full_batch:
        raise UserError(f"{name} compares losses of steps, which must be of the same batch: train with the full one")


def transformed(tx: optax.GradientTransformation, around: Circumstances) -> Method:
    """A method from an Optax transformation."""

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> sf.training.TrainState:
        return sf.training.init(params, tx, model_state=model_state, seed=seed)

    return Method(init, sf.training.make_step(around.task.loss, tx, donate=False))


def schedule(values: Values, around: Circumstances) -> Any:
    """The learning rate, decaying to zero over the run where that is asked for."""
    rate = values["learning_rate"]
    if values["decay"] == "linear":
        return optax.linear_schedule(rate, 0.0, around.steps)
    return optax.cosine_decay_schedule(rate, around.steps) if values["decay"] == "cosine" else rate


def unrolled(solver: Any, around: Circumstances) -> Any:
    """The solver, without loops where they are slow."""
    return dataclasses.replace(solver, unroll=True) if around.unlooped and hasattr(solver, "unroll") else solver


def low_rank(v: Values, around: Circumstances) -> Method:
    """Saddle-free Newton with a curvature of low rank; where branches are slow, refreshes are compiled apart."""
    method = transformed(_low_rank(v, around), around)
    if not around.unlooped:
        return method

    def step(state: sf.training.TrainState, batch: Batch) -> tuple[sf.training.TrainState, dict[str, jax.Array]]:
        return method.step(state, batch, refresh=bool(state.step % v["refresh_every"] == 0))  # type: ignore[call-arg]

    return Method(method.init, step, traceable=False)


def _low_rank(v: Values, around: Circumstances) -> optax.GradientTransformation:
    rate = schedule(v, around)
    solver = sf.low_rank(
        rank=v["rank"],
        refresh_every=v["refresh_every"],
        averaging=v["averaging"],
        base=optax.flatten(optax.adam(rate, b1=v["averaging"], b2=v["second_moment"], eps=v["epsilon"])),
        surprise=v["surprise"] or None,
    )
    return sf.saddle_free_newton(v["newton_rate"], damping=v["damping"], solver=unrolled(solver, around))


def optax_lbfgs(memory: int, evaluations: int) -> optax.GradientTransformationExtraArgs:
    """L-BFGS with `memory` pairs, and a line search of at most so many evaluations that begins with a step of 1."""
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=evaluations, initial_guess_strategy="one")
    return optax.lbfgs(memory_size=memory, linesearch=search)


def lbfgs(v: Values, around: Circumstances) -> Method:
    """Several iterations a step, on the same batch; a full batch's value and gradient are those of the line search."""
    tx = optax_lbfgs(v["memory"], v["evaluations"])

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> sf.training.TrainState:
        return sf.training.init(params, tx, model_state=model_state, seed=seed)

    def step(state: sf.training.TrainState, batch: Batch) -> tuple[sf.training.TrainState, dict[str, jax.Array]]:
        key, following = jax.random.split(state.key)

        def value_fn(params: Tree) -> jax.Array:
            return around.task.loss(params, state.model_state, batch, key)[0]

        known = optax.value_and_grad_from_state(value_fn) if around.full_batch else None

        def iterate(carry: tuple[Tree, Any], _: None) -> tuple[tuple[Tree, Any], jax.Array]:
            params, opt_state = carry
            value, grad = known(params, state=opt_state) if known else jax.value_and_grad(value_fn)(params)
            updates, opt_state = tx.update(grad, opt_state, params, value=value, grad=grad, value_fn=value_fn)
            return (optax.apply_updates(params, updates), opt_state), value

        (params, opt_state), values = jax.lax.scan(iterate, (state.params, state.opt_state), None, v["iterations"])
        _, (model_state, _) = around.task.loss(params, state.model_state, batch, key)
        state = sf.training.TrainState(params, opt_state, model_state, following, state.step + 1)
        return state, {"loss": values[0]}

    return Method(init, step)


def kfac(v: Values, around: Circumstances, *, adapts: bool, ema: float) -> Method:
    """K-FAC, with its inverses and its damping renewed in each step, as in the paper."""
    if around.task.terms is None:
        raise UserError("kfac needs a loss of squared errors or cross-entropies: this problem has none")
    from saddlefree.lab.kfac import Kfac  # a heavy import, and only here

    if adapts:
        method = Kfac(around.task, adapts=True, damping=v["initial_damping"], ema=ema)
    else:
        rate, momentum = schedule(v, around), v["momentum"]
        method = Kfac(around.task, adapts=False, damping=v["damping"], ema=ema, rate=rate, momentum=momentum)
    return Method(method.init, method.step, traceable=False)
