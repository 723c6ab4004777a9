"""Models: the quadratic picture of the loss at one point, asked for its step at a damping λ.

A solver builds a model m(s) = gᵀs + ½ sᵀHs with its own approximation of H. For a λ the model answers with the
direction d(λ) ≈ (|H| + λI)⁻¹ g, with the change m(−d) that it predicts, and with a result code. Before it is built, the
rule states which λ it may ask for (one, or a list); a model of kind `ANY` answers every λ without a new product, one of
kind `STATED` those that were stated, one of kind `ONE` the only one, one of kind `ZERO` λ = 0.

λ = 0 means the pseudo-inverse. Eigenvalues with |θ| + λ below `cutoff` are rounding: where λ = 0 they contribute
nothing, where λ > 0 as much as if they were at the cutoff. The code `SINGULAR` says that g has such a component.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from saddlefree import space
from saddlefree.space import Vector

Form = Literal["abs", "sqrt"]
"""1/(|θ| + λ), or (θ² + λ²)^{−½}, which is smooth at θ = 0 and lies between it and √2 times it."""


class Answers(enum.IntEnum):
    """For how many λ a model has an answer.

    >>> import saddlefree as sf
    >>> [solver.answers.name for solver in (sf.lanczos(), sf.series(5), sf.lanczos(two_pass=True), sf.quasi_newton())]
    ['ANY', 'STATED', 'ONE', 'ZERO']
    """

    ZERO = 0  # λ = 0 only
    ONE = 1
    STATED = 2
    ANY = 3


class Result(enum.IntEnum):
    """How an answer came about, the worst last.

    >>> import saddlefree as sf
    >>> h = jnp.array([2.0, 0.0])  # the gradient has a component where there is no curvature
    >>> Result(int(sf.solve(sf.exact(), lambda v: h * v, jnp.ones(2), damping=0.0).result)).name
    'SINGULAR'
    """

    FINE = 0
    SINGULAR = 1  # g has a component along an eigenvalue of 0, up to rounding, that λ does not lift
    BREAKDOWN = 2  # the solver's own error estimate says that the direction is not right to one digit
    NONFINITE = 3


class Rest(NamedTuple):
    """What a base does where the model says nothing."""

    update: Vector
    largest: jax.Array  # the largest entry of the update that the base alone would make of all of g


class Answer(NamedTuple):
    """The model's step at one λ: s = −η d + rest."""

    direction: Vector  # d(λ)
    predicted: jax.Array  # m(−d), by the model's own curvature
    result: jax.Array  # a `Result`
    stats: dict[str, jax.Array]  # that depend on λ, such as the estimated error
    rest: Rest | None = None

    @property
    def whole(self) -> Vector:
        """The direction whose negative is the step at η = 1: d − rest."""
        return self.direction if self.rest is None else space.sub(self.direction, self.rest.update)


class Model(Protocol):
    """What a solver makes and a rule asks."""

    @property
    def stats(self) -> dict[str, jax.Array]:
        """Scalars that do not depend on λ, `products` among them."""

    def answer(self, damping: jax.Array) -> Answer:
        """The direction for λ."""


def cutoff(values: jax.Array) -> jax.Array:
    """The magnitude below which an eigenvalue is rounding: max(32, n) ε max |θ|."""
    return max(32, values.size) * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values), initial=0)


def inverse(values: jax.Array, damping: jax.Array, form: Form = "abs", lowest: jax.Array | None = None) -> jax.Array:
    """f(θ) = 1/(|θ| + λ), or its other form, with the cutoff of this module.

    Args:
      values: θ.
      damping: λ ≥ 0.
      form: see `Form`.
      lowest: another cutoff.

    >>> inverse(jnp.array([2.0, -0.5, 1e-9]), jnp.array(0.0))
    Array([0.5, 2. , 0. ], dtype=float32)
    """
    lowest = cutoff(values) if lowest is None else lowest
    size = jnp.abs(values) + damping if form == "abs" else jnp.hypot(values, damping)
    return jnp.where((size <= lowest) & (damping == 0), 0, space.reciprocal(jnp.maximum(size, lowest)))


def result_code(size: jax.Array, lowest: jax.Array, slope: jax.Array, finite: jax.Array) -> jax.Array:
    """SINGULAR where g has a component (`slope`) along eigenvectors with |θ| + λ (`size`) at or below the cutoff."""
    lost = jnp.max(jnp.where(size <= lowest, jnp.abs(slope), 0), initial=0)
    visible = 32 * jnp.finfo(slope.dtype).eps * jnp.max(jnp.abs(slope), initial=0)
    code = jnp.where(lost > visible, Result.SINGULAR, Result.FINE)
    return jnp.where(finite, code, Result.NONFINITE).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Spectral:
    """H in an orthonormal basis B of a subspace, or of all: BᵀHB = S diag(θ) Sᵀ; outside of it nothing is known.

        d(λ) = B S f(θ) SᵀBᵀg.

    Attributes:
      basis: B, stacked, or None where B = I.
      values: θ.
      vectors: S.
      slope: SᵀBᵀg.
      stats: see `Model`.
      form: see `Form`.
      absolute: False keeps the signs of θ: plain Newton.
      measured: how many of the rows of S come from the Krylov space of g, for an estimate of the error; 0 makes none.
      error_count: the number of Krylov vectors that were made, and 0 once the space was exhausted.
      restore: from a flat array to a vector, where B = I.
    """

    basis: Vector | None
    values: jax.Array
    vectors: jax.Array
    slope: jax.Array
    stats: dict[str, jax.Array]
    form: Form = "abs"
    absolute: bool = True
    measured: int = 0
    error_count: jax.Array | int = 0
    restore: Callable[[jax.Array], Vector] | None = None

    def answer(self, damping: jax.Array) -> Answer:
        """d(λ), by one product with the basis."""
        if self.absolute:
            weights = inverse(self.values, damping, self.form)
        else:
            shifted = self.values + damping
            weights = jnp.where(jnp.abs(shifted) > cutoff(self.values), space.reciprocal(shifted), 0)
        coordinates = self.vectors @ (weights * self.slope)
        direction = space.combine(self.basis, coordinates) if self.restore is None else self.restore(coordinates)
        predicted = jnp.sum((self.values * weights / 2 - 1) * weights * self.slope**2)
        finite = jnp.all(jnp.isfinite(coordinates))
        stats = {}
        if self.measured:
            stats["error"] = last_share(coordinates[: self.measured], self.error_count)
        # |θ| + λ, or |θ + λ| for plain Newton, is what must not vanish.
        size = jnp.abs(self.values) + damping if self.absolute else jnp.abs(self.values + damping)
        return Answer(direction, predicted, result_code(size, cutoff(self.values), self.slope, finite), stats)


def last_share(coordinates: jax.Array, count: jax.Array | int) -> jax.Array:
    """The norm of the last of `count` coordinates over that of all: an estimate of the relative error.

    Up to four of them, since a single one may vanish by chance, but no more than half; 0 for count = 0.
    """
    index = jnp.arange(coordinates.size, dtype=jnp.int32)
    count = jnp.asarray(count, jnp.int32)
    window = jnp.clip(count // 2, 1, 4)
    last = jnp.where((index >= count - window) & (index < count), coordinates, 0)
    return jnp.linalg.norm(last) * space.reciprocal(jnp.linalg.norm(coordinates))


@dataclasses.dataclass(frozen=True)
class Tabulated:
    """Directions that were made for the stated λ, one each.

    Attributes:
      dampings: the stated λ.
      directions: the directions, one for each.
      gradient: g.
      errors: the estimated relative errors.
      singular: whether g has a component that λ does not lift, where the solver can tell.
      stats: see `Model`.
    """

    dampings: jax.Array
    directions: list[Vector]
    gradient: Vector
    errors: jax.Array
    stats: dict[str, jax.Array]
    singular: jax.Array | bool = False

    def answer(self, damping: jax.Array) -> Answer:
        """The direction of the stated λ that is nearest."""
        if len(self.directions) == 1:
            nearest, direction = jnp.zeros((), jnp.int32), self.directions[0]
        else:
            nearest = jnp.argmin(jnp.abs(self.dampings - damping))
            direction = space.get(jax.tree.map(lambda *x: jnp.stack(x), *self.directions), nearest)
        error = self.errors[nearest]
        finite = space.all_finite(direction)
        code = jnp.where(self.singular, Result.SINGULAR, Result.FINE)
        result = jnp.where(finite, jnp.where(error < 1, code, Result.BREAKDOWN), Result.NONFINITE)
        # |H|d ≈ g − λd, so the saddle-free model's change is −½ (gᵀd + λ‖d‖²).
        slope, square = space.dot(self.gradient, direction), space.dot(direction, direction)
        return Answer(direction, -(slope + damping * square) / 2, result.astype(jnp.int32), {"error": error})


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The models of disjoint groups of parameters, as one: a block-diagonal H.

    Attributes:
      whole: the space of all parameters.
      spaces: those of the groups.
      models: the groups' models.
      stats: see `Model`.
    """

    whole: space.Space
    spaces: list[space.Space]
    models: list[Model]
    stats: dict[str, jax.Array]

    def answer(self, damping: jax.Array) -> Answer:
        """The groups' answers side by side; what they predict is added up, and the worst result is reported."""
        answers = [model.answer(damping) for model in self.models]
        rests = [answer.rest for answer in answers if answer.rest is not None]
        return Answer(
            self._joined([answer.direction for answer in answers]),
            jnp.sum(jnp.stack([answer.predicted for answer in answers])),
            jnp.max(jnp.stack([answer.result for answer in answers])),
            reduced([answer.stats for answer in answers]),
            Rest(self._joined([r.update for r in rests]), jnp.max(jnp.stack([r.largest for r in rests])))
            if rests
            else None,
        )

    def _joined(self, parts: list[Vector]) -> Vector:
        """One vector from those of the groups."""
        trees = [block.unpack(part, cast=False) for block, part in zip(self.spaces, parts, strict=True)]
        return self.whole.pack(functools.reduce(space.fill, trees))


def reduced(stats: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The statistics of groups as one: the sum of `products`, the smallest of `smallest_…`, the largest of others."""

    def reduce(name: str, numbers: jax.Array) -> jax.Array:
        if name == "products":
            return jnp.sum(numbers, dtype=numbers.dtype)
        return jnp.min(numbers) if name.startswith("smallest") else jnp.max(numbers)

    return {name: reduce(name, jnp.stack([s[name] for s in stats])) for name in stats[0]}
