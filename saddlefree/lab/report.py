"""One page for a result folder: what was measured, beside what the paper measured, readable without a network."""

import base64
import collections
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib
from markupsafe import Markup

from saddlefree.lab import figures, statistics
from saddlefree.lab.errors import UserError
from saddlefree.lab.figures import Picture
from saddlefree.lab.metrics import read_json, read_lines
from saddlefree.lab.tables import (
    LOSSES,
    STATUSES,
    Table,
    labels,
    latex,
    markdown,
    number,
    of_study,
    results,
    tuning,
    with_error,
)

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
TRIALS = (
    "A point is the last validation loss of a trial. Crosses on the top edge are trials that diverged or failed. "
    "Losses far above their upper quartile are on the top edge too, and values outside of the searched range "
    "on the left or right one."
)

WRITERS = "`saddlefree train`, `saddlefree compare`, `saddlefree study` or `saddlefree tune`"
ROW = [*LOSSES, *(f"{loss}_error" for loss in LOSSES), "optimiser", "seeds", "diverged", "best_val", "seconds"]
TRIAL = ["trial", "values", "status", "val", "epoch"]

Runs = Mapping[str, Sequence[statistics.Lines]]


class Section(NamedTuple):
    """Figures under one heading, with what is to be said about all of them."""

    heading: str
    note: str
    pictures: list[Picture]


class Content(NamedTuple):
    """What a page shows of a folder, beside its configuration."""

    tables: list[Table]
    sections: list[Section]
    summary: str = ""
    troubles: Sequence[tuple[str, str]] = ()  # whose, and what
    commands: Sequence[str] = ()  # to be copied


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes `report.html`, `table.md`, `table.tex` and `figures/` into a result folder; returns the page's path.

    Args:
      folder: as `saddlefree train`, `saddlefree compare`, `saddlefree study` or `saddlefree tune` writes it.
    """
    config = _read(folder / "config.json", "command", "title")
    content = {"study": _study, "tune": _tuning}.get(config["command"], _comparison)(folder, config)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("saddlefree.lab"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html").render(config=config, **content._asdict())
    for name, written in (("table.md", map(markdown, content.tables)), ("table.tex", map(latex, content.tables))):
        (folder / name).write_text("\n".join(written), "utf-8")
    (folder / "report.html").write_text(page, "utf-8")
    return folder / "report.html"


def _study(folder: pathlib.Path, config: Mapping[str, Any]) -> Content:
    tables = [of_study(table) for table in config.get("tables", [])]
    pictures = [_embed(folder / figure["file"], figure["caption"]) for figure in config.get("figures", [])]
    return Content(tables, [Section("Figures", "", pictures)] if pictures else [])


def _comparison(folder: pathlib.Path, config: Mapping[str, Any]) -> Content:
    """Of several optimisers, or of one run."""
    _require(folder / "config.json", config, ["problem", "optimisers", "seeds", "epochs"])
    found = _read_runs(folder / "metrics.jsonl", config)
    runs = {name: list(seeds.values()) for name, seeds in found.items()}
    if config["command"] == "compare":
        rows = _read(folder / "summary.json", "rows")["rows"]
        for row in rows if isinstance(rows, list) else [rows]:
            _require(folder / "summary.json", row, ROW)
    else:
        rows = [statistics.summarise(name, seeds) for name, seeds in runs.items()]
    troubles = []
    for name, seeds in found.items():
        if diverged := [str(seed) for seed in seeds if statistics.diverged(seeds[seed])]:
            troubles.append((name, f"diverged with seed{'s' * (len(diverged) > 1)} {', '.join(diverged)}."))
    test = config.get("test", "loss")
    return Content(
        [results(config["problem"], rows, test)],
        _sections(folder / "figures", runs, labels(test)),
        _sentence(config, rows, test),
        troubles,
    )


def _tuning(folder: pathlib.Path, config: Mapping[str, Any]) -> Content:
    _require(folder / "config.json", config, ["problem", "optimiser", "searched"])
    trials, searched = _read_trials(folder / "trials.json"), config["searched"]
    summary = _read(folder / "summary.json", "best", "commands")
    best = None
    if summary["best"] is not None:
        _require(folder / "summary.json", summary["best"], ["trial", "val"])
        best = summary["best"]["trial"]
    (folder / "figures").mkdir(exist_ok=True)
    pictures = []
    with matplotlib.rc_context(figures.STYLE):
        for name, where in searched.items():
            _require(folder / "config.json", where, ["range", "log"])
            path = folder / "figures" / re.sub(r"\W", "-", f"val-{name}")
            pictures.append(figures.save(figures.tuning(trials, name, where, best), path, "Validation loss"))
    failed: dict[str, list[str]] = {}
    for trial in trials:
        if trial.get("error"):
            failed.setdefault(trial["error"], []).append(str(trial["trial"]))
    return Content(
        [tuning(trials, list(searched), best)],
        [Section("Validation loss against hyperparameters", TRIALS, pictures)],
        _tuned(config, trials, summary["best"]),
        [(f"Trial{'s' * (len(of) > 1)} {', '.join(of)}", f"failed: {error}") for error, of in failed.items()],
        summary["commands"],
    )


def _load(path: pathlib.Path) -> Any:
    """What is in a JSON file, which must be there."""
    if not path.exists():
        raise UserError(f"{path} is missing; {WRITERS} writes it")
    return read_json(path)


def _read(path: pathlib.Path, *keys: str) -> dict[str, Any]:
    """The object in a JSON file, which must have these keys."""
    found = _load(path)
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


def _read_trials(path: pathlib.Path) -> list[dict[str, Any]]:
    found = _load(path)
    if not isinstance(found, list) or not found:
        raise UserError(f"{path} has no trials; {WRITERS} writes it")
    for trial in found:
        _require(path, trial, TRIAL)
        if trial["status"] not in STATUSES:
            raise UserError(f"{path}: status must be one of {', '.join(STATUSES)}, got {trial['status']!r}")
    return found


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
    figure = with_error(best, loss)
    return Markup('{}: {}{} <span class="number">{}</span>{}.').format(start, lowest, what, figure, by)


def _tuned(config: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> Markup:
    """What was tried, and what came out."""
    counts = collections.Counter(trial["status"] for trial in trials)
    ends = ", ".join(f"{counts[status]} {words}" for status, words in STATUSES.items() if counts[status])
    count = f"{len(trials)} configuration{'s' * (len(trials) > 1)}"
    start = f"{config['optimiser']} on {config['problem']}, {count}: {ends}"
    if best is None:
        return Markup("{}. None has a finite validation loss.").format(start)
    figure = number(best["val"])
    text = '{}. Best validation loss <span class="number">{}</span>, of trial {}.'
    return Markup(text).format(start, figure, best["trial"])


def _sections(folder: pathlib.Path, runs: Runs, labels: Mapping[str, str]) -> list[Section]:
    """All figures of a training run or a comparison; those that nothing was measured for are left out."""
    styles = figures.styles(runs)
    folder.mkdir(exist_ok=True)
    time, steps, ranking, adaptive = (list[Picture]() for _ in range(4))
    with matplotlib.rc_context(figures.STYLE):
        for loss in ("train", "test"):
            for x, pictures in (("seconds", time), ("step", steps)):
                if curves := statistics.curves(runs, x, loss):
                    figure = figures.losses(curves, styles, x)
                    pictures.append(figures.save(figure, folder / f"{loss}-{x}", labels[loss]))
            profiles = {name: statistics.profiles(seeds, "step", loss)[1] for name, seeds in runs.items()}
            profiles = {name: values for name, values in profiles.items() if values.size}
            if len(profiles) > 1:
                figure = figures.rankings(statistics.rankings(profiles), styles)
                ranking.append(figures.save(figure, folder / f"ranking-{loss}", labels[loss]))
        for name, label in QUANTITIES.items():
            if curves := statistics.curves(runs, "step", name):
                adaptive.append(
                    figures.save(figures.curves(curves, styles, "Steps", **LINEAR.get(name, {})), folder / name, label)
                )
    bands = BANDS if any(len(seeds) > 1 for seeds in runs.values()) else ""
    sections = [
        Section("Loss against wall time", f"{bands} {CUT}", time),
        Section("Loss against steps", f"{bands} {CUT}", steps),
        Section("Ranking", RANKS, ranking),
        Section("Adaptive quantities", bands, adaptive),
    ]
    return [section for section in sections if section.pictures]


def _embed(path: pathlib.Path, caption: str) -> Picture:
    """A study's figure as an image, in which no script of an SVG can run."""
    kinds = {".png": "image/png", ".svg": "image/svg+xml"}
    if path.suffix not in kinds or not path.is_file():
        raise UserError(f"{path} must be a PNG or an SVG file; `saddlefree study` writes it")
    data = base64.b64encode(path.read_bytes()).decode()
    return Picture(Markup('<img src="data:{};base64,{}" alt="{}">').format(kinds[path.suffix], data, caption), caption)
