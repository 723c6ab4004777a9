"""What a person sees: progress while a command works, tables, text. All of it fits the terminal's width, or COLUMNS."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from saddlefree.lab import events, tables
from saddlefree.lab.events import Listener

CONSOLE = Console()
ERRORS = Console(stderr=True)
_SHOWN = {"train": "loss", "val": "val", "steps_per_second": "steps/s", "damping": "λ", "learning_rate": "η"}
_BAR, _BESIDE = 10, 32  # the bar's width, and that of bar, count of steps and time left


@contextmanager
def progress() -> Iterator[Listener]:
    """A listener with a live bar for each run: step, time left, and as many of the latest figures as there is room."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=_BAR),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Bars(*columns, console=ERRORS, disable=not ERRORS.is_terminal) as bars:

        def listen(event: events.Event) -> None:
            match event:
                case events.Started(label, step, steps):
                    # The command names the problem: where it leaves little room, the rest of the label will do.
                    short = label if cell_len(label) <= ERRORS.width // 4 else label.partition(", ")[2]
                    bars.add_task(short, total=steps, completed=step, figures="compiling")
                case events.Progress(step, steps, figures):
                    bar = bars.task_ids[-1]
                    room = ERRORS.width - _BESIDE - max(cell_len(task.description) for task in bars.tasks)
                    bars.update(bar, completed=step, total=max(step, steps), figures=shown(figures, room))

        yield listen


def shown(figures: Mapping[str, float], room: int) -> str:
    """The most important figures, as many as fit.

    >>> shown({"train": 0.0123, "damping": 1e-5, "steps_per_second": 12345.6}, 27)
    'loss 0.0123  steps/s 12,346'
    """
    text = ""
    for key, name in _SHOWN.items():
        if key in figures and cell_len(longer := f"{text}  {name} {plain(figures[key])}".strip()) <= room:
            text = longer
    return text


def plain(value: float) -> str:
    """Three digits, and no exponent between a thousandth and a million.

    >>> plain(1234.5), plain(0.00123), plain(1e-7)
    ('1,234', '0.00123', '1e-07')
    """
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}"


@contextmanager
def trials(names: Sequence[str]) -> Iterator[Listener]:
    """A listener with a live table of a search: trials that run, then the best, with these hyperparameters of each."""
    with Live(console=ERRORS, auto_refresh=False, transient=True) as live:

        def listen(event: events.Event) -> None:
            if isinstance(event, events.Searched) and ERRORS.is_terminal:
                live.update(ranked(event.trials, names, ERRORS.width), refresh=True)

        yield listen


def ranked(trials: Sequence[Mapping[str, Any]], names: Sequence[str], width: int) -> Table:
    """The best trials as a table."""
    found = tables.tuning(trials, names, shown=12)
    rows = [[cell.text for cell in row] for row in found.rows]
    return _table(found.columns, rows, found.caption, width, ["Epochs", *names[::-1]])


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, drop: Sequence[str] = ()
) -> None:
    """Prints a table; columns of numbers are aligned on the right.

    Args:
      columns, rows: as text.
      title: above it.
      drop: columns that are left out where the terminal is too narrow, the first of them first; the line below names
        them. Others are folded.
    """
    CONSOLE.print(_table(columns, rows, title, CONSOLE.width, drop))


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None, width: int, drop: Sequence[str] = ()
) -> Table:
    # A heading may be folded between its words, a figure only where nothing else helps.
    cells = [
        max((cell_len(line) for text in texts for line in text.split("\n")), default=0)
        for texts in zip(*rows, strict=True)
    ]
    cells = cells or [0] * len(columns)
    words = [max(cell_len(word) for word in name.split()) for name in columns]
    widths = [max(pair) for pair in zip(cells, words, strict=True)]
    kept, left = list(range(len(columns))), list(drop)
    while sum(widths[i] + 3 for i in kept) + 1 > width and left:
        kept.remove(columns.index(left.pop(0)))
    gone = [name for i, name in enumerate(columns) if i not in kept]
    caption = f"Not shown at {width} columns: {', '.join(gone)}" if gone else None
    found = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for i in kept:
        heading = "\n".join(textwrap.wrap(columns[i], widths[i]))
        number = i > 0 and all(row[i][:1] in "0123456789-−—∞" for row in rows)
        found.add_column(heading, justify="right" if number else "left", no_wrap=i == 0, overflow="fold")
    for row in rows:
        found.add_row(*(row[i] for i in kept))
    return found
