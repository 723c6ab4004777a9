"""What every solver must do in every optimiser: one test body, all combinations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from problems import network_batch, network_loss, network_params

import saddlefree as sf

SOLVERS = {
    "series": sf.series(num_terms=7, acceleration=sf.sablonniere(order=2), scale=sf.lower_bound(initial=10.0)),
    "lanczos": sf.lanczos(num_products=5, memory=2),
    "recycled": sf.lanczos(num_products=3, memory=1, recycle=6),
    "low-rank": sf.low_rank(rank=3, refresh_every=3, metric="adam", averaging=0.5, epsilon=1e-2),
    "blockwise": sf.blockwise(sf.lanczos(num_products=3, memory=1)),
    "exact": sf.exact(average=0.5, threshold=1e-3, replacement=1e-2),
}


def numbers(solver):
    """Learning rate, momentum and damping; beside an averaged gradient there is no momentum."""
    return (0.05, 0.0, 1.0) if isinstance(solver, sf.low_rank) else (0.5, 0.3, 0.1)


OPTIMISERS = {
    "fixed": lambda solver: sf.saddle_free_newton(*numbers(solver), solver),
    "adaptive": lambda solver: sf.adaptive_saddle_free_newton(solver, initial_damping=0.1),
}
# Each solver in one of them: these programs take long to compile.
PAIRS = {
    f"{name}-{kind}": (SOLVERS[name], OPTIMISERS[kind])
    for kind, names in {
        "adaptive": ("series", "recycled", "blockwise", "exact"),
        "fixed": ("lanczos", "low-rank"),
    }.items()
    for name in names
}
pairs = pytest.mark.parametrize(("solver", "make"), PAIRS.values(), ids=PAIRS)
BATCH = network_batch(jax.random.key(1))
STEPS = 4


def step(tx, batch, carry, _=None):
    params, state = carry

    def value_fn(params):
        return network_loss(params, batch)

    value, grads = jax.value_and_grad(value_fn)(params)
    updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
    return (optax.apply_updates(params, updates), state), value


@functools.partial(jax.jit, static_argnums=0)
def train(tx, params, batch):
    state = tx.init(params)
    (params, state), values = jax.lax.scan(functools.partial(step, tx, batch), (params, state), None, length=STEPS)
    return params, state, values


def assert_close(actual, expected, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


@pairs
def test_transformations(solver, make):
    """`scan` under `jit` equals a jitted loop; `vmap` equals one by one; `chain` and wrappers change nothing."""
    tx = make(solver)
    params = network_params(jax.random.key(0))
    trained, state, values = train(tx, params, BATCH)
    assert values[-1] < values[0]
    assert all(jnp.all(a != b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(trained), strict=True))

    one = jax.jit(functools.partial(step, tx, BATCH))
    carry = params, tx.init(params)
    structure = jax.tree.map(lambda x: (x.shape, x.dtype), carry)
    for _ in range(STEPS):
        carry, _ = one(carry)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), carry) == structure
    assert_close(carry[0], trained)
    assert one._cache_size() == 1

    eight = jax.vmap(network_params)(jax.random.split(jax.random.key(0), 8))
    together = jax.jit(jax.vmap(lambda p: train(tx, p, BATCH)[0]))(eight)
    third, _, _ = train(tx, jax.tree.map(lambda x: x[3], eight), BATCH)
    assert_close(jax.tree.map(lambda x: x[3], together), third)

    for wrapped in (optax.chain(tx, optax.scale(1.0)), optax.apply_if_finite(tx, max_consecutive_errors=3)):
        same, wrapped_state, _ = train(wrapped, params, BATCH)
        assert_close(same, trained)
        assert sf.diagnostics(wrapped_state).keys() == sf.diagnostics(state).keys()
    figures = sf.diagnostics(state)
    assert figures["steps"] == STEPS
    assert figures["products"] > 0
    assert figures["nonfinite_steps"] == 0


def test_inject_hyperparams():
    solver = SOLVERS["low-rank"]
    params = network_params(jax.random.key(0))
    plain, _, _ = train(sf.saddle_free_newton(*numbers(solver), solver), params, BATCH)
    rate, momentum, damping = numbers(solver)
    inject = optax.inject_hyperparams(sf.saddle_free_newton, static_args=("solver",))
    tx = inject(learning_rate=optax.constant_schedule(rate), momentum=momentum, damping=damping, solver=solver)
    injected, state, _ = train(tx, params, BATCH)
    assert_close(injected, plain)
    assert state.hyperparams["damping"] == np.float32(damping)
    assert sf.diagnostics(state)["steps"] == STEPS

    adaptive, _, _ = train(sf.adaptive_saddle_free_newton(solver, 0.1), params, BATCH)
    inject = optax.inject_hyperparams(sf.adaptive_saddle_free_newton, static_args=("solver", "max_increase"))
    injected, _, _ = train(inject(initial_damping=0.1, solver=solver), params, BATCH)
    assert_close(injected, adaptive)


DTYPES = {f"{name}-adaptive-bfloat16": (SOLVERS[name], OPTIMISERS["adaptive"], "bfloat16") for name in SOLVERS}
DTYPES |= {f"{name}-fixed-mixed": (SOLVERS[name], OPTIMISERS["fixed"], "mixed") for name in SOLVERS}
# The others run in float64 in their own tests.
DTYPES |= {
    f"{name}-adaptive-float64": (SOLVERS[name], OPTIMISERS["adaptive"], "float64") for name in ("series", "low-rank")
}


@pytest.mark.parametrize(("solver", "make", "dtype"), DTYPES.values(), ids=DTYPES)
def test_dtypes(solver, make, dtype):
    """Parameters keep their dtypes, with 64 bit on or off; the state's do not change either."""
    with jax.enable_x64(dtype == "float64"):
        if dtype == "mixed":
            params = network_params(jax.random.key(0))
            params[0]["w"] = params[0]["w"].astype(jnp.bfloat16)

            def loss(params, batch):
                params = [{**params[0], "w": params[0]["w"].astype(jnp.float32)}, params[1]]
                return network_loss(params, batch)
        else:
            params = network_params(jax.random.key(0), dtype=jnp.dtype(dtype))
            loss = network_loss
        batch = network_batch(jax.random.key(1), dtype=jnp.dtype("float32" if dtype == "mixed" else dtype))
        tx = make(solver)
        state = tx.init(params)
        value_fn = lambda params: loss(params, batch)  # noqa: E731
        updates, new_state = jax.jit(lambda grads, state, params: tx.update(grads, state, params, value_fn=value_fn))(
            jax.grad(value_fn)(params), state, params
        )
        dtypes = lambda t: jax.tree.map(lambda x: x.dtype, t)  # noqa: E731
        assert dtypes(updates) == dtypes(params)
        assert dtypes(new_state) == dtypes(state)
        before, after = value_fn(params), value_fn(optax.apply_updates(params, updates))
        # Three digits of loss may not show a gain, and a step may be refused on them.
        assert after < before or (dtype == "bfloat16" and after == before)
        widest = jnp.float64 if dtype == "float64" else jnp.float32
        floating = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
        assert floating == {jnp.dtype(widest)}


def test_donation():
    tx = OPTIMISERS["adaptive"](sf.series(num_terms=3, scale=sf.trace_bound(), unroll=True))
    params = network_params(jax.random.key(0))
    expected, _, _ = train(tx, params, BATCH)
    one = jax.jit(functools.partial(step, tx, BATCH), donate_argnums=0)
    carry = params, tx.init(params)
    for _ in range(STEPS):
        old = carry
        carry, _ = one(carry)
    assert_close(carry[0], expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(old[0]))


SHARDED = [(AxisType.Explicit, *pair) for name, pair in PAIRS.items() if name != "lanczos-fixed"]
SHARDED += [(AxisType.Auto, *PAIRS["series-adaptive"])]


@pytest.mark.parametrize(("axis_type", "solver", "make"), SHARDED)
def test_sharding(axis_type, solver, make):
    """Eight devices, batch sharded and parameters sharded: the answer of one device, and parameters stay sharded."""
    params = network_params(jax.random.key(0), (3, 8, 1))
    tx = make(solver)
    expected, _, _ = train(tx, params, BATCH)

    explicit = axis_type == AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    spec = [
        {"w": PartitionSpec(None, "model"), "b": PartitionSpec("model")},
        {"w": PartitionSpec("model", None), "b": PartitionSpec()},
    ]
    sharded = jax.device_put(params, jax.tree.map(lambda s: NamedSharding(mesh, s), spec))
    x, y = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))

    def value_fn(params):
        hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
        # Summing over a sharded axis, explicitly sharded code must say where the result goes.
        placed = {"out_sharding": PartitionSpec("data")} if explicit else {}
        outputs = jnp.dot(hidden, params[1]["w"], **placed) + params[1]["b"]
        return 0.5 * jnp.mean((outputs - y) ** 2)

    @jax.jit
    def one(params, state):
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = tx.init(sharded)
        for _ in range(STEPS):
            sharded, state = one(sharded, state)
    assert_close(sharded, expected)
    if explicit:
        assert [layer["w"].sharding.spec for layer in sharded] == [layer["w"] for layer in spec]
