"""Full-batch methods: a run does not depend on its pieces, baselines follow their formulae."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import saddlefree as sf
from saddlefree.lab.errors import UserError
from saddlefree.lab.methods import Circumstances
from saddlefree.lab.optimisers import OPTIMISERS, configured
from saddlefree.lab.task import Task, Term


@pytest.fixture(autouse=True)
def standard():
    with jax.numpy_dtype_promotion("standard"):
        yield


def curve(points):
    """y = a e^(−bt) + c with three parameters, and residuals point by point."""
    t = np.linspace(0, 2, points)
    data = jnp.asarray(t), jnp.asarray(3 * np.exp(-1.5 * t) + 0.5)

    def model(params, t):
        return params[0] * jnp.exp(-params[1] * t) + params[2]

    def terms(params, state, batch, training):
        return [Term(model(params, batch[0])[:, None], batch[1][:, None])], state

    def pointwise(state, batch):
        scale = points**-0.5
        return sf.pointwise((lambda params, z: scale * (model(params, z[0]) - z[1]), batch))

    start = jnp.array([1.0, 1.0, 0.0])
    return Task(lambda key: (start, ()), terms, {"train": data}, pointwise=pointwise)


def build(name, task, changes=None, full_batch=True):
    return OPTIMISERS[name].build(configured(name, "none", changes or {}), Circumstances(task, 10, full_batch))


@pytest.mark.parametrize("name", ["minimise", "least-squares"])
def test_the_defaults_are_those_of_the_library(name, x64):
    task = curve(20)
    batch = task.parts["train"]
    method = build(name, task)
    residual_fn = task.residual_fn((), batch)
    if name == "minimise":
        result = sf.minimise(lambda x: task.loss(x, (), batch, None)[0], task.init(None)[0], max_steps=7, tolerance=0)
    else:
        result = sf.least_squares(residual_fn, task.init(None)[0], max_steps=7, tolerance=0)
    state = method.init(*task.init(None), 0, batch)
    method.prepare(jax.tree.map(jnp.copy, state))
    losses = []
    for count in (1, 4, 2):
        state, figures = method.advance(state, batch, count)
        losses.extend(figures["loss"])
    # A row has the loss before its step.
    np.testing.assert_allclose(losses[1:], result.history["value"][:6], rtol=1e-9)
    np.testing.assert_allclose(state.params, result.params, rtol=1e-9)
    np.testing.assert_allclose(losses[0], task.loss(*task.init(None), batch, None)[0])


def test_a_run_that_has_ended_stays_where_it_is(x64):
    task = curve(20)
    method = build("least-squares", task)
    state = method.init(*task.init(None), 0, ())
    assert not method.ended(state)
    state, figures = method.advance(state, (), 1000)
    assert method.ended(state)
    assert 1 < figures["loss"].size < 1000
    np.testing.assert_allclose(state.params, [3.0, 1.5, 0.5], rtol=1e-6)
    state, figures = method.advance(state, (), 5)
    assert method.ended(state)
    assert figures["loss"].size == 1


@pytest.mark.parametrize("points", [2, 20], ids=["rows", "columns"])
def test_natural_gradients_follow_their_formula(points, x64):
    """φ ← μφ − Jᵀ(JJᵀ + λI)⁻¹(r + μJφ), in the smaller of two spaces, and the best length of the grid."""
    task, damping, momentum = curve(points), 1e-3, 0.9
    batch = task.parts["train"]
    method = build("spring", task, {"damping": damping, "momentum": momentum})
    state, step = method.init(*task.init(None), 0, batch), jax.jit(method.step)
    x, phi = task.init(None)[0], np.zeros(3)

    def residuals(x):
        return task.residuals(x, (), batch)

    for _ in range(3):
        state, figures = step(state, batch)
        r, J = np.asarray(residuals(x)), np.asarray(jax.jacobian(residuals)(x))
        np.testing.assert_allclose(figures["loss"], 0.5 * r @ r, rtol=1e-9)
        phi = momentum * phi - J.T @ np.linalg.solve(J @ J.T + damping * np.eye(points), r + momentum * J @ phi)
        trials = [x + 0.5**i * phi for i in range(31)]
        x = min(trials, key=lambda x: float(jnp.sum(residuals(x) ** 2)))
        np.testing.assert_allclose(state.params, x, rtol=1e-6)


def test_a_factorisation_that_fails_is_no_step(x64):
    task = curve(2)
    batch = task.parts["train"]
    bad = (jnp.array([0.0, jnp.inf]), jnp.zeros(2))
    method = build("engd-w", task)
    state, _ = method.step(method.init(*task.init(None), 0, batch), bad)
    np.testing.assert_array_equal(state.params, task.init(None)[0])
    np.testing.assert_array_equal(state.direction, 0)


def test_adam_hands_over_to_lbfgs(x64):
    task = curve(20)
    batch = task.parts["train"]
    method = build("adam-lbfgs", task, {"adam_steps": 2, "learning_rate": 0.1})
    state, step, states = method.init(*task.init(None), 0, batch), jax.jit(method.step), []
    for _ in range(4):
        state, _ = step(state, batch)
        states.append(state)

    def value_fn(x):
        return task.loss(x, (), batch, None)[0]

    adam, x = optax.adam(0.1), task.init(None)[0]
    memory = adam.init(x)
    for i in range(2):
        updates, memory = adam.update(jax.grad(value_fn)(x), memory, x)
        x = optax.apply_updates(x, updates)
        np.testing.assert_allclose(states[i].params, x, rtol=1e-9)
    # Adam's state stays, and L-BFGS begins with the gradient at the point where it was handed over.
    assert int(states[-1].adam[0].count) == 2
    assert float(value_fn(states[-1].params)) < float(value_fn(x))


@pytest.mark.parametrize("name", ["minimise", "engd-w", "adam-lbfgs"])
def test_mini_batches_are_refused(name):
    with pytest.raises(UserError, match=f"{name} compares losses of steps, which must be of the same batch"):
        build(name, curve(4), full_batch=False)
