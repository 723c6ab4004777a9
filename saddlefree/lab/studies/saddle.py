"""The paper's Figure 1: four ways down from one point next to a saddle.

Along the two eigenvectors of its Hessian, which are not the axes, the surface is

    f = u² − ¼v² + v⁴/32,

quadratic around its saddle at 0, with minima of −½ at u = 0, v = ±2. Newton's method walks into the saddle; saddle-free
Newton, exact or by the series, leaves it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import saddlefree as sf
from saddlefree.lab.figures import COLOURS, panel
from saddlefree.lab.studies.base import GREY, Findings, Work, save

ANGLE = 25.0
CONVEX, CONCAVE = (np.array([np.cos(a), np.sin(a)]) for a in np.radians([ANGLE, ANGLE + 90]))
START, MINIMUM = CONVEX + 0.4 * CONCAVE, 2 * CONCAVE
EXACT = "Exact saddle-free Newton"
METHODS = {
    "SGD": optax.sgd(0.3),
    "Newton": sf.saddle_free_newton(damping=0.0, solver=sf.exact(absolute=False)),
    EXACT: sf.saddle_free_newton(damping=0.1, solver=sf.exact()),
    "Series, 18 terms, Sablonnière of order 2": sf.saddle_free_newton(
        damping=0.1, solver=sf.series(num_terms=18, acceleration=sf.sablonniere(order=2))
    ),
}
SHOWN = (1, 3, 5, 10, 20)


def loss(x: jax.Array) -> jax.Array:
    """The surface, over one point or over many along further axes."""
    u, v = jnp.tensordot(jnp.asarray([CONVEX, CONCAVE], x.dtype), x, axes=1)
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


def compute(work: Work) -> Findings:
    """Follows each method, and tells how far down it came."""
    steps, folder = work.options["steps"], work.folder
    paths = {name: path(tx, steps) for name, tx in METHODS.items()}
    losses = {name: np.asarray(loss(jnp.asarray(points.T))).tolist() for name, points in paths.items()}
    lines = [
        {"method": name, "step": step, "x": x, "y": y, "train": losses[name][step]}
        for name, points in paths.items()
        for step, (x, y) in enumerate(points.tolist())
    ]
    shown = [step for step in SHOWN if step < steps] + [steps]
    summary = {
        name: {"losses": {step: losses[name][step] for step in shown}, "end": points[-1].tolist()}
        for name, points in paths.items()
    }
    table = {
        "caption": "Loss after so many steps, and where the path ends; the saddle has 0, the minima have −0.5",
        "columns": ["Method", *(f"Step {step}" for step in shown), "Ends at"],
        "rows": [
            [name, *found["losses"].values(), "({:.3f}, {:.3f})".format(*found["end"])]
            for name, found in summary.items()
        ],
    }
    figures = [
        save(_map(paths), folder, "paths", "First updates (arrows) and paths from one point next to a saddle", 2),
        save(_descent(losses), folder, "losses", "Loss against steps", 2),
    ]
    return Findings(lines, {"methods": summary}, figures, [table])


def _style(number: int, name: str) -> dict[str, Any]:
    # The series lies on the exact path: a thin line on a thick one shows both.
    return {"color": COLOURS[number], "linewidth": 4.5 if name == EXACT else 1.4}


def _map(paths: Mapping[str, np.ndarray]) -> Figure:
    figure, axes = panel(5, 5.4)
    grid = np.meshgrid(np.linspace(-1.7, 1.5, 161), np.linspace(-0.9, 2.5, 171))
    heights = np.asarray(loss(jnp.asarray(grid, jnp.float32)))
    axes.contour(*grid, heights, levels=np.arange(-0.45, 1.5, 0.1), colors=GREY, linewidths=0.5, linestyles="solid")
    for name, along, place, angle in (
        ("convex", CONVEX, 0.05 * CONCAVE - 1.2 * CONVEX, ANGLE),
        ("concave", CONCAVE, 0.05 * CONVEX - 0.6 * CONCAVE, ANGLE - 90),
    ):
        axes.axline((0, 0), tuple(along), color=GREY, linewidth=1.2, linestyle="dashed")
        axes.text(place[0], place[1], name, rotation=angle, rotation_mode="anchor", horizontalalignment="center")
    for number, (name, points) in enumerate(paths.items()):
        style = _style(number, name)
        axes.plot(*points.T, "o-", markersize=style["linewidth"] + 2, alpha=0.7, label=name, **style)
        head = {"arrowstyle": "-|>", "mutation_scale": 10 + 2 * style["linewidth"], "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tuple(points[1]), tuple(points[0]), arrowprops=head | style)
    for name, point, marker, above in (
        ("saddle", np.zeros(2), "X", -14),
        ("minimum", MINIMUM, "*", 4),
        ("start", START, "o", 4),
    ):
        axes.plot(*point, marker, color="black", markersize=8, zorder=5)
        axes.annotate(name, tuple(point), (9, above), textcoords="offset points")
    axes.set(xlabel="x", ylabel="y", aspect="equal", xlim=(-1.7, 1.5), ylim=(-0.9, 2.5))
    axes.grid(visible=False)
    return figure


def _descent(losses: Mapping[str, list[float]]) -> Figure:
    figure, axes = panel(5, 3.8)
    for number, (name, values) in enumerate(losses.items()):
        axes.plot(values, label=name, **_style(number, name))
    axes.axhline(-0.5, color=GREY, linewidth=0.8, linestyle="dotted")
    axes.set(xlabel="Steps", ylabel="Loss")
    axes.locator_params(axis="x", integer=True)
    return figure
