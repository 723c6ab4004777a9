"""The Lanczos solver against eigendecompositions, and its decomposition against matfree's."""

import jax
import jax.numpy as jnp
import matfree.decomp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import saddle_free_direction, symmetric

import saddlefree as sf
from saddlefree import spectrum
from saddlefree.solvers.base import System


def network_like(rng, n=200):
    """A few outliers, a bulk near zero, some of it negative."""
    return symmetric(rng, np.concatenate([[12.0, 5.0, 2.0, 1.0], rng.normal(size=n - 4) * 0.02])), rng.normal(size=n)


def sqrt_direction(H, g, damping):
    values, vectors = np.linalg.eigh(H)
    return vectors @ ((vectors.T @ g) / np.hypot(values, damping))


@pytest.mark.parametrize(("form", "oracle"), [("abs", saddle_free_direction), ("sqrt", sqrt_direction)])
def test_converges_to_the_exact_direction(x64, form, oracle):
    H, g = network_like(np.random.default_rng(0))
    expected = oracle(H, g, 0.1)
    errors = []
    for m in (4, 10, 20, 60):
        solution = sf.solve(sf.lanczos(m, damping_form=form), lambda v: jnp.asarray(H) @ v, jnp.asarray(g), 0.1)
        errors.append(np.linalg.norm(solution.direction - expected) / np.linalg.norm(expected))
        assert solution.stats["products"] == m
        assert errors[-1] / 10 < solution.stats["error"] or errors[-1] < 1e-12
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.01
    series = sf.solve(
        sf.series(num_terms=11, scale=sf.fixed_scale(145.0)), lambda v: jnp.asarray(H) @ v, jnp.asarray(g), 0.1
    )
    assert series.stats["products"] == 20
    exact = saddle_free_direction(H, g, 0.1)
    assert np.linalg.norm(series.direction - exact) > 10 * errors[2] * np.linalg.norm(exact)


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**16), damping=st.sampled_from([1e-2, 1.0]), two_pass=st.booleans())
def test_all_products_give_the_exact_direction(seed, damping, two_pass):
    rng = np.random.default_rng(seed)
    H, g = symmetric(rng, np.array([3.0, -1.0, 0.5, -0.2])), rng.normal(size=4)
    solver = sf.lanczos(num_products=4, two_pass=two_pass)
    solution = sf.solve(solver, lambda v: jnp.asarray(H, jnp.float32) @ v, jnp.asarray(g, jnp.float32), damping)
    np.testing.assert_allclose(solution.direction, saddle_free_direction(H, g, damping), rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose([solution.stats["smallest_ritz"], solution.stats["largest_ritz"]], [-1, 3], atol=1e-3)


def test_stops_when_the_space_is_exhausted():
    """Two eigenvalues, so two basis vectors, however many products are allowed; no NaN from what is left."""
    H = jnp.diag(jnp.array([2.0, 2.0, -1.0, -1.0, 2.0]))
    for solver in (sf.lanczos(5), sf.lanczos(50), sf.lanczos(5, two_pass=True), sf.lanczos(5, tolerance=1e-6)):
        solution = sf.solve(solver, lambda v: H @ v, jnp.ones(5), 0.0)
        np.testing.assert_allclose(solution.direction, 1 / jnp.abs(jnp.diag(H)), rtol=1e-4)
    assert solution.stats["products"] == 2
    assert solution.stats["negative_share"] == pytest.approx(0.4)
    zero = sf.solve(sf.lanczos(3), lambda v: H @ v, jnp.zeros(5), 0.0)
    np.testing.assert_array_equal(zero.direction, 0)


def test_tolerance_picks_the_number_of_products(x64):
    H, g = network_like(np.random.default_rng(1))
    expected = saddle_free_direction(H, g, 0.1)
    used = []
    for tolerance in (0.1, 1e-2, 1e-3):
        solution = sf.solve(sf.lanczos(100, tolerance=tolerance), lambda v: jnp.asarray(H) @ v, jnp.asarray(g), 0.1)
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


OUTLIERS = [(), (12.0, 5.0, 2.0, 1.0), (300.0, -100.0)]


def spread(rng, outliers, n=300):
    """A matrix with these eigenvalues and a bulk, and a vector, in float32."""
    bulk = rng.uniform(-1, 1, size=n - len(outliers)) * (0.05 if outliers else 1)
    H = symmetric(rng, np.concatenate([outliers, bulk]))
    return jnp.asarray(H, jnp.float32), jnp.asarray(rng.normal(size=n), jnp.float32)


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**16), outliers=st.sampled_from(OUTLIERS))
def test_semi_orthogonality_suffices_for_the_spectrum(seed, outliers):
    H, g = spread(np.random.default_rng(seed), outliers)
    both = [spectrum.lanczos_decomposition(lambda v: H @ v, g, 30, semi=semi) for semi in (True, False)]
    np.testing.assert_allclose(both[0][0] @ both[0][0].T, np.eye(30), atol=1e-3)
    values = [np.linalg.eigvalsh(np.asarray(T.dense(), np.float64)) for _, T, _ in both]
    np.testing.assert_allclose(*values, atol=1e-5 * np.max(np.abs(values[1])))


@pytest.mark.parametrize("outliers", OUTLIERS)
def test_semi_orthogonality_takes_few_sweeps(monkeypatch, outliers):
    """None where no Ritz value has converged, and some, in pairs, where one has."""
    needed, after = [], spectrum.Overlaps.after

    def recorded(self, *args):
        needed.append(after(self, *args)[0])
        return after(self, *args)

    monkeypatch.setattr(spectrum.Overlaps, "after", recorded)
    H, g = spread(np.random.default_rng(3), outliers)
    with jax.disable_jit():
        spectrum.lanczos_decomposition(lambda v: H @ v, g, 20, semi=True)
    swept = "".join("·x"[bool(n)] for n in needed)
    assert len(swept) == 20
    assert (swept.startswith("··") and "xx" in swept) if outliers else "x" not in swept, swept


def test_memory_is_m_and_a_few_vectors_and_does_not_grow_in_two_passes():
    H = jnp.ones(100_000)

    def vectors(solver):
        solve = jax.jit(lambda g: sf.solve(solver, lambda v: H * v, g).direction)
        return solve.lower(H).compile().memory_analysis().temp_size_in_bytes / H.nbytes

    assert vectors(sf.lanczos(60, two_pass=True)) < vectors(sf.lanczos(20, two_pass=True)) + 1
    for m in (20, 60):
        assert vectors(sf.lanczos(m)) < m + 4


def test_bad_input():
    for make, message in (
        (lambda: sf.lanczos(0), "num_products must be a whole number ≥ 1, got 0"),
        (lambda: sf.lanczos(damping_form="square"), "damping_form must be 'abs' or 'sqrt', got 'square'"),
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


def test_previous_updates_join_the_basis(x64):
    """With memory p the direction is the saddle-free minimiser over the Krylov space and p previous updates."""
    rng = np.random.default_rng(3)
    H, g = network_like(rng, 50)
    updates = rng.normal(size=(3, 50))
    solver, damping = sf.lanczos(4, memory=2), 0.05
    state = solver.init(jnp.asarray(g))
    for p in updates:  # the first one is forgotten again
        system = System(lambda: lambda v: jnp.asarray(H) @ v, jnp.asarray(g), jnp.asarray(damping), jnp.asarray(p))
        solution = solver.solve(system, state)
        state = solution.state
    krylov = [g, H @ g, H @ H @ g, H @ H @ H @ g]
    B, _ = np.linalg.qr(np.stack([*krylov, updates[2], updates[1]], axis=1))
    expected = B @ saddle_free_direction(B.T @ H @ B, B.T @ g, damping)
    np.testing.assert_allclose(solution.direction, expected, rtol=1e-8, atol=1e-10)
    assert solution.stats["products"] == 6
    # The quadratic model, from the basis alone.
    weights = solver.weights(solution.subspace.values, jnp.asarray(damping))
    predicted = -g @ expected + expected @ H @ expected / 2
    np.testing.assert_allclose(solution.subspace.predicted_change(weights), predicted, rtol=1e-8)


def test_previous_updates_within_the_space_or_zero_do_no_harm():
    H, g = jnp.diag(jnp.array([2.0, -1.0, 0.5])), jnp.ones(3)
    for previous in (jnp.zeros(3), 3 * g, H @ g, None):
        system = System(lambda: lambda v: H @ v, g, jnp.array(0.0), previous)
        direction = sf.lanczos(2, memory=1).solve(system, ()).direction
        np.testing.assert_allclose(direction, sf.lanczos(2).solve(system, ()).direction, rtol=1e-3)


def test_damping_search_keeps_the_best_of_its_trials(x64):
    """Against a loop over λ with a direction, a product and a loss of its own each."""
    loss = lambda x: jnp.sum(jnp.cos(x) + 0.1 * x**2)  # noqa: E731
    x = jnp.array([0.3, 1.0, -2.0])
    rule = sf.damping_search(0.5, spread=3.0, reach=2)
    tx = sf.adaptive_saddle_free_newton(sf.lanczos(3), damping=rule)
    updates, state = tx.update(jax.grad(loss)(x), tx.init(x), x, value_fn=loss)
    H, g = np.asarray(jax.hessian(loss)(x)), np.asarray(jax.grad(loss)(x))
    steps = {damping: -saddle_free_direction(H, g, damping) for damping in 0.5 * 3.0 ** np.arange(-2, 3)}
    best = min(steps, key=lambda damping: float(loss(x + steps[damping])))
    figures = sf.diagnostics(state)
    np.testing.assert_allclose(figures["damping"], best)
    np.testing.assert_allclose(state.damping, best)
    np.testing.assert_allclose(updates, steps[best], rtol=1e-8)
    model = g @ steps[best] + steps[best] @ H @ steps[best] / 2
    np.testing.assert_allclose(figures["reduction_ratio"], (loss(x + updates) - loss(x)) / model, rtol=1e-5)


def test_damping_search_goes_beyond_its_trials_after_a_refusal():
    loss = lambda x: jnp.where(jnp.abs(x[0]) < 1.01, -(x[0] ** 2), jnp.inf)  # noqa: E731
    tx = sf.adaptive_saddle_free_newton(sf.lanczos(1), damping=sf.damping_search(1e-3, spread=2.0, reach=1))
    x = jnp.array([1.0])
    state = tx.init(x)
    for _ in range(12):
        updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
        assert jnp.abs(x + updates)[0] < 1.01
        if updates[0] != 0:
            break
    figures = sf.diagnostics(state)
    assert figures["rejected_steps"] == figures["steps"] - 1 > 0
    assert figures["nonfinite_steps"] == 0


def test_damping_search_needs_a_basis():
    for solver in (sf.exact(), sf.series(num_terms=3), sf.lanczos(3, two_pass=True)):
        with pytest.raises(ValueError, match="damping_search needs a solver that keeps its basis, such as lanczos"):
            sf.adaptive_saddle_free_newton(solver, damping=sf.damping_search())
    for make in (
        lambda: sf.saddle_free_newton(0.1, damping=sf.damping_search(), solver=sf.lanczos(3)),
        lambda: sf.adaptive_saddle_free_newton(sf.lanczos(3), damping=sf.damping_search(), step=sf.adaptive_step()),
    ):
        with pytest.raises(ValueError, match="damping_search takes the step from the basis"):
            make()
    for make, message in (
        (lambda: sf.damping_search(0.0), r"initial_damping must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.damping_search(spread=1.0), r"spread must be a number in \(1, inf\), got 1.0"),
        (lambda: sf.damping_search(reach=0), "reach must be a whole number ≥ 1, got 0"),
        (lambda: sf.lanczos(memory=-1), "memory must be a whole number ≥ 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
