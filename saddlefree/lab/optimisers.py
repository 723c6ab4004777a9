"""What can train: a registry of optimisers, with the paper's hyperparameters and the ranges in which tuning looks.

An optimiser is built for a task and a number of steps, and is then a `Method`: a state and a step from one to the next.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib

import saddlefree as sf
from saddlefree.lab.errors import UserError
from saddlefree.lab.task import Batch, Task, Tree

Values = Mapping[str, Any]


class Method(NamedTuple):
    """How a run begins and goes on. A state has `params` and `model_state`."""

    init: Callable[[Tree, Tree, Any, Batch], Any]  # (parameters, model state, seed, batch) to the state
    step: Callable[[Any, Batch], tuple[Any, dict[str, jax.Array]]]  # to the state and figures, `loss` among them
    traceable: bool = True  # whether steps can be compiled into a loop and mapped over seeds


class Circumstances(NamedTuple):
    """What a method may depend on beside its hyperparameters."""

    task: Task
    steps: int  # in the whole run, over which rates decay
    full_batch: bool
    mapped: bool  # over seeds


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


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """An entry of the registry."""

    about: str
    build: Callable[[Values, Circumstances], Method]
    settings: dict[str, Setting]
    tuned: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # the paper's, by problem
    mapped: bool = True  # whether seeds can be run together


def transformed(make: Callable[[Values, Circumstances], optax.GradientTransformation]) -> Callable:
    """A method from an Optax transformation."""

    def build(values: Values, around: Circumstances) -> Method:
        tx = make(values, around)

        def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> sf.training.TrainState:
            return sf.training.init(params, tx, model_state=model_state, seed=seed)

        step = sf.training.make_step(around.task.loss, tx, donate=False)
        return Method(init, step)

    return build


def schedule(values: Values, around: Circumstances) -> Any:
    """The learning rate, decaying to zero over the run where that is asked for."""
    rate = values["learning_rate"]
    if values["decay"] == "linear":
        return optax.linear_schedule(rate, 0.0, around.steps)
    return optax.cosine_decay_schedule(rate, around.steps) if values["decay"] == "cosine" else rate


def _series(values: Values) -> sf.series:
    terms, order = values["terms"], values["order"]
    if 2 * order + 1 > terms:
        raise UserError(f"order must be at most (terms − 1)/2 = {(terms - 1) // 2} for terms={terms}, got {order}")
    scales: dict[str, Any] = {"lower-bound": sf.lower_bound(initial=100.0), "lanczos-bound": sf.lanczos_bound()}
    return sf.series(terms, sf.sablonniere(order) if order else None, scales[values["scale"]])


def _fixed(solver: Callable[[Values], Any]) -> Callable:
    """Saddle-free Newton with a given rate, momentum and damping."""
    return transformed(
        lambda v, around: sf.saddle_free_newton(schedule(v, around), v["momentum"], v["damping"], solver(v))
    )


def _adaptive(solver: Callable[[Values], Any]) -> Callable:
    return transformed(lambda v, around: sf.adaptive_saddle_free_newton(solver(v), v["initial_damping"]))


def _low_rank(v: Values, around: Circumstances) -> optax.GradientTransformation:
    solver = sf.low_rank(
        rank=v["rank"],
        refresh_every=v["refresh_every"],
        averaging=v["averaging"],
        metric=v["metric"],
        second_moment=v["second_moment"],
        epsilon=v["epsilon"],
        # Under vmap all would pay for an early refresh of one.
        surprise=None if around.mapped else 4.0,
    )
    return sf.saddle_free_newton(schedule(v, around), damping=v["damping"], solver=solver)


def _adam(v: Values, around: Circumstances) -> optax.GradientTransformation:
    return optax.adam(schedule(v, around), b1=1 - v["one_minus_beta1"], b2=1 - v["one_minus_beta2"], eps=v["epsilon"])


def _sophia(v: Values, around: Circumstances) -> optax.GradientTransformationExtraArgs:
    tx = optax.contrib.sophia(schedule(v, around), gamma=v["gamma"], weight_decay=0.0)

    def update(updates: Tree, state: Any, params: Tree = None, *, value_fn: Any, **_: Any) -> tuple[Tree, Any]:
        return tx.update(updates, state, params, obj_fn=value_fn)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _lbfgs(v: Values, around: Circumstances) -> Method:
    """Several iterations a step, on the same batch; a full batch's value and gradient are those of the line search."""
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=v["evaluations"], initial_guess_strategy="one")
    tx = optax.lbfgs(memory_size=v["memory"], linesearch=search)

    def init(params: Tree, model_state: Tree, seed: Any, batch: Batch) -> sf.training.TrainState:
        return sf.training.init(params, tx, model_state=model_state, seed=seed)

    def step(state: sf.training.TrainState, batch: Batch) -> tuple[sf.training.TrainState, dict[str, jax.Array]]:
        key, following = jax.random.split(state.key)

        def value_fn(params: Tree) -> jax.Array:
            return around.task.loss(params, state.model_state, batch, key)[0]

        known = optax.value_and_grad_from_state(value_fn) if around.full_batch else None

        def iterate(carry: tuple[Tree, Any], _: None) -> tuple[tuple[Tree, Any], jax.Array]:
            params, opt_state = carry
            value, grad = known(params, state=opt_state) if known else jax.value_and_grad(value_fn)(params)
            updates, opt_state = tx.update(grad, opt_state, params, value=value, grad=grad, value_fn=value_fn)
            return (optax.apply_updates(params, updates), opt_state), value

        (params, opt_state), values = jax.lax.scan(iterate, (state.params, state.opt_state), None, v["iterations"])
        _, (model_state, _) = around.task.loss(params, state.model_state, batch, key)
        state = sf.training.TrainState(params, opt_state, model_state, following, state.step + 1)
        return state, {"loss": values[0]}

    return Method(init, step)


def _kfac(adapts: bool, ema: float) -> Callable[[Values, Circumstances], Method]:
    def build(v: Values, around: Circumstances) -> Method:
        if around.task.terms is None:
            raise UserError("kfac needs a loss of squared errors or cross-entropies: this problem has none")
        from saddlefree.lab.kfac import Kfac  # a heavy import, and only here

        if adapts:
            method = Kfac(around.task, adapts=True, damping=v["initial_damping"], ema=ema)
        else:
            rate, momentum = schedule(v, around), v["momentum"]
            method = Kfac(around.task, adapts=False, damping=v["damping"], ema=ema, rate=rate, momentum=momentum)
        return Method(method.init, method.step, traceable=False)

    return build


def _rate(default: float, low: float, high: float) -> dict[str, Setting]:
    return {
        "learning_rate": Setting(default, (low, high)),
        "decay": Setting("none", choices=("none", "linear", "cosine")),
    }


def _of_series(terms: int, order: int) -> dict[str, Setting]:
    return {
        "terms": Setting(terms, (1, 20), low=1, log=False, whole=True),
        "order": Setting(order, (0, 9), log=False, whole=True),
        "scale": Setting("lower-bound", choices=("lower-bound", "lanczos-bound")),
    }


def _momentum(default: float) -> dict[str, Setting]:
    return {"momentum": Setting(default, (1e-3, 0.95), high=0.9999)}


def _damping(default: float, low: float = 1e-8, high: float = 1.0, name: str = "damping") -> dict[str, Setting]:
    return {name: Setting(default, (low, high))}


_initial = {"initial_damping": Setting(1e-2, (1e-8, 10))}
OPTIMISERS = {
    "series": Optimiser(
        "the paper's series of Hessian-vector products",
        _fixed(_series),
        {**_rate(0.3, 1e-3, 5), **_momentum(0.4), **_damping(0.05), **_of_series(13, 5)},
        {
            "uci-energy": {"learning_rate": 1.787, "momentum": 0.717, "damping": 0.0244334238, "terms": 18, "order": 8},
            "fashion-mnist": {
                "batch_size": 400,
                "learning_rate": 0.305,
                "momentum": 0.428,
                "damping": 0.0577,
                "terms": 13,
                "order": 5,
            },
            "svhn": {
                "batch_size": 200,
                "learning_rate": 0.108,
                "momentum": 0.327,
                "damping": 1.87e-4,
                "terms": 1,
                "order": 0,
            },
            "cifar-10": {
                "batch_size": 3200,
                "learning_rate": 0.562,
                "momentum": 0.115,
                "damping": 2.44e-3,
                "terms": 2,
                "order": 0,
            },
        },
    ),
    "series-adaptive": Optimiser(
        "the same with adaptive rate, momentum and damping",
        _adaptive(_series),
        {**_initial, **_of_series(9, 4)},
        {
            "uci-energy": {"initial_damping": 1.46417969e-6, "terms": 9, "order": 4},
            "fashion-mnist": {"batch_size": 800, "initial_damping": 0.09330085595, "terms": 14, "order": 2},
            "svhn": {"batch_size": 100, "initial_damping": 4.13832792e-7, "terms": 5, "order": 2},
            "cifar-10": {"batch_size": 3200, "initial_damping": 1.03660718e-4, "terms": 5, "order": 2},
        },
    ),
    "exact": Optimiser(
        "saddle-free Newton with the dense Hessian",
        _fixed(lambda v: sf.exact(threshold=v["threshold"], replacement=v["replacement"])),
        {
            **_rate(0.1, 1e-4, 1),
            **_momentum(0.0),
            **_damping(0.01),
            "threshold": Setting(0.0),
            "replacement": Setting(1.0, low=1e-12),
        },
        {
            # The paper's constant 1.54e-4 is in its code the inverse of the eigenvalue that is put in place.
            "uci-energy": {
                "learning_rate": 0.0049,
                "momentum": 0.0638,
                "damping": 0.0,
                "threshold": 0.00052,
                "replacement": 1 / 1.54,
            }
        },
        mapped=False,
    ),
    "exact-adaptive": Optimiser(
        "the same, adaptive, with a moving average of the Hessian",
        _adaptive(lambda v: sf.exact(average=v["average"])),
        {**_initial, "average": Setting(0.95, high=0.9999)},
        {"uci-energy": {"initial_damping": 0.0125, "average": 0.95}},
        mapped=False,
    ),
    "newton": Optimiser(
        "Newton's method, which is drawn to saddles",
        _fixed(lambda v: sf.exact(absolute=False)),
        {**_rate(1.0, 1e-3, 1), **_momentum(0.0), **_damping(0.0, 1e-8, 10)},
        mapped=False,
    ),
    "lanczos": Optimiser(
        "the best direction from a few products",
        _fixed(lambda v: sf.lanczos(v["products"])),
        {
            **_rate(0.3, 1e-3, 5),
            **_momentum(0.5),
            **_damping(0.1, 1e-3, 10),
            "products": Setting(10, (3, 30), low=1, whole=True),
        },
    ),
    "lanczos-adaptive": Optimiser(
        "the same with recycled curvature and nothing to tune",
        _adaptive(lambda v: sf.lanczos(v["products"], "sqrt", memory=v["memory"], recycle=v["recycle"])),
        {
            **_initial,
            "products": Setting(8, (3, 20), low=1, whole=True),
            "memory": Setting(1, whole=True),
            "recycle": Setting(40, whole=True),
        },
    ),
    "low-rank": Optimiser(
        "curvature of low rank, refreshed now and then",
        transformed(_low_rank),
        {
            "learning_rate": Setting(3e-3, (3e-4, 0.1)),
            "decay": Setting("cosine", choices=("none", "linear", "cosine")),
            **_damping(0.5, 0.1, 5),
            "rank": Setting(20, whole=True),
            "refresh_every": Setting(50, (20, 200), low=1, whole=True),
            "averaging": Setting(0.9, high=0.9999),
            "metric": Setting("adam", choices=("identity", "adam")),
            "second_moment": Setting(0.99, high=0.9999),
            "epsilon": Setting(1e-4, (1e-8, 1e-2), low=1e-12),
        },
        {
            "uci-energy": {
                "learning_rate": 0.08,
                "damping": 2.0,
                "refresh_every": 20,
                "epsilon": 1e-2,
                "second_moment": 0.999,
            },
        },
    ),
    "sgd": Optimiser(
        "stochastic gradient descent",
        transformed(lambda v, around: optax.sgd(schedule(v, around), v["momentum"] or None)),
        {**_rate(0.05, 1e-6, 1e-1), "momentum": Setting(0.0, high=0.9999)},
        {
            "uci-energy": {"learning_rate": 0.0945226911},
            "fashion-mnist": {"batch_size": 50, "learning_rate": 0.01877169559},
            "svhn": {"batch_size": 50, "learning_rate": 0.0133199974},
            "cifar-10": {"batch_size": 3200, "learning_rate": 0.00411401629},
        },
    ),
    "adam": Optimiser(
        "Adam",
        transformed(_adam),
        {
            "learning_rate": Setting(3e-3, (1e-6, 1)),
            "decay": Setting("cosine", choices=("none", "linear", "cosine")),
            "epsilon": Setting(1e-8, (1e-10, 10)),
            "one_minus_beta1": Setting(0.1, (1e-3, 1), high=1),
            "one_minus_beta2": Setting(0.001, (1e-4, 1), high=1),
        },
        {
            "uci-energy": {
                "learning_rate": 0.0173920852,
                "decay": "none",
                "epsilon": 2.72693206e-10,
                "one_minus_beta1": 0.254942552,
                "one_minus_beta2": 0.0156352886,
            },
            "fashion-mnist": {
                "batch_size": 200,
                "learning_rate": 6.55385518e-4,
                "decay": "none",
                "epsilon": 5.99064249e-5,
                "one_minus_beta1": 0.474986861,
                "one_minus_beta2": 0.01949103971,
            },
            "svhn": {
                "batch_size": 1600,
                "learning_rate": 0.001836152161,
                "decay": "none",
                "epsilon": 3.35486047e-6,
                "one_minus_beta1": 0.1262533228,
                "one_minus_beta2": 0.02532913797,
            },
            "cifar-10": {
                "batch_size": 800,
                "learning_rate": 7.70367561e-5,
                "decay": "none",
                "epsilon": 3.613837512e-4,
                "one_minus_beta1": 0.002655117842,
                "one_minus_beta2": 1.00250761e-4,
            },
        },
    ),
    "muon": Optimiser(
        "Muon, and Adam for what is not a matrix",
        transformed(lambda v, around: optax.contrib.muon(schedule(v, around))),
        {
            "learning_rate": Setting(0.01, (1e-4, 0.1)),
            "decay": Setting("cosine", choices=("none", "linear", "cosine")),
        },
    ),
    "sophia": Optimiser(
        "Sophia: Adam with a clipped diagonal of the Hessian",
        transformed(_sophia),
        {
            "learning_rate": Setting(1e-3, (1e-5, 0.1)),
            "decay": Setting("cosine", choices=("none", "linear", "cosine")),
            "gamma": Setting(0.01, (1e-3, 1)),
        },
    ),
    "lbfgs": Optimiser(
        "L-BFGS with a zoom line search",
        _lbfgs,
        {
            "memory": Setting(20, low=1, whole=True),
            "iterations": Setting(1, low=1, whole=True),
            "evaluations": Setting(25, low=1, whole=True),
        },
        {"uci-energy": {"iterations": 20, "evaluations": 25}},
    ),
    "kfac": Optimiser(
        "K-FAC of kfac-jax, adaptive",
        _kfac(adapts=True, ema=0.95),
        {"initial_damping": Setting(1e-2, (1e-8, 1))},
        {
            "uci-energy": {"initial_damping": 6.97125495e-5},
            "fashion-mnist": {"batch_size": 3200, "initial_damping": 0.527373565},
            "svhn": {"batch_size": 1600, "initial_damping": 0.576047619},
            "cifar-10": {"batch_size": 800, "initial_damping": 0.216592763},
        },
        mapped=False,
    ),
    "kfac-fixed": Optimiser(
        "K-FAC with fixed rate, momentum and damping, and no moving average",
        _kfac(adapts=False, ema=0.0),
        {**_rate(0.05, 1e-6, 10), **_momentum(0.4), **_damping(0.2)},
        {
            "uci-energy": {"learning_rate": 0.0908813574, "momentum": 0.26447181, "damping": 5.63013694e-6},
            "fashion-mnist": {
                "batch_size": 800,
                "learning_rate": 0.08678173597,
                "momentum": 0.405766089,
                "damping": 0.2197808501,
            },
            "svhn": {
                "batch_size": 800,
                "learning_rate": 0.00882824525,
                "momentum": 0.222133467,
                "damping": 3.79341022e-4,
            },
            "cifar-10": {
                "batch_size": 3200,
                "learning_rate": 0.0228984138,
                "momentum": 0.00670495446,
                "damping": 2.21384786e-3,
            },
        },
        mapped=False,
    ),
}


def find(name: str) -> Optimiser:
    """An optimiser by its name."""
    if name not in OPTIMISERS:
        near = difflib.get_close_matches(name, OPTIMISERS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`saddlefree optimisers` lists them"
        raise UserError(f"optimiser {name!r} is not known: {hint}")
    return OPTIMISERS[name]


def configured(name: str, problem: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """All hyperparameters: defaults, the paper's for this problem, and `changes`; `batch_size` where one is given."""
    entry = find(name)
    known = {**entry.settings, "batch_size": Setting(None, low=1, whole=True)}
    values = {key: setting.default for key, setting in entry.settings.items()} | entry.tuned.get(problem, {})
    for key, text in changes.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise UserError(f"{name} has no hyperparameter {key!r}: {hint}")
        values[key] = known[key].parse(key, text)
    return values
