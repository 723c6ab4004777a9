"""Appendix B.5: what each accelerator makes of the series, on random Hessians where the answer is known.

H has standard normal entries and is made symmetric, g is normal too, and the target is |H|⁻¹ g. The series is summed in
float64 with V = 1.01 λmax(H²), so that it converges and grows towards its limit. At K an accelerator reads the last of
the first K partial sums.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import saddlefree as sf
from saddlefree.acceleration import Accelerator, WeightedState
from saddlefree.lab import events
from saddlefree.lab.events import Listener
from saddlefree.lab.figures import COLOURS, label
from saddlefree.lab.studies.base import Findings, Record, Work, save
from saddlefree.solvers.series import coefficients

SIZE = 100
MARGIN = 1.01
PLAIN, ERRATIC = "Plain series", "Levin d⁽²⁾"
ACCELERATORS: dict[str, Callable[[int], Accelerator]] = {
    "Shanks": sf.shanks,
    "Sablonnière": sf.sablonniere,
    "Levin t": sf.levin_t,
    "Padé": sf.pade,
    "Vector ρ": sf.vector_rho,
    "Topological ρ": sf.topological_rho,
    ERRATIC: sf.levin_d2,
}
ORDERS = (1, 2, 3, 4)
DRAWN = (1, 2)
SHOWN = (10, 30, 100, 300, 1000)


class Curve(NamedTuple):
    """How near estimates come to the target, for each draw (first axis) and each K."""

    first: int  # the first K
    cosine: np.ndarray
    norm: np.ndarray  # over the target's


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

    def advance(power: jax.Array, c_k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return power - H @ (H @ power) / V, c_k * power

    _, terms = jax.lax.scan(advance, g / jnp.sqrt(V), coefficients(count, jnp.zeros((), g.dtype)))
    return terms, jnp.cumsum(terms, axis=0)


def limits(accelerator: Accelerator, terms: jax.Array, sums: jax.Array, g: jax.Array) -> jax.Array:
    """The accelerated limit of each window of partial sums."""
    length = accelerator.num_sums

    def limit(first: jax.Array) -> jax.Array:
        window = [jax.lax.dynamic_slice_in_dim(x, first, length) for x in (terms, sums)]
        state = accelerator.init(g, 0)
        if isinstance(state, WeightedState):  # `init` takes no traced start
            state = state._replace(start=first)
        state, _ = jax.lax.scan(lambda state, pair: (accelerator.push(state, *pair), None), state, window)
        return accelerator.limit(state)

    return jax.vmap(limit)(jnp.arange(len(sums) - length + 1, dtype=jnp.int32))


def curves(seeds: int, steps: int, listener: Listener) -> dict[tuple[str, int], Curve]:
    """By accelerator and order; the plain series has order 0."""
    cases = [(name, order) for name in ACCELERATORS for order in ORDERS]
    listener(events.Started("accelerators", 0, len(cases)))
    with jax.enable_x64(True):
        H, g = (jnp.asarray(np.stack(parts)) for parts in zip(*map(draw, range(seeds)), strict=True))
        exact = np.asarray(jax.jit(jax.vmap(target))(H, g))
        terms, sums = jax.jit(jax.vmap(functools.partial(plain, count=steps)))(H, g)
        found = {(PLAIN, 0): _compare(sums, exact, 1)}
        for number, (name, order) in enumerate(cases, 1):
            accelerator = ACCELERATORS[name](order)
            estimates = jax.jit(jax.vmap(functools.partial(limits, accelerator)))(terms, sums, g)
            found[name, order] = _compare(estimates, exact, accelerator.num_sums)
            listener(events.Progress(number, len(cases), {}))
    return found


def _compare(estimates: jax.Array, exact: np.ndarray, first: int) -> Curve:
    lengths = np.linalg.norm(exact, axis=-1, keepdims=True)
    ratios = np.linalg.norm(estimates, axis=-1) / lengths
    return Curve(first, np.einsum("skp,sp->sk", estimates, exact) / (ratios * lengths**2), ratios)


def compute(work: Work) -> Findings:
    """Compares all accelerators at all orders and K."""
    seeds, steps, folder = work.options["seeds"], work.options["steps"], work.folder
    found = curves(seeds, steps, work.listener)
    shown = [K for K in SHOWN if steps > K] + [steps]
    lines: list[Record] = []
    rows: list[Record] = []
    for (name, order), curve in found.items():
        case = {"accelerator": name, "order": order}
        medians = {"cosine": np.median(curve.cosine, axis=0), "norm": np.median(curve.norm, axis=0)}
        lines += [
            {**case, "terms": K, **{key: float(values[K - curve.first]) for key, values in medians.items()}}
            for K in range(curve.first, steps + 1)
        ]
        at = {key: {K: float(values[K - curve.first]) for K in shown} for key, values in medians.items()}
        behind = np.mean(curve.cosine < found[PLAIN, 0].cosine[:, curve.first - 1 :])
        rows.append({**case, **at, "behind": float(behind)})
    columns = ["Accelerator", "N", *(f"K = {K}" for K in shown)]
    over = f"median over {seeds} random Hessians"
    cosine, norm = f"Cosine with the exact direction, {over}", f"Norm over the exact norm, {over}"
    tables: list[Record] = [
        {
            "caption": f"{cosine}; and how often, over all K, it is less than that of the plain series",
            "columns": [*columns, "Behind, %"],
            "rows": [
                [row["accelerator"], row["order"], *row["cosine"].values(), f"{100 * row['behind']:.1f}"]
                for row in rows
            ],
        },
        {
            "caption": norm,
            "columns": columns,
            "rows": [[row["accelerator"], row["order"], *row["norm"].values()] for row in rows],
        },
    ]
    figures = [
        save(_figure(found, "cosine", "Cosine"), folder, "cosine", cosine, columns=3),
        save(_figure(found, "norm", "Ratio"), folder, "norm", norm, columns=3),
    ]
    return Findings(lines, {"size": SIZE, "margin": MARGIN, "rows": rows}, figures, tables)


def _figure(found: Mapping[tuple[str, int], Curve], key: str, name: str) -> Figure:
    figure = Figure(figsize=(5, 6.4), layout="constrained")
    panels = figure.subplots(len(DRAWN), sharex=True, sharey=True)
    for axes, order in zip(panels, DRAWN, strict=True):
        # Where lines coincide, dashes on a solid line show both.
        styles: dict[tuple[str, int], Record] = {
            (accelerator, order): {"color": COLOURS[number], "linestyle": "solid" if number < 3 else (0, (4, 2))}
            for number, accelerator in enumerate(ACCELERATORS)
        }
        # One that jumps from sign to sign must not hide the others.
        styles[ERRATIC, order] |= {"linestyle": "solid", "linewidth": 0.5, "alpha": 0.6, "zorder": 1}
        for case, style in ({(PLAIN, 0): {"color": "black", "linewidth": 2.4}} | styles).items():
            values = np.median(getattr(found[case], key), axis=0)
            axes.plot(np.arange(len(values)) + found[case].first, values, label=case[0], **style)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="dotted")
        axes.set(ylabel=f"{name}, N = {order}", xscale="log", ylim=(0, 1.05))
    label(panels[-1].xaxis)
    panels[-1].set_xlabel("Terms K")
    return figure
