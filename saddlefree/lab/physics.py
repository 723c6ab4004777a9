"""Physics-informed networks: problems that need no data, and accuracy.

Float64, full batch. A network u is trained so that the residuals of a differential equation vanish at random points.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import saddlefree as sf
from saddlefree.lab import models
from saddlefree.lab.solutions import allen_cahn_solution, burgers_solution
from saddlefree.lab.task import Batch, Solution, Task, Term, Tree

Field = Callable[[jax.Array], jax.Array]
"""A function of points (n, d) with values (n,): the network, or the true solution."""


class Condition(NamedTuple):
    """What the solution satisfies at some points: the equation, a start or a boundary. Its loss is weight · mean r²."""

    residual: Callable[[Field, Batch], jax.Array]  # r from u and the condition's points, (n,)
    weight: float = 0.5


def physics(
    conditions: Sequence[Condition],
    points: Callable[[jax.Array], tuple[Batch, ...]],
    truth: Field,
    hidden: Sequence[int],
    *,
    grid: dict[str, jax.Array] | None = None,
    dimension: int = 2,
) -> Task:
    """A physics-informed network: residuals at random points are to vanish.

    Validation is the loss at other points, and the test figure is the relative L2 error against the true solution.

    Args:
      conditions: their losses are added.
      points: key to random points, one entry for each condition, whose leaves share their leading axis.
      truth: the true solution.
      hidden: the widths of the hidden layers, which have tanh.
      grid: the two coordinates by name, each as its values on the grid where the error is measured; without it, that
        is at random points of the unit cube.
      dimension: d, the number of coordinates.
    """
    sizes = (dimension, *hidden, 1)
    model = models.mlp(*sizes, activation=jnp.tanh, initialiser=jax.nn.initializers.glorot_normal(), dtype=jnp.float64)
    empty = model.init(jax.random.key(0))[1]

    def u(params: Tree) -> Field:
        return lambda z: model.apply(params, empty, z, True)[0][:, 0]

    def terms(params: Tree, model_state: Tree, batch: Batch, training: bool) -> tuple[list[Term], Tree]:
        found = ((one.residual(u(params), z), one.weight) for one, z in zip(conditions, batch, strict=True))
        return [Term(r[:, None], jnp.zeros_like(r)[:, None], weight) for r, weight in found], model_state

    def pointwise(model_state: Tree, batch: Batch) -> sf.pointwise:
        def residual(one: Condition, count: int) -> Callable[[Tree, Tree], jax.Array]:
            scale = (2 * one.weight / count) ** 0.5
            return lambda params, z: scale * one.residual(u(params), jax.tree.map(lambda x: x[None], z))[0]

        return sf.pointwise(
            *((residual(one, len(jax.tree.leaves(z)[0])), z) for one, z in zip(conditions, batch, strict=True))
        )

    def error(params: Tree, part: Batch) -> jax.Array:
        places, values = part
        return jnp.linalg.norm(u(params)(places) - values) / jnp.linalg.norm(values)

    def solution(params: Tree) -> Solution:
        assert grid
        return Solution(grid, u(params)(places).reshape(shape), values.reshape(shape))

    first, second = jax.random.split(jax.random.key(0))
    if grid is None:
        places = box(jax.random.key(1), 10_000, [0.0] * dimension, [1.0] * dimension)
    else:
        mesh = jnp.stack(jnp.meshgrid(*grid.values()), -1)
        shape, places = mesh.shape[:2], mesh.reshape(-1, 2)
    values = truth(places)
    parts = {"train": points(first), "val": points(second), "test": (places, values)}
    return Task(model.init, terms, parts, error=error, solution=None if grid is None else solution, pointwise=pointwise)


def derivative(u: Field, direction: Sequence[float]) -> Field:
    """The derivative of u along a direction, at each point."""
    return lambda z: jax.jvp(u, (z,), (jnp.broadcast_to(jnp.array(direction, z.dtype), z.shape),))[1]


def second_derivative(u: Field, axis: int, dimension: int = 2) -> Field:
    """The second derivative of u along an axis, at each point."""
    direction = [float(i == axis) for i in range(dimension)]
    return derivative(derivative(u, direction), direction)


def laplacian(u: Field, dimension: int = 2) -> Field:
    """Δu at each point."""
    return lambda z: sum((second_derivative(u, i, dimension)(z) for i in range(dimension)), jnp.zeros(len(z), z.dtype))


def box(key: jax.Array, count: int, low: Sequence[float], high: Sequence[float]) -> jax.Array:
    """Random points (count, d), uniform between two corners."""
    return jax.random.uniform(key, (count, len(low)), minval=jnp.array(low), maxval=jnp.array(high))


def faces(key: jax.Array, count: int, dimension: int) -> jax.Array:
    """Random points on the boundary of the unit cube, as many on each of its 2d faces as on any other, or one more."""
    z = box(key, count, [0.0] * dimension, [1.0] * dimension)
    axis, side = jnp.arange(count) // 2 % dimension, jnp.arange(count) % 2
    return jnp.where(jnp.arange(dimension) == axis[:, None], side[:, None].astype(z.dtype), z)


def sides(key: jax.Array, count: int, low: float, high: float) -> jax.Array:
    """Random points (2 count, 2) for a time from 0 to 1 on the two ends of an interval, x before t."""
    left, right = jax.random.split(key)
    return jnp.concatenate([box(left, count, (low, 0), (low, 1)), box(right, count, (high, 0), (high, 1))])


def poisson(_: str | None, *, waves: float, points: int, side_points: int, width: int, depth: int) -> Task:
    """−Δu = f on the unit square, u = 0 on its boundary, with u = sin πx sin kπy, k = `waves`."""

    def truth(z: jax.Array) -> jax.Array:
        return jnp.sin(jnp.pi * z[:, 0]) * jnp.sin(waves * jnp.pi * z[:, 1])

    def draw(key: jax.Array) -> tuple[Batch, ...]:
        inside, along = jax.random.split(key)
        t = jax.random.uniform(along, (side_points,))
        zero, one = jnp.zeros(side_points), jnp.ones(side_points)
        parts = [jnp.stack(side, 1) for side in ((t, zero), (t, one), (zero, t), (one, t))]
        return box(inside, points, (0, 0), (1, 1)), jnp.concatenate(parts)

    size = (1 + waves**2) * jnp.pi**2
    equation = Condition(lambda u, z: -laplacian(u)(z) / size - truth(z))
    boundary = Condition(lambda u, z: u(z), 5.0)
    line = jnp.linspace(0, 1, 50)
    return physics([equation, boundary], draw, truth, [width] * depth, grid={"x": line, "y": line})


def poisson_2d(_: str | None, *, points: int, side_points: int, width: int, depth: int) -> Task:
    """−Δu = f on the unit square, u = 0 on its boundary, with u = sin πx sin πy, both conditions with weight ½."""

    def truth(z: jax.Array) -> jax.Array:
        return jnp.sin(jnp.pi * z[:, 0]) * jnp.sin(jnp.pi * z[:, 1])

    line = jnp.linspace(0, 1, 50)
    sizes = points, side_points, [width] * depth
    return _dirichlet(truth, lambda z: 2 * jnp.pi**2 * truth(z), 2, *sizes, grid={"x": line, "y": line})


def poisson_5d(_: str | None, *, points: int, side_points: int, layers: str) -> Task:
    """−Δu = f on the unit cube of five dimensions, u given on its boundary, with u = Σ cos πxᵢ."""

    def truth(z: jax.Array) -> jax.Array:
        return jnp.sum(jnp.cos(jnp.pi * z), axis=1)

    sizes = points, side_points, [int(width) for width in layers.split("-")]
    return _dirichlet(truth, lambda z: jnp.pi**2 * truth(z), 5, *sizes)


def _dirichlet(
    truth: Field,
    source: Field,
    dimension: int,
    points: int,
    side_points: int,
    hidden: Sequence[int],
    grid: dict[str, jax.Array] | None = None,
) -> Task:
    """−Δu = `source` on the unit cube, u = `truth` on its boundary."""

    def draw(key: jax.Array) -> tuple[Batch, ...]:
        inside, around = jax.random.split(key)
        return box(inside, points, [0.0] * dimension, [1.0] * dimension), faces(around, side_points, dimension)

    equation = Condition(lambda u, z: -laplacian(u, dimension)(z) - source(z))
    boundary = Condition(lambda u, z: u(z) - truth(z))
    return physics([equation, boundary], draw, truth, hidden, grid=grid, dimension=dimension)


def heat(_: str | None, *, points: int, start_points: int, side_points: int, width: int, depth: int) -> Task:
    """u_t = ¼ u_xx on [0, 1]², u(x, 0) = sin πx, u(0, t) = u(1, t) = 0, solved by e^(−π²t/4) sin πx."""

    def draw(key: jax.Array) -> tuple[Batch, ...]:
        inside, at_start, along = jax.random.split(key, 3)
        start = box(at_start, start_points, (0, 0), (1, 0))
        return box(inside, points, (0, 0), (1, 1)), start, sides(along, side_points, 0, 1)

    conditions = [
        Condition(lambda u, z: derivative(u, (0.0, 1.0))(z) - second_derivative(u, 0)(z) / 4),
        Condition(lambda u, z: u(z) - jnp.sin(jnp.pi * z[:, 0])),
        Condition(lambda u, z: u(z)),
    ]
    grid = {"x": jnp.linspace(0, 1, 50), "t": jnp.linspace(0, 1, 50)}

    def truth(z: jax.Array) -> jax.Array:
        return jnp.exp(-(jnp.pi**2) * z[:, 1] / 4) * jnp.sin(jnp.pi * z[:, 0])

    return physics(conditions, draw, truth, [width] * depth, grid=grid)


def wave(_: str | None, *, points: int, start_points: int, side_points: int, width: int, depth: int) -> Task:
    """u_tt = 4 u_xx on [0, 1]², u(x, 0) = sin πx + ½ sin 4πx, u_t(x, 0) = 0, u(0, t) = u(1, t) = 0.

    Solved by sin πx cos 2πt + ½ sin 4πx cos 8πt. The equation is divided by 4π², so that its terms are of order 1.
    """

    def truth(z: jax.Array) -> jax.Array:
        x, t = jnp.pi * z[:, 0], jnp.pi * z[:, 1]
        return jnp.sin(x) * jnp.cos(2 * t) + jnp.sin(4 * x) * jnp.cos(8 * t) / 2

    def draw(key: jax.Array) -> tuple[Batch, ...]:
        inside, at_start, along = jax.random.split(key, 3)
        start = box(at_start, start_points, (0, 0), (1, 0))
        return box(inside, points, (0, 0), (1, 1)), start, start, sides(along, side_points, 0, 1)

    conditions = [
        Condition(lambda u, z: (second_derivative(u, 1)(z) - 4 * second_derivative(u, 0)(z)) / (4 * jnp.pi**2)),
        Condition(lambda u, z: u(z) - truth(z), 5.0),
        Condition(lambda u, z: derivative(u, (0.0, 1.0))(z) / (2 * jnp.pi)),
        Condition(lambda u, z: u(z), 5.0),
    ]
    grid = {"x": jnp.linspace(0, 1, 50), "t": jnp.linspace(0, 1, 50)}
    return physics(conditions, draw, truth, [width] * depth, grid=grid)


def convection(
    _: str | None, *, beta: float, points: int, start_points: int, side_points: int, width: int, depth: int
) -> Task:
    """u_t + β u_x = 0, u(x, 0) = sin x, periodic in x: with β = 20 a wave that travels three times around."""

    def draw(key: jax.Array) -> tuple[Batch, ...]:
        inside, at_start, along = jax.random.split(key, 3)
        left = box(along, side_points, (0, 0), (0, 1))
        return (
            box(inside, points, (0, 0), (2 * np.pi, 1)),
            box(at_start, start_points, (0, 0), (2 * np.pi, 0)),
            (left, left + jnp.array([2 * jnp.pi, 0])),
        )

    conditions = [
        Condition(lambda u, z: derivative(u, (beta, 1.0))(z)),
        Condition(lambda u, z: u(z) - jnp.sin(z[:, 0])),
        Condition(lambda u, pair: u(pair[0]) - u(pair[1])),
    ]
    grid = {"x": jnp.linspace(0, 2 * jnp.pi, 64), "t": jnp.linspace(0, 1, 50)}
    return physics(conditions, draw, lambda z: jnp.sin(z[:, 0] - beta * z[:, 1]), [width] * depth, grid=grid)


def burgers(
    _: str | None, *, viscosity: float, points: int, start_points: int, side_points: int, width: int, depth: int
) -> Task:
    """u_t + u u_x = ν u_xx on [−1, 1] × [0, 1], u(x, 0) = −sin πx, u(±1, t) = 0: a shock forms at x = 0."""

    def draw(key: jax.Array) -> tuple[Batch, ...]:
        inside, at_start, left, right = jax.random.split(key, 4)
        return (
            box(inside, points, (-1, 0), (1, 1)),
            box(at_start, start_points, (-1, 0), (1, 0)),
            jnp.concatenate([box(left, side_points, (-1, 0), (-1, 1)), box(right, side_points, (1, 0), (1, 1))]),
        )

    def equation(u: Field, z: jax.Array) -> jax.Array:
        r = derivative(u, (0.0, 1.0))(z) + u(z) * derivative(u, (1.0, 0.0))(z)
        return r - viscosity * second_derivative(u, 0)(z)

    conditions = [
        Condition(equation),
        Condition(lambda u, z: u(z) + jnp.sin(jnp.pi * z[:, 0])),
        Condition(lambda u, z: u(z)),
    ]
    grid = {"x": jnp.linspace(-1, 1, 101), "t": jnp.linspace(0, 1, 51)}
    return physics(conditions, draw, lambda z: burgers_solution(z, viscosity), [width] * depth, grid=grid)


def allen_cahn(_: str | None, *, points: int, start_points: int, side_points: int, width: int, depth: int) -> Task:
    """u_t = 1e-4 u_xx + 5u − 5u³ on [−1, 1] × [0, 1], u(x, 0) = x² cos πx, u and u_x periodic in x."""

    def draw(key: jax.Array) -> tuple[Batch, ...]:
        inside, at_start, along = jax.random.split(key, 3)
        left = box(along, side_points, (-1, 0), (-1, 1))
        pair = left, left + jnp.array([2.0, 0])
        return box(inside, points, (-1, 0), (1, 1)), box(at_start, start_points, (-1, 0), (1, 0)), pair, pair

    def equation(u: Field, z: jax.Array) -> jax.Array:
        value = u(z)
        return derivative(u, (0.0, 1.0))(z) - 1e-4 * second_derivative(u, 0)(z) - 5 * value + 5 * value**3

    conditions = [
        Condition(equation),
        Condition(lambda u, z: u(z) - z[:, 0] ** 2 * jnp.cos(jnp.pi * z[:, 0]), 50.0),
        Condition(lambda u, pair: u(pair[0]) - u(pair[1])),
        Condition(lambda u, pair: derivative(u, (1.0, 0.0))(pair[0]) - derivative(u, (1.0, 0.0))(pair[1])),
    ]
    reference = allen_cahn_solution()[:, ::32]
    grid = {"x": -1 + jnp.arange(reference.shape[1]) / 64, "t": jnp.linspace(0, 1, len(reference))}
    return physics(conditions, draw, lambda _: jnp.asarray(reference.reshape(-1)), [width] * depth, grid=grid)
