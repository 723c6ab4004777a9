"""What counts as noise, and what does not: large constant losses, rounding, narrow parameters, a false alarm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import saddlefree as sf

SCALES = jnp.logspace(0, -3, 6)


def run(tx, loss, x, factors):
    """A step for each factor, by which the loss that is passed differs from loss(x, i); the figures of all."""

    def step(carry, i):
        x, state = carry
        value, grads = jax.value_and_grad(loss)(x, i)
        updates, state = tx.update(grads, state, x, value=value * factors[i], value_fn=lambda x: loss(x, i))
        return (optax.apply_updates(x, updates), state), sf.diagnostics(state)

    return jax.jit(lambda: jax.lax.scan(step, (x, tx.init(x)), jnp.arange(factors.size))[1])()


def bowl(x, i, noise=0.0, offset=0.0):
    """A quadratic with a minimum that differs by `noise` from batch to batch."""
    centre = noise * jax.random.normal(jax.random.key(i), x.shape)
    return 0.5 * jnp.sum(SCALES * (x.astype(jnp.float32) - centre) ** 2) + offset


def test_noise_is_seen_beside_a_large_constant():
    """A loss that cannot fall far, as of text: batches differ by 0.2 % of it, and by all that there is to gain."""
    tx = sf.adaptive_saddle_free_newton(sf.lanczos(3, recycle=3, refresh_every=20))
    figures = run(tx, functools.partial(bowl, noise=1.0, offset=500.0), jnp.ones(6), jnp.ones(60))
    assert 1e-3 < np.median(figures["noise"][1:]) < 1e-2
    assert np.flatnonzero(figures["products"]).size <= 3 + 60 / 20 + 3  # 1, 2, 4, 8, 16 and 20 steps apart


def least_squares(x, i):
    """A sum of squares that falls to 0, without noise."""
    return 0.5 * jnp.sum((x - 1.0) ** 2 * SCALES)


@pytest.mark.parametrize(("sizes", "seen"), [(2.0, False), (200.0, True)], ids=["rounding", "noise"])
def test_rounding_is_no_noise(sizes, seen):
    """A loss f that has fallen far below the first one f₀ is known to about ε√(f f₀)."""
    steps, rule = 12, sf.noise_aware(sf.damping_search(1.0))
    tx, start = sf.adaptive_saddle_free_newton(sf.exact(), rule=rule), jnp.full(6, 1e3)
    clean = run(tx, least_squares, start, jnp.ones(steps))
    f = np.asarray(clean["value"], np.float64)
    errors = sizes * np.finfo(np.float32).eps * np.sqrt(f[0] / np.maximum(f, 1e-30))
    errors = np.where(np.arange(steps) % 2, errors, 0)  # what another order of sums would give
    assert np.max(errors[f > 1e-20]) > 1e-3  # far above the threshold
    figures = run(tx, least_squares, start, jnp.asarray(1 + errors, jnp.float32))
    assert np.all(clean["noise"] < 1e-3)
    assert np.any(figures["noise"] > 1e-3) == seen


@pytest.mark.parametrize(("dtype", "seen"), [(jnp.float32, True), (jnp.bfloat16, False)], ids=["float32", "bfloat16"])
def test_the_threshold_is_not_below_the_rounding_of_the_parameters(dtype, seen):
    tx = sf.adaptive_saddle_free_newton(sf.lanczos(3, recycle=3, refresh_every=20))
    factors = jnp.asarray(1 + 5e-3 * (np.arange(12) % 2), jnp.float32)
    figures = run(tx, functools.partial(bowl, offset=10.0), jnp.ones(6, dtype), factors)
    assert bool(np.any(figures["products"][1:] == 0)) == seen


def test_the_search_has_its_own_damping():
    """One loss that differs: the λ of the verdict rises, and the search goes on from where it was."""
    tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=sf.noise_aware(sf.damping_search(1.0)))
    factors = jnp.ones(80).at[8].set(1.1)
    figures = run(tx, lambda x, i: jnp.sum(SCALES * (x - 1) ** 4), jnp.full(6, 10.0), factors)
    damping, noisy = np.asarray(figures["damping"]), np.flatnonzero(figures["noise"] > 1e-4)
    assert noisy[0] == 8
    assert noisy[-1] < 78
    before, after = damping[7], damping[noisy[-1] + 1]
    assert damping[8] > 10 * before
    assert before / 4.01 <= after <= 4.01 * before  # as far as one search goes
