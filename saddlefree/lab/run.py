"""The engine: a plan becomes a record, the folder of one run, from the start or the last checkpoint.

Training, evaluating and compiling are timed apart, over all resumptions. Lines of metrics are written before the
checkpoint that follows them, and what lies beyond a checkpoint is dropped when a run goes on from it: each step has one
line, and what a killed process did after its last checkpoint is neither kept nor counted.
"""

import dataclasses
import errno
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from saddlefree.lab import checkpoint, events, problems
from saddlefree.lab.errors import Interrupted, UserError
from saddlefree.lab.events import Line, Listener
from saddlefree.lab.metrics import Metrics, TensorBoard, finite, read_json, read_lines, write_json
from saddlefree.lab.plan import Plan, configuration, difference
from saddlefree.lab.process import alone, signals
from saddlefree.lab.program import LIMIT, Program, clock, precision, seconds_per_step
from saddlefree.lab.task import Task

CHUNK_SECONDS = 0.5
"""How long the program computes before it looks up: for signals, listeners and the clock."""
MARKS = 37
"""Evaluations of a race that ends by the clock, six in each of six halvings of its time."""

Result = TypeVar("Result")
_NAMES = {"loss": "train"}  # of figures, where a line has another name for them


@dataclasses.dataclass
class Position:
    """How far a run is, and the seconds that its program has spent; it is kept with each checkpoint."""

    step: int = 0
    training: float = 0.0
    evaluation: float = 0.0
    compilation: float = 0.0
    diverged: dict[str, int] = dataclasses.field(default_factory=dict)  # seed to the step where its loss was not finite


def load(problem: str, data_dir: str | None, variant: Mapping[str, Any] | None = None) -> Task:
    """A problem's task, in the problem's precision."""
    entry = problems.find(problem)
    with precision(entry):
        return entry.load(data_dir, variant)


def open_folder(folder: pathlib.Path, config: dict[str, Any], resume: bool) -> None:
    """Makes the folder of a command and its `config.json`, or checks that it holds the same plan."""
    _make(folder)
    if _known(folder, config, resume) is None:
        write_json(folder / "config.json", config)


def _make(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another --out") from error


def _known(folder: pathlib.Path, config: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """The folder's `config.json` if it has one, whose plan must be that of `config`."""
    path = folder / "config.json"
    if not path.exists():
        return None
    if not resume:
        raise UserError(f"{folder} holds a run already: go on with --resume, or choose another --out")
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("plan"), dict):
        raise UserError(f"{path} is damaged (no plan): restore it from a copy, or run again with another --out")
    if changed := difference(found["plan"], config["plan"]):
        raise UserError(
            f"{folder} holds another run ({changed}): resume with the same arguments, or choose another --out"
        )
    return found


class Seeds(NamedTuple):
    """What the seeds of a plan left: the lines of each, and a summary for each program."""

    lines: list[list[Line]]
    summaries: list[dict[str, Any]]


def run_seeds(plan: Plan, task: Task, folder: pathlib.Path, **options: Any) -> Seeds:
    """Runs what is not finished of a plan: in `folder` where seeds are mapped, otherwise in `folder/seed-N`."""
    found = Seeds([], [])
    for part in plan.parts():
        where = folder if plan.mapped else folder / f"seed-{part.seeds[0]}"
        found.summaries.append(run(part, task, where, **options))
        lines = [{**line, "seed": line.get("seed", part.seeds[0])} for line in read_lines(where / "metrics.jsonl")]
        found.lines.extend([line for line in lines if line["seed"] == seed] for seed in part.seeds)
    return found


def run(
    plan: Plan,
    task: Task,
    folder: pathlib.Path,
    *,
    resume: bool = True,
    every_step: bool = False,
    checkpoint_every: float = 30.0,
    keep_checkpoint: bool = False,
    listener: Listener = events.ignore,
) -> dict[str, Any]:
    """Trains as planned, from the start or the last checkpoint, and returns what it wrote to `summary.json`.

    A race is timed once, before its first step: `config.json` holds the number of steps that the budget has room for.

    Args:
      plan: what to run; it has one seed, or several that are mapped.
      task: the problem's, loaded.
      folder: of this run.
      resume: whether the folder may hold this run already.
      every_step: whether each step has a line of metrics, and TensorBoard its events; otherwise each evaluation has.
      checkpoint_every: seconds between checkpoints.
      keep_checkpoint: whether the last state is kept when the run is finished.
      listener: is told of what happens.
    """
    _make(folder)
    with alone(folder), precision(plan), signals() as caught, ExitStack() as stack:
        known = _known(folder, configuration("train", [plan], task), resume)
        if (folder / "summary.json").exists():
            return read_json(folder / "summary.json")
        if known is None:
            plan, program = _timed(plan, task) if plan.steps is None else (plan, Program(plan, task))
            write_json(folder / "config.json", configuration("train", [plan], task))
        else:
            plan = dataclasses.replace(plan, steps=known["plan"]["steps"])
            program = Program(plan, task)
        state, at = program.start(), Position()
        if checkpoint.latest(folder) is not None:
            state, kept = checkpoint.restore(folder, state)
            try:
                at = Position(**kept)
            except TypeError as error:
                raise UserError(
                    f"{folder / 'checkpoints'} is damaged ({error}): delete it to start anew, or choose another --out"
                ) from None
        kinds = (Metrics, TensorBoard) if every_step else (Metrics,)
        listeners: list[Listener] = [*(stack.enter_context(closing(kind(folder, at.step))) for kind in kinds), listener]

        def tell(event: events.Event) -> None:
            for each in listeners:
                each(event)

        assert plan.steps
        tell(events.Started(plan.label, at.step, plan.steps, state))
        program.prepare(state)
        at.compilation += program.compile_seconds
        tell(events.Compiled(program.compile_seconds))
        clock, saved = _Clock(plan, at), time.monotonic()
        evaluated: dict[str, np.ndarray] = {}
        over = clock.ended(at) or program.ended(state)
        while not over:
            count = min(clock.count(at), program.room(at.step))
            (state, figures), elapsed = _measure(program.advance, state, at.step, count)
            count = len(figures["loss"])  # fewer where the run has ended
            at.step, at.training = at.step + count, at.training + elapsed
            clock.learn(elapsed / count)
            stopped = program.ended(state)
            evaluated, spent = _measure(program.evaluate, state) if clock.evaluates(at) or stopped else ({}, 0.0)
            at.evaluation += spent
            lines = _lines(plan, at, elapsed, figures, evaluated, every_step)
            over = stopped or clock.ended(at)
            shown = lines[-1] if lines else {"train": float(figures["loss"][-1].reshape(-1)[0])}
            tell(events.Progress(at.step, plan.steps, {**shown, "steps_per_second": count / elapsed}, lines))
            if evaluated:
                tell(events.Evaluated(at.step, [line for line in lines if line["step"] == at.step], state))
            if caught or (keep_checkpoint if over else time.monotonic() - saved > checkpoint_every):
                tell(events.Saving(at.step))
                checkpoint.save(folder, at.step, state, dataclasses.asdict(at))
                saved = time.monotonic()
            if caught:
                raise Interrupted(caught[0], f"at step {at.step}, whose checkpoint is written")
        if not evaluated:  # it was over when it was resumed
            evaluated, spent = _measure(program.evaluate, state)
            at.evaluation += spent
        if task.solution is not None:
            write_json(folder / "solution.json", _solution(plan, task, state))
        summary = finite(_summary(plan, at, evaluated))
        write_json(folder / "summary.json", summary)
        tell(events.Finished(summary))
    return summary


def _solution(plan: Plan, task: Task, state: Any) -> dict[str, Any]:
    """The first seed's solution of an equation, to six digits, for its picture."""
    assert task.solution
    params = jax.tree.map(lambda x: x[0], state.params) if len(plan.seeds) > 1 else state.params
    axes, *values = task.solution(params)
    prediction, truth = ([[float(f"{v:.6g}") for v in row] for row in np.asarray(part)] for part in values)
    return {
        "axes": {name: np.asarray(x).tolist() for name, x in axes.items()},
        "prediction": prediction,
        "truth": truth,
    }


def _timed(plan: Plan, task: Task) -> tuple[Plan, Program]:
    """A race with the number of steps that its budget has room for, and its program."""
    assert plan.budget
    program = Program(plan, task)
    per_step = seconds_per_step(program, least=max(0.3, plan.budget / 50))
    plan = dataclasses.replace(plan, steps=max(1, round(plan.budget / per_step)))
    if plan.decays:
        spent, program = program.compile_seconds, Program(plan, task)
        program.compile_seconds = spent
    return plan, program


def _measure(fn: Callable[..., Result], *args: Any) -> tuple[Result, float]:
    begin = clock()
    result = fn(*args)
    return result, max(clock() - begin, 1e-9)  # a coarse clock may stand still, and rates divide by it


def _summary(plan: Plan, at: Position, evaluated: dict[str, np.ndarray]) -> dict[str, Any]:
    lost = [str(seed) in at.diverged for seed in plan.seeds]
    final = {name: np.where(lost, np.nan, values.reshape(-1)).tolist() for name, values in evaluated.items()}
    seconds = at.training / len(plan.seeds)
    return {
        "problem": plan.problem,
        "optimiser": plan.optimiser,
        "seeds": list(plan.seeds),
        "together": len(plan.seeds),
        "status": "diverged" if all(lost) else "finished",
        "diverged": at.diverged,
        "steps": at.step,
        "epochs": at.step / plan.steps_per_epoch,
        **final,
        "seconds": seconds,
        "seconds_per_step": seconds / max(at.step, 1),
        "evaluation_seconds": at.evaluation,
        "compile_seconds": at.compilation,
    }


def _lines(
    plan: Plan,
    at: Position,
    elapsed: float,
    figures: dict[str, np.ndarray],
    evaluated: dict[str, np.ndarray],
    every_step: bool,
) -> list[Line]:
    """The lines for the steps that took `elapsed` seconds up to `at`, where seeds that diverge in them are noted.

    Where a loss is not finite there is a line always, the last one of its seed.
    """
    count, together, lines = len(figures["loss"]), len(plan.seeds), []
    table = {_NAMES.get(name, name): values.reshape(count, -1) for name, values in figures.items()}
    measured = {name: values.reshape(-1) for name, values in evaluated.items()}
    for j, seed in enumerate(plan.seeds):
        if str(seed) in at.diverged:
            continue
        lost = next(iter(np.flatnonzero(~np.isfinite(table["train"][:, j]))), count)
        if not (every_step or evaluated or lost < count):
            continue
        last = min(lost, count - 1)
        for i in range(0 if every_step else last, last + 1):
            step, later = at.step - count + i + 1, elapsed * (count - i - 1) / count
            line: Line = {"step": step, "epoch": step / plan.steps_per_epoch}
            line |= {"seconds": (at.training - later) / together} | ({"seed": seed} if together > 1 else {})
            line |= {name: float(values[i, j]) for name, values in table.items()}
            if i == count - 1 and i != lost:
                line |= {name: float(values[j]) for name, values in measured.items()}
            if not (math.isfinite(line["train"]) and math.isfinite(line.get("val", 0.0))):
                at.diverged[str(seed)] = step
            lines.append(line)
    return sorted(lines, key=lambda line: line["step"])


class _Clock:
    """When a run ends, when it evaluates, and how many steps it makes before it looks up."""

    def __init__(self, plan: Plan, at: Position):
        assert plan.steps
        self._steps, self._seeds, self._per_step = plan.steps, len(plan.seeds), math.inf
        self._budget = plan.budget if plan.by_clock else None
        self._points = set() if self._budget else set(plan.points())
        marks = np.geomspace(self._budget / 64, self._budget, MARKS) if self._budget else ()
        self._marks = [mark for mark in marks if mark > at.training]

    def ended(self, at: Position) -> bool:
        """Whether the run is over; divergence ends it at an evaluation, so that the plan determines its length."""
        if len(at.diverged) == self._seeds and (self._budget or at.step in self._points):
            return True
        return at.training >= self._budget if self._budget else at.step >= self._steps

    def count(self, at: Position) -> int:
        """Steps until the next evaluation or the next look up, whichever is first."""
        span = min(CHUNK_SECONDS, self._marks[0] - at.training) if self._marks else CHUNK_SECONDS
        ahead = min((point - at.step for point in self._points if point > at.step), default=LIMIT)
        return max(1, min(ahead, int(span / self._per_step)))

    def learn(self, per_step: float) -> None:
        """Takes note of a measured time per step."""
        self._per_step = per_step if math.isinf(self._per_step) else (self._per_step + per_step) / 2

    def evaluates(self, at: Position) -> bool:
        """Whether an evaluation is due; asked once after each piece."""
        due = [mark for mark in self._marks if mark <= at.training]
        self._marks = self._marks[len(due) :]
        return bool(due) or at.step in self._points
