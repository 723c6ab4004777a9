"""The low-rank solver against dense formulae and against the optimisers that it becomes at rank 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params, saddle_free_direction, symmetric

import saddlefree as sf

BATCH = network_batch(jax.random.key(1))


def value_fn(params):
    return network_loss(params, BATCH)


@functools.partial(jax.jit, static_argnums=(0, 2))
def train(tx, params, steps):
    tx = optax.with_extra_args_support(tx)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn)
        return (optax.apply_updates(params, updates), state), sf_products(state)

    carry, products = jax.lax.scan(step, (params, tx.init(params)), None, length=steps)
    return *carry, products


def sf_products(state):
    return sf.diagnostics(state)["products"] if isinstance(state, sf.optimiser.SaddleFreeState) else jnp.zeros(())


@pytest.mark.parametrize(
    ("solver", "reference"),
    [
        (sf.low_rank(rank=0, averaging=0.8), optax.sgd(0.05, momentum=0.8)),
        (sf.low_rank(rank=0, averaging=0.0), optax.sgd(0.05)),
        (
            sf.low_rank(rank=0, averaging=0.8, metric="adam", second_moment=0.95, epsilon=1e-4),
            optax.adam(0.05, b1=0.8, b2=0.95, eps=1e-4),
        ),
    ],
)
def test_rank_zero_is_sgd_with_momentum_or_adam(solver, reference):
    """At the rate η/λ."""
    params = network_params(jax.random.key(0))
    ours, _, _ = train(sf.saddle_free_newton(0.1, damping=2.0, solver=solver), params, 20)
    with jax.numpy_dtype_promotion("standard"):
        theirs, _, _ = train(reference, params, 20)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, theirs)


@pytest.mark.parametrize("metric", ["identity", "adam"])
def test_full_rank_is_the_exact_direction_in_the_metric(x64, metric):
    rng = np.random.default_rng(0)
    H, g = symmetric(rng, rng.normal(size=6)), rng.normal(size=6)
    solver = sf.low_rank(rank=6, averaging=0.5, metric=metric, max_step=1e6)
    solution = sf.solve(solver, lambda v: jnp.asarray(H) @ v, jnp.asarray(g), 0.3)
    # After one step m̂ = g, and Adam's √v̂ = |g|.
    root = np.ones(6) if metric == "identity" else (np.abs(g) + 1e-8) ** -0.5
    expected = root * saddle_free_direction(root[:, None] * H * root, root * g, 0.3)
    np.testing.assert_allclose(solution.direction, expected, rtol=1e-6)


@pytest.mark.parametrize("metric", ["identity", "adam"])
def test_positive_definite_with_any_metric_and_an_old_basis(x64, metric):
    """Curvature from another point, a metric that has moved on: still a descent direction of m."""
    rng = np.random.default_rng(1)
    solver, state = sf.low_rank(rank=3, refresh_every=10, averaging=0.0, metric=metric), None
    H = symmetric(rng, np.array([5.0, -3.0, 1.0, -0.5, 0.1]))
    for _ in range(8):
        g = jnp.asarray(rng.normal(size=5) * 10.0 ** rng.uniform(-2, 2, size=5))
        solution = sf.solve(solver, lambda v: jnp.asarray(H) @ v, g, 0.01, state)
        state = solution.state
        assert g @ solution.direction > 0


def test_refreshes_every_so_often_or_when_told():
    params = network_params(jax.random.key(0))
    tx = sf.saddle_free_newton(0.1, damping=1.0, solver=sf.low_rank(rank=3, refresh_every=4))
    _, _, products = train(tx, params, 10)
    assert products.tolist() == [3, 0, 0, 0, 3, 0, 0, 0, 3, 0]
    state = tx.init(params)
    for refresh, expected in ((False, 0), (True, 3), (True, 3), (False, 0)):
        _, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn, refresh=refresh)
        assert sf.diagnostics(state)["products"] == expected


def test_a_refresh_that_python_knows_is_no_branch():
    """The same answers as where it is traced, from programs with no product in a loop or branch; NaN is no news."""
    x = jnp.array([0.5, -1.0, 2.0])
    loss = lambda x: jnp.sum(x**4 - x**2)  # noqa: E731
    tx = sf.saddle_free_newton(0.1, damping=1.0, solver=sf.low_rank(rank=2, unroll=True))

    def update(g, state, refresh):
        return tx.update(g, state, x, value_fn=loss, refresh=refresh)

    g, states = jax.grad(loss)(x), [tx.init(x)] * 2
    for gradient, refresh in ((g, True), (g, False), (g.at[0].set(jnp.nan), True), (g, True)):
        text = str(jax.make_jaxpr(lambda g, s, refresh=refresh: update(g, s, refresh))(gradient, states[0]))
        assert "while[" not in text
        assert text.count("cond[") == int(refresh)  # whether to sweep, after a product
        told, states[0] = jax.jit(update, static_argnums=2)(gradient, states[0], refresh)
        traced, states[1] = jax.jit(update)(gradient, states[1], jnp.array(refresh))
        np.testing.assert_allclose(told, traced, rtol=1e-5)


def test_a_gradient_that_surprises_brings_an_early_refresh():
    """Ten times longer than usual; not within a tenth of the period after the last refresh; never where turned off."""
    lengths = [1.0, 1.1, 0.9, 10.0, 50.0, 50.0, 50.0, 400.0, 100.0]
    for solver, expected in (
        (sf.low_rank(rank=2, refresh_every=20), [2, 0, 0, 2, 0, 2, 0, 2, 0]),
        (sf.low_rank(rank=2, refresh_every=20, surprise=None), [2, 0, 0, 0, 0, 0, 0, 0, 0]),
    ):
        state, products = None, []
        for length in lengths:
            solution = sf.solve(solver, lambda v: 2 * v, jnp.array([length, 0.0]), 1.0, state)
            state = solution.state
            products.append(int(solution.stats["products"]))
        assert products == expected


def test_survives_a_curvature_that_outgrows_its_basis():
    """f = x⁴ + y²: curvature 12x² was measured where x was small, and rises a thousandfold when x is thrown out."""
    loss = lambda x: jnp.sum(x**4) + 0.1 * jnp.sum(x**2)  # noqa: E731
    tx = sf.saddle_free_newton(0.5, damping=0.5, solver=sf.low_rank(rank=2, refresh_every=1000, averaging=0.0))
    x = jnp.array([0.1, 0.05])
    state, update = tx.init(x), jax.jit(lambda g, s, x: tx.update(g, s, x, value_fn=loss))
    products = []
    for step in range(300):
        updates, state = update(jax.grad(loss)(x), state, x)
        x = optax.apply_updates(x, updates) if step != 150 else jnp.array([5.0, -4.0])
        products.append(int(sf.diagnostics(state)["products"]))
    assert sum(products[150:]) > 0
    assert jnp.max(jnp.abs(x)) < 1.0


def test_a_non_finite_gradient_or_product_leaves_the_state():
    solver = sf.low_rank(rank=2, refresh_every=2, metric="adam")
    good = lambda v: 2 * v  # noqa: E731
    state = sf.solve(solver, good, jnp.ones(3), 1.0).state
    bad = sf.solve(solver, good, jnp.array([1.0, jnp.nan, 1.0]), 1.0, state)
    assert not jnp.all(jnp.isfinite(bad.direction))
    for name in ("count", "average", "second", "usual", "curvature"):
        jax.tree.map(np.testing.assert_array_equal, getattr(bad.state, name), getattr(state, name))
    state = sf.solve(solver, good, jnp.ones(3), 1.0, state).state
    refreshed = sf.solve(solver, lambda v: jnp.nan * v, jnp.ones(3), 1.0, state)
    assert refreshed.stats["products"] == 2
    jax.tree.map(np.testing.assert_array_equal, refreshed.state.curvature, state.curvature)


@pytest.mark.parametrize("told", [True, False])
def test_refreshes_under_vmap(told):
    """By `refresh=` or by counts that are mapped: the answers of one by one, in a branch that is entered when due."""
    tx = sf.saddle_free_newton(0.1, damping=1.0, solver=sf.low_rank(rank=2, refresh_every=2))
    many = jax.vmap(network_params)(jax.random.split(jax.random.key(0), 3))

    def run(params):
        state, products = tx.init(params), []
        for _ in range(3):
            extra = {"refresh": jnp.array(True)} if told else {}
            updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn, **extra)
            params = optax.apply_updates(params, updates)
            products.append(sf.diagnostics(state)["products"])
        return params, jnp.stack(products)

    assert "while[" in str(jax.make_jaxpr(jax.vmap(run))(many))
    together, products = jax.jit(jax.vmap(run))(many)
    assert products[1].tolist() == ([2, 2, 2] if told else [2, 0, 2])
    alone, _ = jax.jit(run)(jax.tree.map(lambda x: x[1], many))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-4, atol=1e-6), together, alone)


def test_uses_the_curvature_function_and_its_old_basis():
    """Curvature of another function than the loss; a second refresh from the old basis sharpens the first."""
    h = jnp.concatenate([jnp.array([9.0, -8.0]), jnp.linspace(-6.0, 6.0, 60)])
    solver, state, errors = sf.low_rank(rank=4, refresh_every=1, averaging=0.0), None, []
    for seed in range(8):
        g = jax.random.normal(jax.random.key(seed), (62,))
        solution = sf.solve(solver, lambda v: h * v, g, 1.0, state)
        state = solution.state
        errors.append(float(abs(solution.stats["largest_ritz"] - 9.0) + abs(solution.stats["smallest_ritz"] + 8.0)))
    assert errors[-1] < 0.75 * errors[0]
    x = jnp.array([1.0, 1.0])
    tx = sf.saddle_free_newton(damping=1.0, solver=sf.low_rank(rank=2))
    curvature_fn = lambda x: 2.5 * x[0] ** 2 - 1.5 * x[1] ** 2  # noqa: E731
    updates, _ = tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x), curvature_fn=curvature_fn)
    np.testing.assert_allclose(updates, [-1 / 6, -1 / 4], rtol=1e-5)


def test_the_step_is_bounded():
    """λ far too small would step by 10⁶."""
    solution = sf.solve(sf.low_rank(rank=0, max_step=0.5), lambda v: v, jnp.array([3.0, 4.0]), damping=1e-6)
    np.testing.assert_allclose(solution.direction, 0.5 * np.sqrt(2) * np.array([0.6, 0.8]), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.low_rank(rank=-1), "rank must be a whole number ≥ 0, got -1"),
        (lambda: sf.low_rank(refresh_every=0), "refresh_every must be a whole number ≥ 1, got 0"),
        (lambda: sf.low_rank(averaging=1.0), r"averaging must be a number in \[0, 1\), got 1.0"),
        (lambda: sf.low_rank(metric="adagrad"), "metric must be 'identity' or 'adam', got 'adagrad'"),
        (lambda: sf.low_rank(second_moment=1.0), r"second_moment must be a number in \[0, 1\), got 1.0"),
        (lambda: sf.low_rank(epsilon=0.0), r"epsilon must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.low_rank(max_step=0.0), r"max_step must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.low_rank(surprise=1.0), r"surprise must be a number in \(1, inf\), got 1.0"),
        (lambda: sf.saddle_free_newton(momentum=0.9, solver=sf.low_rank()), r"momentum beside a solver .* got 0.9"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
