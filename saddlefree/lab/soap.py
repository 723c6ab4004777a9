"""SOAP (Vyas et al. 2024): Adam in the eigenbases of Shampoo's matrices.

For a matrix of parameters with gradient G, moments M and V, and the bases Q_L and Q_R (a tensor has one for each axis):

    M ← β₁M + (1 − β₁)G,      V ← β₂V + (1 − β₂)(Q_LᵀG Q_R)²,
    update = −η Q_L [Q_LᵀM Q_R / (√V + ε)] Q_Rᵀ,      both moments with Adam's correction of their bias,
    L ← β₂L + (1 − β₂)GGᵀ,      R ← β₂R + (1 − β₂)GᵀG.

Every f steps a basis is refreshed by one power iteration, Q ← QR(L Q), its columns in the order of their eigenvalues.
The first step makes the bases of the first gradient's matrices, and no update, as the authors do. Vectors, and axes
that are longer than `max_size` or of length 1, have no basis: for vectors this is Adam.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class Axis(NamedTuple):
    """Of a leaf with a basis for it."""

    matrix: jax.Array  # L or R
    basis: jax.Array  # Q, eigenvectors in its columns


class SoapState(NamedTuple):
    """Lists with an entry for each leaf; `axes` has an `Axis` or None for each axis of it."""

    steps: jax.Array  # so far
    first: list[jax.Array]  # M
    second: list[jax.Array]  # V
    axes: list[tuple[Axis | None, ...]]


def soap(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    refresh_every: int = 10,
    max_size: int = 10_000,
) -> optax.GradientTransformation:
    """The optimiser; `refresh_every` is f."""
    return optax.chain(
        _scale_by_soap(b1, b2, eps, refresh_every, max_size), optax.scale_by_learning_rate(learning_rate)
    )


def _scale_by_soap(b1: float, b2: float, eps: float, refresh_every: int, max_size: int) -> optax.GradientTransformation:
    def init(params: Tree) -> SoapState:
        leaves = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(params)]
        axes = [tuple(_start(x, size, max_size) for size in x.shape) for x in leaves]
        return SoapState(jnp.zeros((), jnp.int32), leaves, [jnp.zeros_like(x) for x in leaves], axes)

    def update(updates: Tree, state: SoapState, params: Tree = None) -> tuple[Tree, SoapState]:
        gradients, treedef = jax.tree.flatten(updates)
        count = state.steps  # 0 in the step that only makes the bases
        began = count > 0
        unbias1, unbias2 = (1 / (1 - beta ** jnp.maximum(count, 1)) for beta in (b1, b2))
        rows = []
        for g, first, second, axes in zip(gradients, state.first, state.second, state.axes, strict=True):
            wide = g.astype(first.dtype)
            first = jnp.where(began, b1 * first + (1 - b1) * wide, first)
            second = jnp.where(began, b2 * second + (1 - b2) * _rotated(wide, axes) ** 2, second)
            scaled = _rotated(unbias1 * first, axes) / (jnp.sqrt(unbias2 * second) + eps)
            step = jnp.where(began, _rotated(scaled, axes, back=True), 0).astype(g.dtype)
            axes = tuple(a and a._replace(matrix=b2 * a.matrix + (1 - b2) * _gram(wide, k)) for k, a in enumerate(axes))
            rows.append((step, first, second, axes))
        steps, firsts, seconds, all_axes = (list(column) for column in zip(*rows, strict=True)) if rows else ([],) * 4
        branch = jnp.where(began, jnp.where(count % refresh_every == 0, 1, 2), 0)
        seconds, all_axes = jax.lax.switch(branch, (_begun, _refreshed, lambda *kept: kept), seconds, all_axes)
        return jax.tree.unflatten(treedef, steps), SoapState(optax.safe_increment(count), firsts, seconds, all_axes)

    return optax.GradientTransformation(init, update)


def _start(x: jax.Array, size: int, max_size: int) -> Axis | None:
    if x.ndim < 2 or not 1 < size <= max_size:
        return None
    return Axis(jnp.zeros((size, size), x.dtype), jnp.eye(size, dtype=x.dtype))


def _gram(g: jax.Array, axis: int) -> jax.Array:
    """G Gᵀ for the axis: products of g with itself along all others."""
    others = [k for k in range(g.ndim) if k != axis]
    return jnp.tensordot(g, g, axes=(others, others), precision="highest")


def _rotated(x: jax.Array, axes: tuple[Axis | None, ...], back: bool = False) -> jax.Array:
    """x in the bases of its axes, or back from them."""
    for k, axis in enumerate(axes):
        if axis is not None:
            product = jnp.tensordot(x, axis.basis, axes=(k, 1 if back else 0), precision="highest")
            x = jnp.moveaxis(product, -1, k)
    return x


def _begun(seconds: list, all_axes: list) -> tuple[list, list]:
    """Eigenvectors, the largest eigenvalue first."""

    def begin(axis: Axis | None) -> Axis | None:
        return axis and axis._replace(basis=jnp.linalg.eigh(axis.matrix)[1][:, ::-1])

    return seconds, [tuple(map(begin, axes)) for axes in all_axes]


def _refreshed(seconds: list, all_axes: list) -> tuple[list, list]:
    """One power iteration; V follows the order of the columns."""
    new_seconds, new_axes = [], []
    for second, axes in zip(seconds, all_axes, strict=True):
        rotated = []
        for k, axis in enumerate(axes):
            if axis is not None:
                moved = jnp.matmul(axis.matrix, axis.basis, precision="highest")
                order = jnp.argsort(-jnp.sum(axis.basis * moved, axis=0))
                second = jnp.take(second, order, axis=k)
                axis = axis._replace(basis=jnp.linalg.qr(moved[:, order])[0])
            rotated.append(axis)
        new_seconds.append(second)
        new_axes.append(tuple(rotated))
    return new_seconds, new_axes
