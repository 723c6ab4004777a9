"""The low-rank solver against dense formulae and against the optimisers that it becomes at rank 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params, saddle_free_direction, solve, symmetric

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
        (sf.low_rank(rank=0, averaging=0.8), optax.chain(optax.ema(0.8), optax.sgd(0.05))),
        (sf.low_rank(rank=0, averaging=None), optax.sgd(0.05)),
        (sf.low_rank(rank=0, base=optax.adam(0.05, b1=0.8, b2=0.95)), optax.adam(0.05, b1=0.8, b2=0.95)),
        (sf.low_rank(rank=0, base=optax.adamw(0.05)), optax.adamw(0.05)),
    ],
    ids=["averaged", "plain", "adam", "adamw"],
)
def test_rank_zero_is_gradient_descent_or_the_base(solver, reference):
    """At the rate η/λ, with a debiased average; or the base at its own rate."""
    params = network_params(jax.random.key(0))
    ours, _, _ = train(sf.saddle_free_newton(0.1, damping=2.0, solver=solver), params, 20)
    with jax.numpy_dtype_promotion("standard"):
        theirs, _, _ = train(reference, params, 20)
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), theirs, params)
    assert min(jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, theirs)


def test_full_rank_is_the_exact_direction(x64):
    rng = np.random.default_rng(0)
    H, g = symmetric(rng, rng.normal(size=6)), rng.normal(size=6)
    for damping in (1e-12, 0.3):  # a small λ must not magnify the rounding of what the basis does not span
        solution = solve(sf.low_rank(rank=6, averaging=0.5), H, g, damping)
        np.testing.assert_allclose(solution.direction, saddle_free_direction(H, g, damping), rtol=1e-6)


def krylov_curvature(H, g, rank):
    """Ritz vectors and values of the Krylov space of H and g, by dense algebra."""
    B, _ = np.linalg.qr(np.stack([np.linalg.matrix_power(H, k) @ g for k in range(rank)], axis=1))
    values, vectors = np.linalg.eigh(B.T @ H @ B)
    return B @ vectors, values


class Adam:
    """optax.adam(rate), in NumPy."""

    def __init__(self, rate):
        self.rate, self.count, self.first, self.second = rate, 0, 0.0, 0.0

    def __call__(self, g):
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g**2
        root = np.sqrt(self.second / (1 - 0.999**self.count))
        return -self.rate * self.first / (1 - 0.9**self.count) / (root + 1e-8)


class Descent:
    """optax.sgd(rate), in NumPy."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, g):
        return -self.rate * g


@pytest.mark.parametrize(
    ("base", "dense", "max_ratio"),
    [
        (None, None, 3.0),
        (optax.adam(0.01), Adam, 1e6),
        (optax.adam(0.01), Adam, 1.5),
        (optax.sgd(0.01), Descent, 1e6),
        (optax.sgd(0.01), Descent, 0.5),
    ],
    ids=["none", "adam", "adam clipped", "sgd", "sgd clipped"],
)
def test_the_step_is_that_of_dense_formulae(x64, base, dense, max_ratio):
    """Curvature inside of the subspace, the base outside of it, and no entry longer than the base alone allows."""
    rng, rank, eta, lam, beta = np.random.default_rng(2), 3, 0.4, 0.05, 0.7
    H = symmetric(rng, np.array([9.0, -5.0, 2.0, 0.4, -0.3, 0.2, 0.1]))
    gradients = rng.normal(size=(4, 7))
    solver = sf.low_rank(rank=rank, averaging=beta, base=base, surprise=None)
    tx = sf.adaptive_saddle_free_newton(solver, rule=sf.fixed_rate(eta, damping=lam, max_ratio=max_ratio))
    update = jax.jit(lambda g, state: tx.update(g, state, jnp.zeros(7), matvec=lambda v: jnp.asarray(H) @ v))
    state, total, clipped = tx.init(jnp.zeros(7)), 0.0, []
    Q, theta = krylov_curvature(H, gradients[0], rank)
    outside, whole = (dense(0.01), dense(0.01)) if dense else (None, None)
    for t, g in enumerate(gradients):
        total = beta * total + (1 - beta) * g
        m = total / (1 - beta ** (t + 1))
        d = Q @ ((Q.T @ m) / (np.abs(theta) + lam))
        if dense is None:
            expected = -eta * (d + (m - Q @ (Q.T @ m)) / lam)
        else:
            rest = g - Q @ (Q.T @ g)
            u = outside(np.where(np.abs(rest) > 1e-12, rest, 0))
            expected = -eta * d + u - Q @ (Q.T @ u)
            most = max_ratio * np.max(np.abs(whole(g)))
            clipped.append(np.max(np.abs(expected)) > most)
            expected = np.clip(expected, -most, most)
        updates, state = update(jnp.asarray(g), state)
        np.testing.assert_allclose(updates, expected, rtol=1e-6, atol=1e-9)
        assert np.max(np.abs(expected)) > 1e-3
        assert (sf.diagnostics(state)["step_scale"] < 1) == (dense is not None and clipped[-1])
    if dense is not None:
        assert all(clipped) == (max_ratio < 2)
        assert any(clipped) == (max_ratio < 2)


def test_without_damping_what_the_basis_does_not_span_is_dropped(x64):
    """And said so; a base takes care of it."""
    rng = np.random.default_rng(3)
    H, first, second = symmetric(rng, np.array([4.0, -2.0, 1.0, 0.5])), *rng.normal(size=(2, 4))
    solver = sf.low_rank(rank=2, averaging=None, surprise=None)
    Q, theta = krylov_curvature(H, first, 2)
    state = None
    for g, code in ((first, sf.Result.FINE), (second, sf.Result.SINGULAR)):  # the first gradient spans the basis
        solution = solve(solver, H, g, 0.0, state)
        np.testing.assert_allclose(solution.direction, Q @ ((Q.T @ g) / np.abs(theta)), rtol=1e-6)
        assert solution.result == code
        state = solution.state
    assert solve(sf.low_rank(rank=2, base=optax.sgd(0.1)), H, second, 0.0).result == sf.Result.FINE
    nothing = solve(sf.low_rank(rank=0), H, second, 0.0)
    np.testing.assert_array_equal(nothing.direction, 0)
    assert nothing.result == sf.Result.SINGULAR


def test_no_more_products_than_parameters():
    met = []
    h = jnp.array([3.0, -2.0, 1.0])
    matvec = lambda v: met.append(float(jnp.linalg.norm(v))) or h * v  # noqa: E731
    with jax.disable_jit():
        solution = sf.solve(sf.low_rank(rank=20), matvec, jnp.ones(3), 0.5)
    np.testing.assert_allclose(met, np.ones(3), rtol=1e-5)
    assert solution.stats["products"] == 3
    np.testing.assert_allclose(solution.direction, 1 / (jnp.abs(h) + 0.5), rtol=1e-4)


def test_positive_definite_with_an_old_basis(x64):
    """Curvature from another point: still a descent direction of m."""
    rng = np.random.default_rng(1)
    solver = sf.low_rank(rank=3, refresh_every=10, averaging=0.0)
    H = symmetric(rng, np.array([5.0, -3.0, 1.0, -0.5, 0.1]))
    state = solver.init(sf.space.Space(jnp.zeros(5)))
    for _ in range(8):
        g = rng.normal(size=5) * 10.0 ** rng.uniform(-2, 2, size=5)
        solution = solve(solver, H, g, 0.01, state)
        state = solution.state
        assert g @ solution.direction > 0


def test_refreshes_every_so_often_or_when_told():
    params = network_params(jax.random.key(0))
    tx = sf.saddle_free_newton(0.1, damping=1.0, solver=sf.low_rank(rank=3, refresh_every=4))
    _, _, products = train(tx, params, 10)
    assert products.tolist() == [3, 0, 0, 0, 3, 0, 0, 0, 3, 0]
    state = tx.init(params)

    @functools.partial(jax.jit, static_argnums=1)
    def update(state, refresh):
        return tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn, refresh=refresh)

    for refresh, expected in ((False, 0), (True, 3), (True, 3), (False, 0)):
        _, state = update(state, refresh)
        assert sf.diagnostics(state)["products"] == expected


def test_a_refresh_that_python_knows_is_no_branch():
    """The same answers as where it is traced, from programs with products in no branch; NaN is no news."""
    x = jnp.array([0.5, -1.0, 2.0])
    loss = lambda x: jnp.sum(x**4 - x**2)  # noqa: E731
    tx = sf.saddle_free_newton(0.1, damping=1.0, solver=sf.low_rank(rank=2))

    def update(g, state, refresh):
        return tx.update(g, state, x, value_fn=loss, refresh=refresh)

    known, traced = jax.jit(update, static_argnums=2), jax.jit(update)
    g, states = jax.grad(loss)(x), [tx.init(x)] * 2
    for gradient, refresh in ((g, True), (g, False), (g.at[0].set(jnp.nan), True), (g, True)):
        text = str(known.trace(gradient, states[0], refresh).jaxpr)
        assert ("scan[" in text) == refresh  # the loop over products
        assert text.count("cond[") == 2 * int(refresh)  # whether to sweep, once or twice, after a product
        told, states[0] = known(gradient, states[0], refresh)
        same, states[1] = traced(gradient, states[1], jnp.array(refresh))
        np.testing.assert_allclose(told, same, rtol=1e-5)


def test_a_gradient_that_surprises_brings_an_early_refresh():
    """Ten times longer than usual; not within a tenth of the period after the last refresh; never where turned off."""
    lengths = [1.0, 1.1, 0.9, 10.0, 50.0, 50.0, 50.0, 400.0, 100.0]
    for solver, expected in (
        (sf.low_rank(rank=2, refresh_every=20), [2, 0, 0, 2, 0, 2, 0, 2, 0]),
        (sf.low_rank(rank=2, refresh_every=20, surprise=None), [2, 0, 0, 0, 0, 0, 0, 0, 0]),
    ):
        state, products = solver.init(sf.space.Space(jnp.zeros(2))), []
        for length in lengths:
            solution = solve(solver, 2 * jnp.eye(2), jnp.array([length, 0.0]), 1.0, state)
            state = solution.state
            products.append(int(solution.stats["products"]))
        assert products == expected


def test_survives_a_curvature_that_outgrows_its_basis():
    """f = x⁴ + y²: curvature 12x² was measured where x was small, and rises a thousandfold when x is thrown out."""
    loss = lambda x: jnp.sum(x**4) + 0.1 * jnp.sum(x**2)  # noqa: E731
    tx = sf.saddle_free_newton(0.5, damping=0.5, solver=sf.low_rank(rank=2, refresh_every=1000, averaging=0.0))
    x = jnp.array([0.1, 0.05])

    def step(carry, number):
        x, state = carry
        updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
        x = jnp.where(number == 150, jnp.array([5.0, -4.0]), optax.apply_updates(x, updates))
        return (x, state), sf.diagnostics(state)["products"]

    (x, _), products = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), jnp.arange(300)))(x)
    assert sum(products[150:].tolist()) > 0
    assert jnp.max(jnp.abs(x)) < 1.0


def test_a_non_finite_gradient_or_product_leaves_the_state():
    solver = sf.low_rank(rank=2, refresh_every=2, base=optax.adam(1e-3))
    state = solve(solver, 2 * jnp.eye(3), jnp.ones(3), 1.0, solver.init(sf.space.Space(jnp.ones(3)))).state
    bad = solve(solver, 2 * jnp.eye(3), jnp.array([1.0, jnp.nan, 1.0]), 1.0, state)
    assert bad.result == sf.Result.NONFINITE
    for name in ("average", "base", "mean_gradient_norm", "curvature"):
        jax.tree.map(np.testing.assert_array_equal, getattr(bad.state, name), getattr(state, name))
    new = solve(solver, 2 * jnp.eye(3), jnp.ones(3), 1.0, state).state
    assert new.base.own[0].count == state.base.own[0].count + 1 == 2
    refreshed = solve(solver, jnp.nan * jnp.eye(3), jnp.ones(3), 1.0, new)
    assert refreshed.stats["products"] == 2
    assert jnp.max(jnp.abs(new.curvature.basis)) > 0.5
    jax.tree.map(np.testing.assert_array_equal, refreshed.state.curvature, new.curvature)


def test_a_loss_that_overflows_leaves_the_base_alone():
    """Its gradient is finite: Adam would square it, and never move again."""
    loss = lambda x: jnp.sum(x**2)  # noqa: E731
    x, tx = jnp.array([1.0, -2.0]), sf.saddle_free_newton(solver=sf.low_rank(rank=1, base=optax.adam(1e-2)))
    update = jax.jit(lambda g, state, x, value: tx.update(g, state, x, value=value, value_fn=loss))
    _, state = update(jax.grad(loss)(x), tx.init(x), x, loss(x))
    updates, after = update(jnp.full(2, 1e30), state, x, jnp.inf)
    np.testing.assert_array_equal(updates, 0)
    assert sf.diagnostics(after)["nonfinite_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.solver.base, state.solver.base)


def test_a_refused_step_keeps_what_the_base_learned():
    """The gradient was good, the step was not."""
    loss = lambda x: jnp.sum(x**2)  # noqa: E731
    x = jnp.array([1.0, -2.0])
    tx = sf.saddle_free_newton(solver=sf.low_rank(rank=0, base=optax.adam(100.0)), max_increase=0.0)
    updates, state = tx.update(jax.grad(loss)(x), tx.init(x), x, value_fn=loss)
    np.testing.assert_array_equal(updates, 0)
    assert sf.diagnostics(state)["rejected_steps"] == 1
    for base in (state.solver.base.rest[0], state.solver.base.own[0]):
        assert base.count == 1
        np.testing.assert_allclose(base.mu, 0.1 * jax.grad(loss)(x), rtol=1e-6)


@pytest.mark.parametrize("told", [True, False])
def test_refreshes_under_vmap(told):
    """By `refresh=` or by counts that are mapped: the answers of one by one, in a branch that is entered when due."""
    tx = sf.saddle_free_newton(0.1, damping=1.0, solver=sf.low_rank(rank=2, refresh_every=2))
    many = jax.vmap(network_params)(jax.random.split(jax.random.key(0), 3))

    def step(carry, refresh):
        params, state = carry
        extra = {"refresh": refresh} if told else {}
        updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn, **extra)
        return (optax.apply_updates(params, updates), state), sf.diagnostics(state)["products"]

    def run(params):
        (params, _), products = jax.lax.scan(step, (params, tx.init(params)), jnp.full(3, True))
        return params, products

    traced = jax.jit(jax.vmap(run)).trace(many)
    assert "while[" in str(traced.jaxpr)
    together, products = traced.lower().compile()(many)
    assert products[1].tolist() == ([2, 2, 2] if told else [2, 0, 2])
    alone, _ = jax.jit(run)(jax.tree.map(lambda x: x[1], many))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-4, atol=1e-6), together, alone)


def test_uses_the_curvature_function_and_its_old_basis():
    """Curvature of another function than the loss; a second refresh from the old basis sharpens the first."""
    h = jnp.concatenate([jnp.array([9.0, -8.0]), jnp.linspace(-6.0, 6.0, 60)])
    solver, errors = sf.low_rank(rank=4, refresh_every=1, averaging=0.0), []
    state = solver.init(sf.space.Space(h))
    for seed in range(8):
        g = jax.random.normal(jax.random.key(seed), (62,))
        solution = solve(solver, jnp.diag(h), g, 1.0, state)
        state = solution.state
        errors.append(float(abs(solution.stats["largest_ritz"] - 9.0) + abs(solution.stats["smallest_ritz"] + 8.0)))
    assert errors[-1] < 0.75 * errors[0]
    x = jnp.array([1.0, 1.0])
    tx = sf.saddle_free_newton(damping=1.0, solver=sf.low_rank(rank=2))
    curvature_fn = lambda x: 2.5 * x[0] ** 2 - 1.5 * x[1] ** 2  # noqa: E731
    updates, _ = tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x), curvature_fn=curvature_fn)
    np.testing.assert_allclose(updates, [-1 / 6, -1 / 4], rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.low_rank(rank=-1), "rank must be a whole number ≥ 0, got -1"),
        (lambda: sf.low_rank(refresh_every=0), "refresh_every must be a whole number ≥ 1, got 0"),
        (lambda: sf.low_rank(averaging=1.0), r"averaging must be a number in \[0, 1\), got 1.0"),
        (lambda: sf.low_rank(base="adam"), "base must be None or an Optax optimiser such as .* got 'adam'"),
        (lambda: sf.low_rank(surprise=1.0), r"surprise must be a number in \(1, inf\), got 1.0"),
        (lambda: sf.saddle_free_newton(momentum=0.9, solver=sf.low_rank()), "momentum must be None beside low_rank"),
        (
            lambda: sf.saddle_free_newton(solver=sf.low_rank(base=optax.scale_by_adam())).init(jnp.ones(2)),
            "base must return an update that is added to the parameters.*uphill",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("argument", "successor"),
    [
        ({"metric": "adam"}, r"base=optax.adam\(rate\)"),
        ({"second_moment": 0.99}, "base=optax.adam"),
        ({"epsilon": 1e-8}, "base=optax.adam"),
        ({"max_step": 1.0}, r"saddle_free_newton\(max_step="),
    ],
)
def test_arguments_that_are_gone_name_their_successor(argument, successor):
    with pytest.raises(TypeError, match=f"low_rank has no argument '{next(iter(argument))}': use {successor}"):
        sf.low_rank(**argument)
