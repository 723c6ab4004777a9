"""The examples run, small."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest

import saddlefree as sf

FOLDER = pathlib.Path(__file__).parent.parent / "examples"


@pytest.fixture
def helmholtz():
    spec = importlib.util.spec_from_file_location("helmholtz", FOLDER / "helmholtz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_equation_is_solved(helmholtz, tmp_path, x64):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    params = helmholtz.initial(jax.random.key(0), (2, 16, 1))
    result = sf.least_squares(helmholtz.residuals(80, 40), params, max_steps=400)
    found, error = helmholtz.grid(result.params, 21)
    assert jnp.linalg.norm(error) < 0.2 * jnp.linalg.norm(found)
    helmholtz.draw(found, error, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
