"""The spectrum of a matrix that is known by its products: Krylov bases and Ritz values.

Lanczos: m products build an orthonormal basis Q of span{b, A b, …, A^{m−1} b} in which A is the tridiagonal
T = QᵀAQ. The eigenvalues θ of T (Ritz values) approach those of A from inside, the extreme ones first. What is left
after the last product has the norm β_m.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import tree
from saddlefree.curvature import MatVec
from saddlefree.tree import Tree


class Tridiagonal(NamedTuple):
    """T = QᵀAQ. Once the space is exhausted, or the run stopped, what follows is zero."""

    diagonal: jax.Array  # α₁ … α_m
    off_diagonal: jax.Array  # β₁ … β_m; the last is the norm of what is left

    def dense(self) -> jax.Array:
        """T as a matrix, m × m."""
        between = self.off_diagonal[:-1]
        return jnp.diag(self.diagonal) + jnp.diag(between, 1) + jnp.diag(between, -1)


class Overlaps(NamedTuple):
    """Estimates ω_j of qᵢᵀq_j for the last two vectors: how the recurrence carries rounding on (Simon 1984)."""

    last: jax.Array  # ω_j, which is 1 for i = j and 0 beyond
    before: jax.Array  # ω_{j−1}
    again: jax.Array  # whether the last vector was swept, so that the next one must be

    def after(self, T: Tridiagonal, j: jax.Array, beta: jax.Array) -> tuple[jax.Array, "Overlaps"]:
        """Whether the vector after q_j, whose length is β, must be swept, and the overlaps after that.

        β ω_{j+1,i} = βᵢ ω_{j,i+1} + βᵢ₋₁ ω_{j,i−1} + (αᵢ − α_j) ω_{j,i} − β_{j−1} ω_{j−1,i}, and rounding. Overlaps
        of √ε leave T right to the last digit. Two vectors are swept in a row, since each inherits from the last two.
        """
        i, eps = jnp.arange(self.last.size, dtype=j.dtype), jnp.finfo(beta.dtype).eps
        largest = jnp.max(jnp.abs(T.diagonal)) + jnp.max(T.off_diagonal) + beta
        rounding = eps * largest * tree.reciprocal(beta)
        inherited = T.off_diagonal * jnp.roll(self.last, -1) + jnp.roll(T.off_diagonal * self.last, 1)
        inherited += (T.diagonal - T.diagonal[j]) * self.last - T.off_diagonal[j - 1] * self.before
        inherited *= tree.reciprocal(beta)
        overlaps = jnp.where(i < j, inherited + jnp.copysign(rounding, inherited), rounding)
        lost = jnp.max(jnp.where(i <= j, jnp.abs(overlaps), 0)) > jnp.sqrt(eps)
        needed = lost | self.again
        overlaps = jnp.where(needed, rounding, overlaps)
        last = jnp.where(i <= j, overlaps, jnp.where(i == j + 1, 1, 0))
        return needed, Overlaps(last, self.last, lost & ~self.again)


Stop = Callable[[Tridiagonal, jax.Array], jax.Array]
"""Whether T, complete up to row j, suffices."""


def lanczos_decomposition(
    matvec: MatVec,
    start: Tree,
    num_products: int,
    unroll: int | bool = 1,
    stop: Stop | None = None,
    spare: int = 0,
    semi: bool = False,
) -> tuple[Tree, Tridiagonal, jax.Array]:
    """Lanczos with re-orthogonalisation: the basis Q, m stacked vectors, T, and the number of products.

    Args:
      matvec: product with a symmetric matrix A.
      start: b, the first basis vector up to its length; a zero vector gives zeros.
      num_products: m ≥ 1.
      unroll: products in one turn of the compiled loop, or True for no loop at all.
      stop: ends the run early; `unroll` is not used then.
      spare: zero vectors at the end of the basis, for a caller to fill.
      semi: sweeps only where half the digits of orthogonality are lost: often never, and the Ritz values are the same.

    >>> A = jnp.diag(jnp.array([3.0, 1.0, -2.0]))
    >>> _, T, _ = lanczos_decomposition(lambda v: A @ v, jnp.ones(3), num_products=3)
    >>> [round(float(value), 3) for value in jnp.linalg.eigvalsh(T.dense())]
    [-2.0, 1.0, 3.0]
    """
    Carry = tuple[Tree, Tree, jax.Array, Tridiagonal, Overlaps]

    def extend(carry: Carry, j: jax.Array) -> Carry:
        basis, w, beta, T, overlaps = carry
        q = tree.scale(tree.reciprocal(beta), w)
        w = matvec(q)
        # The recurrence takes out what is large (β₀ = 0, in the place that β_m will fill), and one sweep the rest.
        alpha, beta = tree.dot(q, w), T.off_diagonal[j - 1]
        T, removed = T._replace(diagonal=T.diagonal.at[j].set(alpha)), jnp.abs(alpha) + beta
        w = tree.axpy(-alpha, q, tree.axpy(-beta, tree.get(basis, j - 1), w))

        def swept() -> tuple[Tree, jax.Array]:
            v = _swept(basis, w)
            v = tree.axpy(-tree.dot(q, v), q, v)
            return v, tree.norm(v)

        if semi:
            length = tree.norm(w)
            needed, overlaps = overlaps.after(T, j, length)
            w, beta = jax.lax.cond(needed, swept, lambda: (w, length))
        else:
            w, beta = swept()
        beta = _alive(beta, removed)
        # Scaled by 1 + 0β, q waits for the sweep: a basis that may be written before it is read, XLA copies each turn.
        basis = tree.put(basis, tree.scale(1 + 0 * beta, q), j)
        return basis, w, beta, T._replace(off_diagonal=T.off_diagonal.at[j].set(beta)), overlaps

    zeros = jnp.zeros(num_products, tree.scalar_dtype(start))
    overlaps = Overlaps(zeros.at[0].set(1), zeros, jnp.array(False))
    carry = tree.stack(start, num_products + spare), start, tree.norm(start), Tridiagonal(zeros, zeros), overlaps
    if stop is None:
        indices = jnp.arange(num_products)
        (basis, _, _, T, _), _ = jax.lax.scan(lambda c, j: (extend(c, j), None), carry, indices, unroll=unroll)
        return basis, T, jnp.asarray(num_products, jnp.int32)

    def unfinished(state: tuple[jax.Array, Carry]) -> jax.Array:
        j, (_, _, _, T, _) = state
        exhausted = T.off_diagonal[j - 1] == 0
        return (j == 0) | ((j < num_products) & ~exhausted & ~stop(T, j))

    count, (basis, _, _, T, _) = jax.lax.while_loop(
        unfinished, lambda s: (s[0] + 1, extend(s[1], s[0])), (jnp.zeros((), jnp.int32), carry)
    )
    # The vector that the last β leads to has not been multiplied.
    unmet = (jnp.arange(num_products, dtype=count.dtype) == count - 1) & (count < num_products)
    return basis, T._replace(off_diagonal=jnp.where(unmet, 0, T.off_diagonal)), count


def krylov_size(num_products: int, start: Tree) -> int:
    """`num_products`, or the dimension of the space where that is less: no more products are worth while."""
    return min(num_products, max(tree.size(start), 1))


def lanczos_coefficients(matvec: MatVec, start: Tree, num_products: int, unroll: int | bool = 1) -> Tridiagonal:
    """T alone, by the three-term recurrence: three vectors alive, orthogonality lost as Ritz values converge."""
    _, T = jax.lax.scan(_recurrence(matvec), _begin(start), None, length=num_products, unroll=unroll)
    return T


def lanczos_combination(matvec: MatVec, start: Tree, coordinates: jax.Array, unroll: int | bool = 1) -> Tree:
    """Q y for the basis of `lanczos_coefficients`, built a second time and added up as it comes."""
    turn = _recurrence(matvec)

    def body(carry: tuple, y: jax.Array) -> tuple:
        lanczos, total = carry
        lanczos, _ = turn(lanczos, None)
        return (lanczos, tree.axpy(y, lanczos[0], total)), None

    first = _begin(start)
    carry = first, tree.scale(coordinates[0], first[0])
    (_, total), _ = jax.lax.scan(body, carry, coordinates[1:], unroll=unroll)
    return total


def _begin(start: Tree) -> tuple[Tree, Tree, jax.Array]:
    return tree.normalise(start), tree.zeros_like(start), jnp.zeros((), tree.scalar_dtype(start))


def _recurrence(matvec: MatVec) -> Callable:
    """q_{j+1} β_{j+1} = A q_j − α_j q_j − β_j q_{j−1}, as the body of a scan."""

    def turn(carry: tuple[Tree, Tree, jax.Array], _: None) -> tuple[tuple[Tree, Tree, jax.Array], Tridiagonal]:
        q, previous, beta = carry
        w = matvec(q)
        alpha = tree.dot(q, w)
        w = tree.axpy(-alpha, q, tree.axpy(-beta, previous, w))
        beta = _alive(tree.norm(w), jnp.abs(alpha) + beta)
        return (tree.scale(tree.reciprocal(beta), w), q, beta), Tridiagonal(alpha, beta)

    return turn


def _alive(beta: jax.Array, removed: jax.Array) -> jax.Array:
    """β, and 0 where only the rounding of what was removed is left: the space is exhausted."""
    return jnp.where(beta > 10 * jnp.finfo(beta.dtype).eps * removed, beta, 0)


def extend(
    matvec: MatVec, basis: Tree, matrix: jax.Array, size: int, vectors: Tree, unroll: int | bool = 1
) -> tuple[Tree, jax.Array]:
    """Adds stacked `vectors` to an orthonormal basis B of `size` and the spare room, and their products to BᵀAB."""

    def add(carry: tuple[Tree, jax.Array], numbered: tuple[jax.Array, Tree]) -> tuple[tuple[Tree, jax.Array], None]:
        (basis, matrix), (j, v) = carry, numbered
        basis, matrix, _ = join(matvec, basis, matrix, v, j)
        return (basis, matrix), None

    places = size + jnp.arange(jax.tree.leaves(vectors)[0].shape[0])
    carry, _ = jax.lax.scan(add, (basis, matrix), (places, vectors), unroll=unroll)
    return carry


def join(matvec: MatVec, basis: Tree, matrix: jax.Array, v: Tree, j: jax.Array) -> tuple[Tree, jax.Array, Tree]:
    """Adds v as number j to an orthonormal basis B, zeros from there on, and its product to BᵀAB; returns that, too.

    A vector that lies in the span already becomes zero, and so do its product and its row.
    """
    length = tree.norm(v)
    # Twice is enough (Parlett 1998): one sweep of Gram-Schmidt loses orthogonality by cancellation, two do not.
    v = _swept(basis, _swept(basis, v))
    # What is left of a vector in the span is rounding, a little more of it than in a product.
    rest = tree.norm(v)
    v = tree.scale(jnp.where(rest > 1e3 * jnp.finfo(rest.dtype).eps * length, tree.reciprocal(rest), 0), v)
    w = matvec(v)
    row = project(basis, w).at[j].set(tree.dot(v, w))
    return tree.put(basis, v, j), matrix.at[j].set(row).at[:, j].set(row), w


def _swept(basis: Tree, x: Tree) -> Tree:
    return tree.sub(x, combine(basis, project(basis, x)))


def project(basis: Tree, x: Tree) -> jax.Array:
    """Qᵀx: the coordinates of x in a stacked basis, or of each vector of a stack, in columns."""
    dtype = tree.scalar_dtype(x)

    def coordinates(Q: jax.Array, a: jax.Array) -> jax.Array:
        axes = tuple(range(1, Q.ndim))
        contracted = ((axes, tuple(axis + a.ndim - Q.ndim for axis in axes)), ((), ()))
        return jax.lax.dot_general(
            Q, a, contracted, precision="highest", preferred_element_type=dtype, out_sharding=tree.replication(a)
        )

    first, *others = jax.tree.leaves(jax.tree.map(coordinates, basis, x))
    return functools.reduce(jnp.add, others, first)


def combine(basis: Tree, coordinates: jax.Array) -> Tree:
    """Q y: the vector with coordinates y in a stacked basis, or a stack of them from the rows of y."""
    return jax.tree.map(lambda Q: jnp.tensordot(coordinates.astype(Q.dtype), Q, axes=1), basis)


def largest_magnitude(T: Tridiagonal) -> jax.Array:
    """An estimate of |λ|max from above: max |θᵢ| + β_m, the largest Ritz value plus all that is left (Zhou & Li 2011).

    >>> A = jnp.diag(jnp.array([3.0, 1.0, -4.0]))
    >>> _, T, _ = lanczos_decomposition(lambda v: A @ v, jnp.ones(3), num_products=3)
    >>> round(float(largest_magnitude(T)), 3)
    4.0
    """
    return jnp.max(jnp.abs(jnp.linalg.eigvalsh(T.dense()))) + T.off_diagonal[-1]
