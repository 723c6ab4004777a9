"""Checkpoints by Orbax: written whole or not at all, and checked before they are used.

A checkpoint is a folder `checkpoints/STEP` with Orbax's `state`, whose leaves are named by their key paths, and a
`record.json`, written last, with the version of this format, the layout (path to shape and dtype of every leaf) and the
SHA-256 of every file. Without it a folder is what a killed run left, and is no checkpoint.
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

VERSION = 2
KEPT = 2


def save(run: pathlib.Path, step: int, state: Any, position: dict[str, Any]) -> None:
    """Writes a checkpoint, then drops all but the last ones."""
    folder, leaves = run / "checkpoints" / str(step), _leaves(state)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            # Orbax refuses empty arrays, in which there is nothing to be kept.
            filled = {path: np.asarray(leaf) for path, leaf in leaves.items() if leaf.size}
            checkpointer.save((folder / "state").resolve(), filled)
        record = {"version": VERSION, "step": step, "position": position, "layout": _layout(leaves)}
        write_json(folder / "record.json", {**record, "sha256": _digests(folder / "state")})
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
    """The last checkpoint's state, which must have the layout of `like`, and the position that it was saved with."""
    leaves = _leaves(like)
    found, position = load(run, _layout(leaves))
    restored = [jnp.asarray(found[path]) if path in found else leaf for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), restored), position


def load(run: pathlib.Path, layout: dict[str, Any] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The last checkpoint's leaves by their paths, without empty ones, and its position.

    Args:
      run: the folder of the run.
      layout: that it must have; None is any.
    """
    steps = _complete(run)
    folder = run / "checkpoints" / str(steps[-1])
    before = f"step {steps[-2]}" if len(steps) > 1 else "the start"
    remedy = f"delete {folder} to resume from {before}"
    damaged = UserError(f"{folder / 'record.json'} is damaged: {remedy}")
    try:
        record = read_json(folder / "record.json")
        digests = _digests(folder / "state")
    except (UserError, OSError):
        raise damaged from None
    if not isinstance(record, dict):
        raise damaged
    if record.get("version") != VERSION:
        other: str | None = f"has version {record.get('version', 1)} of the format, this is version {VERSION}"
    elif not all(isinstance(record.get(name), dict) for name in ("layout", "sha256", "position")):
        raise damaged
    else:
        other = _mismatch(record["layout"], record["layout"] if layout is None else layout)
    if other:
        remedy = f"delete {folder.parent} to start anew, or resume with the saddlefree that wrote it"
        raise UserError(f"{folder} {other}: {remedy}")
    for name, digest in record["sha256"].items():
        if digests.get(name) != digest:
            raise UserError(f"{folder / 'state' / name} is damaged or missing: {remedy}")
    try:
        kept = {path: np.empty(shape, dtype) for path, (shape, dtype) in record["layout"].items() if 0 not in shape}
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore((folder / "state").resolve(), kept), record["position"]
    except Exception as error:  # a checksum can be made to fit, and Orbax then fails in many ways
        raise UserError(f"{folder} cannot be read ({error}): {remedy}") from error


def _mismatch(written: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """The first difference of two layouts."""
    for path in {**wanted, **written}:
        if path not in written:
            return f"lacks the leaf {path}"
        if path not in wanted:
            return f"has a leaf {path} that this run has not"
        if written[path] != wanted[path]:
            return f"has {path} as {_described(written[path])}, this run as {_described(wanted[path])}"
    return None


def _described(layout: Any) -> str:
    """An array's dtype and shape as one word, or what stands in their place."""
    return f"{layout[1]}{layout[0]}" if isinstance(layout, list) and len(layout) == 2 else str(layout)


def _leaves(state: Any) -> dict[str, Any]:
    """Leaves by key path, in the tree's order."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _layout(leaves: dict[str, Any]) -> dict[str, Any]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


def _complete(run: pathlib.Path) -> list[int]:
    records = (run / "checkpoints").glob("*/record.json")
    return sorted(int(path.parent.name) for path in records if path.parent.name.isdecimal())


def _digests(folder: pathlib.Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
