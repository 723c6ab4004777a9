"""The package as a whole: what it imports, what it exports."""

import importlib.metadata
import subprocess
import sys

import saddlefree as sf


def test_core_imports_jax_and_optax_only():
    """A fresh interpreter: beyond what jax and optax bring along, only saddlefree itself is loaded."""
    script = (
        "import sys, jax, optax, jax.numpy\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import saddlefree\n"
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
        if callable(part) and name != "Solution":
            assert ">>>" in part.__doc__, f"{name} has no example"
