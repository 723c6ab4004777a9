"""Plans: everything that determines a run, and nothing that depends on the machine's speed or on how often it stopped.

`build` makes a plan of what a user asks for, `configuration` the `config.json` of a list of plans.
"""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from saddlefree import __version__
from saddlefree.lab import optimisers, problems
from saddlefree.lab.errors import UserError
from saddlefree.lab.peers import packages
from saddlefree.lab.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run. A plan of several seeds that are not mapped is run as one plan for each seed (`parts`)."""

    problem: str
    variant: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # parameters of the problem
    optimiser: str
    values: Mapping[str, Any]  # all hyperparameters
    seeds: tuple[int, ...]
    mapped: bool  # whether the seeds run in one program
    steps: int | None  # length of the run and horizon of schedules; None: `budget`, as long as no step is timed
    examples: int  # for training
    batch_size: int | None  # None: all examples in every step
    float64: bool
    evaluations: int | tuple[int, ...]  # how many, or at which steps
    evaluated: int | None  # at most so many examples of each part
    budget: float | None = None  # seconds of a race
    plugin: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names of the user's files, with their SHA-256

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in the training set."""
        return self.examples // self.batch_size if self.batch_size else 1

    @property
    def decays(self) -> bool:
        """Whether the learning rate depends on the number of steps."""
        return self.values.get("decay", "none") != "none"

    @property
    def by_clock(self) -> bool:
        """Whether the run ends when the budget is spent; a race whose rate decays ends after `steps`."""
        return self.budget is not None and not self.decays

    @property
    def label(self) -> str:
        """For people."""
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"seed {self.seeds[0]}"
        return f"{self.problem}, {self.optimiser}, {seeds}"

    def points(self) -> list[int]:
        """The steps after which a run of `steps` is evaluated: as many as asked for, and a few early ones."""
        assert self.steps
        if not isinstance(self.evaluations, int):
            return sorted({*self.evaluations, self.steps})
        every = -(-self.steps // self.evaluations)
        early = {2**k for k in range(32) if 2**k < every}
        return sorted({*early, *range(every, self.steps, every), self.steps})

    def parts(self) -> list["Plan"]:
        """Plans that each run as one program."""
        return [self] if self.mapped else [dataclasses.replace(self, seeds=(seed,)) for seed in self.seeds]

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        record = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}


def build(
    problem: str,
    optimiser: str,
    task: Task,
    *,
    changes: Mapping[str, Any] | None = None,
    seeds: Iterable[int] = (0,),
    epochs: float | None = None,
    steps: int | None = None,
    budget: float | None = None,
    evaluations: int | tuple[int, ...] | None = None,
    variant: Mapping[str, Any] | None = None,
    plugin: Mapping[str, str] | None = None,
    apart: bool = False,
) -> Plan:
    """The plan for what a user asks for; None is the problem's own number.

    Args:
      problem, optimiser: their names.
      task: the problem's, loaded.
      changes: hyperparameters other than the registered ones, and a `batch_size` other than the problem's.
      seeds: of initial parameters and batches.
      epochs: the length of the run; or
      steps: its length; or
      budget: seconds of training, for each seed.
      evaluations: in the whole run, beside a few early ones, or the steps of them.
      variant: settings of the problem other than its own, as the task was loaded with.
      plugin: the files that define problem or optimiser, as `plugins.load` returns them.
      apart: runs seeds one after another, also where they could be mapped.
    """
    entry, chosen = problems.find(problem), tuple(seeds)
    given = [name for name, value in (("epochs", epochs), ("steps", steps), ("budget", budget)) if value is not None]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} both say how long a run is: leave out one of them")
    values = optimisers.configured(optimiser, problem, changes or {})
    size = values.pop("batch_size", None) or entry.batch_size
    if size is not None and size > task.examples:
        raise UserError(f"batch_size must be at most the {task.examples} training examples, got {size}")
    together = len(chosen) > 1 and not budget and not apart
    plan = Plan(
        problem=problem,
        variant=entry.variant(variant),
        optimiser=optimiser,
        values=values,
        seeds=chosen,
        mapped=together and optimisers.find(optimiser).mapped and not entry.convolutional,
        steps=steps,
        examples=task.examples,
        batch_size=None if size == task.examples else size,
        float64=entry.float64,
        evaluations=evaluations or entry.evaluations,
        evaluated=entry.evaluated,
        budget=budget,
        plugin=dict(plugin or {}),
    )
    if given not in ([], ["epochs"]):
        return plan
    return dataclasses.replace(plan, steps=max(1, round((epochs or entry.epochs) * plan.steps_per_epoch)))


def configuration(command: str, plans: Sequence[Plan], task: Task, **more: Any) -> dict[str, Any]:
    """What `config.json` holds; a folder's `plan` must be the same when it is resumed.

    Args:
      command: that makes the folder.
      plans: what it runs, on one problem; none for a study that trains nothing.
      task: the problem's.
      more: what else is to be kept; it takes the place of what has the same name.
    """
    config: dict[str, Any] = {"command": command}
    if plans:
        first = plans[0]
        entry = problems.find(first.problem)
        own = entry.variant()
        config |= {
            "title": entry.title,
            "problem": first.problem,
            "variant": {name: value for name, value in first.variant.items() if value != own[name]},
            "optimisers": {plan.optimiser: plan.values for plan in plans},
            "seeds": list(first.seeds),
            "epochs": first.steps and first.steps / first.steps_per_epoch,
            "budget": first.budget,
            "test": entry.test,
            "batch_size": {plan.optimiser: plan.batch_size for plan in plans},
            "plugins": first.plugin,
            "peers": packages(plan.optimiser for plan in plans),
            "plan": first.record() if command == "train" else {plan.optimiser: plan.record() for plan in plans},
        }
    return {**config, **more, "data": {"source": task.source, "partial": task.partial}, **environment()}


def environment() -> dict[str, dict[str, Any]]:
    """The versions and the machine that figures are measured with."""
    packages = ("jax", "jaxlib", "optax", "flax", "kfac-jax", "numpy")
    versions = {"python": platform.python_version(), "saddlefree": __version__}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    machine = {"platform": jax.default_backend(), "system": platform.system(), "cores": cores()}
    return {"versions": versions, "machine": machine}


def difference(before: Any, now: Any, name: str = "plan") -> str | None:
    """The first difference of two plans as JSON has them, in words, or None; a race is not timed again."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [key for key in {**before, **now} if key != "steps" or now.get("steps") is not None]
        found = (difference(before.get(key), now.get(key), key) for key in names)
        return next((text for text in found if text), None)
    if isinstance(before, dict) or isinstance(now, dict):
        return f"{name} is {'missing' if now is None else 'new'}"
    return None if before == now else f"{name} was {before!r}, is {now!r}"


def cores() -> int:
    """Of the processor, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
