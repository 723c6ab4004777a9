"""The race of full-batch methods against time: one core, one record for each problem, method and seed.

A cell is a run of `saddlefree train` with a budget. Cells of one problem follow each other, so that what else the
machine does meanwhile hits all methods alike. Compilation is timed apart, and is no part of the seconds.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np

from saddlefree.lab import figures, problems, profiles, records, statistics, tables
from saddlefree.lab.metrics import read_json, read_lines
from saddlefree.lab.records import Record

GROUP = "race"
ACCURACY = "accuracy"
SECONDS = 80
LONGER = 320
LONGEST = 1200
MARKS = (5, 20, SECONDS, LONGER, LONGEST)
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
BESIDE_TRACKS: dict[str, tuple[str, Settings, Settings]] = {
    "poisson-5d-20000": ("pinn-poisson-5d", {"points": 17_000, "side_points": 3000}, {}),
    "burgers-10000": ("pinn-burgers", {"points": 10_000, "width": 20, "depth": 6}, {}),
}
"""No part of the race: networks of published accuracies, with more points."""
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
    "burgers": ("optimistix-lm",),
    "allen-cahn": ("optimistix-lm",),
    "convection-40": ("optimistix-lm",),
    "poisson-5d-deep": ("optimistix-lm",),
    "poisson-wide": ("jinns-ssbroyden", "optimistix-lm", "optimistix-bfgs"),
    "autoencoder": ("optimistix-lm", "engd-w", "spring"),
}
"""Methods whose single step takes longer than the race, does not fit into memory, or raises an error."""
BESIDES = ("energy-relu", "poisson-5d-deep", "poisson-wide", "lanczos-adaptive", "lbfgs-20", "optimistix-bfgs")
"""Problems and methods that are run from the first seed only: twelve problems and eight methods are left for all."""
GAUSS_NEWTON = ("poisson-2d", "heat", "poisson-5d", "energy-tanh", "energy-relu")
"""Where `least_squares` begins with Gauss-Newton steps. Elsewhere its stages are those of `minimise`: it is not run."""
GOES_ON = ("poisson-5d", "wave", "burgers")
"""Problems on which the last seed is run for `LONGER` seconds, because losses still fall."""


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
    def seconds(self) -> int:
        """How long it trains."""
        if self.part == ACCURACY:
            return LONGEST
        return LONGER if self.track in GOES_ON and self.seed == SEEDS - 1 else SECONDS

    @property
    def run(self) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
        """Problem, optimiser, variant and hyperparameters."""
        problem, variant, told = (TRACKS | BESIDE_TRACKS)[self.track]
        optimiser, changes = (OURS | PEERS)[self.method]
        narrow = {} if problems.find(problem).float64 else IN_FLOAT32.get(self.method, {})
        return problem, optimiser, dict(variant), {**changes, **narrow, **told}

    def plan(self) -> dict[str, Any]:
        """All that its results depend on."""
        problem, optimiser, variant, changes = self.run
        settings = {"variant": variant, "changes": changes}
        return {"problem": problem, "optimiser": optimiser, "seed": self.seed, "budget": self.seconds, **settings}

    def command(self, folder: pathlib.Path) -> list[str]:
        """That trains it; a dense matrix is large, and is not kept on the way."""
        problem, optimiser, variant, changes = self.run
        options = ["--seed", str(self.seed), "--budget", str(self.seconds), "--checkpoint-every", "1h"]
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


class Published(NamedTuple):
    """The best published accuracy on an equation, and what is run to be compared with it."""

    about: str
    relative_error: float  # a root mean square error is divided by that of the solution
    method: str
    cell: Cell


PUBLISHED = [
    Published("Poisson 2D, 257 parameters", 1.2e-7, "ENGD", Cell("poisson-2d", "minimise", 0)),
    Published("heat, 257 parameters", 8.8e-8, "ENGD", Cell("heat", "minimise", 0)),
    Published("Poisson 5D, 3,500 points", 3.5e-8, "ENGD", Cell("poisson-5d", "least-squares", 0, ACCURACY)),
    Published("the same, 20,000 points", 3.5e-8, "ENGD", Cell("poisson-5d-20000", "least-squares", 0, ACCURACY)),
    Published("Burgers, 10,000 points", 1.6e-8, "SSBroyden", Cell("burgers-10000", "minimise", 0, ACCURACY)),
]
ACCURACIES = [published.cell for published in PUBLISHED if published.cell.part == ACCURACY]
"""Those that are no part of the race."""


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
        "summary": {**kept, "marks": [_at_mark(lines, evaluated, mark) for mark in MARKS if mark <= cell.seconds]},
        "curve": {
            name: [float(f"{line[name]:.4g}") for line in evaluated] for name in ("step", "seconds", "train", "test")
        },
    }
    records.write(folder, f"{cell.part}/{cell.name}", record)


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


Medians = dict[str, dict[str, float]]
"""Track to method to the median over seeds."""


def medians(folder: pathlib.Path, part: str = "train") -> dict[int, Medians]:
    """By mark, of the seeds that were run as long."""
    by_mark: dict[int, Medians] = {mark: {} for mark in MARKS}
    for (track, method), rows in found(folder).items():
        marks = [{mark["at"]: mark[part] for mark in row["summary"]["marks"]} for row in rows]
        for at in MARKS:
            values = [row[at] for row in marks if at in row]
            if values:
                by_mark[at].setdefault(track, {})[method] = float(np.median(statistics.as_losses(values)))
    return by_mark


def block(folder: pathlib.Path) -> str:
    """For each mark median losses, the lowest in bold, and the defaults' over the best peer's; then errors."""
    losses, cells = medians(folder), found(folder)
    if not cells:
        return "No run is recorded yet: `saddlefree reproduce --only race`."
    text = [_standing(losses)]
    for mark, rows in losses.items():
        if rows:
            text += [f"Training loss after {mark} s, median of {_seeds(cells, mark)}:\n", _table(rows)]
    errors = {track: row for track, row in medians(folder, "test")[SECONDS].items() if _is_equation(track)}
    if errors:
        about = f"Relative error of the solution after {SECONDS} s, median of {_seeds(cells, SECONDS)}:\n"
        text += [about, _table(errors, ratios=False)]
    tracks = dict.fromkeys(track for track, _ in cells)
    pictures = [f"![{track}: loss against time]({FIGURES}/{track}.png){{ width=420 }}" for track in tracks]
    return "\n".join([*text, *pictures])


def published_block(folder: pathlib.Path) -> str:
    """Relative errors at the end of long runs beside those that were published."""
    rows = []
    for about, published, method, cell in PUBLISHED:
        name = f"{cell.part}/{cell.name}"
        if (folder / f"{name}.json").exists():
            end = records.read(folder, name)["summary"]["marks"][-1]
            times = [f"{end['at']:,}", f"{end['step']:,}"]
            figures = [tables.number(value, 2) for value in (end["train"], end["test"], published)]
            rows.append([about, f"`{cell.method}`", *times, *figures, method])
    if not rows:
        return f"No run is recorded yet: `saddlefree reproduce --only {ACCURACY}`."
    return tables.plain(["equation", "run", "seconds", "steps", "loss", "relative error", "published", "by"], rows)


def _standing(losses: Mapping[int, Medians]) -> str:
    """How often the default is at or below the best peer, and where not, by how much."""
    text = []
    for mark in (20, SECONDS):
        ratios: dict[str, float] = {}
        for track, row in losses[mark].items():
            ratio = _over_best(row, "least-squares" if "least-squares" in row else "minimise")
            ratios |= {} if ratio is None else {track: ratio}
        behind = [f"{track} {tables.number(ratio, 2)} times" for track, ratio in ratios.items() if ratio > 1]
        where = f" (above it on {', '.join(behind)})" if behind else ""
        text.append(f"{len(ratios) - len(behind)} of {len(ratios)} problems after {mark} s{where}")
    about = "The default, `least_squares` where it was run and otherwise `minimise`, is at or below the best peer"
    return f"{about} on {', and on '.join(text)}.\n"


def _is_equation(track: str) -> bool:
    return problems.find(TRACKS[track][0]).test == "relative L2 error"


def _seeds(cells: Mapping[tuple[str, str], Sequence[Record]], mark: int) -> str:
    counts = [sum(row["plan"]["budget"] >= mark for row in rows) for rows in cells.values()]
    least, most = min(count for count in counts if count), max(counts)
    return "one seed" if most == 1 else f"{most} seeds" if least == most else f"{least} to {most} seeds"


def _table(rows: Medians, ratios: bool = True) -> str:
    methods = [name for name in OURS | PEERS if any(name in row for row in rows.values())]
    divided = DEFAULTS if ratios else ()
    return tables.plain(
        ["problem", *methods, *(f"{name} / best peer" for name in divided)],
        [
            [track, *(_loss(row, name) for name in methods), *(_ratio(row, name) for name in divided)]
            for track, row in rows.items()
        ],
    )


def _loss(row: Mapping[str, float], method: str) -> str:
    """In bold where no other is lower."""
    if method not in row:
        return "–"
    shown = tables.number(row[method], 2)
    return f"**{shown}**" if row[method] == min(row.values()) else shown


def _ratio(row: Mapping[str, float], method: str) -> str:
    ratio = _over_best(row, method)
    return "–" if ratio is None else tables.number(ratio, 2)


def _over_best(row: Mapping[str, float], method: str) -> float | None:
    """The loss over that of the best peer; None where there is none of either."""
    best = min((row[name] for name in PEERS if name in row), default=0.0)
    return row[method] / best if method in row and best else None


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
