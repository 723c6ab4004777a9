"""The paper's networks: sizes, initial weights, and batch norm's state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saddlefree.lab import models


@pytest.fixture(autouse=True)
def standard():
    with jax.numpy_dtype_promotion("standard"):
        yield


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_sizes_are_the_papers():
    assert size(models.mlp(8, *[12] * 7, 1).init(jax.random.key(0))[0]) == 1057
    assert size(models.mlp(784, 50, 10).init(jax.random.key(0))[0]) == 784 * 50 + 50 + 510
    params, state = jax.eval_shape(models.resnet18().init, jax.random.key(0))
    assert size(params) == 11_181_642
    assert size(state) == 2 * 4800  # a mean and a variance for each channel that is normalised
    params, state = jax.eval_shape(models.resnet18(width=16).init, jax.random.key(0))
    assert 11_181_642 / 16 < size(params) < 11_181_642 / 15.5
    assert size(state) == 2 * 1200


def test_weights_are_haikus():
    w = models.haiku_normal(jax.random.key(0), (400, 300))
    assert jnp.max(jnp.abs(w)) <= 2 / 20
    # The standard deviation of a standard normal cut at ±2.
    np.testing.assert_allclose(jnp.std(w) * 20, 0.8796, rtol=0.01)
    kernel = models.haiku_normal(jax.random.key(0), (3, 3, 64, 32))
    assert jnp.max(jnp.abs(kernel)) <= 2 / np.sqrt(9 * 64)


def test_the_mlp_is_its_formula():
    model = models.mlp(3, 5, 2)
    params, state = model.init(jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (7, 3))
    first, second = (params["layers"][i] for i in (0, 1))
    hidden = np.maximum(x @ first["kernel"][...] + first["bias"][...], 0)
    expected = hidden @ second["kernel"][...] + second["bias"][...]
    np.testing.assert_allclose(model.apply(params, state, x, True)[0], expected, rtol=1e-5, atol=1e-6)


def test_batch_norm_keeps_averages_in_training_and_uses_them_afterwards():
    model = models.resnet18()
    params, state = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 32, 32, 3))
    apply = jax.jit(model.apply, static_argnums=3)
    trained, new = apply(params, state, x, True)
    evaluated, same = apply(params, state, x, False)
    assert trained.shape == (4, 10)
    changed = [not np.allclose(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True)]
    assert all(changed)
    jax.tree.map(np.testing.assert_array_equal, state, same)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    # One image at a time gives the same as all together, where no batch statistics are used.
    np.testing.assert_allclose(apply(params, state, x[:1], False)[0], evaluated[:1], atol=1e-5)


def test_the_recurrent_network_is_its_formula():
    model = models.rnn(2, 5, 1)
    params, state = model.init(jax.random.key(1))
    x = np.asarray(jax.random.normal(jax.random.key(2), (3, 7, 2)))
    U, W, head = (params[name] for name in ("inputs", "recurrent", "head"))
    h = np.zeros((3, 5))
    for i in range(7):
        h = np.tanh(h @ W["kernel"][...] + x[:, i] @ U["kernel"][...] + U["bias"][...])
    expected = h @ head["kernel"][...] + head["bias"][...]
    np.testing.assert_allclose(model.apply(params, state, x, True)[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(W["kernel"][...] @ W["kernel"][...].T, np.eye(5), atol=1e-5)


def test_the_transformer_sees_what_is_before_and_not_what_follows():
    model = models.transformer(8, 6, 16, 2)
    params, state = model.init(jax.random.key(0))
    params["head"]["kernel"] = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(1), x.shape), params["head"]["kernel"]
    )
    x = jnp.arange(6)[None] % 8
    before, _ = model.apply(params, state, x, True)
    after, _ = model.apply(params, state, x.at[0, 3].set(7), True)
    assert before.shape == (1, 6, 8)
    np.testing.assert_allclose(before[0, :3], after[0, :3], atol=1e-6)
    assert (np.max(np.abs(before - after)[0, 3:], axis=-1) > 1e-4).all()
