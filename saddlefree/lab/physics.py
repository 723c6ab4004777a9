"""Physics-informed networks: problems that need no data, and accuracy.

Float64, full batch. A network u is trained so that the residuals of a differential equation vanish at random points.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from saddlefree.lab import models
from saddlefree.lab.task import Batch, Solution, Task, Term, Tree


def physics(
    residuals: Callable[[Callable, Batch], list[tuple[jax.Array, float]]],
    points: Callable[[jax.Array], Batch],
    truth: Callable[[jax.Array], jax.Array],
    grid: dict[str, jax.Array],
    *,
    width: int,
    depth: int,
) -> Task:
    """A physics-informed network: residuals at random points are to vanish.

    Validation is the loss at other points, and the test figure is the relative L2 error against the true solution on
    the grid.

    Args:
      residuals: (u, points) to each kind of residual with its weight; the loss is Σ weight · mean of squares. u maps
        points (n, 2) to values (n,).
      points: key to the random points, as `residuals` wants them.
      truth: the true solution, from points to values.
      grid: the two coordinates by name, each as its values on the grid.
      width, depth: of the hidden layers, which have tanh.
    """
    sizes = (2, *[width] * depth, 1)
    model = models.mlp(*sizes, activation=jnp.tanh, initialiser=jax.nn.initializers.glorot_normal(), dtype=jnp.float64)

    def u(params: Tree) -> Callable[[jax.Array], jax.Array]:
        return lambda z: model.apply(params, empty, z, True)[0][:, 0]

    def terms(params: Tree, model_state: Tree, batch: Batch, training: bool) -> tuple[list[Term], Tree]:
        found = residuals(u(params), batch)
        return [Term(r[:, None], jnp.zeros_like(r)[:, None], weight) for r, weight in found], model_state

    def error(params: Tree, part: Batch) -> jax.Array:
        places, values = part
        return jnp.linalg.norm(u(params)(places) - values) / jnp.linalg.norm(values)

    def solution(params: Tree) -> Solution:
        return Solution(grid, u(params)(places).reshape(shape), values.reshape(shape))

    empty = model.init(jax.random.key(0))[1]
    mesh = jnp.stack(jnp.meshgrid(*grid.values()), -1)
    shape, places = mesh.shape[:2], mesh.reshape(-1, 2)
    values = truth(places)
    train, val = (points(key) for key in jax.random.split(jax.random.key(0)))
    parts = {"train": train, "val": val, "test": (places, values)}
    return Task(model.init, terms, parts, error=error, solution=solution)


def derivative(u: Callable, direction: tuple[float, float]) -> Callable:
    """The derivative of u along a direction, at each point."""
    return lambda z: jax.jvp(u, (z,), (jnp.broadcast_to(jnp.array(direction, z.dtype), z.shape),))[1]


def box(key: jax.Array, count: int, low: tuple[float, float], high: tuple[float, float]) -> jax.Array:
    """Random points (count, 2), uniform between two corners."""
    return jax.random.uniform(key, (count, 2), minval=jnp.array(low), maxval=jnp.array(high))


def poisson(_: str | None, *, waves: float, points: int, side_points: int, width: int, depth: int) -> Task:
    """−Δu = f on the unit square, u = 0 on its boundary, with u = sin πx sin kπy, k = `waves`."""

    def truth(z: jax.Array) -> jax.Array:
        return jnp.sin(jnp.pi * z[:, 0]) * jnp.sin(waves * jnp.pi * z[:, 1])

    def draw(key: jax.Array) -> Batch:
        inside, along = jax.random.split(key)
        t = jax.random.uniform(along, (side_points,))
        zero, one = jnp.zeros(side_points), jnp.ones(side_points)
        sides = [jnp.stack(side, 1) for side in ((t, zero), (t, one), (zero, t), (one, t))]
        return box(inside, points, (0, 0), (1, 1)), jnp.concatenate(sides)

    def residuals(u: Callable, batch: Batch) -> list[tuple[jax.Array, float]]:
        inside, boundary = batch
        second = [derivative(derivative(u, axis), axis)(inside) for axis in ((1.0, 0.0), (0.0, 1.0))]
        size = (1 + waves**2) * jnp.pi**2
        return [(-(second[0] + second[1]) / size - truth(inside), 0.5), (u(boundary), 5.0)]

    line = jnp.linspace(0, 1, 50)
    return physics(residuals, draw, truth, {"x": line, "y": line}, width=width, depth=depth)


def convection(
    _: str | None, *, beta: float, points: int, start_points: int, side_points: int, width: int, depth: int
) -> Task:
    """u_t + β u_x = 0, u(x, 0) = sin x, periodic in x: with β = 20 a wave that travels three times around."""

    def draw(key: jax.Array) -> Batch:
        inside, at_start, along = jax.random.split(key, 3)
        left = box(along, side_points, (0, 0), (0, 1))
        return (
            box(inside, points, (0, 0), (2 * np.pi, 1)),
            box(at_start, start_points, (0, 0), (2 * np.pi, 0)),
            left,
            left + jnp.array([2 * jnp.pi, 0]),
        )

    def residuals(u: Callable, batch: Batch) -> list[tuple[jax.Array, float]]:
        inside, start, left, right = batch
        return [
            (derivative(u, (beta, 1.0))(inside), 0.5),
            (u(start) - jnp.sin(start[:, 0]), 0.5),
            (u(left) - u(right), 0.5),
        ]

    grid = {"x": jnp.linspace(0, 2 * jnp.pi, 64), "t": jnp.linspace(0, 1, 50)}
    return physics(residuals, draw, lambda z: jnp.sin(z[:, 0] - beta * z[:, 1]), grid, width=width, depth=depth)


def burgers_solution(z: jax.Array, viscosity: float = 0.01 / np.pi) -> jax.Array:
    """The solution from u(x, 0) = −sin πx, by the Cole-Hopf transformation and Gauss-Hermite quadrature.

    u(x, t) = −∫ sin π(x − y) f(x − y) e^{−y²/4νt} dy / ∫ f(x − y) e^{−y²/4νt} dy,  f(y) = exp(−cos(πy)/2πν)
    (Basdevant et al. 1986).
    """
    nodes, weights = (jnp.asarray(a) for a in np.polynomial.hermite.hermgauss(100))
    shifted = z[:, :1] - jnp.sqrt(4 * viscosity * jnp.maximum(z[:, 1:], 1e-12)) * nodes
    # Relative to the largest, so that nothing overflows.
    exponent = -jnp.cos(jnp.pi * shifted) / (2 * jnp.pi * viscosity)
    f = weights * jnp.exp(exponent - jnp.max(exponent, axis=1, keepdims=True))
    return -jnp.sum(f * jnp.sin(jnp.pi * shifted), axis=1) / jnp.sum(f, axis=1)


def burgers(
    _: str | None, *, viscosity: float, points: int, start_points: int, side_points: int, width: int, depth: int
) -> Task:
    """u_t + u u_x = ν u_xx on [−1, 1] × [0, 1], u(x, 0) = −sin πx, u(±1, t) = 0: a shock forms at x = 0."""

    def draw(key: jax.Array) -> Batch:
        inside, at_start, left, right = jax.random.split(key, 4)
        return (
            box(inside, points, (-1, 0), (1, 1)),
            box(at_start, start_points, (-1, 0), (1, 0)),
            jnp.concatenate([box(left, side_points, (-1, 0), (-1, 1)), box(right, side_points, (1, 0), (1, 1))]),
        )

    def residuals(u: Callable, batch: Batch) -> list[tuple[jax.Array, float]]:
        inside, start, boundary = batch
        u_x = derivative(u, (1.0, 0.0))
        r = derivative(u, (0.0, 1.0))(inside) + u(inside) * u_x(inside)
        r -= viscosity * derivative(u_x, (1.0, 0.0))(inside)
        return [(r, 0.5), (u(start) + jnp.sin(jnp.pi * start[:, 0]), 0.5), (u(boundary), 0.5)]

    grid = {"x": jnp.linspace(-1, 1, 101), "t": jnp.linspace(0, 1, 51)}
    return physics(residuals, draw, lambda z: burgers_solution(z, viscosity), grid, width=width, depth=depth)
