"""Random search with early stopping by ASHA, on Ray Tune, as the paper tunes. Needs the extra `saddlefree[tune]`.

Configurations are drawn before anything runs, and each of them is a run with a folder of its own. After a crash every
trial reports again what its folder holds, from which ASHA learns what it knew, and goes on from its checkpoint. Files
of Ray's own are never read: they are pickles.
"""

import functools
import math
import os
import pathlib
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Any

# Before Ray starts: it tells nobody of its use, and leaves logs, signals, folders and the screen to us.
os.environ |= {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}

import jax
import ray
import ray.tune

from saddlefree.lab import events, plugins, problems, search
from saddlefree.lab.cluster import connected
from saddlefree.lab.errors import Interrupted, UserError
from saddlefree.lab.metrics import read_json, read_lines, write_json
from saddlefree.lab.plan import Plan, build, configuration
from saddlefree.lab.program import Program, precision
from saddlefree.lab.run import load, open_folder, run
from saddlefree.lab.search import Record
from saddlefree.lab.task import Task

REDUCTION = 4
"""ASHA lets one of so many trials go on from each rung to the next, which is so many times as far."""
RUNGS = 2
"""So many rungs lie below a whole run."""
WORST = 1e30
"""The loss of a trial that diverged, for Ray; ∞ would make ASHA's percentiles NaN."""
_FIGURES = ("val", "train", "test", "seconds")


def tune(
    problem: str,
    optimiser: str,
    folder: pathlib.Path,
    *,
    configs: int = 100,
    epochs: float | None = None,
    budget: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    seed: int = 0,
    address: str | None = None,
    cpus: int = 1,
    gpus: float = 0,
    variant: Mapping[str, Any] | None = None,
    plugin: Sequence[pathlib.Path] = (),
    data_dir: str | None = None,
    resume: bool = False,
    listener: events.Listener = events.ignore,
) -> dict[str, Any]:
    """Searches, or goes on with it, and returns what it wrote to `summary.json`.

    Args:
      problem, optimiser: what is tuned, on what; validation loss is the measure.
      folder: for the results. Where trials run on several machines, they must all see it.
      configs: how many configurations.
      epochs: of a whole run; None is the problem's own number.
      budget: seconds after which trials are broken off; None is the problem's own. Each resumption has its own.
      fixed: hyperparameters that are not searched.
      seed: of the configurations, and of the initial parameters and batches of every trial.
      address: of a Ray cluster, such as `127.0.0.1:6379`; None starts one on this machine.
      cpus, gpus: that each trial has to itself.
      variant: settings of the problem other than its own.
      plugin: the user's files that define problem or optimiser; each process loads them.
      data_dir: where data sets are looked for first.
      resume: whether the folder may hold this search already.
      listener: is told of all trials whenever something is new.
    """
    entry, fixed, folder = problems.find(problem), fixed or {}, folder.absolute()
    epochs, budget = epochs or entry.epochs, budget or entry.tuning
    data_dir = data_dir or os.environ.get("SADDLEFREE_DATA")
    data_dir = data_dir and str(pathlib.Path(data_dir).absolute())
    with connected(address, cpus):  # before JAX starts, which warns of the processes that Ray forks
        task = load(problem, data_dir, variant)
        asked: dict[str, Any] = {"seeds": [seed], "epochs": epochs, "variant": variant, "plugin": plugins.load(plugin)}

        def plan(values: Mapping[str, Any]) -> Plan:
            return build(problem, optimiser, task, changes=values, **asked)

        drawn = search.draw(problem, optimiser, fixed, task.examples, configs, seed)
        with precision(entry):
            for values in drawn:  # what cannot run is said before anything does
                Program(plan(values), task)
        searched = search.space(problem, optimiser, fixed, task.examples)
        kept = {"optimiser": optimiser, "configs": configs, "searched": searched, "epochs": epochs, "budget": budget}
        config = configuration("tune", [plan(drawn[0])], task, title=f"Tuning {optimiser} on {entry.title}", **kept)
        config["plan"] |= {"configs": configs, "searched": searched}
        del config["optimisers"]  # each trial has its own
        open_folder(folder, config, resume)
        trials = _Trials(folder, drawn, listener)
        try:
            if not all(trials.done()):
                plans = [plan(record["values"]) for record in trials.records]
                files = [path.absolute() for path in plugin]
                _search(plans, trials, folder, files, data_dir, epochs, budget, {"cpu": cpus, "gpu": gpus})
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, f"with {sum(trials.done())} of {configs} trials done") from None
        finally:
            trials.write()
            shutil.rmtree(folder / "ray", ignore_errors=True)
    given = "".join(f" --plugin {path}" for path in plugin)
    given += "".join(f" --variant {name}={value}" for name, value in (variant or {}).items())
    summary = _summary(problem, optimiser, trials.records, [*searched, *fixed], given)
    write_json(folder / "summary.json", summary)
    return summary


def _summary(
    problem: str, optimiser: str, records: Sequence[Record], names: Sequence[str], given: str
) -> dict[str, Any]:
    found = search.best(records)
    commands = []
    if found:
        settings = [f"{name}={found['values'][name]}" for name in names if name in found["values"]]
        commands = [
            f"saddlefree train {problem} {optimiser}{given} " + " ".join(f"--set {text}" for text in settings),
            f"saddlefree compare {problem} --optimisers {optimiser}{given} "
            + " ".join(f"--set {optimiser}.{text}" for text in settings),
        ]
    return {"problem": problem, "optimiser": optimiser, "best": found, "commands": commands}


class _Trials(ray.tune.Callback):
    """What is known of all trials, kept in `trials.json` as Ray tells of it."""

    def __init__(self, folder: pathlib.Path, drawn: Sequence[Record], listener: events.Listener):
        self._path, self._listener = folder / "trials.json", listener
        if self._path.exists():
            self.records: list[Record] = read_json(self._path)
        else:
            self.records = [
                {"trial": number, "values": values, "status": "unfinished", "val": None, "epoch": 0.0, "seconds": 0.0}
                for number, values in enumerate(drawn)
            ]
            self.write()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray writes its callbacks to a file, where nothing of this is needed

    def done(self) -> list[bool]:
        """Whether each of them has ended."""
        return [record["status"] != "unfinished" for record in self.records]

    def write(self) -> None:
        """Keeps what is known."""
        write_json(self._path, self.records)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: Record, **_: Any) -> None:
        """A trial has been evaluated."""
        record = self.records[trial.config["trial"]]
        # A trial that is resumed reports again what its folder holds, which may be older than what is known.
        if record["status"] == "unfinished" and result.get("epoch", 0) >= record["epoch"]:
            record |= {name: result[name] for name in (*_FIGURES, "epoch", "node") if name in result}
            if not record["val"] < WORST:
                record["val"] = None
        self._listener(events.Searched(self.records))

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **_: Any) -> None:
        """A trial has ended by itself, or ASHA has stopped it."""
        self._end(trial, {"status": "stopped"} | trial.last_result)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **_: Any) -> None:
        """A trial has failed: for want of memory, say."""
        lines = str(trial.get_error() or "").strip().splitlines() or ["no reason given"]
        self._end(trial, {"status": "failed", "error": lines[-1][:500]})

    def _end(self, trial: Any, result: Record) -> None:
        record = self.records[trial.config["trial"]]
        if record["status"] == "unfinished":
            record |= {name: result[name] for name in ("status", "error") if name in result}
            self.write()
            shutil.rmtree(_place(self._path.parent, record["trial"]) / "checkpoints", ignore_errors=True)
        self._listener(events.Searched(self.records))


def _search(
    plans: Sequence[Plan],
    trials: _Trials,
    folder: pathlib.Path,
    files: Sequence[pathlib.Path],
    data_dir: str | None,
    epochs: float,
    budget: float,
    resources: dict[str, float],
) -> None:
    available = ray.cluster_resources()
    for name, wanted in resources.items():
        if wanted > available.get(name.upper(), 0):
            raise UserError(
                f"{name}s must be at most the {available.get(name.upper(), 0):g} that Ray has, got {wanted:g}"
            )
    work = functools.partial(_trial, plans=plans, done=trials.done(), folder=folder, files=files, data_dir=data_dir)
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(work, resources),
        param_space={"trial": ray.tune.grid_search(list(range(len(plans))))},
        tune_config=ray.tune.TuneConfig(
            metric="val",
            mode="min",
            scheduler=ray.tune.schedulers.ASHAScheduler(
                time_attr="epoch",
                max_t=epochs,
                grace_period=epochs / REDUCTION**RUNGS,
                reduction_factor=REDUCTION,
                stop_last_trials=False,
            ),
            time_budget_s=budget,
            reuse_actors=True,
        ),
        run_config=ray.tune.RunConfig(name="trials", storage_path=str(folder / "ray"), callbacks=[trials], verbose=0),
    )
    tuner.fit()


def _trial(
    config: Mapping[str, Any],
    *,
    plans: Sequence[Plan],
    done: Sequence[bool],
    folder: pathlib.Path,
    files: Sequence[pathlib.Path],
    data_dir: str | None,
) -> None:
    """One run in a process of Ray's; each validation loss is reported, and ASHA may end it there."""
    number = config["trial"]
    plan, place, known = plans[number], _place(folder, number), 0.0
    for line in read_lines(place / "metrics.jsonl"):
        known = max(known, _report(line))
    if done[number]:
        return

    def listen(event: events.Event) -> None:
        # The last one is reported when its files are written.
        if isinstance(event, events.Evaluated) and event.step < (plan.steps or 0):
            for line in event.lines:
                if line["epoch"] > known:
                    _report(line)

    plugins.check(place, plan.plugin, plugins.load(files))
    jax.clear_caches()  # of the trial that was here before
    summary = run(plan, _task(plan.problem, data_dir, tuple(plan.variant.items())), place, listener=listen)
    last = {name: value[0] if isinstance(value, list) else value for name, value in summary.items()}
    if summary["status"] == "diverged" or last.get("val", last["train"]) is None:
        last |= {"status": "diverged", "val": WORST}
    ray.tune.report(_figures(last) | {"status": last["status"], "epoch": summary["epochs"]})


def _report(line: Mapping[str, Any]) -> float:
    """Reports a line with a finite validation loss, and returns its epoch, or 0."""
    if line.get("val") is None or not math.isfinite(line["val"]):
        return 0.0
    ray.tune.report(_figures(line) | {"epoch": line["epoch"]})
    return line["epoch"]


def _figures(line: Mapping[str, Any]) -> Record:
    known = {name: line[name] for name in _FIGURES if line.get(name) is not None}
    return {**known, "node": ray.get_runtime_context().get_node_id()[:8]}


@functools.lru_cache(maxsize=1)  # once in a process
def _task(problem: str, data_dir: str | None, variant: tuple[tuple[str, Any], ...]) -> Task:
    return load(problem, data_dir, dict(variant))


def _place(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / "trials" / f"{number:03}"
