"""Convolutions in loops: the same numbers, and all in the layout of the fast kernel."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import saddlefree as sf
from saddlefree.convolutions import laid_out

STANDARD = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
IMAGES = {"NHWC": (4, 6, 5, 2), "NCHW": (4, 2, 6, 5)}
FILTERS = {"HWIO": (3, 2, 2, 4), "OIHW": (4, 2, 3, 2)}


def layouts(lowered):
    """Of every convolution of a compiled function, also in its loops and branches."""
    return set(re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", lowered.as_text()))


def network(images="NHWC", filters="HWIO", **options):
    """The loss of a filter that is used twice, its first value and an image."""
    keys = jax.random.split(jax.random.key(3), 2)
    x, w = jax.random.normal(keys[0], IMAGES[images]), jax.random.normal(keys[1], FILTERS[filters])
    numbers = (images, filters, images)

    def loss(w):
        y = lax.conv_general_dilated(x, w, (1, 2), ((1, 1), (0, 1)), dimension_numbers=numbers, **options)
        return jnp.mean(jnp.tanh(y) ** 2)

    return loss, w


@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("filters", FILTERS)
def test_products_in_loops_have_the_layout_of_the_fast_kernel(images, filters):
    loss, w = network(images, filters)

    def repeated(v):
        return lax.fori_loop(0, 3, lambda _, v: sf.hessian(loss, w)(v), v)

    def plain(v):
        return lax.fori_loop(0, 3, lambda _, v: jax.jvp(jax.grad(loss), (w,), (v,))[1], v)

    assert layouts(jax.jit(repeated).lower(w)) == {STANDARD}
    assert layouts(jax.jit(plain).lower(w)) != {STANDARD}
    np.testing.assert_allclose(repeated(w), plain(w), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"rhs_dilation": (2, 1)}, {"lhs_dilation": (1, 2)}, {"precision": "highest"}],
    ids=["plain", "rhs-dilation", "lhs-dilation", "precision"],
)
def test_derivatives_are_the_same(options):
    for images, filters in itertools.product(IMAGES, FILTERS):
        loss, w = network(images, filters, **options)
        for fn in (loss, jax.grad(loss), jax.value_and_grad(loss)):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), laid_out(fn)(w), fn(w))
        twice = jax.grad(lambda w, loss=loss: laid_out(loss)(w) ** 2)(w)
        np.testing.assert_allclose(twice, 2 * loss(w) * jax.grad(loss)(w), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("groups", [{"feature_group_count": 2}, {"batch_group_count": 2}], ids=["feature", "batch"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_groups_and_dtypes(groups, dtype):
    x = jax.random.normal(jax.random.key(1), (4, 4, 6, 5), dtype)
    w = jax.random.normal(jax.random.key(2), (4, 4 // groups.get("feature_group_count", 1), 3, 2), dtype)

    def correlate(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", **groups)

    found = laid_out(correlate)(x, w)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.float32(found), np.float32(correlate(x, w)))
    assert layouts(jax.jit(laid_out(correlate)).lower(x, w)) == {STANDARD}


def nested(x, w):
    """Convolutions inside of everything that holds programs of its own."""

    def correlate(x):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME")

    @jax.custom_jvp
    def with_rule(x):
        return jnp.sin(correlate(x))

    with_rule.defjvp(lambda x, t: (with_rule(*x), jnp.cos(correlate(*x)) * correlate(*t)))
    x = lax.scan(lambda x, _: (jax.checkpoint(correlate)(x), None), x, None, length=2)[0]
    x = lax.cond(x[0, 0, 0, 0] > 0, correlate, jax.jit(with_rule), x)
    x = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, with_rule(c[1])), (0, x))[1]
    return jax.vmap(lambda one: jnp.sum(correlate(one[None]) ** 2))(x)


def test_inside_of_loops_branches_and_rules():
    x, w = jax.random.normal(jax.random.key(1), (3, 2, 6, 5)), jax.random.normal(jax.random.key(2), (2, 2, 3, 3)) / 9
    np.testing.assert_allclose(laid_out(nested)(x, w), nested(x, w), rtol=1e-5)
    assert layouts(jax.jit(laid_out(nested)).lower(x, w)) == {STANDARD}
    mapped = jax.vmap(laid_out(nested), in_axes=(None, 0))(x, jnp.stack([w, 2 * w]))
    np.testing.assert_allclose(mapped[1], nested(x, 2 * w), rtol=1e-5)


def test_one_dimension_and_pytrees():
    x, w = jnp.arange(10.0).reshape(1, 2, 5), jnp.ones((3, 2, 2))
    found = laid_out(lambda p: {"y": lax.conv_general_dilated(p["x"], p["w"], (1,), "VALID"), "n": None})
    np.testing.assert_array_equal(found({"x": x, "w": w})["y"], lax.conv_general_dilated(x, w, (1,), "VALID"))
    assert found({"x": x, "w": w})["n"] is None


def test_a_step_in_a_loop_has_the_layout_of_the_fast_kernel():
    """Gradient, products and trial losses of the default."""
    loss, w = network("NCHW", "OIHW")
    tx = sf.adaptive_saddle_free_newton()
    step = sf.training.make_step(lambda w, model_state, batch, key: (loss(w), (model_state, None)), tx)
    state = sf.training.init(w, tx)
    looped = jax.jit(lambda state: lax.fori_loop(0, 2, lambda _, state: step(state, 0)[0], state))
    assert layouts(looped.lower(state)) == {STANDARD}
