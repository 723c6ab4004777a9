"""The spectrum of a matrix that is known by its products: Krylov bases and Ritz values.

Lanczos: m products build an orthonormal basis Q of span{b, A b, …, A^{m−1} b} in which A is the tridiagonal
T = QᵀAQ. The eigenvalues θ of T (Ritz values) approach those of A from inside, the extreme ones first; with the
eigenvectors S of T and the norm β of what is left after the last product, each θᵢ lies within β|S_{mi}| of an
eigenvalue of A.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import tree
from saddlefree.curvature import MatVec
from saddlefree.tree import Tree


class Krylov(NamedTuple):
    """An orthonormal Krylov basis Q and the tridiagonal T = QᵀAQ.

    Once the space is exhausted (A maps it into itself) further basis vectors are zero, and so are their rows of T.
    """

    basis: Tree  # Q: m stacked vectors, along a leading axis
    diagonal: jax.Array  # α, m entries
    off_diagonal: jax.Array  # β, m entries: the last is the norm of what is left

    @property
    def tridiagonal(self) -> jax.Array:
        """T, m × m."""
        between = self.off_diagonal[:-1]
        return jnp.diag(self.diagonal) + jnp.diag(between, 1) + jnp.diag(between, -1)


def lanczos_decomposition(matvec: MatVec, start: Tree, num_products: int, unroll: int | bool = 1) -> Krylov:
    """Lanczos with full re-orthogonalisation from `start`: m products, m basis vectors.

    Args:
      matvec: product with a symmetric matrix A.
      start: the first basis vector, of any length but zero.
      num_products: m ≥ 1.
      unroll: products in one turn of the compiled loop, or True for no loop at all.

    >>> A = jnp.diag(jnp.array([3.0, 1.0, -2.0]))
    >>> krylov = lanczos_decomposition(lambda v: A @ v, jnp.ones(3), num_products=3)
    >>> [round(float(value), 3) for value in jnp.linalg.eigvalsh(krylov.tridiagonal)]
    [-2.0, 1.0, 3.0]
    """
    dtype = tree.scalar_dtype(start)
    epsilon = jnp.finfo(dtype).eps

    def extend(carry: tuple[Tree, Tree], j: jax.Array) -> tuple[tuple[Tree, Tree], tuple[jax.Array, ...]]:
        basis, q = carry
        basis = jax.tree.map(lambda Q, x: jax.lax.dynamic_update_index_in_dim(Q, x, j, 0), basis, q)
        w = matvec(q)
        alpha, length = tree.dot(q, w), tree.norm(w)
        # Twice is enough (Parlett 1998): one sweep of Gram-Schmidt loses orthogonality by cancellation, two do not.
        for _ in range(2):
            w = tree.sub(w, combine(basis, project(basis, w)))
        beta = tree.norm(w)
        beta = jnp.where(beta > 10 * epsilon * length, beta, 0)
        return (basis, tree.scale(tree.reciprocal(beta), w)), (alpha, beta)

    basis = jax.tree.map(lambda x: jnp.zeros((num_products, *x.shape), x.dtype, out_sharding=_stacked(x)), start)
    q = tree.normalise(start)
    (basis, _), (alphas, betas) = jax.lax.scan(extend, (basis, q), jnp.arange(num_products), unroll=unroll)
    return Krylov(basis, alphas, betas)


def project(basis: Tree, x: Tree) -> jax.Array:
    """Qᵀx: the coordinates of x in a stacked basis."""
    return jax.vmap(tree.dot, in_axes=(0, None))(basis, x)


def combine(basis: Tree, coordinates: jax.Array) -> Tree:
    """Q y: the vector with coordinates y in a stacked basis."""
    return jax.tree.map(lambda Q: jnp.tensordot(coordinates.astype(Q.dtype), Q, axes=1), basis)


def largest_magnitude(krylov: Krylov) -> jax.Array:
    """An estimate of |λ|max from above: max |θᵢ| + β, the largest Ritz value plus all that is left (Zhou & Li 2011).

    >>> A = jnp.diag(jnp.array([3.0, 1.0, -4.0]))
    >>> krylov = lanczos_decomposition(lambda v: A @ v, jnp.ones(3), num_products=3)
    >>> largest_magnitude(krylov).round(3)
    Array(4., dtype=float32)
    """
    return jnp.max(jnp.abs(jnp.linalg.eigvalsh(krylov.tridiagonal))) + krylov.off_diagonal[-1]


def _stacked(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """The sharding of a stack of arrays like x along a new, unsharded, leading axis."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(None, *sharding.spec))
