"""What happens while work goes on, told to a listener: the terminal, metrics files, TensorBoard and Ray are ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Line = dict[str, Any]


class Started(NamedTuple):
    """Work begins, or goes on after a number of steps."""

    label: str
    step: int
    steps: int  # that there will be; in a race, about
    state: Any = None  # of a run, only valid until the listener returns


class Compiled(NamedTuple):
    """Everything is compiled."""

    seconds: float


class Progress(NamedTuple):
    """Some steps were made."""

    step: int
    steps: int
    figures: Mapping[str, float]  # the latest
    lines: Sequence[Line] = ()  # of metrics.jsonl, that are new


class Evaluated(NamedTuple):
    """Losses were measured."""

    step: int
    lines: Sequence[Line]  # one for each seed that has not diverged before
    state: Any  # only valid until the listener returns


class Saving(NamedTuple):
    """A checkpoint is about to be written: what a listener keeps must be on the disk when it returns."""

    step: int


class Finished(NamedTuple):
    """The end, by the last step, by the clock or by divergence."""

    summary: Mapping[str, Any]  # `status` says which


class Searched(NamedTuple):
    """Something is new in a search."""

    trials: Sequence[Mapping[str, Any]]


Event = Started | Compiled | Progress | Evaluated | Saving | Finished | Searched
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Does nothing."""
