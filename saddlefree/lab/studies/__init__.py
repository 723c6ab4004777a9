"""The paper's studies, and one of the Hessian's eigenvalues: each computes its numbers and draws its figures.

A study is a module of this package with a function `compute`, and a function `plan` where it trains. Its folder holds
`config.json` with the tables and the list of figures, `metrics.jsonl` with the curves, and at the end `summary.json`
with the numbers. The registry loads without JAX.
"""

import dataclasses
import importlib
import pathlib
from typing import Any

from saddlefree.lab import events
from saddlefree.lab.errors import Registry, UserError
from saddlefree.lab.problems import PROBLEMS
from saddlefree.lab.settings import Setting


@dataclasses.dataclass(frozen=True)
class Study:
    """An entry of the registry."""

    title: str
    settings: dict[str, Setting]
    problem: str | None = None  # what is trained unless the user says otherwise; None: nothing is


def _count(default: int, low: int = 1) -> Setting:
    return Setting(default, low=low, high=10**9, whole=True)


STUDIES = Registry(
    "study",
    {
        "saddle": Study("Motivation: leaving a saddle", {"steps": _count(20)}),
        "truncation": Study(
            "Effect of truncation length", {"seeds": _count(10), "steps": _count(6000)}, problem="uci-energy"
        ),
        "accelerators": Study("Comparison of series accelerators", {"seeds": _count(5), "steps": _count(1000, low=10)}),
        "spectrum": Study("The Hessian's spectrum along training", {"steps": _count(1000)}, problem="digits"),
    },
)


def study(
    name: str,
    folder: pathlib.Path,
    *,
    seeds: int | None = None,
    steps: int | None = None,
    problem: str | None = None,
    data_dir: str | None = None,
    resume: bool = False,
    listener: events.Listener = events.ignore,
) -> None:
    """Does a study, or what is not finished of it.

    Args:
      name: one of STUDIES.
      folder: for the results.
      seeds: how many runs or random draws the medians are of; None is the study's own number, as for all options.
      steps: how many steps are trained, or how many terms are summed.
      problem: what is trained.
      data_dir: where data sets are looked for first.
      resume: whether the folder may hold this study already.
      listener: is told of what happens.
    """
    entry = STUDIES[name]
    options: dict[str, Any] = {option: setting.default for option, setting in entry.settings.items()}
    options |= {"problem": entry.problem} if entry.problem else {}
    for option, value in (("seeds", seeds), ("steps", steps), ("problem", problem)):
        if value is not None:
            if option not in options:
                raise UserError(f"{name} has no {option}: leave out --{option}, or give {', '.join(options)}")
            options[option] = value if option == "problem" else entry.settings[option].parse(option, value)
    if entry.problem:
        PROBLEMS[options["problem"]]  # or an error, before anything heavy is imported

    import matplotlib

    from saddlefree.lab import figures, plan, run
    from saddlefree.lab.metrics import write_json, write_lines
    from saddlefree.lab.studies.base import Work
    from saddlefree.lab.task import Task

    module = importlib.import_module(f"saddlefree.lab.studies.{name}")
    task = run.load(options["problem"], data_dir) if entry.problem else Task(lambda key: (None, None), None, {})
    config = plan.configuration("study", [], task, study=name, title=entry.title, plan={"study": name, **options})
    run.open_folder(folder, config, resume)
    if (folder / "summary.json").exists():
        return
    plans = module.plan(options, task) if entry.problem else []
    with matplotlib.rc_context(figures.STYLE):
        findings = module.compute(Work(folder, options, plans, task, listener))
    write_lines(folder / "metrics.jsonl", findings.lines)
    write_json(folder / "config.json", {**config, "figures": findings.figures, "tables": findings.tables})
    write_json(folder / "summary.json", findings.summary)
