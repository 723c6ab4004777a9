"""Leaving saddles on which the gradient says nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import saddlefree as sf

CURVATURES = jnp.concatenate([jnp.linspace(0.5, 2.0, 49), jnp.array([-0.3])])


def saddle(x):
    """A minimum in 49 directions, a maximum in one, with minima at ±√0.3 beyond it."""
    return 0.5 * jnp.sum(CURVATURES * x**2) + 0.25 * x[-1] ** 4


def train(tx, x, steps=60):
    @jax.jit
    def run(x):
        def step(carry, _):
            x, state = carry
            updates, state = tx.update(jax.grad(saddle)(x), state, x, value_fn=saddle)
            return (optax.apply_updates(x, updates), state), sf.diagnostics(state).get("escape", jnp.zeros(()))

        return jax.lax.scan(step, (x, tx.init(x)), None, length=steps)

    (x, _), leaps = run(x)
    return x, leaps


@pytest.mark.parametrize("start", [jnp.zeros(50), jnp.ones(50).at[-1].set(0.0)], ids=["on it", "next to it"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_leaves_a_saddle_that_the_gradient_does_not_see(start, adaptive):
    make = sf.adaptive_saddle_free_newton if adaptive else sf.saddle_free_newton
    solver = sf.lanczos(5)
    stuck, _ = train(make(solver=solver), start)
    np.testing.assert_allclose(stuck, 0.0, atol=1e-3)
    free, leaps = train(make(solver=solver, escape=sf.escape(every=5)), start)
    np.testing.assert_allclose(abs(free[-1]), 0.3**0.5, rtol=1e-2)
    assert jnp.max(leaps) == pytest.approx(0.1, rel=1e-3)
    # Off the saddle there is nothing to escape from.
    assert jnp.all(leaps[-10:] == 0)


def test_no_leap_where_the_gradient_sees_negative_curvature_or_there_is_none():
    _, leaps = train(sf.saddle_free_newton(solver=sf.exact(), escape=sf.escape(every=1)), jnp.zeros(50).at[-1].set(0.5))
    assert jnp.all(leaps[5:] == 0)
    state = sf.escape().init()
    g = jnp.array([0.0, 1.0])
    for h, expected in ((jnp.array([1.0, 2.0]), 0.0), (jnp.array([-1.0, 2.0]), 0.1), (jnp.array([-1.0, -2.0]), 0.0)):
        leap, _ = sf.escape().leap(lambda h=h: lambda v: h * v, g, jnp.array(0.01), state, jnp.array(0))
        np.testing.assert_allclose(jnp.linalg.norm(leap), expected, rtol=1e-5)


def test_every_so_many_steps():
    state, leapt = sf.escape(every=3).init(), []
    curvature = lambda: lambda v: -v  # noqa: E731
    for count in range(7):
        leap, state = sf.escape(every=3).leap(curvature, jnp.zeros(4), jnp.array(0.0), state, jnp.array(count))
        leapt.append(bool(jnp.any(leap != 0)))
    assert leapt == [True, False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.escape(radius=0.0), r"radius must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.escape(every=0), "every must be a whole number ≥ 1, got 0"),
        (lambda: sf.escape(num_products=0), "num_products must be a whole number ≥ 1, got 0"),
        (lambda: sf.saddle_free_newton(escape=True), r"escape must be None or escape\(…\), got True"),
        (lambda: sf.escape(threshold=2.0), r"threshold must be a number in \[0, 1\], got 2.0"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
