"""The parameters as a vector, against NumPy on flat arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import require

from saddlefree import space
from saddlefree.space import Space


def mixed():
    """Leaves of two dtypes, a frozen one and one without entries."""
    return {
        "a": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "b": None,
        "c": (jnp.array(7.5, jnp.bfloat16), jnp.zeros((0, 2), jnp.float32)),
        "d": jnp.array([-1.0, 0.1], jnp.float32),
    }


def same(x, y):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    assert [leaf.dtype for leaf in jax.tree.leaves(x)] == [leaf.dtype for leaf in jax.tree.leaves(y)]
    jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.mark.parametrize("packed", [True, False])
def test_pack_and_unpack_are_inverse(packed):
    like = mixed()
    layout = Space(like, packed)
    vector = layout.pack(like)
    assert layout.size == space.size(vector) == 9
    assert {leaf.dtype for leaf in jax.tree.leaves(vector)} == {jnp.dtype(jnp.float32)}
    same(layout.unpack(vector), like)
    wide = layout.unpack(vector, cast=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}
    same(layout.pack(wide), vector)
    assert jax.tree.structure(layout.zeros()) == jax.tree.structure(vector)
    assert space.peak(layout.zeros()) == 0
    if packed:
        np.testing.assert_array_equal(vector, np.array([0, 1, 2, 3, 4, 5, 7.5, -1, 0.1], np.float32))


def test_one_leaf_in_float64_makes_the_packed_vector_so(x64):
    like = {"a": jnp.ones(2, jnp.float32), "b": jnp.array([1 / 3], jnp.float64)}
    packed, apart = Space(like), Space(like, packed=False)
    assert packed.dtype == apart.dtype == packed.pack(like).dtype == jnp.float64
    assert [leaf.dtype for leaf in jax.tree.leaves(apart.pack(like))] == [jnp.float32, jnp.float64]
    for layout in (packed, apart):
        same(layout.unpack(layout.pack(like)), like)


@pytest.mark.parametrize("like", [{}, None, {"a": None, "b": ()}, {"a": jnp.zeros((0, 3))}])
def test_no_parameters_at_all(like):
    layout = Space(like)
    assert layout.size == 0
    vector = layout.pack(like)
    assert vector.shape == layout.zeros().shape == (0,)
    assert jax.tree.structure(layout.unpack(vector)) == jax.tree.structure(like)
    assert layout.finite_update(vector)
    assert space.norm(vector) == space.peak(vector) == space.dot(vector, vector) == 0


@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-30, 1e-20, 1.0, 1e20, 1e30, 1e37])
def test_norms_neither_overflow_nor_underflow(size):
    x = {"a": jnp.array([3.0, 0.0]) * jnp.float32(size), "b": jnp.array(-4.0) * jnp.float32(size)}
    np.testing.assert_allclose(space.norm(x), 5 * size, rtol=1e-6)
    np.testing.assert_allclose(space.peak(x), 4 * size, rtol=1e-6)
    unit = space.normalise(x)
    np.testing.assert_allclose(unit["a"], [0.6 if size else 0, 0], rtol=1e-6)
    np.testing.assert_allclose(unit["b"], -0.8 if size else 0, rtol=1e-6)


def test_norms_of_what_is_not_finite_are_not_finite():
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        assert not jnp.isfinite(space.norm(jnp.array([1.0, bad])))
        assert not space.all_finite({"a": jnp.ones(2), "b": jnp.array([0.0, bad], jnp.bfloat16)})


def test_a_sum_that_a_narrow_dtype_does_not_hold_is_finite():
    require("float16")
    assert space.all_finite({"a": jnp.full(3, 6e4, jnp.float16), "b": None})


def test_inner_products_are_accumulated_in_float32():
    ones = jnp.full(4096, 0.5, jnp.bfloat16)
    assert space.dot(ones, ones).dtype == jnp.float32
    assert space.dot(ones, ones) == 1024
    x = jax.tree.map(lambda a: a.astype(jnp.float32), mixed())
    flat = np.asarray(Space(x).pack(x), np.float64)
    np.testing.assert_allclose(space.dot(x, space.scale(-2, x)), -2 * flat @ flat, rtol=1e-6)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtypes", [(jnp.float16, jnp.float16), (jnp.float16, jnp.float32)])
def test_a_step_must_be_finite_in_the_parameters_dtype(packed, dtypes):
    """65504 is the largest number of float16; in the other leaf 1e5 may be fine."""
    require("float16")
    like = {"a": jnp.zeros(2, dtypes[0]), "b": jnp.zeros(1, dtypes[1])}
    layout = Space(like, packed)

    def finite(a, b):
        return bool(layout.finite_update(layout.pack({"a": jnp.array([1.0, a]), "b": jnp.array([b])})))

    assert finite(6e4, -6e4)
    assert not finite(1e5, 0.0)
    assert finite(0.0, 1e5) == (dtypes[1] == jnp.float32)
    assert not finite(0.0, jnp.nan)
    assert not finite(jnp.inf, 0.0)


def test_when_computes_what_is_due_alone():
    """Each of a batch as if it were alone; nothing is computed where none is due."""
    ran = []

    def compute(x):
        jax.debug.callback(lambda: ran.append(1))
        return jax.tree.map(lambda a: 10 * a, x)

    mapped = jax.jit(jax.vmap(lambda due, x: space.when(due, compute, {"x": x, "n": (x.astype(jnp.int32), ())})))
    for due, calls in (([True, False, True], True), ([False] * 3, False), ([True] * 3, True)):
        ran.clear()
        found = mapped(jnp.array(due), jnp.array([1.0, 2.0, 3.0]))
        jax.effects_barrier()
        np.testing.assert_array_equal(found["x"], np.where(due, [10, 20, 30], [1, 2, 3]))
        np.testing.assert_array_equal(found["n"][0], found["x"].astype(np.int32))
        assert bool(ran) == calls
    ran.clear()
    alone = jax.jit(lambda due: space.when(due, compute, jnp.ones(2)))
    np.testing.assert_array_equal(alone(jnp.array(False)), 1)
    jax.effects_barrier()
    assert not ran
    np.testing.assert_array_equal(alone(jnp.array(True)), 10)


def test_where_ignores_what_is_not_chosen():
    x, y = {"a": jnp.array([1.0, jnp.nan])}, {"a": jnp.zeros(2)}
    same(space.where(jnp.array(False), x, y), y)


BASIS = {"a": (4, 2, 3), "b": (4,), "c": (4, 5)}
"""Four vectors of twelve entries in three leaves."""


def stacked(rng, count, dtype=jnp.float32):
    """A stack as a tree, and as a matrix with a vector in each row."""
    tree = {name: jnp.asarray(rng.normal(size=(count, *shape[1:])), dtype) for name, shape in BASIS.items()}
    return tree, np.concatenate([np.asarray(x, np.float64).reshape(count, -1) for x in jax.tree.leaves(tree)], axis=1)


def test_project_and_combine_are_products_with_the_basis():
    rng = np.random.default_rng(0)
    (basis, Q), (many, X), y = stacked(rng, 4), stacked(rng, 3), rng.normal(size=(3, 4)).astype(np.float32)
    x = space.get(many, 1)
    np.testing.assert_allclose(space.project(basis, x), Q @ X[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(space.project(basis, many), Q @ X.T, rtol=1e-5, atol=1e-6)
    for coordinates, expected in ((y[0], y[0] @ Q), (y, y @ Q)):
        found = space.combine(basis, jnp.asarray(coordinates))
        shapes = {name: (*coordinates.shape[:-1], *shape[1:]) for name, shape in BASIS.items()}
        assert jax.tree.map(jnp.shape, found) == shapes
        flat = [np.asarray(leaf).reshape(*coordinates.shape[:-1], -1) for leaf in jax.tree.leaves(found)]
        np.testing.assert_allclose(np.concatenate(flat, axis=-1), expected, rtol=1e-5, atol=1e-6)
    assert space.length(basis) == 4
    assert space.size(x) == 12
    swapped = space.put(many, x, 0)
    same(space.get(swapped, 0), x)
    same(space.get(swapped, 2), space.get(many, 2))
    same(space.stack(x, 2), jax.tree.map(lambda a: jnp.zeros((2, *a.shape)), x))


def dot_generals(jaxpr):
    """The parameters of all matrix products of a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params
        for sub in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                yield from dot_generals(inner)


def test_products_with_the_basis_have_full_precision():
    """On a TPU or an Ampere GPU the default would round the factors to bfloat16 or TF32."""
    basis, _ = stacked(np.random.default_rng(0), 4)
    x, y = space.get(basis, 0), jnp.ones((3, 4))
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    for program in (
        jax.make_jaxpr(space.project)(basis, x),
        jax.make_jaxpr(space.project)(basis, basis),
        jax.make_jaxpr(space.combine)(basis, y[0]),
        jax.make_jaxpr(space.combine)(basis, y),
    ):
        found = list(dot_generals(program.jaxpr))
        assert len(found) == 3
        assert all(params["precision"] == highest for params in found)
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), basis)
    found = dot_generals(jax.make_jaxpr(space.project)(narrow, space.get(narrow, 0)).jaxpr)
    assert all(params["preferred_element_type"] == jnp.float32 for params in found)


def test_ravel_goes_there_and_back():
    like = mixed()
    vector, unravel = space.ravel(like)
    np.testing.assert_array_equal(vector, Space(like).pack(like))
    same(unravel(vector), like)
    empty, back = space.ravel({})
    assert empty.shape == (0,)
    assert back(empty) == {}


def test_select_and_fill_take_trees_apart_and_together():
    full = {"a": jnp.ones(2), "b": {"c": jnp.zeros(1), "d": jnp.array(3.0)}}
    part = {"a": None, "b": {"c": full["b"]["c"], "d": None}}
    other = space.select({"a": 0, "b": {"c": None, "d": 0}}, full)
    assert other["b"]["c"] is None
    same(space.select(part, full), part)
    same(space.fill(part, other), full)


def test_schedules_are_evaluated_at_the_count():
    for number, expected in ((0.5, 0.5), (jnp.array(2), 2), (lambda count: 0.1 * count.astype(jnp.float32), 0.3)):
        found = space.evaluate_schedule(number, jnp.array(3, jnp.int32), jnp.float32)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-6)
