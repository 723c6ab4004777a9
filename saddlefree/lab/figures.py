"""Figures of results: their style, curves and rankings over seeds, trials of a search, and how they are kept."""

import io
import math
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, SymmetricalLogLocator

from saddlefree.lab import profiles, statistics
from saddlefree.lab.tables import LOST, STATUSES, Table, mean_rank, short

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
AXES = {"seconds": "Seconds", "step": "Steps"}
DASHES = ("solid", "dashed", "dotted", "dashdot")
WIDTH = 23  # of a name in a figure, in letters
MARKS: dict[str, Any] = {
    "finished": {"color": COLOURS[0], "marker": "o"},
    "stopped": {"color": COLOURS[1], "marker": "v"},
    "unfinished": {"color": COLOURS[2], "marker": "D"},
    "diverged": {"color": COLOURS[3], "marker": "x", "markeredgewidth": 1.8},
    "failed": {"color": COLOURS[4], "marker": "P"},
    "best": {"color": INK, "marker": "o", "markerfacecolor": "none", "markersize": 12},
}


class Picture(NamedTuple):
    """A figure, as it stands in the page, its caption where it does not say itself what it shows, and its table."""

    content: Markup
    caption: str = ""
    table: Table | None = None
    wide: bool = False


def panel(width: float = 4.6, height: float = 3.6) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, its size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def styles(names: Iterable[str]) -> dict[str, Any]:
    """A line's colour and dashes for each name."""
    return {name: {"color": COLOURS[i % 8], "linestyle": DASHES[i // 4 % 4]} for i, name in enumerate(names)}


def top(curves: Iterable[statistics.Curve]) -> float:
    """Three times the highest start: what diverges must not flatten the rest, nor one that has at its first value."""
    starts = sorted(float(curve.median[0]) for curve in curves)
    if starts[(len(starts) - 1) // 2] <= 0:  # a loss that may be negative has no scale to cut at
        return math.inf
    return 3 * max(start for start in starts if start <= 1e3 * starts[(len(starts) - 1) // 2])


def curves(
    curves: Mapping[str, statistics.Curve],
    styles: Mapping[str, Any],
    along: str,
    within: tuple[float, float] = (-math.inf, math.inf),
    linear: bool = False,
) -> Figure:
    """Medians with their bands; logarithmic where nothing is negative, and cut off outside of `within`."""
    figure, axes = panel()
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
    label(axes.xaxis)
    if low > 0 and not linear:
        axes.set(yscale="log", ylim=(low / 1.2, high * 1.2))
        label(axes.yaxis)
    else:
        space = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - space, high + space)
    return figure


def losses(found: Mapping[str, statistics.Curve], styles: Mapping[str, Any], along: str) -> Figure:
    """Curves of a loss along one of AXES, cut off where they are far above their start."""
    return curves(found, styles, AXES[along], within=(-math.inf, top(found.values())))


def performance(found: profiles.Profile, styles: Mapping[str, Any]) -> Figure:
    """Shares of targets that are reached against the time over that of the fastest."""
    figure, axes = panel()
    finite = {name: ratios[np.isfinite(ratios)] for name, ratios in found.items()}
    end = 2 * max((float(ratios.max()) for ratios in finite.values() if len(ratios)), default=1.0)
    for name, ratios in finite.items():
        shares = np.arange(len(ratios) + 1) / len(found[name])
        x, y = np.concatenate([[1.0], ratios, [end]]), np.append(shares, shares[-1])
        axes.step(x, y, where="post", label=textwrap.fill(name, WIDTH), **styles[name])
    axes.set(xlabel="Time over that of the fastest", xscale="log", xlim=(0.95, end))
    axes.set(ylabel="Share of targets", ylim=(-0.02, 1.02))
    label(axes.xaxis)
    return figure


def targets(found: Mapping[str, statistics.Curve], styles: Mapping[str, Any], label: str) -> Figure:
    """Wall time against the loss to be reached, which falls to the right."""
    figure = curves(found, styles, f"{label} to be reached")
    figure.axes[0].set_ylabel(AXES["seconds"])
    figure.axes[0].invert_xaxis()
    return figure


def spectrum(
    smallest: Mapping[str, statistics.Curve], largest: Mapping[str, statistics.Curve], styles: Mapping[str, Any]
) -> Figure:
    """Bands from the smallest to the largest Ritz value; the axis is linear around 0."""
    figure, axes = panel()
    ends = np.concatenate([np.abs(curve.median) for curve in (*smallest.values(), *largest.values())])
    top = float(ends[np.isfinite(ends)].max(initial=1e-30))
    for name in smallest:
        low, high, style = smallest[name], largest[name], styles[name]
        axes.fill_between(low.x, low.median, np.interp(low.x, high.x, high.median), color=style["color"], alpha=0.15)
        axes.plot(high.x, high.median, label=textwrap.fill(name, WIDTH), **style)
        axes.plot(low.x, low.median, **style)
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set(xlabel="Steps", xscale="log")
    axes.set_yscale("symlog", linthresh=1e-3 * top)
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1e-3 * top))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(f"{value:g}").replace("-", "−", 1)))
    label(axes.xaxis)
    return figure


def solution(axes: Mapping[str, np.ndarray], prediction: np.ndarray, truth: np.ndarray) -> Figure:
    """Prediction, truth and error beside each other; the first two share their colours."""
    figure = Figure(figsize=(9.2, 3.0), layout="constrained")
    (across, x), (up, y) = axes.items()
    error = prediction - truth
    ends, widest = (float(truth.min()), float(truth.max())), float(np.abs(error).max()) or 1.0
    panels = [("Prediction", prediction, "viridis", ends), ("Truth", truth, "viridis", ends)]
    panels.append(("Error", error, "RdBu_r", (-widest, widest)))
    for place, (title, values, colours, (low, high)) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        image = place.pcolormesh(x, y, values, cmap=colours, vmin=low, vmax=high, shading="gouraud", rasterized=True)
        place.set(xlabel=across)
        place.set_title(title, fontweight="normal")
        place.grid(visible=False)
        bar = figure.colorbar(image, ax=place, format=FuncFormatter(lambda value, _: short(f"{value:.2g}")))
        bar.outline.set_visible(False)
    figure.axes[0].set_ylabel(up)
    return figure


def rankings(ranks: Mapping[str, statistics.Rank], styles: Mapping[str, Any]) -> Figure:
    """Lowest losses with their standard errors, best on top, and the mean ranks beside them."""
    figure, axes = panel(height=1 + 0.32 * len(ranks))
    for row, (name, rank) in enumerate(ranks.items()):
        if math.isfinite(rank.lowest):
            error = rank.error if math.isfinite(rank.error) else 0.0
            axes.errorbar(rank.lowest, row, xerr=error, fmt="o", color=styles[name]["color"])
        axes.text(1.03, row, mean_rank(rank), transform=axes.get_yaxis_transform(), verticalalignment="center")
    axes.text(1.03, -0.8, "mean rank", transform=axes.get_yaxis_transform(), verticalalignment="center", alpha=0.7)
    axes.set(xlabel="Lowest median", xscale="log", ylim=(len(ranks) - 0.5, -0.5))
    axes.set_yticks(range(len(ranks)), [textwrap.fill(name, WIDTH) for name in ranks])
    axes.grid(visible=False, axis="y")
    label(axes.xaxis)
    return figure


def tuning(trials: Sequence[Mapping[str, Any]], name: str, where: Mapping[str, Any], best: int | None) -> Figure:
    """Last validation losses against one hyperparameter, the best ringed.

    On the top edge are trials that diverged or failed, and losses above three times the upper quartile of all, which
    would flatten the rest; where losses may be negative, those further above it than three times its distance from the
    lowest. A value outside of the searched range, as the registered one may be, is on the edge next to it.

    Args:
      trials: as `trials.json` of a tuning folder has them.
      name: of the hyperparameter.
      where: it was searched, as `config.json` has it: `range`, and whether its logarithm was drawn, `log`.
      best: the best trial's number.
    """
    figure, axes = panel()
    axes.set_xlabel(name)
    axes.spines.top.set_visible(True)
    low, high = where["range"]
    _stretch(axes, "x", low, high, where["log"])
    losses = [trial["val"] for trial in trials if trial["val"] is not None and trial["status"] not in LOST]
    if losses:
        _stretch(axes, "y", min(losses), _highest(losses), min(losses) > 0)
    else:
        axes.set(ylim=(0, 1), yticks=[])
    places: dict[str, list[tuple[float, float]]] = {}
    for trial in trials:
        value, loss = trial["values"].get(name), math.inf if trial["status"] in LOST else trial["val"]
        if value is not None and loss is not None:
            place = float(np.clip(value, *axes.get_xlim())), min(loss, axes.get_ylim()[1])
            places.setdefault(trial["status"], []).append(place)
            if trial["trial"] == best:
                places["best"] = [place]
    for status, mark in MARKS.items():
        if status in places:
            x, y = zip(*places[status], strict=True)
            axes.plot(x, y, linestyle="none", label=STATUSES.get(status, status), clip_on=False, zorder=3, **mark)
    return figure


def label(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain text: every power of ten, or more where there are few."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,), numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(f"{value:g}")))


def save_png(figure: Figure, path: pathlib.Path, title: str) -> None:
    """Gives a figure its title and legend, and writes it on white."""
    if len(figure.axes) == 1:
        figure.axes[0].set_title(title, loc="left", pad=10)
    else:
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize="medium", fontweight="bold")
    names = figure.axes[0].get_legend_handles_labels()[1]
    if names:
        longest = min(max(map(len, names)), WIDTH)
        figure.legend(loc="outside lower center", ncols=min(3, 51 // (longest + 2)))
    figure.savefig(path, dpi=200, facecolor="white")


def save(figure: Figure, path: pathlib.Path, title: str, table: Table | None = None) -> Picture:
    """Writes a figure as PNG, on white, and as SVG, whose text takes the colour of the page."""
    save_png(figure, path.with_suffix(".png"), title)
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
    svg = file.getvalue().replace(INK, "currentColor")
    path.with_suffix(".svg").write_text(svg, "utf-8")
    return Picture(Markup(svg[svg.index("<svg") :]), table=table, wide=len(figure.axes) > 1)


def _stretch(axes: Axes, axis: str, low: float, high: float, log: bool) -> None:
    """Makes an axis from `low` to `high`, with a little space at both ends."""
    space = max((high / low) ** 0.06, 1.1) if log else 0.06 * (high - low) or 1.0
    ends = (low / space, high * space) if log else (low - space, high + space)
    axes.set(**{f"{axis}scale": "log" if log else "linear", f"{axis}lim": ends})
    if log:
        label(getattr(axes, f"{axis}axis"))


def _highest(losses: Sequence[float]) -> float:
    """The highest loss that does not flatten the others."""
    low, quartile = min(losses), float(np.quantile(losses, 0.75))
    bound = 3 * quartile if low > 0 else quartile + 3 * (quartile - low)
    return max(loss for loss in losses if loss <= bound)
