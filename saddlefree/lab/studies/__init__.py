"""The paper's studies, and one of the Hessian's eigenvalues: each computes its numbers and draws its figures.

A study's folder holds `config.json` with the tables and the list of figures, `metrics.jsonl` with the curves, and at
the end `summary.json` with the numbers.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import matplotlib

from saddlefree.lab import events, figures, plan, run
from saddlefree.lab.errors import UserError, nearest
from saddlefree.lab.metrics import write_json, write_lines
from saddlefree.lab.plan import Plan
from saddlefree.lab.studies import accelerators, saddle, spectrum, truncation
from saddlefree.lab.studies.base import Compute, Work
from saddlefree.lab.task import Task


@dataclasses.dataclass(frozen=True)
class Study:
    """An entry of the registry."""

    about: str
    title: str
    compute: Compute
    options: dict[str, Any]  # those that it has, with their defaults
    plan: Callable[[dict[str, Any], Task], list[Plan]] = lambda options, task: []  # what it trains
    least: int = 1  # steps


STUDIES = {
    "saddle": Study(
        "four ways down from a point next to a saddle (Figure 1)",
        "Motivation: leaving a saddle",
        saddle.compute,
        {"steps": 20},
    ),
    "truncation": Study(
        "how many terms the series needs on UCI Energy (Appendix B.4)",
        "Effect of truncation length",
        truncation.compute,
        {"seeds": 10, "steps": 6000, "problem": "uci-energy"},
        truncation.plan,
    ),
    "accelerators": Study(
        "seven accelerators of the series on random Hessians (Appendix B.5)",
        "Comparison of series accelerators",
        accelerators.compute,
        {"seeds": 5, "steps": 1000},
        least=accelerators.LEAST,
    ),
    "spectrum": Study(
        "the eigenvalues of the Hessian along training",
        "The Hessian's spectrum along training",
        spectrum.compute,
        {"steps": 1000, "problem": "digits"},
        spectrum.plan,
    ),
}


def find(name: str) -> Study:
    """A study by its name."""
    if name not in STUDIES:
        hint = nearest(name, STUDIES, f"there are {', '.join(STUDIES)}")
        raise UserError(f"study {name!r} is not known: {hint}")
    return STUDIES[name]


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
    entry = find(name)
    options = _options(name, entry, {"seeds": seeds, "steps": steps, "problem": problem})
    task = Task(lambda key: (None, None), None, {})
    if "problem" in options:
        task = run.load(options["problem"], data_dir)
    config = plan.configuration("study", [], task, study=name, title=entry.title, plan={"study": name, **options})
    run.open_folder(folder, config, resume)
    if (folder / "summary.json").exists():
        return
    with matplotlib.rc_context(figures.STYLE):
        findings = entry.compute(Work(folder, options, entry.plan(options, task), task, listener))
    write_lines(folder / "metrics.jsonl", findings.lines)
    write_json(folder / "config.json", {**config, "figures": findings.figures, "tables": findings.tables})
    write_json(folder / "summary.json", findings.summary)


def _options(name: str, entry: Study, given: dict[str, Any]) -> dict[str, Any]:
    given = {option: value for option, value in given.items() if value is not None}
    for option, value in given.items():
        if option not in entry.options:
            raise UserError(f"{name} has no {option}: leave out --{option}, or give {', '.join(entry.options)}")
        least = entry.least if option == "steps" else 1
        if option != "problem" and value < least:
            raise UserError(f"{option} must be a whole number ≥ {least} for {name}, got {value}")
    return {**entry.options, **given}
