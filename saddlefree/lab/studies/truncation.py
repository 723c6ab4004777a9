"""Appendix B.4: how many terms of the series training needs, on UCI Energy with the paper's hyperparameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from saddlefree.lab import statistics
from saddlefree.lab.figures import label, panel
from saddlefree.lab.plan import Plan, build
from saddlefree.lab.run import run_seeds
from saddlefree.lab.studies.base import Findings, Work, save
from saddlefree.lab.task import Task

TERMS = range(3, 11)
ORDER = 1
LOSSES = {"train": "Training loss", "test": "Test loss"}
_BANDS = "medians over seeds, with the 16th to 84th percentile of bootstrap medians"


def plan(options: Mapping[str, Any], task: Task) -> list[Plan]:
    """A plan for each number of terms, all seeds together."""
    asked = {"seeds": range(options["seeds"]), "steps": options["steps"]}
    return [
        build(options["problem"], "series", task, changes={"terms": terms, "order": ORDER}, **asked) for terms in TERMS
    ]


def compute(work: Work) -> Findings:
    """Trains with each number of terms, and compares the losses."""
    lines, rows, runs = [], [], {}
    for terms, each in zip(TERMS, work.plans, strict=True):
        runs[terms] = run_seeds(each, work.task, work.folder / "runs" / str(terms), listener=work.listener).lines
        jax.clear_caches()
        lines += [{"terms": terms, **line} for of_seed in runs[terms] for line in of_seed]
        rows.append({"terms": terms, "products": 2 * (terms - 1), **statistics.summarise("series", runs[terms])})
    shown = ["terms", "products", "train", "train_error", "test", "test_error", "diverged"]
    table = {
        "caption": f"Final losses: medians over {work.options['seeds']} seeds, and their bootstrap errors",
        "columns": ["Terms K", "Products a step", "Training loss", "±", "Test loss", "±", "Diverged"],
        "rows": [[row[name] for name in shown] for row in rows],
    }
    figures = [save(_figure(runs, loss), work.folder, loss, f"{LOSSES[loss]}: {_BANDS}", columns=4) for loss in LOSSES]
    return Findings(lines, {"problem": work.options["problem"], "rows": rows}, figures, [table])


def _figure(runs: Mapping[int, Sequence[statistics.Lines]], loss: str) -> Figure:
    figure, axes = panel(5, 3.8)
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
