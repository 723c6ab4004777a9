"""The registry of optimisers: each one trains, and hyperparameters are checked."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saddlefree.lab import models, optimisers
from saddlefree.lab.errors import UserError
from saddlefree.lab.fosi import fosi
from saddlefree.lab.methods import Circumstances, Method, averaged
from saddlefree.lab.optimisers import OPTIMISERS, configured
from saddlefree.lab.paper import TUNED
from saddlefree.lab.peers import packages
from saddlefree.lab.plan import build
from saddlefree.lab.program import Program
from saddlefree.lab.run import load
from saddlefree.lab.soap import soap
from saddlefree.lab.task import Task, Term
from saddlefree.training import TrainState

PAPERS = ["series", "series-adaptive", "exact", "exact-adaptive", "sgd", "adam", "lbfgs", "kfac", "kfac-fixed"]


@pytest.fixture(autouse=True)
def standard():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def task():
    """A regression that a network of one hidden layer can fit."""
    x = jax.random.normal(jax.random.key(0), (64, 3))
    parts = {"train": (x, jnp.sin(2 * x[:, :1]) + x[:, 1:2])}
    model = models.mlp(3, 8, 1, activation=jnp.tanh)

    def terms(params, state, batch, training):
        outputs, state = model.apply(params, state, batch[0], training)
        return [Term(outputs, batch[1])], state

    return Task(model.init, terms, parts)


@pytest.mark.parametrize("name", list(OPTIMISERS))
def test_every_optimiser_lowers_the_loss(name, task):
    if OPTIMISERS[name].missing:
        pytest.skip(f"{OPTIMISERS[name].package} is not installed")
    method = OPTIMISERS[name].build(configured(name, "none", {}), Circumstances(task, 12, True))
    batch = task.parts["train"]
    state = method.init(*task.init(jax.random.key(1)), 0, batch)
    step = jax.jit(method.step) if method.traceable else method.step
    losses = []
    for _ in range(12):
        state, figures = step(state, batch)
        losses.append(float(figures["loss"]))
    np.testing.assert_allclose(losses[0], task.loss(*task.init(jax.random.key(1)), batch, None)[0], rtol=1e-5)
    if name == "newton":  # it goes to whatever critical point is near
        assert np.isfinite(losses).all()
    else:
        assert losses[-1] < 0.98 * losses[0]


def test_adam_is_optaxs_with_the_papers_numbers(task):
    values = configured("adam", "uci-energy", {})
    method = OPTIMISERS["adam"].build(values, Circumstances(task, 10, True))
    batch = task.parts["train"]
    params, model_state = task.init(jax.random.key(1))
    state = method.init(params, model_state, 0, batch)
    tx = optax.adam(0.0173920852, b1=1 - 0.254942552, b2=1 - 0.0156352886, eps=2.72693206e-10)
    opt_state = tx.init(params)
    for _ in range(3):
        state, _ = method.step(state, batch)
        grads = jax.grad(lambda p: task.loss(p, model_state, batch, None)[0])(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, params)


def ordered(Q, matrix):
    return np.argsort(-np.diag(Q.T @ matrix @ Q))


def test_soap_is_its_dense_formula():
    """Adam on vectors in the basis Q_L ⊗ Q_R, with NumPy; signs of eigenvectors cancel."""
    gradients, biases = np.split(np.random.default_rng(0).normal(size=(8, 3, 5)), [4], axis=2)
    L, R = 0.2 * gradients[0] @ gradients[0].T, 0.2 * gradients[0].T @ gradients[0]
    left, right = (np.linalg.eigh(matrix)[1][:, ::-1] for matrix in (L, R))
    M, V, expected = np.zeros(12), np.zeros((3, 4)), [np.zeros(12)]
    for t, G in enumerate(gradients[1:], 1):
        Q = np.kron(left, right)
        M, V = 0.9 * M + 0.1 * G.ravel(), 0.8 * V + 0.2 * (Q.T @ G.ravel()).reshape(3, 4) ** 2
        scaled = Q.T @ M / (1 - 0.9**t) / (np.sqrt(V.ravel() / (1 - 0.8**t)) + 1e-8)
        expected.append(-0.1 * Q @ scaled)
        L, R = 0.8 * L + 0.2 * G @ G.T, 0.8 * R + 0.2 * G.T @ G
        if t % 2 == 0:
            rows, columns = ordered(left, L), ordered(right, R)
            left, right = np.linalg.qr(L @ left[:, rows])[0], np.linalg.qr(R @ right[:, columns])[0]
            V = V[rows][:, columns]
    adam = optax.adam(0.1, b1=0.9, b2=0.8)
    with jax.enable_x64(True):
        tx = soap(0.1, b1=0.9, b2=0.8, refresh_every=2)
        params = {"w": jnp.zeros((3, 4)), "b": jnp.zeros((3,))}
        state, of_adam = tx.init(params), adam.init(params["b"])
        for i in range(8):
            updates, state = jax.jit(tx.update)({"w": gradients[i], "b": biases[i, :, 0]}, state)
            np.testing.assert_allclose(updates["w"].ravel(), expected[i], rtol=1e-6, atol=1e-9)
            if i:  # a vector has no basis
                of_vector, of_adam = adam.update(biases[i, :, 0], of_adam)
                np.testing.assert_allclose(updates["b"], of_vector, rtol=1e-6)


def test_soap_has_a_basis_for_each_axis_that_is_not_too_long():
    tx = soap(0.1, max_size=4)
    axes = tx.init({"kernel": jnp.zeros((3, 1, 4, 5), jnp.bfloat16)})[0].axes[0]
    assert [axis and axis.basis.shape for axis in axes] == [(3, 3), None, (4, 4), None]
    state = tx.init({"kernel": jnp.zeros((3, 1, 4, 5), jnp.bfloat16)})
    for _ in range(2):
        updates, state = tx.update({"kernel": jnp.ones((3, 1, 4, 5), jnp.bfloat16)}, state)
    assert updates["kernel"].dtype == jnp.bfloat16
    assert jnp.all(jnp.isfinite(updates["kernel"]))


def test_fosi_is_newton_along_the_largest_eigenvalues_and_its_base_elsewhere():
    curvature = jnp.array([100.0, -50.0, 60.0, *[1.0] * 5, *[0.5] * 12])
    value_fn = lambda x: jnp.sum(curvature * x**2) / 2  # noqa: E731
    x = jnp.linspace(1, 2, 20)
    tx = fosi(optax.sgd(0.01), alpha=0.5, rank=2, refresh_every=2, momentum=0.0)
    state = tx.init(x)
    updates, state = tx.update(curvature * x, state, x, value_fn=value_fn)
    np.testing.assert_allclose(updates, -0.01 * curvature * x, rtol=1e-5)  # before the first refresh
    updates, state = jax.jit(tx.update, static_argnames="value_fn")(curvature * x, state, x, value_fn=value_fn)
    np.testing.assert_allclose(state.ritz.values, [60, 100], rtol=1e-4)
    largest = np.isin(np.arange(20), (0, 2))
    np.testing.assert_allclose(updates, np.where(largest, -0.5 * x, -0.01 * curvature * x), rtol=1e-3)


def test_schedule_free_is_evaluated_at_the_mean_of_what_it_steps(task):
    method = OPTIMISERS["schedule-free"].build(configured("schedule-free", "none", {}), Circumstances(task, 4, True))
    batch = task.parts["train"]
    state, visited = method.init(*task.init(jax.random.key(1)), 0, batch), []
    for _ in range(4):
        state, _ = method.step(state, batch)
        visited.append(state.inner.opt_state.z)
    mean = jax.tree.map(lambda *z: np.mean(z, axis=0), *visited)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, mean)
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), state.params, state.inner.params)
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_averaged_parameters_are_their_formula():
    """Of a method that counts: bfloat16 numbers are averaged in float32, whole numbers are the last ones."""

    def init(params, model_state, seed, batch):
        return TrainState(params, (), model_state, jnp.zeros(2, jnp.uint32), jnp.zeros((), jnp.int32))

    def step(state, batch):
        params = jax.tree.map(lambda x: x + 1, state.params)
        model_state = {"mean": state.model_state["mean"] + 2, "count": state.model_state["count"] + 1}
        return state._replace(params=params, model_state=model_state), {"loss": params["x"]}

    method = averaged(Method(init, step, advance=lambda state, batch, count: None), 0.9)
    assert method.advance is None  # it would pass over steps
    zero = jnp.zeros(())
    start = {"x": zero, "half": jnp.zeros((), jnp.bfloat16)}, {"mean": zero, "count": jnp.zeros((), jnp.int32)}
    state = method.init(*start, 0, ())
    assert float(state.params["x"]) == 0
    for _ in range(5):
        state, figures = jax.jit(method.step)(state, ())
    weights = 0.9 ** np.arange(4, -1, -1)
    expected = np.sum(weights * np.arange(1, 6)) / np.sum(weights)
    np.testing.assert_allclose(state.params["x"], expected, rtol=1e-5)
    np.testing.assert_allclose(state.mean[0]["half"], expected, rtol=1e-5)
    np.testing.assert_allclose(state.model_state["mean"], 2 * expected, rtol=1e-5)
    assert state.params["half"].dtype == jnp.bfloat16
    assert int(state.model_state["count"]) == 5
    assert float(state.inner.params["x"]) == float(figures["loss"]) == 5


@pytest.mark.parametrize("name", ["adam", "schedule-free"])
def test_a_program_evaluates_the_average_of_each_seed(name):
    task = load("digits", None)
    values, figures = {"batch_size": 100}, []
    for changes in ({}, {"parameter_average": "0.5"}):
        program = Program(build("digits", name, task, changes=values | changes, seeds=(0, 1), steps=4), task)
        state = program.start()
        program.prepare(state)
        state, _ = program.advance(state, 0, 4)
        figures.append(program.evaluate(state)["val"])
    assert figures[0].shape == (2,)
    assert np.isfinite(figures).all()
    assert (figures[0] != figures[1]).all()
    with pytest.raises(UserError, match=r"parameter_average must be a number from 0 to 0.99999, got '1'"):
        configured(name, "digits", {"parameter_average": "1"})


def test_kfac_sees_the_half_of_the_squared_error(task):
    """Twice the weight and twice the damping are twice the curvature, and leave the step as it is."""
    from saddlefree.lab.kfac import Kfac

    def doubled(params, state, batch, training):
        terms, state = task.terms(params, state, batch, training)
        return [term._replace(weight=2 * term.weight) for term in terms], state

    batch, start = task.parts["train"], task.init(jax.random.key(1))
    moved = []
    for each, damping in ((task, 0.1), (task._replace(terms=doubled), 0.2)):
        method = Kfac(each, adapts=False, damping=damping, ema=0.0, rate=1.0, momentum=0.0)
        state, _ = method.step(method.init(*start, 0, batch), batch)
        moved.append(jax.tree.map(lambda a, b: a - b, state.params, start[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *moved)


def test_the_papers_optimisers_have_its_hyperparameters():
    assert {name for problem, name in TUNED if problem == "uci-energy"} == set(PAPERS)
    for problem in ("fashion-mnist", "svhn", "cifar-10"):
        assert {name for p, name in TUNED if p == problem} == set(PAPERS) - {"exact", "exact-adaptive", "lbfgs"}
    for (problem, name), values in TUNED.items():
        # Each is a hyperparameter, and allowed.
        assert configured(name, problem, values) == configured(name, problem, {})
        assert configured(name, problem, {}).items() >= values.items()
    for entry in OPTIMISERS.values():
        for name, setting in entry.settings.items():
            assert setting.parse(name, setting.default) == setting.default


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learnin_rate": 1}, "'learnin_rate' is not a hyperparameter of adam: did you mean learning_rate"),
        ({"learning_rate": "-1"}, "learning_rate must be a finite number ≥ 0, got '-1'"),
        ({"learning_rate": "fast"}, "learning_rate must be a finite number ≥ 0, got 'fast'"),
        ({"learning_rate": "nan"}, "learning_rate must be a finite number ≥ 0, got 'nan'"),
        ({"learning_rate": "inf"}, "learning_rate must be a finite number ≥ 0, got 'inf'"),
        ({"learning_rate": "1e999"}, "learning_rate must be a finite number ≥ 0, got '1e999'"),
        ({"one_minus_beta1": "2"}, "one_minus_beta1 must be a number from 0 to 1, got '2'"),
        ({"decay": "exponential"}, "decay must be one of none, linear, cosine, got 'exponential'"),
        ({"batch_size": "2.5"}, "batch_size must be a whole number from 1 to 1000000000, got '2.5'"),
        ({"batch_size": "9" * 99}, "batch_size must be a whole number from 1 to 1000000000, got '99"),
    ],
)
def test_bad_hyperparameters(changes, message):
    with pytest.raises(UserError, match=message):
        configured("adam", "digits", changes)


@pytest.mark.parametrize("name", list(OPTIMISERS))
def test_whole_numbers_have_an_upper_bound(name):
    for key, setting in OPTIMISERS[name].settings.items():
        if setting.whole:
            with pytest.raises(UserError, match=f"{key} must be a whole number from . to .*, got '1000001'"):
                configured(name, "digits", {key: "1000001"})


def test_a_peer_that_is_missing_says_what_to_install(task, monkeypatch):
    monkeypatch.setitem(OPTIMISERS, "absent", dataclasses.replace(OPTIMISERS["optimistix-lm"], package="no-such-thing"))
    with pytest.raises(UserError, match=r"no-such-thing is missing: pip install '\.\[peers\]'"):
        OPTIMISERS["absent"].build({}, Circumstances(task, 1, True))


def test_records_name_version_and_licence_of_peers(monkeypatch):
    assert packages(["adam", "sgd"]) == {}
    monkeypatch.setitem(OPTIMISERS, "here", dataclasses.replace(OPTIMISERS["optimistix-lm"], package="optax"))
    assert packages(["here", "adam"]) == {"optax": {"version": optax.__version__, "licence": "Apache Software License"}}


def test_the_registries_load_without_jax():
    script = "import sys, saddlefree.lab.plugins; print([m for m in ('jax', 'numpy', 'optax') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_order_must_fit_the_terms(task):
    values = configured("series", "digits", {"terms": 4, "order": 2})
    with pytest.raises(UserError, match=r"order must be at most \(terms − 1\)/2 = 1 for terms=4, got 2"):
        OPTIMISERS["series"].build(values, Circumstances(task, 1, True))


def test_an_unknown_optimiser_has_a_suggestion():
    with pytest.raises(UserError, match="optimiser 'adams' is not known: did you mean adam"):
        optimisers.find("adams")
    with pytest.raises(UserError, match="`saddlefree optimisers` lists them"):
        optimisers.find("xyz")


def test_kfac_has_the_moments_of_kfac_jax():
    """Those of image patches, with convolutions laid out for loops on a CPU."""
    from saddlefree.lab import kfac

    images = jax.random.normal(jax.random.key(0), (3, 8, 8, 2))
    numbers = jax.lax.conv_dimension_numbers(images.shape, (3, 3, 2, 4), ("NHWC", "HWIO", "NHWC"))
    settings = {"kernel_spatial_shape": (3, 3), "strides": (2, 1), "padding": ((1, 1), (1, 1)), "data_format": None}
    for weights in (None, jnp.array([1.0, 0.5, 2.0])):
        settings |= {"dim_numbers": numbers, "precision": None, "weighting_array": weights}
        found = kfac.patches_second_moment.patches_moments(images, **settings)
        for a, b in zip(found, kfac._moments(images, **settings), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
