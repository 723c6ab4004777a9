"""What a person sees while a command works: progress, tables, one-line errors."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from saddlefree.lab import events, tables
from saddlefree.lab.events import Listener

CONSOLE = Console(width=None if sys.stdout.isatty() else 150)
ERRORS = Console(stderr=True)
_SHOWN = {"train": "loss", "val": "val", "damping": "λ", "learning_rate": "η", "steps_per_second": "steps/s"}


@contextmanager
def progress() -> Iterator[Listener]:
    """A listener with a live bar for each run: step, latest figures, time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Bars(*columns, console=ERRORS, disable=not ERRORS.is_terminal) as bars:

        def listen(event: events.Event) -> None:
            match event:
                case events.Started(label, step, steps):
                    bars.add_task(label, total=steps, completed=step, figures="compiling")
                case events.Progress(step, steps, figures):
                    shown = (f"{name} {figures[key]:.3g}" for key, name in _SHOWN.items() if key in figures)
                    bar = bars.task_ids[-1]
                    bars.update(bar, completed=step, total=max(step, steps), figures="  ".join(shown))

        yield listen


@contextmanager
def trials(names: Sequence[str]) -> Iterator[Listener]:
    """A listener with a live table of a search: trials that run, then the best, with these hyperparameters of each."""
    with Live(console=ERRORS, auto_refresh=False, transient=True) as live:

        def listen(event: events.Event) -> None:
            if isinstance(event, events.Searched) and ERRORS.is_terminal:
                live.update(ranked(event.trials, names), refresh=True)

        yield listen


def ranked(trials: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """The best trials as a table."""
    found = tables.tuning(trials, names, shown=12)
    return _table(found.columns, [[cell.text for cell in row] for row in found.rows], found.caption)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Prints a table; columns of numbers are aligned on the right."""
    CONSOLE.print(_table(columns, rows, title))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> Table:
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown
