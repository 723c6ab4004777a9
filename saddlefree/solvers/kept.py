"""Ritz pairs that are kept: where batches differ, products with one batch's H are made now and then.

Symbols: U the Ritz vectors that `recycling` keeps, θ their values, m the averaged gradient. Between products

    d(λ) = (|H_k| + λI)⁻¹ m = m/λ + U (1/(|θ| + λ) − 1/λ) Uᵀm,    H_k = U diag(θ) Uᵀ,

as in `low_rank`. It costs three passes over U, and nothing of the loss.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import space
from saddlefree.model import Answer, Result, Spectral
from saddlefree.solvers.low_rank import Average
from saddlefree.solvers.recycling import Recycled
from saddlefree.space import Space, Vector

AVERAGING = 0.9
"""β of the averaged gradient."""


class Kept(NamedTuple):
    """When products were made, and what is used in between."""

    age: jax.Array  # steps since then
    interval: jax.Array  # steps from then to the next time
    average: Average
    basis: Vector  # of the last Krylov space, a buffer that is written and not read


def empty(layout: Space, size: int) -> Kept:
    """Before the first step; a Krylov space has `size` vectors."""
    average = Average(layout.zeros(), jnp.zeros((), layout.dtype))
    # Two arrays, because a state may be donated.
    return Kept(jnp.ones((), jnp.int32), jnp.ones((), jnp.int32), average, space.stack(layout.zeros(), size))


@dataclasses.dataclass(frozen=True)
class Pairs:
    """H_k of the kept pairs, and λ alone for what they do not span; λ > 0.

    Attributes:
      pairs: U and θ.
      coordinates: Uᵀm.
      average: m.
      gradient: g, of this batch alone.
    """

    pairs: Recycled
    coordinates: jax.Array
    average: Vector
    gradient: Vector

    @property
    def stats(self) -> dict[str, jax.Array]:
        """As those of `lanczos`, but for its products."""
        values = self.pairs.values
        square = space.reciprocal(space.dot(self.average, self.average))
        return {
            "smallest_ritz": jnp.min(values),
            "largest_ritz": jnp.max(values),
            "negative_share": jnp.sum(jnp.where(values < 0, self.coordinates**2, 0)) * square,
        }

    def answer(self, damping: jax.Array) -> Answer:
        """d(λ), by one product with the basis."""
        values, coordinates = self.pairs.values, self.coordinates
        rest = space.reciprocal(damping)
        weights = space.reciprocal(jnp.abs(values) + damping)
        direction = space.axpy(rest, self.average, space.combine(self.pairs.basis, (weights - rest) * coordinates))
        predicted = jnp.sum(values * (weights * coordinates) ** 2) / 2 - space.dot(self.gradient, direction)
        result = jnp.where(jnp.isfinite(predicted), Result.FINE, Result.NONFINITE)
        return Answer(direction, predicted, result.astype(jnp.int32), {})


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
        """That of the model that is used; the kept pairs have no estimate of an error, and say 0."""

        def kept() -> Answer:
            return self.kept.answer(damping)._replace(stats={"error": jnp.zeros_like(damping)})

        return jax.lax.cond(self.noisy, kept, lambda: self.fresh.answer(damping))
