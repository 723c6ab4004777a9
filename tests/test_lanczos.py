"""The Lanczos solver against eigendecompositions, and its decomposition against matfree's."""

import jax
import jax.numpy as jnp
import matfree.decomp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import cases, saddle_free_direction, solve, symmetric

import saddlefree as sf
from saddlefree import spectrum
from saddlefree.problem import Problem
from saddlefree.space import Space


def network_like(rng, n=200):
    """A few outliers, a bulk near zero, some of it negative."""
    return symmetric(rng, np.concatenate([[12.0, 5.0, 2.0, 1.0], rng.normal(size=n - 4) * 0.02])), rng.normal(size=n)


EXHAUSTING = [
    sf.lanczos(5),
    sf.lanczos(50),
    sf.lanczos(5, memory=1),
    sf.lanczos(5, recycle=2),
    sf.lanczos(5, two_pass=True),
    sf.lanczos(5, tolerance=1e-6),
]


def sqrt_direction(H, g, damping):
    values, vectors = np.linalg.eigh(H)
    return vectors @ ((vectors.T @ g) / np.hypot(values, damping))


@pytest.mark.parametrize(("form", "oracle"), [("abs", saddle_free_direction), ("sqrt", sqrt_direction)])
def test_converges_to_the_exact_direction(x64, form, oracle):
    H, g = network_like(np.random.default_rng(0))
    expected = oracle(H, g, 0.1)
    errors = []
    for m in (1, 4, 10, 20, 60):
        solution = solve(sf.lanczos(m, damping_form=form), H, g, 0.1)
        errors.append(np.linalg.norm(solution.direction - expected) / np.linalg.norm(expected))
        assert solution.stats["products"] == m
        assert errors[-1] / 10 < solution.stats["error"] or errors[-1] < 1e-12
    assert errors[1:] == sorted(errors[1:], reverse=True)
    assert errors[3] < 0.01
    if form != "abs":
        return
    series = solve(sf.series(num_terms=11, scale=sf.fixed_scale(145.0)), H, g, 0.1)
    assert series.stats["products"] == 20
    exact = saddle_free_direction(H, g, 0.1)
    assert np.linalg.norm(series.direction - exact) > 10 * errors[3] * np.linalg.norm(exact)


@cases(12)
@given(seed=st.integers(0, 2**16), damping=st.sampled_from([1e-2, 1.0]), two_pass=st.booleans())
def test_all_products_give_the_exact_direction(seed, damping, two_pass):
    rng = np.random.default_rng(seed)
    H, g = symmetric(rng, np.array([3.0, -1.0, 0.5, -0.2])), rng.normal(size=4)
    solver = sf.lanczos(num_products=4, two_pass=two_pass)
    solution = solve(solver, H.astype(np.float32), g.astype(np.float32), damping)
    np.testing.assert_allclose(solution.direction, saddle_free_direction(H, g, damping), rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose([solution.stats["smallest_ritz"], solution.stats["largest_ritz"]], [-1, 3], atol=1e-3)


@pytest.mark.parametrize("solver", EXHAUSTING, ids=["all", "more", "memory", "recycle", "two_pass", "tolerance"])
def test_stops_when_the_space_is_exhausted(solver):
    """Two eigenvalues, so two basis vectors, however many products are allowed; no NaN from what is left.

    Ritz values of vectors that were never reached are zeros, and belong to no statistic.
    """
    for h, smallest, share in (([2.0, 2.0, -1.0, -1.0, 2.0], -1.0, 0.4), ([2.0, 2.0, 3.0, 3.0, 2.0], 2.0, 0.0)):
        h = jnp.array(h)
        solution = solve(solver, jnp.diag(h), jnp.ones(5), 0.0)
        np.testing.assert_allclose(solution.direction, 1 / jnp.abs(h), rtol=1e-4)
        np.testing.assert_allclose(solution.stats["smallest_ritz"], smallest, rtol=1e-5)
        np.testing.assert_allclose(solution.stats["largest_ritz"], jnp.max(h), rtol=1e-5)
        np.testing.assert_allclose(solution.stats["negative_share"], share, rtol=1e-5)
        assert solution.stats["error"] == 0
        assert solution.result == sf.Result.FINE
        assert solution.stats["products"] == (2 if solver.tolerance else 9 if solver.two_pass else 5)


def test_a_null_space_is_no_negative_curvature_and_a_zero_gradient_no_direction():
    H = jnp.diag(jnp.array([0.0, 0.0, 3.0, 4.0, 4.0]))
    solution = solve(sf.lanczos(5), H, jnp.ones(5), 0.0)
    assert solution.stats["negative_share"] == 0
    np.testing.assert_allclose(solution.direction, [0, 0, 1 / 3, 1 / 4, 1 / 4], atol=1e-5)
    for solver in EXHAUSTING:
        zero = solve(solver, H, jnp.zeros(5), 0.0)
        np.testing.assert_array_equal(zero.direction, 0)
        assert zero.stats["error"] == zero.stats["smallest_ritz"] == zero.stats["largest_ritz"] == 0


def test_tolerance_picks_the_number_of_products(x64):
    H, g = network_like(np.random.default_rng(1))
    expected = saddle_free_direction(H, g, 0.1)
    used = []
    for tolerance in (0.1, 1e-3):
        solution = solve(sf.lanczos(100, tolerance=tolerance), H, g, 0.1)
        used.append(int(solution.stats["products"]))
        assert solution.stats["error"] < tolerance
        assert np.linalg.norm(solution.direction - expected) < 10 * tolerance * np.linalg.norm(expected)
    assert used == sorted(used)
    assert used[0] < used[-1] < 60


def test_basis_is_orthonormal_in_float32_and_matches_matfree():
    rng = np.random.default_rng(2)
    H, g = (jnp.asarray(x, jnp.float32) for x in network_like(rng))
    basis, T, _ = spectrum.lanczos_decomposition(lambda v: H @ v, g, 30)
    np.testing.assert_allclose(basis @ basis.T, np.eye(30), atol=1e-5)
    np.testing.assert_allclose(basis @ H @ basis.T, T.dense(), atol=1e-4)
    with jax.numpy_dtype_promotion("standard"):
        theirs = matfree.decomp.tridiag_sym(30, reortho="full", materialize=True)(lambda v: H @ v, g)
    ours, reference = (np.linalg.eigvalsh(np.asarray(x, np.float64)) for x in (T.dense(), theirs.J_small))
    np.testing.assert_allclose(ours[-4:], reference[-4:], rtol=1e-4)


OUTLIERS = {
    "outliers": (12.0, 5.0, 2.0, 1.0),
    "both signs": (300.0, -100.0),
    "rank deficient": (1e4, -3e3, 500.0),
    "few eigenvalues": (3.0, -2.0, 1.0),
}


def spectra(n=300):
    """Hard cases for a Krylov basis in float32."""
    rng = np.random.default_rng(56)
    bulk = rng.uniform(-1, 1, size=n)
    return {
        "bulk alone": bulk,
        "outliers": np.concatenate([OUTLIERS["outliers"], 0.05 * bulk[4:]]),
        "both signs": np.concatenate([OUTLIERS["both signs"], 0.05 * bulk[2:]]),
        "clusters": np.repeat([2.0, -1.0, 0.5], n // 3) + 1e-6 * bulk,
        "rank deficient": np.concatenate([OUTLIERS["rank deficient"], 1e-6 * bulk[3:]]),
        "few eigenvalues": np.repeat(OUTLIERS["few eigenvalues"], n // 3),
    }


@pytest.fixture(scope="module")
def decomposed():
    """Basis and T of 30 products, exact ones and ones in bfloat16, for each of `spectra`; and the matrices."""
    matrices, starts = [], []
    for h in spectra().values():
        # Seed 56 with these outliers once made a basis that was not orthogonal, where sweeps were left out.
        rng = np.random.default_rng(56)
        matrices.append(symmetric(rng, h).astype(np.float32))
        starts.append(rng.normal(size=len(h)).astype(np.float32))

    def decompose(rounding):
        def run(pair):
            H, g = pair
            basis, T, _ = spectrum.lanczos_decomposition(lambda v: rounding(H @ v), g, 30)
            return basis, T.dense()

        # One after the other: under `vmap` every branch would be taken.
        basis, T = jax.jit(lambda *stacked: jax.lax.map(run, stacked))(np.stack(matrices), np.stack(starts))
        return [np.asarray(x, np.float64) for x in (basis, T)]

    rounded = decompose(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32))
    exact, names = decompose(lambda w: w), list(spectra())
    return {
        name: (matrices[i].astype(np.float64), exact[0][i], exact[1][i], rounded[0][i]) for i, name in enumerate(names)
    }


@pytest.mark.parametrize("name", spectra())
def test_basis_is_orthonormal_and_ritz_values_right_for_hard_spectra(decomposed, name):
    """No copies of an eigenvalue that has converged, which is what lost orthogonality makes."""
    H, basis, T, rounded = decomposed[name]
    size = np.max(np.abs(np.linalg.eigvalsh(H)))
    for Q in (basis, rounded):
        gram = Q @ Q.T
        met = np.diag(gram) > 0.5
        np.testing.assert_allclose(gram, np.diag(met.astype(float)), atol=1e-5)
        assert np.all(met[: np.sum(met)])
    met = np.sum(np.diag(basis @ basis.T) > 0.5)
    assert met == 30 if name in ("bulk alone", "outliers", "both signs") else met >= 3
    np.testing.assert_allclose(basis @ H @ basis.T, T, atol=1e-5 * size)
    h, ritz = np.sort(spectra()[name]), np.linalg.eigvalsh(T[:met, :met])
    assert h[0] - 1e-5 * size < ritz[0] <= ritz[-1] < h[-1] + 1e-5 * size
    for value in OUTLIERS.get(name, ()):
        copies = np.sum(np.abs(ritz - value) < 1e-5 * size)
        assert copies >= 1 if name == "few eigenvalues" else copies == 1  # there it is a multiple one


def test_memory_is_m_and_a_few_vectors_and_does_not_grow_in_two_passes():
    H = jnp.ones(100_000)

    def vectors(solver):
        solve = jax.jit(lambda g: sf.solve(solver, lambda v: H * v, g).direction)
        return solve.lower(H).compile().memory_analysis().temp_size_in_bytes / H.nbytes

    assert vectors(sf.lanczos(60, two_pass=True)) < vectors(sf.lanczos(20, two_pass=True)) + 1
    for m in (20, 60):
        assert vectors(sf.lanczos(m)) < m + 5


def test_bad_input():
    for make, message in (
        (lambda: sf.lanczos(0), "num_products must be a whole number ≥ 1, got 0"),
        (lambda: sf.lanczos(damping_form="square"), "damping_form must be one of abs, sqrt, got 'square'"),
        (lambda: sf.lanczos(tolerance=1.0), r"tolerance must be a number in \(0, 1\), got 1.0"),
        (
            lambda: sf.lanczos(tolerance=0.1, two_pass=True),
            "two_pass keeps no basis: tolerance must be None, memory and recycle 0 beside it, got tolerance=0.1",
        ),
        (lambda: sf.lanczos(recycle=-1), "recycle must be a whole number ≥ 0, got -1"),
        (lambda: sf.lanczos(recycle=2, tolerance=0.1), "recycle takes all products: tolerance must be None beside it"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def problem(H, g, previous=None):
    """One call's problem for a matrix."""
    return Problem(Space(g), g, lambda part: lambda v: H @ v, previous)


def test_previous_updates_join_the_basis(x64):
    """With memory p the direction is the saddle-free minimiser over the Krylov space and p previous updates."""
    rng = np.random.default_rng(3)
    H, g = network_like(rng, 50)
    updates = rng.normal(size=(3, 50))
    solver = sf.lanczos(4, memory=2)
    state, dampings = solver.init(Space(jnp.asarray(g))), (0.05, 0.5)  # one that is stated, and one that is not

    @jax.jit
    def learn(p, state):
        model, state = solver.model(problem(jnp.asarray(H), jnp.asarray(g), p), jnp.full(1, dampings[0]), state)
        return model.stats["products"], [model.answer(jnp.asarray(damping)) for damping in dampings], state

    for p in updates:  # the first one is forgotten again
        products, answers, state = learn(jnp.asarray(p), state)
    krylov = [g, H @ g, H @ H @ g, H @ H @ H @ g]
    B, _ = np.linalg.qr(np.stack([*krylov, updates[2], updates[1]], axis=1))
    assert products == 6
    for damping, answer in zip(dampings, answers, strict=True):
        expected = B @ saddle_free_direction(B.T @ H @ B, B.T @ g, damping)
        np.testing.assert_allclose(answer.direction, expected, rtol=1e-8, atol=1e-10)
        # The quadratic model, from the basis alone.
        predicted = -g @ expected + expected @ H @ expected / 2
        np.testing.assert_allclose(answer.predicted, predicted, rtol=1e-8)
        assert answer.result == sf.Result.FINE


@pytest.mark.parametrize("recycle", [0, 2])
def test_previous_updates_within_the_space_or_zero_do_no_harm(recycle):
    H, g = jnp.diag(jnp.array([2.0, -1.0, 0.5])), jnp.ones(3)
    solver = sf.lanczos(2, memory=1, recycle=recycle)
    expected = solve(sf.lanczos(2), H, g, 0.0).direction
    assert jnp.linalg.norm(expected) > 1

    def direction(previous):
        model, _ = solver.model(problem(H, g, previous), jnp.zeros(1), solver.init(Space(g)))
        return model.answer(jnp.zeros(())).direction

    for previous in jax.jit(jax.vmap(direction))(jnp.stack([jnp.zeros(3), 3 * g, H @ g, H @ g - g])):
        np.testing.assert_allclose(previous, expected, rtol=1e-3)


def test_solve_makes_no_product_for_updates_that_there_are_not():
    met = []
    H = jnp.diag(jnp.array([2.0, -1.0, 0.5, 3.0]))
    matvec = lambda v: met.append(float(jnp.linalg.norm(v))) or H @ v  # noqa: E731
    with jax.disable_jit():  # also of the loop, whose products are called one by one
        solution = sf.solve(sf.lanczos(3, memory=2), matvec, jnp.ones(4), 0.1)
    np.testing.assert_allclose(met, np.ones(3), rtol=1e-5)
    assert solution.stats["products"] == 3


SEARCHED = [
    sf.lanczos(3),
    sf.exact(),
    sf.low_rank(rank=3),
    sf.series(num_terms=300),
    sf.blockwise(sf.exact()),
    sf.blockwise(sf.series(num_terms=300)),
]


@pytest.mark.parametrize(
    "solver", SEARCHED, ids=lambda solver: str(solver).split("=")[0 if "blockwise" not in str(solver) else 1]
)
def test_damping_search_keeps_the_best_of_its_trials(x64, solver):
    """Against a loop over λ with a direction, a product and a loss of its own each."""
    loss = lambda x: jnp.sum(jnp.cos(x) + 0.1 * x**2)  # noqa: E731
    x = jnp.array([0.3, 1.0, -2.0])
    tx = sf.adaptive_saddle_free_newton(solver, rule=sf.damping_search(0.5, spread=3.0, reach=2))
    updates, state = jax.jit(lambda x: tx.update(jax.grad(loss)(x), tx.init(x), x, value_fn=loss))(x)
    H, g = np.asarray(jax.hessian(loss)(x)), np.asarray(jax.grad(loss)(x))
    steps = {damping: -saddle_free_direction(H, g, damping) for damping in 0.5 * 3.0 ** np.arange(-2, 3)}
    best = min(steps, key=lambda damping: float(loss(x + steps[damping])))
    figures = sf.diagnostics(state)
    np.testing.assert_allclose(figures["damping"], best)
    np.testing.assert_allclose(state.rule, best)
    np.testing.assert_allclose(updates, steps[best], rtol=1e-6)
    # The series does not know H in its own basis, and predicts with |H|.
    curvature = np.abs(H) if "series" in str(solver) else H
    model = g @ steps[best] + steps[best] @ curvature @ steps[best] / 2
    np.testing.assert_allclose(figures["reduction_ratio"], (loss(x + updates) - loss(x)) / model, rtol=1e-5)


def test_damping_search_goes_beyond_its_trials_after_a_refusal():
    loss = lambda x: jnp.where(jnp.abs(x[0]) < 1.01, -(x[0] ** 2), jnp.inf)  # noqa: E731
    tx = sf.adaptive_saddle_free_newton(sf.lanczos(1), rule=sf.damping_search(1e-3, spread=2.0, reach=1))
    x = jnp.array([1.0])
    state, update = tx.init(x), jax.jit(lambda g, state, x: tx.update(g, state, x, value_fn=loss))
    dampings = []
    for _ in range(12):
        updates, state = update(jax.grad(loss)(x), state, x)
        assert jnp.abs(x + updates)[0] < 1.01
        dampings.append(float(state.rule))
        if updates[0] != 0:
            break
    figures = sf.diagnostics(state)
    assert updates[0] > 0
    assert figures["rejected_steps"] == figures["steps"] - 1 > 0
    assert figures["nonfinite_steps"] == 0
    np.testing.assert_allclose(dampings[:-1], 1e-3 * 4.0 ** np.arange(1, len(dampings)), rtol=1e-5)


def test_damping_search_needs_several_answers():
    for solver in (sf.lanczos(3, two_pass=True), sf.blockwise(sf.lanczos(3, two_pass=True))):
        with pytest.raises(ValueError, match=r"damping_search asks for several λ, and .* answers one"):
            sf.adaptive_saddle_free_newton(solver, rule=sf.damping_search())
    for make, message in (
        (lambda: sf.damping_search(0.0), r"initial_damping must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.damping_search(spread=1.0), r"spread must be a number in \(1, inf\), got 1.0"),
        (lambda: sf.damping_search(reach=0), "reach must be a whole number ≥ 1, got 0"),
        (lambda: sf.lanczos(memory=-1), "memory must be a whole number ≥ 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
