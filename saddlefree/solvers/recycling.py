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

from saddlefree import spectrum, tree
from saddlefree.curvature import MatVec
from saddlefree.tree import Tree


class Recycled(NamedTuple):
    """The Ritz pairs that are kept; zeros where there are none yet."""

    basis: Tree  # U, k stacked vectors
    values: jax.Array  # θ


class Space(NamedTuple):
    """A preconditioned Krylov space, and what the kept vectors saw of its products."""

    basis: Tree  # Z, n stacked vectors
    matrix: jax.Array  # ZᵀHZ
    seen: jax.Array  # UᵀHZ


def nothing(gradient: Tree, size: int) -> Recycled:
    """No pairs, and room for `size`."""
    return Recycled(tree.stack(gradient, size), jnp.zeros(size, tree.scalar_dtype(gradient)))


def krylov_space(
    matvec: MatVec, g: Tree, updates: Tree, num_products: int, old: Recycled, damping: jax.Array, unroll: int | bool
) -> Space:
    """The space of M⁻¹g, M⁻¹H M⁻¹g, … with `num_products` vectors, and of the stacked `updates` after them."""
    size = num_products + jax.tree.leaves(updates)[0].shape[0]
    magnitude = jnp.abs(old.values)
    known = magnitude > 10 * jnp.finfo(magnitude.dtype).eps * jnp.max(magnitude)
    smallest = jnp.min(magnitude, initial=jnp.inf, where=known)
    rest = jnp.where(jnp.isfinite(smallest), smallest, 1) + damping
    gain = jnp.where(known, rest / (magnitude + damping) - 1, 0)

    def preconditioned(w: Tree, coordinates: jax.Array) -> Tree:
        # σM⁻¹w: its length does not matter.
        return tree.axpy(1, spectrum.combine(old.basis, gain * coordinates), w)

    def turn(carry: tuple[Tree, jax.Array, Tree], j: jax.Array) -> tuple[tuple[Tree, jax.Array, Tree], jax.Array]:
        basis, matrix, v = carry
        if size > num_products:
            v = tree.where(j < num_products, v, tree.get(updates, jnp.maximum(j - num_products, 0)))
        basis, matrix, w = spectrum.join(matvec, basis, matrix, v, j)
        seen = spectrum.project(old.basis, w)
        return (basis, matrix, preconditioned(w, seen)), seen

    first = preconditioned(g, spectrum.project(old.basis, g))
    carry = tree.stack(g, size), jnp.zeros((size, size), magnitude.dtype), first
    (basis, matrix, _), seen = jax.lax.scan(turn, carry, jnp.arange(size), unroll=unroll)
    return Space(basis, matrix, seen.T)


def merged(old: Recycled, space: Space) -> Recycled:
    """The Ritz pairs of largest |θ| on U and Z together: new products where there are any, old values elsewhere.

    With O = UᵀZ, the rows of W(U − O Z) are an orthonormal basis of what U adds to Z, for WᵀW = (UᵀU − O Oᵀ)⁻¹.
    """
    size = old.values.size
    overlap = spectrum.project(old.basis, space.basis)
    gram = spectrum.project(old.basis, old.basis) - overlap @ overlap.T
    squares, axes = jnp.linalg.eigh(gram)
    added = squares > jnp.sqrt(jnp.finfo(squares.dtype).eps)
    W = jnp.where(added, jax.lax.rsqrt(jnp.where(added, squares, 1)), 0)[:, None] * axes.T
    old_part = W @ gram
    mixed = W @ (space.seen - overlap @ space.matrix)
    matrix = jnp.block([[space.matrix, mixed.T], [mixed, (old_part * old.values) @ old_part.T]])
    values, vectors = jnp.linalg.eigh(matrix)
    largest = jnp.argsort(-jnp.abs(values))[:size]
    of_space, of_old = jnp.split(vectors[:, largest].T, [space.matrix.shape[0]], axis=1)
    of_old = of_old @ W
    basis = tree.axpy(
        1, spectrum.combine(space.basis, of_space - of_old @ overlap), spectrum.combine(old.basis, of_old)
    )
    return tree.where(jnp.all(jnp.isfinite(values)), Recycled(basis, values[largest]), old)
