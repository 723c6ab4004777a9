"""Quasi-Newton matrices against the definition in NumPy, and what the theory promises of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import symmetric

import saddlefree as sf
from saddlefree.problem import Problem
from saddlefree.solvers import factors
from saddlefree.space import Space

UPDATES = ["ssbroyden", "ssbfgs", "bfgs"]
SIZE = 5


@functools.partial(jax.jit, static_argnums=0)
def call(solver, x, g, state):
    """The direction and the next state."""
    model, state = solver.model(Problem(Space(x), g, None), jnp.zeros(1), state)
    return model.answer(jnp.zeros(())).direction, model.answer(jnp.zeros(())).predicted, state


def oracle(M, s, y, update, aligned=True):
    """One update from its definition: b with a solve, the product form of the matrix, no rank-one terms."""
    n, ys = len(s), y @ s
    b, h = s @ np.linalg.solve(M, s) / ys, y @ M @ y / ys
    a = b * h - 1
    phi = tau = 1.0
    if aligned and update == "ssbfgs":
        tau = min(1, 1 / b)
    if aligned and update == "ssbroyden":
        theta = 0.0
        if a >= np.sqrt(np.finfo(float).eps):
            low = min(1, h * (1 - np.sqrt(abs(a) / (1 + a))))
            theta = max((low - 1) / a, min(1 / low, (1 - b) / b))
        sigma, r = 1 + theta * a, min(1, 1 / b)
        q = abs(sigma) ** (1 / (1 - n))
        tau = r * min(q, 1 / theta) if theta > 0 else min(r * q, sigma)
        phi = (1 - theta) / (1 + a * theta)
    # The BFGS part is VMVᵀ; φ ≠ 1 takes a part of vvᵀ away again.
    V = np.eye(n) - np.outer(s, y) / ys
    v = s / ys - M @ y / (y @ M @ y)
    return (V @ M @ V.T - (1 - phi) * (y @ M @ y) * np.outer(v, v)) / tau + np.outer(s, s) / ys


def path(solver, steps, seed=0, off=0.0, size=SIZE):
    """Points and matrices of a run on a convex function; `off` moves each point off the line."""
    rng = np.random.default_rng(seed)
    A = symmetric(rng, np.geomspace(0.1, 10, size))
    gradient = jax.jit(lambda x: jnp.asarray(A) @ x + jnp.sinh(x))
    x = jnp.asarray(rng.normal(size=size))
    state, points = solver.init(Space(x)), []
    for _ in range(steps):
        g = gradient(x)
        d, predicted, state = call(solver, x, g, state)
        points.append((np.asarray(x), np.asarray(g), np.asarray(d), state))
        np.testing.assert_allclose(predicted, -g @ d / 2, rtol=1e-12)
        x = x - rng.uniform(0.3, 1.2) * min(1, 1 / float(jnp.linalg.norm(d))) * d + off * rng.normal(size=size)
    return points


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("off", [0.0, 0.01], ids=["along", "off"])
def test_matrix_is_that_of_the_definition(x64, update, off):
    points = path(sf.quasi_newton(update=update), 6, off=off)
    M = np.eye(SIZE)
    for (x, g, _, _), (x2, g2, d, state) in itertools.pairwise(points):
        s, y = x2 - x, g2 - g
        if state.last.pairs == 1:
            M = (y @ s) / (y @ M @ y) * M
        M = oracle(M, s, y, update, aligned=off == 0)
        np.testing.assert_allclose(state.dense(), M, rtol=1e-9, atol=1e-10 * np.abs(M).max())
        np.testing.assert_allclose(d, M @ g2, rtol=1e-8)
    assert state.last.pairs == 5
    assert state.last.skipped == state.last.resets == 0


@pytest.mark.parametrize("update", UPDATES)
def test_matrix_is_symmetric_positive_definite_and_fulfils_the_secant_equation(x64, update):
    points = path(sf.quasi_newton(update=update), 12, seed=1, size=9)
    for (x, g, _, _), (x2, g2, _, state) in itertools.pairwise(points):
        M = np.asarray(state.dense())
        np.testing.assert_array_equal(M, M.T)
        assert np.linalg.eigvalsh(M)[0] > 0
        np.testing.assert_allclose(M @ (g2 - g), x2 - x, rtol=1e-8, atol=1e-10)


def test_terms_become_a_part_of_the_matrix_and_nothing_changes(x64):
    """16 updates are kept as terms: the 17th finds them in the matrix."""
    points = path(sf.quasi_newton(), 20, seed=2, size=9)
    M = np.eye(9)
    for (x, g, _, _), (x2, g2, d, state) in itertools.pairwise(points):
        s, y = x2 - x, g2 - g
        if state.last.pairs == 1:
            M = (y @ s) / (y @ M @ y) * M
        M = oracle(M, s, y, "ssbroyden")
        np.testing.assert_allclose(d, M @ g2, rtol=1e-6, atol=1e-12)
    assert state.begun
    assert state.terms.updates == 3
    np.testing.assert_array_equal(state.matrix, state.matrix.T)
    np.testing.assert_allclose(state.dense(), M, rtol=1e-6, atol=1e-8 * np.abs(M).max())


def test_limited_memory_is_whole_until_it_is_full_and_stays_positive_definite(x64):
    size = 40
    whole, limited = (path(sf.quasi_newton(memory, "ssbroyden"), 36, seed=3, size=size) for memory in (None, 16))
    for (_, _, d, _), (_, _, d2, _) in zip(whole[:16], limited[:16], strict=True):
        np.testing.assert_allclose(d, d2, rtol=1e-8, atol=1e-12)
    for *_, state in limited[14:]:
        M = np.asarray(state.factor * jnp.eye(size) + factors.dense(state.terms))
        assert np.linalg.eigvalsh(M)[0] > 0
    assert state.terms.vectors.shape == (32, size)
    # 16 updates are compressed to 8, for which there are then 8 more.
    assert [int(p[3].terms.updates) for p in limited[14:28]] == [14, 15, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11]
    # After it was compressed too, the last direction is that of the matrix, and the secant equation holds.
    for (x, g, _, _), (x2, g2, d, state) in itertools.pairwise(limited[16:24]):
        M = np.asarray(state.factor * jnp.eye(size) + factors.dense(state.terms))
        np.testing.assert_allclose(d, M @ g2, rtol=1e-7, atol=1e-12)
        np.testing.assert_allclose(M @ (g2 - g), x2 - x, rtol=1e-6, atol=1e-9)


def test_a_memory_that_becomes_a_matrix_forgets_nothing_from_there_on(x64):
    """Places for 16 updates: full after 16 and compressed to 8, then full after 24, which is more than 20."""
    size = 40
    limited, whole = (path(sf.quasi_newton(16, "ssbroyden", after), 60, seed=3, size=size) for after in (None, 20))
    for (_, _, d, _), (_, _, d2, _) in zip(limited[:24], whole[:24], strict=True):
        np.testing.assert_array_equal(d, d2)
    begun = [bool(state.begun) for *_, state in whole]
    assert begun.index(True) == 24
    assert all(begun[24:])
    M = np.asarray(whole[24][3].dense())
    for (x, g, _, _), (x2, g2, d, _) in itertools.pairwise(whole[24:]):
        M = oracle(M, x2 - x, g2 - g, "ssbroyden")
        np.testing.assert_allclose(d, M @ g2, rtol=1e-6, atol=1e-12)
    state = whole[-1][3]
    assert state.terms.updates == 3  # of 59; gathered after 24, 40 and 56
    np.testing.assert_array_equal(state.matrix, state.matrix.T)


def test_a_memory_that_becomes_a_matrix_goes_on_where_a_memory_is_slow(x64):
    size = 60
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))
    rows = basis.T * np.logspace(0, -3, size)[:, None]
    loss = lambda x: jnp.sum(jnp.cosh(rows @ x) - 1)  # noqa: E731
    values = []
    for after in (None, 30):
        solver = sf.quasi_newton(16, "ssbroyden", after)
        values.append(float(sf.minimise(loss, jnp.ones(size), solver=solver, max_steps=200, tolerance=0.0).value))
    assert values[0] > 1e-8
    assert values[1] < 1e-14


def test_a_memory_becomes_a_matrix_in_each_of_several_runs_at_once(x64):
    """One has learned 20 updates when the other begins: they are gathered in different steps."""
    scales = jnp.logspace(0, 3, 24)
    loss = lambda x: jnp.sum(jnp.cosh(scales * x) - 1)  # noqa: E731
    tx = sf.adaptive_saddle_free_newton(sf.quasi_newton(16, "ssbroyden", 20))

    def steps(carry, count):
        def step(carry, _):
            x, state = carry
            updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
            return (optax.apply_updates(x, updates), state), state.solver.begun

        return jax.lax.scan(step, carry, None, length=count)

    x = 1e-2 * jax.random.normal(jax.random.key(0), (2, 24))
    ahead, _ = jax.jit(steps, static_argnums=1)((x[0], tx.init(x[0])), 20)
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), ahead, (x[1], tx.init(x[1])))
    (x, state), begun = jax.jit(jax.vmap(functools.partial(steps, count=60)))(both)
    first = jnp.argmax(begun, axis=1)
    assert bool(jnp.all(begun[:, -1]))
    assert first[0] + 15 < first[1]
    assert not begun[0, 0]
    for one, matrix in zip(x, state.solver.matrix, strict=True):
        assert loss(one) < 1e-2
        np.testing.assert_array_equal(matrix, matrix.T)
        assert np.linalg.eigvalsh(matrix)[0] > 0


def test_limited_memory_is_bfgs_of_the_last_pairs(x64):
    points = path(sf.quasi_newton(memory=3), 7)
    pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(points)]
    for last in range(1, 7):
        s, y = pairs[last - 1]
        M = (y @ s) / (y @ y) * np.eye(SIZE)
        for s, y in pairs[max(0, last - 3) : last]:
            M = oracle(M, s, y, "bfgs")
        np.testing.assert_allclose(points[last][2], M @ points[last][1], rtol=1e-9)


@pytest.mark.parametrize("memory", [None, 10])
def test_a_quadratic_takes_one_step_for_each_dimension(x64, memory):
    """BFGS with an exact line search is conjugate gradients."""
    size = 6
    A = jnp.asarray(symmetric(np.random.default_rng(0), np.geomspace(0.5, 20, size)))
    loss = lambda x: x @ (A @ x) / 2  # noqa: E731
    rule = sf.line_search(decrease=1e-12, curvature=1e-10)
    tx = sf.adaptive_saddle_free_newton(sf.quasi_newton(memory, update="bfgs"), rule=rule)
    x = jnp.ones(size)
    first = jnp.linalg.norm(A @ x)
    state, update = tx.init(x), jax.jit(lambda g, s, x: tx.update(g, s, x, value_fn=loss))
    norms = []
    for _ in range(size + 1):
        updates, state = update(A @ x, state, x)
        x = optax.apply_updates(x, updates)
        norms.append(jnp.linalg.norm(A @ x) / first)
    assert norms[-1] < 1e-8
    assert norms[size - 3] > 1e-4


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_units_of_the_loss_do_not_matter(dtype, update):
    """f and 2^k f have the same path to the bit, where squares of gradients would underflow in float32."""

    def run(factor):
        loss = lambda x: factor * ((1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2)  # noqa: E731
        tx = sf.adaptive_saddle_free_newton(sf.quasi_newton(update=update))
        x = jnp.array([-1.0, 1.0], dtype)

        def step(carry, _):
            x, state = carry
            updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
            return (optax.apply_updates(x, updates), state), None

        (x, _), _ = jax.lax.scan(step, (x, tx.init(x)), None, length=12)
        return x

    with jax.enable_x64(dtype == "float64"):
        run = jax.jit(run)
        plain, tiny = run(jnp.asarray(1.0, dtype)), run(jnp.asarray(2.0**-80, dtype))
        np.testing.assert_array_equal(plain, tiny)
        assert plain @ plain > 0


@pytest.mark.parametrize("memory", [None, 3])
def test_concave_pairs_are_skipped_and_a_dead_end_begins_anew(x64, memory):
    solver = sf.quasi_newton(memory)
    x, g = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
    _, _, state = call(solver, x, g, solver.init(Space(x)))
    d, _, learnt = call(solver, x - 0.1 * g, 0.8 * g + jnp.array([0.01, 0, 0]), state)
    assert (int(learnt.last.pairs), int(learnt.last.skipped)) == (1, 0)
    _, _, skipped = call(solver, x - 0.1 * g, 1.1 * g, state)  # yᵀs < 0
    assert (int(skipped.last.pairs), int(skipped.last.skipped), int(skipped.last.resets)) == (0, 1, 0)
    again, _, reset = call(solver, x - 0.1 * g, 0.8 * g + jnp.array([0.01, 0, 0]), learnt)  # nothing has moved
    assert (int(reset.last.pairs), int(reset.last.resets)) == (0, 1)
    np.testing.assert_allclose(again, reset.last.scale * (0.8 * g + jnp.array([0.01, 0, 0])))
    assert not np.allclose(d, again)
    if memory is None:
        np.testing.assert_allclose(reset.dense(), reset.last.scale * np.eye(3))


@pytest.mark.parametrize("memory", [None, 3])
def test_numbers_that_are_not_finite_stay_outside(memory):
    solver = sf.quasi_newton(memory)
    x, g = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
    _, _, state = call(solver, x, g, solver.init(Space(x)))
    _, _, after = call(solver, x - 0.1 * g, g.at[1].set(jnp.nan), state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    broken = state._replace(last=state.last._replace(direction=-1e30 * g))
    d, _, after = call(solver, x - 0.1 * g, 0.8 * g, broken)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(after))
    assert d @ g > 0


def test_no_descent_begins_anew(x64):
    solver = sf.quasi_newton()
    x, g = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
    _, _, state = call(solver, x, g, solver.init(Space(x)))
    indefinite = state._replace(factor=-state.factor)
    d, _, after = call(solver, x - 0.1 * g, 0.8 * g, indefinite)
    assert after.last.resets == 1
    assert d @ g > 0


def test_memory_is_checked_before_it_is_allocated():
    solver, params = sf.quasi_newton(), jax.ShapeDtypeStruct((20_000,), jnp.float32)
    with pytest.raises(ValueError, match=r"needs 1,681,920,000 bytes for 20,000 parameters.*pass memory=100"):
        jax.eval_shape(lambda p: solver.init(Space(p)), params)
    with pytest.raises(ValueError, match="pass a smaller memory"):
        sf.quasi_newton(memory=10, max_bytes=100).init(Space(jnp.ones(10)))
    with pytest.raises(ValueError, match="pass whole_after=None"):
        jax.eval_shape(lambda p: sf.quasi_newton(10, "ssbroyden", 100).init(Space(p)), params)
    jax.eval_shape(lambda p: sf.quasi_newton(memory=10).init(Space(p)), params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.quasi_newton(update="sr1"), "update must be one of ssbroyden, ssbfgs, bfgs, got 'sr1'"),
        (lambda: sf.quasi_newton(memory=0), "memory must be a whole number ≥ 1, got 0"),
        (lambda: sf.quasi_newton(max_bytes=0), "max_bytes must be"),
        (lambda: sf.quasi_newton(9, "ssbroyden", whole_after=-1), "whole_after must be a whole number ≥ 0, got -1"),
        (lambda: sf.quasi_newton(whole_after=9), "whole_after=9 goes with a memory and .*, got memory=None"),
        (lambda: sf.quasi_newton(9, whole_after=9), "whole_after=9 goes with a memory and .*, got memory=9"),
        (lambda: sf.solve(sf.quasi_newton(), lambda v: v, jnp.ones(2)), "solve cannot call quasi_newton: it learns"),
        (lambda: sf.scale_by_saddle_free(sf.quasi_newton()), "damping must be 0 beside quasi_newton"),
        (
            lambda: sf.saddle_free_newton(solver=sf.quasi_newton()),
            "fixed_rate asks for λ > 0, and quasi_newton answers",
        ),
        (
            lambda: sf.adaptive_saddle_free_newton(sf.quasi_newton(), rule=sf.damping_search()),
            "damping_search asks for λ > 0.*use line_search",
        ),
        (
            lambda: sf.adaptive_saddle_free_newton(sf.blockwise(sf.quasi_newton()), rule=sf.line_search(damping=0.1)),
            "line_search asks for λ > 0",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("memory", [None, 4])
def test_chained_transformations_and_decay_go_on_learning(memory):
    """Steps that are not along −Mg: a clipped chain, momentum, weight decay."""
    loss = lambda x: jnp.sum(jnp.array([1.0, 3.0, 9.0]) * x**2) / 2  # noqa: E731
    solver = sf.quasi_newton(memory)
    chain = optax.chain(
        sf.scale_by_saddle_free(solver, damping=0.0),
        optax.clip(0.2),
        optax.trace(0.5),
        optax.scale_by_learning_rate(0.5),
    )
    plain = sf.saddle_free_newton(0.5, 0.3, 0.0, solver, weight_decay=1e-3)
    for tx in chain, plain:
        x = jnp.ones(3)
        state, update = tx.init(x), jax.jit(lambda g, s, x, tx=tx: tx.update(g, s, x, value_fn=loss))
        for _ in range(40):
            updates, state = update(jax.grad(loss)(x), state, x)
            x = optax.apply_updates(x, updates)
        assert loss(x) < 1e-4


def test_hyperparameters_are_injected_after_an_eager_init():
    make = optax.inject_hyperparams(sf.saddle_free_newton, static_args=("solver", "damping"))
    tx, x = make(learning_rate=0.3, damping=0.0, solver=sf.quasi_newton()), jnp.ones(3)
    state, update = tx.init(x), jax.jit(lambda g, s, x: tx.update(g, s, x, value_fn=lambda x: jnp.sum(x**4)))
    for _ in range(3):
        updates, state = update(4 * x**3, state, x)
        x = optax.apply_updates(x, updates)
    assert update._cache_size() == 1
    assert jnp.sum(x**4) < 3
    mapped = optax.tree.map_params(tx, jnp.zeros_like, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)


def test_each_block_has_a_matrix_of_its_own():
    loss = lambda p: jnp.sum(jnp.cosh(p["a"]["w"] - 1)) + jnp.sum(jnp.cosh(3 * p["b"]["w"] + 1))  # noqa: E731
    tx = sf.adaptive_saddle_free_newton(sf.blockwise(sf.quasi_newton()))
    params = {"a": {"w": jnp.zeros(3)}, "b": {"w": jnp.ones(2)}}
    state, update = tx.init(params), jax.jit(lambda g, s, p: tx.update(g, s, p, value_fn=loss))
    assert sorted(part.matrix.shape for part in state.solver) == [(2, 2), (3, 3)]
    for _ in range(20):
        updates, state = update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    assert optax.tree.norm(jax.grad(loss)(params)) < 1e-2
