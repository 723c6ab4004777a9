"""Problems and optimisers of a user's own, in Python files that the user names on the command line.

A file registers them with `saddlefree.lab.problem` and `saddlefree.lab.optimiser`. Records keep its name and SHA-256.
Nothing but the command line loads one: to read a record, or to go on with a run, it must be given again.
"""

import hashlib
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Iterable, Mapping

from saddlefree.lab import optimisers, problems
from saddlefree.lab.errors import UserError

LOADED: dict[str, str] = {}
"""The absolute path of each file that was loaded, to its SHA-256."""


def load(paths: Iterable[pathlib.Path | str]) -> dict[str, str]:
    """Runs each file once; returns their names with their SHA-256, as records keep them."""
    found = {}
    for path in (pathlib.Path(path).absolute() for path in paths):
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"--plugin {path} cannot be read: {error.strerror}") from None
        if LOADED.setdefault(str(path), digest) != digest:
            raise UserError(f"{path} has changed since it was loaded: start again")
        if path.name in found:
            raise UserError(f"two plugins are called {path.name}: give one of them another name")
        if _name(path) not in sys.modules:
            _run(path)
        found[path.name] = digest
    return found


def _name(path: pathlib.Path) -> str:
    return f"saddlefree_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _run(path: pathlib.Path) -> None:
    before: list[tuple[dict, dict]] = [(known, dict(known)) for known in (problems.PROBLEMS, optimisers.OPTIMISERS)]
    spec = importlib.util.spec_from_file_location(_name(path), path)
    if spec is None or spec.loader is None:
        raise UserError(f"--plugin {path} must be a Python file, with a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        if all(known == old for known, old in before):
            raise UserError("it registers nothing: use saddlefree.lab.problem or saddlefree.lab.optimiser")
    except BaseException as error:
        del sys.modules[spec.name]
        for known, old in before:
            known.clear()
            known.update(old)
        if not isinstance(error, Exception):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        where = f", line {lines[-1]}" if lines else ""
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"--plugin {path}{where}: {kind}{str(error).partition(chr(10))[0]}") from error


def check(folder: pathlib.Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuses to go on with the run in `folder`, begun with the plugins `before`, with others."""
    for name, digest in before.items():
        if name not in now:
            raise UserError(f"{folder} was made with --plugin {name}: give it again to go on")
        if now[name] != digest:
            raise UserError(
                f"{name} has changed since {folder} was made (SHA-256 was {digest[:12]}…, is {now[name][:12]}…): "
                "restore it, or choose another --out"
            )
