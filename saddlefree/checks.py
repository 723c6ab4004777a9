"""Answers to bad input: a `ValueError` that says the argument's name, its value and the allowed range."""

import functools
import math
import numbers
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from saddlefree.space import Tree

Owner = TypeVar("Owner")


def number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuses a concrete `value` outside the interval; tracers and schedules pass, their values are not known yet.

    >>> number("momentum", 0.9, 0, 1, open_high=True)
    >>> number("momentum", 1.0, 0, 1, open_high=True)
    Traceback (most recent call last):
    ...
    ValueError: momentum must be a number in [0, 1), got 1.0
    """
    if callable(value) or isinstance(value, jax.core.Tracer):
        return
    left = "(" if open_low or low == -math.inf else "["
    right = ")" if open_high or high == math.inf else "]"
    concrete = _as_float(value)
    if (
        not math.isfinite(concrete)
        or not low <= concrete <= high
        or (open_low and concrete == low)
        or (open_high and concrete == high)
    ):
        raise ValueError(f"{name} must be a number in {left}{low}, {high}{right}, got {value!r}")


def _as_float(value: Any) -> float:
    """A real number, or a scalar array of one, as a float; NaN where it is none or too large for a float."""
    if not is_real(value) or jnp.shape(value) != ():
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def constant(name: str, value: Any, low: float = -math.inf, high: float = math.inf, **open_ends: bool) -> None:
    """`number`, where a schedule will not do.

    >>> constant("threshold", lambda count: 0.5, 0)
    Traceback (most recent call last):
    ...
    ValueError: threshold must be a number and cannot be a schedule
    """
    if callable(value):
        raise ValueError(f"{name} must be a number and cannot be a schedule")
    number(name, value, low, high, **open_ends)


def at_least_minimum(maximum: Any, minimum: Any) -> None:
    """Refuses a maximum below the minimum, and names both; schedules and traced numbers are not compared.

    >>> at_least_minimum(0.5, 1.0)
    Traceback (most recent call last):
    ...
    ValueError: maximum must be a number ≥ minimum = 1.0, got 0.5
    """
    if any(callable(x) or isinstance(x, jax.core.Tracer) for x in (maximum, minimum)):
        return
    if not float(minimum) <= _as_float(maximum) < math.inf:
        raise ValueError(f"maximum must be a number ≥ minimum = {float(minimum)}, got {maximum!r}")


def is_real(x: Any) -> bool:
    """Whether x is a real number or an array of real numbers, traced ones included."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        dtype = getattr(x, "dtype", np.dtype(object))
        return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return True


def real_scalar(name: str, value: Any) -> None:
    """Refuses whatever is not one real number; it may be traced, and need not be finite."""
    too_large = isinstance(value, int) and math.isnan(_as_float(value))
    if not is_real(value) or jnp.shape(value) != () or too_large:
        raise ValueError(f"{name} must be one real number, got {value!r}")


def function(name: str, value: Any) -> None:
    """Refuses what cannot be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {value!r}")


def is_bool(x: Any) -> bool:
    """Whether x is one bool, also as an array or traced."""
    return isinstance(x, bool) or (getattr(x, "dtype", None) == np.dtype(bool) and x.shape == ())


def condition(name: str, value: Any) -> None:
    """Refuses whatever is not one bool; it may be traced."""
    if not is_bool(value):
        raise ValueError(f"{name} must be None, True, False or a traced bool, got {value!r}")


def switch(name: str, value: Any) -> None:
    """Refuses whatever is neither True nor False."""
    kind(name, value, bool, "True or False")


def choice(name: str, value: Any, names: tuple[str, ...]) -> None:
    """Refuses whatever is none of the `names`."""
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def seed(value: Any) -> None:
    """Refuses a seed that `jax.random.key` does not take."""
    if isinstance(value, jax.Array) and value.shape == () and jnp.issubdtype(value.dtype, jnp.integer):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < 2**32:
        raise ValueError(f"seed must be a whole number from 0 to 2**32 - 1, got {value!r}")


def integer(name: str, value: Any, low: int) -> None:
    """Refuses whatever is not a whole number ≥ `low`.

    >>> integer("num_terms", 0, low=1)
    Traceback (most recent call last):
    ...
    ValueError: num_terms must be a whole number ≥ 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"{name} must be a whole number ≥ {low}, got {value!r}")


def kind(name: str, value: Any, kind: type, what: str) -> None:
    """Refuses a part that is not of its kind; `what` says what is expected."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {what}, got {value!r}")


def removed(**successors: str) -> Callable[[Owner], Owner]:
    """A decorator of a class or a function: an argument that is gone raises a sentence that names its successor.

    >>> @removed(metric="base=optax.adam(rate)")
    ... class part:
    ...     pass
    >>> part(metric="adam")
    Traceback (most recent call last):
    ...
    TypeError: part has no argument 'metric': use base=optax.adam(rate)
    """

    def decorate(owner: Any) -> Any:
        original: Any = owner.__init__ if isinstance(owner, type) else owner  # type: ignore[misc]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in successors:
                    raise TypeError(f"{owner.__name__} has no argument {name!r}: use {successors[name]}")
            return original(*args, **kwargs)

        if not isinstance(owner, type):
            return call
        owner.__init__ = call  # type: ignore[misc]
        return owner

    return decorate


def arrays(params: Tree) -> Tree:
    """`params` as arrays, refusing leaves that cannot be one."""
    for path, leaf in jax.tree.leaves_with_path(params):
        _array(path, leaf)
    return jax.tree.map(jnp.asarray, params)


def real_parameters(params: Tree) -> None:
    """Refuses complex and integer parameters, which have no real Hessian, and leaves that are no arrays."""
    for path, leaf in jax.tree.leaves_with_path(params):
        name = _array(path, leaf)
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name} must be real floating point, got {dtype}; "
                "pass complex parameters as their real and imaginary parts, and freeze integer ones with frozen="
            )


def _array(path: Any, leaf: Any) -> str:
    """The name of a leaf, refused unless it is an array or a number."""
    name = f"params{jax.tree_util.keystr(path)}"
    if not isinstance(leaf, numbers.Number) and not hasattr(leaf, "dtype"):
        raise ValueError(
            f"{name} must be an array, got {leaf!r}; pass the arrays alone, for an Equinox model "
            "eqx.filter(model, eqx.is_inexact_array) as params and value_fn=sf.as_value_fn(loss_fn, model)"
        )
    return name


def scalar_valued(name: str, fn: Callable[[Tree], Any]) -> Callable[[Tree], jax.Array]:
    """`fn`, refusing a result that is not one real number, and with a hint where it does not fit its argument."""

    def evaluate(x: Tree) -> jax.Array:
        try:
            value = fn(x)
        except Exception as error:
            if (part := _part_of_a_model(x)) and not getattr(error, "__notes__", None):
                error.add_note(
                    f"{name} was called with {part}; where it is a function of the whole model, pass "
                    f"{name}=sf.as_value_fn(loss_fn, model)"
                )
            raise
        return scalar(name, value)

    return evaluate


def _part_of_a_model(x: Tree) -> str | None:
    """What x is, where it is known to be less than a model."""
    nnx, eqx = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(x, nnx.State):
        return "an nnx.State, the model's variables"
    if eqx is not None and isinstance(x, eqx.Module):
        return "the arrays of an Equinox model, and None for the rest"
    masked = [leaf for leaf in jax.tree.leaves(x, is_leaf=_is_masked) if _is_masked(leaf)]
    if masked:
        return (
            "optax.MaskedNode in the place of parameters that optax.masked or multi_transform leave out (frozen= of "
            "the optimiser leaves them in)"
        )
    return None


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def scalar(name: str, value: Any) -> jax.Array:
    """The `value` that `name` returned, refused unless it is one real number."""
    if isinstance(value, float):
        value = jnp.asarray(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", np.dtype(object))
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        found = type(value).__name__ if shape is None else f"shape {shape} and dtype {dtype}"
        cure = "take a mean or a sum, and the real part"
        if isinstance(value, tuple):
            cure = (
                "return the loss alone, as in lambda params: loss_and_aux(params)[0], or use "
                "saddlefree.training.make_step for auxiliary outputs"
            )
        raise ValueError(f"{name} must return one real number, the loss, got {found}; {cure}")
    return value
