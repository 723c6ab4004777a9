"""Many optimisers and many seeds on one problem.

All seeds of an optimiser run in one program where it can be mapped; otherwise, and under a budget of time, they run one
after another. Each such run has a folder of its own under `runs/` and goes on from its checkpoint after a crash.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from saddlefree.lab import optimisers, problems, statistics
from saddlefree.lab.metrics import read_lines, write_json, write_lines
from saddlefree.lab.program import precision
from saddlefree.lab.run import Display, Plan, circumstances, open_folder, run

Announce = Callable[[str], Display]
"""Told what begins, it returns the display for it."""


def compare(
    problem: str,
    names: Sequence[str],
    folder: pathlib.Path,
    *,
    seeds: int,
    epochs: float | None = None,
    budget: float | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    evaluations: int | None = None,
    data_dir: str | None = None,
    resume: bool = False,
    announce: Announce = lambda text: lambda step, steps, figures: None,
) -> dict[str, Any]:
    """Runs what is not finished yet, and returns what it wrote to `summary.json`.

    Args:
      problem: its name.
      names: of the optimisers.
      folder: for the results.
      seeds: 0, 1, … of each optimiser.
      epochs: as many for all; None is the problem's own number.
      budget: seconds of training for each seed of each optimiser, in place of epochs.
      changes: hyperparameters other than the registered ones, by optimiser.
      evaluations: in each run; None is the problem's own number.
      data_dir: where data sets are looked for first.
      resume: whether the folder may hold this comparison already.
      announce: shows progress.
    """
    entry = problems.find(problem)
    values = {name: optimisers.configured(name, problem, (changes or {}).get(name, {})) for name in names}
    epochs = entry.epochs if epochs is None else epochs
    with precision(entry):
        task = entry.load(data_dir)
    plan = {"problem": problem, "optimisers": values, "seeds": seeds, "epochs": epochs, "budget": budget}
    config = {
        "command": "compare",
        "title": entry.title,
        **plan,
        "seeds": list(range(seeds)),
        "test": entry.test,
        "batch_size": {name: values[name].get("batch_size") or entry.batch_size for name in names},
        "plan": plan,
        **circumstances(task),
    }
    open_folder(folder, config, resume)
    lines, rows = [], []
    for name in names:
        together = seeds > 1 and budget is None and optimisers.find(name).mapped and not entry.convolutional
        groups = [tuple(range(seeds))] if together else [(seed,) for seed in range(seeds)]
        found: list[list[dict[str, Any]]] = []
        for group in groups:
            where = folder / "runs" / name / ("" if together else f"seed-{group[0]}")
            one = Plan(problem, name, values[name], group, epochs, budget)
            open_folder(where, {"command": "train", "plan": one.record()}, resume=True)
            label = f"{name}, {seeds} seeds" if together else f"{name}, seed {group[0]}"
            run(one, task, where, keep_checkpoint=False, evaluations=evaluations, display=announce(label))
            written = list(read_lines(where / "metrics.jsonl"))
            for seed in group:
                mine = [line for line in written if line.get("seed", seed) == seed]
                found.append([{"optimiser": name, **line, "seed": seed} for line in mine])
                lines += found[-1]
        jax.clear_caches()
        rows.append(statistics.summarise(name, found))
    write_lines(folder / "metrics.jsonl", lines)
    summary = {"problem": problem, "rows": rows}
    write_json(folder / "summary.json", summary)
    return summary
