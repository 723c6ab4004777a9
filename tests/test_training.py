"""`make_step`: model state, randomness, auxiliary outputs, microbatches."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params

import saddlefree as sf


def loss_fn(params, model_state, batch, key):
    """A linear model behind a batch norm with running mean, with noise on its inputs."""
    x, y = batch
    mean = jnp.mean(x, axis=0)
    noise = 0.01 * jax.random.normal(key, x.shape)
    error = (x - mean + noise) @ params["w"] + params["b"] - y
    new_state = {"mean": 0.9 * model_state["mean"] + 0.1 * mean, "seen": model_state["seen"] + 1}
    return jnp.mean(error**2), (new_state, {"largest": jnp.max(jnp.abs(error))})


def data(n=12):
    x = jax.random.normal(jax.random.key(0), (n, 3)) + 1
    return x, x @ jnp.array([1.0, -2.0, 0.5])


def start(tx):
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return sf.training.init(params, tx, model_state={"mean": jnp.zeros(3), "seen": jnp.zeros((), jnp.int32)}, seed=1)


TXS = {
    "fixed": sf.saddle_free_newton(damping=1e-3, solver=sf.exact()),
    "adaptive": sf.adaptive_saddle_free_newton(sf.series(num_terms=5)),
    "adam": optax.adam(0.1),
    "lbfgs": optax.lbfgs(),
}


@pytest.mark.parametrize("tx", TXS.values(), ids=TXS)
def test_step_trains_and_carries_model_state(tx):
    step = sf.training.make_step(loss_fn, tx)
    state, losses = start(tx), []
    for _ in range(5):
        old = state
        with jax.numpy_dtype_promotion("standard"):  # Optax's own optimisers need it
            state, metrics = step(state, data())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert state.step == 5
    assert state.model_state["seen"] == 5
    np.testing.assert_allclose(state.model_state["mean"], (1 - 0.9**5) * np.mean(data()[0], axis=0), rtol=1e-5)
    assert metrics["aux"]["largest"] > 0
    assert old.params["w"].is_deleted()


def test_metrics_hold_the_diagnostics_and_donation_can_be_declined():
    tx = TXS["adaptive"]
    state = start(tx)
    new, metrics = sf.training.make_step(loss_fn, tx, donate=False)(state, data())
    assert metrics.keys() > {"loss", "aux", "damping", "learning_rate", "reduction_ratio", "products"}
    assert metrics["loss"] == metrics["value"]
    assert not state.params["w"].is_deleted()
    assert jnp.any(new.key != state.key)


def test_one_key_for_all_evaluations_of_a_step():
    """The trial loss differs from the first only by the step: with the step 0 they are equal."""
    tx = sf.saddle_free_newton(0.0, solver=sf.exact(), max_increase=0.0)
    _, metrics = sf.training.make_step(loss_fn, tx)(start(tx), data())
    assert metrics["rejected_steps"] == 0


@pytest.mark.parametrize("size", [4, 5])
def test_microbatches(size):
    """Gradient, curvature and trial losses are means over microbatches; so are model state and aux."""
    params, batch = network_params(jax.random.key(0)), network_batch(jax.random.key(1), n=12)

    def plain(params, model_state, batch, key):
        return network_loss(params, batch), (model_state + jnp.mean(batch[0]), {"mean": jnp.mean(batch[1])})

    tx = sf.adaptive_saddle_free_newton(sf.series(num_terms=4))
    results = []
    for microbatch_size in (None, size):
        step = sf.training.make_step(plain, tx, microbatch_size=microbatch_size, donate=False)
        state = sf.training.init(params, tx, model_state=jnp.zeros(()))
        for _ in range(3):
            state, metrics = step(state, batch)
        results.append((state.params, state.model_state, metrics))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), *results)


def test_curvature_on_another_batch():
    def quadratic(params, model_state, batch, key):
        return 0.5 * jnp.sum(batch * params**2), (model_state, None)

    tx = sf.saddle_free_newton(damping=0.0, solver=sf.exact())
    step = sf.training.make_step(quadratic, tx, donate=False)
    state = sf.training.init(jnp.array([1.0, 1.0]), tx)
    alone, _ = step(state, jnp.array([2.0, 4.0]))
    other, _ = step(state, jnp.array([2.0, 4.0]), jnp.array([4.0, 16.0]))
    np.testing.assert_allclose(alone.params, [0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(other.params, [0.5, 0.75], rtol=1e-6)


def test_a_step_is_told_when_to_refresh():
    loss_fn = lambda params, model_state, batch, key: (jnp.sum(batch * params**2), (model_state, None))  # noqa: E731
    tx = sf.saddle_free_newton(0.1, damping=1.0, solver=sf.low_rank(rank=2))
    step = sf.training.make_step(loss_fn, tx)
    state, products = sf.training.init(jnp.ones(3), tx), []
    for refresh in (False, True, None):
        state, metrics = step(state, jnp.arange(3.0), refresh=refresh)
        products.append(int(metrics["products"]))
    assert products == [0, 2, 0]
    with pytest.raises(ValueError, match="refresh must be None, True or False, got 'now'"):
        step(state, jnp.arange(3.0), refresh="now")


def test_a_non_finite_loss_leaves_everything_as_it_was():
    tx = TXS["adaptive"]
    state = start(tx)
    x, y = data()
    after, metrics = sf.training.make_step(loss_fn, tx, donate=False)(state, (x.at[0].set(jnp.nan), y))
    assert not jnp.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.model_state), (state.params, state.model_state))
    assert metrics["nonfinite_steps"] == 1


def test_integer_parameters_can_be_frozen():
    def loss_fn(params, model_state, batch, key):
        return jnp.sum((params["x"] - params["n"].astype(jnp.float32)) ** 2), (model_state, None)

    tx = sf.saddle_free_newton(damping=0.0, solver=sf.exact(), frozen={"x": False, "n": True})
    state = sf.training.init({"x": jnp.zeros(2), "n": jnp.array(3)}, tx)
    state, _ = sf.training.make_step(loss_fn, tx)(state, None)
    np.testing.assert_allclose(state.params["x"], [3.0, 3.0], rtol=1e-6)
    assert state.params["n"] == 3


def test_residuals_reach_a_solver_that_needs_them():
    """A linear model: one Gauss-Newton step from the residuals of the batch, point by point or as a whole."""
    x, y = data()

    def squares(params, model_state, batch, key):
        return jnp.sum((batch[0] @ params - batch[1]) ** 2) / 2, (model_state, None)

    def whole(model_state, batch, key):
        return lambda params: batch[0] @ params - batch[1]

    def by_points(model_state, batch, key):
        return sf.pointwise((lambda params, z: z[0] @ params - z[1], batch))

    tx = sf.saddle_free_newton(damping=0.0, solver=sf.row_space())
    for residual_fn in (whole, by_points):
        step = sf.training.make_step(squares, tx, residual_fn=residual_fn)
        state, _ = step(sf.training.init(jnp.zeros(3), tx), (x, y))
        np.testing.assert_allclose(state.params, [1.0, -2.0, 0.5], atol=1e-3)
    with pytest.raises(ValueError, match=r"residual_fn must be given to update\(\) beside row_space, or to make_step"):
        sf.training.make_step(squares, tx)(sf.training.init(jnp.zeros(3), tx), (x, y))
    with pytest.raises(ValueError, match="residual_fn takes the whole batch: microbatch_size must be None"):
        sf.training.make_step(squares, tx, residual_fn=whole, microbatch_size=4)


def test_bad_input():
    with pytest.raises(ValueError, match="microbatch_size must be a whole number ≥ 1, got 0"):
        sf.training.make_step(loss_fn, optax.sgd(0.1), microbatch_size=0)


def predict_fn(params, model_state, batch, key):
    """A small network, whose loss has negative curvature; `depth` is an integer that is frozen."""
    hidden = jnp.tanh(batch[0] @ params["in"]) * params["depth"]
    return hidden @ params["out"], (model_state, {"hidden": jnp.max(hidden)})


def cubic(outputs, batch):
    return jnp.mean(jnp.abs(outputs - batch[1]) ** 3)


def split_problem(classes):
    keys = jax.random.split(jax.random.key(3), 4)
    params = {"in": jax.random.normal(keys[0], (3, 2)), "out": jax.random.normal(keys[1], (2, 3))}
    x, y = jax.random.normal(keys[2], (10, 3)), jax.random.normal(keys[3], (10, 3))
    return {**params, "depth": jnp.array(1)}, (
        x,
        {"labels": jnp.argmax(y, 1), "shares": jax.nn.softmax(y), "": y}[classes],
    )


@pytest.mark.parametrize(
    ("loss", "classes", "microbatch_size"),
    [
        ("softmax_cross_entropy", "labels", None),
        ("softmax_cross_entropy", "shares", 4),
        ("squared_error", "", 5),
        (cubic, "", None),
    ],
)
def test_gauss_newton_is_that_of_the_dense_jacobian(x64, loss, classes, microbatch_size):
    """One step at a given λ: (Jᵀ ∇²ℓ J + λI)⁻¹ g, with J and ∇²ℓ as dense arrays; another batch for the curvature."""
    params, batch = split_problem(classes)
    other = jax.tree.map(lambda a: a[:7], batch)
    trained = {name: params[name] for name in ("in", "out")}
    flat, unravel = jax.flatten_util.ravel_pytree(trained)
    named = {"softmax_cross_entropy": optax.softmax_cross_entropy, "squared_error": None}
    if classes == "labels":
        named["softmax_cross_entropy"] = optax.softmax_cross_entropy_with_integer_labels

    def of_outputs(outputs, batch):
        if loss is cubic:
            return cubic(outputs, batch)
        if loss == "squared_error":
            return 0.5 * jnp.mean(jnp.sum((outputs - batch[1]) ** 2, axis=1))
        return jnp.mean(named[loss](outputs, batch[1]))

    def outputs_of(flat, batch):
        return predict_fn({**unravel(flat), "depth": params["depth"]}, None, batch, None)[0]

    def dense(batch):
        J = np.asarray(jax.jacobian(outputs_of)(flat, batch)).reshape(-1, flat.size)
        outputs = outputs_of(flat, batch)
        curved = np.asarray(jax.hessian(of_outputs)(outputs, batch)).reshape(outputs.size, outputs.size)
        return J.T @ curved @ J

    g = jax.grad(lambda flat: of_outputs(outputs_of(flat, batch), batch))(flat)
    frozen = {"in": False, "out": False, "depth": True}
    tx = sf.saddle_free_newton(damping=0.3, solver=sf.exact(), frozen=frozen)
    step = sf.training.make_step(
        (predict_fn, loss), tx, curvature="gauss_newton", microbatch_size=microbatch_size, donate=False
    )
    state = sf.training.init(params, tx)
    for curvature_batch in (None, other):
        new, metrics = step(state, batch, curvature_batch)
        moved, _ = jax.flatten_util.ravel_pytree({name: new.params[name] for name in trained})
        G = dense(batch if curvature_batch is None else curvature_batch)
        np.testing.assert_allclose(moved - flat, -np.linalg.solve(G + 0.3 * np.eye(flat.size), g), rtol=1e-7)
        np.testing.assert_allclose(metrics["loss"], of_outputs(outputs_of(flat, batch), batch), rtol=1e-10)
        assert metrics["aux"]["hidden"] > 0


def test_a_pair_has_the_hessian_unless_asked_otherwise(x64):
    params, batch = split_problem("")
    del params["depth"]
    predict = lambda p, *rest: predict_fn({**p, "depth": 1}, *rest)  # noqa: E731
    loss_fn = lambda p, s, b, k: (sf.training.squared_error(predict(p, s, b, k)[0], b), (s, None))  # noqa: E731
    tx = sf.saddle_free_newton(damping=0.3, solver=sf.exact())
    steps = [sf.training.make_step(loss, tx, donate=False) for loss in ((predict, "squared_error"), loss_fn)]
    (first, _), (second, _) = (step(sf.training.init(params, tx), batch) for step in steps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), first.params, second.params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda tx: sf.training.make_step(loss_fn, tx, curvature="gauss_newton"),
            r"must be a pair \(predict_fn, loss\)",
        ),
        (
            lambda tx: sf.training.make_step(loss_fn, tx, curvature="fisher"),
            "'hessian' or 'gauss_newton', got 'fisher'",
        ),
        (
            lambda tx: sf.training.make_step((predict_fn, "hinge"), tx),
            r"one of \['softmax_cross_entropy', .*got 'hinge'",
        ),
        (lambda tx: sf.training.squared_error(jnp.ones((3, 1)), (None, jnp.ones(3))), r"shape \(3, 1\), got \(3,\)"),
    ],
)
def test_bad_split(make, message):
    with pytest.raises(ValueError, match=message):
        make(optax.sgd(0.1))
