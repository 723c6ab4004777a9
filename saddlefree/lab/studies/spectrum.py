"""The eigenvalues of the training loss's Hessian along training with Adam, by stochastic Lanczos quadrature."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import saddlefree as sf
from saddlefree.density import Density
from saddlefree.lab import events, optimisers, tables
from saddlefree.lab.events import Line, Listener
from saddlefree.lab.figures import COLOURS, label
from saddlefree.lab.metrics import read_lines, write_lines
from saddlefree.lab.plan import Plan, build
from saddlefree.lab.program import precision
from saddlefree.lab.run import run
from saddlefree.lab.studies.base import GREY, Findings, Work, save
from saddlefree.lab.task import Task, Tree

OPTIMISER = "adam"
SAMPLES = 12
"""Random starts. With few of them a single eigenvalue may get hardly any weight, by chance, and is not seen."""
RESOLUTION = 1e-3
"""Ritz values θ within ±RESOLUTION · max |θ| stand for many eigenvalues around 0: their sign says nothing."""


def summarised(density: Density) -> dict[str, float]:
    """The table's numbers."""
    values, weights = (np.asarray(part, np.float64) for part in density)
    sizes = np.abs(values)
    return {
        "smallest": float(np.min(values)),
        "largest": float(np.max(values)),
        "negative": float(np.sum(weights[values < -RESOLUTION * np.max(sizes)])),
        "negative_trace": float(np.sum((weights * sizes)[values < 0]) / np.sum(weights * sizes)),
    }


def plan(options: Mapping[str, Any], task: Task) -> list[Plan]:
    """One run, evaluated after 10, 100, … steps."""
    steps = options["steps"]
    powers = tuple(10**k for k in range(1, len(str(steps))) if 10**k < steps)
    return [build(options["problem"], OPTIMISER, task, steps=steps, evaluations=powers or (steps,))]


def snapshots(plan: Plan, task: Task, folder: pathlib.Path, listener: Listener) -> list[Line]:
    """The density at the start and at each evaluation, with the table's numbers.

    Each is kept in `spectra.jsonl` at once: a run that goes on does not look again at what was seen before.
    """
    # No more examples than it is evaluated with: each density takes about a thousand products.
    train = jax.tree.map(lambda x: x[: plan.evaluated], task.parts["train"])
    path = folder / "spectra.jsonl"
    found = {line["step"]: line for line in read_lines(path)}

    @jax.jit
    def look(params: Tree, model_state: Tree) -> tuple[jax.Array, Density]:
        def value_fn(params: Tree) -> jax.Array:
            return task.loss(params, model_state, train, jax.random.key(0))[0]

        return value_fn(params), sf.spectral_density(sf.hessian(value_fn, params), params, num_samples=SAMPLES)

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Started | events.Evaluated) and event.step in {0, *plan.points()} - found.keys():
            loss, density = look(event.state.params, event.state.model_state)
            parts = {name: part.tolist() for name, part in density._asdict().items()}
            found[event.step] = {"step": event.step, "train": float(loss), **summarised(density), **parts}
            write_lines(path, found.values())
        listener(event)

    run(plan, task, folder, listener=listen)
    return list(found.values())


def compute(work: Work) -> Findings:
    """Looks at the spectrum now and then while Adam trains."""
    (plan,), problem = work.plans, work.options["problem"]
    with precision(plan):
        found = snapshots(plan, work.task, work.folder / "runs" / OPTIMISER, work.listener)
        size = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(work.task.init, jax.random.key(0))[0]))
        figure = _figure(found, size)
    rows = [{name: value for name, value in line.items() if name not in Density._fields} for line in found]
    table = {
        "caption": f"Ritz values θ on {problem}: the extreme ones, the share of those below −{RESOLUTION:g} max |θ|, "
        "and the share of negative ones in tr |H|",
        "columns": ["Step", "Training loss", "Smallest θ", "Largest θ", "Negative, %", "In tr |H|, %"],
        "rows": [
            [
                *(row[name] for name in ("step", "train", "smallest", "largest")),
                *(f"{100 * row[name]:.1f}" for name in ("negative", "negative_trace")),
            ]
            for row in rows
        ],
    }
    caption = f"Density of the Hessian's {size:,} eigenvalues along training with {optimisers.find(OPTIMISER).about}"
    summary = {"problem": problem, "optimiser": OPTIMISER, "parameters": size, "rows": rows}
    return Findings(found, summary, [save(figure, work.folder, "spectrum", caption)], [table])


def _figure(found: list[Line], size: int) -> Figure:
    """A panel for each step; they share both scales and the width of the smoothing."""
    figure = Figure(figsize=(5, 0.7 + 1.1 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), sharex=True, sharey=True, squeeze=False)[:, 0]
    densities = [Density(*(jnp.asarray(line[name]) for name in Density._fields)) for line in found]
    values = np.concatenate([density.values for density in densities])
    width = float(np.ptp(values)) / 200
    grid = jnp.linspace(values.min() - 5 * width, values.max() + 5 * width, 1000, dtype=values.dtype)
    # A tenth of the peak of one eigenvalue: what is lower is the tail of a Gaussian.
    bottom = 0.1 / (size * width * np.sqrt(2 * np.pi))
    for axes, line, density in zip(panels, found, densities, strict=True):
        heights = np.maximum(density.smooth(grid, width), bottom / 2)
        axes.fill_between(grid, bottom / 2, heights, color=COLOURS[0], alpha=0.3, linewidth=0)
        axes.plot(grid, heights, color=COLOURS[0], linewidth=1.2)
        axes.axvline(0, color=GREY, linewidth=0.8)
        text = f"step {line['step']:,}, loss {tables.number(line['train'])}"
        axes.text(0.99, 0.95, text, transform=axes.transAxes, horizontalalignment="right", verticalalignment="top")
    panels[0].set(yscale="log")
    panels[0].set_ylim(bottom=bottom)
    label(panels[0].yaxis)
    panels[-1].set_xlabel("Eigenvalue of H")
    figure.supylabel("Density", fontsize="medium")
    return figure
