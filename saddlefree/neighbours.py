"""Between an optimiser and other libraries: losses of a whole model, and a check of what is given as `value_fn`."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from saddlefree import checks, space
from saddlefree.curvature import hessian
from saddlefree.residuals import ResidualFn, half_square
from saddlefree.space import Tree

ValueFn = Callable[[Tree], Any]

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CONTROL_FLOW = ("jit(scan)", "jit(while)", "jit(cond)")
"""What JAX compiles in each call outside of `jit`, and not inside of it."""
_STEP = 1e-2
"""The root mean square of the step of a finite difference."""


def as_value_fn(loss_fn: Callable[[Any], Any], model: Any) -> ValueFn:
    """A loss of a whole model as a `value_fn`: a function of the parameters that the optimiser sees.

    f(params) = loss_fn(model with params in their places), for

    - a Flax NNX module: `params` is what `nnx.Optimizer(model, tx, wrt=…)` hands to `tx`, a part of `nnx.state(model)`.
      The loss is given a copy of the model, so that running averages and random counts stay as they are in `model`.
    - an Equinox module: `params` is `eqx.filter(model, eqx.is_inexact_array)`.
    - any other pytree: `params` has its structure, and `optax.MaskedNode` or None for what is taken from `model`, as
      inside of `optax.masked` and `optax.multi_transform`.

    Args:
      loss_fn: function of the model that returns the loss, one real number.
      model: the model as it is now. Make a new `value_fn` in each step, inside the compiled function, and where the
        loss draws random numbers (dropout) before `nnx.grad` does.

    >>> model = {"w": jnp.array(3.0), "b": jnp.array(1.0)}
    >>> value_fn = as_value_fn(lambda model: model["w"] * model["b"], model)
    >>> float(value_fn({"w": jnp.array(2.0), "b": None}))
    2.0
    """
    if not callable(loss_fn) or inspect.isroutine(model):
        raise ValueError(
            f"loss_fn must be a function of the model, got {loss_fn!r} and the model {model!r}; "
            "write as_value_fn(loss_fn, model)"
        )
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        return _of_state(loss_fn, model, nnx)

    def value_fn(params: Tree) -> Any:
        try:
            whole = jax.tree.map(lambda a, b: b if _is_absent(a) else a, params, model, is_leaf=_is_absent)
        except ValueError as error:
            raise ValueError(
                f"params must have the structure of the model given to as_value_fn, with None or optax.MaskedNode for "
                f"parts that are left out, got another one: {error}"
            ) from error
        return loss_fn(whole)

    return value_fn


def _of_state(loss_fn: Callable[[Any], Any], model: Any, nnx: Any) -> ValueFn:
    """`as_value_fn` for Flax NNX."""
    graph, state = nnx.split(model)
    # What `split` returns are the model's own variables, which go on changing.
    state = jax.tree.map(lambda x: x, state)

    def value_fn(params: Tree) -> Any:
        # A copy, because what the loss writes into the model must not leave the trace that it is called in.
        whole = nnx.merge(graph, state, copy=True)
        given = [(path, leaf) for path, leaf in nnx.to_flat_state(params) if jax.tree.leaves(leaf)]
        nnx.update(whole, nnx.from_flat_state(given))
        return loss_fn(whole)

    return value_fn


def _is_absent(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def check_value_fn(
    value_fn: ValueFn, params: Tree, grads: Tree | None = None, residual_fn: ResidualFn | None = None
) -> None:
    """Says what is wrong with a `value_fn`, before it is trained with: raises a `ValueError`, or returns None.

    It is called three times, and differentiated once and twice. It must return one real number, finite at `params`; the
    same in each call; without compiling a function anew in each call; its gradient and a Hessian-vector product must be
    finite; and it must not hide its curvature, so that H v = 0 where the gradient changes.

    Args:
      value_fn: what is going to be passed to `update`.
      params: pytree of arrays. Those that are not floating point are held fixed.
      grads: what is going to be passed to `update` as gradients, or None. They must be the gradient at `params`, up to
        1e-2 of its norm.
      residual_fn: what is going to be passed to `update` as residuals, or None. Their half squared norm must be the
        loss, up to 1e-2 of it.

    >>> check_value_fn(lambda x: jnp.sum(x**2), jnp.ones(3), grads=2 * jnp.ones(3))
    >>> check_value_fn(lambda x: (jnp.sum(x**2), "aux"), jnp.ones(3))
    Traceback (most recent call last):
    ...
    ValueError: value_fn must return one real number, the loss, got tuple; return the loss alone, as in \
lambda params: loss_and_aux(params)[0], or use saddlefree.training.make_step for auxiliary outputs
    """
    if not callable(value_fn):
        raise ValueError(f"value_fn must be a function of the parameters that returns the loss, got {value_fn!r}")
    params = checks.arrays(params)
    _check_calls(value_fn, params)
    if residual_fn is not None:
        _check_residuals(value_fn, params, residual_fn)
    floating = jax.tree.map(lambda x: None if jnp.issubdtype(x.dtype, jnp.integer) else x, params)
    checks.real_parameters(floating)

    def of_floating(x: Tree) -> Any:
        return value_fn(space.fill(x, params))

    _check_derivatives(of_floating, floating, None if grads is None else space.select(floating, grads))


def _check_residuals(value_fn: ValueFn, params: Tree, residual_fn: ResidualFn) -> None:
    """Refuses residuals of another loss."""
    loss, found = float(value_fn(params)), float(half_square(residual_fn)(params))
    if not abs(loss - found) <= 1e-2 * max(abs(loss), abs(found)):
        raise ValueError(
            f"residual_fn must return residuals r whose half squared norm is the loss, ½‖r‖² = {loss:.6g}, got "
            f"{found:.6g}; a mean of n squares has the residuals (2/n)**0.5 * error, "
            "and a penalty on the parameters has residuals of its own"
        )


def _check_calls(value_fn: ValueFn, params: Tree) -> None:
    """What calling it alone can tell."""
    value = checks.scalar_valued("value_fn", value_fn)
    first, second = float(value(params)), float(value(params))
    if not jnp.isfinite(first):
        raise ValueError(
            f"value_fn must be finite at params, got {first}; look for a division by 0, a log or sqrt of 0, an "
            "overflow, or data that is not finite"
        )
    with _compilations() as names:
        dtype = value(params).dtype
    tolerance = max(1e-5, 10 * float(jnp.finfo(dtype).eps))
    if not abs(first - second) <= tolerance * max(abs(first), abs(second)):
        raise ValueError(
            f"value_fn must return the same loss in each call, got {first} and {second}; give it the batch and the key "
            "of the step, as in value_fn=lambda params: loss(params, batch, key)"
        )
    if names:
        raise ValueError(
            f"value_fn must not compile in each call, and it compiles {', '.join(sorted(set(names)))}; "
            "call jax.jit outside of value_fn, once, and use what it returns inside"
        )


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
    """The names of the functions that are compiled in the meantime."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        name = str(kwargs.get("fun_name", "a function"))
        if event == _COMPILED and name not in _CONTROL_FLOW:
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _check_derivatives(value_fn: ValueFn, params: Tree, grads: Tree | None) -> None:
    """What gradients and one product can tell. A linear loss, whose product is 0, is in order."""
    gradient = jax.jit(jax.grad(value_fn))
    noise = space.random_normal(jax.random.PRNGKey(0), params)
    root = max(space.size(params), 1) ** 0.5
    v = space.scale(root, space.normalise(noise))
    try:
        g = gradient(params)
        product = jax.jit(lambda x, v: hessian(value_fn, x)(v))(params, v)
    except Exception as error:
        raise ValueError(
            "value_fn must be differentiable twice by JAX inside jit, and it failed with "
            f"{type(error).__name__}: {error}; use JAX functions alone, and loops and rules that have derivatives"
        ) from error
    for name, vector in (("gradient", g), ("Hessian-vector product", product)):
        if not space.all_finite(vector):
            raise ValueError(
                f"value_fn must have a finite {name} at params, got one that is not; sqrt, norm and x**p have an "
                "infinite derivative at 0: add a small number, or choose with jnp.where before, not after"
            )
    if float(space.peak(product)) == 0 and _changes(gradient, params, v):
        raise ValueError(
            "value_fn must have the curvature that its gradient shows, and its Hessian-vector product is 0 while the "
            "gradient changes; it is piecewise linear (absolute error, hinge loss), or a custom derivative rule or "
            "stop_gradient hides it: use a smooth loss, or pass curvature_fn= or matvec= to update"
        )
    if grads is not None:
        rounding = 100 * float(space.norm(product) * space.norm(params)) * _epsilon(params) / root
        _check_gradient(g, grads, rounding, max(1e-2, 10 * _epsilon(g)))


def _check_gradient(g: Tree, grads: Tree, rounding: float, tolerance: float) -> None:
    """Refuses `grads` that are not g, up to what rounding of the parameters makes of it."""
    expected, given = jax.tree.leaves(g), [jnp.asarray(x) for x in jax.tree.leaves(grads)]
    shapes = [[x.shape for x in leaves] for leaves in (expected, given)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"grads must have the shapes of params, {shapes[0]}, got {shapes[1]}")
    norms = [float(space.norm(leaves)) for leaves in (expected, given)]
    difference = float(space.norm([a - b.astype(a.dtype) for a, b in zip(expected, given, strict=True)]))
    if not difference <= tolerance * max(norms) + rounding:
        raise ValueError(
            f"grads must be the gradient of value_fn at params, of norm {norms[0]:.3g}, got one of norm "
            f"{norms[1]:.3g} at a distance of {difference:.3g}; are they gradients of another batch, other parameters, "
            "another key, or scaled? Both come from one function in value, grads = jax.value_and_grad(value_fn)(params)"
        )


def _changes(gradient: Callable[[Tree], Tree], params: Tree, v: Tree) -> bool:
    """Whether the gradient changes along v, at a rate that two step lengths agree on: no kink, and no rounding."""

    def rate(step: float) -> Tree:
        ends = [gradient(space.axpy(sign * step, v, params)) for sign in (1, -1)]
        return space.scale(0.5 / step, space.sub(*ends))

    long, short = rate(_STEP), rate(_STEP / 2)
    return float(space.norm(space.sub(long, short))) < 0.1 * float(space.norm(long))


def _epsilon(tree: Tree) -> float:
    """The coarsest rounding among the leaves."""
    return max((float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree)), default=0.0)
