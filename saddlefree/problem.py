"""What one update sees of the problem: gradient, curvature and loss, as functions of vectors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saddlefree import checks, space
from saddlefree.convolutions import laid_out
from saddlefree.curvature import MatVec, hessian, in_dtypes_of
from saddlefree.residuals import ResidualFn, half_square, of_part
from saddlefree.space import Space, Tree, Vector

Frozen = Tree | Callable[[Tree], Tree] | None
"""Which parameters stay as they are: a pytree of bools (or a prefix of one), or a function from parameters to it."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The point x, and what is known there.

    Attributes:
      space: how vectors are laid out.
      gradient: g, the right-hand side of (|H| + λI) d = g.
      operator: prepares the product v ↦ H v on trees for the leaves that are not None in its argument.
      previous: the last step that was taken, or None.
      refresh: a bool that overrides when a solver renews its curvature, or None.
      loss: the loss after a step, or at x for None.
      loss_gradient: the gradient of `loss`, which may differ from the right-hand side g.
      prepared: the product with H on vectors, where it has been prepared for several users.
      value_and_gradient: the loss after a step, and its gradient there.
      noisy: whether batches differ, a bool, where the rule finds out; a solver may then spare products.
      residuals: the residuals r with f = ½‖r‖² as a function of the trainable parameters, where they were given.
    """

    space: Space
    gradient: Vector
    operator: Callable[[Tree], MatVec]
    previous: Vector | None = None
    refresh: Any = None
    loss: Callable[[Vector | None], jax.Array] | None = None
    loss_gradient: Vector | None = None
    prepared: Callable[[Vector], Vector] | None = None
    value_and_gradient: Callable[[Vector], tuple[jax.Array, Vector]] | None = None
    residuals: ResidualFn | None = None
    noisy: jax.Array | None = None

    def product(self) -> Callable[[Vector], Vector]:
        """v ↦ H v on vectors. Call it only where products are needed: it differentiates the loss."""
        if self.prepared is not None:
            return self.prepared
        space, product = self.space, self.operator(self.space.like)
        return lambda v: space.pack(product(space.unpack(v)))

    def block(self, part: Tree) -> "Problem":
        """The problem of the parameters that are not None in `part`, the others held fixed."""
        block = Space(space.select(part, self.space.like), self.space.packed)

        def restrict(x: Vector) -> Vector:
            return block.pack(space.select(part, self.space.unpack(x, cast=False)))

        previous = None if self.previous is None else restrict(self.previous)
        return Problem(
            block,
            restrict(self.gradient),
            self.operator,
            previous,
            self.refresh,
            residuals=self.residuals,
            noisy=self.noisy,
        )


def from_update(
    updates: Tree,
    params: Tree | None,
    frozen: Frozen,
    packed: bool,
    previous: Vector | None,
    products: bool,
    extra: dict[str, Any],
) -> Problem:
    """The problem that the arguments of an Optax `update` describe.

    Args:
      updates: what the transformation is asked to transform: the right-hand side g.
      params: the parameters.
      frozen: see `trainable`.
      packed: see `Space`.
      previous: the last step that was taken.
      products: whether products are needed outside of the solver, so that one linearisation serves both.
      extra: the optional arguments of `update`.
    """
    if params is None:
        raise ValueError("params must be given to update(): curvature is taken at the parameters")
    value_fn, curvature_fn, matvec = (extra.get(name) for name in ("value_fn", "curvature_fn", "matvec"))
    residual_fn = extra.get("residual_fn")
    _check_arguments(extra)
    if value_fn is None and residual_fn is not None:
        value_fn = half_square(residual_fn)
    if matvec is None and curvature_fn is None and value_fn is None:
        raise ValueError(
            "value_fn must be given to update(): a function of the parameters that returns the loss, as in "
            "tx.update(grads, state, params, value_fn=lambda params: loss(params, batch)), or residual_fn=, one that "
            "returns residuals whose half squared norm is the loss; "
            "flax's TrainState.apply_gradients cannot pass it, call state.tx.update(…, value_fn=…) instead"
        )
    params = checks.arrays(params)
    layout = Space(trainable(params, frozen), packed)
    require_same_shapes("updates", layout.like, updates)
    if extra.get("grad") is not None:
        require_same_shapes("grad", layout.like, extra["grad"])

    def pack(x: Tree) -> Vector:
        return layout.pack(space.select(layout.like, x))

    def operator(part: Tree) -> MatVec:
        if matvec is not None:
            zeros, like = space.zeros_like(params), space.select(part, params)

            def product(v: Tree) -> Tree:
                found = matvec(space.fill(v, zeros))
                require_same_shapes("the result of matvec", like, found)
                return space.select(part, found)

            return in_dtypes_of(like, product)
        fn = value_fn if curvature_fn is None else checks.scalar_valued("curvature_fn", curvature_fn)
        return hessian(lambda block: fn(space.fill(block, params)), space.select(part, params))  # type: ignore[misc]

    with np.errstate(over="ignore"):  # a number beyond the dtype is infinite, and its step is skipped
        value = None if extra.get("value") is None else jnp.asarray(extra["value"], layout.dtype)

    def loss(step: Vector | None) -> jax.Array:
        if step is None and value is not None:
            return value
        return laid_out(evaluate)(layout.like if step is None else layout.unpack(layout.moved(step)))

    def evaluate(part: Tree) -> jax.Array:
        if value_fn is None:
            raise ValueError(
                "value_fn must be given to update() where the rule measures the loss, also beside matvec= or "
                "curvature_fn=: the loss after the step is compared with the one before"
            )
        return checks.scalar_valued("value_fn", value_fn)(space.fill(part, params)).astype(layout.dtype)

    def value_and_gradient(step: Vector) -> tuple[jax.Array, Vector]:
        value, gradient = laid_out(jax.value_and_grad(evaluate))(layout.unpack(layout.moved(step)))
        return value, layout.pack(gradient)

    def usable(gradient: Vector) -> Vector:
        """NaN where the loss is not finite: the gradient there may be finite, and far too large for any average."""
        if value is None:
            return gradient
        return jax.tree.map(lambda x: jnp.where(jnp.isfinite(value), x, jnp.nan), gradient)

    gradient = usable(pack(updates))
    known = Problem(
        layout,
        gradient,
        operator,
        previous,
        extra.get("refresh"),
        loss,
        gradient if extra.get("grad") is None else usable(pack(extra["grad"])),
        value_and_gradient=value_and_gradient,
        residuals=None if residual_fn is None else of_part(residual_fn, params),
    )
    return dataclasses.replace(known, prepared=known.product()) if products else known


def trainable(params: Tree, frozen: Frozen) -> Tree:
    """The parameters that are not frozen; those that are become None, which JAX takes for an empty subtree."""
    if frozen is not None:
        mask = frozen(params) if callable(frozen) else frozen
        wrong = ValueError(f"frozen must be a pytree of bools like the parameters, or a prefix of one, got {mask!r}")
        if not all(map(checks.is_bool, jax.tree.leaves(mask))):
            raise wrong
        try:
            params = jax.tree.map(lambda f, x: jax.tree.map(lambda leaf: None if f else leaf, x), mask, params)
        except ValueError:
            raise wrong from None
    checks.real_parameters(params)
    return params


def require_same_shapes(name: str, params: Tree, tree: Tree) -> None:
    """Refuses what belongs to other parameters."""
    wanted = jax.tree.map(lambda leaf: str(leaf.shape), params)
    try:
        found = jax.tree.map(_shape, space.select(params, tree))
    except ValueError:  # of another structure
        found = jax.tree.map(_shape, tree)
    if wanted != found:
        raise ValueError(f"{name} must be a pytree of real arrays like params, {wanted}, got {found}")


def _shape(x: Any) -> str:
    """The shape of a real array, or what else x is."""
    return str(jnp.shape(x)) if checks.is_real(x) else str(getattr(x, "dtype", type(x).__name__))


def _check_arguments(extra: dict[str, Any]) -> None:
    """Refuses optional arguments of an Optax `update` that are of the wrong kind."""
    given = {name: value for name, value in extra.items() if value is not None}
    for name in given.keys() & {"value_fn", "curvature_fn", "matvec", "residual_fn"}:
        checks.function(name, given[name])
    if "value" in given:
        checks.real_scalar("value", given["value"])
    if "refresh" in given:
        checks.condition("refresh", given["refresh"])
