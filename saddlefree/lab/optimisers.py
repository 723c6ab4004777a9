"""What can train: a registry of optimisers, with their hyperparameters and the ranges in which tuning looks.

On the paper's problems an optimiser has the paper's hyperparameters (`paper.TUNED`), elsewhere the defaults here.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax
import optax.contrib

import saddlefree as sf
from saddlefree.lab import methods
from saddlefree.lab.errors import UserError, nearest
from saddlefree.lab.paper import TUNED


@dataclasses.dataclass(frozen=True)
class Setting:
    """A hyperparameter: its default, what is allowed, and where tuning looks for it."""

    default: Any
    search: tuple[float, float] | None = None  # None: tuning leaves the default
    low: float = 0.0
    high: float = math.inf
    log: bool = True  # whether tuning draws its logarithm
    whole: bool = False
    choices: tuple[str, ...] = ()

    def parse(self, name: str, text: Any) -> Any:
        """The value that `text` stands for, if it is allowed."""
        if self.choices:
            if text in self.choices:
                return text
            raise UserError(f"{name} must be one of {', '.join(self.choices)}, got {text!r}")
        kind, what = (int, "a whole number") if self.whole else (float, "a number")
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high:
            upper = f"and ≤ {self.high:g}" if math.isfinite(self.high) else ""
            raise UserError(f"{name} must be {what} ≥ {self.low:g} {upper}".rstrip() + f", got {text!r}")
        return value

    def draw(self, rng: np.random.Generator) -> Any:
        """A random value from the range of the search."""
        assert self.search
        low, high = self.search[0], self.search[1] + self.whole
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        return min(int(value), int(self.search[1])) if self.whole else value


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """An entry of the registry."""

    about: str
    build: methods.Build
    settings: dict[str, Setting]
    tuned: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by problem, where the paper has none
    mapped: bool = True  # whether seeds can be run together


_DECAYS = ("none", "linear", "cosine")


def _rate(default: float, low: float, high: float, decay: str = "none") -> dict[str, Setting]:
    return {"learning_rate": Setting(default, (low, high)), "decay": Setting(decay, choices=_DECAYS)}


def _of_series(terms: int, order: int) -> dict[str, Setting]:
    return {
        "terms": Setting(terms, (1, 20), low=1, log=False, whole=True),
        "order": Setting(order, (0, 9), log=False, whole=True),
        "scale": Setting("lower-bound", choices=("lower-bound", "lanczos-bound")),
    }


def _momentum(default: float) -> dict[str, Setting]:
    return {"momentum": Setting(default, (1e-3, 0.95), high=0.9999)}


def _damping(default: float, low: float = 1e-8, high: float = 1.0) -> dict[str, Setting]:
    return {"damping": Setting(default, (low, high))}


_initial = {"initial_damping": Setting(1e-2, (1e-8, 10))}
OPTIMISERS = {
    "series": Optimiser(
        "the paper's series of Hessian-vector products",
        methods.fixed(methods.series),
        {**_rate(0.3, 1e-3, 5), **_momentum(0.4), **_damping(0.05), **_of_series(13, 5)},
    ),
    "series-adaptive": Optimiser(
        "the same with adaptive rate, momentum and damping",
        methods.adaptive(methods.series),
        {**_initial, **_of_series(9, 4)},
    ),
    "exact": Optimiser(
        "saddle-free Newton with the dense Hessian",
        methods.fixed(lambda v: sf.exact(threshold=v["threshold"], replacement=v["replacement"])),
        {
            **_rate(0.1, 1e-4, 1),
            **_momentum(0.0),
            **_damping(0.01),
            "threshold": Setting(0.0),
            "replacement": Setting(1.0, low=1e-12),
        },
        mapped=False,
    ),
    "exact-adaptive": Optimiser(
        "the same, adaptive, with a moving average of the Hessian",
        methods.adaptive(lambda v: sf.exact(average=v["average"])),
        {**_initial, "average": Setting(0.95, high=0.9999)},
        mapped=False,
    ),
    "newton": Optimiser(
        "Newton's method, which is drawn to saddles",
        methods.fixed(lambda v: sf.exact(absolute=False)),
        {**_rate(1.0, 1e-3, 1), **_momentum(0.0), **_damping(0.0, 1e-8, 10)},
        mapped=False,
    ),
    "lanczos": Optimiser(
        "the best direction from a few products",
        methods.fixed(lambda v: sf.lanczos(v["products"])),
        {
            **_rate(0.3, 1e-3, 5),
            **_momentum(0.5),
            **_damping(0.1, 1e-3, 10),
            "products": Setting(10, (3, 30), low=1, whole=True),
        },
    ),
    "lanczos-adaptive": Optimiser(
        "the same with recycled curvature and nothing to tune",
        methods.adaptive(
            lambda v: sf.lanczos(v["products"], "sqrt", memory=v["memory"], recycle=v["recycle"]), sf.damping_search
        ),
        {
            **_initial,
            "products": Setting(8, (3, 20), low=1, whole=True),
            "memory": Setting(1, whole=True),
            "recycle": Setting(40, whole=True),
        },
    ),
    "low-rank": Optimiser(
        "curvature of low rank, refreshed now and then, over Adam",
        methods.low_rank,
        {
            **_rate(3e-3, 3e-4, 0.1, "cosine"),
            "newton_rate": Setting(0.3, (0.03, 1)),
            **_damping(1e-2, 1e-4, 1),
            "rank": Setting(20, whole=True),
            "refresh_every": Setting(50, (20, 200), low=1, whole=True),
            "averaging": Setting(0.9, high=0.9999),
            "second_moment": Setting(0.999, high=0.9999),
            "epsilon": Setting(1e-8, (1e-8, 1e-2), low=1e-12),
            "surprise": Setting(0.0),  # 0: never; where seeds are mapped, all pay for an early refresh of one
        },
        {
            "uci-energy": {"learning_rate": 0.02, "refresh_every": 20, "second_moment": 0.99},
            "digits": {"learning_rate": 0.03},
        },
    ),
    "sgd": Optimiser(
        "stochastic gradient descent",
        methods.transformed(lambda v, around: optax.sgd(methods.schedule(v, around), v["momentum"] or None)),
        {**_rate(0.05, 1e-6, 1e-1), "momentum": Setting(0.0, high=0.9999)},
        {"digits": {"learning_rate": 0.1, "momentum": 0.9, "decay": "cosine"}},
    ),
    "adam": Optimiser(
        "Adam",
        methods.transformed(methods.adam),
        {
            **_rate(3e-3, 1e-6, 1, "cosine"),
            "epsilon": Setting(1e-8, (1e-10, 10)),
            "one_minus_beta1": Setting(0.1, (1e-3, 1), high=1),
            "one_minus_beta2": Setting(0.001, (1e-4, 1), high=1),
        },
        {"digits": {"learning_rate": 0.03}},
    ),
    "muon": Optimiser(
        "Muon, and Adam for what is not a matrix",
        methods.transformed(lambda v, around: optax.contrib.muon(methods.schedule(v, around))),
        _rate(0.01, 1e-4, 0.1, "cosine"),
    ),
    "sophia": Optimiser(
        "Sophia: Adam with a clipped diagonal of the Hessian",
        methods.transformed(methods.sophia),
        {**_rate(1e-3, 1e-5, 0.1, "cosine"), "gamma": Setting(0.01, (1e-3, 1))},
    ),
    "lbfgs": Optimiser(
        "L-BFGS with a zoom line search",
        methods.lbfgs,
        {
            "memory": Setting(20, (5, 50), low=1, whole=True),
            "iterations": Setting(1, low=1, whole=True),
            "evaluations": Setting(25, low=1, whole=True),
        },
        mapped=False,  # together, all would wait for the longest line search
    ),
    "kfac": Optimiser(
        "K-FAC of kfac-jax, adaptive",
        methods.kfac(adapts=True, ema=0.95),
        {"initial_damping": Setting(1e-2, (1e-8, 1))},
        mapped=False,
    ),
    "kfac-fixed": Optimiser(
        "K-FAC with fixed rate, momentum and damping, and no moving average",
        methods.kfac(adapts=False, ema=0.0),
        {**_rate(0.05, 1e-6, 10), **_momentum(0.4), **_damping(0.2)},
        mapped=False,
    ),
}


def find(name: str) -> Optimiser:
    """An optimiser by its name."""
    if name not in OPTIMISERS:
        hint = nearest(name, OPTIMISERS, "`saddlefree optimisers` lists them")
        raise UserError(f"optimiser {name!r} is not known: {hint}")
    return OPTIMISERS[name]


def configured(name: str, problem: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """All hyperparameters: defaults, the paper's for this problem, and `changes`; `batch_size` where one is given."""
    entry = find(name)
    known = {**entry.settings, "batch_size": Setting(None, low=1, whole=True)}
    values = {key: setting.default for key, setting in entry.settings.items()}
    values |= TUNED.get((problem, name), entry.tuned.get(problem, {}))
    for key, text in changes.items():
        if key not in known:
            hint = nearest(key, known, f"it has {', '.join(known)}")
            raise UserError(f"{name} has no hyperparameter {key!r}: {hint}")
        values[key] = known[key].parse(key, text)
    return values
