"""Problems with examples, from data sets or generated: parts, standardisation, and the network's loss on a batch."""

from collections.abc import Callable
from typing import Any

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


def resnet18(data_dir: str | None, *, name: str, validation: float, width: int) -> Task:
    """ResNet-18 on the images `name`."""
    return supervised(name, models.resnet18(width=width), validation, True, data_dir)


def transformer(data_dir: str | None, *, validation: float, head_width: int, depth: int) -> Task:
    """The next character of a program's text, in pieces of 64."""
    model = models.transformer(128, 64, models.HEADS * head_width, depth)
    return supervised("python-library", model, validation, False, data_dir)


def adding(data_dir: str | None, *, length: int, width: int, examples: int) -> Task:
    """The sum of two marked numbers of a sequence, one in either half of it (Hochreiter & Schmidhuber 1997)."""

    def draw(rng: np.random.Generator, count: int) -> data.Examples:
        x = np.zeros((count, length, 2), np.float32)
        x[:, :, 0] = rng.random((count, length))
        rows, half = np.arange(count), length // 2
        first, second = rng.integers(half, size=count), half + rng.integers(length - half, size=count)
        x[rows, first, 1] = x[rows, second, 1] = 1
        return x, (x[rows, first, :1] + x[rows, second, :1])

    return _task(models.rnn(2, width, 1), _drawn(draw, examples))


def imbalanced(data_dir: str | None, *, inputs: int, classes: int, examples: int) -> Task:
    """Normal clusters, class k = 1, 2, … with a frequency in proportion to 1/k, and softmax regression on them."""
    centres = 0.3 * np.random.default_rng(1).normal(size=(classes, inputs))
    frequency = 1 / np.arange(1, classes + 1)

    def draw(rng: np.random.Generator, count: int) -> data.Examples:
        y = rng.choice(classes, count, p=frequency / frequency.sum()).astype(np.int32)
        return (centres[y] + rng.normal(size=(count, inputs))).astype(np.float32), y

    return _task(models.mlp(inputs, classes), _drawn(draw, examples))


def _drawn(draw: Callable[[np.random.Generator, int], data.Examples], examples: int) -> dict[str, data.Examples]:
    """So many examples for training, and a fifth of them, but at least one, for validation and for test each."""
    rng, few = np.random.default_rng(0), max(examples // 5, 1)
    return {"train": draw(rng, examples), "val": draw(rng, few), "test": draw(rng, few)}


def autoencoder(
    data_dir: str | None,
    *,
    name: str,
    sizes: Callable[..., tuple[int, ...]],
    validation: float,
    brightest: float,
    mean: float,
    **variant: Any,
) -> Task:
    """The images `name` through a narrow layer and back, tanh, ½ squared error of a pixel.

    Pixels are 0…`brightest`, divided by that and shifted by `mean`, all of them alike, so that empty borders stay so.
    """
    layers = sizes(**variant)
    model = models.mlp(*layers, activation=jnp.tanh)
    task = supervised(name, model, validation, True, data_dir)
    parts = {part: (x.reshape(len(x), -1),) for part, (x, _) in task.parts.items()}

    def terms(params: Tree, model_state: Tree, batch: Batch, training: bool) -> tuple[list[Term], Tree]:
        pixels = batch[0].astype(jnp.float32) / brightest - mean
        outputs, model_state = model.apply(params, model_state, pixels, training)
        return [Term(outputs, pixels, 0.5 / layers[0])], model_state

    return task._replace(terms=terms, parts=parts, pointwise=_pointwise(terms))


def supervised(name: str, model: models.Model, validation: float, shuffled: bool, data_dir: str | None) -> Task:
    """A task from a data set: a seeded random share of its training examples, or the last ones, is for validation.

    Inputs are standardised by the examples for training and validation, images by channel, texts not at all. So are
    targets that are numbers. Images stay bytes until a batch of them is used.
    """
    found = data.load(name, data_dir)
    x, y = found.train
    images = x.dtype == np.uint8
    axes = tuple(range(x.ndim - 1)) if images else (0,)
    mean, scale = x.mean(axes), np.maximum(x.std(axes), 1e-12)
    test_x, test_y = found.test
    if x.dtype.kind == "f":
        x, test_x = (((part - mean) / scale).astype(np.float32) for part in (x, test_x))
    if y.dtype.kind == "f":
        y, test_y = (((part - y.mean(0)) / y.std(0)).astype(np.float32) for part in (y, test_y))
    order = np.random.default_rng(0).permutation(len(x)) if shuffled else np.arange(len(x))
    train, val = np.split(order, [len(x) - round(len(x) * validation)])
    parts = {"train": (x[train], y[train]), "val": (x[val], y[val]), "test": (test_x, test_y)}

    def standardised(pixels: jax.Array) -> jax.Array:
        return (pixels.astype(jnp.float32) - mean.astype(np.float32)) / scale.astype(np.float32)

    return _task(model, parts, standardised if images else None)._replace(source=found.source, partial=found.partial)


def _task(
    model: models.Model,
    parts: dict[str, data.Examples],
    prepare: Callable[[jax.Array], jax.Array] | None = None,
) -> Task:
    """The task with these examples; `prepare` is applied to the inputs of a batch."""
    numbers = parts["train"][1].dtype.kind == "f"

    def terms(params: Tree, model_state: Tree, batch: Batch, training: bool) -> tuple[list[Term], Tree]:
        inputs, targets = batch
        outputs, model_state = model.apply(params, model_state, prepare(inputs) if prepare else inputs, training)
        if not numbers:  # in a text there is a class at each place
            outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        return [Term(outputs.astype(jnp.float32), targets)], model_state

    arrays = jax.tree.map(jnp.asarray, parts)
    return Task(model.init, terms, arrays, pointwise=_pointwise(terms) if numbers else None)


def _pointwise(terms: Terms) -> Callable[[Tree, Batch], sf.pointwise]:
    """The residuals of a loss with one term, example by example."""

    def residuals(model_state: Tree, batch: Batch) -> sf.pointwise:
        count = len(jax.tree.leaves(batch)[0])

        def of_one(params: Tree, example: Tree) -> jax.Array:
            (term,), _ = terms(params, model_state, jax.tree.map(lambda x: x[None], example), True)
            return term.residuals() / count**0.5

        return sf.pointwise((of_one, batch))

    return residuals
