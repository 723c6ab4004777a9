"""Arguments of the command line: their types, and what they stand for, checked before anything heavy is imported."""

import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from saddlefree.lab import plugins
from saddlefree.lab.errors import UserError
from saddlefree.lab.settings import Setting

Text = tyro.conf.Positional[str]
Problem = Annotated[Text, tyro.conf.arg(metavar="PROBLEM", help="one of `saddlefree problems`.")]
Optimiser = Annotated[Text, tyro.conf.arg(metavar="OPTIMISER", help="one of `saddlefree optimisers`.")]
Number = Annotated[float | None, tyro.conf.arg(metavar="NUMBER")]
Whole = Annotated[int | None, tyro.conf.arg(metavar="NUMBER")]
Time = Annotated[str | None, tyro.conf.arg(metavar="TIME")]
Pairs = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUE")]
Variant = Annotated[Pairs, tyro.conf.arg(help="a setting of the problem, such as width=64; may be repeated.")]
Out = Annotated[str | None, tyro.conf.arg(metavar="DIR", help="the folder for the results.")]
Resume = Annotated[bool, tyro.conf.arg(help="go on with what that folder holds.")]
Plugins = Annotated[
    tyro.conf.UseAppendAction[tuple[pathlib.Path, ...]],
    tyro.conf.arg(metavar="FILE.py", help="a file of your own with problems or optimisers; may be repeated."),
]
Data = Annotated[str | None, tyro.conf.arg(metavar="DIR", help="where data sets are looked for first.")]

SEED = Setting(0, high=2**31 - 1, whole=True)
COUNT = Setting(1, low=1, high=10**9, whole=True)
EPOCHS = Setting(1.0, low=1e-9, high=1e9)


def seconds(text: str) -> float:
    """A time such as `60s`, `5min` or `2h`.

    >>> seconds("90"), seconds("1.5min")
    (90.0, 90.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d*)?)\s*(s|min|h)?", text.strip())
    if not found or not float(found[1]):
        raise UserError(f"a time must be a number > 0 with s, min or h after it, such as 60s or 5min, got {text!r}")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2] or "s"]


def pairs(texts: Sequence[str], option: str = "--set") -> dict[str, str]:
    """`name=value` pairs."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UserError(f"{option} must be name=value, such as learning_rate=0.01, got {text!r}")
        found[name] = value
    return found


def folder_of(out: str | None, name: str) -> pathlib.Path:
    """The folder for results: `--out`, or `name` under runs/."""
    if out is not None and not out.strip():
        raise UserError("--out must be the path of a folder, got an empty one: leave it out, or name one")
    return pathlib.Path(out) if out else pathlib.Path("runs") / re.sub(r"[^\w.-]", "_", name)


def load_plugins(paths: Sequence[pathlib.Path], folder: pathlib.Path, resume: bool) -> dict[str, str]:
    """Loads the user's files; a run that goes on must have been begun with the same."""
    found = plugins.load(paths)
    if resume and (folder / "config.json").exists():
        from saddlefree.lab.metrics import read_json

        before = read_json(folder / "config.json")
        plugins.check(folder, before.get("plugins") or {} if isinstance(before, dict) else {}, found)
    return found


def length(epochs: float | None, budget: str | None, steps: int | None = None) -> dict[str, Any]:
    """How long a run is, said in one way at most."""
    given = {"--epochs": epochs, "--steps": steps, "--budget": budget}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UserError(f"{named[0]} and {named[1]} both say how long a run is: leave out one of them")
    if epochs is not None:
        EPOCHS.parse("epochs", epochs)
    found: dict[str, Any] = {"epochs": epochs, "budget": limit(budget)}
    return found | ({} if steps is None else {"steps": COUNT.parse("steps", steps)})


def limit(text: str | None) -> float | None:
    """The seconds of `--budget`, where it is given."""
    return None if text is None else seconds(text)
