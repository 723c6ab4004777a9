"""The registry of problems: parts, standardisation, losses against their formulae, true solutions of the equations."""

import dataclasses
import functools
import pathlib
import sys
import tomllib
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import saddlefree as sf
from saddlefree.lab import data, optimiser, physics, problems, solutions
from saddlefree.lab.errors import UserError
from saddlefree.lab.plan import build
from saddlefree.lab.problems import PROBLEMS
from saddlefree.lab.program import Program, precision
from saddlefree.lab.task import Term

EMBEDDED = [name for name, entry in PROBLEMS.items() if entry.data in (None, "digits", "diabetes") and name != "cutest"]


EQUATIONS = [name for name in PROBLEMS if name.startswith("pinn")]


def library():
    """The task on texts of CPython; another version may have other files."""
    try:
        return problems.find("transformer").load(None, {"head_width": "4", "depth": "1"})
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def standard():
    with jax.numpy_dtype_promotion("standard"):
        yield


SMALL = {
    "adding": {"length": "6", "width": "8", "examples": "200"},
    "imbalanced": {"inputs": "4", "classes": "5", "examples": "200"},
}


@functools.cache
def load(name):
    entry = problems.find(name)
    with precision(entry):
        return entry, entry.load(None, SMALL.get(name))


@pytest.mark.parametrize("name", [name for name in EMBEDDED if PROBLEMS[name].sizes])
def test_the_description_counts_the_parameters(name):
    entry, _ = load(name)
    others = {"layers": "64-64-48-48", "classes": "3", "width": "3"}
    other = next({key: value} for key, value in others.items() if key in entry.variants)
    for variant in ({}, other):
        with precision(entry):
            params = jax.eval_shape(entry.load(None, variant).init, jax.random.key(0))[0]
        assert entry.parameters(variant) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", EMBEDDED)
def test_half_the_squared_residuals_are_the_loss(name):
    entry, task = load(name)
    with precision(entry):
        params, state = task.init(jax.random.key(0))
        batch = task.parts["train"]
        if name in ("saddle", "digits", "imbalanced"):
            with pytest.raises(UserError, match="residuals need a loss that is a sum of squares"):
                task.residuals(params, state, batch)
            return
        assert isinstance(task.residual_fn(state, batch), sf.pointwise)

        @jax.jit
        def found(params):
            each = task.residual_fn(state, batch)(params)
            return task.residuals(params, state, batch), task.loss(params, state, batch, jax.random.key(1))[0], each

        r, loss, each = found(params)
        assert r.ndim == 1
        assert r.dtype == loss.dtype
        np.testing.assert_allclose(0.5 * np.sum(np.square(r)), loss, rtol=1e-12 if entry.float64 else 1e-5)
        # Point by point they are the same, in the same order.
        each = np.concatenate([np.ravel(part) for part in each])
        np.testing.assert_allclose(each, r, rtol=1e-9 if entry.float64 else 1e-4, atol=1e-12 if entry.float64 else 1e-6)


@pytest.mark.parametrize("name", [name for name in EQUATIONS if name != "pinn-poisson-5d"])
def test_an_equation_has_a_picture(name):
    entry, task = load(name)
    with precision(entry):
        params, _ = task.init(jax.random.key(0))
        found = jax.jit(lambda params: task.solution(params)[1:])(params)
        axes, prediction, truth = task.solution(params)
        (first, x), (second, y) = axes.items()
        assert (first, second) in (("x", "y"), ("x", "t"))
        assert prediction.shape == truth.shape == (len(y), len(x)) == found[0].shape
        # The picture and the test figure are of the same grid.
        error = jnp.linalg.norm(prediction - truth) / jnp.linalg.norm(truth)
        np.testing.assert_allclose(error, task.error(params, task.parts["test"]), rtol=1e-9)
        corner = task.parts["test"][0].reshape(*truth.shape, 2)[-1, 0]
        np.testing.assert_allclose(corner, [x[0], y[-1]])


def test_variants_are_checked_and_change_the_problem():
    entry = problems.find("pinn-convection")
    assert entry.variant() == {name: setting.default for name, setting in entry.variants.items()}
    assert entry.variant({"beta": "40"})["beta"] == 40.0
    with pytest.raises(UserError, match="'bta' is not a setting of Convection: did you mean beta"):
        entry.variant({"bta": "40"})
    with pytest.raises(UserError, match="points must be a whole number from 1 to 1000000, got '1e9'"):
        entry.variant({"points": "1e9"})
    with pytest.raises(UserError, match="'beta' is not a setting of A saddle in the plane: there are none"):
        problems.find("saddle").variant({"beta": "40"})
    with precision(entry):
        small = entry.load(None, {"points": 30, "start_points": 5, "side_points": 7})
    assert [len(jax.tree.leaves(part)[0]) for part in small.parts["train"]] == [30, 5, 7]


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_an_entry_describes_itself(name):
    entry = PROBLEMS[name]
    assert entry.about
    assert entry.source
    assert entry.licence
    assert entry.network or entry.sizes
    for variant in entry.published.values():
        assert entry.variant(variant).items() >= variant.items()
    for key, setting in entry.variants.items():
        assert setting.parse(key, setting.default) == setting.default


def test_a_name_is_given_once():
    with pytest.raises(UserError, match="problem 'saddle' is there already"):
        problems.problem("saddle", "Mine", epochs=1)(lambda data_dir: None)
    with pytest.raises(UserError, match="optimiser 'adam' is there already"):
        optimiser("adam", "mine", {})(lambda v, around: None)


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_problem_has_a_loss_with_a_gradient_and_figures(name):
    entry, task = load(name)
    with precision(entry):
        params, state = task.init(jax.random.key(0))
        batch = jax.tree.map(lambda x: x[: entry.batch_size] if entry.batch_size else x, task.parts["train"])
        key = jax.random.key(1)
        differentiated = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
        (loss, (new, _)), gradient = differentiated(params, state, batch, key)
        figures = jax.jit(task.evaluate)(params, state, task.parts)
    assert jnp.isfinite(loss)
    assert loss.dtype == (jnp.float64 if entry.float64 else jnp.float32)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(gradient)) > 0
    assert {"train", "val", "test"} <= set(figures)
    assert ("accuracy" in figures) == (name in ("digits", "imbalanced"))
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


def test_the_marked_numbers_add_up():
    _, task = load("adding")
    x, y = map(np.asarray, task.parts["train"])
    assert x.shape == (200, 6, 2)
    np.testing.assert_allclose(np.sum(x[:, :, 0] * x[:, :, 1], axis=1, keepdims=True), y, rtol=1e-6)
    for half in (x[:, :3], x[:, 3:]):
        assert (half[:, :, 1].sum(1) == 1).all()
    jax.tree.map(np.testing.assert_array_equal, task.parts, load("adding")[1].parts)
    assert not np.array_equal(task.parts["val"][0], task.parts["test"][0])


def test_classes_are_as_frequent_as_their_rank_says():
    entry = problems.find("imbalanced")
    y = np.asarray(entry.load(None, {"classes": 4, "inputs": 1, "examples": 12_000}).parts["train"][1])
    expected = 12_000 / np.arange(1, 5) / (25 / 12)
    np.testing.assert_allclose(np.bincount(y), expected, rtol=0.1)


def pretend(monkeypatch, shape, kind):
    """Replaces every data set by one of 60 + 10 random examples."""
    rng = np.random.default_rng(0)

    def load(name, data_dir):
        x = rng.integers(0, 256, (70, *shape)).astype(kind)
        y = x.reshape(70, -1)[:, :1] / 100 if kind is float else rng.integers(0, 10, 70).astype(np.int32)
        return data.Dataset((x[:60], y[:60]), (x[60:], y[60:]), {}, "made up")

    monkeypatch.setattr(data, "load", load)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("adding", SMALL["adding"]),
        ("imbalanced", SMALL["imbalanced"]),
        ("fashion-autoencoder", {"layers": "100-50-25-10"}),
        ("kin8nm", {"width": "8"}),
        ("transformer", {"head_width": "4", "depth": "1"}),
    ],
)
def test_mini_batches_lower_the_loss(name, variant, monkeypatch):
    if problems.find(name).data not in (None, "python-library"):
        pretend(monkeypatch, *(((8,), float) if name == "kin8nm" else ((28, 28, 1), np.uint8)))
    task = library() if name == "transformer" else problems.find(name).load(None, variant)
    plan = build(name, "adam", task, changes={"learning_rate": 0.01, "batch_size": 20}, steps=20, variant=variant)
    assert plan.steps_per_epoch == task.examples // 20
    program = Program(dataclasses.replace(plan, evaluated=100), task)
    state = program.start()
    program.prepare(state)
    before = program.evaluate(state)
    for step in range(0, 20, 2):  # no more than an epoch at a time
        state, _ = program.advance(state, step, 2)
    after = program.evaluate(state)
    assert after["train"] < 0.97 * before["train"]
    assert np.isfinite(after["val"])


def test_an_autoencoder_narrows_and_widens_and_sees_its_own_pixels(monkeypatch):
    pretend(monkeypatch, (28, 28, 1), np.uint8)
    entry = problems.find("fashion-autoencoder")
    assert entry.sizes("1000-500-250-30") == (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
    task = entry.load(None, {"layers": "100-50-25-10"})
    params, state = task.init(jax.random.key(0))
    assert entry.parameters({"layers": "100-50-25-10"}) == sum(leaf.size for leaf in jax.tree.leaves(params))
    (term,), _ = task.terms(params, state, task.parts["val"], True)
    np.testing.assert_allclose(term.targets, np.asarray(task.parts["val"][0]) / 255 - 0.286, atol=1e-6)
    error = np.asarray(term.outputs) - np.asarray(term.targets)
    np.testing.assert_allclose(task.loss(params, state, task.parts["val"], None)[0], np.mean(error**2) / 2, rtol=1e-5)


def test_a_narrow_resnet_is_a_variant(monkeypatch):
    pretend(monkeypatch, (32, 32, 3), np.uint8)
    task = problems.find("svhn").load(None, {"width": "16"})
    params = jax.eval_shape(task.init, jax.random.key(0))[0]
    assert [leaf.shape for leaf in jax.tree.leaves(params["stem"])] == [(7, 7, 3, 16)]
    assert [leaf.shape for leaf in jax.tree.leaves(params["head"])] == [(10,), (128, 10)]


def test_the_text_is_that_of_the_standard_library():
    task = library()
    sizes = {name: part[0].shape for name, part in task.parts.items()}
    assert sizes == {"train": (5058, 64), "val": (336, 64), "test": (353, 64)}
    for (x, following), module in ((task.parts["val"], weakref), (task.parts["test"], tomllib._parser)):
        text = pathlib.Path(module.__file__).read_bytes()
        assert bytes(np.asarray(x).ravel().astype(np.uint8)) == text[: x.size]
        assert bytes(np.asarray(following).ravel().astype(np.uint8)) == text[1 : x.size + 1]
    params, _ = jax.eval_shape(problems.find("transformer").load(None).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 1_032_704


def test_other_files_of_the_standard_library_are_refused(tmp_path):
    folder = tmp_path / "python-library"
    (folder / "json").mkdir(parents=True)
    (folder / "optparse.py").write_text("import this")
    with pytest.raises(UserError) as caught:
        problems.find("transformer").load(str(tmp_path))
    assert "optparse.py (its SHA-256 begins with " in str(caught.value)
    assert ", not with 07d22430)" in str(caught.value)
    assert "weakref.py (No such file or directory)" in str(caught.value)
    assert f"put all of them into {folder}" in str(caught.value)


def test_cutest_is_taken_from_sif2jax(monkeypatch):
    """From a stand-in: importing sif2jax takes long."""
    functions = {
        name: lambda: types.SimpleNamespace(y0=np.ones(3), args=2.0, objective=lambda x, args: args * jnp.sum(x**2))
        for name in problems.CUTEST
    }
    monkeypatch.setitem(sys.modules, "sif2jax", types.SimpleNamespace(cutest=types.SimpleNamespace(**functions)))
    entry = problems.find("cutest")
    with precision(entry):
        task = entry.load(None, {"name": "WOODS"})
        assert float(task.evaluate(*task.init(jax.random.key(0)), task.parts)["train"]) == 6.0
    monkeypatch.setitem(sys.modules, "sif2jax", None)
    with pytest.raises(UserError, match=r"sif2jax is missing: pip install '\.\[peers\]'"):
        entry.load(None)


def test_the_saddle_has_its_minima_where_it_says():
    _, task = load("saddle")
    value = lambda x: float(task.loss(jnp.asarray(x), None, (), jax.random.key(0))[0])  # noqa: E731
    assert value([0.0, 0.0]) == 0
    assert value([0.0, 1.0]) == value([0.0, -1.0]) == -0.25
    np.testing.assert_array_equal(jax.grad(lambda x: task.value(x))(jnp.zeros(2)), 0)


def sine(x):
    return jnp.sin(jnp.pi * x)


TRUTHS = {
    "pinn-poisson": lambda z: sine(z[:, 0]) * sine(2 * z[:, 1]),
    "pinn-convection": lambda z: jnp.sin(z[:, 0] - 20 * z[:, 1]),
    "pinn-burgers": solutions.burgers_solution,
    "pinn-poisson-2d": lambda z: sine(z[:, 0]) * sine(z[:, 1]),
    "pinn-heat": lambda z: jnp.exp(-(jnp.pi**2) * z[:, 1] / 4) * sine(z[:, 0]),
    "pinn-poisson-5d": lambda z: jnp.cos(jnp.pi * z).sum(1),
    "pinn-wave": lambda z: sum(sine(k * z[:, 0]) * jnp.cos(2 * jnp.pi * k * z[:, 1]) / k**0.5 for k in (1, 4)),
}


@pytest.mark.parametrize("name", [name for name in EQUATIONS if name != "pinn-allen-cahn"])
def test_the_true_solution_has_no_residual(name, monkeypatch):
    """The network is replaced by the true solution: the loss vanishes, as does the error."""
    entry = problems.find(name)
    model = physics.models.mlp(2, 1)._replace(
        apply=lambda params, state, z, training: (TRUTHS[name](z)[:, None], state)
    )
    monkeypatch.setattr(physics.models, "mlp", lambda *sizes, **options: model)
    with precision(entry):
        task = entry.load(None)
        params, state = task.init(jax.random.key(0))
        figures = {key: float(value) for key, value in jax.jit(task.evaluate)(params, state, task.parts).items()}
    # The quadrature behind Burgers' solution is not exact where the shock is.
    assert figures["train"] < (1e-3 if name == "pinn-burgers" else 1e-20)
    assert figures["test"] < 1e-12


def test_points_of_the_boundary_lie_on_all_faces():
    z = np.asarray(physics.faces(jax.random.key(0), 20, 5))
    ends = (z == 0) | (z == 1)
    assert z.shape == (20, 5)
    assert (ends.sum(1) == 1).all()
    assert [((z == side) & ends).sum(0).tolist() for side in (0, 1)] == [[2] * 5] * 2


def test_the_allen_cahn_solution_by_finite_differences():
    """Derivatives of the reference in the middle of the time, by differences that know nothing of modes."""
    u = solutions.allen_cahn_solution(modes=1024, steps=500, kept=500)
    now, h, k = np.arange(250, 499), 2 / 1024, 1 / 500
    u_t = (-u[now + 2] + 8 * u[now + 1] - 8 * u[now - 1] + u[now - 2]) / (12 * k)
    u = u[now]
    diffusion = 1e-4 * (np.roll(u, 1, 1) - 2 * u + np.roll(u, -1, 1)) / h**2
    r = u_t - diffusion - 5 * u + 5 * u**3
    assert np.sqrt(np.mean(r**2)) < 0.05 * np.sqrt(np.mean(diffusion**2))
    x = -1 + 2 * np.arange(1024) / 1024
    np.testing.assert_allclose(solutions.allen_cahn_solution(1024, 50, 1)[0], x**2 * np.cos(np.pi * x), atol=1e-12)


def test_burgers_solution_at_the_start_and_by_symmetry():
    with jax.enable_x64(True):
        x = jnp.linspace(-1, 1, 41)
        at_start = solutions.burgers_solution(jnp.stack([x, jnp.zeros(41)], 1))
        np.testing.assert_allclose(at_start, -jnp.sin(jnp.pi * x), atol=1e-5)
        later = solutions.burgers_solution(jnp.stack([x, 0.7 * jnp.ones(41)], 1))
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
