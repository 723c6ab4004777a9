"""Curvature as a function: v ↦ H v and v ↦ G v, without the matrix.

Symbols: f the loss, x the parameters, H = ∇²f(x); for a model f(x) = ℓ(p(x)) with outputs p, Jacobian J of p and
output curvature ∇²ℓ, the generalised Gauss-Newton matrix is G = Jᵀ ∇²ℓ J.

>>> import jax.numpy as jnp
>>> matvec = hessian(lambda x: x[0] ** 2 - x[1] ** 2, jnp.array([1.0, 1.0]))
>>> matvec(jnp.array([1.0, 1.0]))
Array([ 2., -2.], dtype=float32)
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.convolutions import laid_out
from saddlefree.space import Tree

MatVec = Callable[[Tree], Tree]
"""A symmetric matrix as the function v ↦ A v on pytrees; the result has v's dtypes."""


def hessian(value_fn: Callable[[Tree], jax.Array], params: Tree) -> MatVec:
    """The product v ↦ H v with the Hessian H = ∇²f(x) of `value_fn` at `params`.

    Forward over reverse mode (Pearlmutter 1994): the derivative of the gradient along v. Call it inside `jit`, where
    XLA evaluates what does not depend on v once for all products. Where a loss's own derivative rule calls a
    `custom_vjp`, which forward mode cannot enter, H v is the reverse derivative of the gradient instead, Hᵀ v = H v.

    For a batch that does not fit into memory, give `microbatch_mean(loss_fn, batch, size)` as `value_fn`.

    Args:
      value_fn: function of the parameters alone that returns the loss, one real number.
      params: pytree of real arrays.

    Returns:
      The product, for vectors shaped like `params`; the result has the vector's dtypes, whatever the parameters' are.

    >>> matvec = hessian(lambda p: p["a"] * p["b"], {"a": jnp.array(2.0), "b": jnp.array(3.0)})
    >>> {name: float(x) for name, x in matvec({"a": jnp.array(1.0), "b": jnp.array(0.0)}).items()}
    {'a': 0.0, 'b': 1.0}
    """
    checks.real_parameters(params)
    value_fn = checks.scalar_valued("value_fn", value_fn)
    gradient = jax.grad(value_fn)

    def product(v: Tree) -> Tree:
        return jax.jvp(gradient, (params,), (v,))[1]

    if _calls("custom_vjp_call", jax.make_jaxpr(value_fn)(params).jaxpr) and not _enters(product, params):
        _, transposed = jax.vjp(gradient, params)
        return in_dtypes_of(params, laid_out(lambda v: transposed(v)[0]))
    return in_dtypes_of(params, laid_out(product))


def gauss_newton(predict_fn: Callable[[Tree], Any], loss_fn: Callable[[Any], jax.Array], params: Tree) -> MatVec:
    """The product v ↦ G v with the generalised Gauss-Newton matrix G = Jᵀ ∇²ℓ J, positive semi-definite for convex ℓ.

    Args:
      predict_fn: function of the parameters that returns the model's outputs p(x), a pytree of real arrays.
      loss_fn: function of the outputs that returns the loss ℓ(p), one real number.
      params: pytree of real arrays.

    For a batch that does not fit into memory, give `microbatch_map(predict_fn, inputs, size)` as `predict_fn`.

    >>> x = jnp.array([2.0, 1.0])
    >>> matvec = gauss_newton(lambda x: x[0] * x[1], lambda p: 0.5 * (p - 1.0) ** 2, x)
    >>> matvec(jnp.array([1.0, 0.0]))  # J = [1, 2], G = JᵀJ
    Array([1., 2.], dtype=float32)
    """
    checks.real_parameters(params)
    outputs, jacobian = jax.linearize(predict_fn, params)
    transposed = jax.linear_transpose(jacobian, params)
    _, output_hessian = jax.linearize(jax.grad(checks.scalar_valued("loss_fn", loss_fn)), outputs)
    return in_dtypes_of(params, laid_out(lambda v: transposed(output_hessian(jacobian(v)))[0]))


def microbatch_mean(
    loss_fn: Callable[[Tree, Tree], Any], batch: Tree, size: int, *, has_aux: bool = False
) -> Callable[[Tree], Any]:
    """The mean of a loss over `batch`, evaluated `size` examples at a time: a `value_fn` for a batch of any length.

    f(x) = Σ_b (n_b/n) loss_fn(x, batch_b). Value, gradient and curvature products of it hold one microbatch's
    activations at a time, because each microbatch is recomputed in the backward pass.

    Args:
      loss_fn: (params, examples) to their mean loss.
      batch: pytree whose leaves share their leading axis.
      size: examples at a time, ≥ 1; the last microbatch takes what is left.
      has_aux: whether `loss_fn` returns (loss, aux), and so the result. The floating leaves of aux are averaged too,
        others are the last microbatch's.

    >>> value_fn = microbatch_mean(lambda x, batch: jnp.mean((batch - x) ** 2), jnp.arange(5.0), size=2)
    >>> float(value_fn(jnp.array(2.0)))
    2.0
    """
    full, rest, length = microbatches(batch, size)

    @jax.checkpoint
    def evaluate(params: Tree, examples: Tree) -> Tree:
        loss, aux = loss_fn(params, examples) if has_aux else (loss_fn(params, examples), None)
        return checks.scalar("loss_fn", loss).astype(space.scalar_dtype(params)), aux

    def mean(shares: jax.Array, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[-1]
        return jnp.tensordot(shares.astype(x.dtype), x, axes=1, precision="highest")

    def value_fn(params: Tree) -> Any:
        def body(_: None, examples: Tree) -> tuple[None, Tree]:
            return None, evaluate(params, examples)

        _, results = jax.lax.scan(body, None, full)
        shares = jnp.full(length // size, size / length)
        if length % size:
            last = evaluate(params, rest)
            results = jax.tree.map(lambda x, y: jnp.append(x, jnp.asarray(y)[None], axis=0), results, last)
            shares = jnp.append(shares, length % size / length)
        loss, aux = jax.tree.map(lambda x: mean(shares, x), results)
        return (loss, aux) if has_aux else loss

    return value_fn


def microbatch_map(predict_fn: Callable[[Tree, Tree], Tree], inputs: Tree, size: int) -> Callable[[Tree], Tree]:
    """The outputs of a model for all of `inputs`, `size` examples at a time: a `predict_fn` for `gauss_newton`.

    p(x) = [predict_fn(x, inputs_1); predict_fn(x, inputs_2); …], with the memory of one microbatch's activations.

    Args:
      predict_fn: (params, inputs) to outputs; both have the examples along their leading axis.
      inputs: pytree whose leaves share their leading axis.
      size: examples at a time, ≥ 1; the last microbatch takes what is left.

    >>> predict = microbatch_map(lambda x, inputs: x * inputs, jnp.arange(5.0), size=2)
    >>> predict(jnp.array(2.0))
    Array([0., 2., 4., 6., 8.], dtype=float32)
    """
    full, rest, length = microbatches(inputs, size)
    outputs_of = jax.checkpoint(predict_fn)

    def predict_all(params: Tree) -> Tree:
        stacked = jax.lax.map(lambda examples: outputs_of(params, examples), full)
        outputs = jax.tree.map(lambda y: _merge_leading(jnp.swapaxes(y, 0, 1)), stacked)
        if not length % size:
            return outputs
        return jax.tree.map(lambda y, z: jnp.concatenate([y, z]), outputs, outputs_of(params, rest))

    return predict_all


def _enters(product: MatVec, params: Tree) -> bool:
    """Whether forward mode can enter the derivative rules; under `jit` it fails only when it is compiled."""
    try:
        return not _calls("custom_lin", jax.make_jaxpr(product)(params).jaxpr)
    except TypeError:
        return False


def _calls(primitive: str, jaxpr: Any) -> bool:
    """Whether `jaxpr`, or one inside it, applies `primitive`."""
    inner = [getattr(x, "jaxpr", x) for eqn in jaxpr.eqns for x in jax.tree.leaves(tuple(eqn.params.values()))]
    return any(eqn.primitive.name == primitive for eqn in jaxpr.eqns) or any(
        _calls(primitive, x) for x in inner if hasattr(x, "eqns")
    )


def microbatches(batch: Tree, size: int) -> tuple[Tree, Tree, int]:
    """`batch` as stacked microbatches of `size`, the shorter rest, and the number of examples.

    Microbatch i of k takes the examples i, i + k, i + 2k, …: where a batch is sharded along its leading axis, each
    microbatch then lies on all devices.
    """
    checks.integer("size", size, low=1)
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(f"batch must have leaves that share their leading axis, got leading axes {sorted(lengths)}")
    ((length,),) = lengths
    if not length:
        raise ValueError("batch must hold at least one example, got leading axis 0")
    whole = length // size * size
    full = jax.tree.map(lambda x: _interleaved(x, whole, size), batch)
    return full, jax.tree.map(lambda x: x[whole:], batch) if whole < length else None, length


def _interleaved(x: jax.Array, whole: int, size: int) -> jax.Array:
    """The first `whole` examples of x, as microbatches of `size` along a new leading axis."""
    x = jnp.asarray(x)
    shape, sharding = (size, whole // size, *x.shape[1:]), jax.typeof(x).sharding
    first = sharding.spec[0] if sharding.spec else None
    if first is None:
        return jnp.swapaxes(x[:whole].reshape(shape), 0, 1)
    devices = math.prod(sharding.mesh.shape[axis] for axis in ([first] if isinstance(first, str) else first))
    if size % devices or whole < x.shape[0]:
        raise ValueError(
            f"size must be a multiple of the {devices} devices that the batch is sharded over, and divide its "
            f"{x.shape[0]} examples, got {size}"
        )
    spec = jax.sharding.PartitionSpec(first, None, *sharding.spec[1:])
    return jnp.swapaxes(jax.lax.reshape(x, shape, out_sharding=spec), 0, 1)


def _merge_leading(y: jax.Array) -> jax.Array:
    """y with its first two axes as one."""
    shape, sharding = (y.shape[0] * y.shape[1], *y.shape[2:]), jax.typeof(y).sharding
    if not sharding.spec or sharding.spec[0] is None:
        return y.reshape(shape)
    spec = jax.sharding.PartitionSpec(sharding.spec[0], *sharding.spec[2:])
    return jax.lax.reshape(y, shape, out_sharding=spec)


def in_dtypes_of(params: Tree, product: MatVec) -> MatVec:
    """`product`, evaluated in the dtypes of `params`, its result in those of its argument."""
    return lambda v: space.cast_like(product(space.cast_like(v, params)), v)
