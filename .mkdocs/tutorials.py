"""Runs the tutorials of examples/ and writes each as a page with its output and figures: docs/tutorials/NAME.md.

    python .mkdocs/tutorials.py             all of them
    python .mkdocs/tutorials.py spectrum    one

A tutorial is a script of cells. Its docstring is the head of the page. A cell begins with a line `# %%`; the comment
lines after it are text of the page, the rest is code. What a cell prints follows its code on the page, and so does each
figure that it saves.
"""

import ast
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGES = ROOT / "docs" / "tutorials"
NAMES = ("helmholtz", "classifier", "spectrum", "solver", "direction")
HEAD = "---\nhide:\n  - toc\n---"
"""Of each page: it has no sections, and code takes the place of their list."""


class Cell(NamedTuple):
    """A part of a tutorial."""

    text: str
    code: str


class Outcome(NamedTuple):
    """What a cell printed, the files that it wrote, and the program's names after it."""

    cell: Cell
    printed: str
    files: list[Path]
    names: dict[str, Any]


def read(name: str) -> tuple[str, list[Cell]]:
    """The docstring and the cells of a tutorial."""
    source = (EXAMPLES / f"{name}.py").read_text()
    head = ast.get_docstring(ast.parse(source))
    if head is None:
        raise ValueError(f"examples/{name}.py must begin with a docstring")
    cells = []
    for part in re.split(r"^# %%\n", source, flags=re.MULTILINE)[1:]:
        text = re.match(r"(?:#.*\n)*", part)[0]  # type: ignore[index]
        cells.append(Cell(re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip(), part[len(text) :].strip()))
    return head, cells


def run(name: str, folder: Path, **constants: Any) -> Iterator[Outcome]:
    """Runs a tutorial cell by cell in `folder`, with `constants` in place of those that it assigns."""
    names: dict[str, Any] = {"__name__": "__main__", **constants}
    missing = set(constants)
    for cell in read(name)[1]:
        tree = ast.parse(cell.code)
        fixed = [node for node in tree.body if isinstance(node, ast.Assign) and _names(node) & constants.keys()]
        missing -= {known for node in fixed for known in _names(node)}
        tree.body = [node for node in tree.body if node not in fixed]
        before = set(folder.iterdir())
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, str(EXAMPLES / f"{name}.py"), "exec"), names)
        yield Outcome(cell, printed.getvalue(), sorted(set(folder.iterdir()) - before), names)
    if missing:
        raise ValueError(f"examples/{name}.py assigns no {', '.join(sorted(missing))}")


def write(name: str) -> None:
    """The page of a tutorial, from a run at full size."""
    head, _ = read(name)
    where = f"The whole program is `examples/{name}.py`; what follows is its source, run as it stands."
    parts = [HEAD, f"# {head}", where]
    PAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for cell, printed, files, _ in run(name, Path(folder)):
            parts += [cell.text, f"```python\n{cell.code}\n```" if cell.code else ""]
            if printed:
                parts.append(f"```text\n{printed.rstrip()}\n```")
            for file in files:
                (PAGES / file.name).write_bytes(file.read_bytes())
                parts.append(f"![{file.stem}]({file.name})")
    (PAGES / f"{name}.md").write_text("\n\n".join(filter(None, parts)) + "\n")


def _names(node: ast.Assign) -> set[str]:
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "Agg"
    for chosen in sys.argv[1:] or NAMES:
        write(chosen)
