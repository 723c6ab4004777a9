"""Blocks against the dense blocks of the Hessian."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network_batch, network_loss, network_params, saddle_free_direction, solve

import saddlefree as sf

BATCH = network_batch(jax.random.key(1))


def dense_blocks(value_fn, params, names, damping=0.1):
    """(|H_bb| + λI)⁻¹ g_b of each group, with the group of each leaf in `names`."""
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
        d = saddle_free_direction(np.asarray(jax.hessian(block_value)(x)), g, damping)
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
        actual = jax.jit(lambda p, g: sf.solve(blocks, sf.hessian(fn, p), g, 0.1).direction)(params, grads)
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


@pytest.mark.parametrize("solver", [sf.lanczos(30), sf.exact()], ids=["lanczos", "exact"])
def test_damping_search_on_all_blocks(x64, solver):
    """One λ for all blocks, the best of the trials, against dense blocks for each λ."""
    params = network_params(jax.random.key(0), dtype=jnp.float64)
    batch = jax.tree.map(lambda x: x.astype(jnp.float64), BATCH)
    fn = lambda params: network_loss(params, batch)  # noqa: E731
    tx = sf.adaptive_saddle_free_newton(sf.blockwise(solver), rule=sf.damping_search(0.1, spread=4.0, reach=1))
    updates, state = jax.jit(lambda p: tx.update(jax.grad(fn)(p), tx.init(p), p, value_fn=fn))(params)
    directions = {damping: dense_blocks(fn, params, [0, 0, 1, 1], damping) for damping in (0.025, 0.1, 0.4)}
    moved = {damping: jax.tree.map(lambda p, d: p - d, params, d) for damping, d in directions.items()}
    best = min(moved, key=lambda damping: float(fn(moved[damping])))
    np.testing.assert_allclose(sf.diagnostics(state)["damping"], best)
    jax.tree.map(lambda u, d: np.testing.assert_allclose(u, -d, rtol=1e-6, atol=1e-9), updates, directions[best])


def test_statistics_and_results_are_those_of_the_worst_block():
    """Products are added up, and the extremes are over blocks; one singular block marks the whole answer."""
    g = {"a": {"w": jnp.ones(3)}, "b": {"w": jnp.ones(3)}}
    matvec = lambda v: {"a": {"w": A * v["a"]["w"]}, "b": {"w": B * v["b"]["w"]}}  # noqa: E731
    A, B = jnp.array([3.0, 2.0, 1.0]), jnp.array([-5.0, 4.0, 0.0])
    alone = [solve(sf.lanczos(2), jnp.diag(h), jnp.ones(3), 0.1) for h in (A, B)]
    solution = sf.solve(sf.blockwise(sf.lanczos(2)), matvec, g, 0.1)
    for name, reduce in (
        ("products", sum),
        ("smallest_ritz", min),
        ("largest_ritz", max),
        ("error", max),
        ("negative_share", max),
    ):
        np.testing.assert_allclose(solution.stats[name], reduce([float(s.stats[name]) for s in alone]), rtol=1e-5)
    for name, one in zip(g, alone, strict=True):
        np.testing.assert_allclose(solution.direction[name]["w"], one.direction, rtol=1e-5)
    singular = sf.solve(sf.blockwise(sf.exact()), matvec, g, 0.0)
    assert singular.result == sf.Result.SINGULAR
    np.testing.assert_allclose(singular.direction["a"]["w"], 1 / A, rtol=1e-5)
    np.testing.assert_allclose(singular.direction["b"]["w"], [1 / 5, 1 / 4, 0], rtol=1e-5)


def test_a_base_in_each_block():
    """Two steps of rank 1 over gradient descent: what each block does alone, put together."""
    x = {"a": {"w": jnp.array([1.0, -2.0, 0.5])}, "b": {"w": jnp.array([0.3, 2.0])}}
    h = {"a": jnp.array([3.0, -2.0, 1.0]), "b": jnp.array([0.5, 4.0])}

    def run(solver, x, matvec):
        # A clip that binds would be that of the longest update of all blocks.
        rule = sf.fixed_rate(0.1, damping=0.5, max_ratio=100.0)
        tx = sf.adaptive_saddle_free_newton(solver, rule=rule)
        state, update = tx.init(x), jax.jit(lambda state, x: tx.update(matvec(x), state, x, matvec=matvec))
        for _ in range(2):
            updates, state = update(state, x)
            x = optax.apply_updates(x, updates)
        return updates

    solver = sf.low_rank(rank=1, base=optax.sgd(0.05))
    together = run(sf.blockwise(solver), x, lambda v: {name: {"w": h[name] * v[name]["w"]} for name in h})
    for name in h:
        alone = run(solver, x[name]["w"], lambda v, name=name: h[name] * v)
        assert jnp.min(jnp.abs(alone)) > 1e-4
        np.testing.assert_allclose(together[name]["w"], alone, rtol=1e-4)


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
