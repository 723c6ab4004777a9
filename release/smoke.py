"""A check of an installed wheel, in an environment that has the wheel, its dependencies and nothing else.

    python -I release/smoke.py README.md

The README's example gives what is printed there; the package comes from the environment and not from a checkout, is
typed, has one version and asks for jax and optax alone; the command says what it lacks.
"""

import doctest
import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
import sysconfig

import saddlefree


def main(readme: str) -> None:
    """Raises an AssertionError at the first check that fails."""
    place = pathlib.Path(saddlefree.__file__).parent
    assert place.is_relative_to(sysconfig.get_paths()["purelib"]), place
    assert (place / "py.typed").exists()
    assert saddlefree.__version__ == importlib.metadata.version("saddlefree")
    required = importlib.metadata.requires("saddlefree") or []
    declared = {name[: len("optax")].strip("<>=") for name in required if "extra ==" not in name}
    assert declared == {"jax", "optax"}, required
    assert importlib.util.find_spec("flax") is None, "this environment has an extra"
    for name in saddlefree.__all__:
        assert getattr(saddlefree, name).__doc__, name
    failed, tried = doctest.testfile(str(pathlib.Path(readme).resolve()), module_relative=False)
    assert tried == pathlib.Path(readme).read_text().count(">>> ") > 0, tried
    assert failed == 0, failed
    command = pathlib.Path(sysconfig.get_paths()["scripts"]) / "saddlefree"
    answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert answer.stderr.endswith("is missing: pip install '.[lab]' in a checkout of saddlefree installs it\n"), (
        answer.stderr
    )
    assert answer.returncode == 1
    print(f"saddlefree {saddlefree.__version__}: {tried} statements of {readme} and the package are as they should be")


if __name__ == "__main__":
    main(*sys.argv[1:])
