"""Tables of results: how a number is written, what stands in a row, and the table as Markdown and LaTeX."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from saddlefree.lab import paper
from saddlefree.lab.statistics import Curve, Rank

LOSSES = ("train", "val", "test")
STATUSES = {
    "finished": "finished",
    "stopped": "stopped early",
    "unfinished": "unfinished",
    "diverged": "diverged",
    "failed": "failed",
}
LOST = ("diverged", "failed")
MARKDOWN = str.maketrans({"\\": "\\\\", "|": "\\|", "&": "&amp;", "<": "&lt;"})
LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
    | {"±": r"$\pm$", "∞": r"$\infty$", "–": "--"}
)


class Cell(NamedTuple):
    """A figure of a table, the paper's figure for it, and whether it is the best of its column, or of the best row."""

    text: str
    paper: str = ""
    best: bool = False


class Table(NamedTuple):
    """A table, its first column being names."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]


def of_texts(caption: str, columns: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of nothing but texts."""
    return Table(caption, list(columns), [[Cell(text) for text in row] for row in rows])


def number(value: float, digits: int = 3, like: float | None = None) -> str:
    """`value` to so many significant digits, written as is usual for a number of the size of `like`, or its own.

    >>> number(0.0004941), number(0.0237), number(0.00012, 2, like=0.0237), number(0.9997), number(0), number(math.inf)
    ('4.94e-4', '0.0237', '0.00012', '1.00', '0', '∞')
    """
    if value == 0 or math.isinf(value):
        return "∞" if value else "0"
    rounded = f"{value:.{digits - 1}e}"
    if 1e-2 <= abs(like or value) < 1e4 and abs(value) < 1e6:
        return f"{value:.{max(digits - 1 - int(rounded.partition('e')[2]), 0)}f}"
    return short(rounded)


def short(text: str) -> str:
    """1e-05 as 1e-5."""
    return text.replace("e+", "e").replace("e-0", "e-").replace("e0", "e")


def text(value: Any, factor: float = 1) -> str:
    """What stands in a cell for a value of any kind; a number is multiplied by `factor`."""
    return "–" if value is None else number(factor * value) if isinstance(value, float) else str(value)


def with_error(row: Mapping[str, Any], loss: str) -> str:
    """A median ± its error. Where most seeds diverged the median is ∞; fewer can make the error so."""
    median, error = row[loss], row[f"{loss}_error"]
    if median is None:
        return "∞" if 2 * row["diverged"] >= row["seeds"] else "–"
    return _plus_minus(median, math.inf if error is None else error) if row["seeds"] > 1 else number(median)


def labels(test: str) -> dict[str, str]:
    """What each loss is called, where the test figure is `test`."""
    return {"train": "Training loss", "val": "Validation loss", "test": f"Test {test}"}


def results(problem: str, rows: Sequence[Mapping[str, Any]], test: str = "loss") -> Table:
    """The final values of each optimiser, with the paper's where it has them.

    Args:
      problem: its name, or nothing where the paper has no figures to be shown.
      rows: as `statistics.summarise` returns them.
      test: what the test figure is.
    """
    accuracy = ["Accuracy, %"] if any("accuracy" in row for row in rows) else []
    columns = ["Optimiser", *labels(test).values(), *accuracy, "Best validation", "Diverged", "ms per step", "Seconds"]
    lowest = {loss: min((row[loss] for row in rows if row[loss] is not None), default=math.nan) for loss in LOSSES}
    table = Table("Final values: medians over seeds ± bootstrap errors", columns, [])
    for row in rows:
        name = row["optimiser"]
        theirs = paper.RESULTS.get((problem, name))
        cells = [Cell(name, paper.LABELS[name] if theirs else "")]
        for loss in LOSSES:
            beside = _plus_minus(*getattr(theirs, loss)) if theirs else ""
            cells.append(Cell(with_error(row, loss), beside, len(rows) > 1 and row[loss] == lowest[loss]))
        figures = [text(row.get("accuracy"), 100)] if accuracy else []
        figures += [text(row["best_val"]), f"{int(row['diverged'])} of {row['seeds']}"]
        figures += [text(row.get("seconds_per_step"), 1000), text(row["seconds"])]
        table.rows.append(cells + [Cell(figure) for figure in figures])
    return table


def along(curves: Mapping[str, Curve], x: str) -> Table:
    """Medians at a hundredth, a tenth and the end of the longest curve."""
    end = max(float(curve.x[-1]) for curve in curves.values())
    start = min(float(curve.x[0]) for curve in curves.values())
    places = [place for place in (end / 100, end / 10) if place > start] + [end]
    if x == "step":
        places = [float(round(place)) for place in places]
    heads = [f"step {place:,.0f}" if x == "step" else f"{number(place, 2)} s" for place in places]
    rows = []
    for name, curve in curves.items():
        medians = (float(np.interp(place, curve.x, curve.median, left=math.nan)) for place in places)
        rows.append([name, *("–" if math.isnan(value) else number(value) for value in medians)])
    return of_texts("Medians", ["Median at", *heads], rows)


def targets(curves: Mapping[str, Curve]) -> Table:
    """Seconds to three targets: at a third, two thirds and the end of the way down, in the logarithm."""
    losses = np.concatenate([curve.x for curve in curves.values()])
    ways = np.geomspace(losses.max(), losses.min(), 4)[1:] * (1 + 1e-9)
    heads = ["Seconds to a loss of", *(number(float(loss), 2) for loss in ways)]
    rows = []
    for name, curve in curves.items():
        below = (curve.median[curve.x <= loss] for loss in ways)
        rows.append([name, *(number(float(times[0])) if len(times) else "–" for times in below)])
    return of_texts("Time to target", heads, rows)


def ranks(found: Mapping[str, Rank]) -> Table:
    """Lowest medians and mean ranks, with their standard errors."""
    rows = []
    for name, rank in found.items():
        lowest = _plus_minus(rank.lowest, rank.error) if math.isfinite(rank.error) else number(rank.lowest)
        rows.append([name, lowest, mean_rank(rank)])
    return of_texts("Best first", ["Optimiser", "Lowest median", "Mean rank"], rows)


def mean_rank(rank: Rank) -> str:
    """With its standard error, where that is known."""
    return f"{rank.rank:.1f}" + (f" ± {rank.rank_error:.1f}" if math.isfinite(rank.rank_error) else "")


def spectrum(smallest: Mapping[str, Curve], largest: Mapping[str, Curve]) -> Table:
    """The extreme Ritz values at the start and at the end."""
    heads = ["Ritz value", "smallest, first step", "last", "largest, first step", "last"]
    ends = {name: [float(curve[name].median[i]) for curve in (smallest, largest) for i in (0, -1)] for name in smallest}
    return of_texts("Extreme Ritz values", heads, ([name, *map(number, values)] for name, values in ends.items()))


def solution(prediction: np.ndarray, truth: np.ndarray) -> Table:
    """How large the error is."""
    error = np.abs(prediction - truth)
    norm = float(np.linalg.norm(error) / np.linalg.norm(truth))
    row = map(number, (norm, float(error.max()), float(np.abs(truth).max())))
    return of_texts("On the test grid", ["Relative L2 error", "Largest error", "Largest true value"], [row])


def performance(found: Mapping[str, np.ndarray]) -> Table:
    """A performance profile at four places."""
    columns = ["Optimiser", "fastest", "within 2 ×", "within 10 ×", "reached"]
    rows = (
        [name, *(f"{100 * np.mean(ratios <= ratio):.0f}" for ratio in (1.0, 2.0, 10.0, np.finfo(float).max))]
        for name, ratios in found.items()
    )
    return of_texts("Share of the targets, in %", columns, rows)


def of_study(record: Mapping[str, Any]) -> Table:
    """A table as a study keeps it: caption, columns and rows of values."""
    return of_texts(record["caption"], record["columns"], (map(text, row) for row in record["rows"]))


def tuning(
    trials: Sequence[Mapping[str, Any]], names: Sequence[str], best: int | None = None, shown: int = 20
) -> Table:
    """The trials of a search, best first, those that diverged or failed last.

    Args:
      trials: as `trials.json` of a tuning folder has them.
      names: of the hyperparameters that were searched.
      best: the best trial's number; it comes first even where one that was stopped early had less.
      shown: how many, at most.
    """

    def order(trial: Mapping[str, Any]) -> tuple[bool, bool, float]:
        loss = math.inf if trial["val"] is None else trial["val"]
        return trial["trial"] != best, trial["status"] in LOST, loss

    kept = sorted(trials, key=order)[:shown]
    ended = sum(trial["status"] != "unfinished" for trial in trials)
    caption = f"{len(kept)} of {len(trials)} trials by last validation loss; {ended} have ended"
    caption += "" if best is None else ", and the best of those that finished is on top"
    table = Table(caption, ["Trial", *names, "Validation loss", "Epochs", "Status"], [])
    for trial in kept:
        figures = [text(trial["trial"]), *(text(trial["values"].get(name)) for name in names)]
        figures += ["∞" if trial["status"] == "diverged" else text(trial["val"]), f"{round(trial['epoch'], 2):,g}"]
        cells = [Cell(figure, best=trial["trial"] == best) for figure in [*figures, STATUSES[trial["status"]]]]
        table.rows.append(cells)
    return table


def markdown(table: Table) -> str:
    """The table, with its caption above if it has one."""
    head, *rows = (f"| {row} |" for row in _rows(table, MARKDOWN, " | "))
    caption = [table.caption.translate(MARKDOWN), ""] if table.caption else []
    return "\n".join([*caption, head, "| --- " * len(table.columns) + "|", *rows, ""])


def plain(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table without a caption."""
    return markdown(of_texts("", columns, rows))


def latex(table: Table) -> str:
    """The table for the package booktabs."""
    head, *rows = (f"  {row} \\\\" for row in _rows(table, LATEX, " & "))
    begin = [
        f"% {' '.join(table.caption.split())}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"  \toprule",
        head,
    ]
    return "\n".join([*begin, r"  \midrule", *rows, r"  \bottomrule", r"\end{tabular}", ""])


def _plus_minus(median: float, error: float) -> str:
    return f"{number(median)} ± {number(error, 2, like=median)}"


def _rows(table: Table, escape: Mapping[int, str], between: str) -> list[str]:
    """The head of a table and its rows, as text."""
    beside = [[cell.text + (f" (paper: {cell.paper})" if cell.paper else "") for cell in row] for row in table.rows]
    return [between.join(" ".join(text.translate(escape).split()) for text in row) for row in [table.columns, *beside]]
