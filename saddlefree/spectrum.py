"""The spectrum of a matrix that is known by its products: Krylov bases and Ritz values.

Lanczos: m products build an orthonormal basis Q of span{b, A b, …, A^{m−1} b} in which A is the tridiagonal
T = QᵀAQ. The eigenvalues θ of T (Ritz values) approach those of A from inside, the extreme ones first. What is left
after the last product has the norm β_m.

Orthogonality is measured, and restored where it is lost. Simon's (1984) recurrence would estimate it instead, for
products that are right to working precision; those of a bfloat16 network are not.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import space
from saddlefree.curvature import MatVec
from saddlefree.space import Vector

ORTHOGONAL = 50
"""The largest overlap of two vectors of a basis, in units of rounding."""


class Tridiagonal(NamedTuple):
    """T = QᵀAQ. Once the space is exhausted, or the run stopped, what follows is zero."""

    diagonal: jax.Array  # α₁ … α_m
    off_diagonal: jax.Array  # β₁ … β_m; the last is the norm of what is left

    def dense(self) -> jax.Array:
        """T as a matrix, m × m."""
        between = self.off_diagonal[:-1]
        return jnp.diag(self.diagonal) + jnp.diag(between, 1) + jnp.diag(between, -1)

    def reached(self) -> jax.Array:
        """Which of the basis vectors are not zero: those before the space was exhausted."""
        return jnp.cumprod(jnp.roll(self.off_diagonal, 1).at[0].set(1) != 0) > 0


Stop = Callable[[Tridiagonal, jax.Array], jax.Array]
"""Whether T, complete up to row j, suffices."""


def lanczos_decomposition(
    matvec: MatVec,
    start: Vector,
    num_products: int,
    stop: Stop | None = None,
    spare: int = 0,
) -> tuple[Vector, Tridiagonal, jax.Array]:
    """Lanczos with re-orthogonalisation: the basis Q, m stacked vectors, T, and the number of products.

    Args:
      matvec: product with a symmetric matrix A.
      start: b, the first basis vector up to its length; a zero vector gives zeros.
      num_products: m ≥ 1.
      stop: ends the run early.
      spare: zero vectors at the end of the basis, for a caller to fill.

    >>> A = jnp.diag(jnp.array([3.0, 1.0, -2.0]))
    >>> _, T, _ = lanczos_decomposition(lambda v: A @ v, jnp.ones(3), num_products=3)
    >>> [round(float(value), 3) for value in jnp.linalg.eigvalsh(T.dense())]
    [-2.0, 1.0, 3.0]
    """
    Carry = tuple[Vector, Vector, jax.Array, Tridiagonal]

    def extend(carry: Carry, j: jax.Array) -> Carry:
        basis, w, beta, T = carry
        q = space.scale(space.reciprocal(beta), w)
        w = matvec(q)
        # The recurrence takes out what is large (β₀ = 0, in the place that β_m will fill).
        alpha, beta = space.dot(q, w), T.off_diagonal[j - 1]
        T, removed = T._replace(diagonal=T.diagonal.at[j].set(alpha)), jnp.abs(alpha) + beta
        w = space.axpy(-alpha, q, space.axpy(-beta, space.get(basis, j - 1), w))

        def sweep(w: Vector, overlaps: jax.Array) -> tuple[Vector, jax.Array]:
            w = space.sub(w, space.combine(basis, overlaps))
            w = space.axpy(-space.dot(q, w), q, w)
            return w, space.norm(w)

        # To measure what is left of the basis in w is half the work of taking it out, and often it is rounding.
        length, overlaps = space.norm(w), space.project(basis, w)
        worst = jnp.maximum(jnp.max(jnp.abs(overlaps)), jnp.abs(space.dot(q, w)))
        lost = worst > ORTHOGONAL * jnp.finfo(length.dtype).eps * length
        w, beta = jax.lax.cond(lost, sweep, lambda w, _: (w, length), w, overlaps)
        # A sweep leaves rounding of the size of what it was given; where little is left of that, a second one is due
        # (Daniel, Gragg, Kaufman & Stewart 1976).
        few = beta < length / 2
        w, beta = jax.lax.cond(few, lambda w: sweep(w, space.project(basis, w)), lambda w: (w, beta), w)
        beta = _alive(beta, removed)
        # Scaled by 1 + 0β, q waits for the sweep: a basis that may be written before it is read, XLA copies.
        basis = space.put(basis, space.scale(1 + 0 * beta, q), j)
        return basis, w, beta, T._replace(off_diagonal=T.off_diagonal.at[j].set(beta))

    zeros = jnp.zeros(num_products, space.scalar_dtype(start))
    carry = space.stack(start, num_products + spare), start, space.norm(start), Tridiagonal(zeros, zeros)
    if stop is None:
        indices = jnp.arange(num_products)
        (basis, _, _, T), _ = jax.lax.scan(lambda c, j: (extend(c, j), None), carry, indices)
        return basis, T, jnp.asarray(num_products, jnp.int32)

    def unfinished(state: tuple[jax.Array, Carry]) -> jax.Array:
        j, (_, _, _, T) = state
        exhausted = T.off_diagonal[j - 1] == 0
        return (j == 0) | ((j < num_products) & ~exhausted & ~stop(T, j))

    count, (basis, _, _, T) = jax.lax.while_loop(
        unfinished, lambda s: (s[0] + 1, extend(s[1], s[0])), (jnp.zeros((), jnp.int32), carry)
    )
    # The vector that the last β leads to has not been multiplied.
    unmet = (jnp.arange(num_products, dtype=count.dtype) == count - 1) & (count < num_products)
    return basis, T._replace(off_diagonal=jnp.where(unmet, 0, T.off_diagonal)), count


def krylov_size(num_products: int, start: Vector) -> int:
    """`num_products`, or the dimension of the space where that is less: further products would add nothing."""
    return min(num_products, max(space.size(start), 1))


def lanczos_coefficients(matvec: MatVec, start: Vector, num_products: int) -> Tridiagonal:
    """T alone, by the three-term recurrence: three vectors alive, orthogonality lost as Ritz values converge."""
    _, T = jax.lax.scan(_recurrence(matvec), _begin(start), None, length=num_products)
    return T


def lanczos_combination(matvec: MatVec, start: Vector, coordinates: jax.Array) -> Vector:
    """Q y for the basis of `lanczos_coefficients`, built a second time and added up as it comes."""
    iterate = _recurrence(matvec)

    def body(carry: tuple, y: jax.Array) -> tuple:
        lanczos, total = carry
        lanczos, _ = iterate(lanczos, None)
        return (lanczos, space.axpy(y, lanczos[0], total)), None

    first = _begin(start)
    carry = first, space.scale(coordinates[0], first[0])
    (_, total), _ = jax.lax.scan(body, carry, coordinates[1:])
    return total


def _begin(start: Vector) -> tuple[Vector, Vector, jax.Array]:
    return space.normalise(start), space.zeros_like(start), jnp.zeros((), space.scalar_dtype(start))


def _recurrence(matvec: MatVec) -> Callable:
    """q_{j+1} β_{j+1} = A q_j − α_j q_j − β_j q_{j−1}, as the body of a scan."""

    def iterate(carry: tuple[Vector, Vector, jax.Array], _: None) -> tuple[tuple, Tridiagonal]:
        q, previous, beta = carry
        w = matvec(q)
        alpha = space.dot(q, w)
        w = space.axpy(-alpha, q, space.axpy(-beta, previous, w))
        beta = _alive(space.norm(w), jnp.abs(alpha) + beta)
        return (space.scale(space.reciprocal(beta), w), q, beta), Tridiagonal(alpha, beta)

    return iterate


def _alive(beta: jax.Array, removed: jax.Array) -> jax.Array:
    """β, and 0 where only the rounding of what was removed is left: the space is exhausted."""
    return jnp.where(beta > 10 * jnp.finfo(beta.dtype).eps * removed, beta, 0)


def extend(matvec: MatVec, basis: Vector, matrix: jax.Array, size: int, vectors: Vector) -> tuple[Vector, jax.Array]:
    """Adds stacked `vectors` to an orthonormal basis B of `size` with spare places, and their products to BᵀAB."""

    def add(carry: tuple[Vector, jax.Array], numbered: tuple[jax.Array, Vector]) -> tuple[tuple, None]:
        (basis, matrix), (j, v) = carry, numbered
        basis, matrix, _ = join(matvec, basis, matrix, v, j)
        return (basis, matrix), None

    places = size + jnp.arange(space.length(vectors))
    carry, _ = jax.lax.scan(add, (basis, matrix), (places, vectors))
    return carry


def join(matvec: MatVec, basis: Vector, matrix: jax.Array, v: Vector, j: jax.Array) -> tuple[Vector, jax.Array, Vector]:
    """Adds v as number j to an orthonormal basis B, zeros from there on, and its product to BᵀAB; returns that, too.

    A vector that lies in the span already becomes zero, and so do its product and its row.
    """
    length = space.norm(v)
    # Twice is enough (Parlett 1998): one sweep of Gram-Schmidt loses orthogonality by cancellation, two do not.
    v = swept(basis, swept(basis, v))
    # What is left of a vector in the span is rounding, a little more of it than in a product.
    rest = space.norm(v)
    v = space.scale(jnp.where(rest > 1e2 * jnp.finfo(rest.dtype).eps * length, space.reciprocal(rest), 0), v)
    w = matvec(v)
    row = space.project(basis, w).at[j].set(space.dot(v, w))
    return space.put(basis, v, j), matrix.at[j].set(row).at[:, j].set(row), w


def swept(basis: Vector, x: Vector) -> Vector:
    """x without its components along a stacked orthonormal basis."""
    return space.sub(x, space.combine(basis, space.project(basis, x)))


def sharpened(basis: Vector) -> Vector:
    """A basis that is nearly orthonormal, orthonormal to rounding: Q ← (3I − QᵀQ)Q/2, which squares what is missing."""
    gram = space.project(basis, basis)
    return space.combine(basis, 1.5 * jnp.eye(gram.shape[0], dtype=gram.dtype) - gram / 2)


def largest_magnitude(T: Tridiagonal) -> jax.Array:
    """An estimate of |λ|max from above: max |θᵢ| + β_m, the largest Ritz value plus all that is left (Zhou & Li 2011).

    >>> A = jnp.diag(jnp.array([3.0, 1.0, -4.0]))
    >>> _, T, _ = lanczos_decomposition(lambda v: A @ v, jnp.ones(3), num_products=3)
    >>> round(float(largest_magnitude(T)), 3)
    4.0
    """
    return jnp.max(jnp.abs(jnp.linalg.eigvalsh(T.dense()))) + T.off_diagonal[-1]
