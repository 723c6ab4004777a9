"""Results that are kept: a JSON file for each problem, the curves beside it, and a page made of nothing else.

A file has a row for each optimiser, which is replaced when it is measured again.
"""

import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import matplotlib
import numpy as np

from saddlefree.lab import figures, optimisers, paper, problems, statistics, tables
from saddlefree.lab.metrics import read_json, read_lines, write_json, write_lines

POINTS = 50
"""Places of a curve that are kept."""
FIGURES = pathlib.PurePosixPath("figures/results")
"""Where the page has its figures."""

Record = dict[str, Any]


def holds(folder: pathlib.Path, part: str, name: str, plan: Record) -> bool:
    """Whether there are results by this name that were planned so."""
    return any(row["name"] == name and row["plan"] == plan for row in _read(folder, part)["rows"])


def add(
    folder: pathlib.Path,
    problem: str,
    name: str,
    compared: pathlib.Path,
    plan: Record,
    searched: pathlib.Path | None,
) -> None:
    """Adds an optimiser's row and curves.

    Args:
      folder: of the results.
      problem: its name.
      name: of the row.
      compared: the folder of `saddlefree compare` with this optimiser alone.
      plan: is kept with the row.
      searched: the folder of `saddlefree tune` that its hyperparameters are from.
    """
    config, (row,) = read_json(compared / "config.json"), read_json(compared / "summary.json")["rows"]
    ((optimiser, values),) = config["optimisers"].items()
    lines = list(read_lines(compared / "metrics.jsonl"))
    runs = {name: [[line for line in lines if line["seed"] == seed] for seed in config["seeds"]]}
    steps = max(line["step"] for line in lines)
    kept = {
        "name": name,
        **row,
        "optimiser": name,
        "method": optimiser,
        "steps": steps,
        "values": values,
        "batch_size": config["batch_size"][optimiser],
        "tuning": _search(searched) if searched else None,
        "versions": config["versions"],
        "machine": config["machine"],
        "plan": plan,
    }
    found = []
    for x in ("seconds", "step"):
        for y in ("train", "test"):
            for curve in statistics.curves(runs, x, y).values():
                chosen = np.unique(np.linspace(0, len(curve.x) - 1, POINTS).round().astype(int))
                columns = {key: _rounded(column[chosen]) for key, column in curve._asdict().items()}
                found.append({"name": name, "along": x, "loss": y, **columns})
    record = _read(folder, problem)
    record |= {"problem": problem, "data": {"partial": config["data"]["partial"]}}  # not where it lay on this machine
    _replace(folder, problem, record, kept)
    path = folder / f"{problem}.jsonl"
    write_lines(path, [line for line in read_lines(path) if line["name"] != name] + found)


def add_study(folder: pathlib.Path, name: str, made: pathlib.Path, plan: Record) -> None:
    """Adds a study: its tables, and its figures as PNG."""
    config = read_json(made / "config.json")
    pictures = []
    for figure in config["figures"]:
        file = pathlib.Path(figure["file"]).with_suffix(".png").name
        (folder / "studies").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made / file, folder / "studies" / f"{name}-{file}")
        pictures.append({"file": f"{name}-{file}", "caption": figure["caption"]})
    kept = {key: config[key] for key in ("title", "tables", "versions", "machine")}
    _replace(folder, "studies", _read(folder, "studies"), {"name": name, **kept, "figures": pictures, "plan": plan})


def write_page(folder: pathlib.Path, docs: pathlib.Path, left_out: Sequence[str]) -> None:
    """Writes `results.md` and its figures."""
    place = docs / FIGURES
    place.mkdir(parents=True, exist_ok=True)
    for problem in _parts(folder):
        with matplotlib.rc_context(figures.STYLE):
            for along, label in (("seconds", "Wall time, s"), ("step", "Steps")):
                for loss in ("train", "test"):
                    _draw(folder, problem, along, label, loss, place / f"{problem}-{loss}-{along}.png")
    for path in (folder / "studies").glob("*.png"):
        shutil.copyfile(path, place / path.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "left-out.json", list(left_out))
    (docs / "results.md").write_text(page(folder), "utf-8")


def page(folder: pathlib.Path) -> str:
    """The page: every figure of it is from the results in `folder`, what is said of them from `reading.md` there."""
    loader = jinja2.ChoiceLoader([jinja2.FileSystemLoader(folder), jinja2.PackageLoader("saddlefree.lab")])
    environment = jinja2.Environment(
        loader=loader,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )  # Markdown, which is not escaped
    text = environment.get_template("results.md").render(
        parts=[(name, problems.find(name).title, _read(folder, name)) for name in _parts(folder)],
        studies=_read(folder, "studies")["rows"],
        figures=FIGURES,
        left_out=read_json(folder / "left-out.json"),
        table=lambda name: tables.markdown(_table(folder, name)),
        hyperparameters=lambda name: tables.markdown(_hyperparameters(folder, name)),
        study_table=lambda table: tables.markdown(_study_table(table)),
        row=lambda name, row: _row(folder, name, row),
        number=tables.number,
        reach=lambda name, row, loss: _reach(folder, name, row, loss),
        paper=lambda name, row: paper.RESULTS[name, row],
    )
    return text.rstrip() + "\n"


def _table(folder: pathlib.Path, problem: str) -> tables.Table:
    """Final values, the paper's in a row below ours."""
    rows = _read(folder, problem)["rows"]
    full = tables.results(problem, rows, problems.find(problem).test)
    kept = [i for i, column in enumerate(full.columns) if column not in ("Best validation", "Seconds")]
    adam = next((row["train"] for row in rows if row["name"] == "adam"), None)
    columns = [full.columns[i] for i in kept] + ["Steps"] + (["Seconds to Adam's training loss"] if adam else [])
    found = tables.Table(full.caption, columns, [])
    for cells, row in zip(full.rows, rows, strict=True):
        more = [f"{row['steps']:,}"]
        if adam:
            more.append(tables.text(_reach(folder, problem, row["name"], adam)))
        texts = [cells[i].text for i in kept] + more
        found.rows.append([tables.Cell(text) for text in texts])
        if cells[0].paper:
            beside = [cells[i].paper for i in kept] + [""] * len(more)
            found.rows.append([tables.Cell(text and f"*{text}*") for text in beside])
    return found


def _hyperparameters(folder: pathlib.Path, problem: str) -> tables.Table:
    """The values that were used, and where they are from."""
    table = tables.Table("Hyperparameters", ["Optimiser", "From", "Values"], [])
    for row in _read(folder, problem)["rows"]:
        search = row["tuning"]
        if search:
            counts = ", ".join(f"{count} {status}" for status, count in search["trials"].items())
            source = f"search: {counts}" + ("; the registered ones won" if search["best"] == 0 else "")
        elif (problem, row["method"]) in paper.TUNED:
            source = "the paper"
        else:
            source = "defaults" if problem not in optimisers.find(row["method"]).tuned else "registered"
        changed = {**row["values"], "batch_size": row["batch_size"] or "all"}
        values = ", ".join(
            f"{name} {tables.short(f'{value:.4g}') if isinstance(value, float) else value}"
            for name, value in changed.items()
        )
        table.rows.append([tables.Cell(row["name"]), tables.Cell(source), tables.Cell(values)])
    return table


def _study_table(table: Mapping[str, Any]) -> tables.Table:
    rows = [[tables.Cell(tables.text(value)) for value in row] for row in table["rows"]]
    return tables.Table(table["caption"], table["columns"], rows)


def _reach(folder: pathlib.Path, problem: str, name: str, loss: float) -> float | None:
    """Seconds of training until the median training loss is that low, or None."""
    curve = _curves(folder, problem, "seconds", "train")[name]
    below = curve.median <= loss + 1e-3 * abs(loss)  # curves are kept to four digits
    return float(curve.x[below][0]) if below.any() else None


def _row(folder: pathlib.Path, problem: str, name: str) -> Record:
    return next(row for row in _read(folder, problem)["rows"] if row["name"] == name)


def _draw(folder: pathlib.Path, problem: str, along: str, label: str, loss: str, path: pathlib.Path) -> None:
    found = _curves(folder, problem, along, loss)
    if found:
        figure = figures.curves(found, figures.styles(found), label, within=(-np.inf, figures.top(found.values())))
        figures.save_png(figure, path, tables.labels(problems.find(problem).test)[loss])


def _curves(folder: pathlib.Path, problem: str, along: str, loss: str) -> dict[str, statistics.Curve]:
    lines = read_lines(folder / f"{problem}.jsonl")
    chosen = {line["name"]: line for line in lines if line["along"] == along and line["loss"] == loss}
    order = [row["name"] for row in _read(folder, problem)["rows"] if row["name"] in chosen]
    return {name: statistics.Curve(*(_array(chosen[name][key]) for key in statistics.Curve._fields)) for name in order}


def _search(folder: pathlib.Path) -> Record:
    trials, summary = read_json(folder / "trials.json"), read_json(folder / "summary.json")
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial["status"]] = counts.get(trial["status"], 0) + 1
    best = summary["best"]
    return {"trials": counts, "best": best["trial"], "val": best["val"], "registered": trials[0]["val"]}


def _parts(folder: pathlib.Path) -> list[str]:
    """Problems with results, in the registry's order."""
    return [name for name in problems.PROBLEMS if (folder / f"{name}.json").exists()]


def _read(folder: pathlib.Path, part: str) -> Record:
    path = folder / f"{part}.json"
    return read_json(path) if path.exists() else {"rows": []}


def _replace(folder: pathlib.Path, part: str, record: Record, row: Record) -> None:
    """Puts a row into the place of the one of its name; the order is the registry's, whichever was measured first."""
    order = list(optimisers.OPTIMISERS)
    rows = [old for old in record["rows"] if old["name"] != row["name"]] + [row]
    rows.sort(key=lambda row: (order.index(row["method"]) if "method" in row else 0, row["name"]))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{part}.json", {**record, "rows": rows})


def _rounded(values: np.ndarray) -> list[float]:
    return [json.loads(f"{value:.4g}") if np.isfinite(value) else np.inf for value in values]


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.inf if value is None else value for value in values])
