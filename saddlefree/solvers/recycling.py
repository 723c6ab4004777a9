"""Recycling: what earlier steps learned of H preconditions the Krylov space of this one.

U holds k orthonormal vectors, the Ritz vectors of largest |θ| that were met so far, and θ their values, which may be
old. The preconditioner is the saddle-free inverse of that picture of H, with the smallest |θ| for what is not in it:

    M⁻¹ = I/σ + U diag(1/(|θ| + λ) − 1/σ) Uᵀ,    σ = min |θ| + λ.

It is positive definite. The basis Z of M⁻¹g, M⁻¹H M⁻¹g, … reaches with a few products what a plain Krylov space needs
many for. Old values shape the space alone: the small matrix ZᵀHZ is made of new products.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import space, spectrum
from saddlefree.curvature import MatVec
from saddlefree.space import Space, Vector


class Recycled(NamedTuple):
    """The Ritz pairs that are kept; zeros where there are none yet."""

    basis: Vector  # U, k stacked vectors
    values: jax.Array  # θ


class KrylovSpace(NamedTuple):
    """A preconditioned Krylov space, and what the kept vectors saw of its products."""

    basis: Vector  # Z, n stacked vectors
    matrix: jax.Array  # ZᵀHZ
    seen: jax.Array  # UᵀHZ


def empty(layout: Space, size: int) -> Recycled:
    """No pairs yet, with places for `size`."""
    return Recycled(space.stack(layout.zeros(), size), jnp.zeros(size, layout.dtype))


def krylov_space(
    matvec: MatVec,
    g: Vector,
    updates: Vector | None,
    num_products: int,
    old: Recycled,
    damping: jax.Array,
) -> KrylovSpace:
    """The space of M⁻¹g, M⁻¹H M⁻¹g, … with `num_products` vectors, and of the stacked `updates` after them."""
    size = num_products + (0 if updates is None else space.length(updates))
    magnitude = jnp.abs(old.values)
    known = magnitude > 10 * jnp.finfo(magnitude.dtype).eps * jnp.max(magnitude)
    smallest = jnp.min(magnitude, initial=jnp.inf, where=known)
    rest = jnp.where(jnp.isfinite(smallest), smallest, 1) + damping
    gain = jnp.where(known, rest / (magnitude + damping) - 1, 0)

    def preconditioned(w: Vector, coordinates: jax.Array) -> Vector:
        # σM⁻¹w: its length does not matter.
        return space.axpy(1, space.combine(old.basis, gain * coordinates), w)

    def iterate(carry: tuple[Vector, jax.Array, Vector], j: jax.Array) -> tuple[tuple, jax.Array]:
        basis, matrix, v = carry
        if updates is not None:
            v = space.where(j < num_products, v, space.get(updates, jnp.maximum(j - num_products, 0)))
        basis, matrix, w = spectrum.join(matvec, basis, matrix, v, j)
        seen = space.project(old.basis, w)
        return (basis, matrix, preconditioned(w, seen)), seen

    first = preconditioned(g, space.project(old.basis, g))
    carry = space.stack(g, size), jnp.zeros((size, size), magnitude.dtype), first
    (basis, matrix, _), seen = jax.lax.scan(iterate, carry, jnp.arange(size))
    return KrylovSpace(basis, matrix, seen.T)


def merged(old: Recycled, new: KrylovSpace) -> Recycled:
    """The Ritz pairs of largest |θ| on U and Z together: new products where there are any, old values elsewhere.

    With O = UZᵀ the rows of R = Z − OᵀU are what Z adds to U, and those of E = [U; WR] an orthonormal basis of both for
    WᵀW = (RRᵀ)⁻¹. In it Z has the coordinates C = [Oᵀ, RRᵀWᵀ], HZ those of G = [UHZᵀ; W(ZHZᵀ − OᵀUHZᵀ)], and

        EHEᵀ = GC + (GC)ᵀ − Cᵀ(ZHZᵀ)C + (I − CᵀC) diag(θ, 0) (I − CᵀC).
    """
    size, count = old.values.size, new.matrix.shape[0]
    overlap = space.project(old.basis, new.basis)
    rest = space.sub(new.basis, space.combine(old.basis, overlap.T))
    # Twice is enough, as in `spectrum.join`.
    again = space.project(old.basis, rest)
    rest, overlap = space.sub(rest, space.combine(old.basis, again.T)), overlap + again
    gram = space.project(rest, rest)
    squares, axes = jnp.linalg.eigh(gram)
    added = squares > 100 * jnp.finfo(squares.dtype).eps
    W = jnp.where(added, jax.lax.rsqrt(jnp.where(added, squares, 1)), 0)[:, None] * axes.T
    C = jnp.concatenate([overlap.T, gram @ W.T], axis=1)
    G = jnp.concatenate([new.seen, W @ (new.matrix - overlap.T @ new.seen)])
    theta = jnp.pad(old.values, (0, count))
    stale = (theta[:, None] * C.T) @ C  # diag(θ, 0) CᵀC
    changed = G @ C - stale
    matrix = changed + changed.T + C.T @ ((C * theta) @ C.T - new.matrix) @ C + jnp.diag(theta)
    values, vectors = jnp.linalg.eigh(matrix)
    largest = jnp.argsort(-jnp.abs(values))[:size]
    of_old, of_rest = jnp.split(vectors[:, largest].T, [size], axis=1)
    basis = space.axpy(1, space.combine(rest, of_rest @ W), space.combine(old.basis, of_old))
    return Recycled(basis, values[largest])
