"""Appendix B.5: what each accelerator makes of the series, on random Hessians where the answer is known.

H is symmetric, of standard normal entries, and g is too; the target is |H|⁻¹ g. The series is summed in float64 with
V = 1.01 λmax(H²), so that it converges and every truncation is positive definite. An accelerator of order N at K reads
the last of the first K partial sums. Medians over draws are shown.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import saddlefree as sf
from saddlefree.acceleration import Accelerator, WeightedState
from saddlefree.lab.report import COLOURS
from saddlefree.lab.run import Display
from saddlefree.lab.studies.base import Findings, save
from saddlefree.lab.task import Task
from saddlefree.solvers.series import coefficients

SIZE = 100
MARGIN = 1.01
PLAIN = "Plain series"
ACCELERATORS = {
    "Shanks": sf.shanks,
    "Sablonnière": sf.sablonniere,
    "Levin t": sf.levin_t,
    "Padé": sf.pade,
    "Vector ρ": sf.vector_rho,
    "Topological ρ": sf.topological_rho,
    "Levin d⁽²⁾": sf.levin_d2,
}
ORDERS = (1, 2, 3, 4)
DRAWN = (1, 2)
LEAST = max(make(order).num_sums for make in ACCELERATORS.values() for order in ORDERS)


class Curve(NamedTuple):
    """How near an estimate is to the target, for each draw (first axis) and K."""

    first: int  # K
    cosine: np.ndarray
    norm: np.ndarray  # ratio of 2-norms


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """H and g."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(SIZE, SIZE))
    return (A + A.T) / 2, rng.normal(size=SIZE)


def target(H: jax.Array, g: jax.Array) -> jax.Array:
    """|H|⁻¹ g by eigendecomposition."""
    return sf.solve(sf.exact(), lambda v: H @ v, g, damping=0.0).direction


def plain(H: jax.Array, g: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The first terms of the series, and their partial sums."""
    V = MARGIN * jnp.max(jnp.square(jnp.linalg.eigvalsh(H)))

    def turn(power: jax.Array, c_k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return power - H @ (H @ power) / V, c_k * power

    _, terms = jax.lax.scan(turn, g / jnp.sqrt(V), coefficients(count, jnp.zeros((), g.dtype)))
    return terms, jnp.cumsum(terms, axis=0)


def limits(accelerator: Accelerator, terms: jax.Array, sums: jax.Array, g: jax.Array) -> jax.Array:
    """The accelerated limit of each window of partial sums, the first window first."""
    length = accelerator.num_sums

    def limit(first: jax.Array) -> jax.Array:
        window = [jax.lax.dynamic_slice_in_dim(x, first, length) for x in (terms, sums)]
        state = accelerator.init(g, 0)
        if isinstance(state, WeightedState):  # `init` takes no traced start
            state = state._replace(start=first)
        state, _ = jax.lax.scan(lambda state, pair: (accelerator.push(state, *pair), None), state, window)
        return accelerator.limit(state)

    return jax.vmap(limit)(jnp.arange(len(sums) - length + 1, dtype=jnp.int32))


def curves(seeds: int, steps: int, display: Display) -> dict[tuple[str, int], Curve]:
    """(accelerator, order) to how near it comes; the plain series has order 0."""
    found = {}
    with jax.enable_x64(True):
        H, g = (jnp.asarray(np.stack(parts)) for parts in zip(*map(draw, range(seeds)), strict=True))
        exact = np.asarray(jax.jit(jax.vmap(target))(H, g))
        terms, sums = jax.jit(jax.vmap(functools.partial(plain, count=steps)))(H, g)
        found[PLAIN, 0] = _compare(np.asarray(sums), exact, 1)
        cases = [(name, order) for name in ACCELERATORS for order in ORDERS]
        for number, (name, order) in enumerate(cases, 1):
            accelerator = ACCELERATORS[name](order)
            estimates = jax.jit(jax.vmap(functools.partial(limits, accelerator)))(terms, sums, g)
            found[name, order] = _compare(np.asarray(estimates), exact, accelerator.num_sums)
            display(number, len(cases), {})
    return found


def _compare(estimates: np.ndarray, exact: np.ndarray, first: int) -> Curve:
    norm = np.linalg.norm(estimates, axis=-1) / np.linalg.norm(exact, axis=-1, keepdims=True)
    product = np.einsum("skp,sp->sk", estimates, exact) / np.sum(exact**2, axis=-1, keepdims=True)
    return Curve(first, product / norm, norm)


def compute(folder: pathlib.Path, options: Mapping[str, Any], task: Task, display: Display) -> Findings:
    """Compares every accelerator of orders 1 to 4 at every K."""
    steps = options["steps"]
    found = curves(options["seeds"], steps, display)
    lines, rows = [], []
    marks = [K for K in (10, 30, 100, 300, 1000) if K < steps] + [steps]
    for (name, order), curve in found.items():
        cosine, norm = np.median(curve.cosine, axis=0), np.median(curve.norm, axis=0)
        lines += [
            {"accelerator": name, "order": order, "terms": curve.first + i, "cosine": float(c), "norm": float(n)}
            for i, (c, n) in enumerate(zip(cosine, norm, strict=True))
        ]
        behind = curve.cosine < found[PLAIN, 0].cosine[:, curve.first - 1 :]
        rows.append(
            {
                "accelerator": name,
                "order": order,
                "cosine": {K: float(cosine[K - curve.first]) for K in marks},
                "norm": {K: float(norm[K - curve.first]) for K in marks},
                "behind": float(np.mean(behind)),
            }
        )
    tables = [
        {
            "caption": caption + ", median over draws, of the first K terms",
            "columns": ["Accelerator", "N", *(f"K = {K}" for K in marks), *more],
            "rows": [
                [
                    row["accelerator"],
                    row["order"],
                    *row[key].values(),
                    *(f"{100 * row[name]:.1f}" for name in more.values()),
                ]
                for row in rows
            ],
        }
        for key, caption, more in (
            ("cosine", "Cosine with the exact direction", {"Behind plain, %": "behind"}),
            ("norm", "Norm over the exact norm", {}),
        )
    ]
    figures = [
        save(_figure(found, key, label), folder, key, f"{label}, N = 1 above and N = 2 below", 3)
        for key, label in (("cosine", "Cosine with the exact direction"), ("norm", "Norm over the exact norm"))
    ]
    return Findings(lines, {"size": SIZE, "margin": MARGIN, "rows": rows}, figures, tables)


def _figure(found: Mapping[tuple[str, int], Curve], key: str, label: str) -> Figure:
    figure = Figure(figsize=(5, 6.4), layout="constrained")
    panels = figure.subplots(len(DRAWN), sharex=True, sharey=True)
    for axes, order in zip(panels, DRAWN, strict=True):
        _line(axes, PLAIN, found[PLAIN, 0], key, color="black", linewidth=2.2)
        for number, name in enumerate(ACCELERATORS):
            dashes = "solid" if number < 4 else (0, (4, 1.5))
            _line(axes, name, found[name, order], key, color=COLOURS[number], linestyle=dashes)
        axes.set(ylabel=f"N = {order}", xscale="log", ylim=(0, 1.05))
    panels[-1].set_xlabel("Terms K")
    return figure


def _line(axes: Axes, name: str, curve: Curve, key: str, **style: Any) -> None:
    values = np.median(getattr(curve, key), axis=0)
    axes.plot(np.arange(len(values)) + curve.first, values, label=name, **style)
