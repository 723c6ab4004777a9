"""The package as a whole: what it imports, what it exports."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys

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
    assert sorted(r.split(">")[0] for r in required) == ["jax", "optax"]


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
