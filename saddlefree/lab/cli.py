"""The command `saddlefree`: what the laboratory can do, from a shell.

Names, numbers and files are checked before JAX and all that needs it is imported: help and a typo are answered at once.
"""

import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from rich.markup import escape

from saddlefree import __version__
from saddlefree.lab import optimisers as registry
from saddlefree.lab import problems, studies
from saddlefree.lab.arguments import (
    COUNT,
    EPOCHS,
    SEED,
    Data,
    Number,
    Optimiser,
    Out,
    Pairs,
    Plugins,
    Problem,
    Resume,
    Text,
    Time,
    Variant,
    Whole,
    folder_of,
    length,
    limit,
    load_plugins,
    pairs,
    seconds,
)
from saddlefree.lab.display import CONSOLE, ERRORS, progress, trials
from saddlefree.lab.errors import Interrupted, UserError, not_installed
from saddlefree.lab.listing import list_optimisers, list_problems, number, say, show
from saddlefree.lab.settings import Setting

DIVERGED = 3
"""The exit code of a run that diverged."""
_DEFAULT = "sgd,adam,kfac,lbfgs,series,series-adaptive,lanczos-adaptive,low-rank"


def demo(*, out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "runs/demo") -> None:
    """Shows in two or three minutes what the library is for: a saddle, an equation, mini-batches; no data is needed.

    Args:
      out: the folder for the results; what it holds already is not done again.
    """
    from saddlefree.lab.demo import PARTS
    from saddlefree.lab.metrics import read_json

    folder = folder_of(out, "demo")
    for part in PARTS:
        say(f"\n[bold]{part.title}[/]\n[dim]$ saddlefree {part.command}[/]", markup=True)
        where = folder / part.folder
        _run([*part.command.split(), "--out", str(where), "--resume"])
        CONSOLE.print(escape(part.read(read_json(where / "summary.json"))), highlight=False)
    say(f"\nWith figures: {', '.join(str(folder / part.folder / 'report.html') for part in PARTS)}")


def train(
    problem: Problem,
    optimiser: Optimiser,
    *,
    seed: int = 0,
    epochs: Number = None,
    steps: Whole = None,
    budget: Time = None,
    batch_size: Whole = None,
    variant: Variant = (),
    set: Pairs = (),
    out: Out = None,
    resume: Resume = False,
    checkpoint_every: str = "30s",
    plugin: Plugins = (),
    data_dir: Data = None,
) -> None:
    """Trains once, with metrics of every step and checkpoints; ends with code 3 if it diverged.

    Args:
      seed: of the initial parameters and the order of batches.
      epochs: the problem's own number unless given.
      steps: a number of them, in place of epochs.
      budget: seconds of training in place of epochs, such as 60s or 5min.
      batch_size: the optimiser's or the problem's own unless given.
      set: a hyperparameter, such as learning_rate=0.01; may be repeated.
      checkpoint_every: the time between checkpoints.
    """
    folder = folder_of(out, f"{problem}-{optimiser}-{seed}")
    loaded = load_plugins(plugin, folder, resume)
    entry = problems.find(problem)
    changes: dict[str, Any] = pairs(set)
    if batch_size is not None:
        changes["batch_size"] = batch_size
    values = registry.configured(optimiser, problem, changes)
    registry.find(optimiser).require()
    SEED.parse("seed", seed)
    asked = length(epochs, budget, steps) | {"variant": entry.variant(pairs(variant, "--variant")), "plugin": loaded}
    interval = seconds(checkpoint_every)
    size = entry.parameters(asked["variant"])
    if size is not None and values.get("rank", 0) > size:
        say(f"rank {values['rank']} is more than the {size} parameters: {size} is used")

    from saddlefree.lab.metrics import read_lines
    from saddlefree.lab.plan import build
    from saddlefree.lab.run import load, run

    task = load(problem, data_dir, asked["variant"])
    plan = build(problem, optimiser, task, changes=changes, seeds=[seed], **asked)
    options: dict[str, Any] = {"every_step": True, "checkpoint_every": interval, "keep_checkpoint": True}
    with progress() as listener:
        summary = run(plan, task, folder, resume=resume, listener=listener, **options)
    losses = [f"{part} {number(summary[part][0])}" for part in ("train", "val", "test", "accuracy") if part in summary]
    say(f"{summary['status']} after {summary['steps']} steps, {summary['seconds']:.1f} s: {', '.join(losses)}")
    best = min(
        (line for line in read_lines(folder / "metrics.jsonl") if line.get("val") is not None),
        key=lambda line: line["val"],
        default={},
    )
    if best:
        say(f"best validation: {number(best['val'])} at step {best['step']}")
    say(f"{folder} holds the run; `saddlefree report {folder}` draws it")
    if summary["status"] == "diverged":
        sys.exit(DIVERGED)


def compare(
    problem: Problem,
    *,
    optimisers: str = _DEFAULT,
    seeds: int = 3,
    epochs: Number = None,
    budget: Time = None,
    variant: Variant = (),
    set: Pairs = (),
    evaluations: Whole = None,
    apart: bool = False,
    out: Out = None,
    resume: Resume = False,
    plugin: Plugins = (),
    data_dir: Data = None,
) -> None:
    """Trains with many optimisers and seeds, and writes tables, figures and a page.

    Args:
      optimisers: names with commas between.
      seeds: how many of each.
      epochs: the problem's own number unless given.
      budget: seconds of training for each seed of each optimiser in place of epochs, such as 60s or 5min.
      set: a hyperparameter of an optimiser, such as adam.learning_rate=0.01; may be repeated. Of all of them,
        batch_size or parameter_average.
      evaluations: in each run; the problem's own number unless given.
      apart: run seeds one after another, so that a step has the time that it has alone.
    """
    folder = folder_of(out, f"compare-{problem}")
    loaded = load_plugins(plugin, folder, resume)
    entry = problems.find(problem)
    names = [name.strip() for name in optimisers.split(",") if name.strip()]
    if not names:
        raise UserError("--optimisers must be names with commas between, such as adam,lbfgs, got none")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--optimisers names {twice[0]} twice: leave out one of them")
    given = pairs(set)
    for_all = {key: given.pop(key) for key in registry.COMMON if key in given}
    changes: dict[str, dict[str, str]] = {name: dict(for_all) for name in names}
    for key, value in given.items():
        name, _, setting = key.partition(".")
        if name not in names or not setting:
            raise UserError(f"--set must be optimiser.name=value with one of {', '.join(names)}, got {key!r}")
        changes[name][setting] = value
    for name in names:
        registry.configured(name, problem, changes[name])
        registry.find(name).require()
    Setting(1, low=1, high=10_000, whole=True).parse("seeds", seeds)
    if evaluations is not None:
        COUNT.parse("evaluations", evaluations)
    asked = length(epochs, budget) | {"seeds": range(seeds), "evaluations": evaluations}
    asked |= {"variant": entry.variant(pairs(variant, "--variant")), "plugin": loaded, "apart": apart}

    from saddlefree.lab import compare as comparison
    from saddlefree.lab.plan import build
    from saddlefree.lab.run import load

    task = load(problem, data_dir, asked["variant"])
    plans = [build(problem, name, task, changes=changes[name], **asked) for name in names]
    with progress() as listener:
        summary = comparison.compare(plans, task, folder, resume=resume, listener=listener)
    show(folder)
    spent = {"compiling": "compile_seconds", "evaluating": "evaluation_seconds"}
    parts = {word: sum(row[key] for row in summary["rows"]) for word, key in spent.items()}
    training = sum(row["seconds"] * row["seeds"] for row in summary["rows"])
    say(f"time: training {training:.1f} s, " + ", ".join(f"{word} {value:.1f} s" for word, value in parts.items()))


def tune(
    problem: Problem,
    optimiser: Optimiser,
    *,
    configs: int = 100,
    max_epochs: Number = None,
    budget: Time = None,
    variant: Variant = (),
    set: Pairs = (),
    seed: int = 0,
    address: str | None = None,
    cpus: int = 1,
    gpus: float = 0.0,
    out: Out = None,
    resume: Resume = False,
    plugin: Plugins = (),
    data_dir: Data = None,
) -> None:
    """Looks for the hyperparameters of lowest validation loss: draws them, and ASHA on Ray stops the worse early.

    Args:
      configs: how many configurations are tried; the first is the registered one.
      max_epochs: of a whole run; the problem's own number unless given.
      budget: how long the search may take, such as 5min; the problem's own unless given. With --resume it begins anew.
      set: a hyperparameter that is not searched, such as decay=none; may be repeated.
      seed: of the configurations, and of the parameters and batches of every trial.
      address: of a running Ray cluster, such as 127.0.0.1:6379; without it Ray is started on this machine.
      cpus: that each trial has to itself.
      gpus: that each trial has to itself, or its share of one.
    """
    folder = folder_of(out, f"tune-{problem}-{optimiser}")
    load_plugins(plugin, folder, resume)
    fixed, chosen = pairs(set), problems.find(problem).variant(pairs(variant, "--variant"))
    registry.configured(optimiser, problem, fixed)
    registry.find(optimiser).require()
    SEED.parse("seed", seed)
    for name, value in (("configs", configs), ("cpus", cpus)):
        Setting(1, low=1, high=100_000, whole=True).parse(name, value)
    Setting(0.0, high=1000).parse("gpus", gpus)
    allowed = limit(budget)
    if max_epochs is not None:
        EPOCHS.parse("max-epochs", max_epochs)
    try:
        from saddlefree.lab import tune as tuning  # it sets Ray up, which only this needs
    except ModuleNotFoundError as error:
        raise not_installed(error.name, "tune") from None
    from saddlefree.lab import search

    searched = search.names(problem, optimiser, fixed)
    with trials(searched) as listener:
        summary = tuning.tune(
            problem,
            optimiser,
            folder,
            configs=configs,
            epochs=max_epochs,
            budget=allowed,
            fixed=fixed,
            seed=seed,
            address=address,
            cpus=cpus,
            gpus=gpus,
            variant=chosen,
            plugin=plugin,
            data_dir=data_dir,
            resume=resume,
            listener=listener,
        )
    show(folder)
    for command in summary["commands"]:
        say(command)


def study(
    name: Annotated[Text, tyro.conf.arg(metavar="NAME")],
    *,
    seeds: Whole = None,
    steps: Whole = None,
    problem: Annotated[str | None, tyro.conf.arg(metavar="PROBLEM")] = None,
    out: Out = None,
    resume: Resume = False,
    data_dir: Data = None,
) -> None:
    """Makes one of the paper's studies: saddle, truncation, accelerators or spectrum.

    Args:
      name: of the study.
      seeds: how many; the study's own number unless given.
      steps: how many; the study's own number unless given.
      problem: what is trained, in truncation and spectrum.
    """
    folder = folder_of(out, f"study-{name}")
    with progress() as listener:
        asked: dict[str, Any] = {"seeds": seeds, "steps": steps, "problem": problem}
        studies.study(name, folder, data_dir=data_dir, resume=resume, listener=listener, **asked)
    show(folder)


def run_all(
    *,
    budget: str = "1h",
    only: str = "",
    shard: str = "1/1",
    work: pathlib.Path = pathlib.Path("runs/reproduce"),
    out: pathlib.Path = pathlib.Path("results"),
    docs: pathlib.Path = pathlib.Path("docs"),
    data_dir: Data = None,
) -> None:
    """Does the paper's experiments, as many as there is time for, and writes their results and a page of them.

    What has results already is not done again: give it as many sittings as you like.

    Args:
      budget: how long to go on beginning something new, such as 1h.
      only: parts or items with commas between, such as studies,uci-energy:adam or race:heat-*-0; all but the race
        unless given.
      shard: such as 1/2 for the first of two processes that share the work.
      work: the folder for searches and runs.
      out: the folder for the results.
      docs: the folder for results.md and its figures.
    """
    parts, allowed = [part.strip() for part in only.split(",") if part.strip()], seconds(budget)
    place = re.fullmatch(r"(\d{1,4})/(\d{1,4})", shard)
    if not place or not 1 <= int(place[1]) <= int(place[2]):
        raise UserError(f"--shard must be K/N with K from 1 to N, such as 1/2, got {shard!r}")

    from saddlefree.lab import reproduce

    def announce(text: str) -> None:
        CONSOLE.print(escape(text), soft_wrap=True, highlight=False, style="bold")

    options: dict[str, Any] = {"shard": (int(place[1]), int(place[2])), "data_dir": data_dir, "say": announce}
    left = reproduce.reproduce(work, out, docs, budget=allowed, only=parts, **options)
    say(f"{docs / 'results.md'} has the results")
    if left:
        say(f"not done yet: {', '.join(left)}")


def show_report(folder: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="DIR")]) -> None:
    """Writes tables and figures of a result folder, and one self-contained page of them; prints the tables.

    Args:
      folder: that train, compare, tune or study wrote, or one that holds several comparisons.
    """
    show(folder)


COMMANDS = {
    "demo": demo,
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
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"saddlefree {__version__}")
        return
    try:
        _run(given or ["--help"])
    except UserError as error:
        _end(str(error), 2)
    except Interrupted as error:
        _end(str(error), error.code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except OSError as error:
        _end(f"{error.filename or 'a file'}: {os.strerror(error.errno) if error.errno else error}", 2)


def _run(arguments: Sequence[str]) -> None:
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,  # type: ignore[arg-type]
        prog="saddlefree",
        description="Saddle-free Newton for JAX: problems, runs, comparisons and reports.",
        args=arguments,
    )


def _end(message: str, code: int) -> None:
    ERRORS.print(f"[bold red]saddlefree:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)


if __name__ == "__main__":
    main()
