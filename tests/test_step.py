"""Learning rate, momentum and damping against dense solutions of their small problems."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from problems import network_batch, network_loss, network_params

import saddlefree as sf
from saddlefree.step import predicted_change, reduction_ratio


def dense_pair(H, g, d, p, damping):
    """η, μ from the definition, in NumPy: s = B y, (|BᵀHB| + λI) y = −Bᵀg, s = −η d + μ p."""
    B, _ = np.linalg.qr(np.stack([d, p], axis=1))
    values, vectors = np.linalg.eigh(B.T @ H @ B)
    y = -vectors @ ((vectors.T @ (B.T @ g)) / (np.abs(values) + damping))
    (eta, mu), *_ = np.linalg.lstsq(np.stack([-d, p], axis=1), B @ y, rcond=None)
    return eta, mu, B @ y


@pytest.mark.parametrize("seed", range(5))
def test_adaptive_pair_on_a_network_with_indefinite_hessian(seed):
    params = network_params(jax.random.key(seed))
    batch = network_batch(jax.random.key(1))
    value_fn = lambda p: network_loss(p, batch)  # noqa: E731
    g, unravel = ravel_pytree(jax.grad(value_fn)(params))
    H = np.asarray(jax.hessian(lambda v: value_fn(unravel(v)))(ravel_pytree(params)[0]), np.float64)
    assert np.linalg.eigvalsh(H)[0] < 0
    matvec = sf.hessian(value_fn, params)
    damping = 0.05
    direction = sf.solve(sf.series(num_terms=4), matvec, unravel(g), damping).direction
    rng = np.random.default_rng(seed)
    previous = unravel(jnp.asarray(rng.normal(size=g.size), jnp.float32))
    proposal = sf.adaptive_step().propose(direction, previous, unravel(g), matvec, jnp.float32(damping), jnp.array(0))
    flat = lambda t: np.asarray(ravel_pytree(t)[0], np.float64)  # noqa: E731
    eta, mu, step = dense_pair(H, np.asarray(g, np.float64), flat(direction), flat(previous), damping)
    np.testing.assert_allclose(proposal.learning_rate, eta, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(proposal.momentum, mu, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(flat(proposal.step), step, atol=1e-4 * np.linalg.norm(step))
    np.testing.assert_allclose(proposal.predicted, g @ step + step @ H @ step / 2, rtol=1e-3)
    np.testing.assert_allclose(predicted_change(matvec, unravel(g), proposal.step), proposal.predicted, rtol=1e-3)
    assert flat(proposal.step) @ np.asarray(g, np.float64) < 0


def test_adaptive_pair_is_one_and_zero_where_the_solve_is_exact():
    """H positive definite, no previous step, exact direction."""
    H = jnp.diag(jnp.array([3.0, 1.0, 0.1]))
    g, damping = jnp.array([1.0, -2.0, 0.5]), jnp.array(0.1)
    d = g / (jnp.diag(H) + damping)
    proposal = sf.adaptive_step().propose(d, jnp.zeros(3), g, lambda v: H @ v, damping, jnp.array(0))
    np.testing.assert_allclose([proposal.learning_rate, proposal.momentum], [1.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("previous", [[2.0, -2.0], [1e-20, -1e-20], [0.0, 0.0]])
def test_adaptive_pair_with_a_parallel_or_vanishing_previous_step(previous):
    """The plane collapses to a line, and nothing is divided by zero."""
    H, g = jnp.diag(jnp.array([1.0, -2.0])), jnp.array([1.0, -1.0])
    proposal = sf.adaptive_step().propose(g, jnp.array(previous), g, lambda v: H @ v, jnp.array(0.0), jnp.array(0))
    assert np.isfinite([proposal.learning_rate, proposal.momentum, proposal.predicted]).all()
    np.testing.assert_allclose(proposal.step, [-2.0, 2.0], rtol=1e-5)  # |gᵀHg|/gᵀg = ½


def test_adaptive_optimiser_leaves_a_saddle_where_the_plain_pair_ends_on_it():
    loss = lambda x: 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4  # noqa: E731
    x = jnp.array([1e-3, 1e-4])
    tx = sf.adaptive_saddle_free_newton(sf.exact(), initial_damping=1e-2)
    state = tx.init(x)
    update = jax.jit(lambda g, s, x: tx.update(g, s, x, value_fn=loss))
    for _ in range(40):
        updates, state = update(jax.grad(loss)(x), state, x)
        x = optax.apply_updates(x, updates)
    np.testing.assert_allclose(jnp.abs(x), [0.0, 1.0], atol=1e-3)


def test_reduction_ratio():
    ratio = lambda *args: float(reduction_ratio(*map(jnp.float32, args)))  # noqa: E731
    assert ratio(1.0, 0.5, -0.5) == pytest.approx(1.0, abs=1e-4)
    assert ratio(1.0, 1.5, -0.5) == pytest.approx(-1.0, abs=1e-4)
    assert ratio(1.0, 1.0, -1e-12) == pytest.approx(1.0, abs=1e-3)  # nothing to be measured
    assert ratio(0.0, 0.0, 0.0) == 1.0
    assert ratio(1.0, 2.0, 0.5) == -1.0  # the model itself predicts an increase
    assert not np.isfinite(ratio(1.0, np.nan, -0.5))


def test_levenberg_marquardt_rule_and_clips():
    rule = sf.levenberg_marquardt(initial=1.0, factor=0.5, minimum=0.3, maximum=3.0, refusal=4.0)
    update = lambda lam, ratio, refused=False: float(  # noqa: E731
        rule.update(jnp.float32(lam), jnp.array(0), jnp.float32(lam), jnp.float32(ratio), jnp.array(refused))
    )
    assert update(1.0, 0.1) == 2.0
    assert update(1.0, 0.5) == 1.0
    assert update(1.0, 0.9) == 0.5
    assert update(0.5, 0.9) == pytest.approx(0.3)
    assert update(2.0, 0.1) == 3.0
    assert update(0.5, 0.9, refused=True) == 2.0
    assert update(0.0, np.nan, refused=True) > 0


def test_damping_stays_bounded_on_a_flat_loss():
    """Where nothing changes any more the published code's damping grew without bound and ended in NaN."""
    loss = lambda x: jnp.sum(jax.nn.relu(x - 1.0))  # noqa: E731
    tx = sf.adaptive_saddle_free_newton(sf.series(num_terms=5, acceleration=sf.sablonniere(order=2)))
    x = jnp.zeros(3)
    state = tx.init(x)
    update = jax.jit(lambda s, x: tx.update(jax.grad(loss)(x), s, x, value_fn=loss))
    for _ in range(300):
        updates, state = update(state, x)
        x = optax.apply_updates(x, updates)
    figures = sf.diagnostics(state)
    assert 0 < figures["damping"] <= 1e3
    assert figures["nonfinite_steps"] == 0
    np.testing.assert_array_equal(x, 0)


def test_schedules_follow_the_step_count():
    loss = lambda x: jnp.sum(x**2)  # noqa: E731
    tx = sf.saddle_free_newton(
        optax.piecewise_constant_schedule(1.0, {2: 0.5}),
        momentum=optax.linear_schedule(0.0, 0.5, 2),
        damping=optax.linear_schedule(1.0, 0.0, 2),
        solver=sf.exact(),
        max_increase=optax.constant_schedule(0.5),
        weight_decay=optax.constant_schedule(0.0),
    )
    x = jnp.ones(2)
    state, seen = tx.init(x), []
    for _ in range(3):
        with jax.numpy_dtype_promotion("standard"):  # Optax's schedules need it
            updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
        x = optax.apply_updates(x, updates)
        seen.append([float(sf.diagnostics(state)[name]) for name in ("learning_rate", "momentum", "damping")])
    assert seen == [[1.0, 0.0, 1.0], [1.0, 0.25, 0.5], [0.5, 0.5, 0.0]]
