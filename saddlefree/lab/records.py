"""Records of measurements, and the pages that quote them.

A record is one JSON file under `results/`, such as `results/uci-energy/adam.json`: what was planned, versions, machine,
and what was found, under `summary`. A page of the documentation quotes records in two ways, both invisible to its
readers:

- A number has a key in a comment right behind it, `3.62e-4<!-- uci-energy/low-rank-batches train -->`. A key is a
  record's name and the way to a value in it: names of entries, values that select rows of a list, or places as `#0`.
  `A / B` and `A * 1000` are allowed, `race/heat-minimise-* marks 80 train` is the median of all records of such a name,
  and `paper/uci-energy/adam train` is one of the paper's.
- What stands between `<!-- begin NAME -->` and `<!-- end -->` is rendered from records.

`refresh` renders both again, so that a page is up to date where it does not change.
"""

import fnmatch
import pathlib
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saddlefree.lab import paper
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import read_json, write_json
from saddlefree.lab.tables import number

Record = dict[str, Any]

KEYED = re.compile(r"((?<![\w.])[-−]?[\d.,]*\d(?:e-?\d+)?)<!-- (.*?) -->")
BLOCK = re.compile(r"<!-- begin (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def write(folder: pathlib.Path, name: str, record: Record) -> None:
    """Writes `folder/NAME.json`, and makes its directory."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", record)


def read(folder: pathlib.Path, name: str) -> Record:
    """The record of this name."""
    return read_json(folder / f"{name}.json")


def names(folder: pathlib.Path, group: str) -> list[str]:
    """The records of a group, such as those of a problem."""
    return sorted(f"{group}/{path.stem}" for path in (folder / group).glob("*.json"))


def evaluate(folder: pathlib.Path, key: str) -> float:
    """The value of a key; products and quotients are evaluated from left to right."""
    first, *others = re.split(r" ([*/]) ", key)
    value = _operand(folder, first)
    for operation, text in zip(others[::2], others[1::2], strict=True):
        other = _operand(folder, text)
        value = value / other if operation == "/" else value * other
    return value


def refresh(text: str, folder: pathlib.Path, blocks: Mapping[str, Callable[[], str]]) -> str:
    """The page `text` with all numbers that have a key, to as many digits as there are, and all blocks rendered again.

    Args:
      text: of the page.
      folder: of the records.
      blocks: what renders each block.
    """

    def block(found: re.Match[str]) -> str:
        if found[1] not in blocks:
            raise UserError(f"block {found[1]!r} is not known: there are {', '.join(blocks)}")
        return f"<!-- begin {found[1]} -->\n\n{blocks[found[1]]().strip()}\n\n<!-- end -->"

    def keyed(found: re.Match[str]) -> str:
        written, key = found.groups()
        value = evaluate(folder, key)
        digits = len(re.sub(r"e.*|[-−.,]", "", written).lstrip("0")) or 1
        text = f"{value:,.0f}" if "," in written else number(value, digits)
        return f"{text.replace('-', '−', 1) if value < 0 else text}<!-- {key} -->"

    return KEYED.sub(keyed, BLOCK.sub(block, text))


def _operand(folder: pathlib.Path, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    name, *steps = shlex.split(text)
    if name.startswith("paper/"):
        of, part = tuple(name.split("/")[1:]), " ".join(steps)
        if of not in paper.RESULTS or part not in paper.Losses._fields:
            raise UserError(f"key {text!r}: the paper has no {', '.join([*of, part])}")
        return getattr(paper.RESULTS[of], part).median
    group, _, pattern = name.rpartition("/")
    chosen = fnmatch.filter(names(folder, group), name) if "*" in pattern else [name]
    if not chosen:
        raise UserError(f"key {text!r}: there is no record of such a name in {folder}")
    return statistics.median(_value(folder, each, steps, text) for each in chosen)


def _value(folder: pathlib.Path, name: str, steps: Sequence[str], key: str) -> float:
    """The number in one record."""
    record = read(folder, name)
    found = record["summary"]
    if isinstance(found, dict):
        found = record | found
    for step in steps:
        found = _step(found, step, key)
    if not isinstance(found, int | float):
        raise UserError(f"key {key!r} is no number in {folder / name}.json: it leads to {str(found)[:60]}")
    return found


def _step(found: Any, step: str, key: str) -> Any:
    """An entry of a dict; of a list the rows one of whose values is `step`, or the row itself where there is one."""
    if isinstance(found, dict) and step in found:
        return found[step]
    if isinstance(found, list):
        cells = [row.values() if isinstance(row, dict) else row if isinstance(row, list) else () for row in found]
        rows = [row for row, values in zip(found, cells, strict=True) if step in map(str, values)]
        if rows:
            return rows[0] if len(rows) == 1 else rows
        if re.fullmatch(r"#-?\d+", step) and -len(found) <= int(step[1:]) < len(found):
            return found[int(step[1:])]
    raise UserError(f"key {key!r}: there is no {step!r}")
