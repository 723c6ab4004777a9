"""Odd arguments of constructors and of `update`: an error that names the argument, or a finite answer."""

import inspect
import numbers

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd import SOAK, VALUES, Thing, cases

import saddlefree as sf
from saddlefree.acceleration import Accelerator
from saddlefree.scale import Scale

REQUIRED = {"order": 2, "num_terms": 5, "solver": sf.exact(), "value": 1.0}
ACCELERATORS = ("shanks", "sablonniere", "levin_t", "pade", "vector_rho", "topological_rho", "levin_d2")
SCALES = ("lower_bound", "lanczos_bound", "power_iteration", "trace_bound", "fixed_scale")
SOLVERS = ("series", "lanczos", "low_rank", "blockwise", "exact", "quasi_newton", "row_space")
RULES = (
    "adaptive_plane",
    "damping_search",
    "fixed_rate",
    "levenberg_marquardt",
    "line_search",
    "next_batch",
    "noise_aware",
)
TRANSFORMATIONS = ("saddle_free_newton", "adaptive_saddle_free_newton", "scale_by_saddle_free", "next_batch_rate")
CONSTRUCTORS = (*ACCELERATORS, *SCALES, *SOLVERS, *RULES, "escape", *TRANSFORMATIONS)
RUNS = 150 if SOAK else 5
PARAMS = {"w": jnp.array([[0.5, -1.0], [2.0, 0.1]]), "b": jnp.array(0.3)}


def residual_fn(params):
    return jnp.tanh(params["w"]).ravel() - 0.2, params["b"] ** 2 - 0.5


def loss(params):
    return 0.5 * sum(jnp.sum(r**2) for r in jax.tree.leaves(residual_fn(params)))


def test_every_constructor_is_tried():
    """Whatever is public is a constructor, or one of these, which take functions or are tested elsewhere."""
    others = {"Answers", "Minimum", "Proposal", "Result", "Rule", "Solution", "Solver", "Status", "accelerate"}
    others |= {"as_value_fn", "averaged_params", "check_value_fn", "diagnostics", "gauss_newton", "hessian"}
    others |= {"least_squares", "microbatch_map", "microbatch_mean", "minimise", "pointwise", "solve"}
    others |= {"spectral_density", "training"}
    assert set(CONSTRUCTORS) | others == set(sf.__all__)


def refused(error, names):
    """Whether an error is ours: of the right kind, with the name of one of the arguments in it."""
    return isinstance(error, ValueError | TypeError) and any(name in str(error) for name in names)


def transformation(part):
    """An optimiser with this part in it."""
    if isinstance(part, Accelerator):
        part = sf.series(num_terms=part.num_sums, acceleration=part)
    if isinstance(part, Scale):
        part = sf.series(num_terms=3, scale=part)
    if isinstance(part, sf.Solver):
        return sf.adaptive_saddle_free_newton(part)
    if isinstance(part, sf.Rule):
        return sf.adaptive_saddle_free_newton(sf.exact(), rule=part)
    if isinstance(part, sf.escape):
        return sf.saddle_free_newton(solver=sf.exact(), escape=part)
    return part


def step(tx, params):
    value, grads = jax.value_and_grad(loss)(params)
    state = tx.init(params)
    return tx.update(grads, state, params, value=value, value_fn=loss, residual_fn=residual_fn)


def all_finite(tree):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating))


def is_large(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(value) > 100


executed = 0


@given(st.data())
@cases(60, 8000)
def test_constructors(count, data):
    global executed
    name = data.draw(st.sampled_from(CONSTRUCTORS))
    make = getattr(sf, name)
    known = list(inspect.signature(make).parameters)
    odd = {key: data.draw(VALUES) for key in data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=2))}
    given = {"base": optax.adam(1.0)} if name == "next_batch_rate" else {}
    given |= {key: value for key, value in REQUIRED.items() if key in known} | odd
    count("odd arguments of constructors")
    try:
        tx = transformation(make(**given))
        if any(map(is_large, odd.values())):
            return  # accepted; what it asks for may take all memory or time
        updates = jax.eval_shape(lambda params: step(tx, params)[0], PARAMS)
    except Exception as error:
        if not refused(error, odd):
            raise AssertionError(f"{name}({given})") from error
        count("of them refused by name")
        return
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)
    if executed < RUNS:
        executed += 1
        count("of them run, with a finite answer")
        assert all_finite(jax.jit(lambda params: step(tx, params)[0])(PARAMS)), (name, given)


X = jnp.array([0.5, -1.5])
TREES = st.sampled_from(
    [
        None,
        X,
        jnp.ones(3),
        jnp.ones((2, 1)),
        jnp.ones(2, jnp.int32),
        jnp.ones(2, jnp.complex64),
        np.ones(2),
        {"a": X},
        [X],
        (X, X),
        [0.5, -1.5],
        0.5,
        "x",
        Thing(),
        {},
        optax.MaskedNode(),
        jnp.array([jnp.nan, 1.0]),
        jnp.array([jnp.inf, 1.0]),
    ]
)
GOOD = lambda x: jnp.sum(x**2)  # noqa: E731
FUNCTIONS = st.sampled_from(
    [
        None,
        GOOD,
        "x",
        3,
        Thing(),
        lambda x: None,
        lambda x: "x",
        lambda x: x,
        lambda x: (GOOD(x), x),
        lambda x: {"a": GOOD(x)},
        lambda x: jnp.sum(x**2).astype(jnp.complex64),
        lambda x: jnp.int32(3),
        lambda x: 3,
        lambda x: 0.5,
        lambda x: GOOD(x) * jnp.nan,
        lambda x: GOOD(x) / 0.0,
        lambda x: jnp.ones(3),
        lambda x: [x],
        lambda x: (x, x),
        lambda x: 2 * x,
        lambda x: jnp.zeros_like(x),
    ]
)
ARGUMENTS = {
    "updates": TREES,
    "params": TREES,
    "state": st.sampled_from([None, (), {}, optax.adam(1e-3).init(X), sf.saddle_free_newton().init(jnp.ones(3)), 3]),
    "value": VALUES,
    "grad": TREES,
    "value_fn": FUNCTIONS,
    "curvature_fn": FUNCTIONS,
    "matvec": FUNCTIONS,
    "residual_fn": FUNCTIONS,
    "refresh": VALUES,
    "unknown": VALUES,
}
OPTIMISERS = {
    "fixed": sf.saddle_free_newton(solver=sf.exact()),
    "lanczos": sf.saddle_free_newton(solver=sf.lanczos(num_products=2)),
    "adaptive": sf.adaptive_saddle_free_newton(sf.exact()),
    "direction": sf.scale_by_saddle_free(sf.exact()),
    "refreshed": sf.saddle_free_newton(solver=sf.low_rank(rank=1)),
    "rows": sf.adaptive_saddle_free_newton(sf.row_space()),
    "quasi-newton": sf.adaptive_saddle_free_newton(sf.quasi_newton()),
}


@given(st.data())
@cases(40, 2000)
def test_update(count, data):
    """Traced: an error that names an argument, or updates like the parameters."""
    tx = OPTIMISERS[data.draw(st.sampled_from(sorted(OPTIMISERS)))]
    keys = data.draw(st.lists(st.sampled_from(sorted(ARGUMENTS)), min_size=1, max_size=2))
    odd = {key: data.draw(ARGUMENTS[key]) for key in keys}
    if {"updates", "params"} <= odd.keys():
        # Of the same shapes they are a problem of their own, for which the functions below are not made.
        hypothesis.assume(jax.tree.map(np.shape, odd["updates"]) != jax.tree.map(np.shape, odd["params"]))
    base = {"updates": 2 * X, "state": tx.init(X), "params": X, "value_fn": GOOD, "residual_fn": lambda x: 2**0.5 * x}
    given = base | odd
    count("odd arguments of update")
    try:
        updates = jax.eval_shape(lambda: tx.update(**given)[0])
    except Exception as error:
        # What is missing is asked for by its own name, and what does not fit the parameters is named, not they.
        names = {*odd, "value_fn", "residual_fn", *(["updates"] if "params" in odd else [])}
        if not refused(error, names):
            raise AssertionError(f"{odd}") from error
        count("of them refused by name")
        return
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, given["params"])


PAIRS = {
    "series": (sf.series(num_terms=5, acceleration=sf.sablonniere(order=2)), sf.levenberg_marquardt()),
    "lanczos": (sf.lanczos(num_products=3, memory=1, recycle=4), None),
    "low-rank": (sf.low_rank(rank=2, refresh_every=2, base=optax.adam(1e-2)), sf.fixed_rate(0.3)),
    "exact": (sf.exact(), sf.adaptive_plane()),
    "quasi-newton": (sf.quasi_newton(), None),
    "pairs": (sf.quasi_newton(memory=2), None),
    "rows": (sf.row_space(momentum=0.5), sf.fixed_rate(0.5, damping=0.1)),
}
BOUNDS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-38, 1e-45, 3e38, -3e38, jnp.inf, -jnp.inf, jnp.nan])
VECTOR = st.tuples(BOUNDS, BOUNDS, BOUNDS)


@pytest.mark.parametrize("name", PAIRS)
def test_odd_numbers_at_run_time(name, count):
    """Compiled once; gradient, parameters, loss and curvature of any size, also none: what comes out is finite."""
    solver, rule = PAIRS[name]
    tx = sf.adaptive_saddle_free_newton(solver, rule=rule)
    start = jnp.array([0.5, -1.0, 2.0])

    def residuals(params, scale):
        return scale * jnp.stack([params[0] - 1, params[1] * params[2], params[2] ** 2 - 1])

    def value_fn(params, scale):
        return 0.5 * jnp.sum(residuals(params, scale) ** 2)

    @jax.jit
    def update(grads, state, params, value, scale):
        fns = {"value_fn": lambda p: value_fn(p, scale), "residual_fn": lambda p: residuals(p, scale)}
        return tx.update(grads, state, params, value=value, **fns)

    good = jax.jit(jax.value_and_grad(value_fn))
    one = jnp.float32(1)
    number = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    initial = tx.init(start)

    @given(st.lists(st.tuples(VECTOR, VECTOR, BOUNDS, BOUNDS), min_size=1, max_size=3))
    @cases(15, 1000)
    def check(inputs):
        state = initial
        for grads, params, value, scale in inputs:
            count("updates with odd numbers")
            updates, state = update(number(grads), state, number(params), number(value), number(scale))
            assert all_finite(updates)
        params = start
        for _ in range(8):
            value, grads = good(params, one)
            updates, state = update(grads, state, params, value, one)
            assert all_finite(updates)
            params = params + updates
        assert all_finite(params)

    check()
