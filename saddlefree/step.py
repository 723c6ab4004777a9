"""How far to go along a direction: learning rate η, momentum μ and the quadratic model that judges them.

Symbols: d ≈ (|H| + λI)⁻¹ g the solver's direction, p = x_t − x_{t−1} the previous update, s = −η d + μ p the step,
m(s) = gᵀs + ½ sᵀHs the change of the loss that the quadratic model predicts, and B an orthonormal basis of span{d, p}.

A rule is a frozen dataclass with `propose`, which turns d and p into s.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from saddlefree import checks, tree
from saddlefree.curvature import MatVec
from saddlefree.solvers.base import Subspace
from saddlefree.tree import Number, Tree


class Proposal(NamedTuple):
    """A step s = −η d + μ p."""

    step: Tree
    learning_rate: jax.Array
    momentum: jax.Array
    predicted: jax.Array | None  # m(s), where it came along
    after: jax.Array | None = None  # f(x + s), where it came along


class Step(Protocol):
    """A rule for η and μ."""

    @property
    def uses_products(self) -> bool:
        """Whether it calls `matvec`, which is None otherwise."""

    @property
    def uses_previous(self) -> bool:
        """Whether it uses the previous update, which is None otherwise."""

    def propose(
        self, direction: Tree, previous: Tree, gradient: Tree, matvec: Any, damping: jax.Array, count: jax.Array
    ) -> Proposal:
        """The step from direction d and previous update p."""


@dataclasses.dataclass(frozen=True)
class fixed_step:
    """η and μ as given: numbers or schedules.

    Args:
      learning_rate: η ≥ 0.
      momentum: μ in [0, 1).

    >>> d, p = jnp.array([1.0, 0.0]), jnp.array([0.0, 2.0])
    >>> fixed_step(0.5, momentum=0.9).propose(d, p, d, lambda v: v, jnp.array(0.0), jnp.array(0)).step
    Array([-0.5,  1.8], dtype=float32)
    """

    learning_rate: Number = 1.0
    momentum: Number = 0.0

    def __post_init__(self) -> None:
        checks.number("learning_rate", self.learning_rate, 0)
        checks.number("momentum", self.momentum, 0, 1, open_high=True)

    @property
    def uses_products(self) -> bool:
        """It does not."""
        return False

    @property
    def uses_previous(self) -> bool:
        """Unless μ is the number 0."""
        return callable(self.momentum) or isinstance(self.momentum, jax.core.Tracer) or bool(self.momentum != 0)

    def propose(
        self, direction: Tree, previous: Tree, gradient: Tree, matvec: Any, damping: jax.Array, count: jax.Array
    ) -> Proposal:
        """−η d + μ p."""
        eta, mu = (tree.at(number, count, damping.dtype) for number in (self.learning_rate, self.momentum))
        step = tree.scale(-eta, direction)
        return Proposal(tree.axpy(mu, previous, step) if self.uses_previous else step, eta, mu, None)


@dataclasses.dataclass(frozen=True)
class adaptive_step:
    """η and μ from the quadratic model in the plane of d and p: K-FAC's pair (Appendix A.4), made saddle-free.

        s = B y,    (|BᵀHB| + λI) y = −Bᵀg,

    with the absolute values of the 2 × 2 matrix's eigenvalues. K-FAC solves BᵀHB y = −Bᵀg with a positive definite
    curvature; with an indefinite Hessian that step may be uphill, or into the saddle. This one always descends. Where H
    is positive definite and d exact, η = 1 and μ = 0 without a previous step. It costs two products.

    >>> H = jnp.diag(jnp.array([2.0, -1.0]))
    >>> g, p = jnp.array([2.0, 0.0]), jnp.zeros(2)
    >>> proposal = adaptive_step().propose(g, p, g, lambda v: H @ v, jnp.array(0.0), jnp.array(0))
    >>> float(proposal.learning_rate), float(proposal.predicted)
    (0.5, -1.0)
    """

    @property
    def uses_products(self) -> bool:
        """Two a step."""
        return True

    @property
    def uses_previous(self) -> bool:
        """It does."""
        return True

    def propose(
        self, direction: Tree, previous: Tree, gradient: Tree, matvec: Any, damping: jax.Array, count: jax.Array
    ) -> Proposal:
        """The minimiser of the saddle-free model in the plane."""
        dtype = tree.scalar_dtype(gradient)
        first = tree.normalise(direction)
        unit = tree.normalise(previous)
        overlap = tree.dot(first, unit)
        rest = tree.axpy(-overlap, first, unit)
        # A second sweep: the first leaves rounding along d when p is nearly parallel to it.
        correction = tree.dot(first, rest)
        rest, overlap = tree.axpy(-correction, first, rest), overlap + correction
        height = tree.norm(rest)
        height = jnp.where(height > 100 * jnp.finfo(dtype).eps, height, 0)
        second = tree.scale(tree.reciprocal(height), rest)

        curved = matvec(first), matvec(second)
        between = (tree.dot(first, curved[1]) + tree.dot(second, curved[0])) / 2
        plane = jnp.array([[tree.dot(first, curved[0]), between], [between, tree.dot(second, curved[1])]])
        slope = jnp.stack([tree.dot(first, gradient), tree.dot(second, gradient)])
        values, vectors = jnp.linalg.eigh(plane)
        stiffness = jnp.abs(values) + damping
        y = -vectors @ (tree.reciprocal(stiffness) * (vectors.T @ slope))

        step = tree.axpy(y[0], first, tree.scale(y[1], second))
        along = y[1] * tree.reciprocal(height)
        return Proposal(
            step,
            learning_rate=-(y[0] - along * overlap) * tree.reciprocal(tree.norm(direction)),
            momentum=along * tree.reciprocal(tree.norm(previous)),
            predicted=slope @ y + y @ plane @ y / 2,
        )


def search(
    subspace: Subspace,
    weights: Callable[[jax.Array], jax.Array],
    dampings: jax.Array,
    value: Callable[[Tree], jax.Array],
) -> tuple[jax.Array, Proposal]:
    """The best of several λ on one basis, by the loss itself, and its step s = −d(λ).

    Learning rate and momentum need no rule here: the basis holds the gradient, and previous updates where the solver
    remembers them, and s is the saddle-free model's minimiser over all of it.

    Args:
      subspace: H and g in the basis.
      weights: from λ to f(θ).
      dampings: the λ to be tried.
      value: from a step to the loss after it.
    """
    trial = lambda damping: tree.scale(-1, subspace.combine(weights(damping)))  # noqa: E731
    losses = jax.lax.map(lambda damping: value(trial(damping)), dampings)
    best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
    damping = dampings[best]
    one, zero = jnp.ones_like(damping), jnp.zeros_like(damping)
    predicted = subspace.predicted_change(weights(damping))
    return damping, Proposal(trial(damping), one, zero, predicted, losses[best])


def predicted_change(matvec: MatVec, gradient: Tree, step: Tree) -> jax.Array:
    """m(s) = gᵀs + ½ sᵀHs, with one product.

    >>> predicted_change(lambda v: 2 * v, jnp.array([1.0]), jnp.array([-1.0]))
    Array(0., dtype=float32)
    """
    return tree.dot(gradient, step) + tree.dot(step, matvec(step)) / 2


def reduction_ratio(before: jax.Array, after: jax.Array, predicted: jax.Array) -> jax.Array:
    """ρ = (f(x+s) − f(x)) / m(s).

    Both changes are lowered by what rounding of the loss can hide (Conn, Gould & Toint 2000, §17.4.2), so that ρ is 1
    where nothing can be measured any more. A model that predicts no descent gives −∞ in effect: ρ = −1.

    >>> reduction_ratio(jnp.array(1.0), jnp.array(0.5), jnp.array(-1.0)).round(4)
    Array(0.5, dtype=float32)
    """
    hidden = 10 * jnp.finfo(before.dtype).eps * jnp.abs(before)
    actual, model = after - before - hidden, predicted - hidden
    return jnp.where(model < 0, actual / jnp.where(model < 0, model, 1), jnp.where(after > before, -1.0, 1.0))
