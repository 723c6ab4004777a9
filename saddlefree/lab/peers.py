"""Optimisers of other libraries, to be measured against: the extra `saddlefree[peers]`.

Each is one entry and imports its library when it is built. Tolerances are zero: a run ends when its plan says.
"""

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from saddlefree.lab.optimisers import find, optimiser, rate, schedule
from saddlefree.lab.settings import Setting

if TYPE_CHECKING:
    from saddlefree.lab.methods import Circumstances, Method, Values


def packages(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Version and licence of the peers among these optimisers, for the record."""
    found = {}
    for package in {find(name).package for name in names} - {None}:
        metadata = importlib.metadata.metadata(str(package))
        classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License")]
        licences = metadata.get_all("License-Expression") or [text.rpartition(" :: ")[2] for text in classifiers]
        found[str(package)] = {"version": metadata["Version"], "licence": ", ".join(licences) or "not stated"}
    return found


class PeerState(NamedTuple):
    """What a run of optimistix carries."""

    params: Any
    model_state: Any
    solver: Any  # the arrays of the solver's state


def _optimistix(solver: Any, around: "Circumstances", *, least_squares: bool) -> "Method":
    """Steps of an optimistix solver: of `init` and `step`, which its own loop calls too."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from saddlefree.lab.methods import Method, whole_batch

    whole_batch("optimistix", around)

    def options(params: Any, shape: Any) -> dict[str, Any]:
        """The Jacobian by the fewer of rows and columns."""
        rows, columns = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (shape, params))
        return {"jac": "bwd" if rows < columns else "fwd"} if least_squares else {}

    def parts(params: Any, model_state: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        def fn(params: Any, _: Any) -> tuple[Any, None]:
            if least_squares:
                return around.task.residuals(params, model_state, batch), None
            return around.task.loss(params, model_state, batch, None)[0], None  # type: ignore[arg-type]

        shape, _ = eqx.filter_eval_shape(fn, params, None)
        tags: frozenset[object] = frozenset()
        chosen = options(params, shape)
        dynamic, static = eqx.partition(solver.init(fn, params, None, chosen, shape, None, tags), eqx.is_array)
        return fn, chosen, dynamic, static

    def init(params: Any, model_state: Any, seed: Any, batch: Any) -> PeerState:
        # Copied, because the state holds the parameters again and a run donates both.
        return PeerState(params, model_state, jax.tree.map(jnp.copy, parts(params, model_state, batch)[2]))

    def step(state: PeerState, batch: Any) -> tuple[PeerState, dict[str, Any]]:
        fn, chosen, _, static = parts(state.params, state.model_state, batch)
        before = eqx.combine(state.solver, static)
        params, after, _ = solver.step(fn, state.params, None, chosen, before, frozenset())
        figures = after.f_info  # of the parameters that are kept
        loss = 0.5 * jnp.sum(figures.residual**2) if least_squares else figures.f
        return PeerState(params, state.model_state, eqx.filter(after, eqx.is_array)), {"loss": loss}

    return Method(init, step)


@optimiser("optimistix-lm", "Levenberg-Marquardt of optimistix, dense", {}, mapped=False, package="optimistix")
def _(v: "Values", around: "Circumstances") -> Any:
    import optimistix

    return _optimistix(optimistix.LevenbergMarquardt(rtol=0.0, atol=0.0), around, least_squares=True)


@optimiser("optimistix-bfgs", "BFGS of optimistix, dense", {}, mapped=False, package="optimistix")
def _(v: "Values", around: "Circumstances") -> Any:
    import optimistix

    return _optimistix(optimistix.BFGS(rtol=0.0, atol=0.0), around, least_squares=False)


@optimiser(
    "jinns-ssbroyden",
    "self-scaled Broyden of jinns, dense, with Optax's zoom line search",
    {"method": Setting("SSBroyden", choices=("SSBroyden", "SSBFGS", "Broyden", "BFGS"))},
    mapped=False,
    package="jinns",
)
def _(v: "Values", around: "Circumstances") -> Any:
    import jax
    import optax
    from jinns.optimizers import scale_by_SSBroyden_family

    from saddlefree.lab.methods import whole_batch

    whole_batch("jinns", around)
    tx = scale_by_SSBroyden_family(method=v["method"])

    def update(g: Any, state: Any, params: Any = None, *, value: Any, value_fn: Any, **_: Any) -> tuple[Any, Any]:
        grad_fn = jax.grad(value_fn)
        return tx.update(g, state, params, value=value, grad_pt=g, value_fn=value_fn, grad_fn=grad_fn)

    return optax.GradientTransformationExtraArgs(tx.init, update)


@optimiser(
    "psgd-kron",
    "PSGD with Kronecker factors, of psgd-jax",
    {**rate(3e-3, 1e-5, 0.1, "cosine"), "averaging": Setting(0.9, high=0.9999)},
    mapped=False,
    package="psgd-jax",
)
def _(v: "Values", around: "Circumstances") -> Any:
    import optax._src
    from optax.transforms import _clipping

    # psgd-jax 0.2.9 imports this module from where Optax had it before 0.2.8.
    sys.modules.setdefault("optax._src.clipping", _clipping)
    optax._src.clipping = _clipping
    from psgd_jax.kron import kron

    tx = kron(schedule(v, around), b1=v["averaging"])

    def init(params: Any) -> Any:
        with contextlib.redirect_stdout(None):  # it prints its sizes
            return tx.init(params)

    # Without extra arguments, which it announces and does not take.
    return optax.GradientTransformation(init, lambda g, state, params=None: tx.update(g, state, params))
