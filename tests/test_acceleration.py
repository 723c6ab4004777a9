"""Series accelerators against naïve tables and determinants in 50 digits, and against sequences they must solve."""

import functools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from saddlefree.acceleration import (
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


# --- oracles: vectors are object arrays of mpmath numbers --------------------------------------------------------------


def table_limit(sums, order, factor, y=None):
    """e_0^(2N) of the whole table, by Samelson inverses or, given y, in the second topological form."""
    e = {(m, -1): 0 * s for m, s in enumerate([*sums, sums[0]])} | {(m, 0): s for m, s in enumerate(sums)}
    for c in range(1, 2 * order + 1):
        for m in range(len(sums) - c):
            delta = e[m + 1, c - 1] - e[m, c - 1]
            if y is None:
                companion = delta
            else:
                companion = y if c % 2 else e[m + 2, c - 2] - e[m + 1, c - 2]
            e[m, c] = e[m + 1, c - 2] + factor(c) * companion / (delta @ companion)
    return e[0, 2 * order]


def determinant_limit(sums, remainders):
    """Σ_l w_l s_l where Σ_l w_l = 1 and Σ_l w_l remainders[i][l] = 0: w_l are the cofactors of a row of ones."""
    count = len(sums)
    cofactors = []
    for l in range(count):
        minor = mpmath.matrix([[row[j] for j in range(count) if j != l] for row in remainders])
        cofactors.append((-1) ** l * mpmath.det(minor))
    return sum(w * s for w, s in zip(cofactors, sums, strict=True)) / sum(cofactors)


def levin_t_limit(moments, sums, order, start):
    """The model s_l = s + μ_l Σ_{i<k} β_i (l + 1)^{−i}, with k = 2N."""
    powers = [[mpmath.mpf(start + l + 1) ** -i for l in range(len(sums))] for i in range(2 * order)]
    return determinant_limit(sums, [[mu * p for mu, p in zip(moments, row, strict=True)] for row in powers])


def levin_d2_limit(moments, sums, order, start):
    """The model s_l = s + Σ_{k=1,2} R_l^k (∇^{k−1}μ)_l Σ_{i<N} β_ki R_l^{−i}, with R_l = l + 1; the first sum is unused."""
    R = [mpmath.mpf(start + l + 2) for l in range(len(sums) - 1)]
    differences = {1: moments[1:], 2: [b - a for a, b in zip(moments[:-1], moments[1:], strict=True)]}
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


# --- the series of the paper --------------------------------------------------------------------------------------------


@functools.cache
def problem(seed, size):
    """H symmetric with 0.1 ≤ |λ| ≤ 1 of both signs, g, and V = 1.01 max λ², in float32 so that both precisions agree."""
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
def exact_series(seed, size, num_terms):
    H, g, V = problem(seed, size)
    return series(to_mpmath(H), to_mpmath(g), mpmath.mpf(float(V)), num_terms)


@functools.partial(jax.jit, static_argnames=("accelerator", "start"))
def scanned(accelerator, start, terms, sums, y):
    def push(state, pair):
        return accelerator.push(state, *pair), None

    return accelerator.limit(jax.lax.scan(push, accelerator.init(y, start), (terms, sums))[0])


def run(accelerator, terms, sums, y):
    """The limit from the trailing terms and sums of a whole stacked series, as the solver computes it."""
    start = len(sums) - accelerator.num_sums
    return scanned(accelerator, start, terms[start:], sums[start:], y)


def rounding_error(make, order, extra, dtype, seed, size):
    """‖limit − oracle‖/‖oracle‖, when everything from the terms on is computed in `dtype`."""
    accelerator = make(order=order)
    num_terms = accelerator.num_sums + extra
    with jax.enable_x64(dtype == np.float64):
        H, g, V = (x.astype(dtype) for x in problem(seed, size))
        terms, sums = series(H, g, V, num_terms)
        limit = np.asarray(run(accelerator, jnp.stack(terms), jnp.stack(sums), jnp.asarray(g)))
    expected = oracle(make, *exact_series(seed, size, num_terms), order, to_mpmath(g)).astype(float)
    assert limit.dtype == dtype
    return np.linalg.norm(limit - expected) / np.linalg.norm(expected)
