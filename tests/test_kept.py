"""Ritz pairs that are kept where batches differ: the formula, the pattern of products, full batches as they were."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params, symmetric

import saddlefree as sf
from saddlefree.solvers.kept import BULK, Pairs, moved
from saddlefree.solvers.recycling import Recycled
from saddlefree.space import Space

DATA = network_batch(jax.random.key(1), n=64)
SPARING = sf.lanczos(3, damping_form="sqrt", memory=1, recycle=6, refresh_every=6)


def test_the_kept_pairs_and_the_bulk(x64):
    """s = −U(|θ| + λ)⁻¹Uᵀm + (I − UUᵀ)u for u = bulk(g − UUᵀg), its derivative in log λ, and what it predicts."""
    rng, lam = np.random.default_rng(0), 0.3
    values, vectors = np.linalg.eigh(symmetric(rng, np.array([5.0, -2.0, 1.0, 0.0, 0.0, 0.0])))
    large = np.abs(values) > 1e-8
    U, theta = vectors[:, large].T, values[large]
    m, g = rng.normal(size=6), rng.normal(size=6)
    old = BULK.init(jnp.asarray(m))
    seen = Space(jnp.asarray(m)), jnp.asarray(U), jnp.asarray(U @ g), jnp.asarray(g), jnp.ones(())
    bulk, new = moved(jnp.array(True), *seen, old)
    outside = np.eye(6) - U.T @ U
    u, expected = BULK.update(jnp.asarray(outside @ g), old, value=jnp.ones(()))
    np.testing.assert_allclose(new.last, expected.last, rtol=1e-10)
    known = Recycled(jnp.asarray(U), jnp.asarray(theta))
    pairs = Pairs(known, jnp.asarray(U @ m), jnp.asarray(U @ g), jnp.asarray(g), bulk)
    answer, change = jax.jvp(pairs.answer, (jnp.array(lam),), (jnp.array(lam),))
    d = U.T @ (U @ m / (np.abs(theta) + lam))
    rest = outside @ np.asarray(u)
    np.testing.assert_allclose(answer.direction, d - rest, rtol=1e-10, atol=1e-15)
    slope = -lam * U.T @ (U @ m / (np.abs(theta) + lam) ** 2)
    np.testing.assert_allclose(change.direction, slope, rtol=1e-9, atol=1e-15)
    # Also where U itself changes, as where an update is differentiated.
    changing = lambda basis: dataclasses.replace(pairs, pairs=known._replace(basis=basis)).answer(jnp.array(lam))  # noqa: E731
    _, change = jax.jvp(changing, (known.basis,), (known.basis**2,))
    both = U @ m / (np.abs(theta) + lam) + U @ np.asarray(u)
    np.testing.assert_allclose(change.direction, (U**2).T @ both, rtol=1e-9, atol=1e-15)
    predicted = d @ (U.T * theta) @ U @ d / 2 - g @ d + g @ rest
    np.testing.assert_allclose(answer.predicted, predicted, rtol=1e-9)
    negative = np.sum((U @ m)[theta < 0] ** 2) / np.sum((U @ m) ** 2)
    np.testing.assert_allclose(pairs.stats["negative_share"], negative, rtol=1e-9)
    # Where batches agree nothing moves, and what was learned before is forgotten.
    bulk, fresh = moved(jnp.array(False), *seen, new)
    assert all(not np.any(x) for x in jax.tree.leaves(bulk))
    for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(old), strict=True):
        np.testing.assert_array_equal(a, b)


def train(solver, full, scale):
    tx = sf.adaptive_saddle_free_newton(solver)
    params = network_params(jax.random.key(0))

    def step(carry, key):
        params, state = carry
        index = jnp.where(full, jnp.arange(16), jax.random.permutation(key, 64)[:16])
        value_fn = lambda p: scale * network_loss(p, jax.tree.map(lambda a: a[index], DATA))  # noqa: E731
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value_fn=value_fn, value=value)
        return (optax.apply_updates(params, updates), state), sf.diagnostics(state)

    keys = jax.random.split(jax.random.key(2), 30)
    (params, state), figures = jax.lax.scan(step, (params, tx.init(params)), keys)
    return params, figures, state


single = jax.jit(train, static_argnums=0)


def test_products_are_spared_where_batches_differ():
    """The first batch has nothing to be compared with; then 1, 2, 4 and 6 steps apart."""
    params, figures, state = single(SPARING, False, 1.0)
    kept = state.solver.kept
    np.testing.assert_allclose(kept.along.total, kept.pairs.basis @ kept.average.total, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(kept.along.weight, kept.average.weight, rtol=1e-6)
    products = np.asarray(figures["products"])
    assert np.flatnonzero(products).tolist() == [0, 1, 3, 7, 13, 19, 25]
    assert set(products.tolist()) == {0, 4}
    assert np.all(figures["noise"][1:] > 1e-2)
    assert figures["bulk_rate"][0] == 0
    np.testing.assert_allclose(figures["bulk_rate"][1], 1e-3, rtol=1e-5)  # the first of `next_batch_rate`
    # It stays only where the pairs span the gradient but for rounding, as they may where products are made.
    assert np.count_nonzero(np.diff(figures["bulk_rate"][1:])) > 20
    assert network_loss(params, DATA) < 0.9 * network_loss(network_params(jax.random.key(0)), DATA)
    assert figures["nonfinite_steps"][-1] == 0


def test_the_bulk_does_not_move_by_rounding():
    """Where the pairs span all parameters nothing is left for Adam, which would make full steps of rounding."""
    tx, x = sf.adaptive_saddle_free_newton(sf.lanczos(3, recycle=3, refresh_every=50)), jnp.array([1.0, -2.0, 3.0])
    scales = jnp.array([3.0, 1.0, 0.3])

    @jax.jit
    def update(state, x, target):
        loss = lambda x: jnp.sum(scales * (x - target) ** 2)  # noqa: E731
        return tx.update(jax.grad(loss)(x), state, x, value_fn=loss)

    state = tx.init(x)
    for i in range(12):
        updates, state = update(state, x, 0.1 * (-1.0) ** i)
        x = x + updates
    assert sf.diagnostics(state)["noise"] > 1e-2
    assert sf.diagnostics(state)["products"] == 0
    assert np.max(np.abs(state.solver.kept.bulk.last)) == 0


@pytest.mark.parametrize(("size", "recycled", "used"), [(400_000, 40, 20), (640_000, 25, 20), (10**7, 10, 10)])
def test_many_parameters_have_fewer_pairs(size, recycled, used):
    """As many as hold 16 million numbers, and at least ten; without `refresh_every` as many as were asked for."""
    solver = sf.lanczos(8, memory=1, recycle=40, refresh_every=100)
    params = jax.ShapeDtypeStruct((size,), jnp.float32)
    state = jax.eval_shape(sf.adaptive_saddle_free_newton(solver).init, params)
    assert (state.solver.recycled.values.size, state.solver.kept.pairs.values.size) == (recycled, used)
    # With basis, averages and previous steps: the number in docs/getting-started.md.
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) // size == recycled + used + 15
    plain = jax.eval_shape(sf.adaptive_saddle_free_newton(sf.lanczos(8, recycle=40)).init, params).solver
    assert plain.recycled.values.size == 40


def test_a_full_batch_is_as_without():
    """Products in each step, and the same numbers."""
    _, figures, _ = single(SPARING, True, 1.0)
    _, expected, _ = single(dataclasses.replace(SPARING, refresh_every=None), True, 1.0)
    assert np.all(figures["products"] == 4)
    assert np.all(figures["noise"] < 1e-4)
    assert np.all(figures["bulk_rate"] == 0)
    for name in ("value", "damping", "largest_ritz", "negative_share", "error"):
        np.testing.assert_allclose(figures[name][:8], expected[name][:8], rtol=1e-2, atol=1e-3)


def test_any_scale_of_the_loss():
    """A sum in place of a mean: where noise begins λ follows the curvature, and no run ends above its start."""
    scales = jnp.array([1e-3, 1.0, 1e3])
    params, figures, _ = jax.jit(jax.vmap(functools.partial(train, SPARING, False)))(scales)
    ends = jax.vmap(lambda p: network_loss(p, DATA))(params)
    assert np.all(ends < network_loss(network_params(jax.random.key(0)), DATA))
    _, expected, _ = single(SPARING, False, 1.0)
    np.testing.assert_allclose(figures["value"][1, :5], expected["value"][:5], rtol=1e-2)


def test_refresh_and_a_gradient_that_is_not_finite():
    """`refresh=` takes the place of the count; what is not finite enters neither average nor pairs."""
    tx, x = sf.adaptive_saddle_free_newton(sf.lanczos(2, recycle=2, refresh_every=50)), jnp.ones(3)

    @jax.jit
    def update(state, x, target, refresh):
        loss = lambda x: jnp.sum((x - target) ** 4)  # noqa: E731
        return tx.update(jax.grad(loss)(x), state, x, value_fn=loss, refresh=refresh)

    state, products = tx.init(x), []
    for target, refresh in ((0.0, False), (0.2, True), (-0.2, False), (0.1, True)):
        updates, state = update(state, x, target, refresh)
        x = x + updates
        products.append(int(sf.diagnostics(state)["products"]))
    assert products == [2, 2, 0, 2]
    updates, broken = update(state, x, jnp.nan, True)
    np.testing.assert_array_equal(updates, 0)
    assert sf.diagnostics(broken)["nonfinite_steps"] == 1
    for a, b in zip(jax.tree.leaves(state.solver.recycled), jax.tree.leaves(broken.solver.recycled), strict=True):
        np.testing.assert_array_equal(a, b)
    for name in ("average", "along", "bulk", "pairs"):
        old, new = getattr(state.solver.kept, name), getattr(broken.solver.kept, name)
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.lanczos(refresh_every=5), "recycle must be at least 1 beside refresh_every.* got 0"),
        (lambda: sf.lanczos(recycle=2, refresh_every=0), r"refresh_every must be a whole number ≥ 1, got 0"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
