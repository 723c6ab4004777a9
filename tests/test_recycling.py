"""Recycled Ritz pairs against dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import cases, network_batch, network_loss, network_params, saddle_free_direction, solve, symmetric

import saddlefree as sf
from saddlefree import space
from saddlefree.solvers import recycling
from saddlefree.space import Space


def outliers(rng, n=80):
    """Thirteen large eigenvalues, three of them negative, and a bulk near zero."""
    large = [40.0, 30.0, 20.0, 12.0, 9.0, 7.0, 5.0, 4.0, 3.0, 2.0, -6.0, -3.5, -2.5]
    return symmetric(rng, np.concatenate([large, rng.normal(size=n - 13) * 0.01])), rng.normal(size=n)


def product(H):
    return lambda v: jnp.asarray(H) @ v


@cases(15)
@given(seed=st.integers(0, 2**16), damping=st.sampled_from([1e-2, 1.0]))
def test_a_full_space_gives_the_exact_direction_whatever_is_kept(seed, damping):
    with jax.enable_x64(True):
        check_full_space(np.random.default_rng(seed), damping)


def check_full_space(rng, damping):
    H, g = symmetric(rng, np.array([3.0, -1.0, 0.5, -0.2, 0.1])), rng.normal(size=5)
    solver = sf.lanczos(num_products=5, recycle=2)
    U, _ = np.linalg.qr(rng.normal(size=(5, 2)))
    wrong = recycling.Recycled(jnp.asarray(U.T), jnp.asarray(rng.normal(size=2)))
    state = solver.init(Space(jnp.asarray(g)))._replace(recycled=wrong)
    solution = solve(solver, H, jnp.asarray(g), damping, state)
    np.testing.assert_allclose(solution.direction, saddle_free_direction(H, g, damping), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(sorted(solution.state.recycled.values), [-1, 3], atol=1e-9)
    assert solution.stats["error"] == 0
    np.testing.assert_allclose(
        solution.stats["negative_share"],
        np.sum(np.where(np.linalg.eigh(H)[0] < 0, (np.linalg.eigh(H)[1].T @ g) ** 2, 0)) / (g @ g),
    )


def test_the_space_is_the_preconditioned_krylov_space_and_an_update(x64):
    rng = np.random.default_rng(0)
    H, g = outliers(rng)
    U, _ = np.linalg.qr(rng.normal(size=(80, 3)))
    theta, lam, update = np.array([5.0, -2.0, 1.0]), 0.1, rng.normal(size=80)
    inverse = np.eye(80) / 1.1 + (U * (1 / (np.abs(theta) + lam) - 1 / 1.1)) @ U.T
    vectors = [inverse @ g]
    for _ in range(2):
        vectors.append(inverse @ H @ vectors[-1])
    B, _ = np.linalg.qr(np.stack([*vectors, update], axis=1))
    old = recycling.Recycled(jnp.asarray(U.T), jnp.asarray(theta))
    found = recycling.krylov_space(product(H), jnp.asarray(g), jnp.asarray(update)[None], 3, old, jnp.asarray(lam))
    Z = np.asarray(found.basis).T
    np.testing.assert_allclose(Z @ Z.T, B @ B.T, atol=1e-8)
    np.testing.assert_allclose(found.matrix, Z.T @ H @ Z, atol=1e-9)
    np.testing.assert_allclose(found.seen, U.T @ H @ Z, atol=1e-9)


def test_merging_is_rayleigh_ritz_with_old_values_where_no_product_is(x64):
    rng = np.random.default_rng(1)
    H, g = outliers(rng)
    U, _ = np.linalg.qr(rng.normal(size=(80, 6)))
    theta = rng.normal(size=6) * 5
    old = recycling.Recycled(jnp.asarray(U.T), jnp.asarray(theta))
    found = recycling.krylov_space(product(H), jnp.asarray(g), None, 4, old, jnp.asarray(0.1))
    new = recycling.merged(old, found)
    Z = np.asarray(found.basis).T
    B, _ = np.linalg.qr(U - Z @ (Z.T @ U))
    stale = (U * theta) @ U.T
    corner = B.T @ H @ Z
    values, vectors = np.linalg.eigh(np.block([[Z.T @ H @ Z, corner.T], [corner, B.T @ stale @ B]]))
    kept = np.argsort(-np.abs(values))[:6]
    np.testing.assert_allclose(new.values, values[kept], rtol=1e-9)
    expected = np.concatenate([Z, B], axis=1) @ vectors[:, kept]
    np.testing.assert_allclose(np.abs(new.basis @ expected), np.eye(6), atol=1e-7)


def test_merging_what_is_known_already_adds_nothing(x64):
    """Z within the span of U, and one vector of it zero: the values become those of H, on a basis of as many."""
    rng = np.random.default_rng(4)
    H, _ = outliers(rng)
    U, _ = np.linalg.qr(rng.normal(size=(80, 4)))
    Z = np.concatenate([np.linalg.qr(U @ rng.normal(size=(4, 4)))[0], np.zeros((80, 1))], axis=1)
    old = recycling.Recycled(jnp.asarray(U.T), jnp.asarray(rng.normal(size=4)))
    new = recycling.merged(old, recycling.KrylovSpace(*map(jnp.asarray, (Z.T, Z.T @ H @ Z, U.T @ H @ Z))))
    values, vectors = np.linalg.eigh(U.T @ H @ U)
    kept = np.argsort(-np.abs(values))
    np.testing.assert_allclose(new.values, values[kept], rtol=1e-9)
    np.testing.assert_allclose(np.abs(new.basis @ (U @ vectors[:, kept])), np.eye(4), atol=1e-7)


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 5e-3])
def test_merging_what_is_nearly_known_stays_orthonormal_in_float32(distance):
    """One projection would leave overlaps of ε over the distance of Z from the span of U."""
    rng = np.random.default_rng(6)
    H, _ = outliers(rng)
    U, _ = np.linalg.qr(rng.normal(size=(80, 8)))
    Z, _ = np.linalg.qr(U @ np.linalg.qr(rng.normal(size=(8, 8)))[0] + distance * rng.normal(size=(80, 8)) / 80**0.5)
    parts = (U.T, rng.normal(size=8)), (Z.T, Z.T @ H @ Z, U.T @ H @ Z)
    old, found = ([jnp.asarray(x, jnp.float32) for x in part] for part in parts)
    new = recycling.merged(recycling.Recycled(*old), recycling.KrylovSpace(*found))
    basis = np.asarray(new.basis, np.float64)
    np.testing.assert_allclose(basis @ basis.T, np.eye(8), atol=5e-6)


def test_the_first_call_is_a_plain_krylov_space(x64):
    H, g = outliers(np.random.default_rng(5))
    solvers = sf.lanczos(num_products=5), sf.lanczos(num_products=5, recycle=20)
    plain, recycled = (solve(solver, H, g, 0.1, solver.init(Space(jnp.asarray(g)))) for solver in solvers)
    np.testing.assert_allclose(recycled.direction, plain.direction, rtol=1e-8)
    for name in ("error", "smallest_ritz", "largest_ritz", "negative_share", "products"):
        np.testing.assert_allclose(recycled.stats[name], plain.stats[name], rtol=1e-7)
    assert recycled.stats["error"] > 0
    values = np.linalg.eigvalsh(H)
    np.testing.assert_allclose(recycled.state.recycled.values[0], values[np.argmax(np.abs(values))], rtol=1e-2)


def test_kept_pairs_bring_few_products_nearer_to_the_exact_direction(x64):
    """Five products a call and a new gradient each time, beside a plain Krylov space of five."""
    rng = np.random.default_rng(2)
    H, g = outliers(rng)
    solvers = {"recycled": sf.lanczos(num_products=5, recycle=20), "plain": sf.lanczos(num_products=5)}
    errors = {name: [] for name in solvers}
    states = {name: solver.init(Space(jnp.asarray(g))) for name, solver in solvers.items()}
    for _ in range(30):
        g = rng.normal(size=80)
        expected = saddle_free_direction(H, g, 0.1)
        for name in solvers:
            solution = solve(solvers[name], H, g, 0.1, states[name])
            states[name] = solution.state
            assert solution.stats["products"] == 5
            errors[name].append(np.linalg.norm(solution.direction - expected) / np.linalg.norm(expected))
    recycled, plain = (np.median(errors[name][-10:]) for name in solvers)
    assert recycled < 0.06
    assert recycled < plain / 4
    eigenvalues = np.linalg.eigvalsh(H)
    largest = eigenvalues[np.argsort(-np.abs(eigenvalues))][:13]
    np.testing.assert_allclose(states["recycled"].recycled.values[:13], largest, rtol=0.01)


def test_the_basis_stays_orthonormal_in_float32():
    key = jax.random.key(0)
    params, batch = network_params(key, (3, 12, 1)), network_batch(key, 64)
    value_fn = lambda params: network_loss(params, batch)  # noqa: E731
    solver = sf.lanczos(num_products=8, damping_form="sqrt", recycle=40)
    tx = sf.adaptive_saddle_free_newton(solver)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn)
        return (jax.tree.map(jnp.add, params, updates), state), None

    (end, state), _ = jax.jit(lambda c: jax.lax.scan(step, c, None, length=60))((params, tx.init(params)))
    gram = space.project(state.solver.recycled.basis, state.solver.recycled.basis)
    known = jnp.abs(state.solver.recycled.values) > 1e-5
    np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=2e-4)
    np.testing.assert_allclose(jnp.diag(gram)[known], 1, atol=2e-4)
    assert jnp.sum(known) > 20
    assert value_fn(end) < 0.1 * value_fn(params)
    # Where the Hessian stays, what is kept approaches its eigenvalues.
    flat, unravel = jax.flatten_util.ravel_pytree(end)
    H, memory = jax.hessian(lambda x: value_fn(unravel(x)))(flat), state.solver
    for seed in range(25):
        memory = solve(solver, H, jax.random.normal(jax.random.key(seed), flat.shape), 0.1, memory).state
    eigenvalues = np.linalg.eigvalsh(np.asarray(H, np.float64))
    np.testing.assert_allclose(memory.recycled.values[0], eigenvalues[np.argmax(np.abs(eigenvalues))], rtol=0.1)
