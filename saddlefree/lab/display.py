"""What a person sees while a command works: progress, tables, one-line errors."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
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


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Prints a table; columns of numbers are aligned on the right."""
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    CONSOLE.print(shown)
