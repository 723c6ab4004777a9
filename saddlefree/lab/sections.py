"""The figures of a training run or a comparison, each with a small table of what it shows."""

import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from saddlefree.lab import figures, profiles, statistics, tables
from saddlefree.lab.figures import Picture
from saddlefree.lab.tables import Table

QUANTITIES = {
    "damping": "Damping λ",
    "learning_rate": "Learning rate",
    "momentum": "Momentum",
    "reduction_ratio": "Reduction ratio ρ",
    "scale": "Scale V",
}
LINEAR: dict[str, Any] = {"momentum": {"linear": True}, "reduction_ratio": {"linear": True, "within": (-1, 2)}}
BANDS = "Lines are medians over seeds; bands reach from the 16th to the 84th percentile of bootstrap medians."
CUT = "What lies above three times the highest start is cut off."
RANKS = "The lowest point of the median over seeds, with its standard error, and the mean rank over bootstrap samples."
TARGETS = (
    "Wall time until a loss is first measured at or below a target. A line ends where half of the seeds go no lower."
)
RITZ = "From the smallest to the largest Ritz value of the Hessian that a step has met, by the solver's own products."
SOLVED = "The network at the end of the first seed, the true solution, and the difference of the two, on the test grid."
PERFORMANCE = (
    "Share of targets that an optimiser reaches within a multiple of the fastest one's time (Dolan & Moré 2002). "
    "A problem has the targets L + τ (F − L), τ = 0.1, 0.01, 0.001 and 0.0001: "
    "F is the highest first training loss, L the lowest."
)

Runs = Mapping[str, Sequence[statistics.Lines]]


class Section(NamedTuple):
    """Figures under one heading, with what is to be said about all of them."""

    heading: str
    note: str
    pictures: list[Picture]


class Solution(NamedTuple):
    """A solved equation on a grid of two named axes; the values' rows go along the second axis."""

    axes: dict[str, np.ndarray]
    prediction: np.ndarray
    truth: np.ndarray


def sections(
    folder: pathlib.Path, runs: Runs, labels: Mapping[str, str], solutions: Mapping[str, Solution]
) -> list[Section]:
    """All figures of a training run or a comparison; those that nothing was measured for are left out.

    Args:
      folder: for the files of the figures.
      runs: optimiser to the lines of each of its seeds.
      labels: of the losses.
      solutions: optimiser to its solution of an equation, for problems that are one.
    """
    styles = figures.styles(runs)
    folder.mkdir(exist_ok=True)
    bands = BANDS if any(len(seeds) > 1 for seeds in runs.values()) else ""

    def pictures(names: Sequence[str], draw: Callable[[str], tuple[str, Figure, Table] | None]) -> list[Picture]:
        """What `draw` makes of each name: title, figure and table."""
        made = {name: draw(name) for name in names}
        return [
            figures.save(figure, folder / re.sub(r"[^\w-]", "-", name), title, table)
            for name, (title, figure, table) in ((name, one) for name, one in made.items() if one)
        ]

    def losses(name: str) -> tuple[str, Figure, Table] | None:
        loss, _, x = name.partition("-")
        curves = statistics.curves(runs, x, loss)
        title = labels[loss]
        return (title, figures.losses(curves, styles, x), tables.along(curves, x)) if curves else None

    def targets(name: str) -> tuple[str, Figure, Table] | None:
        loss = name.removeprefix("target-")
        curves = profiles.time_to_target(runs, loss)
        title = f"Time to a {labels[loss][0].lower()}{labels[loss][1:]}"
        if len(runs) < 2 or not curves:  # of one optimiser it is its loss against wall time, turned
            return None
        return title, figures.targets(curves, styles, labels[loss]), tables.targets(curves)

    def ranking(name: str) -> tuple[str, Figure, Table] | None:
        loss = name.removeprefix("ranking-")
        found = {name: statistics.profiles(seeds, "step", loss)[1] for name, seeds in runs.items()}
        found = {name: values for name, values in found.items() if values.size}
        if len(found) < 2:
            return None
        ranks = statistics.rankings(found)
        return labels[loss], figures.rankings(ranks, styles), tables.ranks(ranks)

    def quantity(name: str) -> tuple[str, Figure, Table] | None:
        curves = statistics.curves(runs, "step", name)
        if len({float(value) for curve in curves.values() for value in curve.median}) < 2:  # nothing to see
            return None
        figure = figures.curves(curves, styles, "Steps", **LINEAR.get(name, {}))
        return QUANTITIES[name], figure, tables.along(curves, "step")

    def ritz(name: str) -> tuple[str, Figure, Table] | None:
        largest, smallest = (statistics.curves(runs, "step", f"{end}_ritz") for end in ("largest", "smallest"))
        if not smallest:
            return None
        return "Extreme Ritz values", figures.spectrum(smallest, largest, styles), tables.spectrum(smallest, largest)

    def solution(name: str) -> tuple[str, Figure, Table]:
        found = solutions[name.removeprefix("solution-")]
        return name.removeprefix("solution-"), figures.solution(*found), tables.solution(found.prediction, found.truth)

    with matplotlib.rc_context(figures.STYLE):
        found = [
            Section("The solution", SOLVED, pictures([f"solution-{name}" for name in solutions], solution)),
            Section("Loss against wall time", f"{bands} {CUT}", pictures(["train-seconds", "test-seconds"], losses)),
            Section("Time to target", TARGETS, pictures(["target-train", "target-test"], targets)),
            Section("Loss against steps", f"{bands} {CUT}", pictures(["train-step", "test-step"], losses)),
            Section("Ranking", RANKS, pictures(["ranking-train", "ranking-test"], ranking)),
            Section("Adaptive quantities", bands, pictures(list(QUANTITIES), quantity)),
            Section("Spectrum", RITZ, pictures(["spectrum"], ritz)),
        ]
    return [section for section in found if section.pictures]


def performance(folder: pathlib.Path, runs: Sequence[Runs]) -> list[Section]:
    """The performance profile over several problems, of the optimisers that all of them have."""
    profile = profiles.over_problems([statistics.curves(problem, "seconds", "train") for problem in runs])
    if not profile:
        return []
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context(figures.STYLE):
        figure = figures.performance(profile, figures.styles(profile))
        picture = figures.save(figure, folder / "performance", "Performance profile", tables.performance(profile))
    return [Section("All problems at once", PERFORMANCE, [picture])]
