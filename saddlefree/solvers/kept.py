"""Ritz pairs that are kept: where batches differ, products with one batch's H are made now and then.

Symbols: U the Ritz vectors that `recycling` keeps, θ their values, m the averaged gradient. Between products

    d(λ) = U (|θ| + λ)⁻¹ Uᵀm,    u = bulk(g − UUᵀg),    s = −d + u − UUᵀu,

as in `low_rank`. The bulk, what U does not span, moves as Adam does, at a rate that the next batch judges
(`next_batch_rate`). It costs four passes over U, and nothing of the loss.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.custom_derivatives import SymbolicZero

from saddlefree import space
from saddlefree.model import Answer, Model, Result, Spectral
from saddlefree.rates import NextBatchRateState, next_batch_rate
from saddlefree.solvers import bases, recycling
from saddlefree.solvers.low_rank import Average
from saddlefree.solvers.recycling import Recycled
from saddlefree.space import Space, Vector

AVERAGING = 0.9
"""β of the averaged gradient."""
USED = 20
"""The most pairs that are used; further ones are kept for products to come."""
LEAST, NUMBERS = 10, 16_000_000
"""So many pairs are kept for any number of parameters, and beyond them as many as hold so many numbers."""
BULK = next_batch_rate(optax.adam(1.0))
"""What moves the rest; it sees vectors as they are laid out, one array where they are packed."""


class Kept(NamedTuple):
    """When products were made, and what is used in between."""

    age: jax.Array  # steps since then
    interval: jax.Array  # steps from then to the next time
    average: Average  # of gradients
    along: Average  # of Uᵀg; without a pass over U it is what U says of the average
    bulk: NextBatchRateState
    basis: Vector  # of the last Krylov space, a buffer that is written and not read
    pairs: Recycled  # those of largest |θ|, apart, because a slice would be copied in each step


def capacity(layout: Space, recycle: int) -> int:
    """How many of `recycle` pairs are kept: vectors of many parameters take memory, and time to read."""
    return min(recycle, max(LEAST, NUMBERS // max(layout.size, 1)))


def empty(layout: Space, size: int, recycle: int) -> Kept:
    """Before the first step; a Krylov space has `size` vectors, and at most `recycle` pairs are kept."""
    used, zeros = min(capacity(layout, recycle), USED), lambda *shape: jnp.zeros(shape, layout.dtype)
    return Kept(
        jnp.ones((), jnp.int32),
        jnp.ones((), jnp.int32),
        Average(layout.zeros(), zeros()),
        Average(zeros(used), zeros()),
        BULK.init(layout.zeros()),
        space.stack(layout.zeros(), size),
        recycling.empty(layout, used),
    )


class Moved(NamedTuple):
    """What the bulk does."""

    update: Vector  # u
    inside: jax.Array  # Uᵀu, which is taken out of it
    rate: jax.Array  # α


def moved(
    noisy: jax.Array,
    layout: Space,
    basis: Vector,
    slope: jax.Array,
    g: Vector,
    value: jax.Array,
    old: NextBatchRateState,
) -> tuple[Moved, NextBatchRateState]:
    """The bulk's update of g − UUᵀg, and its state; where batches agree 0, and a state that begins anew."""

    def move() -> tuple[Moved, NextBatchRateState]:
        update, new = BULK.update(bases.outside(basis, slope, g, layout), old, value=value)
        return Moved(update, space.project(basis, update), new.learning_rate), new

    def rest() -> tuple[Moved, NextBatchRateState]:
        nothing = space.zeros_like(g)
        return Moved(nothing, jnp.zeros_like(slope), jnp.zeros_like(old.learning_rate)), BULK.init(nothing)

    return jax.lax.cond(noisy, move, rest)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """H_k of the kept pairs, and the bulk's update for what they do not span.

    Attributes:
      pairs: U and θ.
      coordinates: Uᵀm.
      slope: Uᵀg, of this batch alone.
      gradient: g.
      bulk: what moves the rest.
    """

    pairs: Recycled
    coordinates: jax.Array
    slope: jax.Array
    gradient: Vector
    bulk: Moved

    @property
    def stats(self) -> dict[str, jax.Array]:
        """As those of `lanczos`, but for its products, and of g only what the pairs span."""
        values = self.pairs.values
        square = space.reciprocal(jnp.sum(self.coordinates**2))
        return {
            "smallest_ritz": jnp.min(values),
            "largest_ritz": jnp.max(values),
            "negative_share": jnp.sum(jnp.where(values < 0, self.coordinates**2, 0)) * square,
            "bulk_rate": self.bulk.rate,
        }

    def answer(self, damping: jax.Array) -> Answer:
        """d(λ) − u + UUᵀu, by one product with the basis; there is no estimate of its error, which is given as 0."""
        values, (update, inside, _) = self.pairs.values, self.bulk
        d = space.reciprocal(jnp.abs(values) + damping) * self.coordinates
        direction = space.sub(_combined(d + inside, self.pairs.basis), update)
        predicted = jnp.sum(values * d**2) / 2 - jnp.sum(self.slope * (d + inside)) + space.dot(self.gradient, update)
        result = jnp.where(jnp.isfinite(predicted), Result.FINE, Result.NONFINITE)
        return Answer(direction, predicted, result.astype(jnp.int32), {"error": jnp.zeros_like(damping)})


@jax.custom_jvp
def _combined(coordinates: jax.Array, basis: Vector) -> Vector:
    """U y, whose derivative in y comes along in the same pass over U."""
    return space.combine(basis, coordinates)


@functools.partial(_combined.defjvp, symbolic_zeros=True)
def _combined_jvp(primals: tuple[jax.Array, Vector], tangents: tuple[Any, Any]) -> tuple[Vector, Vector]:
    (coordinates, basis), (change, moving) = primals, tangents
    fixed = all(type(leaf) is SymbolicZero for leaf in jax.tree.leaves(moving))
    change, moving = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype) if type(t) is SymbolicZero else t, tangents)
    both = space.combine(basis, jnp.stack([coordinates, change]))
    tangent = space.get(both, 1)
    return space.get(both, 0), tangent if fixed else space.axpy(1, space.combine(moving, coordinates), tangent)


@dataclasses.dataclass(frozen=True)
class Either:
    """The model of new products, or where batches differ the one of the kept pairs.

    Attributes:
      fresh: the first.
      kept: the second.
      noisy: whether batches differ.
    """

    fresh: Spectral
    kept: Pairs
    noisy: jax.Array

    @property
    def stats(self) -> dict[str, jax.Array]:
        """Those of the model that is used."""
        kept = self.kept.stats
        return {name: jnp.where(self.noisy, kept.get(name, x), x) for name, x in self.fresh.stats.items()}

    def answer(self, damping: jax.Array) -> Answer:
        """That of the model that is used."""
        return jax.lax.cond(self.noisy, lambda: self.kept.answer(damping), lambda: self.fresh.answer(damping))


def sides(model: Model) -> tuple[Model, Model]:
    """What a model is where batches agree, and where they differ: for a rule that has a branch for each."""
    return (model.fresh, model.kept) if isinstance(model, Either) else (model, model)
