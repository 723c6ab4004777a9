"""Gauss-Newton in the row and in the column space against dense least squares in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params, network_residuals, predict

import saddlefree as sf
from saddlefree import residuals
from saddlefree.model import Result
from saddlefree.problem import Problem
from saddlefree.space import Space
from saddlefree.stages import GAUSS_NEWTON, choose_for_residuals

SHAPES = [(6, 10), (8, 8), (12, 7), (1, 5), (5, 1)]
DAMPINGS = np.array([1e-12, 1e-9, 1e-6, 1e-3, 1.0])  # of the largest eigenvalue, 1


def matrix(rng, rows, columns, condition, rank=None):
    """A matrix with singular values from 1 to 1/condition, and 0 beyond the rank."""
    n = min(rows, columns)
    U, V = (np.linalg.qr(rng.normal(size=(k, k)))[0][:, :n] for k in (rows, columns))
    values = np.geomspace(1, 1 / condition, n)
    values[n if rank is None else rank :] = 0
    return (U * values) @ V.T


def least_squares(J, r, damping):
    """argmin ‖Jd − r‖² + λ‖d‖², by the singular value decomposition of [J; √λ I]."""
    P = J.shape[1]
    stacked = np.concatenate([J, np.sqrt(damping) * np.eye(P)])
    return np.linalg.lstsq(stacked, np.concatenate([r, np.zeros(P)]), rcond=1e-13)[0]


def linear(J, r, by_points):
    """Residuals Jx + r, whole or point by point."""
    if by_points:
        return sf.pointwise((lambda x, z: jnp.dot(z[0], x) + z[1], (J, r)))
    return lambda x: J @ x + r


def ask(solver, residual_fn, x, g, dampings, previous=None):
    """The answers at x for each λ, stacked."""

    @jax.jit  # one program in place of one for each operation
    def answers(x, g, dampings):
        layout = Space(x)
        problem = Problem(layout, g, lambda part: None, previous, residuals=residual_fn)
        model, _ = solver.model(problem, dampings, solver.init(layout))
        return jax.lax.map(model.answer, dampings)

    return answers(x, jnp.asarray(g), jnp.asarray(dampings, x.dtype))


@functools.partial(jax.jit, static_argnames=("solver", "by_points"))
def ask_linear(solver, J, r, dampings, previous=None, *, by_points=False):
    """The same for the residuals Jx + r at 0, compiled once for each shape."""
    return ask(solver, linear(J, r, by_points), jnp.zeros(J.shape[1], J.dtype), r @ J, dampings, previous)


@pytest.mark.parametrize("by_points", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_direction_and_prediction(x64, rows, columns, by_points):
    """To a few ε κ, the condition number κ being that of JᵀJ + λI; the estimate is no more than 30 times too small."""
    rng, n = np.random.default_rng(rows), min(rows, columns)
    for condition, rank in ((10.0, n), (1e4, n), (10.0, max(n - 2, 1)), (1e4, max(n - 2, 1))):
        check_direction(matrix(rng, rows, columns, condition, rank), rng.normal(size=rows), by_points)


def check_direction(J, r, by_points):
    g = J.T @ r
    found = ask_linear(sf.row_space(chunk_size=5), J, r, DAMPINGS, by_points=by_points)
    np.testing.assert_array_equal(found.result, Result.FINE)
    for i, damping in enumerate(DAMPINGS):
        expected = least_squares(J, r, damping)
        error = np.linalg.norm(found.direction[i] - expected) / np.linalg.norm(expected)
        assert error <= 30 * found.stats["error"][i] + 1e-14
        assert error <= 1e-15 * (100 + 10 / damping)
        change = -g @ expected + np.sum((J @ expected) ** 2) / 2
        np.testing.assert_allclose(found.predicted[i], change, rtol=1e-3 if damping < 1e-9 else 1e-5)


@pytest.mark.parametrize("by_points", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_without_damping_it_is_the_pseudo_inverse(x64, rows, columns, by_points):
    rng = np.random.default_rng(rows)
    for rank in {min(rows, columns), max(min(rows, columns) - 2, 1)}:
        J, r = matrix(rng, rows, columns, 100.0, rank), rng.normal(size=rows)
        found = ask_linear(sf.row_space(), J, r, np.zeros(1), by_points=by_points)
        np.testing.assert_allclose(found.direction[0], np.linalg.pinv(J, rcond=1e-6) @ r, rtol=0, atol=1e-8)
        assert found.result[0] == Result.FINE


@pytest.mark.parametrize(("rows", "columns"), [(5, 8), (8, 5)])
def test_singular_values_that_squares_lose_are_reported(x64, rows, columns):
    """σ = 1e-9 of the largest: its square is below rounding. Kept, d would be 1e9 long; it is left out or damped."""
    rng = np.random.default_rng(0)
    U, V = (np.linalg.qr(rng.normal(size=(k, k)))[0][:, :5] for k in (rows, columns))
    values = np.array([1.0, 0.5, 0.2, 0.1, 1e-9])
    J, r = (U * values) @ V.T, U @ np.ones(5)
    kept = V[:, :4] @ (1 / values[:4])
    found = ask(
        sf.row_space(), linear(jnp.asarray(J), jnp.asarray(r), False), jnp.zeros(columns), J.T @ r, [0.0, 1e-30]
    )
    np.testing.assert_array_equal(found.result, Result.SINGULAR)
    np.testing.assert_allclose(found.direction[0], kept, rtol=1e-4)


def test_no_curvature_at_all():
    """J = 0: no direction; λ changes nothing of that."""
    fn = lambda x: jnp.ones(3) + 0 * x[0]  # noqa: E731
    found = ask(sf.row_space(), fn, jnp.ones(4), jnp.zeros(4), [0.0, 1.0])
    np.testing.assert_array_equal(found.direction, 0)
    np.testing.assert_array_equal(found.predicted, 0)
    np.testing.assert_array_equal(found.result, Result.FINE)


@pytest.mark.parametrize(("rows", "columns"), [(5, 8), (8, 5)])
def test_numbers_that_are_not_finite_and_gradients_of_another_loss_are_reported(rows, columns):
    rng = np.random.default_rng(0)
    J, r = (jnp.asarray(a, jnp.float32) for a in (matrix(rng, rows, columns, 10.0), rng.normal(size=rows)))
    codes = lambda J, g: ask(sf.row_space(), linear(J, r, False), jnp.zeros(columns), g, [0.0, 0.1]).result  # noqa: E731
    np.testing.assert_array_equal(codes(J, r @ J), Result.FINE)
    np.testing.assert_array_equal(codes(J.at[0, 0].set(jnp.nan), r @ J), Result.NONFINITE)
    np.testing.assert_array_equal(codes(J, 2 * r @ J / rows), Result.BREAKDOWN)  # of the mean of squares


def test_float32_is_right_to_its_rounding():
    """λ from 1e-5 of the largest eigenvalue; 1e-7 is below the cutoff, and the answer is that of the cutoff."""
    rng = np.random.default_rng(0)
    for rows, columns in ((6, 10), (12, 7)):
        J, r = matrix(rng, rows, columns, 1e2).astype(np.float32), rng.normal(size=rows).astype(np.float32)
        found = ask(
            sf.row_space(), linear(jnp.asarray(J), jnp.asarray(r), True), jnp.zeros(columns), J.T @ r, [1e-5, 1e-2]
        )
        assert found.direction.dtype == jnp.float32
        for d, damping in zip(found.direction, (1e-5, 1e-2), strict=True):
            expected = least_squares(J.astype(np.float64), r.astype(np.float64), damping)
            assert np.linalg.norm(d - expected) < 1e-6 / damping * np.linalg.norm(expected)


@pytest.mark.parametrize(("rows", "columns"), [(5, 8), (8, 5)])
def test_momentum_is_that_of_spring(x64, rows, columns):
    """φ ← μφ + Jᵀ(K + λI)⁻¹(−r − μJφ), also by columns, and what the model predicts is that of the whole step."""
    rng = np.random.default_rng(0)
    J, r, phi = matrix(rng, rows, columns, 10.0), rng.normal(size=rows), rng.normal(size=columns)
    damping, mu = 0.1, 0.9
    expected = mu * phi + J.T @ np.linalg.solve(J @ J.T + damping * np.eye(rows), -r - mu * J @ phi)
    fn = linear(jnp.asarray(J), jnp.asarray(r), False)
    found = ask(sf.row_space(momentum=mu), fn, jnp.zeros(columns), J.T @ r, [damping], jnp.asarray(phi))
    np.testing.assert_allclose(-found.direction[0], expected, rtol=1e-10)
    change = r @ J @ expected + np.sum((J @ expected) ** 2) / 2
    np.testing.assert_allclose(found.predicted[0], change, rtol=1e-10)


def test_momentum_of_an_optimiser_is_the_last_step_taken(x64):
    """Two steps of SPRING; the first has no momentum."""
    rng = np.random.default_rng(0)
    J, r = matrix(rng, 4, 7, 3.0), rng.normal(size=4)
    fn, x, phi, steps = linear(jnp.asarray(J), jnp.asarray(r), True), jnp.zeros(7), np.zeros(7), []
    tx = sf.saddle_free_newton(damping=0.5, solver=sf.row_space(momentum=0.8))
    state = tx.init(x)
    for _ in range(2):
        now = J @ np.asarray(x) + r
        phi = 0.8 * phi + J.T @ np.linalg.solve(J @ J.T + 0.5 * np.eye(4), -now - 0.8 * J @ phi)
        updates, state = tx.update(jnp.asarray(J.T @ now), state, x, residual_fn=fn)
        np.testing.assert_allclose(updates, phi, rtol=1e-8)
        x = optax.apply_updates(x, updates)
        steps.append(updates)
    with pytest.raises(ValueError, match="momentum must be None beside row_space"):
        sf.saddle_free_newton(momentum=0.9, solver=sf.row_space(momentum=0.8))


@pytest.mark.parametrize("size", [3, 40])
def test_a_network_and_its_points(x64, size):
    """J of a network's residuals, in both spaces, whole and by points: one matrix."""
    params = network_params(jax.random.key(0), dtype=jnp.float64)
    batch = network_batch(jax.random.key(1), size, dtype=jnp.float64)
    whole = lambda p: {"r": network_residuals(p, batch)}  # noqa: E731
    points = sf.pointwise((lambda p, z: (predict(p, z[0][None])[0] - z[1]) / size**0.5, batch))
    layout = Space(params)
    dense = jax.jacobian(lambda v: whole(layout.unpack(v))["r"].ravel())(layout.pack(params))
    r = network_residuals(params, batch).ravel()
    for fn in (whole, points):
        for by_rows in (True, False):
            found, J = residuals.jacobian(fn, layout, 4, by_rows)
            np.testing.assert_allclose(found, r, rtol=1e-12)
            np.testing.assert_allclose(J, dense, rtol=1e-10, atol=1e-12)
        found, C, b = residuals.normal_equations(fn, layout, 4)
        np.testing.assert_allclose(np.sum(found**2), np.sum(r**2), rtol=1e-12)
        np.testing.assert_allclose(C, dense.T @ dense, atol=1e-12)
        np.testing.assert_allclose(b, dense.T @ r, atol=1e-12)
        np.testing.assert_allclose(residuals.half_square(fn)(params), network_loss(params, batch), rtol=1e-12)


@pytest.mark.parametrize("residual_fn", ["whole", "points"])
def test_an_optimiser_learns_from_residuals_alone(residual_fn):
    """Without value_fn; frozen parameters stay, and blocks are those of J."""
    params, batch = network_params(jax.random.key(0)), network_batch(jax.random.key(1))
    fns = {
        "whole": lambda p: network_residuals(p, batch),
        "points": sf.pointwise((lambda p, z: (predict(p, z[0][None])[0] - z[1]) / 4, batch)),
    }
    fn, loss = fns[residual_fn], residuals.half_square(fns[residual_fn])
    for options, solver, target in (
        ({}, sf.row_space(), 1e-3),
        ({"frozen": lambda p: [True, False]}, sf.row_space(), 0.53),  # linear least squares, 0.527 at its minimum
        ({}, sf.blockwise(sf.row_space()), 0.05),
    ):
        tx = sf.adaptive_saddle_free_newton(solver, rule=GAUSS_NEWTON, **options)

        @jax.jit
        def step(x, state):
            updates, state = tx.update(jax.grad(loss)(x), state, x, residual_fn=fn)
            return optax.apply_updates(x, updates), state

        x, state = params, tx.init(params)
        for _ in range(25):
            x, state = step(x, state)
        assert loss(x) < target * loss(params)
        if options:
            jax.tree.map(np.testing.assert_array_equal, x[0], params[0])


def test_other_solvers_take_the_hessian_of_the_residuals_loss():
    fn, x = lambda x: jnp.array([x[0] ** 2 - 1, 3 * x[1]]), jnp.array([2.0, 1.0])
    loss = residuals.half_square(fn)
    tx, g = sf.saddle_free_newton(damping=0.1, solver=sf.exact()), jax.grad(loss)(x)
    updates, _ = jax.jit(lambda x: tx.update(g, tx.init(x), x, residual_fn=fn))(x)
    expected, _ = jax.jit(lambda x: tx.update(g, tx.init(x), x, value_fn=loss))(x)
    np.testing.assert_allclose(updates, expected)


def test_products_are_passes_over_all_residuals():
    batch, params = network_batch(jax.random.key(1)), network_params(jax.random.key(0))
    points = sf.pointwise((lambda p, z: jnp.append(predict(p, z[0][None])[0] - z[1], p[0]["b"]), batch))
    for fn, expected in ((lambda p: network_residuals(p, batch), 16), (points, 5)):
        tx = sf.saddle_free_newton(solver=sf.row_space())
        g = jax.grad(residuals.half_square(fn))(params)
        _, state = jax.jit(lambda g: tx.update(g, tx.init(params), params, residual_fn=fn))(g)
        assert sf.diagnostics(state)["products"] == expected


def test_memory_is_bounded_before_it_is_taken():
    """Rows, columns, and columns by points, which keep no J: (NP + 3 min(N, P)²) numbers of four bytes."""
    x = jnp.zeros(10)
    for rows, by_points, entries in ((4, False, 40 + 48), (30, False, 300 + 300), (30, True, 300)):
        J = jnp.ones((rows, 10))
        fn = linear(J, jnp.ones(rows), by_points)
        enough = sf.row_space(max_bytes=4 * entries)
        ask(enough, fn, x, J.sum(0), [0.1])
        little = dataclasses.replace(enough, max_bytes=4 * entries - 1)
        with pytest.raises(ValueError, match=rf"needs {4 * entries:,} bytes for {rows} residuals .* use lanczos\(\)"):
            ask(little, fn, x, J.sum(0), [0.1])


def test_iterative_way_that_the_message_names():
    """lanczos with Gauss-Newton products gives the same direction, without a matrix."""
    rng = np.random.default_rng(0)
    J, r = (jnp.asarray(a, jnp.float32) for a in (matrix(rng, 4, 6, 3.0), rng.normal(size=4)))
    fn, x = linear(J, r, False), jnp.zeros(6)
    g = r @ J

    def step(solver, **extra):
        tx = sf.scale_by_saddle_free(solver, 0.1)
        return jax.jit(lambda x: tx.update(g, tx.init(x), x, residual_fn=fn, **extra)[0])(x)

    matvec = sf.gauss_newton(fn, lambda r: jnp.sum(r**2) / 2, x)
    np.testing.assert_allclose(step(sf.lanczos(4), matvec=matvec), step(sf.row_space()), rtol=1e-4, atol=1e-5)


def test_bad_input():
    x, fn = jnp.ones(2), lambda x: x
    update = lambda solver=sf.row_space(), **extra: sf.saddle_free_newton(solver=solver).update(  # noqa: E731, B008
        x, sf.saddle_free_newton(solver=solver).init(x), x, **extra
    )
    for make, message in (
        (lambda: sf.row_space(momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
        (lambda: sf.row_space(chunk_size=0), "chunk_size must be a whole number ≥ 1, got 0"),
        (lambda: sf.row_space(max_bytes=0), "max_bytes must be a whole number ≥ 1, got 0"),
        (lambda: sf.solve(sf.row_space(), lambda v: v, x), "solve cannot call row_space: it needs residuals"),
        (lambda: sf.scale_by_saddle_free(sf.row_space(momentum=0.5)), "does not know the updates"),
        (lambda: update(value_fn=lambda x: jnp.sum(x**2)), "residual_fn must be given to update.. beside row_space"),
        (lambda: update(), "value_fn must be given .* or residual_fn="),
        (lambda: update(residual_fn=3), "residual_fn must be a function, got 3"),
        (
            lambda: update(residual_fn=lambda x: jnp.array([1, 2])),
            "residual_fn must return an array or a pytree of real",
        ),
        (lambda: sf.pointwise(fn), r"terms must be pairs \(fn, points\)"),
        (lambda: sf.pointwise((fn, {})), "leaves that share their leading axis"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_residuals_of_another_loss_are_found():
    batch, params = network_batch(jax.random.key(1)), network_params(jax.random.key(0))
    value_fn = lambda p: network_loss(p, batch)  # noqa: E731
    sf.check_value_fn(value_fn, params, residual_fn=lambda p: network_residuals(p, batch))
    with pytest.raises(ValueError, match=r"residual_fn must return residuals r whose half squared norm is the loss"):
        sf.check_value_fn(value_fn, params, residual_fn=lambda p: 4 * network_residuals(p, batch))


def test_default_of_least_squares_counts_passes():
    """By points up to 600; for other functions a row is a pass over all residuals, and quasi-Newton is cheaper."""
    layout, J = Space(jnp.zeros(200)), jnp.ones((120, 200))
    for fn, exact in (
        (linear(J, J[:, 0], True), True),
        (linear(J, J[:, 0], False), False),
        (linear(J[:100], J[:100, 0], False), True),
    ):
        first = choose_for_residuals(fn, layout)[0]
        assert (first.solver == sf.row_space()) == exact
        assert (first.rule == GAUSS_NEWTON) == exact
