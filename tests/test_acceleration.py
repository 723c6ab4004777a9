"""Series accelerators against naïve tables and determinants in 50 digits, and against sequences they must solve."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import cases

from saddlefree.acceleration import (
    accelerate,
    levin_d2,
    levin_t,
    pade,
    sablonniere,
    shanks,
    topological_rho,
    vector_rho,
)

mpmath.mp.dps = 50
ALL = [shanks, sablonniere, vector_rho, topological_rho, pade, levin_t, levin_d2]
every_accelerator = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)


# --- oracles: vectors are object arrays of mpmath numbers -------------------------------------------------------------


def table_limit(sums, order, factor, y=None):
    """e_0^(2N) of the whole table, by Samelson inverses or, given y, in the second topological form."""
    e = {(m, -1): 0 * s for m, s in enumerate([*sums, sums[0]])} | {(m, 0): s for m, s in enumerate(sums)}
    for c in range(1, 2 * order + 1):
        for m in range(len(sums) - c):
            delta = e[m + 1, c - 1] - e[m, c - 1]
            topological = y if c % 2 else e[m + 2, c - 2] - e[m + 1, c - 2]
            companion = delta if y is None else topological
            e[m, c] = e[m + 1, c - 2] + factor(c) * companion / (delta @ companion)
    return e[0, 2 * order]


def determinant_limit(sums, remainders):
    """Σ_j w_j s_j where Σ_j w_j = 1 and Σ_j w_j remainders[i][j] = 0: the w_j are cofactors of a row of ones."""
    cofactors = []
    for j in range(len(sums)):
        minor = mpmath.matrix([[*row[:j], *row[j + 1 :]] for row in remainders])
        cofactors.append((-1) ** j * mpmath.det(minor))
    return sum(w * s for w, s in zip(cofactors, sums, strict=True)) / sum(cofactors)


def levin_t_limit(moments, sums, order, start):
    """The model s_l = s + μ_l Σ_{i<k} β_i (l + 1)^{−i}, with k = 2N."""
    rows = [[mu * mpmath.mpf(start + j + 1) ** -i for j, mu in enumerate(moments)] for i in range(2 * order)]
    return determinant_limit(sums, rows)


def levin_d2_limit(moments, sums, order, start):
    """The model s_l = s + Σ_{k=1,2} R_l^k (∇^{k−1}μ)_l Σ_{i<N} β_ki R_l^{−i}, R_l = l + 1, for all sums but one."""
    R = [mpmath.mpf(start + 1 + j) for j in range(1, len(sums))]
    differences = {1: moments[1:], 2: [b - a for a, b in itertools.pairwise(moments)]}
    rows = [[r ** (k - i) * d for r, d in zip(R, differences[k], strict=True)] for k in (1, 2) for i in range(order)]
    return determinant_limit(sums[1:], rows)


def oracle(make, terms, sums, order, y):
    """The limit from the trailing sums of a whole series."""
    start = len(sums) - make(order=order).num_sums
    moments, sums = [y @ term for term in terms[start:]], sums[start:]
    return {
        shanks: lambda: table_limit(sums, order, lambda c: 1),
        sablonniere: lambda: table_limit(sums, order, lambda c: c // 2 + 1),
        vector_rho: lambda: table_limit(sums, order, lambda c: c),
        topological_rho: lambda: table_limit(sums, order, lambda c: c, y),
        # Brezinski's second topological ε-algorithm: a recursion in place of the Hankel system.
        pade: lambda: table_limit(sums, order, lambda c: 1, y),
        levin_t: lambda: levin_t_limit(moments, sums, order, start),
        levin_d2: lambda: levin_d2_limit(moments, sums, order, start),
    }[make]()


# --- the series of the paper ------------------------------------------------------------------------------------------


@functools.cache
def problem(seed, size):
    """H symmetric with 0.1 ≤ |λ| ≤ 1 of both signs, g, and V = 1.01 max λ², exact in float32."""
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.standard_normal((size, size)))[0]
    eigenvalues = rng.uniform(0.1, 1, size) * rng.choice([-1, 1], size)
    H = (Q * eigenvalues) @ Q.T
    return H.astype(np.float32), rng.standard_normal(size).astype(np.float32), np.float32(1.01 * max(eigenvalues**2))


def to_mpmath(x):
    return np.vectorize(lambda entry: mpmath.mpf(float(entry)), otypes=[object])(x)


def series(H, g, V, num_terms):
    """a_k = binom(2k, k)/4^k (I − H²/V)^k g and their sums, in whatever arithmetic H, g and V have."""
    terms = [g]
    for k in range(1, num_terms):
        terms.append((terms[-1] - H @ (H @ terms[-1]) / V) * (2 * k - 1) / (2 * k))
    return terms, [sum(terms[1 : k + 1], terms[0]) for k in range(num_terms)]


@functools.cache
def exact_series(seed, size):
    H, g, V = problem(seed, size)
    return series(to_mpmath(H), to_mpmath(g), mpmath.mpf(float(V)), num_terms=22)


def run(accelerator, terms, sums, y, start=0):
    """The limit from all of the stacked terms and sums."""
    return finish(accelerator, accelerator.init(y, start), terms, sums)


@functools.partial(jax.jit, static_argnames="accelerator")
def finish(accelerator, state, terms, sums):
    def push(state, pair):
        return accelerator.push(state, *pair), None

    return accelerator.limit(jax.lax.scan(push, state, (terms, sums))[0])


def rounding_error(make, order, extra, dtype, seed, size):
    """‖limit − oracle‖/‖oracle‖, when everything from the terms on is computed in `dtype`."""
    accelerator = make(order=order)
    with jax.enable_x64(dtype == np.float64):
        H, g, V = (x.astype(dtype) for x in problem(seed, size))
        terms, sums = (jnp.stack(x[extra:]) for x in series(H, g, V, accelerator.num_sums + extra))
        limit = run(accelerator, terms, sums, jnp.asarray(g), start=extra)
    assert limit.dtype == dtype
    exact = (x[: accelerator.num_sums + extra] for x in exact_series(seed, size))
    expected = oracle(make, *exact, order, to_mpmath(g))
    return np.linalg.norm(np.asarray(limit) - expected.astype(float)) / np.linalg.norm(expected.astype(float))


# Twenty seeds gave at most, for N ≤ 4 and N = 8: shanks 2e-11, 7e-6; sablonniere 2e-10, 3e-6; vector_rho 2e-10, 2e-4;
# topological_rho 6e-9, 2e-2; pade 2e-11, 4e-6; levin_t 1e-11, 3e-7; levin_d2 9e-8, 2e-1.
BOUNDS = {
    shanks: (1e-9, 1e-3),
    sablonniere: (1e-8, 1e-3),
    vector_rho: (1e-8, 1e-2),
    topological_rho: (1e-6, 1e-1),
    pade: (1e-9, 1e-3),
    levin_t: (1e-9, 1e-4),
    levin_d2: (1e-5, 1e-1),
}


@every_accelerator
@pytest.mark.parametrize(("order", "size"), [(1, 5), (2, 12), (4, 30), (8, 30)])
def test_agrees_with_the_definition_in_50_digits(make, order, size):
    for extra in (0, 4):
        assert rounding_error(make, order, extra, np.float64, seed=1, size=size) < BOUNDS[make][order > 4]


# Twenty seeds: 3e-6, 2e-3 and 3e-1 at most for K = 2N + 1, and 3e-5, 7e-2 and 3e-1 for K = 2N + 5.
@pytest.mark.parametrize(("order", "bounds"), [(2, (3e-5, 3e-4)), (4, (2e-2, 0.3)), (8, (1.0, 1.0))])
def test_sablonniere_in_single_precision(order, bounds):
    for extra, bound in zip((0, 4), bounds, strict=True):
        assert rounding_error(sablonniere, order, extra, np.float32, seed=1, size=30) < bound


@pytest.mark.parametrize("order", [4, 8])
def test_sablonniere_is_not_shanks(order):
    with jax.enable_x64(True):
        terms, sums = (jnp.asarray(np.stack(x[: 2 * order + 1]).astype(float)) for x in exact_series(1, 30))
        ours, other = (np.asarray(run(make(order=order), terms, sums, terms[0])) for make in (sablonniere, shanks))
    assert np.linalg.norm(ours - other) > 0.03 * np.linalg.norm(other)


@pytest.mark.parametrize("make", [shanks, vector_rho, pade, levin_t], ids=lambda make: make.__name__)
def test_acceleration_pays(make):
    H, g, V = (x.astype(float) for x in problem(1, 30))
    eigenvalues, Q = np.linalg.eigh(H)
    limit = Q @ (np.sqrt(V) / abs(eigenvalues) * (Q.T @ g))
    terms, sums = (np.stack(x) for x in series(H, g, V, 9))
    with jax.enable_x64(True):
        accelerated = np.asarray(run(make(order=4), terms, sums, g))
    assert np.linalg.norm(accelerated - limit) < 0.5 * np.linalg.norm(sums[-1] - limit)


# --- sequences that an accelerator must solve -------------------------------------------------------------------------


def geometric(num_exponentials, num_sums, size):
    """s + Σ_i q_iⁿ v_i and s."""
    rng = np.random.default_rng(num_exponentials)
    q = np.linspace(-0.7, 0.8, num_exponentials)
    V, s = rng.standard_normal((num_exponentials, size)), rng.standard_normal(size)
    return s + (q ** np.arange(num_sums)[:, None]) @ V, s


@pytest.mark.parametrize("make", [shanks, pade], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("num_exponentials", "order", "size"), [(1, 1, 1), (2, 2, 7), (3, 3, 1), (3, 3, 7), (2, 4, 7)])
def test_exponentials_are_summed_exactly(make, num_exponentials, order, size):
    sums, s = geometric(num_exponentials, 2 * order + 3, size)
    with jax.enable_x64(True):
        np.testing.assert_allclose(accelerate(make(order=order), jnp.asarray(sums)), s, rtol=1e-9)


def test_pade_of_order_one_is_aitken_for_numbers():
    s = np.array([1.0, 1.4, 1.55, 1.62])
    aitken = s[3] - (s[3] - s[2]) ** 2 / (s[3] - 2 * s[2] + s[1])
    np.testing.assert_allclose(accelerate(pade(order=1), jnp.asarray(s, jnp.float32)), aitken, rtol=1e-5)


@pytest.mark.parametrize("make", [vector_rho, topological_rho], ids=lambda make: make.__name__)
def test_rational_sequences_are_extrapolated_exactly(make):
    n = np.arange(9.0)
    with jax.enable_x64(True):
        sums = jnp.asarray((3 * n**2 + n - 1) / (n**2 + 4))
        np.testing.assert_allclose(accelerate(make(order=2), sums), 3, rtol=1e-9)


@pytest.mark.parametrize(
    ("make", "order", "terms", "limit", "error"),
    [
        # A power of 1/n: ρ and d^(2) are made for it, exponentials are not.
        (vector_rho, 4, lambda n: 1 / (n + 1) ** 2, math.pi**2 / 6, 1e-6),
        (topological_rho, 4, lambda n: 1 / (n + 1) ** 2, math.pi**2 / 6, 1e-6),
        (levin_d2, 4, lambda n: 1 / (n + 1) ** 2, math.pi**2 / 6, 1e-6),
        # Levin's t sums alternating and geometric series (and no logarithmic ones: Smith & Ford 1982).
        (levin_t, 4, lambda n: (-1) ** n / (n + 1), math.log(2), 1e-8),
        (levin_t, 1, lambda n: 0.9**n, 10, 1e-9),
        # Terms with a recurrence of order two, where Levin's t has an error of 0.1.
        (levin_d2, 8, lambda n: np.cos(n + 1) / (n + 1), -math.log(2 * math.sin(0.5)), 1e-5),
    ],
)
def test_scalar_series(make, order, terms, limit, error):
    with jax.enable_x64(True):
        sums = jnp.asarray(np.cumsum(terms(np.arange(2 * order + 2.0))))
        np.testing.assert_allclose(accelerate(make(order=order), sums), limit, rtol=error)


# --- breakdown --------------------------------------------------------------------------------------------------------

# One order and one size from here on: most of the time goes into compiling.
ORDER, SIZE = 2, 3
COUNT = 2 * ORDER + 3
vectors = st.lists(st.integers(-2, 2), min_size=SIZE, max_size=SIZE)


@st.composite
def degenerate_sums(draw):
    """Sums of small integers, full of coincidences, some of them repeated or constant from somewhere on."""
    sums = np.array(draw(st.lists(vectors, min_size=COUNT, max_size=COUNT)), np.float32)
    if draw(st.booleans()):
        sums[draw(st.integers(0, COUNT - 1)) :] = sums[draw(st.integers(0, COUNT - 1))]
    if draw(st.booleans()):
        i = draw(st.integers(1, COUNT - 1))
        sums[i] = sums[i - 1]
    return sums * np.float32(draw(st.sampled_from([1, 1e-30, 1e30, 1e-38])))


@every_accelerator
@cases(60)
@given(sums=degenerate_sums(), y=vectors)
def test_breakdown_gives_the_last_good_value(make, sums, y):
    accelerator = make(order=ORDER)
    terms, sums = (x[-accelerator.num_sums :] for x in (np.diff(sums, axis=0), sums))
    limit = run(accelerator, terms, sums, np.array(y, np.float32), start=1)
    assert np.all(np.isfinite(limit))
    if np.all(sums == sums[-1]):
        np.testing.assert_array_equal(limit, sums[-1])


@every_accelerator
def test_constant_sequences(make):
    for value, scale in itertools.product(([0, 0, 0], [1, -2, 3]), (1, 1e-30, 1e30)):
        sums = np.tile(np.array(value, np.float32) * np.float32(scale), (COUNT, 1))
        np.testing.assert_array_equal(accelerate(make(order=ORDER), sums), sums[-1])


@every_accelerator
def test_converged_series(make):
    """Terms far below the rounding error of the sums, as in the tail of any series, must do no harm."""
    accelerator = make(order=ORDER)
    terms = 0.3 ** np.arange(40)[:, None] * [1, -2, 3]
    terms, sums = (x.astype(np.float32)[-accelerator.num_sums :] for x in (terms, np.cumsum(terms, axis=0)))
    np.testing.assert_allclose(run(accelerator, terms, sums, terms[0], start=30), sums[-1], rtol=1e-6)


def test_breakdown_keeps_the_columns_before_it():
    # One exponential is summed by column 2; were column 3 not void, column 8 would be 0/0.
    sums, s = geometric(1, 9, 1)
    with jax.enable_x64(True):
        halves = jnp.asarray(2 - 0.5 ** np.arange(9))
        np.testing.assert_array_equal(accelerate(shanks(order=4), halves), 2)
        np.testing.assert_allclose(accelerate(shanks(order=4), jnp.asarray(sums)), s, rtol=1e-12)


@every_accelerator
def test_a_last_sum_that_is_not_finite_is_returned(make):
    sums = jnp.cumsum(0.5 ** jnp.arange(1.0 * COUNT))[:, None] * jnp.ones(SIZE)
    for bad in (jnp.nan, jnp.inf):
        np.testing.assert_array_equal(accelerate(make(order=ORDER), sums.at[-1, 0].set(bad))[0], bad)
        np.testing.assert_array_equal(accelerate(make(order=ORDER), sums.at[-3, 0].set(bad)), sums[-1])


# --- invariances ------------------------------------------------------------------------------------------------------


def float32_series(num_sums, shape=(), seed=0, extra=3):
    """Terms, sums and gradient of a diagonal series, for as many independent vectors as `shape` says."""
    rng = np.random.default_rng(seed)
    g, z = rng.standard_normal((*shape, SIZE)), rng.uniform(0.05, 0.9, (*shape, SIZE))
    k = np.arange(num_sums + extra)
    c = np.array([math.comb(2 * i, i) / 4**i for i in k])
    terms = np.einsum("k,...ik->k...i", c, z[..., None] ** k) * g
    return [jnp.asarray(x, jnp.float32) for x in (terms[extra:], np.cumsum(terms, axis=0)[extra:], g)]


@every_accelerator
@cases(15)
@given(exponent=st.integers(-80, 80), seed=st.integers(0, 100))
def test_scale_equivariance(make, exponent, seed):
    """Powers of two scale without rounding, so the limit does so too, far beyond where ‖s‖² under- or overflows."""
    accelerator = make(order=ORDER)
    terms, sums, y = float32_series(accelerator.num_sums, seed=seed)
    scale = jnp.float32(2.0**exponent)
    expected = scale * run(accelerator, terms, sums, y, start=3)
    np.testing.assert_allclose(run(accelerator, scale * terms, scale * sums, y, start=3), expected, rtol=1e-6)
    np.testing.assert_allclose(run(accelerator, scale * terms, scale * sums, scale * y, start=3), expected, rtol=1e-6)


@every_accelerator
@cases(15)
@given(shift=st.lists(st.integers(-8, 8), min_size=SIZE, max_size=SIZE), seed=st.integers(0, 100))
def test_translation_equivariance(make, shift, seed):
    accelerator = make(order=ORDER)
    with jax.enable_x64(True):
        terms, sums, y = (np.asarray(x, float) for x in float32_series(accelerator.num_sums, seed=seed))
        shift = np.array(shift, float)
        expected = run(accelerator, terms, sums, y, start=3) + shift
        np.testing.assert_allclose(run(accelerator, terms, sums + shift, y, start=3), expected, rtol=1e-6, atol=1e-6)


@every_accelerator
def test_a_pytree_is_one_vector(make):
    accelerator = make(order=ORDER)
    terms, sums, y = float32_series(accelerator.num_sums)

    def split(x):
        return {"w": x[..., None, :2], "b": (x[..., 2], x[..., :0])}

    limit = run(accelerator, split(terms), split(sums), split(y), start=3)
    expected = split(run(accelerator, terms, sums, y, start=3))
    assert jax.tree.structure(limit) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4), limit, expected)


@every_accelerator
def test_jit_and_vmap(make):
    accelerator = make(order=ORDER)
    terms, sums, y = float32_series(accelerator.num_sums, shape=(3,))

    def limit(terms, sums, y):
        state = accelerator.init(y, 3)

        def push(i, state):
            return accelerator.push(state, terms[i], sums[i])

        return accelerator.limit(jax.lax.fori_loop(0, accelerator.num_sums, push, state))

    batched = jax.jit(jax.vmap(limit, in_axes=(1, 1, 0)))(terms, sums, y)
    for i in range(3):
        expected = run(accelerator, terms[:, i], sums[:, i], y[i], start=3)
        np.testing.assert_allclose(batched[i], expected, rtol=1e-3)
    with jax.disable_jit():
        np.testing.assert_allclose(limit(terms[:, 0], sums[:, 0], y[0]), batched[0], rtol=1e-3)


# --- the interface ----------------------------------------------------------------------------------------------------


@every_accelerator
def test_dtypes_are_kept(make):
    dtypes = {"narrow": jnp.bfloat16, "single": jnp.float32, "double": jnp.float64}
    accelerator = make(order=ORDER)
    with jax.enable_x64(True):
        parts = float32_series(accelerator.num_sums)
        terms, sums, y = ({name: x.astype(dtype) for name, dtype in dtypes.items()} for x in parts)
        limit = run(accelerator, terms, sums, y, start=3)
    assert {name: x.dtype for name, x in limit.items()} == dtypes
    assert all(np.all(np.isfinite(np.asarray(x, float))) for x in limit.values())


@every_accelerator
def test_explicit_sharding_is_kept(make):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    accelerator = make(order=ORDER)
    terms, sums, y = float32_series(accelerator.num_sums)
    expected = run(accelerator, terms, sums, y, start=3)
    with jax.set_mesh(mesh):
        place = functools.partial(jax.sharding.NamedSharding, mesh)
        stacked = place(jax.P(None, "x"))
        terms, sums, y = (jax.device_put(x, s) for x, s in ((terms, stacked), (sums, stacked), (y, place(jax.P("x")))))
        limit = run(accelerator, terms, sums, y, start=3)
    assert jax.typeof(limit).sharding.spec == jax.P("x")
    np.testing.assert_allclose(limit, expected, rtol=1e-4)


@every_accelerator
def test_memory(make):
    vector = jax.ShapeDtypeStruct((10_000,), jnp.float32)
    for order in range(9):
        accelerator = make(order=order)
        state = jax.eval_shape(lambda y: accelerator.init(y, 0), vector)
        assert sum(leaf.size for leaf in jax.tree.leaves(state)) / vector.size < 2 * order + 4

    push = jax.jit(accelerator.push, donate_argnums=0).lower(state, vector, vector).compile()
    assert push.memory_analysis().temp_size_in_bytes / (4 * vector.size) < 8


@every_accelerator
def test_programs_do_not_grow_with_the_order(make):
    def program(order):
        accelerator = make(order=order)
        state = accelerator.init(jnp.zeros(3), 0)
        return str(jax.make_jaxpr(accelerator.push)(state, jnp.zeros(3), jnp.zeros(3))).count("\n")

    assert program(1) == program(20)


@every_accelerator
def test_order_zero_is_the_last_sum(make):
    accelerator = make(order=0)
    assert accelerator.num_sums == 1
    np.testing.assert_array_equal(accelerate(accelerator, [jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])]), [3, 5])


@every_accelerator
def test_accelerators_are_values(make):
    accelerator = make(order=3)
    assert accelerator == make(3)
    assert hash(accelerator) == hash(make(3))
    assert accelerator != make(order=2)
    assert len({other(order=3) for other in ALL}) == len(ALL)
    assert repr(accelerator) == f"{make.__name__}(order=3)"
    assert accelerator.order == 3
    assert accelerator.num_sums == (8 if make is levin_d2 else 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        accelerator.order = 4


@every_accelerator
@pytest.mark.parametrize("order", [-1, 1.0, True, "2", None])
def test_bad_orders(make, order):
    with pytest.raises(ValueError, match=f"order must be a whole number ≥ 0, got {order!r}"):
        make(order=order)


@every_accelerator
@pytest.mark.parametrize("start", [-1, 0.0, False])
def test_bad_starts(make, start):
    with pytest.raises(ValueError, match=f"start must be a whole number ≥ 0, got {start!r}"):
        make(order=1).init(jnp.zeros(2), start)


@every_accelerator
def test_accelerate(make):
    accelerator = make(order=ORDER)
    terms, sums, y = float32_series(COUNT, extra=0)
    start = COUNT - accelerator.num_sums
    limit = accelerate(accelerator, sums, y)
    np.testing.assert_allclose(limit, run(accelerator, terms[start:], sums[start:], y, start), rtol=1e-2)
    np.testing.assert_array_equal(accelerate(accelerator, list(sums), gradient=y), limit)
    # s_0 is the gradient here.
    np.testing.assert_array_equal(accelerate(accelerator, sums), limit)
    with pytest.raises(ValueError, match=f"at least {accelerator.num_sums} for .*order=2.*, got 4"):
        accelerate(accelerator, sums[:4])


def test_accelerate_pytrees():
    sums = 2 - 0.5 ** jnp.arange(3.0)
    assert accelerate(shanks(order=1), {"a": sums, "b": 3 * sums}) == {"a": 2, "b": 6}


def test_accelerate_widens_narrow_sums():
    limit = accelerate(shanks(order=1), jnp.array([1, 1.5, 1.75], jnp.bfloat16))
    assert limit.dtype == jnp.float32
    assert limit == 2
    assert accelerate(shanks(order=1), [4, 6, 7]) == 8
