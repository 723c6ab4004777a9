"""What can be trained: a registry of problems, each defined once, with its variants as settings of the entry.

The data of a problem is the same for every seed; initial parameters and the order of batches are the seed's. The
registry loads without JAX: an entry names the function that loads it.
"""

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from saddlefree.lab.errors import Registry
from saddlefree.lab.settings import Setting, parsed

if TYPE_CHECKING:
    from saddlefree.lab.task import Task


@dataclasses.dataclass(frozen=True)
class Problem:
    """An entry of the registry."""

    title: str
    make: "Callable[..., Task]"  # (data directory, **variant) to the task
    epochs: int
    batch_size: int | None = None  # None: the whole training set in every step
    float64: bool = False
    convolutional: bool = False  # seeds are then not mapped, which makes slow convolutions in groups
    evaluations: int = 100  # in a run
    evaluated: int | None = None  # at most so many examples of a part
    data: str | None = None  # the data set that it needs
    validation: float = 0.0  # the share of the data set's training examples
    test: str = "loss"  # what the test figure is
    tuning: float = 300.0  # seconds that a search for hyperparameters has
    about: str = ""  # the equation, or what the data is
    network: str = ""
    sizes: Callable[..., tuple[int, ...]] | None = None  # of a dense network's layers, from the settings of them
    variants: dict[str, Setting] = dataclasses.field(default_factory=dict)
    published: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # whose, and the variant
    source: str = ""
    licence: str = ""

    def variant(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every setting of the variant that `changes` asks for, as text or as values."""
        defaults = {name: setting.default for name, setting in self.variants.items()}
        return defaults | parsed(self.variants, changes or {}, f"a setting of {self.title}")

    def load(self, data_dir: str | None = None, variant: Mapping[str, Any] | None = None) -> "Task":
        """The task, with the data looked for in `data_dir` first; the problem's own variant unless one is given."""
        return self.make(data_dir, **self.variant(variant))

    def parameters(self, variant: Mapping[str, Any] | None = None) -> int | None:
        """How many a dense network has; None for other models."""
        if self.sizes is None:
            return None
        values = self.variant(variant)
        names = ("width", "depth", "code", "layers", "inputs", "classes")
        layers = self.sizes(*(values[name] for name in names if name in values))
        return sum((n + 1) * m for n, m in itertools.pairwise(layers))


PROBLEMS = Registry[Problem]("problem", otherwise="`saddlefree problems` lists them")
register = PROBLEMS.add
find = PROBLEMS.__getitem__


def problem(name: str, title: str, *, epochs: int, **entry: Any) -> Callable[[Any], Any]:
    """Registers a function (data directory, **variant) to `Task` as a problem, for plugins.

    Args:
      name: for the command line.
      title: for reports.
      epochs: of a run unless the user says otherwise; one epoch is one step where `batch_size` is None.
      **entry: any other field of `Problem`, such as `float64=True`, `variants={"beta": Setting(20.0)}`.
    """

    def add(make: "Callable[..., Task]") -> "Callable[..., Task]":
        register(name, Problem(title, make, epochs, **entry))
        return make

    return add


def _late(module: str, function: str, **given: Any) -> "Callable[..., Task]":
    """A function of the laboratory that is imported when it is called, because it imports JAX."""

    def make(data_dir: str | None, **variant: Any) -> "Task":
        return getattr(importlib.import_module(f"saddlefree.lab.{module}"), function)(data_dir, **given, **variant)

    return make


def _count(default: int, about: str, high: int = 1_000_000) -> Setting:
    return Setting(default, low=1, high=high, whole=True, about=about)


def _in_time(points: int, start: int, side: int, where: str) -> dict[str, Setting]:
    """The numbers of points of an equation in space and time."""
    counts = {"points": (points, "inside"), "start_points": (start, "at t = 0"), "side_points": (side, where)}
    return {name: _count(*count) for name, count in counts.items()}


def _layers(width: int, depth: int) -> dict[str, Setting]:
    return {"width": _count(width, "of each hidden layer", 10_000), "depth": _count(depth, "hidden layers", 100)}


def _dense(
    name: str,
    title: str,
    inputs: int,
    layers: tuple[int, int],
    outputs: int,
    epochs: int,
    batch_size: int | None = None,
    *,
    validation: float,
    shuffled: bool = False,
    **entry: Any,
) -> None:
    """A multi-layer perceptron on a data set, as wide and as deep as `layers` says."""

    def sizes(width: int, depth: int) -> tuple[int, ...]:
        return inputs, *[width] * depth, outputs

    variants = {
        **_layers(*layers),
        "activation": Setting("relu", choices=("relu", "tanh")),
        "dtype": Setting("float32", choices=("float32", "bfloat16"), about="of parameters and layers"),
    }
    make = _late("supervised", "dense", name=name, sizes=sizes, validation=validation, shuffled=shuffled)
    register(
        name,
        Problem(
            title, make, epochs, batch_size, data=name, validation=validation, sizes=sizes, variants=variants, **entry
        ),
    )


def _mirrored(*widths: int) -> tuple[int, ...]:
    return *widths, *reversed(widths[:-1])


def _autoencoder(
    name: str,
    title: str,
    epochs: int,
    sizes: Callable[..., tuple[int, ...]],
    variants: dict[str, Setting],
    *,
    validation: float,
    pixels: dict[str, float],
    **entry: Any,
) -> None:
    """A tanh network from the images of a data set to themselves, whose layers the settings of the variant give."""
    given = {"name": name, "sizes": sizes, "validation": validation, **pixels}
    entry |= {"data": name, "validation": validation, "network": "tanh MLP", "sizes": sizes, "variants": variants}
    make = _late("supervised", "autoencoder", **given)
    register(f"{name.removesuffix('-mnist')}-autoencoder", Problem(title, make, epochs, 200, **entry))


def _resnet(name: str, title: str, epochs: int, batch_size: int, **entry: Any) -> None:
    """ResNet-18 on images of 32 × 32 × 3 in ten classes."""
    register(
        name,
        Problem(
            title,
            _late("supervised", "resnet18", name=name, validation=entry["validation"]),
            epochs,
            batch_size,
            convolutional=True,
            evaluated=1000,
            data=name,
            network="ResNet-18 with batch norm, 11,181,642 parameters at full width",
            variants={"width": _count(64, "channels of the first stage", 1000)},
            **entry,
        ),
    )


def _physics(name: str, title: str, layers: tuple[int, int], variants: dict[str, Setting], **entry: Any) -> None:
    """A physics-informed network of two coordinates, trained with the full batch in float64."""

    def sizes(width: int, depth: int) -> tuple[int, ...]:
        return 2, *[width] * depth, 1

    register(
        f"pinn-{name}",
        Problem(
            title,
            _late("physics", name.replace("-", "_")),
            epochs=2000,
            float64=True,
            test="relative L2 error",
            network="tanh MLP",
            licence="none needed: generated",
            sizes=sizes,
            variants={**variants, **_layers(*layers)},
            **entry,
        ),
    )


CUTEST = (
    *("ROSENBR", "HAIRY", "SNAIL", "HELIX", "BROWNDEN", "BIGGS6", "OSBORNEB", "CHNROSNB", "ERRINROS", "LUKSAN11LS"),
    *("GENROSE", "FLETCHCR", "MSQRTALS", "EDENSCH", "EIGENALS", "WOODS", "BROYDN7D", "FREUROTH", "DIXON3DQ", "CURLY10"),
)
"""By their number of variables, from 2 to 10,000."""

_DEEP = "1000-500-250-30"
_GAL = "as split by Gal & Ghahramani 2016"
register(
    "saddle",
    Problem(
        "A saddle in the plane",
        _late("surfaces", "saddle"),
        epochs=50,
        about="f(x, y) = ½(x² − y²) + ¼y⁴: a saddle at 0, minima of −¼ at (0, ±1)",
        network="two numbers",
        source="made for this laboratory",
        licence="none needed: generated",
    ),
)
register(
    "cutest",
    Problem(
        "A problem of CUTEst",
        _late("cutest", "cutest"),
        epochs=1000,
        float64=True,
        about="twenty classical test functions, unconstrained, with 2 to 10,000 variables, each from its own start",
        network="none",
        variants={"name": Setting("ROSENBR", choices=CUTEST, about="in CUTEst")},
        source="Gould, Orban & Toint 2015, in JAX by sif2jax",
        licence="Apache 2.0 (sif2jax)",
    ),
)
_dense(
    "digits",
    "Handwritten digits",
    64,
    (32, 1),
    10,
    30,
    100,
    validation=0.2,
    shuffled=True,
    about="images of 8 × 8 in ten classes; cross-entropy",
    source="Alpaydin & Kaynak 1998, with scikit-learn",
    licence="CC BY 4.0",
)
_autoencoder(
    "digits",
    "Auto-encoder of digits",
    60,
    lambda width, code: (64, width, code, width, 64),
    {"width": _count(32, "of the outer hidden layers", 10_000), "code": _count(8, "of the middle", 1000)},
    validation=0.2,
    pixels={"brightest": 16.0, "mean": 0.3},
    about="images of 8 × 8 through a narrow layer and back; ½·mean squared error of a pixel",
    source="Alpaydin & Kaynak 1998, with scikit-learn",
    licence="CC BY 4.0",
)
_dense(
    "diabetes",
    "Progression of diabetes",
    10,
    (16, 2),
    1,
    500,
    validation=0.2,
    shuffled=True,
    about="its progression after a year from ten measurements; ½·mean squared error",
    source="Efron, Hastie, Johnstone & Tibshirani 2004, with scikit-learn",
    licence="none stated",
)
_dense(
    "uci-energy",
    "UCI Energy",
    8,
    (12, 7),
    1,
    6000,
    validation=104 / 692,
    about="heating load of buildings from eight measures; ½·mean squared error",
    source=f"Tsanas & Xifara 2012, {_GAL}",
    licence="CC BY 4.0",
)
_dense(
    "kin8nm",
    "kin8nm",
    8,
    (50, 1),
    1,
    500,
    validation=1475 / 7373,
    about="kinematics of a robot arm with eight joints; ½·mean squared error",
    source=f"DELVE, {_GAL}",
    licence="none stated",
)
_dense(
    "uci-protein",
    "UCI Protein",
    9,
    (50, 1),
    1,
    20,
    400,
    validation=0.2,
    about="structure of proteins from nine properties; ½·mean squared error",
    source=f"Rana 2013, {_GAL}",
    licence="CC BY 4.0",
)
_dense(
    "fashion-mnist",
    "Fashion-MNIST",
    784,
    (50, 1),
    10,
    10,
    200,
    validation=1 / 6,
    shuffled=True,
    about="clothes, images of 28 × 28 in ten classes; cross-entropy",
    source="Xiao, Rasul & Vollgraf 2017",
    licence="MIT",
)
_autoencoder(
    "fashion-mnist",
    "Auto-encoder of Fashion-MNIST",
    10,
    lambda layers: _mirrored(784, *map(int, layers.split("-"))),
    {"layers": Setting(_DEEP, choices=(_DEEP, "100-50-25-10"), about="widths of the layers down to the narrowest")},
    validation=1 / 6,
    pixels={"brightest": 255.0, "mean": 0.286},
    evaluated=5000,
    about="images of 28 × 28 through four ever narrower layers and back; ½·mean squared error of a pixel",
    source="Hinton & Salakhutdinov 2006, on the images of Xiao, Rasul & Vollgraf 2017",
    licence="MIT",
)
register(
    "adding",
    Problem(
        "Sum of two marked numbers",
        _late("supervised", "adding"),
        epochs=30,
        batch_size=100,
        about="two numbers of a sequence are marked, one in either half; ½·mean squared error of their sum",
        network="recurrent, tanh without gates",
        variants={
            "length": Setting(60, low=2, high=10_000, whole=True, about="of a sequence"),
            "width": _count(64, "of the state", 10_000),
            "examples": _count(10_000, "for training, and a fifth for validation and test each"),
        },
        source="Hochreiter & Schmidhuber 1997",
        licence="none needed: generated",
    ),
)
register(
    "imbalanced",
    Problem(
        "Classes of unequal frequency",
        _late("supervised", "imbalanced"),
        epochs=20,
        batch_size=200,
        about="normal clusters, the kth of which is 1/k times as frequent as the first; cross-entropy",
        network="softmax regression",
        sizes=lambda inputs, classes: (inputs, classes),
        variants={
            "inputs": _count(64, "dimensions of a cluster", 10_000),
            "classes": _count(256, "and clusters", 10_000),
            "examples": _count(20_000, "for training, and a fifth for validation and test each"),
        },
        source="Kunstner et al. 2024, with clusters",
        licence="none needed: generated",
    ),
)
register(
    "transformer",
    Problem(
        "The next character of a program",
        _late("supervised", "transformer", validation=336 / 5394),
        epochs=10,
        batch_size=32,
        evaluations=20,
        evaluated=353,
        data="python-library",
        validation=336 / 5394,
        about="pieces of 64 characters from fifteen files of Python's standard library, one more each for validation "
        "and test; cross-entropy of the next character",
        network="transformer with four heads, 1,032,704 parameters at full width and depth",
        variants={"head_width": _count(32, "of each head", 1000), "depth": _count(5, "blocks", 100)},
        source="CPython, the same files in 3.11.2 to 3.13.0",
        licence="PSF-2.0",
    ),
)
_resnet(
    "svhn",
    "SVHN",
    10,
    200,
    evaluations=10,
    validation=1 / 6,
    tuning=45 * 60.0,
    about="house numbers, images of 32 × 32 × 3 in ten classes; cross-entropy",
    source="Netzer et al. 2011",
    licence="for non-commercial use",
)
_resnet(
    "cifar-10",
    "CIFAR-10",
    72,
    800,
    evaluations=20,
    validation=1 / 10,
    tuning=120 * 60.0,
    about="animals and vehicles, images of 32 × 32 × 3 in ten classes; cross-entropy",
    source="Krizhevsky 2009",
    licence="none stated",
)
_physics(
    "poisson",
    "Poisson's equation",
    (32, 3),
    {
        "waves": Setting(2.0, low=0.5, high=50, about="k"),
        "points": _count(800, "inside"),
        "side_points": _count(50, "on each of the four sides"),
    },
    about="−Δu = f on the unit square, u = 0 on its boundary, with u = sin πx sin kπy",
    published={
        "Müller & Zeinhofer 2023 (ENGD)": {"waves": 1.0, "points": 900, "side_points": 30, "width": 64, "depth": 1}
    },
    source="a manufactured solution",
)
_physics(
    "convection",
    "Convection",
    (50, 3),
    {
        "beta": Setting(20.0, low=0.1, high=200, about="β"),
        **_in_time(1000, 128, 100, "pairs on the two sides"),
    },
    about="u_t + β u_x = 0 on [0, 2π] × [0, 1], u(x, 0) = sin x, periodic in x",
    published={
        "Rathore et al. 2024 (NysNewton-CG)": {
            "beta": 40.0,
            "points": 10_000,
            "start_points": 257,
            "side_points": 101,
            "width": 200,
            "depth": 3,
        }
    },
    source="Krishnapriyan et al. 2021",
)
_physics(
    "burgers",
    "Burgers' equation",
    (32, 4),
    {
        "viscosity": Setting(0.01 / math.pi, low=1e-3, high=1, about="ν"),
        **_in_time(2000, 100, 50, "on each of the two sides"),
    },
    about="u_t + u u_x = ν u_xx on [−1, 1] × [0, 1], u(x, 0) = −sin πx, u(±1, t) = 0",
    published={"Raissi, Perdikaris & Karniadakis 2019": {"points": 10_000, "width": 20, "depth": 8}},
    source="Basdevant et al. 1986",
)
_physics(
    "poisson-2d",
    "Poisson's equation, as published",
    (64, 1),
    {"points": _count(900, "inside"), "side_points": _count(120, "on the boundary")},
    about="−Δu = f on the unit square, u = 0 on its boundary, with u = sin πx sin πy",
    source="Müller & Zeinhofer 2023; Dangel, Müller & Zeinhofer 2024",
)
_physics(
    "heat",
    "Heat equation",
    (64, 1),
    _in_time(900, 40, 40, "on each of the two sides"),
    about="u_t = ¼ u_xx on [0, 1]², u(x, 0) = sin πx, u(0, t) = u(1, t) = 0",
    source="Müller & Zeinhofer 2023; Dangel, Müller & Zeinhofer 2024",
)
register(
    "pinn-poisson-5d",
    Problem(
        "Poisson's equation in five dimensions",
        _late("physics", "poisson_5d"),
        epochs=2000,
        float64=True,
        test="relative L2 error",
        about="−Δu = f on the unit cube, u given on its boundary, with u = Σ cos πxᵢ, i = 1 … 5",
        network="tanh MLP",
        sizes=lambda layers: (5, *map(int, layers.split("-")), 1),
        variants={
            "points": _count(3000, "inside"),
            "side_points": _count(500, "on the boundary"),
            "layers": Setting("64", choices=("64", "64-64-48-48"), about="widths of the hidden layers"),
        },
        source="Dangel, Müller & Zeinhofer 2024; with four layers Guzmán-Cordero et al. 2025",
        licence="none needed: generated",
    ),
)
_physics(
    "wave",
    "Wave equation",
    (20, 6),
    _in_time(1000, 100, 50, "on each of the two sides"),
    about="u_tt = 4 u_xx on [0, 1]², u(x, 0) = sin πx + ½ sin 4πx, u_t(x, 0) = 0, u(0, t) = u(1, t) = 0",
    source="Wang, Yu & Perdikaris 2022",
)
_physics(
    "allen-cahn",
    "Allen-Cahn equation",
    (32, 4),
    _in_time(2000, 200, 50, "pairs on the two sides"),
    about="u_t = 1e-4 u_xx + 5u − 5u³ on [−1, 1] × [0, 1], u(x, 0) = x² cos πx, u and u_x periodic in x",
    source="Raissi, Perdikaris & Karniadakis 2019",
)
