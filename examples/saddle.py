"""Four ways down from the same point next to a saddle: the paper's Figure 1, as a table and a picture.

The loss f(x, y) = ½(x² − y²) + ¼y⁴ has a saddle at (0, 0) and minima at (0, ±1). Newton's method walks into the saddle;
saddle-free Newton, exact or by the series, leaves it.

Run with `make demo` or `python examples/saddle.py [--out FILE]`.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

import saddlefree as sf

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS = 20
START = (0.9, 0.05)
METHODS = {
    "SGD": optax.sgd(0.1),
    "Newton": sf.saddle_free_newton(damping=0.0, solver=sf.exact(absolute=False)),
    "Exact saddle-free Newton": sf.saddle_free_newton(damping=0.1, solver=sf.exact()),
    "Series (K = 18, Sablonnière N = 2)": sf.saddle_free_newton(
        damping=0.1, solver=sf.series(num_terms=18, acceleration=sf.sablonniere(order=2))
    ),
}


def loss(x: jax.Array) -> jax.Array:
    """A saddle at the origin, minima at (0, ±1) with the value −¼."""
    return 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4


def path(tx: optax.GradientTransformation) -> np.ndarray:
    """The points that an optimiser visits from START."""
    tx = optax.with_extra_args_support(tx)

    def step(carry: tuple, _: None) -> tuple:
        x, state = carry
        updates, state = tx.update(jax.grad(loss)(x), state, x, value_fn=loss)
        x = optax.apply_updates(x, updates)
        return (x, state), x

    x = jnp.array(START)
    _, points = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), None, length=STEPS))(x)
    return np.concatenate([x[None], points])


def table(paths: dict[str, np.ndarray]) -> str:
    """Where each method is after some steps."""
    steps = (1, 3, 5, 10, STEPS)
    rows = [f"{'loss after step':<36}" + "".join(f"{step:>10}" for step in steps) + "   ends at"]
    for name, points in paths.items():
        losses = "".join(f"{float(loss(points[step])):>10.4f}" for step in steps)
        rows.append(f"{name:<36}{losses}   ({points[-1][0]:+.3f}, {points[-1][1]:+.3f})")
    return "\n".join(rows)


def figure(paths: dict[str, np.ndarray], out: pathlib.Path) -> None:
    """The paths over the loss's contours, and the loss against steps."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    grid = np.meshgrid(np.linspace(-0.35, 1.05, 200), np.linspace(-0.35, 1.25, 200))
    left.contour(*grid, np.asarray(loss(jnp.stack([jnp.asarray(g) for g in grid]))), levels=30, cmap="Greys", alpha=0.6)
    for (name, points), colour in zip(paths.items(), ("#268bd2", "#d33682", "#cb4b16", "#b58900"), strict=True):
        # The series lies on the exact path: a thin line on a thick one shows both.
        style = {"color": colour, "label": name, "linewidth": 5 if "Exact" in name else 1.5, "markersize": 3.5}
        left.plot(*points.T, "o-", **style)
        right.plot([float(loss(x)) for x in points], "o-", **style)
    left.plot(0, 0, "x", color="black", markersize=9)
    left.annotate("saddle", (0, 0), (-0.26, -0.1))
    left.plot(0, 1, "*", color="black", markersize=11)
    left.annotate("minimum", (0, 1), (-0.3, 1.06))
    left.set(title="Paths from one point", xlabel="x", ylabel="y")
    right.set(title="Loss", xlabel="step")
    right.axhline(-0.25, color="black", linewidth=0.8, linestyle=":")
    right.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=150)


def main() -> None:
    """Prints the table and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/saddle.png"), help="file of the figure")
    out = parser.parse_args().out
    paths = {name: path(tx) for name, tx in METHODS.items()}
    print(table(paths))
    figure(paths, out)
    print(f"\nfigure: {out}")


if __name__ == "__main__":
    main()
