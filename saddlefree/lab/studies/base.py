"""What studies share: how they are called, what they find, and how a figure is kept."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from saddlefree.lab.events import Listener
from saddlefree.lab.plan import Plan
from saddlefree.lab.task import Task

GREY = "#888888"
Record = dict[str, Any]


class Findings(NamedTuple):
    """What a study found."""

    lines: list[Record]  # the curves
    summary: Record  # the numbers
    figures: list[Record]  # file and caption of each
    tables: list[Record]  # caption, columns and rows of each


class Work(NamedTuple):
    """What a study is given."""

    folder: pathlib.Path  # for its figures and runs
    options: Mapping[str, Any]
    plans: Sequence[Plan]  # what it trains
    task: Task  # of the option `problem`; without this option it is empty
    listener: Listener


def save(figure: Figure, folder: pathlib.Path, name: str, caption: str, columns: int = 0) -> Record:
    """Writes a figure as PNG and SVG, the first axes' legend below it in so many columns, and returns its record."""
    if columns:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
    figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})
    return {"file": f"{name}.svg", "caption": caption}
