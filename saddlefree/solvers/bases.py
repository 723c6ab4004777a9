"""An Optax optimiser as the base of a solver: it takes the part of the step that the curvature does not span."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import space, spectrum
from saddlefree.model import Rest
from saddlefree.space import Space, Tree, Vector


class Based(NamedTuple):
    """The states of the base."""

    rest: Any  # where it sees what the basis does not span
    own: Any  # where it sees the whole gradient, to say how long its steps would be


def init(base: optax.GradientTransformation, layout: Space) -> Based:
    """The states before the first step; refuses a base whose update points uphill."""
    params = _params(base, layout)
    return Based(base.init(params), base.init(params))


def run(
    base: optax.GradientTransformation, layout: Space, basis: Vector, g: Vector, finite: jax.Array, old: Based
) -> tuple[Rest, Based]:
    """u − QQᵀu for u = base(g − QQᵀg), and the states, the old ones where a number is not finite.

    Args:
      base: the optimiser.
      layout: of the vectors.
      basis: an orthonormal basis of the span of Q, stacked.
      g: the gradient.
      finite: whether g is finite.
      old: the states of the step before.
    """
    tx, params, flat = optax.with_extra_args_support(base), _params(base, layout), _is_flat(base, layout)

    def step(g: Vector, state: Any) -> tuple[Vector, Any]:
        # Optax's own optimisers need promotion, also where the user has forbidden it.
        with jax.numpy_dtype_promotion("standard"):
            updates, new = tx.update(g if flat else layout.unpack(g, cast=False), state, params)
        update = updates if flat else layout.pack(updates)
        return update, space.where(finite & space.all_finite(update), new, state)

    rest, of_rest = step(_outside(basis, g, layout), old.rest)
    own, of_own = step(g, old.own)
    return Rest(spectrum.swept(basis, rest), space.peak(own)), Based(of_rest, of_own)


def _outside(basis: Vector, g: Vector, layout: Space) -> Vector:
    """g − QQᵀg, and 0 where no more than rounding is left, which a base that normalises would magnify.

    Right after a refresh that is everywhere: Lanczos starts from the gradient.
    """
    rounding = layout.rounding + 64 * float(jnp.finfo(layout.dtype).eps)

    def subtract(a: jax.Array, b: jax.Array) -> jax.Array:
        rest = a - b
        return jnp.where(jnp.abs(rest) > rounding * (jnp.abs(a) + jnp.abs(b)), rest, 0)

    return jax.tree.map(subtract, g, space.combine(basis, space.project(basis, g)))


def _is_flat(base: optax.GradientTransformation, layout: Space) -> bool:
    """Whether the base works on packed vectors, which compiles faster, instead of on trees."""
    return layout.packed and _treats_entries_alike(base)


def _params(base: optax.GradientTransformation, layout: Space) -> Tree:
    packed = layout.pack(layout.like)
    return packed if _is_flat(base, layout) else layout.unpack(packed, cast=False)


@functools.lru_cache(maxsize=128)
def _treats_entries_alike(base: optax.GradientTransformation) -> bool:
    """Whether the base makes the same of a flat array as of a tree, found by trying; refuses one that goes uphill."""
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        flat = jnp.array([0.3, -0.7, 0.2, 0.9, -0.4, 0.6, -0.1, 0.8, 0.5])
        tree = {"a": {"w": flat[:6].reshape(2, 3)}, "b": {"b": flat[6:]}}
        try:
            small, whole = (optax.with_extra_args_support(base) for _ in range(2))
            states = small.init(flat), whole.init(tree)
            for factor in (1.0, -2.0):
                first, state = small.update(factor * flat, states[0], flat)
                grads = jax.tree.map(lambda x, factor=factor: factor * x, tree)
                second, other = whole.update(grads, states[1], tree)
                states = state, other
                joined = jnp.concatenate([second["a"]["w"].reshape(-1), second["b"]["b"]])
                if factor > 0 and float(first @ flat) > 0:
                    break
                if not jnp.allclose(first, joined, rtol=1e-5, atol=1e-12):
                    return False
            else:
                return True
        except Exception:  # some bases take matrices, labels or further arguments only
            return False
    raise ValueError(
        "base must return an update that is added to the parameters, as optax.adam(1e-3) does, got one that points "
        "uphill, as optax.scale_by_adam() does; chain it with optax.scale_by_learning_rate(rate)"
    )
