"""Other libraries around an update: Flax, Equinox, Haiku, Optax's wrappers; and common mistakes."""

import itertools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import saddlefree as sf
from saddlefree.solvers.blockwise import layer

X = jnp.linspace(-1.0, 1.0, 8)[:, None]
Y = jnp.sin(3.0 * X)
LANCZOS = sf.lanczos(3)


def newton(**kwargs):
    return sf.saddle_free_newton(**{"learning_rate": 0.5, "damping": 0.1, "solver": LANCZOS, **kwargs})


def model_loss(model):
    return jnp.mean((model(X) - Y) ** 2)


# Plain parameters with the shape of Haiku's: modules by path, then names.
PARAMS = {
    "mlp/~/linear_0": {"w": jnp.array([[0.5, -1.0, 0.2]]), "b": jnp.array([0.1, 0.0, -0.3])},
    "mlp/~/linear_1": {"w": jnp.array([[0.3], [-0.7], [1.0]]), "b": jnp.array([0.2])},
}


def loss(params):
    first, second = (params[f"mlp/~/linear_{i}"] for i in (0, 1))
    return jnp.mean((jnp.tanh(X @ first["w"] + first["b"]) @ second["w"] + second["b"] - Y) ** 2)


def run(tx, steps=4, params=PARAMS, loss=loss):
    """Losses before each step, the last state, and the parameters; the update is compiled once."""

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=sf.as_value_fn(loss, params))
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert step._cache_size() == 1
    return losses, state, params


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(1, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.norm(self.hidden(x + 1))))


def train_nnx(model, tx, steps=4, wrt=nnx.Param):
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer):
        value_fn = sf.as_value_fn(model_loss, model)
        value, grads = nnx.value_and_grad(model_loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads, value=value, value_fn=value_fn)
        return value

    return [float(step(model, optimizer)) for _ in range(steps)]


@pytest.mark.parametrize(
    "tx",
    [newton(momentum=0.2), newton(momentum=0.2, packed=False), sf.adaptive_saddle_free_newton(LANCZOS)],
    ids=["packed", "unpacked", "adaptive"],
)
def test_nnx_optimizer(tx):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(1, 3, rngs=rngs), nnx.tanh, nnx.Linear(3, 1, rngs=rngs))
    losses = train_nnx(model, tx)
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_array_less(model_loss(model), losses[-1])


def test_nnx_batch_norm():
    """The model trains, and the running average moves by the gradient's evaluation alone."""
    model = Network(nnx.Rngs(0))
    expected = 0.01 * jnp.mean(model.hidden(X + 1), axis=0)
    train_nnx(model, newton(), steps=1)
    np.testing.assert_allclose(model.norm.mean[...], expected, rtol=1e-5)
    losses = train_nnx(model, newton())
    assert losses[-1] < losses[0]


def test_nnx_some_of_the_variables():
    """`wrt=` chooses what the optimiser sees; the rest is taken from the model."""
    model = Network(nnx.Rngs(0))
    kernel = model.hidden.kernel[...]
    losses = train_nnx(model, newton(), wrt=nnx.All(nnx.Param, nnx.PathContains("out")))
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(model.hidden.kernel[...], kernel)


def test_nnx_masked():
    model = Network(nnx.Rngs(0))
    kernel = model.hidden.kernel[...]

    def labels(params):
        return jax.tree.map_with_path(lambda path, _: "newton" if "out" in str(path) else "none", params)

    losses = train_nnx(model, optax.multi_transform({"newton": newton(), "none": optax.set_to_zero()}, labels))
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(model.hidden.kernel[...], kernel)


def test_nnx_dropout_before_and_after_the_gradient():
    """A value_fn holds the random counts of the model when it was made: before the gradient, it has the same mask."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(1, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 1, rngs=rngs))
    before = sf.as_value_fn(model_loss, model)
    grads, params = nnx.grad(model_loss)(model), nnx.state(model, nnx.Param)
    sf.check_value_fn(before, params, grads)
    with pytest.raises(ValueError, match="grads must be the gradient of value_fn"):
        sf.check_value_fn(sf.as_value_fn(model_loss, model), params, grads)


@pytest.mark.parametrize("packed", [True, False])
def test_equinox(packed):
    model = eqx.nn.MLP(1, 1, 3, 1, activation=jnp.tanh, key=jax.random.key(0))
    tx = newton(momentum=0.2, packed=packed)

    def loss(model):
        return model_loss(jax.vmap(model))

    @eqx.filter_jit
    def step(model, state):
        value, grads = eqx.filter_value_and_grad(loss)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params, value_fn=sf.as_value_fn(loss, model))
        return eqx.apply_updates(model, updates), state, value

    state, losses = tx.init(eqx.filter(model, eqx.is_inexact_array)), []
    for _ in range(4):
        model, state, value = step(model, state)
        losses.append(float(value))
    assert losses[-1] < 0.6 * losses[0]


def test_haiku():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([3, 1], activation=jnp.tanh)(x)))
    params = network.init(jax.random.key(0), X)
    layers = {layer(path) for path, _ in jax.tree.leaves_with_path(params)}
    assert layers == {("mlp/~/linear_0",), ("mlp/~/linear_1",)}
    losses, _, _ = run(newton(), steps=8, params=params, loss=lambda p: jnp.mean((network.apply(p, X) - Y) ** 2))
    assert losses[-1] < 0.6 * losses[0]


def test_haiku_with_state():
    network = hk.transform_with_state(lambda x: hk.Linear(1)(hk.BatchNorm(True, True, 0.9)(x, is_training=True)))

    def loss_fn(params, model_state, batch, key):
        with jax.numpy_dtype_promotion("standard"):  # which Haiku's own batch norm needs
            predictions, model_state = network.apply(params, model_state, key, batch)
        return jnp.mean((predictions - Y) ** 2), (model_state, None)

    params, model_state = network.init(jax.random.key(0), X)
    tx = newton()
    step, state, losses = sf.training.make_step(loss_fn, tx), sf.training.init(params, tx, model_state=model_state), []
    for _ in range(4):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert int(state.model_state["batch_norm/~/mean_ema"]["counter"]) == 4


def test_flax_train_state():
    tx = newton()
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

    @jax.jit
    def step(state):
        grads = jax.grad(loss)(state.params)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, value_fn=loss)
        return state.replace(
            step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state
        )

    for _ in range(4):
        state = step(state)
    _, _, expected = run(tx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, expected)
    assert state.step == 4
    with pytest.raises(ValueError, match=r"flax's TrainState.apply_gradients cannot pass it, call state.tx.update"):
        state.apply_gradients(grads=PARAMS)


def part(params):
    """The loss of the last layer alone, for an oracle."""
    return loss({**PARAMS, "mlp/~/linear_1": params})


@pytest.mark.parametrize("wrapper", ["multi_transform", "masked"])
def test_optax_masks(wrapper):
    """Inside a mask the direction is that of the visible parameters' own problem, the others held fixed."""
    newton_alone = newton(damping=0.5, solver=sf.exact())
    if wrapper == "masked":
        mask = {"mlp/~/linear_0": False, "mlp/~/linear_1": True}
        others = optax.masked(optax.set_to_zero(), {name: not seen for name, seen in mask.items()})
        tx = optax.chain(optax.masked(newton_alone, mask), others)
    else:
        labels = {"mlp/~/linear_0": "none", "mlp/~/linear_1": "newton"}
        tx = optax.multi_transform({"newton": newton_alone, "none": optax.set_to_zero()}, labels)
    _, _, params = run(tx, steps=2)
    _, _, expected = run(newton_alone, steps=2, params=PARAMS["mlp/~/linear_1"], loss=part)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), params["mlp/~/linear_1"], expected)
    jax.tree.map(np.testing.assert_array_equal, params["mlp/~/linear_0"], PARAMS["mlp/~/linear_0"])


@pytest.mark.parametrize("momentum", [0.0, None])
def test_inject_hyperparams(momentum):
    """`init` outside of jit and `update` inside agree on the state, and the schedule is that of the plain optimiser."""
    rate = optax.linear_schedule(1.0, 0.5, 2)
    inject = optax.inject_hyperparams(sf.saddle_free_newton)
    tx = inject(learning_rate=rate, momentum=momentum, damping=0.1, solver=LANCZOS)
    losses, state, _ = run(tx)
    np.testing.assert_allclose(losses, run(newton(learning_rate=rate, momentum=momentum))[0], rtol=1e-4)
    assert state.hyperparams["learning_rate"] == 0.5
    assert sf.diagnostics(state)["learning_rate"] == 0.5


def test_inject_hyperparams_of_the_others():
    adaptive = optax.inject_hyperparams(sf.adaptive_saddle_free_newton)(LANCZOS, initial_damping=0.1)
    expected = run(sf.adaptive_saddle_free_newton(LANCZOS, initial_damping=0.1))[0]
    np.testing.assert_allclose(run(adaptive)[0], expected, rtol=1e-4)
    scaled = optax.inject_hyperparams(sf.scale_by_saddle_free)(LANCZOS, damping=0.1)
    np.testing.assert_allclose(run(optax.chain(scaled, optax.scale(-0.5)))[0], run(newton())[0], rtol=1e-4)


def test_schedule_free():
    tx = optax.contrib.schedule_free(newton(), learning_rate=0.5)
    losses, state, params = run(tx, steps=6)
    assert losses[-1] < losses[0]
    assert loss(optax.contrib.schedule_free_eval_params(state, params)) < losses[0]


def test_apply_if_finite():
    np.testing.assert_allclose(run(optax.apply_if_finite(newton(), 3))[0], run(newton())[0], rtol=1e-4)


def test_multi_steps_sees_the_last_mini_batch_and_microbatches_see_all():
    """f = ½ h x², h = 1 and then 3: the mean gradient is 2x, the last curvature 3, the mean curvature 2."""
    exact = sf.saddle_free_newton(damping=0.0, solver=sf.exact())
    tx = optax.MultiSteps(exact, every_k_schedule=2)
    x = jnp.array([3.0])
    state = tx.init(x)

    @jax.jit
    def step(x, state, h):
        value_fn = lambda x: 0.5 * h * jnp.sum(x**2)  # noqa: E731
        updates, state = tx.update(jax.grad(value_fn)(x), state, x, value_fn=value_fn)
        return optax.apply_updates(x, updates), state

    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        for h in (1.0, 3.0):
            x, state = step(x, state, jnp.array(h))
    np.testing.assert_allclose(x, [1.0], rtol=1e-5)

    def loss_fn(params, model_state, batch, key):
        return 0.5 * jnp.mean(batch) * jnp.sum(params**2), (model_state, None)

    step = sf.training.make_step(loss_fn, exact, microbatch_size=1)
    state, _ = step(sf.training.init(jnp.array([3.0]), exact), jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(state.params, [0.0], atol=1e-6)


SOLVERS = {
    "lanczos": LANCZOS,
    "recycled": sf.lanczos(3, memory=1, recycle=4),
    "low-rank": sf.low_rank(rank=2, base=optax.adam(1e-3)),
    "series": sf.series(num_terms=3),
    "blockwise": sf.blockwise(LANCZOS),
    "exact": sf.exact(average=0.9),
}


def transformations(solver, packed):
    yield newton(solver=solver, momentum=None if solver.has_momentum else 0.5, packed=packed)
    yield sf.adaptive_saddle_free_newton(solver, packed=packed)
    if not solver.uses_previous:
        yield sf.scale_by_saddle_free(solver, packed=packed)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_map_params(solver, packed):
    """What is shaped like the parameters is mapped, nothing else is, and the structure stays."""
    for tx in transformations(solver, packed):
        state = tx.init(PARAMS)
        marked = optax.tree.map_params(tx, lambda x, p: jnp.full_like(x, 7), state, PARAMS)
        assert jax.tree.map(jnp.shape, marked) == jax.tree.map(jnp.shape, state)
        assert (marked.count, marked.figures) == (state.count, state.figures)
        if not packed and state.previous:
            assert all(jnp.all(leaf == 7) for leaf in jax.tree.leaves(marked.previous))
    if isinstance(solver, sf.low_rank):
        moments = [moment for _, moment in optax.tree.get_all_with_path(marked.solver.base, "mu")]
        assert jax.tree.structure(moments[0]) == jax.tree.structure(PARAMS)
        assert all(jnp.all(leaf == 7) for leaf in jax.tree.leaves(moments))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_state_can_be_donated_right_after_init(solver, packed):
    """No buffer twice in it, and none of the parameters'."""
    for tx in transformations(solver, packed):
        leaves = [leaf for leaf in jax.tree.leaves((PARAMS, tx.init(PARAMS))) if leaf.size]
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_donation():
    tx = newton(momentum=0.5)
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, value_fn=loss), donate_argnums=1)
    state = tx.init(PARAMS)
    _, new = update(jax.grad(loss)(PARAMS), state, PARAMS)
    assert state.previous.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((PARAMS, new)))


def groups(tree):
    """Sets of leaf names that form a block."""
    found = {}
    for path, _ in jax.tree.leaves_with_path(tree):
        found.setdefault(layer(path), set()).add(jax.tree_util.keystr(path))
    return sorted(map(len, found.values()))


def test_groups_of_blockwise():
    """A layer's weights and biases are one block, in the trees of every library."""
    rngs = nnx.Rngs(0)
    state = nnx.state(Network(rngs), nnx.Param)
    assert groups(state) == groups(nnx.as_pure(state)) == [2, 2, 2]
    sequential = nnx.Sequential(nnx.Linear(1, 2, rngs=rngs), nnx.tanh, nnx.Linear(2, 1, rngs=rngs))
    assert groups(nnx.state(sequential, nnx.Param)) == [2, 2]
    assert groups(nnx.state(nnx.Linear(1, 2, rngs=rngs), nnx.Param)) == [2]
    mlp = eqx.nn.MLP(1, 1, 3, 2, key=jax.random.key(0))
    assert groups(eqx.filter(mlp, eqx.is_inexact_array)) == [2, 2, 2]
    assert groups(eqx.filter(mlp.layers[0], eqx.is_inexact_array)) == [2]
    assert groups(PARAMS) == [2, 2]
    assert groups({"dense/w": 1.0, "dense/b": 1.0, "head.w": 1.0, "head.b": 1.0, "w1": 1.0, "b1": 1.0}) == [2, 2, 2]


def update(value_fn=loss, params=PARAMS, state=None, tx=None):
    tx = newton() if tx is None else tx
    state = tx.init(params) if state is None else state
    return jax.jit(lambda p, s: tx.update(p, s, p, value_fn=value_fn))(params, state)


MLP = eqx.nn.MLP(1, 1, 3, 1, activation=jnp.tanh, key=jax.random.key(0))
MISTAKES = {
    "no value_fn": (lambda: update(None), ValueError, r"value_fn must be given to update\(\)"),
    "tuple": (lambda: update(lambda p: (loss(p), 1)), ValueError, r"got tuple; return the loss alone, as in lambda"),
    "state of others": (
        lambda: update(tx=newton(momentum=0.5), state=newton(momentum=0.5).init({"w": jnp.ones(3)})),
        ValueError,
        r"call tx.init\(params\) again",
    ),
    "damping of adaptive": (
        lambda: sf.adaptive_saddle_free_newton(damping=0.1),
        TypeError,
        r"has no argument 'damping': use initial_damping=",
    ),
    "infinite rate": (lambda: newton(learning_rate=float("inf")), ValueError, r"learning_rate must be .* got inf"),
    "equinox model": (lambda: newton().init(MLP), ValueError, r"params.activation must be .* eqx.filter\(model"),
    "equinox model in update": (
        lambda: newton().update(MLP, newton().init(jnp.ones(1)), MLP, value_fn=model_loss),
        ValueError,
        r"params.activation must be an array, got .* value_fn=sf.as_value_fn\(loss_fn, model\)",
    ),
    "arguments the wrong way round": (lambda: sf.as_value_fn(PARAMS, loss), ValueError, r"write as_value_fn\(loss_fn"),
    "another structure": (
        lambda: sf.as_value_fn(loss, PARAMS)({"w": jnp.ones(1)}),
        ValueError,
        "params must have the structure of the model given to as_value_fn",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_notes_name_as_value_fn():
    """A loss of the whole model that is handed a part of it fails by itself; a note says what to write."""
    model, tx = Network(nnx.Rngs(0)), newton()
    with pytest.raises(TypeError, match="'State' object is not callable") as error:
        nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, nnx.grad(model_loss)(model), value_fn=model_loss)
    assert "nnx.State" in error.value.__notes__[0]

    params = eqx.filter(MLP, eqx.is_inexact_array)
    with pytest.raises(TypeError) as equinox_error:
        update(lambda model: model_loss(jax.vmap(model)), params)
    masked = optax.masked(tx, {"mlp/~/linear_0": False, "mlp/~/linear_1": True})
    with pytest.raises(TypeError) as masked_error:
        update(tx=masked)
    assert "frozen=" in masked_error.value.__notes__[0]
    for found in (error, equinox_error, masked_error):
        assert "pass value_fn=sf.as_value_fn(loss_fn, model)" in found.value.__notes__[0]

    with pytest.raises(ZeroDivisionError) as other:
        update(lambda params: 1 / 0)
    assert not any("as_value_fn" in note for note in getattr(other.value, "__notes__", []))


def as_arrays(params):
    return jax.tree.map(jnp.asarray, params)


def test_python_numbers_as_parameters():
    params, tx = {"a": 1.0, "b": 2.0}, newton(solver=sf.exact())
    value_fn = lambda p: (p["a"] * p["b"] - 1) ** 2  # noqa: E731
    found = [tx.update(jax.grad(value_fn)(p), tx.init(p), p, value_fn=value_fn)[0] for p in (params, as_arrays(params))]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert value_fn(optax.apply_updates(as_arrays(params), found[0])) < 0.5


COUNTER = itertools.count()


def hidden_curvature(x):
    return jnp.sum(jax.lax.stop_gradient(x) * x)


def shorter(x):
    return jax.lax.while_loop(lambda s: s > 1, lambda s: s / 2, jnp.sum(x**2))


BAD = {
    "not callable": (0.5, "value_fn must be a function of the parameters"),
    "tuple": (lambda x: (jnp.sum(x), x), r"got tuple; return the loss alone, as in lambda params: loss_and_aux"),
    "vector": (lambda x: x**2, r"got shape \(3,\) and dtype float32; take a mean or a sum"),
    "complex": (lambda x: jnp.sum(x) * (1 + 1j), "got shape .* and dtype complex64; .* the real part"),
    "whole": (lambda x: jnp.sum(x > 0), r"must return one real number"),
    "not finite": (lambda x: jnp.log(jnp.sum(x) - 3.0), "finite at params, got -inf; look for"),
    "random": (lambda x: jnp.sum(x**2) * next(COUNTER), "the same loss in each call, got .* the key of the step"),
    "gradient": (lambda x: jnp.sqrt(jnp.sum((x - 1) ** 2)), "finite gradient at params"),
    "second derivative": (lambda x: jnp.sum(jnp.abs(x - 1) ** 1.5), "finite Hessian-vector product at params"),
    "loop": (shorter, "differentiable twice by JAX inside jit, and it failed with ValueError: Reverse-mode"),
    "no JAX": (lambda x: jnp.asarray(np.sum(np.asarray(x) ** 2)), "failed with TracerArrayConversionError"),
    "hidden": (hidden_curvature, "Hessian-vector product is 0 while the gradient changes"),
    "compiles": (lambda x: jax.jit(lambda y: jnp.sum(y**2))(x), r"it compiles jit\(<lambda>\); call jax.jit outside"),
}


@pytest.mark.parametrize(("value_fn", "message"), BAD.values(), ids=BAD)
def test_check_value_fn_finds(value_fn, message):
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match=message):
        sf.check_value_fn(value_fn, jnp.ones(3))


GOOD = {
    "quadratic": lambda x: jnp.sum(x**2),
    "jitted": jax.jit(lambda x: jnp.sum(x**2)),
    "linear": lambda x: jnp.sum(x),
    "constant": lambda x: jnp.sum(0.0 * x),
    "kinks": lambda x: jnp.sum(jnp.abs(x - jnp.array([1.002, 0.9999, 0.0]))),
    "microbatches": sf.microbatch_mean(lambda x, batch: jnp.mean((batch - x[0]) ** 2), jnp.arange(5.0), size=2),
    "python loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, s: s + jnp.sum(x**2), 0.0),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value_fn", GOOD.values(), ids=GOOD)
def test_check_value_fn_passes(value_fn, dtype):
    x = jnp.ones(3, dtype)
    with jax.numpy_dtype_promotion("standard"):
        assert sf.check_value_fn(value_fn, x, jax.grad(value_fn)(x)) is None


def test_check_value_fn_compares_gradients():
    grads = jax.grad(loss)(PARAMS)
    sf.check_value_fn(loss, PARAMS, jax.tree.map(lambda g: 1.005 * g, grads))
    other = jax.grad(lambda p: jnp.mean((loss(p) - 1) ** 2))(PARAMS)
    for wrong in (other, jax.tree.map(lambda g: 1.05 * g, grads), jax.tree.map(jnp.zeros_like, grads)):
        with pytest.raises(ValueError, match="are they gradients of another batch"):
            sf.check_value_fn(loss, PARAMS, wrong)
    with pytest.raises(ValueError, match=r"grads must have the shapes of params, \[\(3,\)\], got \[\(2,\)\]"):
        sf.check_value_fn(GOOD["quadratic"], jnp.ones(3), jnp.ones(2))


def test_check_value_fn_allows_for_rounding_at_a_minimum():
    """The gradient is nothing but rounding there, and neighbours of the parameters in floating point have others."""
    A = jax.random.normal(jax.random.key(0), (40, 3))
    minimum = jnp.array([30.0, -10.0, 20.0])
    value_fn = lambda x: jnp.mean((A @ (x - minimum)) ** 2)  # noqa: E731
    sf.check_value_fn(value_fn, minimum, jax.grad(value_fn)(jnp.nextafter(minimum, jnp.full(3, jnp.inf))))
    with pytest.raises(ValueError, match="are they gradients of another batch"):
        sf.check_value_fn(value_fn, minimum, jax.grad(value_fn)(1.01 * minimum))


def test_check_value_fn_holds_integers_fixed():
    params = {"x": jnp.ones(2), "n": jnp.array(3)}
    value_fn = lambda p: jnp.sum((p["x"] - p["n"].astype(jnp.float32)) ** 2)  # noqa: E731
    sf.check_value_fn(value_fn, params, jax.grad(value_fn, allow_int=True)(params))
    with pytest.raises(ValueError, match=r"params\['z'\] must be real floating point, got complex64"):
        sf.check_value_fn(lambda p: jnp.sum(jnp.abs(p["z"])), {"z": jnp.ones(2, jnp.complex64)})


def noisy(params, model_state, batch, key):
    return jnp.mean((batch - params) ** 2 * (1 + jax.random.normal(key, ())) ** 2), (model_state, None)


def test_make_step_checks_the_first_batch():
    calls = itertools.count()

    def changing(params, model_state, batch, key):
        return next(calls) * jnp.sum(params**2) / 7, (model_state, None)

    tx = newton()
    state = sf.training.init(jnp.zeros(2), tx)
    with pytest.raises(ValueError, match="value_fn must return the same loss"), jax.numpy_dtype_promotion("standard"):
        sf.training.make_step(changing, tx, check=True)(sf.training.init(jnp.ones(2), tx), jnp.ones((4, 2)))
    with pytest.raises(ValueError, match=r"finite at params"):
        sf.training.make_step(noisy, tx, check=True)(state, jnp.full((4, 2), jnp.nan))
    step = sf.training.make_step(noisy, tx, check=True)
    state, first = step(state, jnp.ones((4, 2)))
    state, last = step(state, jnp.full((4, 2), jnp.nan))  # the first batch alone is examined
    assert jnp.isfinite(first["loss"])
    assert not jnp.isfinite(last["loss"])


@pytest.mark.parametrize("result", [lambda loss: loss, lambda loss: (loss, None)], ids=["loss", "pair"])
def test_make_step_says_what_a_loss_returns(result):
    tx = newton()
    step = sf.training.make_step(lambda params, *_: result(jnp.sum(params**2)), tx)
    with pytest.raises(ValueError, match=r"loss_fn must return \(loss, \(new model_state, aux\)\)"):
        step(sf.training.init(jnp.ones(2), tx), None)


def test_make_step_warns_of_recompilation():
    tx = optax.sgd(0.1)
    step = sf.training.make_step(noisy, tx, donate=False)
    state = sf.training.init(jnp.zeros(2), tx)
    for size in range(1, 9):
        step(state, jnp.ones((size, 2)))
    with pytest.warns(RuntimeWarning, match="compiled more than 8 times: batches of changing shapes"):
        step(state, jnp.ones((9, 2)))
    step(state, jnp.ones((10, 2)))
