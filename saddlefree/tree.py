"""Linear algebra on pytrees: the vectors of this library.

Every vector (gradient, direction, basis vector) is a pytree of real arrays. Inner products are sums of elementwise
products, which work under explicit sharding where `vdot` does not, and are accumulated in float32 at least.

>>> import jax.numpy as jnp
>>> x = {"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
>>> float(norm(x))
5.0
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any
"""A pytree of arrays."""
Scalar = Any
"""A number: a Python float or a zero-dimensional array."""
Number = Scalar | Callable[[jax.Array], Any]
"""A scalar, or a schedule: a function from the step count to one."""


def at(number: Number, count: jax.Array, dtype: Any) -> jax.Array:
    """The number, or the schedule's value at `count`."""
    return jnp.asarray(number(count) if callable(number) else number).astype(dtype)


def working_dtype(dtype: Any) -> Any:
    """The dtype that sums and bases use for values of `dtype`: itself, or float32 where it is narrower."""
    return _promote(dtype, jnp.float32)


def scalar_dtype(tree: Tree) -> Any:
    """The dtype of inner products in `tree`: float32, or float64 as soon as one leaf has it."""
    return _promote(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree)))


def _promote(*dtypes: Any) -> Any:
    # The promotions of this module are meant, also where the user has forbidden those that are not.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def to_working(tree: Tree) -> Tree:
    """`tree` with each leaf in its working dtype."""
    return jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), tree)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """`tree` with the dtypes of `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def dot(x: Tree, y: Tree) -> jax.Array:
    """⟨x, y⟩, accumulated in float32 at least."""
    dtype = scalar_dtype((x, y))
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(dtype) * b.astype(dtype)), x, y)
    return sum(jax.tree.leaves(products), jnp.zeros((), dtype))


def norm(x: Tree) -> jax.Array:
    """‖x‖₂."""
    return jnp.sqrt(dot(x, x))


def reciprocal(x: jax.Array) -> jax.Array:
    """1/x, and 0 for x = 0: what is divided by a length of nothing is nothing."""
    zero = x == 0
    return jnp.where(zero, 0, 1 / jnp.where(zero, 1, x))


def normalise(x: Tree) -> Tree:
    """x/‖x‖, and 0 where x is 0."""
    return scale(reciprocal(norm(x)), x)


def scale(alpha: Scalar, x: Tree) -> Tree:
    """α x in the dtypes of x."""
    return jax.tree.map(lambda a: jnp.asarray(alpha).astype(a.dtype) * a, x)


def axpy(alpha: Scalar, x: Tree, y: Tree) -> Tree:
    """α x + y in the dtypes of y."""
    return jax.tree.map(lambda a, b: jnp.asarray(alpha).astype(b.dtype) * a.astype(b.dtype) + b, x, y)


def sub(x: Tree, y: Tree) -> Tree:
    """x − y."""
    return optax.tree.sub(x, y)


def zeros_like(x: Tree) -> Tree:
    """0 in the shapes and dtypes of x."""
    return optax.tree.zeros_like(x)


def where(condition: jax.Array, x: Tree, y: Tree) -> Tree:
    """x where the scalar `condition` holds, otherwise y; what is not chosen may be NaN."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


def all_finite(x: Tree) -> jax.Array:
    """Whether no entry of x is infinite or NaN, nor the sum of a leaf's magnitudes, which XLA finds sooner."""
    finite = [jnp.isfinite(jnp.sum(jnp.abs(leaf))) for leaf in jax.tree.leaves(x)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.array(True)


def size(x: Tree) -> int:
    """The number of entries of x."""
    return optax.tree.size(x)


def random_normal(key: jax.Array, like: Tree) -> Tree:
    """Independent standard normal entries in the shapes and dtypes of `like`."""
    return optax.tree.random_like(key, like, sampler=jax.random.normal)


def stack(x: Tree, length: int) -> Tree:
    """`length` zero vectors like x, along a new leading axis."""
    # A broadcast keeps the sharding of x, which a new array would not.
    return jax.tree.map(lambda a: jnp.broadcast_to(jnp.zeros_like(a), (length, *a.shape)), x)


def get(vectors: Tree, index: jax.Array | int) -> Tree:
    """One vector of a stack."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), vectors)


def put(vectors: Tree, x: Tree, index: jax.Array | int) -> Tree:
    """The stack with x in the place of one of its vectors."""
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, index, 0), vectors, x)


def ravel(x: Tree) -> tuple[jax.Array, Callable[[jax.Array], Tree]]:
    """x as one vector, replicated where x is sharded, and the way back to x's shapes, dtypes and shardings."""
    leaves, treedef = jax.tree.flatten(x)
    dtype = scalar_dtype(x)
    pieces = [_replicated(leaf).reshape(-1).astype(dtype) for leaf in leaves]
    vector = jnp.concatenate(pieces) if pieces else jnp.zeros(0, dtype)

    def unravel(vector: jax.Array) -> Tree:
        restored, start = [], 0
        for leaf in leaves:
            piece = vector[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype)
            sharding = jax.typeof(leaf).sharding
            restored.append(piece if sharding.mesh.empty else jax.sharding.reshard(piece, sharding))
            start += leaf.size
        return jax.tree.unflatten(treedef, restored)

    return vector, unravel


def replication(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """On x's mesh everything everywhere, and None where x has no mesh."""
    mesh = jax.typeof(x).sharding.mesh
    return None if mesh.empty else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _replicated(x: jax.Array) -> jax.Array:
    everywhere = replication(x)
    return x if everywhere is None else jax.sharding.reshard(x, everywhere)


def select(like: Tree, x: Tree) -> Tree:
    """x without the leaves that are None in `like`."""
    return jax.tree.map(lambda a, b: None if a is None else b, like, x, is_leaf=lambda a: a is None)


def fill(x: Tree, full: Tree) -> Tree:
    """x with its None leaves taken from `full`."""
    return jax.tree.map(lambda a, b: b if a is None else a, x, full, is_leaf=lambda a: a is None)
