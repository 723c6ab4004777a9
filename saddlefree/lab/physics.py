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
    grid: tuple[jax.Array, jax.Array],
    sizes: tuple[int, ...],
) -> Task:
    """A physics-informed network: residuals at random points are to vanish.

    `residuals(u, points)` gives each kind with its weight. Validation is the loss at other points, and the test figure
    is the relative L2 error against the true solution on a grid.
    """
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
        return Solution(dict(zip("xt", grid, strict=True)), u(params)(places).reshape(shape), values.reshape(shape))

    empty = model.init(jax.random.key(0))[1]
    mesh = jnp.stack(jnp.meshgrid(*grid), -1)
    shape, places = mesh.shape[:2], mesh.reshape(-1, 2)
    values = truth(places)
    train, val = (points(key) for key in jax.random.split(jax.random.key(0)))
    parts = {"train": train, "val": val, "test": (places, values)}
    return Task(model.init, terms, parts, error=error, solution=solution)


def derivative(u: Callable, direction: tuple[float, float]) -> Callable:
    """The derivative of u along a direction, at each point."""
    return lambda z: jax.jvp(u, (z,), (jnp.broadcast_to(jnp.array(direction, z.dtype), z.shape),))[1]


def _box(key: jax.Array, count: int, low: tuple[float, float], high: tuple[float, float]) -> jax.Array:
    return jax.random.uniform(key, (count, 2), minval=jnp.array(low), maxval=jnp.array(high))


def poisson(_: str | None) -> Task:
    """−Δu = f on the unit square, u = 0 on its boundary, with u = sin πx sin 2πy."""

    def truth(z: jax.Array) -> jax.Array:
        return jnp.sin(jnp.pi * z[:, 0]) * jnp.sin(2 * jnp.pi * z[:, 1])

    def points(key: jax.Array) -> Batch:
        inside, along = jax.random.split(key)
        t = jax.random.uniform(along, (50,))
        zero, one = jnp.zeros(50), jnp.ones(50)
        sides = [jnp.stack(side, 1) for side in ((t, zero), (t, one), (zero, t), (one, t))]
        return _box(inside, 800, (0, 0), (1, 1)), jnp.concatenate(sides)

    def residuals(u: Callable, batch: Batch) -> list[tuple[jax.Array, float]]:
        inside, boundary = batch
        second = [derivative(derivative(u, axis), axis)(inside) for axis in ((1.0, 0.0), (0.0, 1.0))]
        return [(-(second[0] + second[1]) / (5 * jnp.pi**2) - truth(inside), 0.5), (u(boundary), 5.0)]

    line = jnp.linspace(0, 1, 50)
    return physics(residuals, points, truth, (line, line), (2, 32, 32, 32, 1))


def convection(_: str | None) -> Task:
    """u_t + 20 u_x = 0, u(x, 0) = sin x, periodic in x: a wave that travels three times around."""

    def points(key: jax.Array) -> Batch:
        inside, at_start, along = jax.random.split(key, 3)
        left = _box(along, 100, (0, 0), (0, 1))
        return (
            _box(inside, 1000, (0, 0), (2 * np.pi, 1)),
            _box(at_start, 128, (0, 0), (2 * np.pi, 0)),
            left,
            left + jnp.array([2 * jnp.pi, 0]),
        )

    def residuals(u: Callable, batch: Batch) -> list[tuple[jax.Array, float]]:
        inside, start, left, right = batch
        return [
            (derivative(u, (20.0, 1.0))(inside), 0.5),
            (u(start) - jnp.sin(start[:, 0]), 0.5),
            (u(left) - u(right), 0.5),
        ]

    grid = jnp.linspace(0, 2 * jnp.pi, 64), jnp.linspace(0, 1, 50)
    return physics(residuals, points, lambda z: jnp.sin(z[:, 0] - 20 * z[:, 1]), grid, (2, 50, 50, 50, 1))


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


def burgers(_: str | None) -> Task:
    """u_t + u u_x = (0.01/π) u_xx on [−1, 1] × [0, 1], u(x, 0) = −sin πx, u(±1, t) = 0: a shock forms at x = 0."""

    def points(key: jax.Array) -> Batch:
        inside, at_start, left, right = jax.random.split(key, 4)
        return (
            _box(inside, 2000, (-1, 0), (1, 1)),
            _box(at_start, 100, (-1, 0), (1, 0)),
            jnp.concatenate([_box(left, 50, (-1, 0), (-1, 1)), _box(right, 50, (1, 0), (1, 1))]),
        )

    def residuals(u: Callable, batch: Batch) -> list[tuple[jax.Array, float]]:
        inside, start, boundary = batch
        u_x = derivative(u, (1.0, 0.0))
        r = derivative(u, (0.0, 1.0))(inside) + u(inside) * u_x(inside)
        r -= 0.01 / jnp.pi * derivative(u_x, (1.0, 0.0))(inside)
        return [(r, 0.5), (u(start) + jnp.sin(jnp.pi * start[:, 0]), 0.5), (u(boundary), 0.5)]

    grid = jnp.linspace(-1, 1, 101), jnp.linspace(0, 1, 51)
    return physics(residuals, points, burgers_solution, grid, (2, 32, 32, 32, 32, 1))
