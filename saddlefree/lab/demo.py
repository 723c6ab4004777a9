"""What `saddlefree demo` runs, and what it says of the results: read from the records, whatever they are."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from saddlefree.lab.display import plain


class Part(NamedTuple):
    """A command, what it shows, and what came out of it."""

    folder: str
    title: str
    command: str
    read: Callable[[Mapping[str, Any]], str]  # from summary.json


def _saddle(summary: Mapping[str, Any]) -> str:
    ends = {name: list(method["losses"].values())[-1] for name, method in summary["methods"].items()}
    newton = ends.pop("Newton")
    return f"Newton ends on the saddle, at {plain(newton)}; the others go past it, to {plain(max(ends.values()))}."


def _equation(summary: Mapping[str, Any]) -> str:
    rows = {row["optimiser"]: row for row in summary["rows"]}
    ours = rows.pop("minimise")
    if ours["train"] is None:
        return "minimise diverged: that is a defect, please report it."
    factors = [
        f"{plain(row['train'] / ours['train'])} times below {name}'s"
        for name, row in rows.items()
        if row["train"] is not None and row["train"] >= ours["train"]
    ]
    behind = [name for name, row in rows.items() if row["train"] is not None and row["train"] < ours["train"]]
    said = f"The loss of minimise is {' and '.join(factors)}." if factors else ""
    if behind:
        steps = round(ours["seconds"] / ours["seconds_per_step"])
        said += (
            f" It is above that of {', '.join(behind)}: this machine had time for {steps} of its steps only. Give all "
        )
        said += "of them more with --budget."
    return said.strip()


def _batches(summary: Mapping[str, Any]) -> str:
    low_rank, adam = (
        next(row["val"] for row in summary["rows"] if row["optimiser"] == name) for name in ("low-rank", "adam")
    )
    if low_rank is None or adam is None or low_rank > adam:
        return "Here low-rank did not help: that is a defect, please report it."
    return (
        f"Curvature lowers Adam's validation loss from {plain(adam)} to {plain(low_rank)}, with nothing tuned. "
        "Adam has its default rate here; docs/solvers.md says where a tuned Adam is enough."
    )


PARTS = (
    Part("saddle", "1. A saddle, and four methods that start beside it", "study saddle", _saddle),
    Part(
        "equation",
        "2. A physics-informed network, ten seconds of training for each method",
        "compare pinn-poisson --optimisers minimise,lbfgs,adam --seeds 1 --budget 10s "
        "--variant width=16 --variant points=400 --variant side_points=25",
        _equation,
    ),
    Part(
        "batches",
        "3. Mini-batches: Adam at its default rate, and low-rank over the same Adam",
        "compare digits --optimisers low-rank,adam --seeds 3 --epochs 30 "
        "--set low-rank.learning_rate=0.001 --set low-rank.decay=none "
        "--set adam.learning_rate=0.001 --set adam.decay=none",
        _batches,
    ),
)
