"""One page for a result folder: what was measured, beside what the paper measured, readable without a network."""

import base64
import io
import math
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from saddlefree.lab import paper, statistics
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import read_json, read_lines

INK = "#010203"  # stands for the text's colour: in an SVG it becomes currentColor
STYLE: Any = {
    **dict.fromkeys(
        ["axes.edgecolor", "axes.labelcolor", "grid.color", "text.color", "xtick.color", "ytick.color"], INK
    ),
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "saddlefree",
    "text.parse_math": False,
}
# Two groups of four colours that colour-blind readers tell apart, on white and on black; dashes tell the groups apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8f5be8", "#b88600", "#2e9bd6", "#a8456b")
WIDTH = 23  # of a name in a figure, in letters
DASHES = ("solid", "dashed", "dotted", "dashdot")
LOSSES = ("train", "val", "test")
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
MARKDOWN = str.maketrans({"\\": "\\\\", "|": "\\|", "&": "&amp;", "<": "&lt;"})
LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
    | {"±": r"$\pm$", "∞": r"$\infty$", "–": "--"}
)

WRITERS = "`saddlefree train`, `saddlefree compare` or `saddlefree study`"
ROW = [*LOSSES, *(f"{loss}_error" for loss in LOSSES), "optimiser", "seeds", "diverged", "best_val", "seconds"]

Runs = Mapping[str, Sequence[statistics.Lines]]


class Cell(NamedTuple):
    """A figure of a table, the paper's figure for it, and whether it is the best of its column."""

    text: str
    paper: str = ""
    best: bool = False


class Table(NamedTuple):
    """A table, its first column being names."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]


class Picture(NamedTuple):
    """A figure, as it stands in the page, and its caption where it does not say itself what it shows."""

    content: Markup
    caption: str = ""


class Section(NamedTuple):
    """Figures under one heading, with what is to be said about all of them."""

    heading: str
    note: str
    pictures: list[Picture]


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes `report.html`, `table.md`, `table.tex` and `figures/` into a result folder; returns the page's path.

    Args:
      folder: as `saddlefree train`, `saddlefree compare` or `saddlefree study` writes it.
    """
    config = _read(folder / "config.json", "command", "title")
    if config["command"] == "study":
        summary, diverged = "", {}
        tables = [
            Table(table["caption"], table["columns"], [[Cell(_text(value)) for value in row] for row in table["rows"]])
            for table in config.get("tables", [])
        ]
        figures = [_embed(folder / figure["file"], figure["caption"]) for figure in config.get("figures", [])]
        sections = [Section("Figures", "", figures)] if figures else []
    else:
        _require(folder / "config.json", config, ["problem", "optimisers", "seeds", "epochs"])
        found = _read_runs(folder / "metrics.jsonl", config)
        runs = {name: list(seeds.values()) for name, seeds in found.items()}
        diverged = {name: [s for s in seeds if statistics.diverged(seeds[s])] for name, seeds in found.items()}
        if config["command"] == "compare":
            rows = _read(folder / "summary.json", "rows")["rows"]
            for row in rows:
                _require(folder / "summary.json", row, ROW)
        else:
            rows = [statistics.summarise(name, seeds) for name, seeds in runs.items()]
        test = config.get("test", "loss")
        summary, tables = _sentence(config, rows, test), [results(config["problem"], rows, test)]
        sections = _sections(folder / "figures", runs, _labels(test))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("saddlefree.lab"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html").render(
        config=config, summary=summary, tables=tables, sections=sections, diverged=diverged
    )
    for name, content in (("table.md", map(_markdown, tables)), ("table.tex", map(_latex, tables))):
        (folder / name).write_text("\n".join(content), "utf-8")
    (folder / "report.html").write_text(page, "utf-8")
    return folder / "report.html"


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
    return _short(rounded)


def results(problem: str, rows: Sequence[Mapping[str, Any]], test: str = "loss") -> Table:
    """The final values of each optimiser, with the paper's where it has them.

    Args:
      problem: its name.
      rows: as `statistics.summarise` returns them.
      test: what the test figure is.
    """
    accuracy = ["Accuracy, %"] if any("accuracy" in row for row in rows) else []
    columns = ["Optimiser", *_labels(test).values(), *accuracy, "Best validation", "Diverged", "ms per step", "Seconds"]
    lowest = {loss: min((row[loss] for row in rows if row[loss] is not None), default=math.nan) for loss in LOSSES}
    table = Table("Final values: medians over seeds ± bootstrap errors", columns, [])
    for row in rows:
        name = row["optimiser"]
        theirs = paper.RESULTS.get((problem, name))
        cells = [Cell(name, paper.LABELS[name] if theirs else "")]
        for loss in LOSSES:
            beside = _plus_minus(*getattr(theirs, loss)) if theirs else ""
            cells.append(Cell(_with_error(row, loss), beside, len(rows) > 1 and row[loss] == lowest[loss]))
        figures = [_text(row.get("accuracy"), 100)] if accuracy else []
        figures += [_text(row["best_val"]), f"{int(row['diverged'])} of {row['seeds']}"]
        figures += [_text(row.get("seconds_per_step"), 1000), _text(row["seconds"])]
        table.rows.append(cells + [Cell(figure) for figure in figures])
    return table


def _labels(test: str) -> dict[str, str]:
    return {"train": "Training loss", "val": "Validation loss", "test": f"Test {test}"}


def _short(text: str) -> str:
    """1e-05 as 1e-5."""
    return text.replace("e+", "e").replace("e-0", "e-").replace("e0", "e")


def _read(path: pathlib.Path, *keys: str) -> dict[str, Any]:
    """The object in a JSON file, which must have these keys."""
    if not path.exists():
        raise UserError(f"{path} is missing; {WRITERS} writes it")
    found = read_json(path)
    _require(path, found, keys)
    return found


def _require(path: pathlib.Path, found: Any, keys: Iterable[str]) -> None:
    missing = [key for key in keys if key not in found] if isinstance(found, dict) else ["object"]
    if missing:
        raise UserError(f"{path} has no {', '.join(missing)}; {WRITERS} writes it")


def _read_runs(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, dict[int, statistics.Lines]]:
    """Optimiser to seed to what it logged."""
    found: dict[str, dict[int, Any]] = {name: {} for name in config["optimisers"]}
    only = {"optimiser": next(iter(found)), "seed": config["seeds"][0]}  # where a run has one, lines do not say it
    for index, line in enumerate(read_lines(path), start=1):
        line = only | line if isinstance(line, dict) else {}
        if not {"step", "seconds", "train"} <= line.keys() or line["optimiser"] not in found:
            raise UserError(f"{path}, line {index} is damaged: delete the line, or run again")
        found[line["optimiser"]].setdefault(line["seed"], []).append(line)
    if not any(found.values()):
        raise UserError(f"{path} is missing or empty; {WRITERS} writes it")
    return {name: seeds for name, seeds in found.items() if seeds}


def _sentence(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], test: str) -> Markup:
    """What was run, and what came out."""
    loss = "train" if all(row["test"] is None for row in rows) else "test"
    budget, seeds = config.get("budget"), len(config["seeds"])
    who = rows[0]["optimiser"] if len(rows) == 1 else f"{len(rows)} optimisers"
    length = f"{budget:g} seconds" if budget else f"{config['epochs']:,g} epochs"
    start = f"{who} on {config['problem']}, {seeds} seed{'s' * (seeds > 1)}, {length}"
    finite = [row for row in rows if row[loss] is not None]
    if not finite:
        return Markup("{}: most seeds diverged.").format(start)
    best = min(finite, key=lambda row: row[loss])
    lowest, by = ("", "") if len(rows) == 1 else ("lowest median ", f", by {best['optimiser']}")
    what = f"test {test}" if loss == "test" else "training loss"
    figure = _with_error(best, loss)
    return Markup('{}: {}{} <span class="number">{}</span>{}.').format(start, lowest, what, figure, by)


def _with_error(row: Mapping[str, Any], loss: str) -> str:
    """A median ± its error. Where most seeds diverged the median is ∞; fewer can make the error so."""
    median, error = row[loss], row[f"{loss}_error"]
    if median is None:
        return "∞" if 2 * row["diverged"] >= row["seeds"] else "–"
    return _plus_minus(median, math.inf if error is None else error) if row["seeds"] > 1 else number(median)


def _plus_minus(median: float, error: float) -> str:
    return f"{number(median)} ± {number(error, 2, like=median)}"


def _text(value: Any, factor: float = 1) -> str:
    return "–" if value is None else number(factor * value) if isinstance(value, float) else str(value)


def _rows(table: Table, escape: Mapping[int, str], between: str) -> list[str]:
    """The head of a table and its rows, as text."""
    beside = [[cell.text + (f" (paper: {cell.paper})" if cell.paper else "") for cell in row] for row in table.rows]
    return [between.join(" ".join(text.translate(escape).split()) for text in row) for row in [table.columns, *beside]]


def _markdown(table: Table) -> str:
    head, *rows = (f"| {row} |" for row in _rows(table, MARKDOWN, " | "))
    return "\n".join([table.caption.translate(MARKDOWN), "", head, "| --- " * len(table.columns) + "|", *rows, ""])


def _latex(table: Table) -> str:
    """For the package booktabs."""
    head, *rows = (f"  {row} \\\\" for row in _rows(table, LATEX, " & "))
    begin = [
        f"% {' '.join(table.caption.split())}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"  \toprule",
        head,
    ]
    return "\n".join([*begin, r"  \midrule", *rows, r"  \bottomrule", r"\end{tabular}", ""])


def _sections(folder: pathlib.Path, runs: Runs, labels: Mapping[str, str]) -> list[Section]:
    """All figures of a training run or a comparison; those that nothing was measured for are left out."""
    styles = {name: {"color": COLOURS[i % 8], "linestyle": DASHES[i // 4 % 4]} for i, name in enumerate(runs)}
    folder.mkdir(exist_ok=True)
    time, steps, ranking, adaptive = (list[Picture]() for _ in range(4))
    with matplotlib.rc_context(STYLE):
        for loss in ("train", "test"):
            for x, along, pictures in (("seconds", "Wall time, s", time), ("step", "Steps", steps)):
                if curves := statistics.curves(runs, x, loss):
                    figure = _lines(curves, styles, along, within=(-math.inf, _top(curves.values())))
                    pictures.append(_save(figure, folder / f"{loss}-{x}", labels[loss]))
            profiles = {name: statistics.profiles(seeds, "step", loss)[1] for name, seeds in runs.items()}
            profiles = {name: values for name, values in profiles.items() if values.size}
            if len(profiles) > 1:
                figure = _ranks(statistics.rankings(profiles), styles)
                ranking.append(_save(figure, folder / f"ranking-{loss}", labels[loss]))
        for name, label in QUANTITIES.items():
            if curves := statistics.curves(runs, "step", name):
                adaptive.append(_save(_lines(curves, styles, "Steps", **LINEAR.get(name, {})), folder / name, label))
    bands = BANDS if any(len(seeds) > 1 for seeds in runs.values()) else ""
    sections = [
        Section("Loss against wall time", f"{bands} {CUT}", time),
        Section("Loss against steps", f"{bands} {CUT}", steps),
        Section("Ranking", RANKS, ranking),
        Section("Adaptive quantities", bands, adaptive),
    ]
    return [section for section in sections if section.pictures]


def _top(curves: Iterable[statistics.Curve]) -> float:
    """Three times the highest start: what diverges must not flatten the rest, nor one that has at its first value."""
    starts = sorted(float(curve.median[0]) for curve in curves)
    if starts[(len(starts) - 1) // 2] <= 0:  # a loss that may be negative has no scale to cut at
        return math.inf
    return 3 * max(start for start in starts if start <= 1e3 * starts[(len(starts) - 1) // 2])


def _lines(
    curves: Mapping[str, statistics.Curve],
    styles: Mapping[str, Any],
    along: str,
    within: tuple[float, float] = (-math.inf, math.inf),
    linear: bool = False,
) -> Figure:
    """Medians with their bands; logarithmic where nothing is negative, and cut off outside of `within`."""
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    values = np.concatenate([np.ravel([curve.low, curve.median]) for curve in curves.values()])
    values = np.clip(values[np.isfinite(values)], *within)
    if not linear and np.all(values >= 0):
        values = values[values > 0]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    for name, curve in curves.items():
        # ∞ becomes a place above the frame, so that lines and bands are seen to leave.
        median, *band = (np.minimum(part, high + abs(high) + 10 * (high - low)) for part in curve[1:])
        axes.fill_between(curve.x, *band, color=styles[name]["color"], alpha=0.2, linewidth=0)
        axes.plot(curve.x, median, label=textwrap.fill(name, WIDTH), **styles[name])
    axes.set(xlabel=along, xscale="log")
    _label(axes.xaxis)
    if low > 0 and not linear:
        axes.set(yscale="log", ylim=(low / 1.2, high * 1.2))
        _label(axes.yaxis)
    else:
        space = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - space, high + space)
    return figure


def _ranks(ranks: Mapping[str, statistics.Rank], styles: Mapping[str, Any]) -> Figure:
    """Lowest losses with their standard errors, best on top, and the mean ranks beside them."""
    figure = Figure(figsize=(4.6, 1 + 0.32 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for row, (name, rank) in enumerate(ranks.items()):
        if math.isfinite(rank.lowest):
            error = rank.error if math.isfinite(rank.error) else 0.0
            axes.errorbar(rank.lowest, row, xerr=error, fmt="o", color=styles[name]["color"])
        beside = f"{rank.rank:.1f}" + (f" ± {rank.rank_error:.1f}" if math.isfinite(rank.rank_error) else "")
        axes.text(1.03, row, beside, transform=axes.get_yaxis_transform(), verticalalignment="center")
    axes.text(1.03, -0.8, "mean rank", transform=axes.get_yaxis_transform(), verticalalignment="center", alpha=0.7)
    axes.set(xlabel="Lowest median", xscale="log", ylim=(len(ranks) - 0.5, -0.5))
    axes.set_yticks(range(len(ranks)), [textwrap.fill(name, WIDTH) for name in ranks])
    axes.grid(visible=False, axis="y")
    _label(axes.xaxis)
    return figure


def _label(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain text: every power of ten, or more where there are few."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,), numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(f"{value:g}")))


def _save(figure: Figure, path: pathlib.Path, title: str) -> Picture:
    """Writes a figure as PNG, on white, and as SVG, whose text takes the colour of the page."""
    figure.axes[0].set_title(title, loc="left", pad=10)
    names = figure.axes[0].get_legend_handles_labels()[1]
    if names:
        longest = min(max(map(len, names)), WIDTH)
        figure.legend(loc="outside lower center", ncols=min(3, 51 // (longest + 2)))
    figure.savefig(path.with_suffix(".png"), dpi=200, facecolor="white")
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
    svg = file.getvalue().replace(INK, "currentColor")
    path.with_suffix(".svg").write_text(svg, "utf-8")
    return Picture(Markup(svg[svg.index("<svg") :]))


def _embed(path: pathlib.Path, caption: str) -> Picture:
    """A study's figure as an image, in which no script of an SVG can run."""
    kinds = {".png": "image/png", ".svg": "image/svg+xml"}
    if path.suffix not in kinds or not path.is_file():
        raise UserError(f"{path} must be a PNG or an SVG file; `saddlefree study` writes it")
    data = base64.b64encode(path.read_bytes()).decode()
    return Picture(Markup('<img src="data:{};base64,{}" alt="{}">').format(kinds[path.suffix], data, caption), caption)
