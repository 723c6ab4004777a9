"""What can train: a registry of optimisers, with their hyperparameters and the ranges in which tuning looks.

On the paper's problems an optimiser has the paper's hyperparameters (`paper.TUNED`), elsewhere the defaults here. An
entry is a function from values and circumstances to an Optax transformation, or to a `Method` where it trains in
another way. The registry loads without JAX: functions import it when they are called.
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import saddlefree as sf
from saddlefree.lab.errors import Registry, UserError, not_installed
from saddlefree.lab.paper import TUNED
from saddlefree.lab.settings import Setting, parsed

if TYPE_CHECKING:
    import optax

    from saddlefree.lab.methods import Circumstances, Method, Values


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """An entry of the registry."""

    about: str
    make: "Callable[[Values, Circumstances], optax.GradientTransformation | Method]"
    settings: dict[str, Setting]
    tuned: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by problem, where the paper has none
    mapped: bool = True  # whether seeds can be run together
    package: str | None = None  # of a peer: what has to be installed

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        try:
            return self.package is not None and not importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return True

    def require(self) -> None:
        """Says what to install, where its package is missing."""
        if self.missing:
            raise not_installed(self.package, "peers")

    def build(self, values: "Values", around: "Circumstances") -> "Method":
        """The method with these hyperparameters, for this task and number of steps."""
        self.require()
        from saddlefree.lab import methods

        made = self.make(values, around)
        method = made if isinstance(made, methods.Method) else methods.transformed(made, around)
        decay = values.get("parameter_average", 0.0)
        return methods.averaged(method, decay) if decay else method


OPTIMISERS = Registry[Optimiser]("optimiser", otherwise="`saddlefree optimisers` lists them")
find = OPTIMISERS.__getitem__


def optimiser(name: str, about: str, settings: dict[str, Setting], **entry: Any) -> Callable[[Any], Any]:
    """Registers a function (values, circumstances) to an Optax transformation as an optimiser.

    `values` are the hyperparameters by name. `circumstances` has the number of `steps` of the run, over which a rate
    may decay, and the `task`.

    Args:
      name: for the command line.
      about: a few words.
      settings: the hyperparameters.
      **entry: any other field of `Optimiser`.
    """

    def add(make: Callable) -> Callable:
        OPTIMISERS.add(name, Optimiser(about, make, settings, **entry))
        return make

    return add


def configured(name: str, problem: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """All hyperparameters: defaults, the paper's for this problem, and `changes`.

    `batch_size` and `parameter_average`, which every optimiser takes, are there where they are given.
    """
    entry = find(name)
    values = {key: setting.default for key, setting in entry.settings.items()}
    values |= TUNED.get((problem, name), entry.tuned.get(problem, {}))
    return values | parsed({**entry.settings, **COMMON}, changes, f"a hyperparameter of {name}")


def _whole(default: int, search: tuple[float, float] | None = None, *, low: int = 0, high: int = 1000) -> Setting:
    return Setting(default, search, low, high, whole=True)


COMMON = {
    "batch_size": Setting(None, low=1, high=10**9, whole=True),
    "parameter_average": Setting(0.0, high=0.99999, about="decay of the average that is evaluated; 0: the last ones"),
}


def rate(default: float, low: float, high: float, decay: str = "none") -> dict[str, Setting]:
    """A learning rate, the range in which it is searched, and its decay."""
    decays = ("none", "linear", "cosine")
    return {"learning_rate": Setting(default, (low, high)), "decay": Setting(decay, choices=decays)}


def _momentum(default: float) -> dict[str, Setting]:
    return {"momentum": Setting(default, (1e-3, 0.95), high=0.9999)}


def _damping(default: float, low: float = 1e-8, high: float = 1.0) -> dict[str, Setting]:
    return {"damping": Setting(default, (low, high))}


def _of_series(terms: int, order: int) -> dict[str, Setting]:
    return {
        "terms": Setting(terms, (1, 20), low=1, high=1000, log=False, whole=True),
        "order": Setting(order, (0, 9), high=500, log=False, whole=True),
        "scale": Setting("lower-bound", choices=("lower-bound", "lanczos-bound")),
    }


def _initial() -> dict[str, Setting]:
    return {"initial_damping": Setting(1e-2, (1e-8, 10))}


def schedule(v: "Values", around: "Circumstances") -> Any:
    """The learning rate, decaying to zero over the run where that is asked for."""
    from saddlefree.lab import methods

    return methods.schedule(v, around)


def _fixed(solver: Any, v: "Values", around: "Circumstances") -> Any:
    """Saddle-free Newton with a given rate, momentum and damping."""
    return sf.saddle_free_newton(schedule(v, around), v["momentum"], v["damping"], solver)


def _adaptive(solver: Any, v: "Values", around: "Circumstances", rule: Any = None) -> Any:
    """Saddle-free Newton that finds rate, momentum and damping by itself, by the paper's rule or another."""
    rule = (rule or sf.adaptive_plane)(v["initial_damping"])
    return sf.adaptive_saddle_free_newton(solver, rule=rule)


def _series(v: "Values") -> Any:
    """The paper's solver."""
    terms, order = v["terms"], v["order"]
    if 2 * order + 1 > terms:
        raise UserError(f"order must be at most (terms − 1)/2 = {(terms - 1) // 2} for terms={terms}, got {order}")
    scale: Any = sf.lower_bound(initial=100.0) if v["scale"] == "lower-bound" else sf.lanczos_bound()
    return sf.series(terms, sf.sablonniere(order) if order else None, scale)


@optimiser(
    "series",
    "the paper's series of Hessian-vector products",
    {**rate(0.3, 1e-3, 5), **_momentum(0.4), **_damping(0.05), **_of_series(13, 5)},
)
def _(v: "Values", around: "Circumstances") -> Any:
    return _fixed(_series(v), v, around)


@optimiser("series-adaptive", "the same with adaptive rate, momentum and damping", {**_initial(), **_of_series(9, 4)})
def _(v: "Values", around: "Circumstances") -> Any:
    return _adaptive(_series(v), v, around)


@optimiser(
    "exact",
    "saddle-free Newton with the dense Hessian",
    {
        **rate(0.1, 1e-4, 1),
        **_momentum(0.0),
        **_damping(0.01),
        "threshold": Setting(0.0),
        "replacement": Setting(1.0, low=1e-12),
    },
    mapped=False,
)
def _(v: "Values", around: "Circumstances") -> Any:
    return _fixed(sf.exact(threshold=v["threshold"], replacement=v["replacement"]), v, around)


@optimiser(
    "exact-adaptive",
    "the same, adaptive, with a moving average of the Hessian",
    {**_initial(), "average": Setting(0.95, high=0.9999)},
    mapped=False,
)
def _(v: "Values", around: "Circumstances") -> Any:
    return _adaptive(sf.exact(average=v["average"]), v, around)


@optimiser(
    "newton",
    "Newton's method, which is drawn to saddles",
    {**rate(1.0, 1e-3, 1), **_momentum(0.0), **_damping(0.0, 1e-8, 10)},
    mapped=False,
)
def _(v: "Values", around: "Circumstances") -> Any:
    return _fixed(sf.exact(absolute=False), v, around)


@optimiser(
    "lanczos",
    "the best direction from a few products",
    {
        **rate(0.3, 1e-3, 5),
        **_momentum(0.5),
        **_damping(0.1, 1e-3, 10),
        "products": _whole(10, (3, 30), low=1),
    },
)
def _(v: "Values", around: "Circumstances") -> Any:
    return _fixed(sf.lanczos(v["products"]), v, around)


@optimiser(
    "lanczos-adaptive",
    "the same with recycled curvature and nothing to tune",
    {**_initial(), "products": _whole(8, (3, 20), low=1), "memory": _whole(1), "recycle": _whole(40)},
)
def _(v: "Values", around: "Circumstances") -> Any:
    solver = sf.lanczos(v["products"], "sqrt", memory=v["memory"], recycle=v["recycle"])
    return _adaptive(solver, v, around, sf.damping_search)


@optimiser(
    "adaptive",
    "the default: the same, and where batches differ the next one chooses λ",
    {**_initial(), "rate": Setting(0.05, (0.01, 1))},
    mapped=False,  # together, all would pay for the products of each
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.optimiser import DEFAULT_ADAPTIVE

    def rule(damping: float) -> Any:
        return sf.noise_aware(sf.damping_search(damping), sf.next_batch(rate=v["rate"], decay_steps=1e6))

    return _adaptive(DEFAULT_ADAPTIVE, v, around, rule)


@optimiser(
    "low-rank",
    "curvature of low rank, refreshed now and then, over Adam",
    {
        **rate(3e-3, 3e-4, 0.1, "cosine"),
        "newton_rate": Setting(0.3, (0.03, 1)),
        **_damping(1e-2, 1e-4, 1),
        "rank": _whole(20),
        "refresh_every": _whole(50, (20, 200), low=1, high=10**6),
        "averaging": Setting(0.9, high=0.9999),
        "second_moment": Setting(0.999, high=0.9999),
        "epsilon": Setting(1e-8, (1e-8, 1e-2), low=1e-12),
        "surprise": Setting(0.0),  # 0: never; where seeds are mapped, all pay for an early refresh of one
    },
    tuned={
        "uci-energy": {"learning_rate": 0.02, "refresh_every": 20, "second_moment": 0.99},
        "digits": {"learning_rate": 0.03},
        # Their curvature changes so fast that old curvature leads away.
        **{f"pinn-{equation}": {"surprise": 4.0} for equation in ("poisson", "convection", "burgers")},
    },
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import methods

    return methods.low_rank(v, around)


@optimiser(
    "sgd",
    "stochastic gradient descent",
    {**rate(0.05, 1e-6, 1e-1), "momentum": Setting(0.0, high=0.9999)},
    tuned={"digits": {"learning_rate": 0.1, "momentum": 0.9, "decay": "cosine"}},
)
def _(v: "Values", around: "Circumstances") -> Any:
    import optax

    return optax.sgd(schedule(v, around), v["momentum"] or None)


@optimiser(
    "adam",
    "Adam",
    {
        **rate(3e-3, 1e-6, 1, "cosine"),
        "epsilon": Setting(1e-8, (1e-10, 10)),
        "one_minus_beta1": Setting(0.1, (1e-3, 1), high=1),
        "one_minus_beta2": Setting(0.001, (1e-4, 1), high=1),
    },
    tuned={"digits": {"learning_rate": 0.03}},
)
def _(v: "Values", around: "Circumstances") -> Any:
    import optax

    return optax.adam(schedule(v, around), **_betas(v), eps=v["epsilon"])


@optimiser(
    "next-batch-rate",
    "Adam at a rate that the next batch judges",
    {"initial": Setting(1e-3, (1e-4, 1e-2), low=1e-12), "boldness": Setting(0.5, high=0.99)},
)
def _(v: "Values", around: "Circumstances") -> Any:
    import optax

    return sf.next_batch_rate(optax.adam(1.0), v["initial"], boldness=v["boldness"])


def _betas(v: "Values") -> dict[str, Any]:
    return {"b1": 1 - v["one_minus_beta1"], "b2": 1 - v["one_minus_beta2"]}


def _decay() -> dict[str, Setting]:
    return {"weight_decay": Setting(1e-4, (1e-5, 0.1))}


def _adamw(name: str, about: str, nesterov: bool) -> None:
    settings = {
        **rate(3e-3, 1e-5, 0.1, "cosine"),
        **_decay(),
        "one_minus_beta1": Setting(0.1, (1e-2, 0.5), high=1),
        "one_minus_beta2": Setting(0.001, (1e-4, 0.1), high=1),
    }

    @optimiser(name, about, settings)
    def _(v: "Values", around: "Circumstances") -> Any:
        import optax

        return optax.adamw(schedule(v, around), **_betas(v), weight_decay=v["weight_decay"], nesterov=nesterov)


_adamw("adamw", "Adam with weight decay", nesterov=False)
_adamw("nadamw", "the same with Nesterov's momentum", nesterov=True)


@optimiser(
    "schedule-free",
    "AdamW without a schedule, evaluated at an average of its own",
    {
        "learning_rate": Setting(3e-3, (1e-4, 0.1)),
        "warmup": _whole(0, high=10**6),  # steps
        "averaging": Setting(0.9, (0.8, 0.98), low=0.01, high=0.9999),
        **_decay(),
    },
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import methods

    return methods.schedule_free(v, around)


@optimiser("muon", "Muon, and Adam for what is not a matrix", rate(0.01, 1e-4, 0.1, "cosine"))
def _(v: "Values", around: "Circumstances") -> Any:
    import optax.contrib

    return optax.contrib.muon(schedule(v, around))


@optimiser(
    "soap",
    "SOAP: Adam in the eigenbases of Shampoo's matrices",
    {
        **rate(3e-3, 1e-5, 0.1, "cosine"),
        "one_minus_beta1": Setting(0.05, (1e-2, 0.5), high=1),
        "one_minus_beta2": Setting(0.05, (1e-3, 0.1), high=1),
        "refresh_every": _whole(10, low=1, high=10**6),
    },
    mapped=False,  # together, bases would be refreshed in every step
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab.soap import soap

    return soap(schedule(v, around), **_betas(v), refresh_every=v["refresh_every"])


@optimiser(
    "fosi",
    "FOSI: Newton's step along the largest eigenvalues, Adam elsewhere",
    {
        **rate(3e-3, 3e-4, 0.1, "cosine"),
        "alpha": Setting(0.1, (0.01, 1)),
        "rank": _whole(10, low=1),
        "refresh_every": _whole(100, (50, 400), low=1, high=10**6),
        "averaging": Setting(0.9, high=0.9999),
    },
    mapped=False,
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import methods

    return methods.fosi(v, around)


@optimiser(
    "sophia",
    "Sophia: Adam with a clipped diagonal of the Hessian",
    {**rate(1e-3, 1e-5, 0.1, "cosine"), "gamma": Setting(0.01, (1e-3, 1))},
)
def _(v: "Values", around: "Circumstances") -> Any:
    import optax.contrib

    tx = optax.contrib.sophia(schedule(v, around), gamma=v["gamma"], weight_decay=0.0)

    def update(updates: Any, state: Any, params: Any = None, *, value_fn: Any, **_: Any) -> tuple[Any, Any]:
        return tx.update(updates, state, params, obj_fn=value_fn)  # it asks for the loss by another name

    return optax.GradientTransformationExtraArgs(tx.init, update)


@optimiser(
    "lbfgs",
    "L-BFGS with a zoom line search",
    {
        "memory": _whole(20, (5, 50), low=1),
        "iterations": _whole(1, low=1),
        "evaluations": _whole(25, low=1),
    },
    mapped=False,  # together, all would wait for the longest line search
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import methods

    return methods.lbfgs(v, around)


@optimiser("kfac", "K-FAC of kfac-jax, adaptive", {"initial_damping": Setting(1e-2, (1e-8, 1))}, mapped=False)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import methods

    return methods.kfac(v, around, adapts=True, ema=0.95)


@optimiser(
    "kfac-fixed",
    "K-FAC with fixed rate, momentum and damping, and no moving average",
    {**rate(0.05, 1e-6, 10), **_momentum(0.4), **_damping(0.2)},
    mapped=False,
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import methods

    return methods.kfac(v, around, adapts=False, ema=0.0)


@optimiser("minimise", "what `saddlefree.minimise` does: nothing to choose", {}, mapped=False)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import full_batch

    return full_batch.minimise(around)


@optimiser("least-squares", "what `saddlefree.least_squares` does: nothing to choose", {}, mapped=False)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import full_batch

    return full_batch.least_squares(around)


@optimiser("ssbroyden", "quasi-Newton with a dense matrix, self-scaled", {}, mapped=False)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import full_batch

    return full_batch.single("ssbroyden", around, sf.quasi_newton())


@optimiser("quasi-newton", "quasi-Newton with many pairs", {"memory": _whole(200, low=1)}, mapped=False)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import full_batch

    return full_batch.single("quasi-newton", around, sf.quasi_newton(memory=v["memory"]))


@optimiser("row-space", "Gauss-Newton, exact in the row space", {"share": Setting(0.5, high=1.0)}, mapped=False)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree import stages
    from saddlefree.lab import full_batch

    rule = dataclasses.replace(stages.GAUSS_NEWTON, share=v["share"])
    return full_batch.single("row-space", around, sf.row_space(), rule, squares=True)


@optimiser("engd-w", "energy natural gradient, by Woodbury's identity", {"damping": Setting(1e-8)}, mapped=False)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import full_batch

    return full_batch.natural_gradient("engd-w", v, around, momentum=0.0)


@optimiser(
    "spring",
    "the same with momentum",
    {"damping": Setting(1e-8), "momentum": Setting(0.9, high=0.9999)},
    mapped=False,
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import full_batch

    return full_batch.natural_gradient("spring", v, around, v["momentum"])


@optimiser(
    "adam-lbfgs",
    "Adam, then L-BFGS",
    {
        "learning_rate": Setting(1e-3, (1e-4, 1e-2)),
        "adam_steps": _whole(1000, high=10**6),
        "memory": _whole(20, (5, 50), low=1),
    },
    mapped=False,
)
def _(v: "Values", around: "Circumstances") -> Any:
    from saddlefree.lab import full_batch

    return full_batch.adam_lbfgs(v, around)
