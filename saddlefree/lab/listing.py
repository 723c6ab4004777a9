"""What the command line prints: problems and optimisers, in lists and in detail, and the tables of a folder."""

import pathlib
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.padding import Padding

from saddlefree.lab import optimisers, plugins, problems
from saddlefree.lab.arguments import Data, Plugins
from saddlefree.lab.display import CONSOLE, plain, table
from saddlefree.lab.errors import UserError
from saddlefree.lab.paper import LABELS


def list_problems(
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="PROBLEM")] = None,
    *,
    plugin: Plugins = (),
    data_dir: Data = None,
) -> None:
    """Lists the problems, and whether their data is at hand; or describes one.

    Args:
      name: the one to be described.
    """
    plugins.load(plugin)
    if name is not None:
        describe(name, data_dir)
        return
    rows = []
    for key, entry in problems.PROBLEMS.items():
        batch = "all" if entry.batch_size is None else str(entry.batch_size)
        rows.append([key, entry.title, str(entry.epochs), batch, _data(entry, data_dir)])
    table(["problem", "what", "epochs", "batch", "data"], rows, drop=["batch", "epochs"])
    CONSOLE.print("`saddlefree problems PROBLEM` describes one", highlight=False)


def describe(name: str, data_dir: str | None) -> None:
    """Prints all that the entry of a problem says."""
    entry = problems.find(name)
    parameters = entry.parameters()
    count = f", {parameters:,} parameters" if parameters else ""
    batch = "the full batch" if entry.batch_size is None else f"batches of {entry.batch_size}"
    facts = {
        "problem": entry.about,
        "network": f"{entry.network or 'MLP'}{count}" if entry.network or count else "",
        "data": _data(entry, data_dir),
        "training": f"{entry.epochs:,} epochs of {batch}, float{64 if entry.float64 else 32}",
        "test figure": entry.test,
        "source": entry.source,
        "licence": entry.licence,
    }
    if entry.data is not None and entry.validation:
        from saddlefree.lab import data

        spec = data.SETS[entry.data]
        val = round(spec.train * entry.validation)
        facts["examples"] = f"{spec.train - val:,} for training, {val:,} for validation, {spec.test:,} for test"
    CONSOLE.print(f"[bold]{name}[/]: {escape(entry.title)}", highlight=False)
    for key, text in facts.items():
        if text:
            CONSOLE.print(Padding(f"{key}: {escape(text)}", (0, 0, 0, 2)), highlight=False)
    if entry.variants:
        rows = [[key, _short(s.default), s.allowed, s.about] for key, s in entry.variants.items()]
        table(["variant", "default", "allowed", "what"], rows)
    for who, variant in entry.published.items():
        text = " ".join(f"--variant {key}={value}" for key, value in variant.items())
        CONSOLE.print(Padding(f"{who}: {text}", (0, 0, 0, 2)), highlight=False)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _data(entry: problems.Problem, data_dir: str | None) -> str:
    if entry.data is None:
        return "needs none"
    from saddlefree.lab import data

    return data.status(entry.data, data_dir)


def list_optimisers(*, problem: str | None = None, plugin: Plugins = ()) -> None:
    """Lists the optimisers, what each is called in the paper, and their hyperparameters with defaults.

    Args:
      problem: shows the values that a run on it would use.
    """
    plugins.load(plugin)
    entry = None if problem is None else problems.find(problem)
    for name, each in optimisers.OPTIMISERS.items():
        theirs = f" (the paper's {LABELS[name]})" if name in LABELS else ""
        values = optimisers.configured(name, problem or "", {})
        if entry is not None and entry.batch_size is not None:
            values.setdefault("batch_size", entry.batch_size)
        lacks = " [yellow]needs: pip install 'saddlefree\\[peers]'[/]" if each.missing else ""
        CONSOLE.print(f"[bold]{name}[/]{escape(theirs)}: {escape(each.about)}{lacks}", highlight=False)
        text = "  ".join(f"{key}={value}" for key, value in values.items())
        CONSOLE.print(Padding(escape(text), (0, 0, 0, 4)), highlight=False)


_DROPPED = ("Seconds", "ms per step", "Diverged", "Best validation", "Accuracy, %", "Test loss")


def show(folder: pathlib.Path) -> None:
    """Writes the report of a folder, and prints its tables."""
    if not any(folder.glob("config.json")) and not any(folder.glob("*/config.json")):
        raise UserError(f"{folder / 'config.json'} is missing: is {folder} the folder of a run?")
    from saddlefree.lab import report

    page, tables = report.write(folder)
    for each in tables:
        rows = [
            [f"{cell.text}\n[dim]paper: {cell.paper}[/]" if cell.paper else cell.text for cell in row]
            for row in each.rows
        ]
        drop = [name for name in _DROPPED if name in each.columns] or each.columns[1:-1]
        table(each.columns, rows, each.caption, drop)
    say(f"report: {page}")


def say(text: str, markup: bool = False) -> None:
    """Prints a line as it is, however long."""
    CONSOLE.print(text if markup else escape(text), soft_wrap=True, highlight=False)


def number(value: float | None) -> str:
    """A figure, or a dash."""
    return "—" if value is None else plain(value)
