"""How optimisers train: built for a task and a number of steps, each is a state and a step to the next one."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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


def whole_batch(name: str, around: Circumstances) -> None:
    """Refuses mini-batches, for a method that compares losses of two steps."""
    if not around.full_batch:
        raise UserError(f"{name} compares losses of steps, which must be of the same batch: train with the full one")


def transformed(tx: optax.GradientTransformation, around: Circumstances) -> Method:
    """A method from an Optax transformation."""

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> sf.training.TrainState:
        return sf.training.init(params, tx, model_state=model_state, seed=seed)

    return Method(init, sf.training.make_step(around.task.loss, tx, donate=False))


class Averaged(NamedTuple):
    """A method's state and the average of its parameters and model state, which is what is evaluated."""

    inner: Any
    mean: Tree  # of (parameters, model state), in float32 or wider
    steps: jax.Array  # so far

    @property
    def params(self) -> Tree:
        """The averaged parameters, in their own dtypes."""
        return jax.tree.map(lambda mean, x: mean.astype(x.dtype), self.mean[0], self.inner.params)

    @property
    def model_state(self) -> Tree:
        """The same of the model state."""
        return jax.tree.map(lambda mean, x: mean.astype(x.dtype), self.mean[1], self.inner.model_state)


def averaged(method: Method, decay: float) -> Method:
    """The method, evaluated at Σ_t βⁿ⁻ᵗ x_t / Σ_t βⁿ⁻ᵗ after n steps, β the decay; it trains as before.

    Running averages of batch norm are averaged too. What is no floating number is the last one.
    """

    def wide(x: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32) if floating else x.dtype)

    @jax.jit
    def absorb(mean: Tree, new: Tree, count: jax.Array) -> Tree:
        share = (1 - decay) / -jnp.expm1(count * math.log(decay))

        def move(a: jax.Array, b: jax.Array) -> jax.Array:
            return a + share.astype(a.dtype) * (b.astype(a.dtype) - a) if jnp.issubdtype(a.dtype, jnp.floating) else b

        return jax.tree.map(move, mean, new)

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> Averaged:
        inner = method.init(params, model_state, seed, batch)
        mean = jax.tree.map(wide, (inner.params, inner.model_state))
        return Averaged(inner, mean, jnp.zeros((), jnp.int32))

    def step(state: Averaged, batch: Batch) -> tuple[Averaged, dict[str, jax.Array]]:
        inner, figures = method.step(state.inner, batch)
        count = state.steps + 1
        return Averaged(inner, absorb(state.mean, (inner.params, inner.model_state), count), count), figures

    prepare = method.prepare and (lambda state: method.prepare(state.inner))  # type: ignore[misc]
    return Method(init, step, method.traceable, prepare=prepare, ended=lambda state: method.ended(state.inner))


class ScheduleFree(NamedTuple):
    """The run at its own parameters, between those that are stepped and their average, and that average."""

    inner: sf.training.TrainState
    params: Tree

    @property
    def model_state(self) -> Tree:
        """As the run has it."""
        return self.inner.model_state


def schedule_free(v: Values, around: Circumstances) -> Method:
    """AdamW without a schedule, evaluated at its average (Defazio et al. 2024)."""
    import optax.contrib

    tx = optax.contrib.schedule_free_adamw(
        v["learning_rate"], v["warmup"] or None, b1=v["averaging"], weight_decay=v["weight_decay"]
    )
    method = transformed(tx, around)

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> ScheduleFree:
        return ScheduleFree(method.init(params, model_state, seed, batch), jax.tree.map(jnp.array, params))

    def step(state: ScheduleFree, batch: Batch) -> tuple[ScheduleFree, dict[str, jax.Array]]:
        inner, figures = method.step(state.inner, batch)
        params = optax.contrib.schedule_free_eval_params(inner.opt_state, inner.params)
        return ScheduleFree(inner, params), figures

    return Method(init, step)


def schedule(values: Values, around: Circumstances) -> Any:
    """The learning rate, decaying to zero over the run where that is asked for."""
    rate = values["learning_rate"]
    if values["decay"] == "linear":
        return optax.linear_schedule(rate, 0.0, around.steps)
    return optax.cosine_decay_schedule(rate, around.steps) if values["decay"] == "cosine" else rate


def fosi(v: Values, around: Circumstances) -> Method:
    """FOSI over Adam."""
    from saddlefree.lab.fosi import fosi

    tx = fosi(optax.adam(schedule(v, around)), v["alpha"], v["rank"], v["refresh_every"], v["averaging"])
    return transformed(tx, around)


def low_rank(v: Values, around: Circumstances) -> Method:
    """Saddle-free Newton with a curvature of low rank."""
    rate = schedule(v, around)
    solver = sf.low_rank(
        rank=v["rank"],
        refresh_every=v["refresh_every"],
        averaging=v["averaging"],
        base=optax.flatten(optax.adam(rate, b1=v["averaging"], b2=v["second_moment"], eps=v["epsilon"])),
        surprise=v["surprise"] or None,
    )
    return transformed(sf.saddle_free_newton(v["newton_rate"], damping=v["damping"], solver=solver), around)


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
