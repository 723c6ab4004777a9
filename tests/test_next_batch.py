"""λ by the next batch: derivatives against a dense decomposition, verdicts by hand, noisy and full batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params, symmetric

import saddlefree as sf
from saddlefree.problem import Problem
from saddlefree.space import Space

VALUES = np.array([5.0, 2.0, 1.0, 0.3, -0.5, -3.0])


def quadratic(x, H, centre):
    return 0.5 * (x - centre) @ H @ (x - centre)


def update(tx, state, x, loss, **extra):
    updates, state = jax.jit(lambda s, x: tx.update(jax.grad(loss)(x), s, x, value_fn=loss, **extra))(state, x)
    return optax.apply_updates(x, updates), state


def sensitivity(state):
    return np.asarray(state.rule.sensitivity)


@pytest.mark.parametrize(
    ("solver", "form"),
    [
        (sf.exact(), "abs"),
        (sf.lanczos(6), "abs"),
        (sf.lanczos(6, damping_form="sqrt"), "sqrt"),
        (sf.low_rank(rank=6, averaging=None), "abs"),
        (sf.blockwise(sf.exact()), "abs"),
    ],
    ids=["exact", "lanczos", "sqrt", "low-rank", "blockwise"],
)
def test_sensitivity_is_that_of_a_dense_decomposition(x64, solver, form):
    """s = −Q f(h) Qᵀg: ∂s/∂log λ has λ/(|h| + λ)² in the place of −f, or λ²/(h² + λ²)^{3/2}."""
    H, lam = symmetric(np.random.default_rng(0), VALUES), 0.7
    loss, x = functools.partial(quadratic, H=jnp.asarray(H), centre=jnp.ones(6)), jnp.zeros(6)
    tx = sf.adaptive_saddle_free_newton(solver, rule=sf.next_batch(lam))
    _, state = update(tx, tx.init(x), x, loss)
    h, Q = np.linalg.eigh(H)
    weights = lam / (np.abs(h) + lam) ** 2 if form == "abs" else lam**2 / (h**2 + lam**2) ** 1.5
    expected = Q @ (weights * (Q.T @ np.asarray(jax.grad(loss)(x))))
    np.testing.assert_allclose(sensitivity(state), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "solver",
    [sf.low_rank(rank=2, averaging=None), sf.low_rank(rank=2, base=optax.adam(0.1)), sf.lanczos(2)],
    ids=["descent", "adam", "lanczos"],
)
def test_sensitivity_is_the_difference_of_steps(x64, solver):
    """Where the basis does not span g: steps at λ·exp(±ε), the first ones of optimisers that begin there."""
    H = jnp.asarray(symmetric(np.random.default_rng(1), VALUES))
    loss, x = functools.partial(quadratic, H=H, centre=jnp.ones(6)), jnp.zeros(6)

    def first(lam):
        tx = sf.adaptive_saddle_free_newton(solver, rule=sf.next_batch(lam))
        return update(tx, tx.init(x), x, loss)

    eps = 1e-4
    difference = (first(0.7 * np.exp(eps))[0] - first(0.7 * np.exp(-eps))[0]) / (2 * eps)
    assert np.linalg.norm(difference) > 1e-3
    np.testing.assert_allclose(sensitivity(first(0.7)[1]), difference, rtol=1e-5, atol=1e-8)


def test_damping_follows_the_gradient_of_the_next_batch(x64):
    H = jnp.asarray(symmetric(np.random.default_rng(2), np.abs(VALUES)))
    tx = sf.adaptive_saddle_free_newton(
        sf.exact(), rule=sf.next_batch(1.0, rate=0.5, decay_steps=4.0, learning_rate=0.8)
    )
    x = jnp.zeros(6)
    x, state = update(tx, tx.init(x), x, functools.partial(quadratic, H=H, centre=jnp.ones(6)))
    assert sf.diagnostics(state)["damping"] == 1.0
    assert sf.diagnostics(state)["verdict"] == 0.0
    loss = functools.partial(quadratic, H=H, centre=jnp.array([1.0, -2.0, 3.0, 0.0, 0.0, 1.0]))
    g, d = np.asarray(jax.grad(loss)(x)), sensitivity(state)
    cosine = g @ d / np.linalg.norm(g) / np.linalg.norm(d)
    _, state = update(tx, state, x, loss)
    np.testing.assert_allclose(sf.diagnostics(state)["verdict"], cosine, rtol=1e-6)
    np.testing.assert_allclose(sf.diagnostics(state)["damping"], np.exp(-0.5 / (1 + 1 / 4) * cosine), rtol=1e-6)


def test_gradient_of_the_loss_judges_where_the_right_hand_side_is_another():
    x, loss = jnp.array([1.0, 2.0]), lambda x: jnp.sum(x**2) / 2
    tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=sf.next_batch())
    x, state = update(tx, tx.init(x), x, loss)
    grads = jnp.array([1.0, -1.0])
    _, plain = update(tx, state, x, loss)
    _, other = tx.update(grads, state, x, value_fn=loss, grad=x)
    np.testing.assert_allclose(other.rule.damping, plain.rule.damping, rtol=1e-6)


def test_a_refused_step_is_not_judged_and_raises_the_damping():
    """The loss rises beyond a wall that the model does not see."""
    loss = lambda x: jnp.sum(jnp.where(jnp.abs(x) < 1, x**2 / 200 - x, jnp.inf))  # noqa: E731
    x = jnp.zeros(2)
    tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=sf.next_batch(1e-2, max_increase=0.0, refusal=4.0))
    state = tx.init(x)
    moved, new = update(tx, state, x, loss)
    np.testing.assert_array_equal(moved, x)
    assert sf.diagnostics(new)["rejected_steps"] == 1
    np.testing.assert_allclose(new.rule.damping, 4e-2, rtol=1e-6)
    np.testing.assert_array_equal(sensitivity(new), sensitivity(state))


def test_damping_has_bounds_and_survives_what_is_not_finite():
    rule = sf.next_batch(1.0, rate=100.0, minimum=0.5, maximum=2.0)
    x, layout = jnp.array([1.0, 1.0]), Space(jnp.ones(2))
    for g, expected in ((x, 0.5), (-x, 2.0), (jnp.full(2, jnp.nan), 1.0), (jnp.zeros(2), 1.0)):
        problem = Problem(layout, g, lambda part: None, loss_gradient=g)
        _, damping = rule.judge(problem, rule.init(layout)._replace(sensitivity=x), jnp.array(0))
        assert damping == expected
    tx = sf.adaptive_saddle_free_newton(sf.lanczos(2), rule=rule)
    state = tx.init(x)
    updates, new = tx.update(jnp.array([jnp.nan, 1.0]), state, x, value_fn=lambda x: jnp.sum(x**2))
    np.testing.assert_array_equal(updates, 0)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(new.rule))


def train(tx, full, steps=600, dim=10):
    """Quadratics with one matrix and a random centre for each batch; the distance to the mean of the centres."""
    H = jnp.diag(jnp.logspace(1, -1, dim))

    def step(carry, key):
        x, state = carry
        centre = jnp.where(full, 0.0, jax.random.normal(key, (dim,)))
        loss = lambda x: quadratic(x, H, centre)  # noqa: E731
        value, g = jax.value_and_grad(loss)(x)
        updates, state = tx.update(g, state, x, value_fn=loss, value=value)
        return (optax.apply_updates(x, updates), state), (quadratic(x, H, 0.0), sf.diagnostics(state)["damping"])

    x = jnp.full(dim, 3.0)
    return jax.lax.scan(step, (x, tx.init(x)), jax.random.split(jax.random.key(0), steps))


@functools.cache
def trained(rule, full):
    tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=rule)
    (_, state), (losses, dampings) = jax.jit(functools.partial(train, tx, full))()
    return state, np.asarray(losses), np.asarray(dampings)


@pytest.mark.parametrize(
    "rule",
    [sf.next_batch(1e-2, decay_steps=1e4), sf.noise_aware(verdict=sf.next_batch(decay_steps=1e4))],
    ids=["next-batch", "noise-aware"],
)
def test_noise_raises_the_damping_where_a_search_follows_it(rule):
    """The expected loss of a step to each batch's own minimum is Σh/2 = 24.4; the start has nine times that."""
    _, searched, _ = trained(sf.damping_search(), False)
    _, losses, dampings = trained(rule, False)
    assert np.mean(searched[-100:]) > 10
    assert np.mean(losses[-100:]) < np.mean(searched[-100:]) / 4
    assert dampings[-1] > 1


def test_on_a_full_batch_it_is_the_search():
    """The same numbers, and no noise."""
    state, losses, dampings = trained(sf.noise_aware(), True)
    _, searched, tried = trained(sf.damping_search(), True)
    np.testing.assert_allclose(losses[:10], searched[:10], rtol=1e-4)
    np.testing.assert_allclose(dampings[:10], tried[:10], rtol=1e-5)
    assert sf.diagnostics(state)["noise"] < 1e-2


def test_the_default_on_a_network_in_batches():
    """No loss that is not finite, and a lower one than at the start, from any initial damping."""
    data, params = network_batch(jax.random.key(1), n=64), network_params(jax.random.key(0))

    def run(initial):
        tx = sf.adaptive_saddle_free_newton(sf.lanczos(4), rule=sf.noise_aware(sf.damping_search(initial)))

        def step(carry, key):
            params, state = carry
            index = jax.random.permutation(key, 64)[:16]
            value_fn = lambda p: network_loss(p, jax.tree.map(lambda a: a[index], data))  # noqa: E731
            value, grads = jax.value_and_grad(value_fn)(params)
            updates, state = tx.update(grads, state, params, value_fn=value_fn, value=value)
            return (optax.apply_updates(params, updates), state), sf.diagnostics(state)["noise"]

        keys = jax.random.split(jax.random.key(2), 60)
        (end, state), noise = jax.lax.scan(step, (params, tx.init(params)), keys)
        return network_loss(end, data), noise, state.nonfinite_steps

    ends, noise, nonfinite = jax.jit(jax.vmap(run))(jnp.array([1e-6, 1e-2, 1e3]))
    assert np.all(ends < network_loss(params, data))
    assert np.all(noise[:, 1:] > 1e-2)
    assert np.all(nonfinite == 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.next_batch(0.0), r"initial must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.next_batch(rate=0.0), r"rate must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.next_batch(decay_steps=0.0), r"decay_steps must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.next_batch(minimum=1.0, maximum=0.5), "maximum must be a number ≥ minimum = 1.0, got 0.5"),
        (lambda: sf.next_batch(refusal=0.5), r"refusal must be a number in \[1, inf\), got 0.5"),
        (lambda: sf.noise_aware(threshold=0.0), r"threshold must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.noise_aware(search=1), r"search must be damping_search\(…\), got 1"),
        (
            lambda: sf.adaptive_saddle_free_newton(sf.series(5), rule=sf.next_batch()),
            "next_batch differentiates the step in λ, and series.* does not answer every λ: use lanczos",
        ),
        (lambda: sf.saddle_free_newton(averaging=-1.0), r"averaging must be a number in \[0, inf\), got -1.0"),
        (lambda: sf.averaged_params(sf.saddle_free_newton().init(jnp.ones(2)), jnp.ones(2)), "with averaging=…, got"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("packed", [True, False])
def test_averaged_parameters(packed):
    """The weights of the formula; frozen parameters and dtypes as they are; read from within a chain."""
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0, jnp.bfloat16), "c": jnp.ones(2)}
    loss = lambda p: jnp.sum(p["a"] ** 2) + p["b"].astype(jnp.float32) ** 2 + jnp.sum(p["c"])  # noqa: E731
    frozen = {"a": False, "b": False, "c": True}
    inner = sf.saddle_free_newton(0.3, solver=sf.lanczos(3), averaging=3.0, frozen=frozen, packed=packed)
    tx = optax.chain(inner, optax.scale(0.5))
    state = tx.init(params)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.all(x == y)), sf.averaged_params(state, params), params))
    seen = []
    step = jax.jit(lambda p, s: tx.update(jax.grad(loss)(p), s, p, value_fn=loss), donate_argnums=1)
    for _ in range(5):
        seen.append(np.append(np.asarray(params["a"]), np.float32(params["b"])))
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
    expected = seen[0]
    for t, x in enumerate(seen[1:], 2):
        expected = expected + 4 / (3 + t) * (x - expected)
    mean = sf.averaged_params(state, params)
    assert {name: leaf.dtype for name, leaf in mean.items()} == {name: leaf.dtype for name, leaf in params.items()}
    np.testing.assert_allclose(mean["a"], expected[:2], rtol=1e-5)
    np.testing.assert_allclose(np.float32(mean["b"]), expected[2], rtol=1e-2)
    np.testing.assert_array_equal(mean["c"], params["c"])


def test_the_average_of_parameters_that_are_one_array():
    tx, x = sf.saddle_free_newton(0.5, solver=sf.exact(), averaging=0.0), jnp.ones(3)
    _, state = tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x**2) / 2)
    np.testing.assert_array_equal(sf.averaged_params(state, x), x)
