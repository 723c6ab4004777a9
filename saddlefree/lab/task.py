"""A problem with its data loaded: what a run trains.

The loss is a sum of terms, so that K-FAC can be told what each of them is, and so that a loss of squares can be taken
apart into residuals.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import saddlefree as sf
from saddlefree.lab.errors import UserError

Tree = Any
Batch = Any


class Term(NamedTuple):
    """weight · mean of squared errors, or the cross-entropy where the targets are classes."""

    outputs: jax.Array
    targets: jax.Array
    weight: float = 0.5

    @property
    def classifies(self) -> bool:
        """Whether the targets are classes."""
        return jnp.issubdtype(self.targets.dtype, jnp.integer)

    def mean(self) -> jax.Array:
        """The mean over the batch."""
        if self.classifies:
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(self.outputs, self.targets))
        squares = jnp.square(self.outputs - self.targets).reshape(self.outputs.shape[0], -1)
        return self.weight * jnp.mean(jnp.sum(squares, axis=1))

    def residuals(self) -> jax.Array:
        """r = √(2 weight/n)·(outputs − targets) as a vector, n the number of examples: ½‖r‖² is the mean."""
        scale = (2 * self.weight / self.outputs.shape[0]) ** 0.5
        return scale * (self.outputs - self.targets).reshape(-1)


Terms = Callable[[Tree, Tree, Batch, bool], tuple[list[Term], Tree]]
"""(parameters, model state, batch, training) to the loss's terms and the new model state."""


class Solution(NamedTuple):
    """A solved equation on a grid, for its picture. Arrays are (rows, columns): the second axis, then the first."""

    axes: dict[str, jax.Array]  # two, by name
    prediction: jax.Array
    truth: jax.Array


class Task(NamedTuple):
    """The model, the loss and three parts of data, the same for every seed."""

    init: Callable[[jax.Array], tuple[Tree, Tree]]  # key to (parameters, model state)
    terms: Terms | None
    parts: dict[str, Batch]  # train, val and test
    source: str = "generated"
    partial: str | None = None  # what of the data is missing
    value: Callable[[Tree], jax.Array] | None = None  # a loss that is no sum of terms
    error: Callable[[Tree, Batch], jax.Array] | None = None  # the test figure, where it is not the loss
    solution: Callable[[Tree], Solution] | None = None  # from the parameters, where an equation is solved
    pointwise: Callable[[Tree, Batch], sf.pointwise] | None = None  # the residuals of a batch, each of one point

    @property
    def examples(self) -> int:
        """How many there are for training; 1 where the loss needs no data."""
        arrays = jax.tree.leaves(self.parts["train"])
        return arrays[0].shape[0] if arrays else 1

    def loss(self, params: Tree, model_state: Tree, batch: Batch, key: jax.Array) -> tuple[jax.Array, tuple[Tree, Any]]:
        """As `saddlefree.training.make_step` calls it."""
        if self.value is not None:
            return self.value(params), (model_state, None)
        terms, model_state = self.terms(params, model_state, batch, True)  # type: ignore[misc]
        return total(terms), (model_state, None)

    def residuals(self, params: Tree, model_state: Tree, batch: Batch) -> jax.Array:
        """All residuals of a batch as one vector r, weighted so that the loss is ½‖r‖²."""
        terms = [] if self.terms is None else self.terms(params, model_state, batch, True)[0]
        if not terms or any(term.classifies for term in terms):
            raise UserError("residuals need a loss that is a sum of squares, which this problem's is not")
        return jnp.concatenate([term.residuals() for term in terms])

    def residual_fn(self, model_state: Tree, batch: Batch) -> Callable[[Tree], Any]:
        """The same as a function of the parameters, `saddlefree.pointwise` where each residual is of one point."""
        if self.pointwise is not None:
            return self.pointwise(model_state, batch)
        return lambda params: self.residuals(params, model_state, batch)

    def evaluate(self, params: Tree, model_state: Tree, parts: dict[str, Batch]) -> dict[str, jax.Array]:
        """The losses on each part, and the accuracy on the test part where classes are predicted."""
        figures = {}
        for name, part in parts.items():
            if self.value is not None:
                figures[name] = self.value(params)
            elif name == "test" and self.error is not None:
                figures[name] = self.error(params, part)
            else:
                terms, _ = self.terms(params, model_state, part, False)  # type: ignore[misc]
                figures[name] = total(terms)
                if name == "test" and terms[0].classifies:
                    hits = jnp.argmax(terms[0].outputs, axis=-1) == terms[0].targets
                    figures["accuracy"] = jnp.mean(hits.astype(jnp.float32))
        return figures


def total(terms: list[Term]) -> jax.Array:
    """The loss: the sum of its terms."""
    return sum((term.mean() for term in terms[1:]), terms[0].mean())
