"""The paper's Figure 1: four ways down from one point next to a saddle.

Along the two eigenvectors of its Hessian, which are not the axes, the surface is

    f = u² − ¼v² + v⁴/32,

quadratic around its saddle at 0, with minima of −½ at u = 0, v = ±2. Newton's method walks into the saddle; saddle-free
Newton, exact or by the series, leaves it.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import saddlefree as sf
from saddlefree.lab.report import COLOURS
from saddlefree.lab.run import Display
from saddlefree.lab.studies.base import Findings, save
from saddlefree.lab.task import Task

ANGLE = math.radians(25)
BASIS = np.array([[math.cos(ANGLE), -math.sin(ANGLE)], [math.sin(ANGLE), math.cos(ANGLE)]])
"""The eigenvectors, as columns."""
START, MINIMUM = BASIS @ [1.0, 0.4], BASIS @ [0.0, 2.0]
EXACT = "Exact saddle-free Newton"
METHODS = {
    "SGD": optax.sgd(0.3),
    "Newton": sf.saddle_free_newton(damping=0.0, solver=sf.exact(absolute=False)),
    EXACT: sf.saddle_free_newton(damping=0.1, solver=sf.exact()),
    "Series, 18 terms, Sablonnière of order 2": sf.saddle_free_newton(
        damping=0.1, solver=sf.series(num_terms=18, acceleration=sf.sablonniere(order=2))
    ),
}


def loss(x: jax.Array) -> jax.Array:
    """The surface over points whose coordinates lie along the first axis."""
    u, v = jnp.tensordot(jnp.asarray(BASIS.T, x.dtype), x, axes=1)
    return u**2 - v**2 / 4 + v**4 / 32


def path(tx: optax.GradientTransformation, steps: int) -> np.ndarray:
    """The points that an optimiser visits from START."""
    tx = optax.with_extra_args_support(tx)

    def step(carry: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], jax.Array]:
        x, state = carry
        updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
        x = optax.apply_updates(x, updates)
        return (x, state), x

    x = jnp.asarray(START, jnp.float32)
    _, points = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), None, length=steps))(x)
    return np.concatenate([x[None], points])


def compute(folder: pathlib.Path, options: Mapping[str, Any], task: Task, display: Display) -> Findings:
    """Follows each method, and tells how far down it came."""
    steps = options["steps"]
    paths = {name: path(tx, steps) for name, tx in METHODS.items()}
    losses = {name: [float(f) for f in loss(jnp.asarray(points.T))] for name, points in paths.items()}
    lines = [
        {"method": name, "step": step, "x": float(x), "y": float(y), "train": losses[name][step]}
        for name, points in paths.items()
        for step, (x, y) in enumerate(points)
    ]
    shown = [step for step in (1, 3, 5, 10, 20) if step < steps] + [steps]
    ends = {name: f"({points[-1][0]:.3f}, {points[-1][1]:.3f})" for name, points in paths.items()}
    table = {
        "caption": "Loss after so many steps, and where the path ends; the minimum is −0.5, the saddle 0",
        "columns": ["Method", *(f"Step {step}" for step in shown), "Ends at"],
        "rows": [[name, *(losses[name][step] for step in shown), ends[name]] for name in paths],
    }
    summary = {
        "methods": {
            name: {"losses": {step: losses[name][step] for step in shown}, "end": points[-1].tolist()}
            for name, points in paths.items()
        }
    }
    figures = [
        save(_map(paths), folder, "paths", "First updates (arrows) and paths from one point next to a saddle", 2),
        save(_losses(losses), folder, "losses", "Loss against steps", 2),
    ]
    return Findings(lines, summary, figures, [table])


def _style(number: int, name: str) -> dict[str, Any]:
    # The series lies on the exact path: a thin line on a thick one shows both.
    return {"color": COLOURS[number], "label": name, "linewidth": 4.5 if name == EXACT else 1.4}


def _map(paths: Mapping[str, np.ndarray]) -> Figure:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    grid = np.meshgrid(np.linspace(-1.7, 1.5, 200, dtype=np.float32), np.linspace(-0.9, 2.5, 200, dtype=np.float32))
    heights = np.asarray(loss(jnp.stack([jnp.asarray(g) for g in grid])))
    axes.contour(
        *grid, heights, levels=np.linspace(-0.5, 1.5, 21), colors="#888888", linewidths=0.5, linestyles="solid"
    )
    for direction, label in ((BASIS[:, 0], "convex"), (BASIS[:, 1], "concave")):
        axes.axline((0, 0), direction, color="#888888", linewidth=1, linestyle=(0, (6, 3)))
        axes.annotate(label, 1.25 * direction if label == "convex" else -0.75 * direction)
    for number, (name, points) in enumerate(paths.items()):
        style = _style(number, name)
        axes.plot(*points.T, "o-", alpha=0.6, markersize=0.8 * style["linewidth"] + 2, **style)
    for number, (name, points) in enumerate(paths.items()):
        width = _style(number, name)["linewidth"]
        arrow = {"arrowstyle": "-|>", "color": COLOURS[number], "linewidth": width, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", points[1], points[0], arrowprops=arrow)
    for point, marker, label in ((np.zeros(2), "X", "saddle"), (MINIMUM, "*", "minimum"), (START, "o", "start")):
        axes.plot(*point, marker, color="black", markersize=8, zorder=5)
        axes.annotate(label, point, (8, -10), textcoords="offset points")
    axes.set(xlabel="x", ylabel="y", aspect="equal", xlim=(-1.7, 1.5), ylim=(-0.9, 2.5))
    axes.grid(visible=False)
    return figure


def _losses(losses: Mapping[str, list[float]]) -> Figure:
    figure = Figure(figsize=(5, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(losses.items()):
        axes.plot(values, **_style(number, name))
    axes.axhline(-0.5, color="#888888", linewidth=0.8, linestyle="dotted")
    axes.set(xlabel="Steps", ylabel="Loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure
