"""A symmetric matrix as a multiple of another one and a sum of rank-one terms: M = f·M₀ + Σⱼ wⱼ vⱼvⱼᵀ.

A quasi-Newton update is M ← factor·M + two terms. As terms it writes two vectors in place of P² numbers, and a product
reads as many vectors as there are terms. Up to about P/4 updates that is less than the matrix itself, and all of them
are kept, to the last bit of what they say.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import space

BLOCK = 32
"""Vectors that a product reads at a time."""
PAIR = 2
"""The terms of an update."""


class Terms(NamedTuple):
    """Σⱼ wⱼ vⱼvⱼᵀ; weights beyond the updates that there are are 0."""

    vectors: jax.Array  # (capacity, P)
    weights: jax.Array
    updates: jax.Array  # how many there are, two terms each


def empty(updates: int, size: int, dtype: jax.typing.DTypeLike) -> Terms:
    """No terms, with places for as many updates, or a few more."""
    rows = -(-PAIR * updates // BLOCK) * BLOCK
    return Terms(jnp.zeros((rows, size), dtype), jnp.zeros(rows, dtype), jnp.zeros((), jnp.int32))


def capacity(terms: Terms) -> int:
    """How many updates there are places for."""
    return terms.weights.size // PAIR


def is_full(terms: Terms) -> jax.Array:
    """Whether there is no place for another update."""
    return terms.updates >= capacity(terms)


def cleared(terms: Terms) -> Terms:
    """The same places without terms."""
    return Terms(terms.vectors, jnp.zeros_like(terms.weights), jnp.zeros_like(terms.updates))


def product(terms: Terms, x: jax.Array) -> jax.Array:
    """Σⱼ wⱼ vⱼ(vⱼᵀx), each vector read once."""

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        V = jax.lax.dynamic_slice_in_dim(terms.vectors, i * BLOCK, BLOCK)
        w = jax.lax.dynamic_slice_in_dim(terms.weights, i * BLOCK, BLOCK)
        return total + jnp.matmul(w * jnp.matmul(V, x, precision="highest"), V, precision="highest")

    blocks = -(-PAIR * terms.updates // BLOCK)
    return jax.lax.fori_loop(jnp.zeros_like(blocks), blocks, add, jnp.zeros_like(x))


def joined(terms: Terms, factor: jax.Array, vectors: jax.Array, weights: jax.Array, learns: jax.Array) -> Terms:
    """factor·terms and the two of an update, where there is one; there must be a place for it."""
    at = PAIR * terms.updates
    return Terms(
        jax.lax.dynamic_update_slice_in_dim(terms.vectors, vectors, at, 0),
        jax.lax.dynamic_update_slice_in_dim(factor * terms.weights, jnp.where(learns, weights, 0), at, 0),
        terms.updates + learns.astype(jnp.int32),
    )


def dense(terms: Terms) -> jax.Array:
    """The sum as a matrix, symmetric to the bit."""
    half = jnp.matmul((terms.weights[:, None] * terms.vectors).T, terms.vectors, precision="highest") / 2
    return half + half.T


def compressed(terms: Terms, base: jax.Array) -> Terms:
    """Half as many terms: of the eigenvalues base + θ of base·I + Σⱼ wⱼ vⱼvⱼᵀ those that differ most from the base.

    A direction that is dropped has the eigenvalue of the base, so that the matrix stays positive definite. With the
    vectors as rows of V, VVᵀ = U diag(q) Uᵀ: the rows of diag(q^−½) UᵀV are orthonormal, and in them the terms are the
    matrix of diag(q^½) Uᵀ diag(w) U diag(q^½).
    """
    V, w = terms.vectors, terms.weights
    gram = jnp.matmul(V, V.T, precision="highest")
    # Rows of one length: what is small in a short vector is not rounding.
    lengths = jnp.sqrt(jnp.diagonal(gram))
    inverse = space.reciprocal(lengths)
    squares, axes = jnp.linalg.eigh(gram * inverse[:, None] * inverse[None, :])
    kept = squares > squares.size * jnp.finfo(w.dtype).eps * jnp.max(squares)
    roots = jnp.sqrt(jnp.where(kept, squares, 0))
    small = roots[:, None] * axes.T
    theta, vectors = jnp.linalg.eigh(jnp.matmul(small * (w * lengths**2), small.T, precision="highest"))
    size = theta + base
    ratio = jnp.abs(jnp.log(jnp.where(size > 0, size, base) / base))
    best = jnp.argsort(-ratio)[: w.size // 2]
    theta = jnp.where(size > 0, theta, 0)[best]
    coefficients = (vectors[:, best].T * jnp.where(kept, space.reciprocal(roots), 0)) @ axes.T * inverse
    new = jnp.matmul(coefficients, V, precision="highest")
    padding = w.size - theta.size
    return Terms(
        jnp.pad(new, ((0, padding), (0, 0))),
        jnp.pad(theta, (0, padding)),
        jnp.full_like(terms.updates, theta.size // PAIR),
    )


def diagonalised(s: jax.Array, z: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[s, z] matrix [s, z]ᵀ, for a symmetric matrix of two rows, as two terms: vectors and weights."""
    weights, axes = jnp.linalg.eigh(matrix)
    return axes.T[:, :1] * s + axes.T[:, 1:] * z, weights
