"""One training run: its files, its clock, and the way back to it after a crash.

Training time is counted alone; compiling and evaluating are not. Lines of metrics are written before the checkpoint
that follows them, and what lies beyond a checkpoint is dropped when a run goes on from it: each step has one line.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import jax
import numpy as np

from saddlefree.lab import checkpoint, optimisers, problems
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import Metrics, read_json, write_json
from saddlefree.lab.program import Program, precision, seconds_per_step
from saddlefree.lab.task import Task

CHUNK_SECONDS = 0.5
"""How long the program computes before it looks up: for signals, the display and the clock."""

_NAMES = {"loss": "train"}  # of figures, where a line has another name for them

Display = Callable[[int, int, dict[str, float]], None]
"""Shows the step, how many there are, and the latest figures."""


class Interrupted(Exception):  # noqa: N818 (it is none)
    """A signal ended the work, of which nothing is lost."""

    def __init__(self, number: int, where: str):
        super().__init__(f"interrupted {where}; go on with --resume")
        self.code = 128 + number


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a run is; it is kept with each checkpoint."""

    step: int = 0
    seconds: float = 0.0
    diverged: dict[str, int] = dataclasses.field(default_factory=dict)  # seed to the step where its loss was not finite


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run: all that the result depends on."""

    problem: str
    optimiser: str
    values: dict[str, Any]  # hyperparameters, and a batch size where it is not the problem's
    seeds: tuple[int, ...]  # several are run together
    epochs: float
    budget: float | None = None  # seconds of training; takes the place of `epochs`

    def record(self) -> dict[str, Any]:
        """As it is kept in a file."""
        return {**dataclasses.asdict(self), "seeds": list(self.seeds)}


def cores() -> int:
    """Of the processor, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def circumstances(task: Task) -> dict[str, Any]:
    """What else is worth knowing of a run."""
    packages = ("saddlefree", "jax", "jaxlib", "optax", "flax", "kfac-jax", "numpy")
    return {
        "data": {"source": task.source, "partial": task.partial},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "machine": {"platform": jax.default_backend(), "system": platform.system(), "cores": cores()},
    }


def open_folder(folder: pathlib.Path, config: dict[str, Any], resume: bool) -> None:
    """Makes the folder of a run and its `config.json`; one that is there already must be the same run's."""
    path = folder / "config.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not resume:
                raise UserError(f"{folder} holds a run already: go on with --resume, or choose another --out")
            before, now = read_json(path)["plan"], config["plan"]
            changed = [name for name in now if before.get(name) != now[name]]
            if changed:
                name = changed[0]
                raise UserError(
                    f"{folder} holds another run ({name} was {before.get(name)!r}, is {now[name]!r}): "
                    "resume with the same arguments, or choose another --out"
                )
        else:
            write_json(path, config)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another --out") from error


def run(
    plan: Plan,
    task: Task,
    folder: pathlib.Path,
    *,
    every_step: bool = False,
    checkpoint_every: float = 30.0,
    keep_checkpoint: bool = True,
    evaluations: int | None = None,
    display: Display = lambda step, steps, figures: None,
) -> dict[str, Any]:
    """Trains as planned, from the start or the last checkpoint, and returns what it wrote to `summary.json`.

    Args:
      plan: what to run.
      task: the problem's, loaded.
      folder: of this run.
      every_step: whether each step has a line of metrics, and TensorBoard its events; otherwise each evaluation has.
      checkpoint_every: seconds between checkpoints.
      keep_checkpoint: whether the last state is kept when the run is finished.
      evaluations: in the whole run, beside a few early ones; None is the problem's own number.
      display: shows progress.
    """
    problem = problems.find(plan.problem)
    with _alone(folder), precision(problem), _signals() as caught:
        if (folder / "summary.json").exists():
            return read_json(folder / "summary.json")
        program, per_step = _program(plan, task, problem)
        clock = _Clock(plan, program, evaluations or problem.evaluations, per_step)
        state, at = program.start(), Position()
        if checkpoint.latest(folder) is not None:
            state, record = checkpoint.restore(folder, state)
            at = Position(record["step"], record["seconds"], record["diverged"])
        program.prepare(state)
        metrics = Metrics(folder, at.step, tensorboard=every_step)
        saved, evaluated = time.monotonic(), {}
        try:
            while not clock.ended(at) and len(at.diverged) < len(plan.seeds):
                count = clock.count(at)
                begin = time.perf_counter()
                state, figures = program.advance(state, at.step, count)
                elapsed = time.perf_counter() - begin
                clock.learn(elapsed / count)
                before, at = at, Position(at.step + count, at.seconds + elapsed, at.diverged)
                evaluated = program.evaluate(state) if clock.evaluates(at) else {}
                lines = _lines(plan, program, before, at, figures, evaluated, per_step, every_step)
                metrics.write(lines)
                shown = lines[-1] if lines else {"train": float(figures["loss"][-1].reshape(-1)[0])}
                display(at.step, program.steps, {**shown, "steps_per_second": count / elapsed})
                if caught or time.monotonic() - saved > checkpoint_every:
                    metrics.sync()
                    checkpoint.save(folder, at.step, state, dataclasses.asdict(at))
                    saved = time.monotonic()
                if caught:
                    raise Interrupted(caught[0], f"at step {at.step}, whose checkpoint is written")
            if keep_checkpoint:
                metrics.sync()
                checkpoint.save(folder, at.step, state, dataclasses.asdict(at))
        finally:
            metrics.close()
        # The last piece has been evaluated, unless the run diverged in it or was over when it was resumed.
        final = {name: x.reshape(-1).tolist() for name, x in (evaluated or program.evaluate(state)).items()}
    summary = {
        "problem": plan.problem,
        "optimiser": plan.optimiser,
        "seeds": list(plan.seeds),
        "status": "diverged" if len(at.diverged) == len(plan.seeds) else "finished",
        "diverged": at.diverged,
        "steps": at.step,
        "epochs": at.step / program.steps_per_epoch,
        **final,
        "seconds": at.step * per_step if program.mapped else at.seconds,
        "seconds_per_step": per_step if program.mapped else at.seconds / max(at.step, 1),
        "program_seconds": at.seconds,
        "compile_seconds": program.compile_seconds,
    }
    write_json(folder / "summary.json", summary)
    return summary


def _program(plan: Plan, task: Task, problem: problems.Problem) -> tuple[Program, float]:
    """The program, and the seconds that a step of one seed takes, measured where they are needed."""
    optimiser = optimisers.find(plan.optimiser)
    program = Program(problem, task, optimiser, plan.values, plan.seeds, plan.epochs)
    if plan.budget is None and not program.mapped:
        return program, 1e-3
    single = Program(problem, task, optimiser, plan.values, plan.seeds[:1], plan.epochs) if program.mapped else program
    per_step = seconds_per_step(single)
    if plan.budget is not None:
        epochs = plan.budget / per_step / program.steps_per_epoch
        if plan.values.get("decay", "none") != "none":  # the rate depends on how many steps there will be
            program = Program(problem, task, optimiser, plan.values, plan.seeds, epochs)
        program.steps = max(1, round(epochs * program.steps_per_epoch))
    return program, per_step


def _lines(
    plan: Plan,
    program: Program,
    before: Position,
    at: Position,
    figures: dict[str, np.ndarray],
    evaluated: dict[str, np.ndarray],
    per_step: float,
    every_step: bool,
) -> list[dict[str, Any]]:
    """The lines for the steps between two positions; seeds that diverge in them are noted in `at`."""
    count, lines = at.step - before.step, []
    for i in range(count) if every_step else range(count - 1, count) if evaluated else ():
        number = before.step + i + 1
        seconds = before.seconds + (at.seconds - before.seconds) * (i + 1) / count
        for j, seed in enumerate(plan.seeds):
            if str(seed) in at.diverged:
                continue
            line = {"step": number, "epoch": number / program.steps_per_epoch}
            line |= {"seconds": number * per_step, "seed": seed} if program.mapped else {"seconds": seconds}
            line |= {_NAMES.get(name, name): float(values[i].reshape(-1)[j]) for name, values in figures.items()}
            if i == count - 1:
                line |= {name: float(values.reshape(-1)[j]) for name, values in evaluated.items()}
            if not np.isfinite([line["train"], line.get("val", 0.0)]).all():
                at.diverged[str(seed)] = number
            lines.append(line)
    return lines


class _Clock:
    """When a run ends, when it evaluates, and how far to go before looking up."""

    def __init__(self, plan: Plan, program: Program, evaluations: int, per_step: float):
        self._budget, self._steps, self._room = plan.budget, program.steps, program.room
        self._per_step = per_step
        every = -(-program.steps // evaluations)
        early = {2**k for k in range(32) if 2**k < every}
        self._points = sorted({*early, *range(every, program.steps, every), program.steps})
        self._marks = [] if plan.budget is None else list(np.geomspace(plan.budget / 50, plan.budget, 40))

    def ended(self, at: Position) -> bool:
        """Whether the run is over."""
        return at.step >= self._steps if self._budget is None else at.seconds >= self._budget

    def count(self, at: Position) -> int:
        """Steps until the next evaluation, the next look up or the end of the room, whichever is first."""
        span, ahead = CHUNK_SECONDS, self._room(at.step)
        if self._budget is None:
            ahead = min(ahead, next(point for point in self._points if point > at.step) - at.step)
        else:
            span = min(span, next(mark for mark in self._marks if mark > at.seconds) - at.seconds)
        return max(1, min(ahead, int(span / self._per_step)))

    def learn(self, per_step: float) -> None:
        """Takes note of a measured time per step."""
        self._per_step = (self._per_step + per_step) / 2

    def evaluates(self, at: Position) -> bool:
        """Whether an evaluation is due; asked once after each piece."""
        if self._budget is None:
            return at.step in self._points
        due = sum(mark <= at.seconds for mark in self._marks)
        self._marks = self._marks[due:]
        return due > 0


@contextmanager
def _alone(folder: pathlib.Path, patience: float = 10.0) -> Iterator[None]:
    """Keeps other processes out of a folder, for as long as this one lives; one that is just ending is waited for."""
    if fcntl is None:
        yield
        return
    handle, begin = os.open(folder, os.O_RDONLY), time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - begin > patience:
                    raise UserError(
                        f"{folder} is in use by another process: let it end, or choose another --out"
                    ) from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        if caught:  # asked twice: at once, then
            raise KeyboardInterrupt
        caught.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals do not arrive
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
