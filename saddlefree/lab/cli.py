"""The command `saddlefree`: what the laboratory can do, from a shell."""

import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from rich.markup import escape

from saddlefree.lab import compare as comparison
from saddlefree.lab import data, optimisers, problems, report, reproduce, search, studies, tables
from saddlefree.lab.display import CONSOLE, ERRORS, progress, ranked, table, trials
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import read_json
from saddlefree.lab.paper import LABELS
from saddlefree.lab.plan import build
from saddlefree.lab.run import Interrupted, load, run

Changes = Annotated[tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="NAME=VALUE")]
_DEFAULT = "sgd,adam,kfac,lbfgs,series,series-adaptive,lanczos-adaptive,low-rank"


def seconds(text: str) -> float:
    """A time such as `60s`, `5min` or `2h`.

    >>> seconds("90"), seconds("1.5min")
    (90.0, 90.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(s|min|h)?", text.strip())
    if not found or not float(found[1]):
        raise UserError(f"a time must be a number > 0 with s, min or h after it, such as 60s or 5min, got {text!r}")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2] or "s"]


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """`name=value` pairs."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UserError(f"--set must be name=value, such as learning_rate=0.01, got {text!r}")
        found[name] = value
    return found


def list_problems(data_dir: str | None = None) -> None:
    """Lists the problems, and whether their data is at hand.

    Args:
      data_dir: where data sets are looked for first.
    """
    rows = []
    for name, entry in problems.PROBLEMS.items():
        batch = "all" if entry.batch_size is None else str(entry.batch_size)
        found = data.status(entry.data, data_dir) if entry.data else "needs none"
        rows.append([name, entry.title, str(entry.epochs), batch, found])
    table(["problem", "what", "epochs", "batch", "data"], rows)


def list_optimisers() -> None:
    """Lists the optimisers, what each is called in the paper, and their hyperparameters with defaults."""
    rows = []
    for name, entry in optimisers.OPTIMISERS.items():
        settings = ", ".join(f"{key}={setting.default}" for key, setting in entry.settings.items())
        rows.append([name, LABELS.get(name, ""), entry.about, settings])
    table(["optimiser", "in the paper", "what", "hyperparameters"], rows)


def train(
    problem: tyro.conf.Positional[str],
    optimiser: tyro.conf.Positional[str],
    *,
    seed: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
    budget: str | None = None,
    batch_size: int | None = None,
    set: Changes = [],  # noqa: B006 (the option's name; never changed)
    out: pathlib.Path | None = None,
    resume: bool = False,
    checkpoint_every: str = "30s",
    data_dir: str | None = None,
) -> None:
    """Trains once, with metrics of every step and checkpoints.

    Args:
      problem: one of `saddlefree problems`.
      optimiser: one of `saddlefree optimisers`.
      seed: of the initial parameters and the order of batches.
      epochs: the problem's own number unless given.
      steps: a number of them, in place of epochs.
      budget: seconds of training in place of epochs, such as 60s or 5min.
      batch_size: the optimiser's or the problem's own unless given.
      set: a hyperparameter, such as learning_rate=0.01; may be repeated.
      out: the folder for the results.
      resume: go on from the last checkpoint in that folder.
      checkpoint_every: the time between checkpoints.
      data_dir: where data sets are looked for first.
    """
    changes: dict[str, Any] = pairs(set)
    if batch_size is not None:
        changes["batch_size"] = batch_size
    optimisers.configured(optimiser, problem, changes)
    asked = {"epochs": _positive("epochs", epochs), "steps": _positive("steps", steps), "budget": _time(budget)}
    interval, task = seconds(checkpoint_every), load(problem, data_dir)
    plan = build(problem, optimiser, task, changes=changes, seeds=[seed], **asked)  # type: ignore[arg-type]
    folder = out or pathlib.Path("runs") / f"{problem}-{optimiser}-{seed}"
    options: dict[str, Any] = {"every_step": True, "checkpoint_every": interval, "keep_checkpoint": True}
    with progress() as listener:
        summary = run(plan, task, folder, resume=resume, listener=listener, **options)
    losses = [f"{part} {_number(summary[part][0])}" for part in ("train", "val", "test", "accuracy") if part in summary]
    CONSOLE.print(
        f"{summary['status']} after {summary['steps']} steps, {summary['seconds']:.1f} s: {', '.join(losses)}"
    )
    CONSOLE.print(f"{folder} holds the run; `saddlefree report {folder}` draws it", soft_wrap=True)


def compare(
    problem: tyro.conf.Positional[str],
    *,
    optimisers: str = _DEFAULT,
    seeds: int = 3,
    epochs: float | None = None,
    budget: str | None = None,
    set: Changes = [],  # noqa: B006
    evaluations: int | None = None,
    out: pathlib.Path | None = None,
    resume: bool = False,
    data_dir: str | None = None,
) -> None:
    """Trains with many optimisers and seeds, and writes tables, figures and a page.

    Args:
      problem: one of `saddlefree problems`.
      optimisers: names with commas between.
      seeds: how many of each.
      epochs: the problem's own number unless given.
      budget: seconds of training for each seed of each optimiser in place of epochs, such as 60s or 5min.
      set: a hyperparameter of an optimiser, such as adam.learning_rate=0.01; may be repeated.
      evaluations: in each run; the problem's own number unless given.
      out: the folder for the results.
      resume: go on with the comparison in that folder.
      data_dir: where data sets are looked for first.
    """
    names = [name.strip() for name in optimisers.split(",") if name.strip()]
    changes: dict[str, dict[str, str]] = {}
    for key, value in pairs(set).items():
        name, _, setting = key.partition(".")
        if name not in names or not setting:
            raise UserError(f"--set must be optimiser.name=value with one of {', '.join(names)}, got {key!r}")
        changes.setdefault(name, {})[setting] = value
    if seeds < 1:
        raise UserError(f"seeds must be a whole number ≥ 1, got {seeds}")
    if evaluations is not None and evaluations < 1:
        raise UserError(f"evaluations must be a whole number ≥ 1, got {evaluations}")
    folder = out or pathlib.Path("runs") / f"compare-{problem}"
    with progress() as listener:
        summary = comparison.compare(
            problem,
            names,
            folder,
            seeds=seeds,
            epochs=_positive("epochs", epochs),
            budget=_time(budget),
            changes=changes,
            evaluations=evaluations,
            data_dir=data_dir,
            resume=resume,
            listener=listener,
        )
    results = tables.results(problem, summary["rows"], problems.find(problem).test)
    rows = [
        [f"{cell.text}\n[dim]paper: {cell.paper}[/]" if cell.paper else cell.text for cell in row]
        for row in results.rows
    ]
    table(results.columns, rows, results.caption)
    _show_report(folder)


def tune(
    problem: tyro.conf.Positional[str],
    optimiser: tyro.conf.Positional[str],
    *,
    configs: int = 100,
    max_epochs: float | None = None,
    budget: str | None = None,
    set: Changes = [],  # noqa: B006
    seed: int = 0,
    address: str | None = None,
    cpus: int = 1,
    gpus: float = 0.0,
    out: pathlib.Path | None = None,
    resume: bool = False,
    data_dir: str | None = None,
) -> None:
    """Looks for the hyperparameters of lowest validation loss: draws them, and ASHA on Ray stops the worse early.

    Args:
      problem: one of `saddlefree problems`.
      optimiser: one of `saddlefree optimisers`.
      configs: how many configurations are tried; the first is the registered one.
      max_epochs: of a whole run; the problem's own number unless given.
      budget: how long the search may take, such as 5min; the problem's own unless given. With --resume it begins anew.
      set: a hyperparameter that is not searched, such as decay=none; may be repeated.
      seed: of the configurations, and of the parameters and batches of every trial.
      address: of a running Ray cluster, such as 127.0.0.1:6379; without it Ray is started on this machine.
      cpus: that each trial has to itself.
      gpus: that each trial has to itself, or its share of one.
      out: the folder for the results.
      resume: go on with the search in that folder.
      data_dir: where data sets are looked for first.
    """
    try:
        from saddlefree.lab import tune as tuning  # it sets Ray up, which only this needs
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: install the extra, saddlefree[tune]") from None

    fixed = pairs(set)
    for name, value, least in (("configs", configs, 1), ("seed", seed, 0), ("cpus", cpus, 1), ("gpus", gpus, 0)):
        if value < least:
            raise UserError(f"{name} must be a number ≥ {least}, got {value}")
    folder = out or pathlib.Path("runs") / f"tune-{problem}-{optimiser}"
    searched = search.names(problem, optimiser, fixed)
    with trials(searched) as listener:
        summary = tuning.tune(
            problem,
            optimiser,
            folder,
            configs=configs,
            epochs=_positive("max-epochs", max_epochs),
            budget=_time(budget),
            fixed=fixed,
            seed=seed,
            address=address,
            cpus=cpus,
            gpus=gpus,
            data_dir=data_dir,
            resume=resume,
            listener=listener,
        )
    CONSOLE.print(ranked(read_json(folder / "trials.json"), searched))
    for command in summary["commands"]:
        CONSOLE.print(command, soft_wrap=True, highlight=False)
    _show_report(folder)


def study(
    name: tyro.conf.Positional[str],
    *,
    seeds: int | None = None,
    steps: int | None = None,
    problem: str | None = None,
    out: pathlib.Path | None = None,
    resume: bool = False,
    data_dir: str | None = None,
) -> None:
    """Makes one of the paper's studies: saddle, truncation, accelerators or spectrum.

    Args:
      name: of the study.
      seeds: how many; the study's own number unless given.
      steps: how many; the study's own number unless given.
      problem: what is trained, in truncation and spectrum.
      out: the folder for the results.
      resume: go on with the study in that folder.
      data_dir: where data sets are looked for first.
    """
    folder = out or pathlib.Path("runs") / f"study-{name}"
    with progress() as listener:
        studies.study(
            name,
            folder,
            seeds=seeds,
            steps=steps,
            problem=problem,
            data_dir=data_dir,
            resume=resume,
            listener=listener,
        )
    _show_report(folder)


def run_all(
    *,
    budget: str = "1h",
    only: str = "",
    work: pathlib.Path = pathlib.Path("runs/reproduce"),
    out: pathlib.Path = pathlib.Path("results"),
    docs: pathlib.Path = pathlib.Path("docs"),
    data_dir: str | None = None,
) -> None:
    """Does the paper's experiments, as many as there is time for, and writes their results and a page of them.

    What has results already is not done again: give it as many sittings as you like.

    Args:
      budget: how long to go on beginning something new, such as 1h.
      only: parts or items with commas between, such as studies,uci-energy:adam; all unless given.
      work: the folder for searches and runs.
      out: the folder for the results.
      docs: the folder for results.md and its figures.
      data_dir: where data sets are looked for first.
    """
    parts = [part.strip() for part in only.split(",") if part.strip()]

    def say(text: str) -> None:
        CONSOLE.print(escape(text), soft_wrap=True, highlight=False, style="bold")

    left = reproduce.reproduce(work, out, docs, budget=seconds(budget), only=parts, data_dir=data_dir, say=say)
    CONSOLE.print(f"{docs / 'results.md'} has the results", soft_wrap=True)
    if left:
        CONSOLE.print(f"not done yet: {', '.join(left)}", soft_wrap=True, highlight=False)


def show_report(folder: tyro.conf.Positional[pathlib.Path]) -> None:
    """Writes tables and figures of a result folder, and one self-contained page of them.

    Args:
      folder: that train, compare, tune or study wrote.
    """
    _show_report(folder)


def _show_report(folder: pathlib.Path) -> None:
    CONSOLE.print(f"report: {report.write(folder)}", soft_wrap=True)


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{name} must be a number > 0, got {value}")
    return value


def _time(text: str | None) -> float | None:
    return None if text is None else seconds(text)


def _number(value: float | None) -> str:
    return "—" if value is None else tables.number(value)


COMMANDS = {
    "problems": list_problems,
    "optimisers": list_optimisers,
    "train": train,
    "compare": compare,
    "tune": tune,
    "study": study,
    "reproduce": run_all,
    "report": show_report,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command. An error that the user can mend is one line and exit code 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,  # type: ignore[arg-type]
            prog="saddlefree",
            description="Saddle-free Newton for JAX: problems, runs, comparisons and reports.",
            args=arguments,
        )
    except UserError as error:
        _end(str(error), 2)
    except Interrupted as error:
        _end(str(error), error.code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except OSError as error:
        _end(f"{error.filename or 'a file'}: {os.strerror(error.errno) if error.errno else error}; nothing is lost", 2)


def _end(message: str, code: int) -> None:
    ERRORS.print(f"[bold red]saddlefree:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)


if __name__ == "__main__":
    main()
