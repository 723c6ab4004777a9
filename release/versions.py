"""The tests of the core with the lowest and the highest versions of jax and optax that pyproject.toml admits.

    python release/versions.py [--lowest PYTHON] [--highest PYTHON]

Each end has an environment of its own in a temporary folder. An end without an interpreter runs with this one.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).parent.parent
TESTS = ("tests/test_update.py", "tests/test_acceptance.py", "tests/test_minimise.py", "README.md")


def ends(dependencies: list[str]) -> tuple[list[str], list[str]]:
    """The lowest and the highest version of each dependency, as pip takes them.

    >>> ends(["jax>=0.8.0,<=0.10.2"])
    (['jax==0.8.0'], ['jax==0.10.2'])
    """
    found = [re.fullmatch(r"(\w+)>=([\d.]+),<=([\d.]+)", dependency) for dependency in dependencies]
    bounds = [match.groups() for match in found if match]
    if len(bounds) < len(dependencies):
        raise SystemExit(f"a dependency must be name>=lowest,<=highest, got {dependencies}")
    return [f"{name}=={low}" for name, low, _ in bounds], [f"{name}=={high}" for name, _, high in bounds]


def test(python: str, packages: list[str], folder: pathlib.Path) -> bool:
    """Whether the tests pass with this interpreter and these versions."""
    print(f"== {python}, {', '.join(packages)}", flush=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    own = str(folder / "bin" / "python")
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *packages, "pytest", "hypothesis"], check=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> None:
    """Tests both ends, and fails where one of them does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lowest", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--highest", default=sys.executable, metavar="PYTHON")
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = ends(project["dependencies"])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        passed = [test(given.lowest, low, folder / "lowest"), test(given.highest, high, folder / "highest")]
    raise SystemExit(not all(passed))


if __name__ == "__main__":
    main()
