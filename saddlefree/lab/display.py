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

from saddlefree.lab import events
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


def ranked(records: Sequence[Mapping[str, Any]], names: Sequence[str], most: int = 12) -> Table:
    """Trials as a table: those that run, then the best."""
    running = [record for record in records if record["status"] == "unfinished" and record["epoch"]]
    ended = [record for record in records if record["status"] != "unfinished"]
    ended.sort(key=lambda record: (record["val"] is None, record["val"]))
    rows = [
        [
            str(record["trial"]),
            "running" if record in running else record["status"],
            f"{round(record['epoch'], 2):,g}",
            "—" if record["val"] is None else f"{record['val']:.4g}",
            *(_short(record["values"].get(name)) for name in names),
        ]
        for record in [*running, *ended][:most]
    ]
    columns = ["trial", "status", "epochs", "validation", *names]
    return _table(columns, rows, f"{len(ended)} of {len(records)} trials done")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Prints a table; columns of numbers are aligned on the right."""
    CONSOLE.print(_table(columns, rows, title))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> Table:
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown
