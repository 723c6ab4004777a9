"""Where a search for hyperparameters looks, what it draws there, and which trial of it was best."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saddlefree.lab import optimisers, problems
from saddlefree.lab.errors import UserError
from saddlefree.lab.tables import LOST

BATCH_SIZES = tuple(50 * 2**k for k in range(7))

Record = dict[str, Any]
"""A trial: its number, values and status, the last figures that it reported, and the node of Ray's where it ran."""


def names(problem: str, optimiser: str, fixed: Mapping[str, Any]) -> list[str]:
    """What is searched: hyperparameters that have a range, and the batch size where there are batches."""
    found = [name for name, setting in optimisers.find(optimiser).settings.items() if setting.search]
    found += ["batch_size"] * (problems.find(problem).batch_size is not None)
    return [name for name in found if name not in fixed]


def space(problem: str, optimiser: str, fixed: Mapping[str, Any], examples: int) -> dict[str, Record]:
    """What is searched, and where."""
    found = {}
    for name in names(problem, optimiser, fixed):
        if name == "batch_size":
            sizes = _sizes(examples)
            found[name] = {"range": [sizes[0], sizes[-1]], "log": True, "whole": True}
        else:
            setting = optimisers.find(optimiser).settings[name]
            found[name] = {"range": list(setting.search or ()), "log": setting.log, "whole": setting.whole}
    if not found:
        raise UserError(f"{optimiser} has nothing left to search on {problem}: leave out a --set, or use train")
    return found


def draw(problem: str, optimiser: str, fixed: Mapping[str, Any], examples: int, count: int, seed: int) -> list[Record]:
    """`count` configurations: the registered one, so that tuning never ends below it, and random ones."""
    entry, rng = optimisers.find(optimiser), np.random.default_rng(seed)
    base = optimisers.configured(optimiser, problem, fixed)
    searched = space(problem, optimiser, fixed, examples)
    if "batch_size" in searched:
        base.setdefault("batch_size", min(problems.find(problem).batch_size or examples, examples))
    if "order" in searched:  # it needs 2N + 1 terms, and either may be fixed
        base["order"] = min(base["order"], (base["terms"] - 1) // 2)
    elif "terms" in searched:
        base["terms"] = max(base["terms"], 2 * base["order"] + 1)
    found = [base]
    while len(found) < count:
        values = dict(base)
        for name in searched:
            if name == "batch_size":
                values[name] = int(rng.choice(_sizes(examples)))
            elif name == "order":
                values[name] = int(rng.integers((values["terms"] - 1) // 2 + 1))
            else:
                values[name] = entry.settings[name].draw(rng)
        if "terms" in searched and "order" not in searched:
            values["terms"] = max(values["terms"], 2 * base["order"] + 1)
        found.append(values)
    return found


def _sizes(examples: int) -> list[int]:
    """All examples, where they are fewer than the smallest batch."""
    return [size for size in BATCH_SIZES if size <= examples] or [examples]


def best(records: Sequence[Record]) -> Record | None:
    """The trial with the lowest last validation loss, of those that were trained to the end if any was."""
    finite = [record for record in records if record["val"] is not None and record["status"] not in LOST]
    whole = [record for record in finite if record["status"] == "finished"]
    return min(whole or finite, key=lambda record: record["val"], default=None)
