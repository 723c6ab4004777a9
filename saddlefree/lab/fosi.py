"""FOSI (Sivan et al. 2024): Newton's step in the space of the largest eigenvalues, any Optax optimiser elsewhere.

With g the gradient, θ₁ ≥ … ≥ θ_k the largest eigenvalues of the batch's Hessian and Q their vectors, and v an average:

    v ← βv + (1 − β)QQᵀg,      u = base(g − QQᵀg),      update = u − QQᵀu − α Q diag(1/|θ|) Qᵀv.

Q and θ are renewed every T steps, for the first time in step T, by 4k products of Lanczos from a random vector, and the
k largest Ritz pairs are kept. `low_rank(base=…)` differs: it keeps all vectors of its k products, which start from the
averaged gradient and the old basis, damps by λ, and bounds the step by the base's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import saddlefree as sf
from saddlefree import model, spectrum

Tree = Any


class Ritz(NamedTuple):
    """Of the last refresh; zeros before the first one."""

    values: jax.Array  # θ
    vectors: jax.Array  # Qᵀ, a vector in each row


class FosiState(NamedTuple):
    """What is carried from step to step."""

    steps: jax.Array  # so far
    ritz: Ritz
    velocity: jax.Array  # v
    base: Any


def fosi(
    base: optax.GradientTransformation,
    alpha: float = 0.1,
    rank: int = 10,
    refresh_every: int = 100,
    momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
    """The optimiser: α, k, T and β; its `update` takes `value_fn`."""

    def init(params: Tree) -> FosiState:
        flat, _ = ravel_pytree(params)
        k = min(rank, flat.size)
        ritz = Ritz(jnp.zeros(k, flat.dtype), jnp.zeros((k, flat.size), flat.dtype))
        return FosiState(jnp.zeros((), jnp.int32), ritz, jnp.zeros_like(flat), base.init(flat))

    def update(
        updates: Tree,
        state: FosiState,
        params: Tree = None,
        *,
        value_fn: Callable[[Tree], jax.Array],
        **_: Any,
    ) -> tuple[Tree, FosiState]:
        (g, unravel), flat = ravel_pytree(updates), ravel_pytree(params)[0]
        count = optax.safe_increment(state.steps)

        def renewed(old: Ritz) -> Ritz:
            return _largest(value_fn, params, unravel, count, old)

        ritz = jax.lax.cond(count % refresh_every == 0, renewed, lambda old: old, state.ritz)
        inside = _spanned(ritz, g)
        velocity = momentum * state.velocity + (1 - momentum) * inside
        u, new = base.update(g - inside, state.base, flat)
        newton = (model.inverse(ritz.values, jnp.zeros((), g.dtype)) * (ritz.vectors @ velocity)) @ ritz.vectors
        return unravel(u - _spanned(ritz, u) - alpha * newton), FosiState(count, ritz, velocity, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _spanned(ritz: Ritz, x: jax.Array) -> jax.Array:
    """QQᵀx."""
    return (ritz.vectors @ x) @ ritz.vectors


def _largest(value_fn: Callable, params: Tree, unravel: Callable, count: jax.Array, old: Ritz) -> Ritz:
    """The largest Ritz pairs, or the old ones where they are not finite."""
    k, size = old.vectors.shape
    matvec = sf.hessian(value_fn, params)

    def product(v: jax.Array) -> jax.Array:
        return ravel_pytree(matvec(unravel(v)))[0]

    start = jax.random.normal(jax.random.fold_in(jax.random.key(0), count), (size,), old.vectors.dtype)
    basis, T, _ = spectrum.lanczos_decomposition(product, start, min(4 * k, size))
    values, vectors = jnp.linalg.eigh(T.dense())
    new = Ritz(values[-k:], vectors[:, -k:].T @ basis)
    finite = jnp.all(jnp.isfinite(new.values))
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
