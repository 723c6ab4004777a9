"""One page for a result folder: what was measured, beside what the paper measured, readable without a network."""

import base64
import collections
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup

from saddlefree.lab import figures, statistics
from saddlefree.lab.errors import UserError
from saddlefree.lab.figures import Picture
from saddlefree.lab.metrics import read_json, read_lines, write_text
from saddlefree.lab.sections import Section, Solution, performance, sections
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

TRIALS = (
    "A point is the last validation loss of a trial. Crosses on the top edge are trials that diverged or failed. "
    "Losses far above their upper quartile are on the top edge too, and values outside of the searched range "
    "on the left or right one."
)

WRITERS = "`saddlefree train`, `saddlefree compare`, `saddlefree study` or `saddlefree tune`"
NUMBER = (int, float, type(None))
KINDS = {dict: "an object", list: "a list", str: "a text", NUMBER: "a number", int: "a whole number"}
CONFIG = {"problem": str, "optimisers": dict, "seeds": list, "epochs": NUMBER}
ROW = {
    **dict.fromkeys([*LOSSES, *(f"{loss}_error" for loss in LOSSES), "best_val", "seconds"], NUMBER),
    "optimiser": str,
    "seeds": int,
    "diverged": int,
}
LINE: dict[str, Any] = {"step": int, "seconds": NUMBER, "train": NUMBER, "optimiser": str, "seed": int}
TRIAL = {"trial": int, "values": dict, "status": str, "val": NUMBER, "epoch": NUMBER}


class Content(NamedTuple):
    """What a page shows of a folder, beside its configuration."""

    tables: list[Table]
    sections: list[Section]
    summary: str = ""
    troubles: Sequence[tuple[str, str]] = ()  # whose, and what
    commands: Sequence[str] = ()  # to be copied


class Page(NamedTuple):
    """Where it is, and its tables."""

    path: pathlib.Path
    tables: list[Table]


def write(folder: pathlib.Path) -> Page:
    """Writes `report.html`, `table.md`, `table.tex` and `figures/` into a result folder.

    Args:
      folder: as `saddlefree train`, `saddlefree compare`, `saddlefree study` or `saddlefree tune` writes it, or one
        that holds several of `saddlefree compare`.
    """
    try:
        return _write(folder)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # `_read` checks what every report needs; a value elsewhere can still be of any kind.
        raise UserError(f"{folder} cannot be shown ({error}): a file in it is damaged: restore it") from error


def _write(folder: pathlib.Path) -> Page:
    config: dict[str, Any]
    if not (folder / "config.json").exists() and (inside := _comparisons(folder)):
        config = {"title": f"{len(inside)} comparison{'s' * (len(inside) > 1)}"}
        config |= {key: next(iter(inside.values())).get(key) for key in ("versions", "machine")}
        content = _several(folder, inside)
    else:
        config = _read(folder / "config.json", {"command": str, "title": str})
        content = {"study": _study, "tune": _tuning}.get(config["command"], _comparison)(folder, config)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("saddlefree.lab"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html").render(config=config, **content._asdict())
    for name, written in (("table.md", map(markdown, content.tables)), ("table.tex", map(latex, content.tables))):
        write_text(folder / name, "\n".join(written))
    write_text(folder / "report.html", page)
    return Page(folder / "report.html", content.tables)


def _study(folder: pathlib.Path, config: Mapping[str, Any]) -> Content:
    tables = [of_study(table) for table in config.get("tables", [])]
    pictures = []
    for figure in config.get("figures", []):
        if not (path := folder / figure["file"]).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{folder / 'config.json'} is damaged: the figure {path} is not in {folder}")
        pictures.append(_embed(path, figure["caption"]))
    return Content(tables, [Section("Figures", "", pictures)] if pictures else [])


def _comparison(folder: pathlib.Path, config: Mapping[str, Any]) -> Content:
    """Of several optimisers, or of one run."""
    _require(folder / "config.json", config, CONFIG)
    found = _read_runs(folder / "metrics.jsonl", config)
    runs = {name: list(seeds.values()) for name, seeds in found.items()}
    if config["command"] == "compare":
        rows = _read_rows(folder)
    else:
        rows = [statistics.summarise(name, seeds) for name, seeds in runs.items()]
    troubles = []
    for name, seeds in found.items():
        if diverged := [str(seed) for seed in seeds if statistics.diverged(seeds[seed])]:
            troubles.append((name, f"diverged with seed{'s' * (len(diverged) > 1)} {', '.join(diverged)}."))
    test = config.get("test", "loss")
    return Content(
        [_results(config, rows)],
        sections(folder / "figures", runs, labels(test), _read_solutions(folder, config)),
        _sentence(config, rows, test),
        troubles,
    )


def _results(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Final values, beside the paper's unless it is a variant of its problem, which is another one."""
    return results("" if config.get("variant") else config["problem"], rows, config.get("test", "loss"))


def _comparisons(folder: pathlib.Path) -> dict[pathlib.Path, dict[str, Any]]:
    """The folders of comparisons in a folder, with their configurations."""
    found = {path.parent: _read(path, {"command": str}) for path in sorted(folder.glob("*/config.json"))}
    return {path: config for path, config in found.items() if config["command"] == "compare"}


def _several(folder: pathlib.Path, inside: Mapping[pathlib.Path, Mapping[str, Any]]) -> Content:
    """Of several comparisons, their tables, and the performance profile of the optimisers that all of them have."""
    tables, runs = [], []
    for each, config in inside.items():
        _require(each / "config.json", config, {"title": str, **CONFIG})
        rows = _read_rows(each)
        table = _results(config, rows)
        tables.append(table._replace(caption=f"{config['title']}. {table.caption}"))
        found = _read_runs(each / "metrics.jsonl", config)
        runs.append({name: list(seeds.values()) for name, seeds in found.items()})
    return Content(tables, performance(folder / "figures", runs))


def _tuning(folder: pathlib.Path, config: Mapping[str, Any]) -> Content:
    _require(folder / "config.json", config, {"problem": str, "optimiser": str, "searched": dict})
    trials, searched = _read_trials(folder / "trials.json"), config["searched"]
    summary = _read(folder / "summary.json", {"best": (dict, type(None)), "commands": list})
    best = None
    if summary["best"] is not None:
        _require(folder / "summary.json", summary["best"], {"trial": int, "val": NUMBER})
        best = summary["best"]["trial"]
    (folder / "figures").mkdir(exist_ok=True)
    pictures = []
    with matplotlib.rc_context(figures.STYLE):
        for name, where in searched.items():
            _require(folder / "config.json", where, {"range": list, "log": int})
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


def _read(path: pathlib.Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The object in a JSON file, which must have these entries."""
    found = _load(path)
    _require(path, found, kinds)
    return found


def _require(path: pathlib.Path, found: Any, kinds: Mapping[str, Any]) -> None:
    """Checks that entries are there and of their kinds."""
    missing = [key for key in kinds if key not in found] if isinstance(found, dict) else ["object"]
    if missing:
        raise UserError(f"{path} has no {', '.join(missing)}; {WRITERS} writes it")
    for key, kind in kinds.items():
        if not isinstance(found[key], kind):
            wanted = KINDS.get(kind, "an object")
            raise UserError(f"{path}: {key} must be {wanted}, got {str(found[key])[:40]!r}; {WRITERS} writes it")


def _read_runs(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, dict[int, statistics.Lines]]:
    """Optimiser to seed to what it logged."""
    found: dict[str, dict[int, Any]] = {name: {} for name in config["optimisers"]}
    # Where a run has one optimiser and one seed, lines do not say it.
    only = {"optimiser": next(iter(found), None), "seed": next(iter(config["seeds"]), None)}
    for index, line in enumerate(read_lines(path), start=1):
        line = only | line if isinstance(line, dict) else {}
        if not all(isinstance(line.get(key, ""), kind) for key, kind in LINE.items()) or line["optimiser"] not in found:
            raise UserError(f"{path}, line {index} is damaged: delete the line, or run again")
        found[line["optimiser"]].setdefault(line["seed"], []).append(line)
    if not any(found.values()):
        raise UserError(f"{path} is missing or empty; {WRITERS} writes it")
    return {name: seeds for name, seeds in found.items() if seeds}


def _read_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Of a comparison."""
    rows = _read(folder / "summary.json", {"rows": list})["rows"]
    for row in rows:
        _require(folder / "summary.json", row, ROW)
    return rows


def _read_solutions(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Solution]:
    """Optimiser to the solution of its first seed, where an equation was solved."""
    found = {}
    for name in config["optimisers"]:
        where = folder if config["command"] == "train" else folder / "runs" / name
        for path in (where / "solution.json", where / f"seed-{config['seeds'][0]}" / "solution.json"):
            if path.exists():
                record = _read(path, {"axes": dict, "prediction": list, "truth": list})
                try:
                    axes = {axis: np.array(values, float) for axis, values in record["axes"].items()}
                    solution = Solution(axes, *(np.array(record[key], float) for key in ("prediction", "truth")))
                    shapes = {
                        solution.prediction.shape,
                        solution.truth.shape,
                        tuple(len(a) for a in axes.values())[::-1],
                    }
                except (TypeError, ValueError):
                    shapes = set()
                if len(shapes) != 1 or len(axes) != 2:
                    raise UserError(f"{path} is damaged: delete it, or run again")
                if np.isfinite(solution.prediction).all():
                    found[name] = solution
    return found


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


def _embed(path: pathlib.Path, caption: str) -> Picture:
    """A study's figure as an image, in which no script of an SVG can run."""
    kinds = {".png": "image/png", ".svg": "image/svg+xml"}
    if path.suffix not in kinds or not path.is_file():
        raise UserError(f"{path} must be a PNG or an SVG file; `saddlefree study` writes it")
    data = base64.b64encode(path.read_bytes()).decode()
    return Picture(Markup('<img src="data:{};base64,{}" alt="{}">').format(kinds[path.suffix], data, caption), caption)
