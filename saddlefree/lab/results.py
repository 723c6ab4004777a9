"""Results that are kept: a JSON file for each problem, the curves beside it, and a page made of nothing else.

A file has a row for each optimiser, which is replaced when it is measured again.
"""

import collections
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jinja2
import matplotlib
import numpy as np

from saddlefree.lab import figures, optimisers, paper, problems, statistics, tables
from saddlefree.lab.errors import UserError
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
    for x in figures.AXES:
        for y in ("train", "test"):
            for curve in statistics.curves(runs, x, y).values():
                chosen = np.unique(np.linspace(0, len(curve.x) - 1, POINTS).round().astype(int))
                columns = {
                    key: [float(f"{value:.4g}") for value in column[chosen]] for key, column in curve._asdict().items()
                }
                found.append({"name": name, "along": x, "loss": y, **columns})
    record = _read(folder, problem)
    record |= {"problem": problem, "data": {"partial": config["data"]["partial"]}}  # not where it lay on this machine
    _replace(folder, problem, record, kept)
    path = folder / f"{problem}.jsonl"
    write_lines(path, [line for line in read_lines(path) if line["name"] != name] + found)


def add_study(folder: pathlib.Path, docs: pathlib.Path, name: str, made: pathlib.Path, plan: Record) -> None:
    """Adds a study: its tables to the results, its figures, as PNG, to the page's."""
    config = read_json(made / "config.json")
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    pictures = []
    for figure in config["figures"]:
        file = pathlib.Path(figure["file"]).with_suffix(".png").name
        shutil.copyfile(made / file, docs / FIGURES / f"{name}-{file}")
        pictures.append({"file": f"{name}-{file}", "caption": figure["caption"]})
    kept = {key: config[key] for key in ("title", "tables", "versions", "machine")}
    _replace(folder, "studies", _read(folder, "studies"), {"name": name, **kept, "figures": pictures, "plan": plan})


def write_page(folder: pathlib.Path, docs: pathlib.Path, left_out: Sequence[str]) -> None:
    """Writes `results.md` and the figures of its curves."""
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(figures.STYLE):
        for problem in _parts(folder):
            for (along, loss), found in _curves(folder, problem).items():
                figure = figures.losses(found, figures.styles(found), along)
                title = tables.labels(problems.find(problem).test)[loss]
                figures.save_png(figure, docs / FIGURES / f"{problem}-{loss}-{along}.png", title)
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
    records = {name: _read(folder, name) for name in _parts(folder)}
    rows = {(name, row["name"]): row for name, record in records.items() for row in record["rows"]}

    def find(part: str, name: str) -> Record:
        if (part, name) not in rows:
            raise UserError(f"{folder / 'reading.md'} speaks of {name} on {part}, which has no results")
        return rows[part, name]

    text = environment.get_template("results.md").render(
        parts=[(name, problems.find(name).title, record) for name, record in records.items()],
        studies=_read(folder, "studies")["rows"],
        figures=FIGURES,
        left_out=read_json(folder / "left-out.json"),
        table=lambda name: tables.markdown(_table(folder, name, records[name]["rows"])),
        hyperparameters=lambda name: tables.markdown(_hyperparameters(name, records[name]["rows"])),
        study_table=lambda table: tables.markdown(tables.of_study(table)),
        row=find,
        number=tables.number,
        paper=lambda name, row: paper.RESULTS[name, row],
    )
    return text.rstrip() + "\n"


def _table(folder: pathlib.Path, problem: str, rows: Sequence[Record]) -> tables.Table:
    """Final values, the paper's in a row below ours."""
    full = tables.results(problem, rows, problems.find(problem).test)
    kept = [i for i, column in enumerate(full.columns) if column not in ("Best validation", "Seconds")]
    adam = next((row["train"] for row in rows if row["name"] == "adam"), None)
    columns = [full.columns[i] for i in kept] + ["Steps"] + (["Seconds to Adam's training loss"] if adam else [])
    found, along_time = tables.Table(full.caption, columns, []), _curves(folder, problem)["seconds", "train"]
    for cells, row in zip(full.rows, rows, strict=True):
        more = [f"{row['steps']:,}"]
        if adam:
            more.append(tables.text(_reach(along_time[row["name"]], adam)))
        texts = [cells[i].text for i in kept] + more
        found.rows.append([tables.Cell(text) for text in texts])
        if cells[0].paper:
            beside = [cells[i].paper for i in kept] + [""] * len(more)
            found.rows.append([tables.Cell(text and f"*{text}*") for text in beside])
    return found


def _hyperparameters(problem: str, rows: Sequence[Record]) -> tables.Table:
    """The values that were used, and where they are from."""
    table = tables.Table("Hyperparameters", ["Optimiser", "From", "Values"], [])
    for row in rows:
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


def _reach(curve: statistics.Curve, loss: float) -> float | None:
    """Where a median is first as low as that, or None."""
    below = curve.median <= loss + 1e-3 * abs(loss)  # curves are kept to four digits
    return float(curve.x[below][0]) if below.any() else None


def _curves(folder: pathlib.Path, problem: str) -> dict[tuple[str, str], dict[str, statistics.Curve]]:
    """(along, loss) to the curve of each row, in the rows' order."""
    lines = {(line["along"], line["loss"], line["name"]): line for line in read_lines(folder / f"{problem}.jsonl")}
    found: dict[tuple[str, str], dict[str, statistics.Curve]] = {}
    for row in _read(folder, problem)["rows"]:
        for along, loss, name in lines:
            if name == row["name"]:
                columns = (statistics.as_losses(lines[along, loss, name][key]) for key in statistics.Curve._fields)
                found.setdefault((along, loss), {})[name] = statistics.Curve(*columns)
    return found


def _search(folder: pathlib.Path) -> Record:
    trials, summary = read_json(folder / "trials.json"), read_json(folder / "summary.json")
    counts, best = collections.Counter(trial["status"] for trial in trials), summary["best"]
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
