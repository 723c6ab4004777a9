"""Products against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from problems import network_batch, network_loss, network_params, predict

import saddlefree as sf


@pytest.fixture
def problem(x64):
    params = network_params(jax.random.key(0), dtype=jnp.float64)
    batch = network_batch(jax.random.key(1), n=10, dtype=jnp.float64)
    return params, batch


def dense(product, params):
    vector, unravel = ravel_pytree(params)
    columns = jax.vmap(lambda v: ravel_pytree(product(unravel(v)))[0])(jnp.eye(vector.size, dtype=vector.dtype))
    return np.asarray(columns)


def dense_hessian(value_fn, params):
    vector, unravel = ravel_pytree(params)
    return np.asarray(jax.jacrev(jax.jacrev(lambda v: value_fn(unravel(v))))(vector))


def test_hessian_is_the_dense_one_and_indefinite(problem):
    params, batch = problem
    value_fn = lambda p: network_loss(p, batch)  # noqa: E731
    H = dense(sf.hessian(value_fn, params), params)
    np.testing.assert_allclose(H, dense_hessian(value_fn, params), atol=1e-12)
    values = np.linalg.eigvalsh(H)
    assert values[0] < 0 < values[-1]


def test_gauss_newton_is_the_dense_one(problem):
    params, (x, y) = problem
    vector, unravel = ravel_pytree(params)
    J = np.asarray(jax.jacrev(lambda v: predict(unravel(v), x).ravel())(vector))
    weights = np.linspace(0.5, 2.0, 10)  # ∇²ℓ
    G = dense(
        sf.gauss_newton(
            lambda p: predict(p, x), lambda p: 0.5 * jnp.sum(jnp.asarray(weights)[:, None] * (p - y) ** 2), params
        ),
        params,
    )
    np.testing.assert_allclose(G, J.T @ np.diag(weights) @ J, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3, 10, 64])
def test_microbatches_change_nothing(problem, size):
    """Also where the size does not divide the batch, or exceeds it."""
    params, (x, y) = problem
    whole = lambda p: network_loss(p, (x, y))  # noqa: E731
    parts = sf.microbatch_mean(network_loss, (x, y), size)
    v = jax.tree.map(jnp.ones_like, params)
    for a, b in (
        (parts(params), whole(params)),
        (jax.grad(parts)(params), jax.grad(whole)(params)),
        (sf.hessian(parts, params)(v), sf.hessian(whole, params)(v)),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), a, b)
    loss = lambda p: 0.5 * jnp.mean((p - y) ** 2)  # noqa: E731
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15),
        sf.gauss_newton(sf.microbatch_map(predict, x, size), loss, params)(v),
        sf.gauss_newton(lambda p: predict(p, x), loss, params)(v),
    )


def test_microbatches_average_auxiliary_outputs():
    def loss_fn(x, batch):
        return jnp.mean(batch * x), {"mean": jnp.mean(batch), "count": jnp.array(len(batch))}

    value_fn = sf.microbatch_mean(loss_fn, jnp.arange(5.0), 2, has_aux=True)
    loss, aux = value_fn(jnp.array(3.0))
    assert loss == 6.0
    assert aux["mean"] == 2.0
    assert aux["count"] == 1  # of the last microbatch


def test_microbatches_bound_memory():
    """A product on eight times the batch takes the memory of one microbatch's activations, not of all."""
    params = network_params(jax.random.key(0), (16, 64, 64, 1))
    key = jax.random.key(1)

    def memory(n, size):
        batch = jax.random.normal(key, (n, 16)), jnp.zeros((n, 1))
        value_fn = sf.microbatch_mean(network_loss, batch, size)
        product = jax.jit(lambda params, v: sf.hessian(value_fn, params)(v))
        return product.lower(params, params).compile().memory_analysis().temp_size_in_bytes

    assert memory(4096, 4096) > 3 * memory(4096, 512)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_products_are_evaluated_in_the_parameters_dtype_and_returned_in_the_vectors(dtype):
    seen = []

    def value_fn(x):
        seen.append(x.dtype)
        return jnp.sum(x**3).astype(jnp.float32)

    x, v = jnp.array([0.5, -1.0, 2.0], dtype), jnp.array([1.0, 2.0, -1.0])
    found = sf.hessian(value_fn, x)(v)
    assert set(seen) == {jnp.dtype(dtype)}
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 6 * np.array([0.5, -1.0, 2.0]) * np.array([1.0, 2.0, -1.0]), rtol=1e-2)


def test_reverse_over_reverse_where_a_rule_calls_a_custom_vjp():
    """JAX issue 16049: forward mode cannot enter a `custom_vjp` inside a derivative rule."""

    @jax.custom_vjp
    def inner(x):
        return jnp.sin(x)

    inner.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (t * jnp.cos(x),))

    @jax.custom_vjp
    def outer(x):
        return -jnp.cos(x)

    outer.defvjp(lambda x: (-jnp.cos(x), x), lambda x, t: (t * inner(x),))

    def value_fn(x):
        return jnp.sum(outer(x) * x[::-1])

    x, v = jnp.array([0.3, -1.2, 2.0]), jnp.array([1.0, 2.0, -1.0])
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(jax.grad(value_fn), (x,), (v,))
    H = dense_hessian(lambda x: jnp.sum(-jnp.cos(x) * x[::-1]), x)
    for wrap in (jax.jit, lambda f: f):
        product = wrap(lambda x, v: sf.hessian(lambda x: jax.jit(value_fn)(x), x)(v))
        np.testing.assert_allclose(product(x, v), H @ np.asarray(v), rtol=1e-5)


def test_type_errors_of_the_loss_itself_are_not_hidden():
    def value_fn(x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        sf.hessian(value_fn, jnp.ones(2))


def test_bad_input():
    with pytest.raises(ValueError, match=r"params\['n'\] must be real floating point, got int32"):
        sf.hessian(lambda p: p["x"], {"x": jnp.ones(()), "n": jnp.ones((), jnp.int32)})
    with pytest.raises(ValueError, match="must be real floating point, got complex64"):
        sf.gauss_newton(lambda p: p, lambda p: p, jnp.ones((), jnp.complex64))
    with pytest.raises(ValueError, match=r"value_fn must return one real number.*shape \(2,\)"):
        sf.hessian(lambda x: x**2, jnp.ones(2))
    with pytest.raises(ValueError, match=r"value_fn must return one real number.*got tuple"):
        sf.hessian(lambda x: (jnp.sum(x), x), jnp.ones(2))
    with pytest.raises(ValueError, match="size must be a whole number ≥ 1, got 0"):
        sf.microbatch_mean(network_loss, jnp.ones(3), 0)
    with pytest.raises(ValueError, match="share their leading axis"):
        sf.microbatch_mean(network_loss, (jnp.ones(3), jnp.ones(4)), 2)
