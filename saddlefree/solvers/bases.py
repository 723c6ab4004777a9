"""An Optax optimiser as the base of a solver: it takes the part of the step that the curvature does not span."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import space
from saddlefree.space import Space, Tree, Vector


class Based(NamedTuple):
    """The states of the base."""

    rest: Any  # where it sees what the basis does not span
    own: Any  # where it sees the whole gradient, to say how long its steps would be


class Moved(NamedTuple):
    """What the base does with what a basis Q does not span of a gradient."""

    update: Vector  # u
    inside: jax.Array  # Qᵀu, which is taken out of it
    largest: jax.Array  # the largest entry of the update that the base alone would make of all of g


def init(base: optax.GradientTransformation, layout: Space) -> Based:
    """The states before the first step; refuses a base whose update points uphill."""
    _check_sign(base)
    return Based(base.init(_params(layout)), base.init(_params(layout)))


def _params(layout: Space) -> Tree:
    """The parameters in working precision."""
    return layout.unpack(layout.pack(layout.like), cast=False)


def run(
    base: optax.GradientTransformation,
    layout: Space,
    basis: Vector,
    slope: jax.Array,
    g: Vector,
    finite: jax.Array,
    old: Based,
) -> tuple[Moved, Based]:
    """u = base(g − QQᵀg) with its coordinates Qᵀu, and the states, the old ones where a number is not finite.

    Args:
      base: the optimiser.
      layout: of the vectors.
      basis: an orthonormal basis of the span of Q, stacked.
      slope: Qᵀg.
      g: the gradient.
      finite: whether g is finite.
      old: the states of the step before.
    """
    tx, params = optax.with_extra_args_support(base), _params(layout)

    def step(g: Vector, state: Any) -> tuple[Vector, Any]:
        # Optax's own optimisers need promotion, also where the user has forbidden it.
        with jax.numpy_dtype_promotion("standard"):
            updates, new = tx.update(layout.unpack(g, cast=False), state, params)
        update = layout.pack(updates)
        return update, space.where(finite & space.all_finite(update), new, state)

    update, of_rest = step(outside(basis, slope, g, layout), old.rest)
    own, of_own = step(g, old.own)
    return Moved(update, space.project(basis, update), space.peak(own)), Based(of_rest, of_own)


def outside(basis: Vector, coordinates: jax.Array, g: Vector, layout: Space) -> Vector:
    """g − QQᵀg from the coordinates Qᵀg, and 0 where no more than rounding is left, which a base would magnify.

    A base such as Adam normalises. Right after a refresh that is everywhere: Lanczos starts from the gradient.
    """
    rounding = layout.rounding + 64 * float(jnp.finfo(layout.dtype).eps)

    def subtract(a: jax.Array, b: jax.Array) -> jax.Array:
        rest = a - b
        return jnp.where(jnp.abs(rest) <= rounding * (jnp.abs(a) + jnp.abs(b)), 0, rest)  # NaN stays

    return jax.tree.map(subtract, g, space.combine(basis, coordinates))


@functools.lru_cache(maxsize=128)
def _check_sign(base: optax.GradientTransformation) -> None:
    """Refuses a base whose update points uphill, where one number shows it."""
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        one = jnp.ones(())
        try:
            update = float(base.update(one, base.init(one), one)[0])
        except Exception:  # some bases take matrices, labels or further arguments only, or have a traced rate
            return
    if update > 0:
        raise ValueError(
            "base must return an update that is added to the parameters, as optax.adam(1e-3) does, got one that points "
            "uphill, as optax.scale_by_adam() does; chain it with optax.scale_by_learning_rate(rate)"
        )
