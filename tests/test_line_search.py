"""The line search: its conditions on random functions, what it refuses, and what it does near rounding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import Given

import saddlefree as sf
from saddlefree.problem import Problem
from saddlefree.rules.line_search import NOISE
from saddlefree.space import Space


def search(rule, loss, x, d, started=True):
    """The rule's proposal along −d."""
    layout = Space(x)
    value_and_gradient = lambda step: jax.value_and_grad(loss)(x + step)  # noqa: E731
    problem = Problem(
        layout,
        jax.grad(loss)(x),
        None,
        loss=lambda step: loss(x if step is None else x + step),
        loss_gradient=jax.grad(loss)(x),
        value_and_gradient=value_and_gradient,
    )
    state = rule.init(layout)._replace(started=jnp.array(started))
    proposal = rule.propose(problem, Given(d), state, jnp.zeros((), jnp.int32))
    return proposal, rule.learn(state, jnp.zeros((), jnp.int32), proposal, jnp.array(True))


@pytest.mark.parametrize("curvature", [0.9, 0.1])
def test_conditions_hold_on_random_functions(x64, curvature):
    """Sums of sines in a bowl, directions of descent of all lengths; compiled once."""
    rule = sf.line_search(curvature=curvature, max_evaluations=30)

    @jax.jit
    def run(waves, shift, d):
        loss = lambda x: jnp.sum(jnp.sin(waves @ x + shift)) + jnp.sum(x**2) / 20  # noqa: E731
        x = jnp.ones(3)
        g = jax.grad(loss)(x)
        d = jnp.where(g @ d > 0, d, -d)
        proposal, state = search(rule, loss, x, d)
        after, gradient = jax.value_and_grad(loss)(x + proposal.step)
        np_ = {"d": d, "before": loss(x), "after": after, "slope": -(g @ d), "slope_after": -(gradient @ d)}
        return {**np_, "rate": proposal.learning_rate, "gradient": gradient, **proposal.figures}, state

    rng = np.random.default_rng(0)
    met = 0
    for _ in range(60):
        waves = rng.normal(size=(4, 3)) * rng.uniform(0.1, 3)
        d = rng.normal(size=3) * 10 ** rng.uniform(-4, 4)
        found, state = run(*(jnp.asarray(a) for a in (waves, rng.normal(size=4), d)))
        assert found["after"] < found["before"]
        assert 1 <= found["evaluations"] <= 30
        np.testing.assert_allclose(state.value, found["after"], rtol=1e-12)
        np.testing.assert_allclose(state.gradient, found["gradient"], rtol=1e-9, atol=1e-12)
        if found["wolfe"]:
            met += 1
            least = found["before"] + 1e-4 * found["rate"] * found["slope"]
            assert found["after"] <= max(least, found["before"] + NOISE * abs(found["before"])) * (1 + 1e-12) + 1e-12
            assert abs(found["slope_after"]) <= curvature * abs(found["slope"]) * (1 + 1e-9)
    assert met >= 58


def test_first_step_has_at_most_length_one(x64):
    loss = lambda x: jnp.sum(x**4)  # noqa: E731
    rule = sf.line_search(max_evaluations=1)
    long, _ = search(rule, loss, 3 * jnp.ones(4), 100 * jnp.ones(4), started=False)
    np.testing.assert_allclose(jnp.linalg.norm(long.step), 1)
    short, _ = search(rule, loss, 3 * jnp.ones(4), 0.01 * jnp.ones(4), started=False)
    np.testing.assert_allclose(short.step, -0.01)


@pytest.mark.parametrize("direction", [-1.0, 0.0, jnp.nan], ids=["uphill", "zero", "nan"])
def test_a_step_that_cannot_improve_is_refused(direction):
    class given(sf.Solver):
        def init(self, layout):
            return ()

        def model(self, problem, dampings, state):
            model = Given(direction * problem.gradient)
            model.stats = {"products": jnp.zeros((), jnp.int32)}
            return model, state

    tx, x = sf.adaptive_saddle_free_newton(given(), rule=sf.line_search()), jnp.array([1.0, 2.0])
    updates, state = tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x**2) / 2)
    np.testing.assert_array_equal(updates, 0)
    figures = sf.diagnostics(state)
    refused, nonfinite = figures["rejected_steps"], figures["nonfinite_steps"]
    assert (int(refused), int(nonfinite)) == ((0, 1) if np.isnan(direction) else (1, 0))
    assert figures["evaluations"] == figures["wolfe"] == 0
    assert not state.rule.known
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state))


def test_a_gradient_of_the_wrong_sign_ends_without_a_step(x64):
    """All trials are higher: bounded work, then refusal."""
    loss = lambda x: jnp.sum(jnp.abs(x))  # noqa: E731
    x = jnp.zeros(2)  # the derivative of |x| at 0 is 1 by convention, and there is no descent
    proposal, _ = search(sf.line_search(max_evaluations=12), loss, x, jnp.ones(2))
    assert proposal.figures["evaluations"] <= 12
    assert not jnp.isfinite(proposal.after)
    np.testing.assert_array_equal(proposal.step, 0)


def test_a_loss_that_is_not_finite_bounds_the_step(x64):
    loss = lambda x: jnp.sum(x - jnp.log(x))  # noqa: E731  (minimum at 1, NaN below 0)
    proposal, _ = search(sf.line_search(), loss, 5 * jnp.ones(2), 1e3 * jnp.ones(2))
    assert jnp.all(jnp.isfinite(proposal.step))
    assert loss(5 + proposal.step) < loss(5 * jnp.ones(2))
    assert proposal.figures["wolfe"] == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slopes_tell_where_values_are_rounding(dtype):
    """f = 1 + tiny: the loss does not change by one bit, the gradient still falls by orders of magnitude."""
    with jax.enable_x64(dtype == "float64"):
        scale = jnp.asarray(1e-4 if dtype == "float32" else 1e-8, dtype)
        curvatures = jnp.array([1.0, 10.0, 100.0], dtype)
        # Written around x = 0, where the gradient is right to the last digit.
        loss = lambda x: 1 + jnp.sum(curvatures * x**2) / 2 * scale  # noqa: E731
        tx = sf.adaptive_saddle_free_newton(sf.quasi_newton())
        x = scale * jnp.ones(3, dtype)
        assert loss(x) == 1

        def step(carry, _):
            x, state = carry
            updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
            return (optax.apply_updates(x, updates), state), None

        (end, state), _ = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), None, length=30))(x)
        assert jnp.linalg.norm(curvatures * end) < 1e-3 * jnp.linalg.norm(curvatures * x)
        assert sf.diagnostics(state)["nonfinite_steps"] == 0


def test_it_goes_with_solvers_of_any_damping(x64):
    valley = lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2  # noqa: E731
    for solver in sf.exact(), sf.lanczos(num_products=2, two_pass=True):
        tx = sf.adaptive_saddle_free_newton(solver, rule=sf.line_search(damping=1e-3))
        x = jnp.array([-1.0, 1.0])
        state, update = tx.init(x), jax.jit(lambda g, s, x, tx=tx: tx.update(g, s, x, value_fn=valley))
        values = [valley(x)]
        for _ in range(25):
            updates, state = update(jax.grad(valley)(x), state, x)
            x = optax.apply_updates(x, updates)
            values.append(valley(x))
        assert all(b <= a * (1 + NOISE) for a, b in itertools.pairwise(values))
        assert values[-1] < 1e-12
        assert sf.diagnostics(state)["damping"] == 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"damping": -1.0}, "damping must be a number in"),
        ({"decrease": 0.5}, r"decrease must be a number in \(0, 0.5\)"),
        ({"curvature": 1e-5}, r"curvature must be a number in \(0.0001, 1\)"),
        ({"curvature": 1.0}, "curvature must be"),
        ({"max_evaluations": 0}, "max_evaluations must be a whole number ≥ 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sf.line_search(**arguments)
