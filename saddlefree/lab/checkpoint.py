"""Checkpoints by Orbax: written whole or not at all, and checked by SHA-256 before they are used.

A checkpoint is a folder `checkpoints/STEP` with Orbax's `state` and a `record.json`, written last, that holds the
digest of every file. Without it a folder is what a killed run left, and is not one.
"""

import hashlib
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import read_json, write_json

KEPT = 2


def save(run: pathlib.Path, step: int, state: Any, record: dict[str, Any]) -> None:
    """Writes a checkpoint, then drops all but the last ones."""
    folder = run / "checkpoints" / str(step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((folder / "state").resolve(), _leaves(state))
        write_json(folder / "record.json", {**record, "step": step, "sha256": _digests(folder / "state")})
    except (OSError, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"{folder} could not be written ({error}): the run stopped at step {step}; "
            "make room and go on with --resume"
        ) from error
    for old in _complete(run)[:-KEPT]:
        shutil.rmtree(run / "checkpoints" / str(old))


def latest(run: pathlib.Path) -> int | None:
    """The step of the last checkpoint, or None."""
    steps = _complete(run)
    return steps[-1] if steps else None


def restore(run: pathlib.Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The last checkpoint's state, shaped like `like`, and its record."""
    steps = _complete(run)
    folder = run / "checkpoints" / str(steps[-1])
    before = f"step {steps[-2]}" if len(steps) > 1 else "the start"
    remedy = f"delete {folder} to resume from {before}"
    try:
        record = read_json(folder / "record.json")
        digests = _digests(folder / "state")
    except (UserError, OSError):
        raise UserError(f"{folder / 'record.json'} is damaged: {remedy}") from None
    for name, digest in record["sha256"].items():
        if digests.get(name) != digest:
            raise UserError(f"{folder / 'state' / name} is damaged or missing: {remedy}")
    target = _leaves(like)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore((folder / "state").resolve(), target)
    leaves = [
        jnp.asarray(found[_name(number)]) if _name(number) in found else leaf
        for number, leaf in enumerate(jax.tree.leaves(like))
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), record


def _leaves(state: Any) -> dict[str, np.ndarray]:
    """Named arrays; Orbax refuses empty ones, which hold nothing to be kept."""
    return {_name(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state)) if leaf.size}


def _name(number: int) -> str:
    return f"leaf{number:05}"


def _complete(run: pathlib.Path) -> list[int]:
    records = (run / "checkpoints").glob("*/record.json")
    return sorted(int(path.parent.name) for path in records if path.parent.name.isdigit())


def _digests(folder: pathlib.Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
