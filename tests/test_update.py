"""What `update` does with its arguments: formulae, refusals, frozen parameters, bad input, non-finite numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params

import saddlefree as sf

H = jnp.diag(jnp.array([4.0, -1.0]))


def loss(x):
    return 0.5 * x @ H @ x


def test_update_is_minus_eta_d_plus_mu_previous():
    tx = sf.saddle_free_newton(0.5, momentum=0.9, damping=1.0, solver=sf.exact(), weight_decay=0.1)
    x = jnp.array([1.0, 2.0])
    state = tx.init(x)
    first, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
    direction = np.array([4 / 5, -2 / 2])
    np.testing.assert_allclose(first, -0.5 * direction - 0.5 * 0.1 * np.array(x), rtol=1e-5)
    # The decay is no part of the momentum.
    second, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
    np.testing.assert_allclose(second, first + 0.9 * -0.5 * direction, rtol=1e-5)


def test_what_is_given_is_used():
    """`matvec`, `curvature_fn`, `grad` and `value` take the place of what would be evaluated."""
    x = jnp.array([1.0, 2.0])
    g = jax.grad(loss)(x)
    tx = sf.scale_by_saddle_free(sf.exact(), damping=0.0)
    update = lambda **extra: np.asarray(tx.update(g, tx.init(x), x, **extra)[0])  # noqa: E731
    np.testing.assert_allclose(update(value_fn=loss, unknown=1), [1.0, -2.0], rtol=1e-5)
    np.testing.assert_allclose(update(value_fn=loss, matvec=lambda v: 2 * v), [2.0, -1.0], rtol=1e-5)
    np.testing.assert_allclose(update(value_fn=loss, curvature_fn=lambda x: 2 * jnp.sum(x**2)), [1.0, -0.5], rtol=1e-5)

    tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=sf.adaptive_plane())
    _, state = tx.update(g, tx.init(x), x, value_fn=loss, value=jnp.array(5.0))
    assert sf.diagnostics(state)["value"] == 5.0
    # The model's gradient is `grad`, the right-hand side of the solve what arrives as updates.
    updates, _ = tx.update(0.1 * g, tx.init(x), x, value_fn=loss, grad=g)
    plain, _ = tx.update(g, tx.init(x), x, value_fn=loss)
    np.testing.assert_allclose(updates, plain, rtol=1e-4)


def test_gauss_newton_through_matvec():
    params, (x, y) = network_params(jax.random.key(0)), network_batch(jax.random.key(1))
    from problems import predict

    value_fn = lambda p: network_loss(p, (x, y))  # noqa: E731
    tx = sf.adaptive_saddle_free_newton(sf.series(num_terms=5), initial_damping=0.1)

    @jax.jit
    def step(params, state):
        matvec = sf.gauss_newton(lambda p: predict(p, x), lambda p: 0.5 * jnp.mean((p - y) ** 2), params)
        updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn, matvec=matvec)
        return optax.apply_updates(params, updates), state

    state, before = tx.init(params), value_fn(params)
    for _ in range(5):
        params, state = step(params, state)
    assert value_fn(params) < 0.5 * before


def test_a_step_that_makes_the_loss_worse_is_refused():
    """λ rises until a step is good; parameters and momentum wait."""
    bumpy = lambda x: jnp.sum(jnp.sqrt(1 + x**2) + jnp.where(x > 1.5, 10.0, 0.0))  # noqa: E731
    rule = sf.levenberg_marquardt(1e-3, refusal=10.0, max_increase=0.1)
    tx = sf.adaptive_saddle_free_newton(sf.exact(), rule=rule)
    x = jnp.array([-1.4])
    state = tx.init(x)
    seen = []
    for _ in range(6):
        updates, state = tx.update(jax.grad(bumpy)(x), state, x, value_fn=bumpy)
        seen.append(float(updates[0]))
        x = optax.apply_updates(x, updates)
    figures = sf.diagnostics(state)
    assert seen[0] == 0.0
    assert figures["rejected_steps"] == sum(u == 0 for u in seen)
    assert 0 < figures["rejected_steps"] < 6
    assert jnp.abs(x[0]) < 1.4


MASK = {"w": False, "n": True, "b": {"c": True, "d": False}}


@pytest.mark.parametrize("frozen", [MASK, lambda params: MASK, {"w": False, "n": True, "b": True}])
def test_frozen_parameters(frozen):
    """They stay, may be integers, and the others move as if those were constants."""
    params = {"w": jnp.array([1.0, 2.0]), "n": jnp.array(3), "b": {"c": jnp.array(2.0), "d": jnp.array(-1.0)}}

    def value_fn(p):
        w, n, (c, d) = p["w"], p["n"].astype(jnp.float32), p["b"].values()
        return jnp.sum(w**2) * c - d**2 * n + w[0] * d

    solver = sf.exact()
    mask = frozen(params) if callable(frozen) else frozen
    d_frozen = mask["b"] is True
    free = {"w": params["w"]} if d_frozen else {"w": params["w"], "d": params["b"]["d"]}

    def rest(p):
        return value_fn(
            {"w": p["w"], "n": params["n"], "b": {"c": params["b"]["c"], "d": p.get("d", params["b"]["d"])}}
        )

    grads = jax.grad(value_fn, allow_int=True)(params)
    for make in (
        lambda **kw: sf.saddle_free_newton(damping=0.1, solver=solver, weight_decay=0.1, **kw),
        lambda **kw: sf.adaptive_saddle_free_newton(solver, **kw),
        lambda **kw: sf.scale_by_saddle_free(solver, **kw),
    ):
        tx = make(frozen=frozen)
        updates, _ = tx.update(grads, tx.init(params), params, value_fn=value_fn)
        assert updates["n"] == 0
        assert updates["n"].dtype == params["n"].dtype
        assert updates["b"]["c"] == 0.0
        expected, _ = make().update(jax.grad(rest)(free), make().init(free), free, value_fn=rest)
        np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5)
        np.testing.assert_allclose(updates["b"]["d"], expected.get("d", 0.0), rtol=1e-5)


@pytest.mark.parametrize("solver", [sf.exact(average=0.9), sf.series(num_terms=3, scale=sf.lower_bound())])
@pytest.mark.parametrize("where", ["loss", "gradient", "product"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_non_finite_numbers_never_reach_the_parameters(solver, where, adaptive):
    tx = (
        sf.adaptive_saddle_free_newton(solver, initial_damping=0.1)
        if adaptive
        else sf.saddle_free_newton(momentum=0.5, damping=0.1, solver=solver)
    )
    x = jnp.array([1.0, 2.0])
    _, state = tx.update(jax.grad(loss)(x), tx.init(x), x, value_fn=loss)
    g = jax.grad(loss)(x)
    bad = {
        "loss": {"value": jnp.array(jnp.nan), "value_fn": lambda x: loss(x) * jnp.nan},
        "gradient": {"value_fn": loss},
        "product": {"value_fn": loss, "matvec": lambda v: v * jnp.inf},
    }[where]
    updates, after = jax.jit(lambda g, state, x: tx.update(g, state, x, **bad))(
        jnp.array([jnp.nan, 1.0]) if where == "gradient" else g, state, x
    )
    np.testing.assert_array_equal(updates, 0)
    jax.tree.map(np.testing.assert_array_equal, (after.previous, after.solver), (state.previous, state.solver))
    assert after.nonfinite_steps == 1
    assert after.rejected_steps == state.rejected_steps
    if adaptive:

        def damping(rule):
            """Where batches seem to differ it is the verdict's λ that counts, otherwise the search's."""
            if not hasattr(rule, "judged"):
                return rule
            return rule.judged.damping if after.rule.noisy else rule.searched

        assert damping(after.rule) > damping(state.rule)
    # And it goes on.
    updates, after = tx.update(g, after, x, value_fn=loss)
    assert jnp.all(jnp.isfinite(updates))
    assert jnp.any(updates != 0)
    assert sf.diagnostics(after)["nonfinite_steps"] == 1


def test_a_loss_beyond_float32_is_infinite():
    """A Python number that the dtype does not reach, as a diverging loss of the caller's own may be."""
    tx, x = sf.saddle_free_newton(solver=sf.exact()), jnp.array([1.0, 2.0])
    for value in (3.4028235677973366e38, 1e300):
        updates, state = tx.update(jax.grad(loss)(x), tx.init(x), x, value=value, value_fn=loss)
        assert not np.any(updates)
        assert state.nonfinite_steps == 1


def test_scale_by_skips_non_finite_numbers_too():
    tx = sf.scale_by_saddle_free(sf.series(num_terms=2, scale=sf.lower_bound()), 0.1)
    x = jnp.array([1.0, 2.0])
    updates, state = tx.update(jnp.array([jnp.inf, 0.0]), tx.init(x), x, value_fn=loss)
    np.testing.assert_array_equal(updates, 0)
    assert sf.diagnostics(state)["nonfinite_steps"] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.saddle_free_newton(-0.1), r"learning_rate must be a number in \[0, inf\), got -0.1"),
        (lambda: sf.saddle_free_newton(momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
        (lambda: sf.saddle_free_newton(momentum=-0.1), r"momentum must be a number in \[0, 1\), got -0.1"),
        (lambda: sf.saddle_free_newton(damping=-1e-3), r"damping must be a number in \[0, inf\), got -0.001"),
        (lambda: sf.saddle_free_newton(weight_decay=-1), r"weight_decay must be a number in \[0, inf\), got -1"),
        (lambda: sf.saddle_free_newton(max_increase=-1), r"max_increase must be a number in \[0, inf\), got -1"),
        (lambda: sf.saddle_free_newton(float("inf")), r"learning_rate must be a number in \[0, inf\), got inf"),
        (lambda: sf.adaptive_saddle_free_newton(initial_damping=-1.0), r"initial_damping must be .* got -1.0"),
        (lambda: sf.scale_by_saddle_free(damping=-1.0), r"damping must be a number in \[0, inf\), got -1.0"),
        (lambda: sf.saddle_free_newton().init(jnp.ones(2, jnp.int32)), "must be real floating point, got int32"),
        (lambda: sf.saddle_free_newton().init({"z": jnp.ones(2, jnp.complex64)}), r"params\['z'\] must be real"),
        (lambda: _update(), "value_fn must be given"),
        (lambda: _update(value_fn=lambda x: x), r"value_fn must return one real number.*shape \(2,\)"),
        (
            lambda: _update(adaptive=True, matvec=lambda v: v),
            "value_fn must be given to update.. where the rule measures the loss",
        ),
        (lambda: _update(params=None, value_fn=loss), "params must be given"),
        (lambda: sf.diagnostics(optax.adam(1e-3).init(jnp.ones(2))), "must hold a saddlefree transformation's state"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _update(adaptive=False, **kwargs):
    x = jnp.ones(2)
    tx = sf.adaptive_saddle_free_newton(sf.exact()) if adaptive else sf.saddle_free_newton(solver=sf.exact())
    params = kwargs.pop("params", x)
    return tx.update(x, tx.init(x), params, **kwargs)


def test_traced_hyperparameters_pass_the_checks():
    def train(learning_rate, momentum, damping):
        tx = sf.saddle_free_newton(learning_rate, momentum, damping, solver=sf.exact())
        x = jnp.array([1.0, 2.0])
        return tx.update(jax.grad(loss)(x), tx.init(x), x, value_fn=loss)[0]

    grid = jnp.array([0.1, 0.2, 0.3])
    together = jax.jit(jax.vmap(train))(grid, grid, grid)
    np.testing.assert_allclose(together[1], train(0.2, 0.2, 0.2), rtol=1e-5)
