"""Blocks against the dense blocks of the Hessian."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params, saddle_free_direction

import saddlefree as sf

BATCH = network_batch(jax.random.key(1))


def value_fn(params):
    return network_loss(params, BATCH)


def dense_blocks(value_fn, params, names):
    """(|H_bb| + 0.1 I)⁻¹ g_b of each group, with the group of each leaf in `names`."""
    leaves, treedef = jax.tree.flatten(params)
    grads = jax.tree.leaves(jax.grad(value_fn)(params))
    directions = [None] * len(leaves)
    for name in dict.fromkeys(names):
        chosen = [i for i, n in enumerate(names) if n == name]
        sizes = np.cumsum([0] + [leaves[i].size for i in chosen])

        def block_value(vector, chosen=chosen, sizes=sizes):
            new = list(leaves)
            for i, start, end in zip(chosen, sizes[:-1], sizes[1:], strict=True):
                new[i] = vector[start:end].reshape(leaves[i].shape)
            return value_fn(jax.tree.unflatten(treedef, new))

        x = jnp.concatenate([leaves[i].reshape(-1) for i in chosen])
        g = np.concatenate([np.asarray(grads[i]).reshape(-1) for i in chosen])
        d = saddle_free_direction(np.asarray(jax.hessian(block_value)(x)), g, 0.1)
        for i, start, end in zip(chosen, sizes[:-1], sizes[1:], strict=True):
            directions[i] = d[start:end].reshape(leaves[i].shape)
    return jax.tree.unflatten(treedef, directions)


@pytest.mark.parametrize("solver", [sf.exact(), sf.lanczos(num_products=30)], ids=["exact", "lanczos"])
@pytest.mark.parametrize("given", ["value_fn", "matvec"])
@pytest.mark.parametrize(
    ("group", "names"),
    [
        (None, [0, 0, 1, 1]),  # by layer; leaves are b, w, b, w
        (lambda path: path[-1].key, ["b", "w", "b", "w"]),
        (lambda path: 0, [0, 0, 0, 0]),
    ],
    ids=["layer", "kind", "one"],
)
def test_each_block_is_solved_by_itself(x64, solver, given, group, names):
    params = network_params(jax.random.key(0), dtype=jnp.float64)
    batch = jax.tree.map(lambda x: x.astype(jnp.float64), BATCH)
    fn = lambda params: network_loss(params, batch)  # noqa: E731
    grads = jax.grad(fn)(params)
    blocks = sf.blockwise(solver) if group is None else sf.blockwise(solver, group)
    expected = dense_blocks(fn, params, names)
    if given == "matvec":
        actual = sf.solve(blocks, sf.hessian(fn, params), grads, 0.1).direction
    else:
        tx = sf.scale_by_saddle_free(blocks, damping=0.1)
        actual, _ = jax.jit(lambda p: tx.update(jax.grad(fn)(p), tx.init(p), p, value_fn=fn))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), actual, expected)


def test_a_moving_average_for_each_block(x64):
    """Two matrices with the same blocks' structure: the second answer is that of the average, bias corrected."""
    g = {"a": {"w": jnp.array([1.0, 2.0])}, "b": {"w": jnp.array([3.0])}}
    solver, state = sf.blockwise(sf.exact(average=0.5)), None
    for h in (1.0, 4.0):
        solution = sf.solve(solver, lambda v, h=h: jax.tree.map(lambda x: h * x, v), g, 0.0, state)
        state = solution.state
    np.testing.assert_allclose(solution.direction["b"]["w"], 3.0 / ((0.5 * 1.0 + 4.0) / 1.5))
    assert solution.stats["products"] == 3


def test_damping_search_on_all_blocks():
    """The subspaces of all blocks together: one λ for all, from trial losses."""
    params = network_params(jax.random.key(0))
    tx = sf.adaptive_saddle_free_newton(sf.blockwise(sf.lanczos(4, "sqrt", memory=1)))
    state, update = tx.init(params), jax.jit(lambda g, s, p: tx.update(g, s, p, value_fn=value_fn))
    values = [value_fn(params)]
    for _ in range(8):
        updates, state = update(jax.grad(value_fn)(params), state, params)
        params = optax.apply_updates(params, updates)
        values.append(value_fn(params))
    assert values[-1] < 0.3 * values[0]
    assert sf.diagnostics(state)["products"] == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.blockwise("lanczos"), "solver must be a solver such as lanczos"),
        (lambda: sf.saddle_free_newton(solver="lanczos"), "solver must be a solver such as lanczos"),
        (lambda: sf.adaptive_saddle_free_newton("lanczos"), "solver must be a solver such as lanczos"),
        (lambda: sf.scale_by_saddle_free("lanczos"), "solver must be a solver such as lanczos"),
        (lambda: sf.solve("lanczos", lambda v: v, jnp.ones(2)), "solver must be a solver such as lanczos"),
        (lambda: sf.blockwise(sf.lanczos(), group="layer"), "group must be a function .* got 'layer'"),
        (lambda: sf.saddle_free_newton(momentum=0.9, solver=sf.blockwise(sf.low_rank())), "momentum must be None"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
