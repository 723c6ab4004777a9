"""Many optimisers and many seeds on one problem: a plan for each optimiser, and a row for each plan.

All seeds of an optimiser run in one program where it can be mapped; otherwise, and in a race, they run one after
another. Each such run has a folder of its own under `runs/` and goes on from its checkpoint after a crash.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from saddlefree.lab import events, statistics
from saddlefree.lab.metrics import write_json, write_lines
from saddlefree.lab.plan import build, configuration
from saddlefree.lab.run import load, open_folder, run_seeds


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
    variant: Mapping[str, Any] | None = None,
    plugin: Mapping[str, str] | None = None,
    data_dir: str | None = None,
    resume: bool = False,
    checkpoint_every: float = 30.0,
    listener: events.Listener = events.ignore,
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
      variant: settings of the problem other than its own.
      plugin: the user's files that define problem or optimisers, as `plugins.load` returns them.
      data_dir: where data sets are looked for first.
      resume: whether the folder may hold this comparison already.
      checkpoint_every: seconds between checkpoints.
      listener: is told of what happens.
    """
    changes = changes or {}
    task = load(problem, data_dir, variant)
    asked: dict[str, Any] = {"seeds": range(seeds), "epochs": epochs, "budget": budget, "evaluations": evaluations}
    asked |= {"variant": variant, "plugin": plugin}
    plans = [build(problem, name, task, changes=changes.get(name), **asked) for name in names]
    open_folder(folder, configuration("compare", plans, task), resume)
    lines, rows = [], []
    for name, plan in zip(names, plans, strict=True):
        found = run_seeds(plan, task, folder / "runs" / name, checkpoint_every=checkpoint_every, listener=listener)
        lines += [{"optimiser": name, **line} for of_seed in found.lines for line in of_seed]
        spent = {key: sum(each[key] for each in found.summaries) for key in ("evaluation_seconds", "compile_seconds")}
        together = {"together": found.summaries[0]["together"]}
        rows.append(statistics.summarise(name, found.lines) | spent | together)
        jax.clear_caches()
    write_lines(folder / "metrics.jsonl", lines)
    summary = {"problem": problem, "rows": rows}
    write_json(folder / "summary.json", summary)
    return summary
