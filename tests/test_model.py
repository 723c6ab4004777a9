"""Models of all solvers against the pseudo-inverse: each answer is right to rounding, or says that it is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import symmetric

import saddlefree as sf
from saddlefree import model
from saddlefree.model import Result
from saddlefree.problem import Problem
from saddlefree.space import Space

SIZES = (6, 10)
COUNT = 500  # matrices of each size
DAMPINGS = np.array([0.0, 1e-12, 1e-3, 1.0])
SOLVERS = {
    "exact": lambda n: sf.exact(),
    "blockwise": lambda n: sf.blockwise(sf.exact(), lambda path: 0),
    "lanczos": sf.lanczos,
    "recycle": lambda n: sf.lanczos(n, recycle=3),
    "two_pass": lambda n: sf.lanczos(n, two_pass=True),
    "low_rank": lambda n: sf.low_rank(rank=n),
    "series": lambda n: sf.series(num_terms=400),
}
ESTIMATING = {"two_pass": 30, "series": 20}
"""Solvers that estimate their error, and how many times too small that may be here."""
every_solver = pytest.mark.parametrize("name", SOLVERS)


@functools.cache
def ensemble(n):
    """Matrices Q diag(h) Qᵀ and gradients: H, g, h and Q, the first axis over matrices; every third is singular."""
    rng = np.random.default_rng(n)
    found = []
    for i in range(COUNT):
        Q, h, g = np.linalg.qr(rng.normal(size=(n, n)))[0], rng.normal(size=n), rng.normal(size=n)
        if i % 3 == 0:  # singular, and g in the range of H every other time
            h = rng.choice([-1, 1], n) * 10.0 ** rng.uniform(-2.5, 0.5, n)
            h[: rng.integers(1, 4)] = 0
            g = g if i % 2 else Q @ ((h != 0) * (Q.T @ g))
        elif i % 6 == 1:  # three decades
            h = rng.choice([-1, 1], n) * 10.0 ** rng.uniform(-2.5, 0.5, n)
        elif i % 6 == 2:  # clusters, from distinct to equal in float32
            h = rng.choice([3.0, -1.0, 0.5], n) * (1 + 10.0 ** rng.uniform(-8, -2) * rng.normal(size=n))
        elif i % 6 == 4:  # few eigenvalues: the Krylov space is exhausted early
            h = rng.choice([1.0, -0.3, 0.02], n)
        found.append(((Q * h) @ Q.T, g, h, Q))
    return [np.stack(x) for x in zip(*found, strict=True)]


@functools.cache
def solved(name, n):
    """A compiled function from stacked H, g and λ to directions, results and estimated errors, matrix by λ."""
    solver = SOLVERS[name](n)

    def solve(H, g, damping):
        solution = sf.solve(solver, lambda v: H @ v, g, damping)
        return solution.direction, solution.result, solution.stats.get("error", jnp.zeros((), g.dtype))

    batched = jax.jit(jax.vmap(jax.vmap(solve, (None, None, 0)), (0, 0, None)))
    return lambda *arrays: [np.asarray(x) for x in batched(*arrays)]


def relative(found, expected):
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


@every_solver
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_answer_is_wrong_and_says_that_it_is_fine(name, dtype):
    """1,000 matrices and four λ, 0 among them.

    The condition number κ is that of |H| + λI on its range, and rounding alone moves an answer by a few ε κ; 100 of
    them are allowed, and a multiple of the solver's own estimate where it makes one (two passes without
    re-orthogonalisation, a truncated series).
    """
    right, factor = [], ESTIMATING.get(name, 0)
    for n in SIZES:
        H, g, h, Q = ensemble(n)
        with jax.enable_x64(dtype == np.float64):
            found, code, error = solved(name, n)(H.astype(dtype), g.astype(dtype), DAMPINGS.astype(dtype))
        assert found.dtype == dtype
        size = np.abs(h)[:, None] + DAMPINGS[:, None]
        inverse = np.where(size > 0, 1 / np.where(size > 0, size, 1), 0)
        slope = np.einsum("bij,bi->bj", Q, g)[:, None]
        expected = np.einsum("bij,blj->bli", Q, inverse * slope)
        condition = (np.max(np.abs(h), axis=-1)[:, None] + DAMPINGS) * np.max(inverse, axis=-1)
        tolerance = 100 * np.finfo(dtype).eps * condition + factor * error
        wrong = relative(found, expected) > tolerance
        silent = wrong & (code == Result.FINE)
        assert not np.any(silent), [(n, i, DAMPINGS[j], h[i], found[i, j]) for i, j in np.argwhere(silent)[:3]]
        right.append((code == Result.FINE) & ~wrong & (tolerance < 0.1))
        regular = np.all(h != 0, axis=-1)
        assert np.mean(code[regular] == Result.FINE) > (0.5 if factor else 0.999)
        if not factor:  # at λ = 0 the null space is left out, and said so
            lost = (np.arange(COUNT) % 6 == 3)[:, None] & (DAMPINGS == 0)
            assert np.all(code[lost] == Result.SINGULAR)
            assert np.all(relative(found, expected)[lost] < 0.1)
    # What was judged, and found right to a digit at least.
    assert np.mean(right) > (0.15 if factor else 0.7)


@every_solver
def test_the_direction_scales_with_the_gradient(name):
    """From 1e-18 to 1e18 in float32, where squares of entries would leave the range of the dtype or nearly so."""
    rng, n, scales = np.random.default_rng(0), SIZES[0], np.array([1e-18, 1e-9, 1.0, 1e9, 1e18])
    many = COUNT // len(scales)
    H = np.stack([symmetric(rng, np.array([3.0, 2.0, 1.0, -0.5, -1.4, -2.4])) for _ in range(many)])
    g = scales[:, None, None] * rng.normal(size=(many, n))
    stacked = np.broadcast_to(H, (len(scales), *H.shape)).reshape(-1, n, n).astype(np.float32)
    found, code, _ = solved(name, n)(stacked, g.reshape(-1, n).astype(np.float32), DAMPINGS.astype(np.float32))
    assert np.all(code == Result.FINE)
    found = found.reshape(len(scales), many, len(DAMPINGS), n) / scales[:, None, None, None]
    assert np.all(np.linalg.norm(found[2], axis=-1) > 0.1)
    assert np.max(relative(found, found[2])) < 1e-3


@pytest.mark.parametrize("form", ["abs", "sqrt"])
def test_eigenvalues_below_the_cutoff_are_rounding(form):
    """Without damping they contribute nothing, with it as much as one at the cutoff, and λ lifts them beyond it."""
    values = jnp.array([2.0, -0.5, 1e-3, 2e-6, -1e-9, 0.0])
    cutoff = 32 * np.finfo(np.float32).eps * 2.0
    np.testing.assert_allclose(model.cutoff(values), cutoff, rtol=1e-6)
    found = model.inverse(values, jnp.array(0.0), form)
    np.testing.assert_allclose(found, [0.5, 2.0, 1e3, 0, 0, 0], rtol=1e-5)
    found = model.inverse(values, jnp.array(1e-9), form)
    np.testing.assert_allclose(found[2:], [1e3, 1 / cutoff, 1 / cutoff, 1 / cutoff], rtol=1e-4)
    size = np.abs(values) + 0.1 if form == "abs" else np.sqrt(np.asarray(values) ** 2 + 0.01)
    np.testing.assert_allclose(model.inverse(values, jnp.array(0.1), form), 1 / size, rtol=1e-5)
    np.testing.assert_array_equal(model.inverse(jnp.zeros(3), jnp.array(0.0), form), 0)


@pytest.mark.parametrize("solver", [sf.exact(), sf.lanczos(3), sf.lanczos(3, recycle=1), sf.low_rank(rank=3)])
def test_an_eigenvalue_on_either_side_of_the_cutoff(solver):
    """diag(1, −0.5, θ) for θ across the cutoff, 4e-6 in float32: kept above it, and left out below it with a code."""
    theta = jnp.array([1e-4, 2e-5, 1e-7, 0.0])

    def solve(theta):
        h = jnp.stack([jnp.ones(()), jnp.full((), -0.5), theta])
        solution = sf.solve(solver, lambda v: h * v, jnp.ones(3), 0.0)
        return solution.direction, solution.result

    direction, code = jax.jit(jax.vmap(solve))(theta)
    np.testing.assert_allclose(direction[:, :2], [[1, 2]] * 4, rtol=0.05)
    np.testing.assert_allclose(direction[:2, 2], 1 / theta[:2], rtol=0.2)
    assert np.all(np.abs(direction[2:, 2]) < 1)
    assert code.tolist() == [Result.FINE, Result.FINE, Result.SINGULAR, Result.SINGULAR]


def test_newton_is_singular_where_damping_cancels_an_eigenvalue():
    """H + λI with an eigenvalue −λ: the saddle-free |H| + λI of the same matrix is not singular."""
    h = jnp.array([2.0, -0.5])
    for solver, expected, code in (
        (sf.exact(absolute=False), [0.4, 0.0], Result.SINGULAR),
        (sf.exact(), [0.4, 1.0], Result.FINE),
    ):
        solution = sf.solve(solver, lambda v: h * v, jnp.ones(2), 0.5)
        np.testing.assert_allclose(solution.direction, expected, rtol=1e-5)
        assert solution.result == code


@every_solver
def test_what_is_not_finite_is_marked(name):
    H, g = np.tile(np.eye(SIZES[0], dtype=np.float32), (COUNT, 1, 1)), np.ones((COUNT, SIZES[0]), np.float32)
    H[1], g[2, 0] = np.nan, np.inf
    _, code, _ = solved(name, SIZES[0])(H, g, DAMPINGS.astype(np.float32))
    # `low_rank` keeps the curvature that it had: none, which is gradient descent.
    expected = [Result.FINE, Result.FINE if name == "low_rank" else Result.NONFINITE, Result.NONFINITE]
    assert code[:3, -1].tolist() == expected


@every_solver
def test_the_predicted_change_is_that_of_the_quadratic_model(x64, name):
    """m(−d) = −gᵀd + ½ dᵀHd; two solvers know |H|d alone, so that their model is the saddle-free one."""
    rng, n = np.random.default_rng(1), 6
    H, g = symmetric(rng, np.array([3.0, 2.0, 1.0, -0.5, -1.4, -2.4])), rng.normal(size=n)
    solver = SOLVERS[name](n)

    @jax.jit
    def ask(H, g, damping):
        layout = Space(g)
        problem = Problem(layout, g, lambda part: lambda v: H @ v)
        found, _ = solver.model(problem, damping[None], solver.init(layout))
        answer = found.answer(damping)
        return answer.direction, answer.predicted, {**found.stats, **answer.stats}

    d, predicted, stats = ask(H, g, 0.3)
    values, vectors = np.linalg.eigh(H)
    curvature = (vectors * np.abs(values)) @ vectors.T if name in ESTIMATING else H
    np.testing.assert_allclose(predicted, -g @ d + d @ curvature @ d / 2, rtol=1e-6)
    assert set(stats) == set(solver.stats)


def test_the_last_share_is_that_of_up_to_four_coordinates_and_half_of_them():
    y = np.array([4.0, -3.0, 2.0, 1.0, 0.5, -0.25, 0.0, 0.0])
    for count, window in ((0, 0), (1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 4)):
        kept = np.where(np.arange(8) < count, y, 0)
        expected = np.linalg.norm(kept[count - window : count]) / max(np.linalg.norm(kept), 1e-30)
        np.testing.assert_allclose(model.last_share(jnp.asarray(kept, jnp.float32), count), expected, rtol=1e-6)


def test_groups_are_reduced_to_one():
    groups = [{"products": 3, "smallest_ritz": -1.0, "error": 0.1}, {"products": 4, "smallest_ritz": 2.0, "error": 0.3}]
    found = model.reduced([{name: jnp.asarray(x) for name, x in stats.items()} for stats in groups])
    assert {name: round(float(x), 3) for name, x in found.items()} == {
        "products": 7,
        "smallest_ritz": -1.0,
        "error": 0.3,
    }
