"""Least squares: residuals r(x) whose half squared norm is the loss, f = ½‖r‖², and their Jacobian J = ∂r/∂x (N×P).

A row of J is a reverse pass, a column a forward pass, each over all residuals. Where a residual depends on one point of
the data alone, as in regression and at the collocation points of a differential equation, `pointwise` says so: all rows
together then cost about as much as one gradient of the loss.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from saddlefree import space
from saddlefree.convolutions import laid_out
from saddlefree.curvature import microbatches
from saddlefree.space import Space, Tree

ResidualFn = Callable[[Tree], Any]
"""A function of the parameters that returns residuals, an array or a pytree of them."""


class pointwise:
    """Residuals that each depend on one point, as a `residual_fn`: r(x) = [fn(x, z₁); fn(x, z₂); …], term by term.

    Args:
      terms: pairs (fn, points). `fn(params, point)` returns the residuals of one point, an array or a pytree of them,
        with their weights; a mean of n squares has the weight (2/n)^½. `points` is a pytree whose leaves share their
        leading axis.

    >>> line = pointwise((lambda x, z: x[0] + x[1] * z["t"] - z["y"], {"t": jnp.arange(3.0), "y": jnp.ones(3)}))
    >>> line(jnp.array([1.0, 2.0]))
    (Array([0., 2., 4.], dtype=float32),)
    """

    def __init__(self, *terms: tuple[Callable[[Tree, Tree], Any], Tree]):
        for term in terms:
            if not (isinstance(term, tuple) and len(term) == 2 and callable(term[0])):
                raise ValueError(f"terms must be pairs (fn, points), as in pointwise((fn, points), …), got {term!r}")
            microbatches(term[1], 1)
        self.terms = terms

    def __call__(self, params: Tree) -> tuple[Any, ...]:
        """The residuals of all points, one entry for each term."""
        return tuple(jax.vmap(fn, (None, 0))(params, points) for fn, points in self.terms)


def of_part(residual_fn: ResidualFn, params: Tree) -> ResidualFn:
    """`residual_fn` as a function of some parameters, those that are None taken from `params`."""
    if isinstance(residual_fn, pointwise):
        terms = [(lambda x, z, fn=fn: fn(space.fill(x, params), z), points) for fn, points in residual_fn.terms]
        return pointwise(*terms)
    return lambda x: checked(residual_fn(space.fill(x, params)))


def half_square(residual_fn: ResidualFn) -> Callable[[Tree], jax.Array]:
    """The loss ½‖r‖² of residuals.

    >>> float(half_square(lambda x: {"a": x, "b": 2 * x})(jnp.array([1.0, 1.0])))
    5.0
    """

    def value_fn(params: Tree) -> jax.Array:
        r = checked(residual_fn(params))
        return space.dot(r, r) / 2

    return value_fn


def checked(r: Any) -> Any:
    """Residuals as they were returned, refused unless they are real arrays."""
    for leaf in jax.tree.leaves(r):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"residual_fn must return an array or a pytree of real arrays, got {leaf!r} in it; "
                "pass complex residuals as their real and imaginary parts"
            )
    return r


def count(residual_fn: ResidualFn, x: Tree) -> int:
    """N, the number of residuals."""
    return space.size(jax.eval_shape(residual_fn, x))


def jacobian(residual_fn: ResidualFn, layout: Space, chunk: int, by_rows: bool) -> tuple[jax.Array, jax.Array]:
    """r and J, `chunk` rows or columns at a time; those of `pointwise` come by rows."""
    if isinstance(residual_fn, pointwise):
        return _joined([jax.lax.map(_at_point(fn, layout), z, batch_size=chunk) for fn, z in residual_fn.terms])
    flat, x = _flat(residual_fn, layout), layout.like
    if by_rows:
        r, pull = jax.vjp(flat, x)
        return r, _for_each(r.size, lambda e: _ravel(layout, pull(e)[0]), layout, chunk)
    r, push = jax.linearize(flat, x)
    _, restore = space.ravel(layout.zeros())
    return r, _for_each(layout.size, lambda e: push(layout.unpack(restore(e))), layout, chunk).T


def normal_equations(residual_fn: ResidualFn, layout: Space, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """r, JᵀJ and Jᵀr. For `pointwise` J is never whole in memory."""
    if not isinstance(residual_fn, pointwise):
        r, J = jacobian(residual_fn, layout, chunk, by_rows=False)
        return r, gram(J.T), jnp.matmul(r, J, precision="highest")
    size, dtype = layout.size, layout.dtype
    total, slope, residuals = jnp.zeros((size, size), dtype), jnp.zeros(size, dtype), []
    for fn, points in residual_fn.terms:
        rows = jax.vmap(_at_point(fn, layout))

        def add(sums: tuple[jax.Array, jax.Array], some: Tree, rows: Any = rows) -> tuple[Any, jax.Array]:
            r, J = _joined([rows(some)])
            return (sums[0] + gram(J.T), sums[1] + jnp.matmul(r, J, precision="highest")), r

        full, rest, _ = microbatches(points, min(chunk, space.length(points)))
        (total, slope), found = jax.lax.scan(add, (total, slope), full)
        residuals.append(found.reshape(-1))
        if rest is not None:
            (total, slope), found = add((total, slope), rest)
            residuals.append(found)
    return jnp.concatenate(residuals), total, slope


def gram(A: jax.Array) -> jax.Array:
    """AAᵀ."""
    return jnp.matmul(A, A.T, precision="highest")


def _at_point(fn: Callable[[Tree, Tree], Any], layout: Space) -> Callable[[Tree], tuple[jax.Array, jax.Array]]:
    """The residuals of one point and their rows of J."""

    def rows(point: Tree) -> tuple[jax.Array, jax.Array]:
        r, pull = jax.vjp(_flat(lambda x: fn(x, point), layout), layout.like)
        return r, jax.vmap(lambda e: _ravel(layout, pull(e)[0]))(jnp.eye(r.size, dtype=r.dtype))

    return laid_out(rows)


def _joined(parts: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Stacked residuals and rows of several terms, one after the other."""
    r, J = zip(*((r.reshape(-1), J.reshape(-1, J.shape[-1])) for r, J in parts), strict=True)
    return jnp.concatenate(r), jnp.concatenate(J)


def _for_each(size: int, evaluate: Callable[[jax.Array], jax.Array], layout: Space, chunk: int) -> jax.Array:
    """`evaluate` of each unit vector, stacked."""
    index = jnp.arange(size, dtype=jnp.int32)
    evaluate = laid_out(evaluate)
    return jax.lax.map(lambda i: evaluate((index == i).astype(layout.dtype)), index, batch_size=chunk)


def _flat(residual_fn: ResidualFn, layout: Space) -> Callable[[Tree], jax.Array]:
    """The residuals as one array in working precision."""
    return lambda x: space.ravel(checked(residual_fn(x)))[0].astype(layout.dtype)


def _ravel(layout: Space, x: Tree) -> jax.Array:
    """A tree like the parameters as one array."""
    return space.ravel(layout.pack(x))[0].astype(layout.dtype)
