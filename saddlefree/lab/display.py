"""What a person sees while a command works: progress, tables, one-line errors."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from saddlefree.lab.compare import Announce
from saddlefree.lab.run import Display

CONSOLE = Console(width=None if sys.stdout.isatty() else 150)
ERRORS = Console(stderr=True)
_SHOWN = {"train": "loss", "val": "val", "damping": "λ", "learning_rate": "η", "steps_per_second": "steps/s"}


@contextmanager
def progress() -> Iterator[Announce]:
    """A live bar for each run that is announced: step, latest figures, time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=ERRORS, disable=not ERRORS.is_terminal) as bars:

        def announce(text: str) -> Display:
            bar = bars.add_task(text, total=None, figures="compiling")

            def show(step: int, steps: int, figures: dict[str, float]) -> None:
                shown = (f"{label} {figures[name]:.3g}" for name, label in _SHOWN.items() if name in figures)
                bars.update(bar, completed=step, total=max(step, steps), figures="  ".join(shown))

            return show

        yield announce


@contextmanager
def trials(names: Sequence[str]) -> Iterator[Callable[[Sequence[dict[str, Any]]], None]]:
    """A live table of a search: the trials that run, then the best ones, with these hyperparameters of each."""
    with Live(console=ERRORS, auto_refresh=False, transient=True) as live:

        def show(records: Sequence[dict[str, Any]]) -> None:
            if ERRORS.is_terminal:
                live.update(ranked(records, names), refresh=True)

        yield show


def ranked(records: Sequence[dict[str, Any]], names: Sequence[str], most: int = 12) -> Table:
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
