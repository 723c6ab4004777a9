"""Problems from data sets: parts, standardisation, and the network's loss on a batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import saddlefree as sf
from saddlefree.lab import data, models
from saddlefree.lab.task import Batch, Task, Term, Terms, Tree

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh}


def dense(
    data_dir: str | None,
    *,
    name: str,
    sizes: Callable[[int, int], tuple[int, ...]],
    validation: float,
    shuffled: bool,
    width: int,
    depth: int,
    activation: str,
    dtype: str,
) -> Task:
    """A multi-layer perceptron on the data set `name`; `sizes` gives its layers from width and depth."""
    model = models.mlp(*sizes(width, depth), activation=ACTIVATIONS[activation], dtype=jnp.dtype(dtype))
    return supervised(name, model, validation, shuffled, data_dir)


def resnet18(data_dir: str | None, *, name: str, validation: float) -> Task:
    """ResNet-18 on the images `name`."""
    return supervised(name, models.resnet18(), validation, True, data_dir)


def autoencoder(data_dir: str | None, *, width: int, code: int) -> Task:
    """The digits through a narrow layer and back: 64-width-code-width-64, tanh, ½ squared error of all pixels."""
    model = models.mlp(64, width, code, width, 64, activation=jnp.tanh)
    task = supervised("digits", model, 0.2, True, data_dir)
    # Pixels are 0…16; a shift and a scale for all of them, so that empty borders stay empty.
    parts = {name: ((x.reshape(len(x), -1) / 16 - 0.3).astype(jnp.float32),) for name, (x, _) in task.parts.items()}

    def terms(params: Tree, model_state: Tree, batch: Batch, training: bool) -> tuple[list[Term], Tree]:
        (pixels,) = batch
        outputs, model_state = model.apply(params, model_state, pixels, training)
        return [Term(outputs, pixels, 0.5 / 64)], model_state

    return task._replace(terms=terms, parts=parts, pointwise=_pointwise(terms))


def supervised(name: str, model: models.Model, validation: float, shuffled: bool, data_dir: str | None) -> Task:
    """A task from a data set: a seeded random share of its training examples, or the last ones, is for validation.

    Inputs are standardised by the examples for training and validation, images by channel. So are targets that are
    numbers. Images stay bytes until a batch of them is used.
    """
    found = data.load(name, data_dir)
    x, y = found.train
    images = x.dtype == np.uint8
    axes = tuple(range(x.ndim - 1)) if images else (0,)
    mean, scale = x.mean(axes), np.maximum(x.std(axes), 1e-12)
    test_x, test_y = found.test
    if not images:
        x, test_x = (((part - mean) / scale).astype(np.float32) for part in (x, test_x))
    if y.dtype.kind == "f":
        y, test_y = (((part - y.mean(0)) / y.std(0)).astype(np.float32) for part in (y, test_y))
    order = np.random.default_rng(0).permutation(len(x)) if shuffled else np.arange(len(x))
    train, val = np.split(order, [len(x) - round(len(x) * validation)])
    parts = {"train": (x[train], y[train]), "val": (x[val], y[val]), "test": (test_x, test_y)}

    def terms(params: Tree, model_state: Tree, batch: Batch, training: bool) -> tuple[list[Term], Tree]:
        inputs, targets = batch
        if images:
            inputs = (inputs.astype(jnp.float32) - mean.astype(np.float32)) / scale.astype(np.float32)
        outputs, model_state = model.apply(params, model_state, inputs, training)
        return [Term(outputs.astype(jnp.float32), targets)], model_state

    pointwise = _pointwise(terms) if y.dtype.kind == "f" else None
    return Task(model.init, terms, jax.tree.map(jnp.asarray, parts), found.source, found.partial, pointwise=pointwise)


def _pointwise(terms: Terms) -> Callable[[Tree, Batch], sf.pointwise]:
    """The residuals of a loss with one term, example by example."""

    def residuals(model_state: Tree, batch: Batch) -> sf.pointwise:
        count = len(jax.tree.leaves(batch)[0])

        def of_one(params: Tree, example: Tree) -> jax.Array:
            (term,), _ = terms(params, model_state, jax.tree.map(lambda x: x[None], example), True)
            return term.residuals() / count**0.5

        return sf.pointwise((of_one, batch))

    return residuals
