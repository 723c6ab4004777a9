"""Draws the import graph of the library from its source, and fails where an import goes against the order of stages.

    python .mkdocs/import_graph.py            prints the graph
    python .mkdocs/import_graph.py --write    puts it into docs/architecture.md

The package is parsed, not imported. Every import counts, also one inside of a function.
"""

import ast
import graphlib
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "saddlefree"
LABORATORY = f"{PACKAGE}.lab"
WIDTH = 110

STAGES = {
    "space": ("space", "checks"),
    "curvature": ("convolutions", "curvature", "residuals", "problem"),
    "model": ("spectrum", "acceleration", "scale", "model", "rates"),
    "solver": ("solvers",),
    "rule": ("rules",),
    "optimiser": ("optimiser",),
    "tools": ("density", "descent", "inspection", "minimisation", "neighbours", "stages", "training"),
    "names": ("names", ""),
}
"""The stages in the order of imports, each with its modules or packages; the empty name is the package itself."""

_BLOCK = re.compile(r"(<!-- import graph -->\n\n```text\n)(.*?)(^```\n)", re.DOTALL | re.MULTILINE)


def modules(root: Path = ROOT) -> dict[str, Path]:
    """The library's modules by name, without the laboratory, which the library never imports."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if name != LABORATORY and not name.startswith(f"{LABORATORY}."):
            found[name] = path
    return found


def imports(root: Path = ROOT) -> dict[str, set[str]]:
    """For each module the names of all modules that it imports, inside and outside of the package."""
    known = modules(root)
    return {name: _imports_of(name, path, known) for name, path in known.items()}


def _imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                origin = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            # What is imported from a package is one of its modules, or a name that the package itself defines.
            inner = [f"{origin}.{alias.name}" for alias in node.names]
            found |= {module if module in known or module == LABORATORY else origin for module in inner}
    return found - {name}


def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """For each module of the library those of the library that it imports."""
    inside = re.compile(rf"{PACKAGE}(\.|$)")
    return {name: {x for x in found if inside.match(x)} for name, found in imports(root).items()}


def outside(root: Path = ROOT) -> set[str]:
    """The top-level names of what the library imports beside itself and the standard library."""
    names = {x.split(".")[0] for found in imports(root).values() for x in found}
    return names - {PACKAGE} - sys.stdlib_module_names


def stage(module: str) -> int:
    """The number of a module's stage; a `ValueError` where it has none."""
    if module.startswith(LABORATORY):
        raise ValueError(f"{module} is of the laboratory, which the library never imports")
    short = _short(module)
    for number, parts in enumerate(STAGES.values()):
        if short.split(".")[0] in parts:
            return number
    raise ValueError(f"{module} is in no stage: name it in STAGES of {Path(__file__).name}")


def check(root: Path = ROOT) -> None:
    """Raises `ValueError` where a module imports one of a later stage, or modules of a stage import each other."""
    arrows = graph(root)
    back = [
        f"{module} (stage {_name(module)}) imports {target} (stage {_name(target)})"
        for module, targets in arrows.items()
        for target in sorted(targets)
        if stage(target) > stage(module)
    ]
    if back:
        raise ValueError("an import goes against the order of stages: " + "; ".join(back))
    _sorted(arrows)


def draw(root: Path = ROOT) -> str:
    """The graph as text: one line for each module, in an order in which it imports only from lines above its own."""
    check(root)
    arrows = graph(root)
    rows = []
    for module in _sorted(arrows):
        targets = [_short(target) for target in sorted(arrows[module])]
        if module == f"{PACKAGE}.names":
            targets = ["all of these"]
        elif not targets and module in (f"{PACKAGE}.solvers", f"{PACKAGE}.rules"):
            continue
        rows.append((_name(module), _short(module) or "__init__", ", ".join(targets)))
    first, second = (max(len(row[column]) for row in rows) + 3 for column in range(2))
    lines: list[str] = []
    last = ""
    for name, module, targets in rows:
        if last and name != last:
            lines.append("")
        head = f"{name if name != last else '':{first}}{module:{second}}"
        found = textwrap.wrap(targets, WIDTH - len(head) - 2) or [""]
        lines.append(f"{head}← {found[0]}" if targets else head.rstrip())
        lines += [" " * (len(head) + 2) + line for line in found[1:]]
        last = name
    return "\n".join(lines) + "\n"


def drawn(page: Path = PAGE) -> str:
    """The graph that the page of the documentation shows."""
    block = _BLOCK.search(page.read_text())
    if block is None:
        raise ValueError(f"{page} must have a text block after the comment <!-- import graph -->")
    return block.group(2)


def _sorted(arrows: dict[str, set[str]]) -> list[str]:
    """The modules by stage, and within a stage what is imported first; a `ValueError` where there is a cycle."""
    found: list[str] = []
    for number in range(len(STAGES)):
        of_stage = {module: targets for module, targets in arrows.items() if stage(module) == number}
        sorter = graphlib.TopologicalSorter({module: targets & of_stage.keys() for module, targets in of_stage.items()})
        try:
            sorter.prepare()
        except graphlib.CycleError as error:
            raise ValueError("modules of a stage import each other: " + " ← ".join(error.args[1])) from None
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            found += ready
            sorter.done(*ready)
    return found


def _short(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".")


def _name(module: str) -> str:
    return list(STAGES)[stage(module)]


if __name__ == "__main__":
    try:
        text = draw()
    except ValueError as error:
        sys.exit(str(error))
    print(text, end="")
    if "--write" in sys.argv[1:]:
        drawn()
        PAGE.write_text(_BLOCK.sub(lambda block: block[1] + text + block[3], PAGE.read_text()))
