"""The laboratory's results: a record for each optimiser on each problem, and what the documentation shows of them."""

import collections
import pathlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np

from saddlefree.lab import batches, figures, optimisers, paper, problems, profiles, race, records, statistics, tables
from saddlefree.lab.metrics import read_json, read_lines
from saddlefree.lab.records import Record

POINTS = 50
"""Places of a curve that are kept."""
FIGURES = pathlib.PurePosixPath("figures/results")
"""Where the page has its figures."""
PROFILE = "performance.png"
PROFILED = ("lanczos-adaptive", "low-rank", "series-adaptive", "adam", "lbfgs", "kfac")
"""Optimisers whose performance profile is drawn, over the problems that have records of all of them."""
_CURVES = {f"{loss}-{x}": (x, loss) for x in figures.AXES for loss in ("train", "test")}
_KEPT = {"val-seconds": ("seconds", "val")}
"""In records, and in no figure."""


def holds(folder: pathlib.Path, name: str, plan: Record) -> bool:
    """Whether there is a record by this name that was planned so, and by today's algorithm."""
    if not (folder / f"{name}.json").exists():
        return False
    record = records.read(folder, name)
    return record["plan"] == plan and "version" not in record


def add(
    folder: pathlib.Path, name: str, compared: pathlib.Path, plan: Record, searched: pathlib.Path | None = None
) -> None:
    """Writes the record of an optimiser.

    Args:
      folder: of the records.
      name: problem/row, such as `uci-energy/adam-cosine`.
      compared: the folder of `saddlefree compare` with this optimiser alone.
      plan: what was asked for, by which `holds` knows the record; the plan of the run itself is kept as `run`.
      searched: the folder of `saddlefree tune` that its hyperparameters are from.
    """
    config, (row,) = read_json(compared / "config.json"), read_json(compared / "summary.json")["rows"]
    ((optimiser, values),) = config["optimisers"].items()
    lines = list(read_lines(compared / "metrics.jsonl"))
    runs = {name: [[line for line in lines if line["seed"] == seed] for seed in config["seeds"]]}
    curves = {}
    for key, (x, loss) in (_CURVES | _KEPT).items():
        for curve in statistics.curves(runs, x, loss).values():
            chosen = np.unique(np.linspace(0, len(curve.x) - 1, POINTS).round().astype(int))
            curves[key] = {
                part: [float(f"{value:.4g}") for value in column[chosen]] for part, column in curve._asdict().items()
            }
    record = {
        "problem": config["problem"],
        "name": name.partition("/")[2],
        "optimiser": row.pop("optimiser"),
        "plan": plan,
        "run": config["plan"][optimiser],
        "values": values,
        "batch_size": config["batch_size"][optimiser],
        "tuning": _search(searched) if searched else None,
        "versions": config["versions"],
        "machine": config["machine"],
        "data": {"partial": config["data"]["partial"]},  # not where it lay on this machine
        "summary": {**row, "steps": max(line["step"] for line in lines)},
        "curves": curves,
    }
    records.write(folder, name, record)


def add_study(folder: pathlib.Path, docs: pathlib.Path, name: str, made: pathlib.Path, plan: Record) -> None:
    """Writes the record of a study with its tables, and copies its figures, as PNG, to the page's."""
    config = read_json(made / "config.json")
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    pictures = []
    for figure in config["figures"]:
        file = pathlib.Path(figure["file"]).with_suffix(".png").name
        shutil.copyfile(made / file, docs / FIGURES / f"{name}-{file}")
        pictures.append({"file": f"{name}-{file}", "caption": figure["caption"]})
    kept = {key: config[key] for key in ("title", "versions", "machine")}
    record = {"name": name, **kept, "figures": pictures, "plan": plan, "summary": {"tables": config["tables"]}}
    records.write(folder, f"studies/{name}", record)


def rows(folder: pathlib.Path, problem: str) -> list[Record]:
    """The records of a problem, in the registry's order of optimisers."""
    order = list(optimisers.OPTIMISERS)
    found = [records.read(folder, name) for name in records.names(folder, problem)]
    return sorted(found, key=lambda record: (order.index(record["optimiser"]), record["name"]))


def draw(folder: pathlib.Path, docs: pathlib.Path, problem: str) -> None:
    """Draws the curves of a problem, and the performance profiles anew."""
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    found = rows(folder, problem)
    labels = tables.labels(problems.find(problem).test)
    with matplotlib.rc_context(figures.STYLE):
        for key, (x, loss) in _CURVES.items():
            if curves := _curves(found, key):
                figure = figures.losses(curves, figures.styles(curves), x)
                figures.save_png(figure, docs / FIGURES / f"{problem}-{key}.png", labels[loss])
        if profile := _profile(folder):
            figure = figures.performance(profile, figures.styles(profile))
            figures.save_png(figure, docs / FIGURES / PROFILE, "Performance profile")


def blocks(folder: pathlib.Path) -> dict[str, Callable[[], str]]:
    """What the pages of the documentation show of the records, by the name of its block."""
    return {
        "results": lambda: "\n".join(_section(problem, rows(folder, problem)) for problem in _problems(folder)),
        "studies": lambda: "\n".join(_study(records.read(folder, name)) for name in records.names(folder, "studies")),
        "performance": lambda: _performance(_profile(folder)),
        "accuracy": lambda: _accuracy(folder),
        "step-cost": lambda: _step_cost(folder),
        "physics": lambda: _physics(folder),
        "from-adam": lambda: _from_adam(folder),
        "batches": lambda: batches.block(folder),
        "batches-tuned": lambda: batches.tuned_block(folder),
        "batches-peers": lambda: batches.peers_block(folder),
        "batches-paper": lambda: batches.paper_block(folder),
        "race": lambda: race.block(folder),
        "published": lambda: race.published_block(folder),
        "cutest": lambda: race.cutest_block(folder),
    }


def _section(problem: str, found: Sequence[Record]) -> str:
    """A problem: final values, curves and hyperparameters."""
    text = [f"## {problems.find(problem).title}\n"]
    text += [f"Partial data: {part}.\n" for part in {row["data"]["partial"] for row in found} if part]
    text.append(tables.markdown(_table(problem, found)))
    for x, along in (("seconds", "wall time"), ("step", "steps")):
        for loss, what in (("train", "Training loss"), ("test", "Test figure")):
            text.append(f"![{what} against {along}]({FIGURES}/{problem}-{loss}-{x}.png){{ width=420 }}")
    text += ["", tables.markdown(_hyperparameters(problem, found))]
    return "\n".join(text)


def _performance(profile: profiles.Profile) -> str:
    if not profile:
        return ""
    picture = f"![Share of targets reached against time over the fastest's]({FIGURES}/{PROFILE}){{ width=420 }}\n"
    return f"{picture}\n{tables.markdown(tables.performance(profile))}"


def _accuracy(folder: pathlib.Path) -> str:
    rows = []
    for row in records.read(folder, "benchmarks/accuracy")["summary"]["rows"]:
        errors = (tables.number(row[f"float64, damping {damping}"], 2) for damping in (0.1, 0.01))
        rows.append([row["solver"], str(row["products"]), *errors])
    return tables.plain(["solver", "products", "λ = 0.1", "λ = 0.01"], rows)


def _step_cost(folder: pathlib.Path) -> str:
    """Time of a step over Adam's, on one core and on two."""
    one, two = (records.read(folder, f"benchmarks/{name}") for name in ("step_cost_one_core", "step_cost"))
    pairs = zip(one["summary"], two["summary"], strict=True)
    rows = [[a["optimiser"], *(tables.number(row["over_adam"]) for row in (a, b))] for a, b in pairs]
    return tables.plain(["optimiser", "time over Adam's, one core", "two cores"], rows)


def _physics(folder: pathlib.Path) -> str:
    """Training losses, and errors of the solution in brackets."""
    names, table = ("lanczos-adaptive", "lbfgs", "kfac", "adam"), []
    for problem in _problems(folder):
        found = {row["name"]: row["summary"] for row in rows(folder, problem)}
        if problem.startswith("pinn-") and found.keys() >= set(names):
            pairs = ((tables.number(found[name][part], 2) for part in ("train", "test")) for name in names)
            table.append([problems.find(problem).title, *(f"{train} ({test})" for train, test in pairs)])
    return tables.plain(["problem", "lanczos-adaptive", "L-BFGS", "K-FAC", "Adam"], table)


def _from_adam(folder: pathlib.Path) -> str:
    """Training and test loss of Adam and of `low_rank` over it."""
    names, rows = records.names(folder, "from-adam"), []
    for name in names:
        over = f"{name.removesuffix('-adam')}-low-rank"
        if over in names:
            found = [records.read(folder, one) for one in (name, over)]
            rate = tables.short(f"{found[0]['values']['learning_rate']:.0e}")
            losses = [tables.with_error(one["summary"], part) for part in ("train", "test") for one in found]
            dtype = "bfloat16" if "-bfloat16-" in name else "float32"
            rows.append([problems.find(found[0]["problem"]).title, dtype, rate, *losses])
    columns = ["problem", "dtype", "rate", "training loss, Adam", "`low_rank`", "test loss, Adam", "`low_rank`"]
    return tables.plain(columns, rows)


def _study(record: Record) -> str:
    pictures = [f"![{one['caption']}]({FIGURES}/{one['file']}){{ width=420 }}" for one in record["figures"]]
    found = [tables.markdown(tables.of_study(table)) for table in record["summary"]["tables"]]
    return "\n".join([f"### {record['title']}\n", *found, *pictures, ""])


def _table(problem: str, found: Sequence[Record]) -> tables.Table:
    """Final values, the paper's in a row below ours."""
    summaries = [{"optimiser": row["name"], **row["summary"]} for row in found]
    full = tables.results(problem, summaries, problems.find(problem).test)
    kept = [i for i, column in enumerate(full.columns) if column not in ("Best validation", "Seconds")]
    adam = next((row["summary"]["train"] for row in found if row["name"] == "adam"), None)
    columns = [full.columns[i] for i in kept] + ["Steps"] + (["Seconds to Adam's training loss"] if adam else [])
    rows, along_time = [], _curves(found, "train-seconds")
    for cells, row in zip(full.rows, found, strict=True):
        more = [f"{row['summary']['steps']:,}"]
        if adam:
            curve = along_time[row["name"]]
            seconds = profiles.first_below(curve.x, curve.median, np.array([adam * 1.001]))[0]  # kept to four digits
            more.append(tables.text(float(seconds) if np.isfinite(seconds) else None))
        rows.append([_name(row), *(cells[i].text for i in kept[1:]), *more])
        if cells[0].paper:
            beside = [cells[i].paper for i in kept] + [""] * len(more)
            rows.append([text and f"*{text}*" for text in beside])
    return tables.of_texts(full.caption, columns, rows)


def _hyperparameters(problem: str, found: Sequence[Record]) -> tables.Table:
    """The values that were used, and where they are from."""
    rows = []
    for row in found:
        search = row["tuning"]
        if search:
            counts = ", ".join(f"{count} {status}" for status, count in search["trials"].items())
            source = f"search: {counts}" + ("; the registered ones won" if search["best"] == 0 else "")
        elif (problem, row["optimiser"]) in paper.TUNED:
            source = "the paper"
        else:
            source = "defaults" if problem not in optimisers.find(row["optimiser"]).tuned else "registered"
        changed = {**row["values"], "batch_size": row["batch_size"] or "all"}
        values = ", ".join(
            f"{name} {tables.short(f'{value:.4g}') if isinstance(value, float) else value}"
            for name, value in changed.items()
        )
        rows.append([_name(row), source, values])
    return tables.of_texts("Hyperparameters", ["Optimiser", "From", "Values"], rows)


def _name(row: Record) -> str:
    return f"{row['name']} (version {row['version']})" if "version" in row else row["name"]


def _profile(folder: pathlib.Path) -> profiles.Profile:
    """Over the problems that have several seeds of PROFILED."""
    curves = []
    for problem in _problems(folder):
        found = {row["name"]: row for row in rows(folder, problem) if row["summary"]["seeds"] > 1}
        if found.keys() >= set(PROFILED):
            curves.append(_curves([found[name] for name in PROFILED], "train-seconds"))
    return profiles.over_problems(curves)


def _curves(found: Iterable[Record], key: str) -> dict[str, statistics.Curve]:
    """Row to its curve."""
    return {
        row["name"]: statistics.Curve(*(statistics.as_losses(row["curves"][key][c]) for c in statistics.Curve._fields))
        for row in found
        if key in row["curves"]
    }


def _search(folder: pathlib.Path) -> dict[str, Any]:
    trials, summary = read_json(folder / "trials.json"), read_json(folder / "summary.json")
    counts, best = collections.Counter(trial["status"] for trial in trials), summary["best"]
    return {"trials": counts, "best": best["trial"], "val": best["val"], "registered": trials[0]["val"]}


def _problems(folder: pathlib.Path) -> list[str]:
    """Those with records, in the registry's order."""
    return [name for name in problems.PROBLEMS if records.names(folder, name)]
