"""Appendix B.4: how many terms of the series training needs, on UCI Energy with the paper's hyperparameters."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from saddlefree.lab import optimisers, run, statistics
from saddlefree.lab.metrics import read_lines
from saddlefree.lab.run import Display
from saddlefree.lab.studies.base import Findings, epochs, label, save
from saddlefree.lab.task import Task

TERMS = range(3, 11)
ORDER = 1
LOSSES = {"train": "Training loss", "test": "Test loss"}
_BANDS = "medians over seeds, with the 16th to 84th percentile of bootstrap medians"


def compute(folder: pathlib.Path, options: Mapping[str, Any], task: Task, display: Display) -> Findings:
    """Trains with each number of terms, all seeds together, and compares the losses."""
    problem, steps, seeds = options["problem"], options["steps"], range(options["seeds"])
    lines, rows, runs = [], [], {}
    for number, terms in enumerate(TERMS):
        values = optimisers.configured("series", problem, {"terms": terms, "order": ORDER})
        plan = run.Plan(problem, "series", values, tuple(seeds), epochs(problem, task, "series", values, steps))
        where = folder / "runs" / str(terms)
        run.open_folder(where, {"command": "train", "plan": plan.record()}, resume=True)

        def show(step: int, _: int, figures: dict[str, float], done: int = number * steps) -> None:
            display(done + step, len(TERMS) * steps, figures)

        run.run(plan, task, where, keep_checkpoint=False, display=show)
        jax.clear_caches()
        # Where there is one seed, lines do not say it.
        mine = [{"terms": terms, "seed": 0, **line} for line in read_lines(where / "metrics.jsonl")]
        lines += mine
        runs[terms] = [[line for line in mine if line["seed"] == seed] for seed in seeds]
        rows.append({"terms": terms, "products": 2 * (terms - 1), **statistics.summarise("series", runs[terms])})
    shown = ["terms", "products", "train", "train_error", "test", "test_error", "diverged"]
    table = {
        "caption": f"Final losses: medians over {len(seeds)} seeds, and their bootstrap errors",
        "columns": ["Terms K", "Products a step", "Training loss", "±", "Test loss", "±", "Diverged"],
        "rows": [[row[name] for name in shown] for row in rows],
    }
    figures = [save(_figure(runs, loss), folder, loss, f"{LOSSES[loss]}: {_BANDS}", columns=4) for loss in LOSSES]
    return Findings(lines, {"problem": problem, "rows": rows}, figures, [table])


def _figure(runs: Mapping[int, Sequence[statistics.Lines]], loss: str) -> Figure:
    figure = Figure(figsize=(5, 3.8), layout="constrained")
    axes = figure.add_subplot()
    curves = statistics.curves({f"K = {terms}": seeds for terms, seeds in runs.items()}, "step", loss)
    # An ordered quantity, hence shades.
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(curves)))
    for (name, curve), shade in zip(curves.items(), shades, strict=True):
        axes.fill_between(
            curve.x, curve.low, curve.high, where=np.isfinite(curve.high), color=shade, alpha=0.2, linewidth=0
        )
        axes.plot(curve.x, curve.median, color=shade, label=name)
    axes.set(xlabel="Steps", ylabel=LOSSES[loss], xscale="log", yscale="log")
    label(axes.xaxis)
    label(axes.yaxis)
    return figure
