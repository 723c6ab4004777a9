"""The race of full-batch methods against time: one core, one record for each problem, method and seed.

A cell is a run of `saddlefree train` with a budget. Cells of one problem follow each other, so that what else the
machine does meanwhile hits all methods alike. Compilation is timed apart, and is no part of the seconds.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from saddlefree.lab import figures, problems, profiles, records, statistics, tables
from saddlefree.lab.metrics import read_json, read_lines
from saddlefree.lab.records import Record

GROUP = "race"
SECONDS = 80
MARKS = (5, 20, 80)
SEEDS = 3
FIGURES = pathlib.PurePosixPath("figures/race")
CUTEST = "benchmarks/cutest"

Settings = Mapping[str, Any]
TRACKS: dict[str, tuple[str, Settings, Settings]] = {
    "poisson-2d": ("pinn-poisson-2d", {}, {}),
    "heat": ("pinn-heat", {}, {}),
    "poisson-5d": ("pinn-poisson-5d", {}, {}),
    "energy-tanh": ("uci-energy", {"activation": "tanh"}, {}),
    "poisson": ("pinn-poisson", {}, {}),
    "wave": ("pinn-wave", {}, {}),
    "convection": ("pinn-convection", {}, {}),
    "burgers": ("pinn-burgers", {}, {}),
    "allen-cahn": ("pinn-allen-cahn", {"points": 8000}, {}),
    "kin8nm-tanh": ("kin8nm", {"activation": "tanh"}, {}),
    "convection-40": ("pinn-convection", {"beta": 40.0, "points": 5000}, {}),
    "poisson-5d-deep": ("pinn-poisson-5d", {"layers": "64-64-48-48"}, {}),
    "poisson-wide": ("pinn-poisson", {"width": 220}, {}),
    "energy-relu": ("uci-energy", {}, {}),
    "autoencoder": ("digits-autoencoder", {}, {"batch_size": 1150}),
}
"""A name to the problem, its variant, and what every method is told.

With fewer points than parameters two equations have solutions of loss 0 that are wrong between the points.
"""
OURS: dict[str, tuple[str, Settings]] = {
    "minimise": ("minimise", {}),
    "least-squares": ("least-squares", {}),
    "lanczos-adaptive": ("lanczos-adaptive", {}),
}
"""A name to the optimiser and its hyperparameters; the last is the default of version 0.1.0."""
PEERS: dict[str, tuple[str, Settings]] = {
    "jinns-ssbroyden": ("jinns-ssbroyden", {}),
    "lbfgs-20": ("lbfgs", {"memory": 20, "iterations": 1}),
    "lbfgs-200": ("lbfgs", {"memory": 200, "iterations": 1}),
    "adam-lbfgs": ("adam-lbfgs", {}),
    "optimistix-lm": ("optimistix-lm", {}),
    "optimistix-bfgs": ("optimistix-bfgs", {}),
    "engd-w": ("engd-w", {}),
    "spring": ("spring", {}),
}
DEFAULTS = ("minimise", "least-squares")
"""Whose loss is divided by the best peer's."""
IN_FLOAT32: dict[str, Settings] = {"engd-w": {"damping": 1e-3}, "spring": {"damping": 1e-3}}
"""Smaller than this is lost in the rounding of JJᵀ."""
LEFT_OUT = {
    "allen-cahn": ("optimistix-lm",),
    "poisson-5d-deep": ("optimistix-lm",),
    "poisson-wide": ("jinns-ssbroyden", "optimistix-lm", "optimistix-bfgs"),
    "autoencoder": ("optimistix-lm", "engd-w", "spring"),
}
"""Methods whose single step takes longer than the race, does not fit into memory, or raises an error."""
BESIDES = ("energy-relu", "poisson-5d-deep", "poisson-wide", "lanczos-adaptive", "lbfgs-20", "optimistix-bfgs")
"""Problems and methods that are run from the first seed only: twelve problems and eight methods are left for all."""
GAUSS_NEWTON = ("poisson-2d", "heat", "poisson-5d", "energy-tanh", "energy-relu")
"""Where `least_squares` begins with Gauss-Newton steps. Elsewhere its stages are those of `minimise`: it is not run."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method on one problem from one seed."""

    track: str
    method: str
    seed: int
    part: str = GROUP

    @property
    def name(self) -> str:
        """Of its record in the group."""
        return f"{self.track}-{self.method}-{self.seed}"

    @property
    def run(self) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
        """Problem, optimiser, variant and hyperparameters."""
        problem, variant, told = TRACKS[self.track]
        optimiser, changes = (OURS | PEERS)[self.method]
        narrow = {} if problems.find(problem).float64 else IN_FLOAT32.get(self.method, {})
        return problem, optimiser, dict(variant), {**changes, **narrow, **told}

    def plan(self) -> dict[str, Any]:
        """All that its results depend on."""
        problem, optimiser, variant, changes = self.run
        settings = {"variant": variant, "changes": changes}
        return {"problem": problem, "optimiser": optimiser, "seed": self.seed, "budget": SECONDS, **settings}

    def command(self, folder: pathlib.Path) -> list[str]:
        """That trains it; a dense matrix is large, and is not kept on the way."""
        problem, optimiser, variant, changes = self.run
        options = ["--seed", str(self.seed), "--budget", str(SECONDS), "--checkpoint-every", "1h"]
        pairs = [("--variant", variant), ("--set", changes)]
        options += [text for option, of in pairs for name, value in of.items() for text in (option, f"{name}={value}")]
        return ["train", problem, optimiser, *options, "--out", str(folder), "--resume"]


CELLS = [
    Cell(track, method, seed)
    for seed in range(SEEDS)
    for track in TRACKS
    for method in OURS | PEERS
    if method not in LEFT_OUT.get(track, ())
    and (seed == 0 or not {track, method} & set(BESIDES))
    and (method != "least-squares" or track in GAUSS_NEWTON)
]
"""In the order in which they are run."""


def add(folder: pathlib.Path, cell: Cell, made: pathlib.Path) -> None:
    """Writes the record of a cell from the folder of its run."""
    config, summary = read_json(made / "config.json"), read_json(made / "summary.json")
    lines = list(read_lines(made / "metrics.jsonl"))
    evaluated = [line for line in lines if line.get("test") is not None]
    kept = {name: summary[name] for name in ("status", "steps", "seconds", "seconds_per_step", "compile_seconds")}
    record = {
        **{name: getattr(cell, name) for name in ("track", "method", "seed")},
        "plan": cell.plan(),
        "run": config["plan"],
        **{name: config[name] for name in ("versions", "machine", "peers")},
        "summary": {**kept, "marks": [_at_mark(lines, evaluated, mark) for mark in MARKS]},
        "curve": {
            name: [float(f"{line[name]:.4g}") for line in evaluated] for name in ("step", "seconds", "train", "test")
        },
    }
    records.write(folder, f"{GROUP}/{cell.name}", record)


def _at_mark(lines: Sequence[Record], evaluated: Sequence[Record], mark: int) -> dict[str, Any]:
    """The lowest loss up to a mark, and the last test figure; ∞, as None, for a run that diverged before it."""
    before = [line for line in lines if line["seconds"] <= 1.01 * mark] or list(lines[:1])
    lost = before[-1]["train"] is None
    tests = [line["test"] for line in evaluated if line["seconds"] <= 1.01 * mark]
    train = None if lost else min(line["train"] for line in before)
    return {"at": mark, "step": before[-1]["step"], "train": train, "test": tests[-1] if tests and not lost else None}


def found(folder: pathlib.Path) -> dict[tuple[str, str], list[Record]]:
    """(track, method) to the records of its seeds."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for cell in CELLS:
        if (folder / GROUP / f"{cell.name}.json").exists():
            rows.setdefault((cell.track, cell.method), []).append(records.read(folder, f"{GROUP}/{cell.name}"))
    return rows


def medians(folder: pathlib.Path, part: str = "train") -> dict[int, dict[str, dict[str, float]]]:
    """Mark to track to method to the median over seeds."""
    cells = found(folder)
    return {
        mark: {
            track: {
                method: float(np.median(statistics.as_losses([row["summary"]["marks"][i][part] for row in rows])))
                for (of, method), rows in cells.items()
                if of == track
            }
            for track in TRACKS
            if any(of == track for of, _ in cells)
        }
        for i, mark in enumerate(MARKS)
    }


def block(folder: pathlib.Path) -> str:
    """A table for each mark: median losses, the lowest in bold, and the defaults' over the best peer's."""
    text: list[str] = []
    counts = {len(rows) for rows in found(folder).values()}
    seeds = "one seed" if counts == {1} else f"{min(counts, default=0)} to {max(counts, default=0)} seeds"
    for mark, rows in medians(folder).items():
        methods = [name for name in OURS | PEERS if any(name in row for row in rows.values())]
        columns = ["problem", *methods, *(f"{name} / best peer" for name in DEFAULTS)]
        table = [
            [track, *(_loss(row, name) for name in methods), *(_ratio(row, name) for name in DEFAULTS)]
            for track, row in rows.items()
        ]
        if table:
            text += [f"Training loss after {mark} s, median of {seeds}:\n", tables.plain(columns, table)]
    pictures = [f"![{track}: loss against time]({FIGURES}/{track}.png){{ width=420 }}" for track in rows]
    return "\n".join([*text, *pictures]) or "No run is recorded yet: `saddlefree reproduce --only race`."


def _loss(row: Mapping[str, float], method: str) -> str:
    """In bold where no other is lower."""
    if method not in row:
        return "–"
    shown = tables.number(row[method], 2)
    return f"**{shown}**" if row[method] == min(row.values()) else shown


def _ratio(row: Mapping[str, float], method: str) -> str:
    """The loss over that of the best peer."""
    best = min((row[name] for name in PEERS if name in row), default=0.0)
    return tables.number(row[method] / best, 2) if method in row and best else "–"


def draw(folder: pathlib.Path, docs: pathlib.Path) -> None:
    """Draws loss against time for each problem, by method, with the median over seeds."""
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    cells = found(folder)
    styles = figures.styles(OURS | PEERS)
    with matplotlib.rc_context(figures.STYLE):
        for track in dict.fromkeys(track for track, _ in cells):
            runs = {m: [_lines(row) for row in rows] for (of, m), rows in cells.items() if of == track}
            curves = statistics.curves({m: seeds for m, seeds in runs.items() if all(seeds)}, "seconds", "train")
            if curves:
                figure = figures.losses(curves, styles, "seconds")
                figures.save_png(figure, docs / FIGURES / f"{track}.png", "Training loss")


def _lines(record: Record) -> list[dict[str, Any]]:
    columns = record["curve"]
    return [{name: columns[name][i] for name in columns} for i in range(len(columns["seconds"]))]


def cutest_block(folder: pathlib.Path) -> str:
    """Seconds to solve each problem of `benchmarks.cutest`, and the shares that are solved."""
    if not (folder / f"{CUTEST}.json").exists():
        return "No run is recorded yet: `python -m benchmarks.cutest`."
    solved = records.read(folder, CUTEST)["summary"]["problems"]
    methods = list(next(iter(solved.values())))
    seconds = [[name, *(_seconds(row[method]["seconds"]) for method in methods)] for name, row in solved.items()]
    shares = tables.markdown(tables.performance(_cutest_profile(solved)))
    picture = f"![Share of problems solved against time over the fastest's]({FIGURES}/cutest.png){{ width=420 }}\n"
    return "\n".join([picture, shares, "Seconds to the solution:\n", tables.plain(["problem", *methods], seconds)])


def draw_cutest(folder: pathlib.Path, docs: pathlib.Path) -> None:
    """Draws the performance profile of `benchmarks.cutest`."""
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    profile = _cutest_profile(records.read(folder, CUTEST)["summary"]["problems"])
    with matplotlib.rc_context(figures.STYLE):
        figure = figures.performance(profile, figures.styles(profile))
        figures.save_png(figure, docs / FIGURES / "cutest.png", "Problems of CUTEst")


def _cutest_profile(solved: Mapping[str, Mapping[str, Record]]) -> profiles.Profile:
    methods = next(iter(solved.values()))
    times = {m: np.array([row[m]["seconds"] or np.inf for row in solved.values()]) for m in methods}
    return profiles.performance(times)


def _seconds(taken: float | None) -> str:
    return "–" if taken is None else f"{taken:.2f}"
