"""What can be trained: a registry of problems, each the paper's or one that needs no data.

The data of a problem is the same for every seed; initial parameters and the order of batches are the seed's. Images
stay bytes until a batch of them is used.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from saddlefree.lab import data, models, physics
from saddlefree.lab.errors import UserError, nearest
from saddlefree.lab.task import Batch, Task, Term, Tree


@dataclasses.dataclass(frozen=True)
class Problem:
    """An entry of the registry."""

    title: str
    load: Callable[[str | None], Task]  # from the data directory
    epochs: int
    batch_size: int | None = None  # None: the whole training set in every step
    float64: bool = False
    convolutional: bool = False  # steps are then not put into a compiled loop, which is slow on a CPU
    evaluations: int = 100  # in a run
    evaluated: int | None = None  # at most so many examples of a part
    data: str | None = None  # the data set that it needs
    test: str = "loss"  # what the test figure is
    tuning: float = 300.0  # seconds that a search for hyperparameters has


def supervised(
    name: str, make: Callable[[], models.Model], validation: float, shuffled: bool = True
) -> Callable[[str | None], Task]:
    """A task from a data set: a seeded random share of its training examples, or the last ones, is for validation.

    Inputs are standardised by the examples for training and validation, images by channel. So are targets that are
    numbers.
    """

    def load(data_dir: str | None) -> Task:
        found, model = data.load(name, data_dir), make()
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
            return [Term(outputs, targets)], model_state

        return Task(model.init, terms, jax.tree.map(jnp.asarray, parts), found.source, found.partial)

    return load


def saddle(_: str | None) -> Task:
    """f(x, y) = ½(x² − y²) + ¼y⁴: a saddle at 0, minima of −¼ at (0, ±1)."""

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        return jnp.array([0.9, 0.05]) + 0.01 * jax.random.normal(key, (2,)), None

    def value(x: jax.Array) -> jax.Array:
        return 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4

    return Task(init, None, {"train": (), "val": (), "test": ()}, value=value)


_relative = "relative L2 error"
PROBLEMS = {
    "saddle": Problem("A saddle in the plane", saddle, epochs=50),
    "digits": Problem(
        "Handwritten digits", supervised("digits", lambda: models.mlp(64, 32, 10), 0.2), 30, 100, data="digits"
    ),
    "diabetes": Problem(
        "Progression of diabetes", supervised("diabetes", lambda: models.mlp(10, 16, 16, 1), 0.2), 500, data="diabetes"
    ),
    "uci-energy": Problem(
        "UCI Energy",
        supervised("uci-energy", lambda: models.mlp(8, *[12] * 7, 1), 104 / 692, False),
        6000,
        data="uci-energy",
    ),
    "kin8nm": Problem(
        "kin8nm", supervised("kin8nm", lambda: models.mlp(8, 50, 1), 1475 / 7373, False), 500, data="kin8nm"
    ),
    "uci-protein": Problem(
        "UCI Protein", supervised("uci-protein", lambda: models.mlp(9, 50, 1), 0.2, False), 20, 400, data="uci-protein"
    ),
    "fashion-mnist": Problem(
        "Fashion-MNIST",
        supervised("fashion-mnist", lambda: models.mlp(784, 50, 10), 1 / 6),
        10,
        200,
        data="fashion-mnist",
    ),
    "svhn": Problem(
        "SVHN",
        supervised("svhn", models.resnet18, 1 / 6),
        epochs=10,
        batch_size=200,
        convolutional=True,
        evaluations=10,
        evaluated=1000,
        data="svhn",
        tuning=45 * 60.0,
    ),
    "cifar-10": Problem(
        "CIFAR-10",
        supervised("cifar-10", models.resnet18, 1 / 10),
        epochs=72,
        batch_size=800,
        convolutional=True,
        evaluations=20,
        evaluated=1000,
        data="cifar-10",
        tuning=120 * 60.0,
    ),
    "pinn-poisson": Problem("Poisson's equation", physics.poisson, 2000, float64=True, test=_relative),
    "pinn-convection": Problem("Convection", physics.convection, 2000, float64=True, test=_relative),
    "pinn-burgers": Problem("Burgers' equation", physics.burgers, 2000, float64=True, test=_relative),
}


def find(name: str) -> Problem:
    """A problem by its name."""
    if name not in PROBLEMS:
        hint = nearest(name, PROBLEMS, "`saddlefree problems` lists them")
        raise UserError(f"problem {name!r} is not known: {hint}")
    return PROBLEMS[name]
