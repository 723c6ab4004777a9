"""`minimise`: to the last digit, every status, resuming to the bit, and no saddle that counts as converged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import network_params, predict

import saddlefree as sf
from benchmarks import saddles
from saddlefree import descent, stages
from saddlefree.descent import Stage
from saddlefree.minimisation import Descent
from saddlefree.space import Space


def valley(x):
    return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def saddle(x):
    return 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_valley_to_the_last_digit(x64):
    result = sf.minimise(valley, jnp.array([-1.2, 1.0, -1.2, 1.0]))
    assert result.value < 1e-20
    assert result.status == sf.Status.CONVERGED
    assert valley(result.params) == result.value
    assert jnp.linalg.norm(jax.grad(valley)(result.params)) <= 1e-12
    history = result.history
    assert {len(column) for column in history.values()} == {result.steps}
    assert set(history) >= {"value", "gradient_norm", "damping", "products", "evaluations", "escape"}
    assert history["value"][-1] == result.value
    assert np.all(history["value"][1:] <= history["value"][:-1] * (1 + 1e-6))
    assert result.steps <= history["evaluations"].sum() <= 4 * result.steps
    assert not history["products"].any()


def test_network_to_the_last_digit(x64):
    """A teacher's outputs are reproduced: the loss can become 0."""
    x = jax.random.normal(jax.random.key(1), (12, 2))
    y = predict(network_params(jax.random.key(2), (2, 2, 1), jnp.float64), x)
    loss = lambda params: 0.5 * jnp.mean((predict(params, x) - y) ** 2)  # noqa: E731
    result = sf.minimise(loss, network_params(jax.random.key(3), (2, 5, 1), jnp.float64), max_steps=2_000)
    assert result.value < 1e-20
    assert loss(result.params) < 1e-20
    assert result.status in (sf.Status.CONVERGED, sf.Status.STALLED)


@pytest.mark.parametrize("solver", [None, sf.quasi_newton(memory=3), sf.lanczos(num_products=2)], ids=str)
def test_an_interrupted_run_ends_with_the_same_bits(solver):
    start = jnp.array([-1.2, 1.0, 0.5])
    whole = sf.minimise(valley, start, solver=solver, max_steps=23)
    assert (whole.status, whole.steps) == (sf.Status.STEPS, 23)
    first = sf.minimise(valley, start, solver=solver, max_steps=9)
    kept = jax.tree.map(np.array, first.state)
    second = sf.minimise(valley, start, solver=solver, max_steps=14, state=first.state)
    assert second.steps == 23
    assert equal(second.state, whole.state)
    assert equal(second.params, whole.params)
    for name, column in whole.history.items():
        np.testing.assert_array_equal(np.concatenate([first.history[name], second.history[name]]), column)
    assert equal(first.state, kept)  # the state that was handed in is not written to


def test_a_switch_between_stages_changes_no_bit_wherever_a_run_is_interrupted():
    """Two stages, the first of which ends because it is slow; 1 step at a time, and 30 at once."""
    slow = Stage(sf.exact(), sf.damping_search(), pace=50.0, window=4, following=1)
    run = Descent(valley, (slow, Stage(sf.quasi_newton(), sf.line_search())))
    start = jnp.array([-1.2, 1.0, 0.5])
    whole, rows, status = run.advance(run.start(start), 12)
    assert status is None
    np.testing.assert_array_equal(rows["stage"], [0] * 4 + [1] * 8)
    state, parts = run.start(start), []
    for _ in range(12):
        state, row, _ = run.advance(run.resumed(state), 1)
        parts.append(row["value"])
    assert equal(state, whole)
    np.testing.assert_array_equal(np.concatenate(parts), rows["value"])
    assert run.summary(state) == "exact: 4 steps until the loss fell too slowly; quasi_newton: 8 steps"


def test_a_stage_that_is_stuck_hands_over():
    """A rule that takes no step."""
    nowhere = Stage(sf.quasi_newton(), sf.fixed_rate(0.0, damping=0.0), following=1)
    run = Descent(valley, (nowhere, Stage(sf.quasi_newton(), sf.line_search(), following=0)))
    state, rows, status = run.advance(run.start(jnp.array([-1.2, 1.0, 0.5])), 200)
    assert status == sf.Status.CONVERGED
    assert rows["stage"][descent.PATIENCE - 1 : descent.PATIENCE + 1].tolist() == [0, 1]
    assert "quasi_newton: 30 steps until no step made progress" in run.summary(state)


def test_the_same_problem_is_compiled_once():
    start = jnp.array([-1.2, 1.0, 0.5])
    sf.minimise(valley, start, max_steps=3)
    program = descent.program(valley, stages.choose(Space(start)), False)
    compiled = program.run._cache_size()
    sf.minimise(valley, 2 * start, max_steps=5, tolerance=1e-3)
    assert program.run._cache_size() == compiled > 0
    run = Descent(valley, stages.choose(Space(start)))
    state = run.start(jnp.full(3, 0.5))  # weakly typed
    for _ in range(2):
        state, _, _ = run.advance(state, 1)
    assert program.run._cache_size() == compiled


def test_statuses(x64):
    start = jnp.array([-1.2, 1.0, 0.5])
    assert sf.minimise(valley, start, max_steps=0).status == sf.Status.STEPS
    assert sf.minimise(valley, start, seconds=1e-9).status == sf.Status.TIME
    seen = []
    stopped = sf.minimise(valley, start, callback=lambda p: seen.append(p) or len(seen) == 3, every=4)
    assert (stopped.status, stopped.steps) == (sf.Status.STOPPED, 12)
    assert [p.steps for p in seen] == [4, 8, 12]
    assert seen[-1].value == stopped.history["value"][-1]
    none_overwritten = [float(valley(p.params)) for p in seen]
    np.testing.assert_allclose(none_overwritten, [p.value for p in seen], rtol=1e-12)
    done = sf.minimise(valley, jnp.ones(3))
    assert (done.status, done.steps, done.history["value"].size) == (sf.Status.CONVERGED, 0, 0)
    loose = sf.minimise(valley, start, tolerance=1.0)
    assert loose.status == sf.Status.CONVERGED
    assert loose.history["gradient_norm"][-1] <= 1.0 < loose.history["gradient_norm"][-2]
    tight = sf.minimise(valley, start, tolerance=1e-6, state=loose.state)
    assert tight.status == sf.Status.CONVERGED
    assert tight.steps > loose.steps
    assert all(status.message for status in sf.Status)


def test_a_loss_that_stalls_on_rounding_says_so():
    """Residuals that cannot vanish: the gradient is a sum that cancels, and never 0."""
    rng = np.random.default_rng(0)
    A, y = (jnp.asarray(a, jnp.float32) for a in (rng.normal(size=(40, 3)), rng.normal(size=40)))
    loss = lambda x: jnp.sum((jnp.sinh(A @ x) - y) ** 2)  # noqa: E731
    result = sf.minimise(loss, jnp.zeros(3), tolerance=1e-30)
    assert result.status == sf.Status.STALLED
    assert "float64" in result.status.message
    assert result.steps < 300
    # The lowest loss, to its rounding, leaves a gradient of √ε = 3e-4 of the first.
    assert jnp.linalg.norm(jax.grad(loss)(result.params)) < 5e-3 * jnp.linalg.norm(jax.grad(loss)(jnp.zeros(3)))


def test_numbers_that_are_not_finite_end_a_run():
    start = jnp.array([-1.0, 2.0])
    nothing = sf.minimise(lambda x: jnp.sum(jnp.log(x)), start)
    assert nothing.status == sf.Status.NONFINITE
    np.testing.assert_array_equal(nothing.params, start)
    # Gradient descent with a rate that diverges, and refuses nothing: the best parameters are kept.
    diverging = sf.minimise(
        lambda x: jnp.sum(jnp.cosh(3 * x)), start, solver=sf.quasi_newton(), rule=sf.fixed_rate(1e3, damping=0.0)
    )
    assert diverging.status in (sf.Status.NONFINITE, sf.Status.STALLED)
    assert jnp.all(jnp.isfinite(diverging.params))
    assert jnp.isfinite(diverging.value)


def several(*parts):
    """The sum of several functions, each of its own entries of x: compiled once, with the saddles of all."""
    ends = np.cumsum([size for _, size in parts])
    pieces = [(fn, slice(end - size, end)) for (fn, size), end in zip(parts, ends, strict=True)]
    return lambda x: sum(fn(x[piece]) for fn, piece in pieces)


MANY = several(
    (lambda x: x[0] ** 3 - 3 * x[0] * x[1] ** 2 + jnp.sum(x**4) - 0.01 * x[1] ** 2, 2),  # a monkey saddle in a bowl
    (lambda x: jnp.sum(jnp.cos(x)) + 0.01 * jnp.sum(x**2), 3),
    (lambda x: (x[0] * x[1] - 1) ** 2 + 0.1 * (x[0] - x[1]) ** 2, 2),
    (lambda x: jnp.sin(x[0]) * jnp.sin(x[1]) + 0.01 * jnp.sum(x**2), 2),
)
SADDLES = {
    "quartic": (saddle, [1.0, 0.0]),
    "on it": (saddle, [0.0, 0.0]),
    "tiny": (lambda x: x[0] ** 2 - 1e-5 * x[1] ** 2 + 1e-6 * x[1] ** 4, [0.3, 0.0]),
    "four at once": (MANY, [0.0] * 9),
}


@pytest.mark.parametrize("name", SADDLES)
def test_no_saddle_counts_as_converged(x64, name):
    """Starts on the stable manifold, where the gradient never points away from the saddle."""
    loss, start = SADDLES[name]
    start = jnp.asarray(start)
    result = sf.minimise(loss, start, max_steps=1_000)
    assert result.status in (sf.Status.CONVERGED, sf.Status.STALLED)
    values = np.linalg.eigvalsh(jax.hessian(loss)(result.params))
    assert values[0] >= -1e-6 * np.abs(values).max()
    assert result.value < loss(start)
    assert result.history["escape"].any()


def test_random_starts_do_not_end_on_saddles(x64, monkeypatch):
    """The benchmark `benchmarks.saddles`, with 12 of its 1,000 starts and four of its functions in one."""
    parts = [saddles.FUNCTIONS[name] for name in ("quartic", "cosines", "factors", "monkey")]
    monkeypatch.setitem(saddles.FUNCTIONS, "four", (several(*parts), sum(size for _, size in parts)))
    converged = []

    def minimised(fn, x):
        end, done = saddles.minimised(fn, x)
        converged.append(done)
        return end, done

    assert saddles.ended_on_saddles(minimised, "four", range(12)) == 0
    assert sum(converged) >= 6


def test_a_saddle_without_a_way_down_has_a_status_of_its_own():
    """A derivative that is not the loss's: the curvature says down, the loss does not."""

    @jax.custom_jvp
    def flat(x):
        return jnp.zeros(())

    flat.defjvp(lambda primals, tangents: (flat(*primals), -jnp.sum(primals[0] * tangents[0])))
    result = sf.minimise(flat, jnp.zeros(2))
    assert result.status == sf.Status.SADDLE


def test_progress_line(capsys):
    sf.minimise(valley, jnp.array([-1.2, 1.0, 0.5]), max_steps=3, progress=True)
    captured = capsys.readouterr()
    assert "step       3" in captured.err
    assert "all steps were used" in captured.err
    assert "quasi_newton: 3 steps" in captured.err
    assert not captured.out


def test_default_depends_on_the_number_of_parameters():
    assert stages.choose(Space(jnp.ones(10)))[0].solver == sf.quasi_newton()
    some, many = (stages.choose(Space(jax.ShapeDtypeStruct((size,), jnp.float32))) for size in (8_192, 8_193))
    assert some[0].solver == sf.quasi_newton(200, "ssbroyden", whole_after=4_096)
    assert many[0].solver == sf.quasi_newton(200, "ssbroyden")
    assert isinstance(many[1].solver, sf.lanczos)
    assert [type(s.solver) for s in stages.choose(Space(jax.ShapeDtypeStruct((10**8,), jnp.float32)))] == [sf.lanczos]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_steps": -1}, "max_steps must be a whole number ≥ 0, got -1"),
        ({"tolerance": -1.0}, "tolerance must be a number in"),
        ({"seconds": 0.0}, "seconds must be a number in"),
        ({"every": 0}, "every must be a whole number ≥ 1"),
        ({"solver": sf.quasi_newton(), "rule": sf.damping_search()}, "damping_search asks for λ > 0"),
        ({"solver": "bfgs"}, "solver must be a solver"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sf.minimise(valley, jnp.ones(2), **arguments)


def test_integer_parameters_are_refused():
    with pytest.raises(ValueError, match="must be real floating point"):
        sf.minimise(valley, jnp.ones(2, jnp.int32))


def test_least_squares_to_the_last_digit(x64):
    residuals = lambda x: {"a": 1 - x[:-1], "b": 10 * (x[1:] - x[:-1] ** 2)}  # noqa: E731
    result = sf.least_squares(residuals, jnp.array([-1.2, 1.0, -1.2]))
    assert result.status == sf.Status.CONVERGED
    assert result.value < 1e-20
    np.testing.assert_allclose(result.params, 1.0, rtol=1e-8)
    assert result.history["products"].any()
    first = sf.least_squares(residuals, jnp.array([-1.2, 1.0, -1.2]), max_steps=3)
    second = sf.least_squares(residuals, jnp.array([-1.2, 1.0, -1.2]), state=first.state)
    assert equal(second.state, result.state)


def test_least_squares_leaves_a_saddle(x64):
    """Gauss-Newton has no negative curvature of its own."""
    result = sf.least_squares(lambda x: x[0] * x[1] - jnp.ones(1), jnp.zeros(2))
    assert result.value < 1e-20
    assert result.history["escape"].any()
