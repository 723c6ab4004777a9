"""What Optax asks of every optimiser: jit, scan, vmap, chaining, donation, dtypes, meshes, no recompilation, and
hyperparameters that are injected after an eager `init`.

Each solver and each rule occurs in one pair at least; `make fuzz` runs all pairs.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from problems import FUZZ, network_batch, network_loss, network_params, network_residuals, require

import saddlefree as sf

SOLVERS = {
    "series": sf.series(num_terms=7, acceleration=sf.sablonniere(order=2), scale=sf.lower_bound(initial=10.0)),
    "lanczos": sf.lanczos(num_products=5),
    "memory": sf.lanczos(num_products=4, memory=2),
    "recycled": sf.lanczos(num_products=3, memory=1, recycle=6),
    "two-pass": sf.lanczos(num_products=4, two_pass=True),
    "low-rank": sf.low_rank(rank=3, refresh_every=3, averaging=None),
    "over-adam": sf.low_rank(rank=3, refresh_every=3, base=optax.adam(1e-2)),
    "blockwise": sf.blockwise(sf.lanczos(num_products=3)),
    "exact": sf.exact(average=0.5, threshold=1e-3, replacement=1e-2),
    "quasi-newton": sf.quasi_newton(),
    "pairs": sf.quasi_newton(memory=2),
    "rows": sf.row_space(chunk_size=6),
    "sparing": sf.lanczos(num_products=3, memory=1, recycle=4, refresh_every=2),
    "spring": sf.row_space(momentum=0.3),
}
RULES = {
    "fixed": sf.fixed_rate(0.3, None, damping=0.5),
    "momentum": sf.fixed_rate(0.3, 0.2, damping=0.5, max_increase=0.5),
    "marquardt": sf.levenberg_marquardt(0.5),
    "plane": sf.adaptive_plane(0.1),
    "search": sf.damping_search(0.1),
    "line": sf.line_search(),
    "undamped": sf.fixed_rate(0.3, None, damping=0.0),
    "longest": sf.damping_search(0.1, share=0.5, lengths=3),
    "next-batch": sf.next_batch(0.5),
    "noise-aware": sf.noise_aware(sf.damping_search(0.1)),
}


def works(solver, rule):
    try:
        sf.adaptive_saddle_free_newton(solver, rule=rule)
    except ValueError:
        return False
    return True


ALL = [(s, r) for s, r in itertools.product(SOLVERS, RULES) if works(SOLVERS[s], RULES[r])]
# Each solver with one rule, each rule with at least one solver: these programs take long to compile.
FEW = [
    ("series", "plane"),
    ("lanczos", "momentum"),
    ("memory", "fixed"),
    ("recycled", "search"),
    ("two-pass", "marquardt"),
    ("low-rank", "next-batch"),
    ("over-adam", "fixed"),
    ("blockwise", "fixed"),
    ("exact", "plane"),
    ("quasi-newton", "line"),
    ("pairs", "undamped"),
    ("rows", "longest"),
    ("sparing", "noise-aware"),
    ("spring", "fixed"),
]
PAIRS = ALL if FUZZ else FEW
pairs = pytest.mark.parametrize(("solver", "rule"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
BATCH = network_batch(jax.random.key(1))
STEPS = 4


@functools.cache
def make(solver, rule, **options):
    return sf.adaptive_saddle_free_newton(SOLVERS[solver], rule=RULES[rule], **options)


def with_penalty(fit, params):
    """Residuals, and some for the parameters: without these H is all but singular, and λ = 0 magnifies rounding."""
    return fit, jax.tree.map(lambda p: 0.7 * p, params)


def half_square(residuals):
    return 0.5 * sum(jnp.sum(r**2) for r in jax.tree.leaves(residuals))


def step(tx, batch, carry, _=None):
    params, state = carry

    def residual_fn(params):
        return with_penalty(network_residuals(params, batch), params)

    def value_fn(params):
        return half_square(residual_fn(params))

    value, grads = jax.value_and_grad(value_fn)(params)
    updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn, residual_fn=residual_fn)
    return (optax.apply_updates(params, updates), state), value


@functools.partial(jax.jit, static_argnums=0)
def train(tx, params, batch):
    state = tx.init(params)
    (params, state), values = jax.lax.scan(functools.partial(step, tx, batch), (params, state), None, length=STEPS)
    return params, state, values


def assert_close(actual, expected, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


def test_every_solver_and_rule_occurs():
    assert {s for s, _ in FEW} == set(SOLVERS)
    assert {r for _, r in FEW} == set(RULES)
    assert set(FEW) <= set(ALL)


@pairs
def test_transformations(solver, rule):
    """`scan` under `jit` equals a jitted loop, in wrappers, with donated state; `vmap` equals one by one."""
    tx = make(solver, rule)
    params = network_params(jax.random.key(0))
    trained, state, values = train(tx, params, BATCH)
    assert values[-1] < values[0]
    assert all(jnp.all(a != b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(trained), strict=True))

    wrapped = optax.apply_if_finite(optax.chain(tx, optax.scale(1.0)), max_consecutive_errors=3)
    one = jax.jit(functools.partial(step, wrapped, BATCH), donate_argnums=0)
    carry = jax.tree.map(jnp.array, params), wrapped.init(params)
    structure = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), carry)
    for _ in range(STEPS):
        old = carry
        carry, _ = one(carry)
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), carry) == structure
        assert all(x.is_deleted() for x in jax.tree.leaves(old[0]))
    assert_close(carry[0], trained)
    assert one._cache_size() == 1
    assert sf.diagnostics(carry[1]).keys() == sf.diagnostics(state).keys()

    several = jax.vmap(network_params)(jax.random.split(jax.random.key(0), 3))
    together = jax.jit(jax.vmap(lambda p: train(tx, p, BATCH)[0]))(several)
    last, _, _ = train(tx, jax.tree.map(lambda x: x[2], several), BATCH)
    assert_close(jax.tree.map(lambda x: x[2], together), last)

    figures = sf.diagnostics(state)
    assert figures["steps"] == STEPS
    assert (figures["products"] > 0) == (SOLVERS[solver].answers > sf.Answers.ZERO)
    assert figures["nonfinite_steps"] == 0


@pytest.mark.parametrize("momentum", [None, 0.0, 0.3])
def test_hyperparameters_are_injected_after_an_eager_init(momentum):
    """The state's structure does not depend on whether a number is known to Python or traced."""
    numbers = {"learning_rate": 0.3, "damping": 0.5} | ({} if momentum is None else {"momentum": momentum})
    params, solver = network_params(jax.random.key(0)), SOLVERS["lanczos"]
    plain, _, _ = train(sf.saddle_free_newton(**numbers, solver=solver), params, BATCH)
    tx = optax.inject_hyperparams(sf.saddle_free_newton, static_args=("solver",))(**numbers, solver=solver)
    one, carry = jax.jit(functools.partial(step, tx, BATCH)), (params, tx.init(params))
    for _ in range(STEPS):
        carry, _ = one(carry)
    assert_close(carry[0], plain)
    assert carry[1].hyperparams["damping"] == np.float32(0.5)
    assert one._cache_size() == 1


DTYPES = ["bfloat16", "float16", "mixed", "float64"]


@pytest.mark.parametrize(
    ("dtype", "solver", "rule"),
    [(dtype, *pair) for i, dtype in enumerate(DTYPES) for pair in (PAIRS if PAIRS is ALL else FEW[i % 2 :: 2])],
)
def test_dtypes(dtype, solver, rule):
    """Parameters and state keep their dtypes, bases and sums are float32 at least, and the loss falls."""
    require("float32" if dtype in ("mixed", "float64") else dtype)
    with jax.enable_x64(dtype == "float64"):
        narrow = jnp.dtype("bfloat16" if dtype == "mixed" else dtype)
        params = network_params(jax.random.key(0), dtype=narrow)
        batch = network_batch(jax.random.key(1), dtype=jnp.dtype("float64" if dtype == "float64" else "float32"))
        if dtype == "mixed":
            params[0]["w"] = params[0]["w"].astype(jnp.float32)

        def residual_fn(params):
            wide = jax.tree.map(lambda p: p.astype(batch[0].dtype), params)
            return with_penalty(network_residuals(wide, batch), wide)

        def value_fn(params):
            return half_square(residual_fn(params))

        tx = make(solver, rule)

        @jax.jit
        def update(state, params):
            value, grads = jax.value_and_grad(value_fn)(params)
            return value, tx.update(grads, state, params, value_fn=value_fn, residual_fn=residual_fn)

        state, end, values = tx.init(params), params, []
        dtypes = lambda t: jax.tree.map(lambda x: x.dtype, t)  # noqa: E731
        for _ in range(2):
            value, (updates, new_state) = update(state, end)
            values.append(value)
            assert dtypes(updates) == dtypes(params)
            assert dtypes(new_state) == dtypes(state)
            end, state = optax.apply_updates(end, updates), new_state
        assert value_fn(end) < values[0]
        floating = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
        assert floating == {jnp.dtype("float64" if dtype == "float64" else "float32")}


def test_a_step_that_overflows_the_parameters_dtype_is_not_taken():
    """Finite in float32, infinite in float16."""
    require("float16")
    x = jnp.array([1.0, 1.0], jnp.float16)
    tx = sf.saddle_free_newton(1e6, damping=1e-3, solver=sf.exact())
    updates, state = tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x**2))
    np.testing.assert_array_equal(updates, 0)
    assert sf.diagnostics(state)["nonfinite_steps"] == 1


@pytest.mark.parametrize("params", [{}, {"a": None}, {"a": jnp.ones(2)}], ids=["empty", "none", "frozen"])
@pairs
def test_nothing_to_train(params, solver, rule):
    tx = make(solver, rule, frozen=True if jax.tree.leaves(params) else None)
    state = tx.init(params)
    updates, state = tx.update(params, state, params, value_fn=lambda p: jnp.zeros(()))
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert not any(jnp.any(u) for u in jax.tree.leaves(updates))
    assert sf.diagnostics(state)["steps"] == 1


SHARDED = [(kind, *pair) for i, pair in enumerate(PAIRS) for kind in [(AxisType.Explicit, AxisType.Auto)[i % 2]]]


@pytest.mark.parametrize(("axis_type", "solver", "rule"), SHARDED)
def test_sharding(axis_type, solver, rule):
    """Eight devices, batch and parameters sharded: the answer of one device, and parameters stay sharded."""
    params = network_params(jax.random.key(0))
    expected, _, _ = train(make(solver, rule), params, BATCH)
    tx = make(solver, rule, packed=False)

    explicit = axis_type == AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    spec = [
        {"w": PartitionSpec(None, "model"), "b": PartitionSpec("model")},
        {"w": PartitionSpec("model", None), "b": PartitionSpec()},
    ]
    sharded = jax.device_put(params, jax.tree.map(lambda s: NamedSharding(mesh, s), spec))
    x, y = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))

    def residual_fn(params):
        hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
        # Summing over a sharded axis, explicitly sharded code must say where the result goes.
        placed = {"out_sharding": PartitionSpec("data")} if explicit else {}
        fit = (jnp.dot(hidden, params[1]["w"], **placed) + params[1]["b"] - y) / len(y) ** 0.5
        return with_penalty(fit, params)

    def value_fn(params):
        return half_square(residual_fn(params))

    @jax.jit
    def one(params, state):
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn, residual_fn=residual_fn)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = tx.init(sharded)
        for _ in range(STEPS):
            sharded, state = one(sharded, state)
    assert_close(sharded, expected)
    if explicit:
        assert [layer["w"].sharding.spec for layer in sharded] == [layer["w"] for layer in spec]
    with pytest.raises(ValueError, match="packed must be False for parameters that are sharded over devices"):
        make(solver, rule).init(sharded)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_replicated_parameters_and_sharded_microbatches(axis_type):
    """The ordinary data-parallel case: parameters on every device, packed; each microbatch lies on all devices."""
    params = network_params(jax.random.key(0))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    x, y = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    replicated = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    tx = make("recycled", "search")
    expected, _, _ = train(tx, params, BATCH)

    @jax.jit
    def one(params, state, x, y):
        value_fn = sf.microbatch_mean(
            lambda p, batch: half_square(with_penalty(network_residuals(p, batch), p)), (x, y), 8
        )
        updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = tx.init(replicated)
        for _ in range(STEPS):
            replicated, state = one(replicated, state, x, y)
    assert_close(replicated, expected)
    if axis_type == AxisType.Explicit:
        with jax.set_mesh(mesh), pytest.raises(ValueError, match="size must be a multiple of the 8 devices"):
            jax.jit(lambda x, y: sf.microbatch_mean(network_loss, (x, y), 4)(params))(x, y)
