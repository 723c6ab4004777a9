"""Answers to bad input: a `ValueError` that says the argument's name, its value and the allowed range."""

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saddlefree.space import Tree


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
    error = ValueError(f"{name} must be a number in {left}{low}, {high}{right}, got {value!r}")
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()):
        raise error
    concrete = float(value)
    if (
        not math.isfinite(concrete)
        or not low <= concrete <= high
        or (open_low and concrete == low)
        or (open_high and concrete == high)
    ):
        raise error


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


def removed(**successors: str) -> Callable[[type], type]:
    """A class decorator: an argument that is gone raises a sentence that names its successor.

    >>> @removed(metric="base=optax.adam(rate)")
    ... class part:
    ...     pass
    >>> part(metric="adam")
    Traceback (most recent call last):
    ...
    TypeError: part has no argument 'metric': use base=optax.adam(rate)
    """

    def decorate(cls: type) -> type:
        original: Any = cls.__init__  # type: ignore[misc]

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            no_others(cls.__name__, [name for name in kwargs if name in successors], successors)
            original(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


def no_others(owner: str, names: Iterable[str], successors: dict[str, str]) -> None:
    """Refuses arguments that `owner` does not have, with a successor where there is one."""
    for name in names:
        hint = f": use {successors[name]}" if name in successors else ""
        raise TypeError(f"{owner} has no argument {name!r}{hint}")


def unrolling(unroll: Any) -> None:
    """Refuses an `unroll` that is neither True nor a whole number ≥ 1."""
    if unroll is not True:
        integer("unroll", unroll, low=1)


def real_parameters(params: Tree) -> None:
    """Refuses complex and integer parameters, which have no real Hessian, and leaves that are no arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = f"params{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, numbers.Number) and not hasattr(leaf, "dtype"):
            raise ValueError(
                f"{name} must be an array, got {leaf!r}; pass the arrays alone, for an Equinox model "
                "eqx.filter(model, eqx.is_inexact_array) as params and value_fn=sf.as_value_fn(loss_fn, model)"
            )
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name} must be real floating point, got {dtype}; "
                "pass complex parameters as their real and imaginary parts, and freeze integer ones with frozen="
            )


def scalar_valued(name: str, fn: Callable[[Tree], Any]) -> Callable[[Tree], jax.Array]:
    """`fn`, refusing a result that is not one real number."""
    return lambda x: scalar(name, fn(x))


def scalar(name: str, value: Any) -> jax.Array:
    """The `value` that `name` returned, refused unless it is one real number."""
    if isinstance(value, float):
        value = jnp.asarray(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", np.dtype(object))
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        found = type(value).__name__ if shape is None else f"shape {shape} and dtype {dtype}"
        raise ValueError(
            f"{name} must return one real number, the loss, got {found}; "
            "take a mean or a sum, and use saddlefree.training.make_step for auxiliary outputs"
        )
    return value
