"""One training step for losses with model state (batch norm), randomness (dropout) and auxiliary outputs.

An optimiser's `update` sees one function of the parameters. `make_step` builds that function: model state and key are
held fixed while curvature and trial losses are evaluated, and the new model state is that of the gradient's evaluation.
"""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import checks, space
from saddlefree.convolutions import laid_out
from saddlefree.curvature import microbatch_mean
from saddlefree.inspection import diagnostics, has_figures
from saddlefree.neighbours import check_value_fn
from saddlefree.residuals import ResidualFn
from saddlefree.space import Tree


class TrainState(NamedTuple):
    """All that a training run carries from step to step: one pytree, to be checkpointed as it is."""

    params: Tree
    opt_state: Any
    model_state: Tree
    key: jax.Array
    step: jax.Array


LossFn = Callable[[Tree, Tree, Tree, jax.Array], tuple[jax.Array, tuple[Tree, Any]]]
"""(params, model_state, batch, key) to (loss, (new model_state, aux)); where there is no model state, it is None."""

PredictFn = Callable[[Tree, Tree, Tree, jax.Array], tuple[Any, tuple[Tree, Any]]]
"""(params, model_state, batch, key) to (outputs, (new model_state, aux))."""

Split = tuple[PredictFn, Callable[[Any, Tree], jax.Array] | str]
"""A model's outputs, and the loss as a function (outputs, batch) of them, or the name of one."""

ResidualsOf = Callable[[Tree, Tree, jax.Array], ResidualFn]
"""(model_state, batch, key) to the residuals of that batch, a function of the parameters or `pointwise(…)`."""

_MANY = 8
"""Compilations of one step beyond which it warns."""


def softmax_cross_entropy(outputs: jax.Array, batch: Tree) -> jax.Array:
    """The mean of −Σ_c t_c log softmax(outputs)_c for a batch (inputs, targets): classes, or their probabilities t."""
    _, targets = batch
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, targets))
    return jnp.mean(optax.softmax_cross_entropy(outputs, targets))


def squared_error(outputs: jax.Array, batch: Tree) -> jax.Array:
    """The mean of ½‖output − target‖² over the examples of a batch (inputs, targets)."""
    _, targets = batch
    if outputs.shape != targets.shape:
        raise ValueError(f"targets must have the outputs' shape {outputs.shape}, got {targets.shape}")
    return jnp.sum(jnp.square(outputs - targets)) / (2 * outputs.shape[0])


LOSSES = {"softmax_cross_entropy": softmax_cross_entropy, "squared_error": squared_error}
"""Those that `make_step` knows by name."""


def init(
    params: Tree, tx: optax.GradientTransformation, *, model_state: Tree = None, seed: int | jax.Array = 0
) -> TrainState:
    """The state before the first step. It holds copies, so that a step may reuse its memory.

    Args:
      params: pytree of parameters.
      tx: any Optax transformation.
      model_state: what the model carries beside its parameters, such as running averages; None if nothing.
      seed: of the keys that the loss is called with.

    >>> state = init(jnp.zeros(3), optax.sgd(0.1))
    >>> int(state.step), state.params
    (0, Array([0., 0., 0.], dtype=float32))
    """
    params, opt_state, model_state = jax.tree.map(jnp.array, (params, tx.init(params), model_state))
    return TrainState(params, opt_state, model_state, jax.random.PRNGKey(seed), jnp.zeros((), jnp.int32))


def make_step(
    loss_fn: LossFn | Split,
    tx: optax.GradientTransformation,
    *,
    curvature: str = "hessian",
    residual_fn: ResidualsOf | None = None,
    microbatch_size: int | None = None,
    donate: bool = True,
    check: bool = False,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """A compiled step: (state, batch, curvature_batch=None) to (new state, metrics).

    The loss sees a new key each step, the same one for gradient, curvature and trial losses. Data that is sharded along
    its leading axis, and sharded parameters, stay so. `metrics` has `loss`, `aux` and the optimiser's `diagnostics`.
    After a non-finite loss the model state stays as it was.

    Args:
      loss_fn: (params, model_state, batch, key) to (loss, (new model_state, aux)). Or a pair (predict_fn, loss):
        predict_fn as loss_fn, but with the model's outputs in place of the loss, and loss a function (outputs, batch),
        or "softmax_cross_entropy" or "squared_error" for batches (inputs, targets).
      tx: this library's, or any Optax transformation; it is handed `value`, `grad` and `value_fn`.
      curvature: "hessian", or for a pair "gauss_newton": products with G = Jᵀ ∇²ℓ J, with the Jacobian J of the outputs
        and the loss ℓ as a function of them. G is positive semi-definite where ℓ is convex.
      residual_fn: for `row_space`: (model_state, batch, key) to a function of the parameters, or `pointwise(…)`, that
        returns residuals whose half squared norm is the loss of the batch.
      microbatch_size: examples at a time, ≥ 1, for batches that do not fit into memory: losses, gradients and products
        are means over microbatches, as are the floating leaves of model state and aux; other leaves are the last one's.
      donate: whether the old state's memory is reused, after which it cannot be read any more.
      check: whether the first step examines the loss of its batch as `check_value_fn` does, which takes some seconds.

    A step also takes `curvature_batch`, another batch whose Hessian is used, and `refresh`, True or False, which is
    compiled into it: whether `low_rank` refreshes. It warns once it has been compiled more than 8 times.

    >>> import saddlefree as sf
    >>> def loss_fn(params, model_state, batch, key):
    ...     error = batch["x"] @ params - batch["y"]
    ...     return jnp.mean(error**2), (model_state, {"largest": jnp.max(jnp.abs(error))})
    >>> batch = {"x": jnp.eye(3), "y": jnp.array([1.0, 2.0, 3.0])}
    >>> tx = sf.saddle_free_newton(damping=0.0, solver=sf.exact())
    >>> step = make_step(loss_fn, tx)
    >>> state, metrics = step(init(jnp.zeros(3), tx), batch)
    >>> state.params
    Array([1., 2., 3.], dtype=float32)
    >>> float(metrics["aux"]["largest"])
    3.0

    Gauss-Newton, from the model's outputs and the name of the loss:

    >>> def predict_fn(params, model_state, batch, key):
    ...     inputs, _ = batch
    ...     return jnp.tanh(inputs @ params), (model_state, None)
    >>> step = make_step((predict_fn, "squared_error"), tx, curvature="gauss_newton")
    >>> state, metrics = step(init(jnp.zeros(3), tx), (jnp.eye(3), jnp.array([0.1, 0.2, 0.3])))
    >>> [round(float(x), 3) for x in state.params]  # tanh is linear at 0
    [0.1, 0.2, 0.3]
    """
    if curvature not in ("hessian", "gauss_newton"):
        raise ValueError(f"curvature must be 'hessian' or 'gauss_newton', got {curvature!r}")
    split = _split(loss_fn)
    if split is None and curvature == "gauss_newton":
        raise ValueError(
            "loss_fn must be a pair (predict_fn, loss) beside curvature='gauss_newton', which needs the model's "
            f"outputs, got {loss_fn!r}"
        )
    if microbatch_size is not None:
        checks.integer("microbatch_size", microbatch_size, low=1)
        if residual_fn is not None:
            raise ValueError(
                f"residual_fn takes the whole batch: microbatch_size must be None beside it, got {microbatch_size}"
            )
    tx = optax.with_extra_args_support(tx)
    traces = itertools.count(1)

    def evaluate(*args: Any) -> tuple[jax.Array, Any]:
        result = loss_fn(*args) if split is None else _composed(*split)(*args)  # type: ignore[operator]
        if not (_is_pair(result) and _is_pair(result[1])):
            raise ValueError(
                "loss_fn must return (loss, (new model_state, aux)), with None for what there is not, as in "
                f"return loss, (model_state, None), got {jax.tree.structure(result)}"
            )
        return result

    def objective(
        state: TrainState, batch: Tree, key: jax.Array, evaluate: Any = evaluate
    ) -> Callable[[Tree], tuple[jax.Array, Any]]:
        if microbatch_size is None:
            return lambda params: evaluate(params, state.model_state, batch, key)
        length = jax.tree.leaves(batch)[0].shape[0]

        def part(params: Tree, numbered: tuple[Tree, jax.Array]) -> tuple[jax.Array, Any]:
            examples, number = numbered
            return evaluate(params, state.model_state, examples, jax.random.fold_in(key, number[0]))

        return microbatch_mean(part, (batch, jnp.arange(length)), microbatch_size, has_aux=True)

    def step(
        state: TrainState, batch: Tree, curvature_batch: Tree = None, refresh: bool | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        if next(traces) == _MANY + 1:
            warnings.warn(
                f"this step has been compiled more than {_MANY} times: batches of changing shapes or dtypes, or Python "
                "numbers where arrays are expected, compile it anew; pad or drop the last batch of an epoch",
                RuntimeWarning,
                stacklevel=2,
            )
        key, next_key = jax.random.split(state.key)
        loss_and_aux = objective(state, batch, key)
        (loss, (model_state, aux)), grad = laid_out(jax.value_and_grad(loss_and_aux, has_aux=True, allow_int=True))(
            state.params
        )
        known: dict[str, Any] = {"value": loss, "grad": grad, "value_fn": lambda params: loss_and_aux(params)[0]}
        if curvature_batch is not None or curvature == "gauss_newton":
            linear = {} if split is None or curvature == "hessian" else {"evaluate": _linearised(*split, state.params)}
            curved = objective(state, batch if curvature_batch is None else curvature_batch, key, **linear)
            known["curvature_fn"] = lambda params: curved(params)[0]
        if residual_fn is not None:
            known["residual_fn"] = residual_fn(state.model_state, batch, key)
        if refresh is not None:
            checks.kind("refresh", refresh, bool, "None, True or False")
            known["refresh"] = refresh
        updates, opt_state = tx.update(grad, state.opt_state, state.params, **known)
        model_state = space.where(jnp.isfinite(loss), model_state, state.model_state)
        figures = diagnostics(opt_state) if has_figures(opt_state) else {}
        metrics = {"loss": loss, "aux": aux, **figures}
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, model_state, next_key, optax.safe_increment(state.step)), metrics

    compiled = jax.jit(step, donate_argnums=0 if donate else (), static_argnames="refresh")
    if not check:
        return compiled
    unchecked = [True]

    @functools.wraps(step)
    def checked(state: TrainState, batch: Tree, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, batch)))
        if unchecked and not traced:
            loss_and_aux = objective(state, batch, state.key)
            residuals = None if residual_fn is None else residual_fn(state.model_state, batch, state.key)
            check_value_fn(lambda params: loss_and_aux(params)[0], state.params, residual_fn=residuals)
            unchecked.clear()
        return compiled(state, batch, *args, **kwargs)

    return checked


def _split(loss_fn: Any) -> tuple[PredictFn, Callable[[Any, Tree], jax.Array]] | None:
    """A pair (predict_fn, loss) with the loss as a function, or None where `loss_fn` is none."""
    if not _is_pair(loss_fn):
        return None
    predict_fn, loss = loss_fn
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(f"loss must be a function (outputs, batch) or one of {sorted(LOSSES)}, got {loss!r}")
        loss = LOSSES[loss]
    return predict_fn, loss


def _composed(predict_fn: PredictFn, loss: Callable[[Any, Tree], jax.Array]) -> LossFn:
    """The loss of a model's outputs."""

    def loss_fn(params: Tree, model_state: Tree, batch: Tree, key: jax.Array) -> tuple[jax.Array, tuple[Tree, Any]]:
        outputs, rest = predict_fn(params, model_state, batch, key)
        return loss(outputs, batch), rest

    return loss_fn


def _linearised(predict_fn: PredictFn, loss: Callable[[Any, Tree], jax.Array], at: Tree) -> LossFn:
    """The loss of the linearised model, ℓ(p(x₀) + J(x − x₀)), whose Hessian is the Gauss-Newton matrix at x₀ = `at`."""
    point = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, at)

    def predict(params: Tree, model_state: Tree, batch: Tree, key: jax.Array) -> tuple[Any, tuple[Tree, Any]]:
        def outputs_of(floating: Tree) -> tuple[Any, Any]:
            return predict_fn(space.fill(floating, at), model_state, batch, key)

        tangent = space.sub(space.select(point, params), point)
        outputs, change, rest = jax.jvp(outputs_of, (point,), (tangent,), has_aux=True)
        return space.axpy(1, change, outputs), rest

    return _composed(predict, loss)


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple | list) and len(x) == 2
