"""A learning rate by the next batch: the formula, what it follows, dtypes, transformations, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params

import saddlefree as sf

KAPPA, DELTA, BETA = 0.05, 0.4, 0.99


def test_formula(x64):
    """log α ← log α − κ (c − δ √mean(c²)), the mean with its bias corrected, against NumPy."""
    rng = np.random.default_rng(0)
    tx = sf.next_batch_rate(optax.sgd(1.0), 0.1, rate=KAPPA, boldness=DELTA)
    x = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    state, update = tx.init(x), jax.jit(tx.update)
    log_alpha, last, square = np.log(0.1), None, 0.0
    for i in range(12):
        g = rng.normal(size=7)
        updates, state = update({"a": jnp.asarray(g[:3]), "b": jnp.asarray(g[3:].reshape(2, 2))}, state, x)
        if last is not None:
            c = g @ last / np.linalg.norm(g) / np.linalg.norm(last)
            square = BETA * square + (1 - BETA) * c**2
            log_alpha -= KAPPA * (c - DELTA * np.sqrt(square / (1 - BETA**i)))
        last = -np.exp(log_alpha) * g
        np.testing.assert_allclose(updates["a"], last[:3], rtol=1e-12)
        np.testing.assert_allclose(updates["b"].ravel(), last[3:], rtol=1e-12)
        np.testing.assert_allclose(state.learning_rate, np.exp(log_alpha), rtol=1e-12)


def rates(gradients, losses=None, **options):
    """α after each of these gradients of one number, and losses if there are any."""
    tx = sf.next_batch_rate(optax.sgd(1.0), **options)

    def step(state, now):
        g, value = now
        return (new := tx.update(g, state, value=value)[1]), new.learning_rate

    seen = jnp.asarray(gradients, jnp.float32)[:, None], losses
    return np.asarray(jax.lax.scan(step, tx.init(jnp.zeros(1)), seen)[1])


def test_it_rises_while_batches_agree_and_falls_where_they_contradict():
    assert np.all(np.diff(rates([1.0] * 20)) > 0)
    assert np.all(np.diff(rates([1.0, -1.0] * 10)) < 0)
    # Half of them each way: the verdicts cancel, and boldness decides.
    mixed = [1.0, 1.0, -1.0, -1.0] * 50
    assert abs(np.log(rates(mixed, boldness=0.0)[-1] / 1e-3)) < 0.2
    assert np.log(rates(mixed, boldness=0.4)[-1] / 1e-3) > 2
    assert rates([1.0] * 500, maximum=0.01)[-1] == np.float32(0.01)
    assert rates([1.0, -1.0] * 300, minimum=1e-4)[-1] == np.float32(1e-4)


def test_it_returns_where_the_loss_does_not_fall():
    """From above towards the first value, not below it, and as before where the loss falls or is not known."""
    # Verdicts that cancel; the loss falls in the first half, and is a little higher in the second.
    gradients = jnp.tile(jnp.array([1.0, 1.0, -1.0, -1.0]), 100)
    losses = jnp.where(jnp.arange(400) < 200, jnp.linspace(2.0, 0.0, 400), 1.5)
    alphas = rates(gradients, losses, initial=0.01)
    assert alphas[200] > 0.1
    assert 0.005 < alphas[-1] < 0.02
    falls = rates(gradients, jnp.linspace(2.0, 0.0, 400), initial=0.01)
    np.testing.assert_allclose(falls[-1], rates(gradients, initial=0.01)[-1], rtol=1e-4)


def test_it_does_not_fall_below_the_first_rate_while_the_loss_falls():
    """Not for a hundred steps after the last lower loss either; without a loss it follows the verdicts at once."""
    against = jnp.tile(jnp.array([1.0, -1.0]), 150)  # every verdict asks for a shorter step
    losses = jnp.where(jnp.arange(300) < 100, jnp.linspace(3.0, 0.0, 300), 5.0)
    alphas = rates(against, losses, initial=0.01)
    np.testing.assert_array_equal(alphas[:200], np.float32(0.01))
    assert np.all(np.diff(alphas[205:]) < 0)
    assert np.all(np.diff(rates(against, initial=0.01)) < 0)


def test_a_gradient_that_is_not_finite_changes_nothing():
    tx = sf.next_batch_rate(optax.adam(1.0))
    x = jnp.ones(3)
    state = tx.init(x)
    for _ in range(3):
        _, state = tx.update(x, state, x)
    for gradient, value in ((x.at[1].set(jnp.nan), 1.0), (x.at[1].set(jnp.inf), 1.0), (x, jnp.nan)):
        updates, new = tx.update(gradient, state, x, value=jnp.array(value))
        np.testing.assert_array_equal(updates, 0)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_and_structure_stay(dtype):
    tx = sf.next_batch_rate(optax.adam(1.0))
    x = jnp.ones(3, dtype)
    state = tx.init(x)
    updates, new = jax.jit(tx.update)(x, state, x)
    assert updates.dtype == dtype
    assert [a.dtype for a in jax.tree.leaves(state)] == [a.dtype for a in jax.tree.leaves(new)]
    assert jax.tree.structure(state) == jax.tree.structure(new)
    assert state.learning_rate.dtype == jnp.float32


def test_without_a_rate_it_is_ahead_of_adams_default_on_a_network():
    """Mini-batches, mapped over three seeds; the average of the last parameters counts."""
    data = network_batch(jax.random.key(1), n=256)

    def train(tx, key):
        params = network_params(jax.random.key(0))

        def step(carry, key):
            params, mean, state = carry
            index = jax.random.randint(key, (32,), 0, 256)
            grads = jax.grad(network_loss)(params, jax.tree.map(lambda a: a[index], data))
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, optax.incremental_update(params, mean, 0.02), state), None

        keys = jax.random.split(key, 300)
        (_, mean, _), _ = jax.lax.scan(step, (params, params, tx.init(params)), keys)
        return network_loss(mean, data)

    keys = jax.random.split(jax.random.key(3), 3)
    with jax.numpy_dtype_promotion("standard"):  # Optax's own optimisers need it
        ours, adams = (
            jax.jit(jax.vmap(functools.partial(train, tx)))(keys)
            for tx in (sf.next_batch_rate(optax.adam(1.0)), optax.adam(1e-3))
        )
    assert np.median(ours) < 0.9 * np.median(adams)


def test_it_is_a_base_of_low_rank():
    """The verdict is that of what the basis does not span."""
    tx = sf.saddle_free_newton(0.3, solver=sf.low_rank(rank=1, base=sf.next_batch_rate(optax.sgd(1.0), 0.01)))
    loss = lambda x: jnp.sum(jnp.array([100.0, 1.0, 0.5]) * x**2)  # noqa: E731
    x = jnp.ones(3)
    state, update = tx.init(x), jax.jit(lambda state, x: tx.update(jax.grad(loss)(x), state, x, value_fn=loss))
    for _ in range(60):
        updates, state = update(state, x)
        x = x + updates
    assert loss(x) < 0.1
    assert state.solver.base.rest.learning_rate > 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 1}, "base must be an Optax optimiser such as"),
        ({"initial": 0.0}, r"initial must be a number in \(0, inf\), got 0.0"),
        ({"rate": -1.0}, r"rate must be a number in \(0, inf\), got -1.0"),
        ({"boldness": 1.0}, r"boldness must be a number in \[0, 1\), got 1.0"),
        ({"minimum": 2.0, "maximum": 1.0}, "maximum must be"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        sf.next_batch_rate(**{"base": optax.adam(1.0), **options})
