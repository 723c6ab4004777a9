"""The trainable parameters as a vector.

A vector (gradient, direction, basis vector) is a pytree of real arrays. `Space` makes one of the parameters: packed, it
is a single flat array, so that what XLA compiles does not grow with the number of leaves; unpacked, it is the
parameters' own pytree, whose leaves keep their sharding. The functions here work on both.

Inner products are accumulated in float32 at least and at full matrix-product precision; norms neither overflow nor
underflow.

>>> space = Space({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)})
>>> space.pack(space.like)
Array([4., 3., 0.], dtype=float32)
>>> float(norm(space.pack(space.like)))
5.0
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any
"""A pytree of arrays."""
Vector = Any
"""A pytree of real arrays that stands for one vector: a flat array, or the parameters' own tree."""
Scalar = Any
"""A number: a Python float or a zero-dimensional array."""
Number = Scalar | Callable[[jax.Array], Any]
"""A scalar, or a schedule: a function from the step count to one."""


class Space:
    """How vectors of one problem are laid out. It follows from shapes, dtypes and the switch `packed` alone.

    Args:
      like: the trainable parameters; a subtree that is None (frozen) has no entries.
      packed: one flat array for all leaves, in float32, or float64 where a leaf has it; otherwise each leaf by itself.
    """

    def __init__(self, like: Tree, packed: bool = True):
        self.like, self.packed = like, packed
        self.leaves, self.treedef = jax.tree.flatten(like)
        self.size = sum(leaf.size for leaf in self.leaves)
        self.dtype = scalar_dtype(like)
        """The dtype of inner products: float32, or float64 as soon as one leaf has it."""
        self.rounding = max((float(jnp.finfo(leaf.dtype).eps) for leaf in self.leaves), default=0.0)
        """The relative rounding error of the parameters, of their narrowest dtype."""

    def pack(self, x: Tree) -> Vector:
        """The vector of a tree with the parameters' structure, in working precision."""
        if not self.packed:
            return to_working(x)
        pieces = [leaf.reshape(-1).astype(self.dtype) for leaf in jax.tree.leaves(x)]
        return jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0] if pieces else self.zeros()

    def unpack(self, x: Vector, cast: bool = True) -> Tree:
        """The tree of a vector, in the parameters' dtypes, or without `cast` in working precision."""
        if self.packed:
            # XLA would repeat what makes x in the kernel of every leaf.
            x = jax.lax.optimization_barrier(x)
            pieces = _split(x, [leaf.size for leaf in self.leaves])
            pieces = [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, self.leaves, strict=True)]
            x = jax.tree.unflatten(self.treedef, pieces)
        return cast_like(x, self.like) if cast else x

    def moved(self, step: Vector) -> Vector:
        """The parameters after a step, as `optax.apply_updates` would leave them; to be unpacked."""
        # Added up before they are unpacked: one kernel in place of one for each leaf.
        rounded = self._narrowed(step)
        return axpy(1, step if rounded is None else rounded.astype(self.dtype), self.pack(self.like))

    def _narrowed(self, x: Vector) -> jax.Array | None:
        """A packed x in the dtype of the parameters, where they all have the same one; otherwise None."""
        dtypes = {leaf.dtype for leaf in self.leaves}
        return x.astype(dtypes.pop()) if self.packed and len(dtypes) == 1 else None

    def zeros(self) -> Vector:
        """The vector 0, in memory of its own."""
        if self.packed:
            return jnp.zeros(self.size, self.dtype)
        return jax.tree.map(lambda a: jnp.zeros_like(a, dtype=_working_dtype(a.dtype)), self.like)

    def finite_update(self, x: Vector) -> jax.Array:
        """Whether every entry of x is finite, also after the cast to the parameters' dtypes."""
        narrowed = self._narrowed(x)
        return all_finite(self.unpack(x) if narrowed is None else narrowed)


def _split(x: jax.Array, sizes: list[int]) -> Sequence[jax.Array]:
    """x in pieces of these sizes. On a CPU XLA does not know where they begin, and compiles equal kernels once.

    With constants it would compile one kernel for each piece. Elsewhere a branch would make the device wait for the
    host.
    """
    starts = [0, *itertools.accumulate(sizes)][:-1]

    def known(x: jax.Array) -> tuple[jax.Array, ...]:
        slices = zip(starts, sizes, strict=True)
        return tuple(jax.lax.slice_in_dim(x, start, start + size) for start, size in slices)

    def hidden(x: jax.Array) -> tuple[jax.Array, ...]:
        constants = lambda numbers: tuple(jnp.asarray(number, jnp.int32) for number in numbers)  # noqa: E731
        always = jax.lax.optimization_barrier(jnp.array(True))
        found = jax.lax.cond(always, lambda: constants(starts), lambda: constants([0] * len(starts)))
        slices = zip(found, sizes, strict=True)
        return tuple(
            jax.lax.dynamic_slice_in_dim(x, start, size, allow_negative_indices=False) for start, size in slices
        )

    if len(sizes) < 2 or starts[-1] > jnp.iinfo(jnp.int32).max:
        return known(x)
    return jax.lax.platform_dependent(x, cpu=hidden, default=known)


def scalar_dtype(tree: Tree) -> Any:
    """The dtype of inner products in `tree`: float32, or float64 as soon as one leaf has it."""
    return _promote(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree)))


def to_working(x: Tree) -> Vector:
    """x with each leaf in working precision: its own, or float32 where it is narrower."""
    return jax.tree.map(lambda a: a.astype(_working_dtype(a.dtype)), x)


def cast_like(x: Tree, like: Tree) -> Tree:
    """x with the dtypes of `like`."""
    return jax.tree.map(lambda a, b: a.astype(b.dtype), x, like)


def _working_dtype(dtype: Any) -> Any:
    """The dtype that sums and bases use for values of `dtype`: itself, or float32 where it is narrower."""
    return _promote(dtype, jnp.float32)


def _promote(*dtypes: Any) -> Any:
    # The promotions of this module are meant, also where the user has forbidden those that are not.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def evaluate_schedule(number: Number, count: jax.Array, dtype: Any) -> jax.Array:
    """The number, or the schedule's value at step `count`."""
    return jnp.asarray(number(count) if callable(number) else number).astype(dtype)


def dot(x: Vector, y: Vector) -> jax.Array:
    """⟨x, y⟩, as a sum of products, which explicit sharding allows where `vdot` fails."""
    dtype = scalar_dtype((x, y))
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(dtype) * b.astype(dtype)), x, y)
    return sum(jax.tree.leaves(products), jnp.zeros((), dtype))


def peak(x: Vector) -> jax.Array:
    """‖x‖∞, which neither underflows nor overflows."""
    dtype = scalar_dtype(x)
    peaks = [jnp.max(jnp.abs(leaf), initial=0).astype(dtype) for leaf in jax.tree.leaves(x)]
    return functools.reduce(jnp.maximum, peaks, jnp.zeros((), dtype))


def norm(x: Vector) -> jax.Array:
    """‖x‖₂, by the squares of x/‖x‖∞: right for entries of 1e-30 and 1e30 in float32 too."""
    largest = peak(x)
    usable, unit, factor = _scaling(largest)
    scaled = scale(factor, x)
    return jnp.where(usable, largest / unit * jnp.sqrt(dot(scaled, scaled)), largest)


def _scaling(largest: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether a vector with this ‖x‖∞ can be scaled, the ‖·‖∞ that it then has, and the factor."""
    usable = jnp.isfinite(largest) & (largest > 0)
    # The reciprocal of the largest numbers is subnormal, and flushed to 0.
    unit = jnp.where(largest > 1, 16, 1).astype(largest.dtype)
    return usable, unit, unit / jnp.where(usable, largest, 1)


def lengths_and_cosines(*vectors: Vector) -> tuple[jax.Array, jax.Array]:
    """‖xᵢ‖₂ of several vectors, as by `norm`, and the matrix of ⟨xᵢ, xⱼ⟩/(‖xᵢ‖‖xⱼ‖), 0 where a vector is 0.

    Two kernels for all of them: one by one, each inner product would be compiled on its own.

    >>> lengths, cosines = lengths_and_cosines(jnp.array([3.0, 4.0]), jnp.array([0.0, 1e-30]))
    >>> float(lengths[0]), round(float(cosines[0, 1]), 3)
    (5.0, 0.8)
    """
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *vectors)
    dtype = scalar_dtype(stacked)
    peaks = [jnp.max(jnp.abs(a), tuple(range(1, a.ndim)), initial=0) for a in jax.tree.leaves(stacked)]
    largest = functools.reduce(jnp.maximum, (found.astype(dtype) for found in peaks))
    usable, unit, factor = _scaling(largest)
    scaled = jax.tree.map(lambda a: factor.astype(a.dtype).reshape(-1, *[1] * (a.ndim - 1)) * a, stacked)
    gram = project(scaled, scaled)
    roots = jnp.sqrt(jnp.diagonal(gram))
    inverse = jnp.where(usable, reciprocal(roots), 0)
    return jnp.where(usable, largest / unit * roots, largest), inverse[:, None] * gram * inverse


def cosine(x: Vector, y: Vector) -> jax.Array:
    """⟨x, y⟩/(‖x‖‖y‖), 0 where a vector is 0.

    >>> round(float(cosine(jnp.array([3.0, 4.0]), jnp.array([0.0, 1e-30]))), 3)
    0.8
    """
    return dot(normalise(x), normalise(y))


def reciprocal(x: jax.Array) -> jax.Array:
    """1/x, and 0 for x = 0, so that normalising a zero vector gives zero."""
    zero = x == 0
    return jnp.where(zero, 0, 1 / jnp.where(zero, 1, x))


def normalise(x: Vector) -> Vector:
    """x/‖x‖₂, and 0 where x is 0."""
    return scale(reciprocal(norm(x)), x)


def scale(alpha: Scalar, x: Vector) -> Vector:
    """α x in the dtypes of x."""
    return jax.tree.map(lambda a: jnp.asarray(alpha).astype(a.dtype) * a, x)


def axpy(alpha: Scalar, x: Vector, y: Vector) -> Vector:
    """α x + y in the dtypes of y."""
    return jax.tree.map(lambda a, b: jnp.asarray(alpha).astype(b.dtype) * a.astype(b.dtype) + b, x, y)


def sub(x: Vector, y: Vector) -> Vector:
    """x − y."""
    return optax.tree.sub(x, y)


def zeros_like(x: Tree) -> Tree:
    """0 in the shapes and dtypes of x."""
    return optax.tree.zeros_like(x)


def where(condition: jax.Array, x: Tree, y: Tree) -> Tree:
    """x where the scalar `condition` holds, otherwise y; what is not chosen may be NaN."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


def when(condition: jax.Array, compute: Callable[[Tree], Tree], otherwise: Tree) -> Tree:
    """compute(otherwise) where `condition` holds, else `otherwise`; not evaluated where no condition of a `vmap` holds.

    `lax.cond` alone would copy its operands in each call, and under `vmap` evaluate both branches. A loop of at most
    one iteration does neither; `cond` inside of it keeps XLA from moving loop-invariant work out of the loop.
    """

    def body(carry: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
        old, _ = carry
        return jax.lax.cond(condition, lambda: compute(old), lambda: old), jnp.array(False)

    return jax.lax.while_loop(lambda carry: carry[1], body, (otherwise, condition))[0]


def all_finite(x: Tree) -> jax.Array:
    """Whether no entry of x is infinite or NaN."""
    # The sum of magnitudes is one fast reduction; in float32 those of narrower dtypes cannot overflow.
    sums = [jnp.sum(jnp.abs(a.astype(_working_dtype(a.dtype)))) for a in jax.tree.leaves(x)]
    return functools.reduce(jnp.logical_and, map(jnp.isfinite, sums), jnp.array(True))


def random_normal(key: jax.Array, like: Vector) -> Vector:
    """Independent standard normal entries in the shapes and dtypes of `like`."""
    return optax.tree.random_like(key, like, sampler=jax.random.normal)


def size(x: Vector) -> int:
    """The number of entries of x."""
    return sum(math.prod(a.shape) for a in jax.tree.leaves(x))


def stack(x: Vector, length: int) -> Vector:
    """`length` zero vectors like x, along a new leading axis."""
    # A broadcast keeps the sharding of x, which a new array would not.
    return jax.tree.map(lambda a: jnp.broadcast_to(jnp.zeros_like(a), (length, *a.shape)), x)


def length(vectors: Vector) -> int:
    """The number of vectors of a stack."""
    return jax.tree.leaves(vectors)[0].shape[0]


def get(vectors: Vector, index: jax.Array | int) -> Vector:
    """One vector of a stack."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), vectors)


def put(vectors: Vector, x: Vector, index: jax.Array | int) -> Vector:
    """The stack with x in the place of one of its vectors."""
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, index, 0), vectors, x)


def project(basis: Vector, x: Vector) -> jax.Array:
    """Qᵀx: the coordinates of x in a stacked basis, or of each vector of a stack, in columns."""
    dtype = scalar_dtype(x)

    def coordinates(Q: jax.Array, a: jax.Array) -> jax.Array:
        axes = tuple(range(1, Q.ndim))
        contracted = ((axes, tuple(axis + a.ndim - Q.ndim for axis in axes)), ((), ()))
        return jax.lax.dot_general(
            Q, a, contracted, precision="highest", preferred_element_type=dtype, out_sharding=_replication(a)
        )

    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(coordinates, basis, x)))


def combine(basis: Vector, coordinates: jax.Array) -> Vector:
    """Q y: the vector with coordinates y in a stacked basis, or a stack of them from the rows of y."""
    return jax.tree.map(lambda Q: jnp.tensordot(coordinates.astype(Q.dtype), Q, axes=1, precision="highest"), basis)


def ravel(x: Vector) -> tuple[jax.Array, Callable[[jax.Array], Vector]]:
    """x as one array, replicated where x is sharded, and the way back to x's shapes, dtypes and shardings."""
    leaves, treedef = jax.tree.flatten(x)
    dtype = scalar_dtype(x)
    pieces = [_replicated(leaf).reshape(-1).astype(dtype) for leaf in leaves]
    vector = jnp.concatenate(pieces) if pieces else jnp.zeros(0, dtype)

    def unravel(vector: jax.Array) -> Vector:
        restored, start = [], 0
        for leaf in leaves:
            piece = vector[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype)
            sharding = jax.typeof(leaf).sharding
            restored.append(piece if sharding.mesh.empty else jax.sharding.reshard(piece, sharding))
            start += leaf.size
        return jax.tree.unflatten(treedef, restored)

    return vector, unravel


def _replication(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """On x's mesh the sharding that holds all of an array on each device; None where x has no mesh."""
    mesh = jax.typeof(x).sharding.mesh
    return None if mesh.empty else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _replicated(x: jax.Array) -> jax.Array:
    sharding = _replication(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def select(like: Tree, x: Tree) -> Tree:
    """x without the leaves that are None in `like`."""
    return jax.tree.map(lambda a, b: None if a is None else b, like, x, is_leaf=lambda a: a is None)


def fill(x: Tree, full: Tree) -> Tree:
    """x with its None leaves taken from `full`."""
    return jax.tree.map(lambda a, b: b if a is None else a, x, full, is_leaf=lambda a: a is None)
