"""Rules against dense solutions of their small problems."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from problems import Given, network_batch, network_loss, network_params

import saddlefree as sf
from saddlefree.model import Answer
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, predicted_change, reduction_ratio
from saddlefree.space import Space

SADDLE = lambda x: 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4  # noqa: E731


def propose(rule, matvec, g, direction, previous, damping, loss=lambda step: jnp.zeros(())):
    """The rule's proposal at λ, on flat vectors."""
    layout = Space(g)
    problem = Problem(layout, g, lambda part: matvec, previous, None, loss, g)
    return rule.propose(problem, Given(direction), jnp.asarray(damping, layout.dtype), jnp.array(0))


def dense_pair(H, g, d, p, damping):
    """η, μ from the definition, in NumPy: s = B y, (|BᵀHB| + λI) y = −Bᵀg, s = −η d + μ p."""
    B, _ = np.linalg.qr(np.stack([d, p], axis=1))
    values, vectors = np.linalg.eigh(B.T @ H @ B)
    y = -vectors @ ((vectors.T @ (B.T @ g)) / (np.abs(values) + damping))
    (eta, mu), *_ = np.linalg.lstsq(np.stack([-d, p], axis=1), B @ y, rcond=None)
    return eta, mu, B @ y


@pytest.mark.parametrize("seed", range(5))
def test_plane_on_a_network_with_indefinite_hessian(x64, seed):
    params = network_params(jax.random.key(seed), dtype=jnp.float64)
    batch = network_batch(jax.random.key(1), dtype=jnp.float64)
    x, unravel = ravel_pytree(params)
    loss = lambda v: network_loss(unravel(v), batch)  # noqa: E731
    g, H = jax.grad(loss)(x), np.asarray(jax.hessian(loss)(x))
    assert np.linalg.eigvalsh(H)[0] < 0
    damping, matvec = 0.05, lambda v: jnp.asarray(H) @ v
    direction = sf.solve(sf.series(num_terms=4), matvec, g, damping).direction
    previous = jnp.asarray(np.random.default_rng(seed).normal(size=g.size))
    trial = lambda step: loss(x if step is None else x + step)  # noqa: E731
    proposal = propose(sf.adaptive_plane(), matvec, g, direction, previous, damping, trial)
    eta, mu, step = dense_pair(H, *(np.asarray(a) for a in (g, direction, previous)), damping)
    np.testing.assert_allclose([proposal.learning_rate, proposal.momentum], [eta, mu], rtol=1e-6)
    np.testing.assert_allclose(proposal.step, step, atol=1e-8 * np.linalg.norm(step))
    model = np.asarray(g) @ step + step @ H @ step / 2
    layout = Space(g)
    problem = Problem(layout, g, lambda part: matvec, loss_gradient=g)
    np.testing.assert_allclose(predicted_change(problem, proposal.step), model, rtol=1e-8)
    np.testing.assert_allclose(proposal.ratio, (loss(x + step) - loss(x)) / model, rtol=1e-5)
    assert step @ np.asarray(g) < 0


def test_plane_is_one_and_zero_where_the_solve_is_exact():
    """H positive definite, no previous step, exact direction."""
    h, g, damping = jnp.array([3.0, 1.0, 0.1]), jnp.array([1.0, -2.0, 0.5]), 0.1
    proposal = propose(sf.adaptive_plane(), lambda v: h * v, g, g / (h + damping), jnp.zeros(3), damping)
    np.testing.assert_allclose([proposal.learning_rate, proposal.momentum], [1.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("previous", [[2.0, -2.0], [1e-20, -1e-20], [0.0, 0.0]])
def test_plane_with_a_parallel_or_vanishing_previous_step(previous):
    """The plane collapses to a line, and nothing is divided by zero."""
    h, g = jnp.array([1.0, -2.0]), jnp.array([1.0, -1.0])
    rule = sf.adaptive_plane(minimum=0.0)
    proposal = propose(rule, lambda v: h * v, g, g, jnp.array(previous), 0.0)
    assert np.isfinite([proposal.learning_rate, proposal.momentum, proposal.ratio]).all()
    np.testing.assert_allclose(proposal.step, [-2.0, 2.0], rtol=1e-5)  # |gᵀHg|/gᵀg = ½


@pytest.mark.parametrize("rule", [sf.adaptive_plane(1e-2), sf.damping_search(1e-2), sf.levenberg_marquardt(1e-2)])
def test_every_adaptive_rule_leaves_a_saddle(rule):
    tx, x = sf.adaptive_saddle_free_newton(sf.exact(), rule=rule), jnp.array([1e-3, 1e-4])
    state, update = tx.init(x), jax.jit(lambda g, s, x: tx.update(g, s, x, value_fn=SADDLE))
    for _ in range(40):
        updates, state = update(jax.grad(SADDLE)(x), state, x)
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


class Diagonal:
    """The model of f(s) = gᵀs + ½ h s² with d = g/(h + λ)."""

    stats = {}  # noqa: RUF012

    def __init__(self, g, h):
        self.g, self.h = g, h

    def answer(self, damping):
        d = self.g / (self.h + damping)
        return Answer(d, -jnp.sum(self.g * d) + jnp.sum(self.h * d**2) / 2, jnp.zeros((), jnp.int32), {})


def searched(rule, curvature):
    """The proposal where f(s) = gs + ½κs² and the model is gs + ½s²."""
    g, layout = jnp.array([1.0]), Space(jnp.ones(1))
    loss = lambda s: jnp.zeros(()) if s is None else jnp.sum(g * s) + curvature * jnp.sum(s**2) / 2  # noqa: E731
    problem = Problem(layout, g, lambda part: None, None, None, loss, g)
    return rule.propose(problem, Diagonal(g, jnp.ones(1)), jnp.array(1.0), jnp.array(0))


@pytest.mark.parametrize(
    ("curvature", "share", "expected"),
    [
        (1.0, None, 2**-7),  # the model is right: the longest step is the best
        (1.0, 0.5, 2**-7),
        (3.0, None, 2.0),  # the loss is three times as curved as the model: s = −⅓ is best
        (3.0, 1.0, 2.0),
        (3.0, 0.8, 2.0),
        (3.0, 0.7, 1.0),  # s = −½ makes 1/8, three quarters of the 1/6 that the best makes
        (300.0, 0.5, 128.0),  # no trial lowers the loss: the lowest
    ],
)
def test_search_by_the_lowest_loss_and_by_the_smallest_good_damping(curvature, share, expected):
    """The step to s = −1/(1 + λ) makes the progress 1/(1 + λ) − ½κ/(1 + λ)²."""
    proposal = searched(sf.damping_search(initial=1.0, spread=2.0, reach=7, share=share), curvature)
    assert proposal.damping == expected
    ratio = (2 * (1 + expected) - curvature) / (2 * (1 + expected) - 1)
    np.testing.assert_allclose(proposal.ratio, ratio, rtol=1e-3, atol=1e-5)


def test_search_over_lengths_takes_the_best_length_of_the_smallest_good_damping():
    """d(1/8) = 8/9, and with κ = 8 the minimum is at s = −1/8: η = 1/8 is the nearest length, for every λ."""
    proposal = searched(sf.damping_search(initial=1.0, spread=2.0, reach=3, share=0.5, lengths=5), 8.0)
    assert (float(proposal.damping), float(proposal.learning_rate)) == (0.125, 0.125)
    s = -1 / 9
    np.testing.assert_allclose(proposal.step, [s], rtol=1e-6)
    np.testing.assert_allclose(proposal.ratio, (s + 4 * s**2) / (s + s**2 / 2), rtol=1e-4)
    short = searched(sf.damping_search(initial=1.0, spread=2.0, reach=3, share=0.5), 8.0)
    assert (float(short.damping), float(short.learning_rate)) == (4.0, 1.0)


def test_search_for_the_smallest_damping_passes_over_trials_that_are_not_finite():
    """The loss is NaN beyond a length of ½: λ = 1 is the smallest of those within."""
    rule = sf.damping_search(initial=1.0, reach=2, share=0.25)
    g = jnp.array([1.0])
    loss = lambda s: jnp.where(jnp.abs(s[0]) <= 0.5, s[0] + s[0] ** 2 / 2, jnp.nan) if s is not None else jnp.zeros(())  # noqa: E731
    problem = Problem(Space(g), g, lambda part: None, None, None, loss, g)
    proposal = rule.propose(problem, Diagonal(g, jnp.ones(1)), jnp.array(1.0), jnp.array(0))
    assert proposal.damping == 1.0


@pytest.mark.parametrize("make", [sf.levenberg_marquardt, sf.adaptive_plane])
def test_damping_by_the_reduction_ratio_and_its_bounds(make):
    rule = make(initial=1.0, factor=0.5, minimum=0.3, maximum=3.0, refusal=4.0)

    def learn(lam, ratio, taken=True):
        proposal = Proposal(None, None, None, None, None, ratio=jnp.float32(ratio))
        return float(rule.learn(jnp.float32(lam), jnp.array(0), proposal, jnp.array(taken)))

    assert learn(1.0, 0.1) == 2.0
    assert learn(1.0, 0.5) == 1.0
    assert learn(1.0, 0.9) == 0.5
    assert learn(0.5, 0.9) == pytest.approx(0.3)
    assert learn(2.0, 0.1) == 3.0
    assert learn(0.5, 0.9, taken=False) == 2.0
    assert learn(0.0, np.nan, taken=False) > 0


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
        max_step=optax.constant_schedule(10.0),
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


def test_a_long_step_is_shortened_and_says_so():
    """A root mean square of at most `max_step`; within it nothing changes."""
    x, loss = jnp.array([3.0, 4.0]), lambda x: jnp.sum(x**2) / 2
    for most, scale in ((0.5, 0.5 * np.sqrt(2) / 5.0), (10.0, 1.0)):
        tx = sf.saddle_free_newton(damping=0.0, solver=sf.exact(), max_step=most)
        updates, state = tx.update(x, tx.init(x), x, value_fn=loss)
        np.testing.assert_allclose(updates, -scale * np.asarray(x), rtol=1e-5)
        np.testing.assert_allclose(sf.diagnostics(state)["step_scale"], scale, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sf.adaptive_saddle_free_newton(sf.lanczos(3, two_pass=True), rule=sf.damping_search()),
            "damping_search asks for several λ, and lanczos.* answers one: use levenberg_marquardt",
        ),
        (lambda: sf.saddle_free_newton(damping=sf.damping_search()), r"use adaptive_saddle_free_newton\(solver, rule="),
        (lambda: sf.saddle_free_newton(momentum=0.9, solver=sf.low_rank()), "momentum must be None beside low_rank"),
        (lambda: sf.saddle_free_newton(momentum=0.9, solver=sf.blockwise(sf.low_rank())), "momentum must be None"),
        (
            lambda: sf.adaptive_saddle_free_newton(sf.lanczos(3, memory=1), rule=sf.adaptive_plane()),
            "momentum must be None beside lanczos",
        ),
        (lambda: sf.adaptive_saddle_free_newton(rule="search"), "rule must be a rule such as damping_search"),
        (lambda: sf.damping_search(0.0), r"initial_damping must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.damping_search(spread=1.0), r"spread must be a number in \(1, inf\), got 1.0"),
        (lambda: sf.damping_search(reach=0), "reach must be a whole number ≥ 1, got 0"),
        (lambda: sf.damping_search(share=0.0), r"share must be a number in \(0, 1\], got 0.0"),
        (lambda: sf.damping_search(lengths=0), r"lengths must be a whole number ≥ 1, got 0"),
        (lambda: sf.damping_search(max_increase=-1), r"max_increase must be a number in \[0, inf\), got -1"),
        (lambda: sf.fixed_rate(max_step=0.0), r"max_step must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.fixed_rate(max_ratio=0.0), r"max_ratio must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.levenberg_marquardt(factor=1.0), r"factor must be a number in \(0, 1\), got 1.0"),
        (lambda: sf.levenberg_marquardt(minimum=1.0, maximum=0.5), "maximum must be a number ≥ minimum = 1.0, got 0.5"),
        (lambda: sf.adaptive_plane(refusal=0.5), r"refusal must be a number in \[1, inf\), got 0.5"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.adaptive_saddle_free_newton(damping=0.1), "has no argument 'damping': use initial_damping="),
        (lambda: sf.adaptive_saddle_free_newton(step=1), "has no argument 'step': use rule=adaptive_plane"),
        (lambda: sf.adaptive_saddle_free_newton(max_increase=1), "'max_increase': use rule=damping_search"),
        (lambda: sf.adaptive_saddle_free_newton(momentum=0.9), "'momentum': use saddle_free_newton"),
        (lambda: sf.adaptive_saddle_free_newton(dampng=0.1), "unexpected keyword argument 'dampng'"),
        (lambda: sf.low_rank(metric="adam"), "low_rank has no argument 'metric': use base=optax.adam"),
    ],
)
def test_arguments_that_are_gone_name_their_successor(make, message):
    with pytest.raises(TypeError, match=message):
        make()
    for name in ("fixed_step", "fixed_damping", "adaptive_step"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': use saddlefree"):
            getattr(sf, name)
