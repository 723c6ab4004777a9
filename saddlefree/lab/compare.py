"""Many optimisers and many seeds on one problem: a plan for each optimiser, and a row for each plan.

All seeds of an optimiser run in one program where it can be mapped; otherwise, and in a race, they run one after
another. Each such run has a folder of its own under `runs/` and goes on from its checkpoint after a crash.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from saddlefree.lab import events, statistics
from saddlefree.lab.metrics import write_json, write_lines
from saddlefree.lab.plan import Plan, configuration
from saddlefree.lab.run import open_folder, run_seeds
from saddlefree.lab.task import Task


def compare(
    plans: Sequence[Plan],
    task: Task,
    folder: pathlib.Path,
    *,
    resume: bool = False,
    listener: events.Listener = events.ignore,
) -> dict[str, Any]:
    """Runs what is not finished yet, and returns what it wrote to `summary.json`.

    Args:
      plans: one for each optimiser, of the same problem.
      task: the problem's, loaded.
      folder: for the results.
      resume: whether the folder may hold this comparison already.
      listener: is told of what happens.
    """
    open_folder(folder, configuration("compare", plans, task), resume)
    lines, rows = [], []
    for plan in plans:
        name = plan.optimiser
        found = run_seeds(plan, task, folder / "runs" / name, listener=listener)
        lines += [{"optimiser": name, **line} for of_seed in found.lines for line in of_seed]
        spent = {key: sum(each[key] for each in found.summaries) for key in ("evaluation_seconds", "compile_seconds")}
        together = {"together": found.summaries[0]["together"]}
        rows.append(statistics.summarise(name, found.lines) | spent | together)
        jax.clear_caches()
    write_lines(folder / "metrics.jsonl", lines)
    summary = {"problem": plans[0].problem, "rows": rows}
    write_json(folder / "summary.json", summary)
    return summary
