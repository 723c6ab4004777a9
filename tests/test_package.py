"""The package as a whole: what it imports, what it exports."""

import importlib.metadata
import importlib.util
import itertools
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import saddlefree as sf


def test_core_imports_jax_and_optax_only():
    """A fresh interpreter: beyond what jax and optax bring along, only saddlefree itself is loaded."""
    script = (
        "import sys, jax, optax, jax.numpy\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import saddlefree; saddlefree.lanczos\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["saddlefree"]
    required = [r for r in importlib.metadata.requires("saddlefree") if "extra" not in r]
    assert sorted(re.match(r"\w+", r)[0] for r in required) == ["jax", "optax"]


ROOT = pathlib.Path(sf.__file__).parent


def test_version_has_one_place():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+", sf.__version__)
    assert "version" in project["project"]["dynamic"]
    assert f"## {sf.__version__}" in (ROOT.parent / "CHANGELOG.md").read_text()
    assert (ROOT / "py.typed").exists()


def test_what_is_imported_is_declared():
    """By the library and the laboratory; jax brings numpy."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    requirements = [*project["dependencies"], *extras]
    declared = {re.match(r"[\w-]+", name).group().lower() for name in requirements}
    other_names = {"kfac_jax": "kfac-jax", "orbax": "orbax-checkpoint", "psgd_jax": "psgd-jax"}
    other_names |= {"sklearn": "scikit-learn"}
    imported = set()
    for path in ROOT.rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.M))
    ours = {"saddlefree", "numpy", *sys.stdlib_module_names}
    assert {other_names.get(name, name).lower() for name in imported - ours} <= declared


def test_badges_say_what_the_metadata_says():
    """Where it changes, `python release/badges.py` draws them anew."""
    spec = importlib.util.spec_from_file_location("badges", ROOT.parent / "release" / "badges.py")
    badges = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(badges)
    facts = badges.facts()
    assert facts["python"] == "≥ 3.11"
    assert {"jax", "optax", "licence"} < facts.keys()
    for label, value in facts.items():
        assert (badges.FOLDER / f"{label}.svg").read_text() == badges.badge(label, value)
        assert f"docs/figures/badges/{label}.svg" in (ROOT.parent / "README.md").read_text()


def test_pinned_versions_are_releases():
    """A nightly build vanishes; a registry's address is the user's own affair."""
    text = (ROOT.parent / "constraints.txt").read_text()
    assert "nightly" not in text
    assert ".dev" not in text
    assert "//" not in text


def test_public_names_are_documented_and_exist():
    for name in sf.__all__:
        part = getattr(sf, name)
        assert part.__doc__, name
        if callable(part):
            assert ">>>" in part.__doc__, f"{name} has no example"


def test_public_names_are_on_the_page_of_the_api():
    page = (pathlib.Path(__file__).parent.parent / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: saddlefree\.(\w+)", page, flags=re.MULTILINE))
    assert set(sf.__all__) - shown == set()


@pytest.mark.parametrize(
    "first", ["saddlefree.acceleration", "saddlefree.training", "saddlefree.inspection", "saddlefree"]
)
def test_names_are_there_whatever_is_imported_first(first):
    """A fresh interpreter: names load late, and a module of the same name is none of them."""
    script = (
        f"import sys, {first}\n"
        "import saddlefree as sf\n"
        "early = 'jax' in sys.modules\n"
        "assert dir(sf) == sf.__all__ and all(callable(getattr(sf, n)) for n in sf.__all__ if n != 'training')\n"
        "from saddlefree import *\n"
        "assert lanczos is sf.lanczos and training.make_step\n"
        "print(early)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == f"{first != 'saddlefree'}\n"
