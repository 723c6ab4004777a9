"""Leaving saddles on which the gradient says nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import saddlefree as sf
from saddlefree.problem import Problem
from saddlefree.space import Space

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

    (x, _), lengths = run(x)
    return x, lengths


@pytest.mark.parametrize("start", [jnp.zeros(50), jnp.ones(50).at[-1].set(0.0)], ids=["on it", "next to it"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_leaves_a_saddle_that_the_gradient_does_not_see(start, adaptive):
    make = sf.adaptive_saddle_free_newton if adaptive else sf.saddle_free_newton
    solver = sf.lanczos(5)
    stuck, _ = train(make(solver=solver), start)
    np.testing.assert_allclose(stuck, 0.0, atol=1e-3)
    free, lengths = train(make(solver=solver, escape=sf.escape(every=5)), start)
    np.testing.assert_allclose(abs(free[-1]), 0.3**0.5, rtol=1e-2)
    assert jnp.max(lengths) == pytest.approx(0.1, rel=1e-3)
    # Off the saddle there is nothing to escape from.
    assert jnp.all(lengths[-10:] == 0)


def test_no_escape_where_the_gradient_sees_negative_curvature_or_there_is_none():
    tx = sf.saddle_free_newton(solver=sf.exact(), escape=sf.escape(every=1))
    _, lengths = train(tx, jnp.zeros(50).at[-1].set(0.5))
    assert jnp.all(lengths[5:] == 0)
    g = jnp.array([0.0, 1.0])
    for h, expected in ((jnp.array([1.0, 2.0]), 0.0), (jnp.array([-1.0, 2.0]), 0.1), (jnp.array([-1.0, -2.0]), 0.0)):
        problem = Problem(Space(g), g, lambda part, h=h: lambda v: h * v)
        found = sf.escape().step(problem, jnp.array(0.01), jax.random.key(0))
        np.testing.assert_allclose(jnp.linalg.norm(found), expected, rtol=1e-5)


def test_every_so_many_steps():
    """Also in each of several runs under `vmap`, with a product only where a search is due."""
    tx = sf.saddle_free_newton(0.0, solver=sf.exact(), escape=sf.escape(every=3, num_products=2))
    loss = lambda x: -jnp.sum(x**2) / 2  # noqa: E731

    def run(x):
        def step(state, _):
            _, state = tx.update(jnp.zeros(4), state, x, value_fn=loss)
            return state, sf.diagnostics(state)["escape"] > 0

        return jax.lax.scan(step, tx.init(x), None, length=7)[1]

    expected = [True, False, False, True, False, False, True]
    assert jax.jit(run)(jnp.zeros(4)).tolist() == expected
    assert jax.jit(jax.vmap(run))(jnp.zeros((2, 4))).tolist() == [expected] * 2


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
