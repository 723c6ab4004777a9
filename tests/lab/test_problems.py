"""The registry of problems: parts, standardisation, losses against their formulae, true solutions of the equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saddlefree.lab import physics, problems
from saddlefree.lab.errors import UserError
from saddlefree.lab.program import precision
from saddlefree.lab.task import Term

EMBEDDED = [name for name, entry in problems.PROBLEMS.items() if entry.data in (None, "digits", "diabetes")]


@pytest.fixture(autouse=True)
def standard():
    with jax.numpy_dtype_promotion("standard"):
        yield


def load(name):
    entry = problems.find(name)
    with precision(entry):
        return entry, entry.load(None)


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_problem_has_a_loss_with_a_gradient_and_figures(name):
    entry, task = load(name)
    with precision(entry):
        params, state = task.init(jax.random.key(0))
        batch = jax.tree.map(lambda x: x[: entry.batch_size] if entry.batch_size else x, task.parts["train"])
        loss, (new, _) = task.loss(params, state, batch, jax.random.key(1))
        gradient = jax.grad(lambda p: task.loss(p, state, batch, jax.random.key(1))[0])(params)
        figures = jax.jit(task.evaluate)(params, state, task.parts)
    assert jnp.isfinite(loss)
    assert loss.dtype == (jnp.float64 if entry.float64 else jnp.float32)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(gradient)) > 0
    assert {"train", "val", "test"} <= set(figures)
    assert ("accuracy" in figures) == (name == "digits")
    assert set(task.parts) == {"train", "val", "test"}


def test_terms_are_means_of_squares_and_cross_entropies():
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(5, 3)).astype(np.float32)
    squared = Term(jnp.asarray(outputs), jnp.asarray(targets), 2.0)
    np.testing.assert_allclose(squared.mean(), 2 * np.mean(np.sum((outputs - targets) ** 2, 1)), rtol=1e-6)
    assert not squared.classifies
    labels = np.array([0, 2, 1, 1, 0], np.int32)
    log = outputs - np.log(np.sum(np.exp(outputs), 1, keepdims=True))
    crossed = Term(jnp.asarray(outputs), jnp.asarray(labels))
    np.testing.assert_allclose(crossed.mean(), -np.mean(log[np.arange(5), labels]), rtol=1e-6)
    assert crossed.classifies


def test_digits_are_split_without_overlap_and_standardised_in_the_loss():
    _, task = load("digits")
    sizes = {name: len(part[0]) for name, part in task.parts.items()}
    assert sum(sizes.values()) == 1797
    assert sizes["val"] == round(0.2 * (sizes["train"] + sizes["val"]))
    rows = {name: {bytes(np.asarray(image)) for image in part[0]} for name, part in task.parts.items()}
    assert not rows["train"] & rows["val"]
    assert not rows["train"] & rows["test"]


def test_the_saddle_has_its_minima_where_it_says():
    _, task = load("saddle")
    value = lambda x: float(task.loss(jnp.asarray(x), None, (), jax.random.key(0))[0])  # noqa: E731
    assert value([0.0, 0.0]) == 0
    assert value([0.0, 1.0]) == value([0.0, -1.0]) == -0.25
    np.testing.assert_array_equal(jax.grad(lambda x: task.value(x))(jnp.zeros(2)), 0)


@pytest.mark.parametrize("name", [name for name in problems.PROBLEMS if name.startswith("pinn")])
def test_the_true_solution_has_no_residual(name, monkeypatch):
    """The network is replaced by the true solution: the loss vanishes, as does the error."""
    truths = {
        "pinn-poisson": lambda z: jnp.sin(jnp.pi * z[:, 0]) * jnp.sin(2 * jnp.pi * z[:, 1]),
        "pinn-convection": lambda z: jnp.sin(z[:, 0] - 20 * z[:, 1]),
        "pinn-burgers": physics.burgers_solution,
    }
    entry = problems.find(name)
    model = physics.models.mlp(2, 1)._replace(
        apply=lambda params, state, z, training: (truths[name](z)[:, None], state)
    )
    monkeypatch.setattr(physics.models, "mlp", lambda *sizes, **options: model)
    with precision(entry):
        task = entry.load(None)
        params, state = task.init(jax.random.key(0))
        figures = {key: float(value) for key, value in task.evaluate(params, state, task.parts).items()}
    # The quadrature behind Burgers' solution is not exact where the shock is.
    assert figures["train"] < (1e-3 if name == "pinn-burgers" else 1e-20)
    assert figures["test"] < 1e-12


def test_burgers_solution_at_the_start_and_by_symmetry():
    with jax.enable_x64(True):
        x = jnp.linspace(-1, 1, 41)
        at_start = physics.burgers_solution(jnp.stack([x, jnp.zeros(41)], 1))
        np.testing.assert_allclose(at_start, -jnp.sin(jnp.pi * x), atol=1e-5)
        later = physics.burgers_solution(jnp.stack([x, 0.7 * jnp.ones(41)], 1))
        np.testing.assert_allclose(later, -later[::-1], atol=1e-8)
        # Rusanov's scheme on a fine grid, which knows nothing of the formula.
        expected = rusanov(0.7)
        np.testing.assert_allclose(later[::4], expected, atol=0.03)


def rusanov(end, cells=2000):
    edges = np.linspace(-1, 1, cells + 1)
    centres, h, nu = (edges[1:] + edges[:-1]) / 2, 2 / cells, 0.01 / np.pi
    u, t = -np.sin(np.pi * centres), 0.0
    while t < end:
        dt = min(0.4 * h, 0.2 * h * h / nu, end - t)
        padded = np.concatenate([[-u[0]], u, [-u[-1]]])
        left, right = padded[:-1], padded[1:]
        flux = (left**2 + right**2) / 4 - np.maximum(np.abs(left), np.abs(right)) * (right - left) / 2
        flux -= nu * (right - left) / h
        u, t = u - dt / h * np.diff(flux), t + dt
    return np.interp(np.linspace(-1, 1, 11), centres, u)


@pytest.mark.data
def test_uci_energy_is_the_papers_split(data_folder):
    _, task = load("uci-energy")
    assert {name: part[0].shape for name, part in task.parts.items()} == {
        "train": (588, 8),
        "val": (104, 8),
        "test": (76, 8),
    }
    inputs = np.concatenate([task.parts["train"][0], task.parts["val"][0]])
    np.testing.assert_allclose(inputs.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(inputs.std(0), 1, atol=1e-4)


def test_an_unknown_problem_has_a_suggestion():
    with pytest.raises(UserError, match="problem 'digit' is not known: did you mean digits"):
        problems.find("digit")
    with pytest.raises(UserError, match="`saddlefree problems` lists them"):
        problems.find("xyz")
