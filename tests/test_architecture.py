"""The order of imports, and the graph of them that the documentation shows."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load():
    spec = importlib.util.spec_from_file_location("import_graph", ROOT / ".mkdocs" / "import_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


graph = load()


@pytest.fixture
def package(tmp_path):
    """A function that writes a package of the given modules, and returns the folder it is in."""

    def write(**sources):
        for name, source in {"__init__": "", **sources}.items():
            path = (tmp_path / "saddlefree").joinpath(*name.split("__", 1) if name != "__init__" else [name])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(source)
        return tmp_path

    return write


def test_no_import_goes_against_the_order_of_stages():
    graph.check()


def test_page_shows_the_graph_of_the_source():
    assert graph.drawn() == graph.draw(), "run python .mkdocs/import_graph.py --write"


def test_library_imports_jax_optax_and_numpy_alone():
    assert graph.outside() == {"jax", "optax", "numpy"}


def test_graph_has_the_library_and_not_the_laboratory():
    modules = graph.graph().keys()
    assert {"saddlefree", "saddlefree.space", "saddlefree.solvers.lanczos", "saddlefree.rules.search"} <= modules
    assert not any(name.startswith("saddlefree.lab") for name in modules)


@pytest.mark.parametrize(
    "source",
    [
        "from saddlefree import optimiser",
        "from saddlefree.optimiser import adaptive_saddle_free_newton",
        "import saddlefree.optimiser",
        "from . import optimiser",
        "from .optimiser import adaptive_saddle_free_newton",
        "def late():\n    from saddlefree import optimiser",
        "import saddlefree",
        "from saddlefree import lanczos",
    ],
)
def test_an_import_of_a_later_stage_is_found(package, source):
    root = package(model=source, optimiser="")
    with pytest.raises(ValueError, match=r"saddlefree\.model \(stage model\) imports saddlefree"):
        graph.check(root)


def test_a_relative_import_from_a_package_is_resolved(package):
    root = package(model="", solvers__base="from ..model import x\nfrom .exact import y", solvers__exact="")
    arrows = graph.graph(root)
    assert arrows["saddlefree.solvers.base"] == {"saddlefree.model", "saddlefree.solvers.exact"}


def test_a_cycle_within_a_stage_is_found(package):
    root = package(
        solvers__exact="from saddlefree.solvers import lanczos", solvers__lanczos="import saddlefree.solvers.exact"
    )
    with pytest.raises(ValueError, match="import each other"):
        graph.check(root)


def test_the_laboratory_is_never_imported(package):
    for source in "from saddlefree import lab", "from saddlefree.lab import run", "import saddlefree.lab.run":
        with pytest.raises(ValueError, match="laboratory"):
            graph.check(package(training=source, lab__run=""))


def test_a_module_without_a_stage_is_found(package):
    with pytest.raises(ValueError, match=r"saddlefree\.extra is in no stage"):
        graph.check(package(extra=""))


def test_other_dependencies_are_found(package):
    root = package(space="import jax.numpy as jnp\nimport scipy.linalg\nimport math\nfrom flax import nnx")
    assert graph.outside(root) == {"jax", "scipy", "flax"}
