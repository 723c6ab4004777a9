"""The tutorials run, small, and their pages show their source."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parent.parent

SMALL = {
    "helmholtz": {"STEPS": 60, "POINTS": 60, "EDGE": 10, "SIZES": (2, 16, 1)},
    "classifier": {"EPOCHS": 2, "HIDDEN": 8, "BATCH": 200},
    "spectrum": {"STEPS": 10, "WIDTH": 4, "PRODUCTS": 28},
    "solver": {"STEPS": 10},
    "direction": {"STEPS": 30, "SIZE": 6, "RANK": 2},
}


def load():
    spec = importlib.util.spec_from_file_location("tutorials", ROOT / ".mkdocs" / "tutorials.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tutorials = load()


@pytest.fixture
def run(tmp_path):
    """Runs a tutorial small, and returns its names at the end."""
    pytest.importorskip("matplotlib").use("Agg")

    def run(name):
        with jax.numpy_dtype_promotion("standard"):  # Optax's schedules ask for it
            *_, last = tutorials.run(name, tmp_path, **SMALL[name])
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        return last.names

    yield run
    jax.config.update("jax_enable_x64", False)  # which a tutorial may set


def test_helmholtz(run):
    names = run("helmholtz")
    assert jnp.linalg.norm(names["error"]) < 0.3 * jnp.linalg.norm(names["found"])


def test_classifier(run):
    names = run("classifier")
    assert set(names["curves"]) == set(names["optimisers"])
    assert all(losses[-1] < losses[0] for losses in names["curves"].values())
    assert names["metrics"]["noise"] > 0


def test_spectrum(run):
    names = run("spectrum")
    eigenvalues, density = names["eigenvalues"], names["before"]
    assert jnp.allclose(jnp.max(density.values), eigenvalues[-1], rtol=1e-2)
    assert jnp.allclose(jnp.min(density.values), eigenvalues[0], rtol=1e-2)


def test_solver(run):
    names = run("solver")
    assert jnp.allclose(names["solution"].direction, jnp.array([0.5, 2.0, 1.0]), rtol=1e-4)
    assert all(losses[-1] < 0.1 * losses[0] for losses in names["curves"].values())


def test_direction(run):
    curves = run("direction")["curves"]
    assert curves["own loop"][-1] < 0.1 * curves["own loop"][0]
    assert curves["chain"][-1] < 0.8 * curves["chain"][0]
    assert curves["Newton"][-1] > 0.9 * curves["Newton"][0], "Newton's method converges to the saddle"


@pytest.mark.parametrize("name", tutorials.NAMES)
def test_page_shows_the_source(name):
    head, cells = tutorials.read(name)
    page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
    for part in (head, *(text for cell in cells for text in cell)):
        assert part in page, f"run python .mkdocs/tutorials.py {name}"


def test_a_constant_that_a_tutorial_does_not_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tutorials, "EXAMPLES", tmp_path)
    (tmp_path / "small.py").write_text('"""Small\n"""\n\n# %%\n# Text.\nSTEPS = 3\nprint(STEPS)\n')
    (outcome,) = tutorials.run("small", tmp_path, STEPS=5)
    assert (outcome.cell.text, outcome.printed) == ("Text.", "5\n")
    with pytest.raises(ValueError, match="assigns no STAPS"):
        list(tutorials.run("small", tmp_path, STAPS=5))
