"""What studies share: how they are called, what they find, and how a figure is kept."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from matplotlib.figure import Figure

from saddlefree.lab.run import Display
from saddlefree.lab.task import Task

Record = dict[str, Any]


class Findings(NamedTuple):
    """What a study leaves, besides its figures."""

    lines: list[Record]  # the curves
    summary: Record  # the numbers
    figures: list[Record]  # file and caption
    tables: list[Record]  # caption, columns and rows


class Compute(Protocol):
    """Computes, and draws into `folder`."""

    def __call__(self, folder: pathlib.Path, options: Mapping[str, Any], task: Task, display: Display) -> Findings:
        """`task` is the one of the option `problem`, or empty where there is no such option."""


def save(figure: Figure, folder: pathlib.Path, name: str, caption: str, columns: int = 0) -> Record:
    """Writes a figure as PNG and SVG, with the first axes' legend below in so many columns, and returns its entry."""
    if columns:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
    figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})
    return {"file": f"{name}.svg", "caption": caption}
