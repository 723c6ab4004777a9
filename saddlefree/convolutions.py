"""Convolutions that stay fast inside of compiled loops and branches on a CPU.

XLA's compiler for CPUs has a fast kernel for one layout: examples first and features last, and filters with their
output features last. It brings convolutions of other layouts into that one outside of loops and branches only. Inside
they take up to a hundred times longer, above all those of which derivatives consist, whatever layout the model has; and
curvature products are made in loops and branches.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core
from jax.extend.core.primitives import conv_general_dilated_p as convolution

T = TypeVar("T")


def laid_out(function: Callable[..., T]) -> Callable[..., T]:
    """`function` of pytrees of arrays, on a CPU with all its convolutions in the layout of the fast kernel.

    >>> import jax.numpy as jnp
    >>> def correlate(x, y):
    ...     return jax.lax.conv_general_dilated(x, y, (1,), "VALID")  # features before positions
    >>> laid_out(correlate)(jnp.arange(4.0)[None, None], jnp.ones((1, 1, 2)))
    Array([[[1., 3., 5.]]], dtype=float32)
    """

    def evaluate(*arguments: Any) -> T:
        if jax.default_backend() != "cpu":
            return function(*arguments)
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = core.jaxpr_as_fun(_rewritten(traced))(*jax.tree.leaves(arguments))
        found: T = jax.tree.unflatten(jax.tree.structure(shapes), results)
        return found

    return evaluate


def _rewritten(program: Any) -> Any:
    """What a parameter of an operation becomes: the same, but for a program or a tuple of them."""
    match program:
        case core.ClosedJaxpr():
            return core.ClosedJaxpr(_rewritten(program.jaxpr), program.consts)
        case core.Jaxpr():
            return program.replace(eqns=[new for old in program.eqns for new in _operations(old)])
        case tuple():
            return tuple(map(_rewritten, program)) if type(program) is tuple else program
    return program


def _operations(old: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Those that take the place of an operation."""
    if old.primitive is not convolution or old.params.get("out_sharding") is not None:
        return [old.replace(params={name: _rewritten(x) for name, x in old.params.items()})]
    inner = jax.make_jaxpr(lambda x, y: _convolution(x, y, old.params))(*(x.aval for x in old.invars)).jaxpr
    names = dict(zip((*inner.invars, *inner.outvars), (*old.invars, *old.outvars), strict=True))
    return [
        new.replace(
            invars=[names.get(x, x) for x in new.invars],
            outvars=[names.get(x, x) for x in new.outvars],
            source_info=old.source_info,
            ctx=old.ctx,
        )
        for new in inner.eqns
    ]


def _convolution(x: jax.Array, filters: jax.Array, params: dict[str, Any]) -> jax.Array:
    """The convolution that an operation stands for, between transpositions."""
    examples, filtered, result = params["dimension_numbers"]
    # Each begins with examples and features, or with the filters' output and input features; then come positions.
    examples, result = ((axes[0], *axes[2:], axes[1]) for axes in (examples, result))
    filtered = (*filtered[2:], filtered[1], filtered[0])
    last = len(result) - 1
    standard = jax.lax.ConvDimensionNumbers(
        (0, last, *range(1, last)), (last, last - 1, *range(last - 1)), (0, last, *range(1, last))
    )
    y = convolution.bind(
        jax.lax.transpose(x, examples),
        jax.lax.transpose(filters, filtered),
        **{**params, "dimension_numbers": standard},
    )
    return jax.lax.transpose(y, np.argsort(result))
