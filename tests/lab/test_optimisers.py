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
from saddlefree.lab.methods import Circumstances
from saddlefree.lab.optimisers import OPTIMISERS, configured
from saddlefree.lab.paper import TUNED
from saddlefree.lab.peers import packages
from saddlefree.lab.task import Task, Term

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


@pytest.mark.parametrize(
    ("name", "changes"),
    [("lanczos", {"products": 2}), ("low-rank", {"rank": 2, "refresh_every": 2})],
    ids=["lanczos", "low-rank"],
)
def test_without_loops_and_branches_it_is_the_same(name, changes, task):
    found, batch = [], task.parts["train"]
    for unlooped in (False, True):
        values = configured(name, "none", changes)
        method = OPTIMISERS[name].build(values, Circumstances(task, 12, True, unlooped))
        state = method.init(*task.init(jax.random.key(1)), 0, batch)
        for _ in range(3):
            state, figures = method.step(state, batch)
        found.append(figures["loss"])
    np.testing.assert_allclose(*found, rtol=1e-4)


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
    with pytest.raises(UserError, match=r"no-such-thing is missing: pip install 'saddlefree\[peers\]'"):
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
