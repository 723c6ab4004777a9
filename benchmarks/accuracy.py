"""How far each solver gets with a number of products: relative error to the exact direction (|H| + λI)⁻¹ g.

On the Hessian of the UCI Energy network (8-12×7-1, ReLU, 1,057 parameters) after 100 steps of Adam at 1e-2, the median
of five seeds; the exact direction is NumPy's, in float64. Needs the data of `uci-energy` (SADDLEFREE_DATA).
"""

import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import saddlefree as sf
from benchmarks.record import step_of, write
from saddlefree.lab import problems

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DAMPINGS = (0.1, 0.01)
SEEDS = range(5)


def trained(params: Any, loss: Callable[[Any], jax.Array]) -> Any:
    """The parameters after 100 steps of Adam."""
    tx = optax.adam(1e-2)
    step = step_of(tx, loss)
    return jax.jit(lambda p: jax.lax.fori_loop(0, 100, lambda _, carry: step(*carry), (p, tx.init(p))))(params)[0]


def solvers(V: float) -> dict[tuple[str, int], Any]:
    """Each solver at several numbers of products."""
    found: dict[tuple[str, int], Any] = {}
    for m in (4, 10, 20, 50):
        found["lanczos", m] = sf.lanczos(m)
    for K in (6, 11, 26):
        found["series, V = 1.01 λmax(H²)", 2 * (K - 1)] = sf.series(num_terms=K, scale=sf.fixed_scale(V))
    paper = {"num_terms": 18, "scale": sf.fixed_scale(max(100.0, V))}
    found["series as in the paper, plain", 34] = sf.series(**paper)
    found["series as in the paper, Sablonnière N = 8", 34] = sf.series(**paper, acceleration=sf.sablonniere(order=8))
    return found


def figure(rows: list[dict[str, Any]]) -> None:
    """Relative error against products, one panel for each λ, as docs/figures/accuracy.png."""
    fig, panels = plt.subplots(1, len(DAMPINGS), figsize=(10, 4), sharey=True, layout="constrained")
    styles = ("o-", "s--", "^", "v")
    for panel, damping in zip(panels, DAMPINGS, strict=True):
        for style, name in zip(styles, dict.fromkeys(row["solver"] for row in rows), strict=True):
            points = [(row["products"], row[f"float64, damping {damping}"]) for row in rows if row["solver"] == name]
            panel.semilogy(*zip(*points, strict=True), style, label=name)
        panel.set(title=f"λ = {damping}", xlabel="Hessian-vector products")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("relative error of the direction")
    panels[1].legend(fontsize=8, loc="lower left")
    path = pathlib.Path(__file__).parent.parent / "docs" / "figures" / "accuracy.png"
    fig.savefig(path, dpi=150)


def main() -> None:
    """Prints the table, in float64 and in float32."""
    jax.config.update("jax_enable_x64", True)
    errors: dict[tuple, list[float]] = {}
    task = problems.find("uci-energy").load(None)
    batch = jax.tree.map(lambda part: part.astype(jnp.float64), task.parts["train"])
    for seed in SEEDS:
        params, state = task.init(jax.random.key(seed))
        loss = lambda params, state=state: task.loss(params, state, batch, None)[0]  # type: ignore[misc] # noqa: E731
        params = trained(jax.tree.map(lambda p: p.astype(jnp.float64), params), loss)
        vector, unravel = ravel_pytree(params)
        flat_loss = lambda v, loss=loss, unravel=unravel: loss(unravel(v))  # type: ignore[misc] # noqa: E731
        H, g = np.asarray(jax.hessian(flat_loss)(vector)), np.asarray(jax.grad(flat_loss)(vector))
        values, vectors = np.linalg.eigh(H)
        for dtype in ("float64", "float32"):
            matrix, gradient = jnp.asarray(H, dtype), jnp.asarray(g, dtype)
            for (name, products), solver in solvers(1.01 * float(np.abs(values).max()) ** 2).items():
                solve = jax.jit(
                    lambda damping, s=solver, A=matrix, b=gradient: sf.solve(s, lambda v: A @ v, b, damping).direction
                )
                for damping in DAMPINGS:
                    exact = vectors @ (vectors.T @ g / (np.abs(values) + damping))
                    direction = np.asarray(solve(jnp.asarray(damping, dtype)), np.float64)
                    error = np.linalg.norm(direction - exact) / np.linalg.norm(exact)
                    errors.setdefault((name, products, dtype, damping), []).append(float(error))
        print(f"seed {seed}: eigenvalues {values[0]:.3g} … {values[-1]:.3g}, {np.sum(values < 0)} negative")
    rows = []
    print(
        f"{'solver':<44}{'products':>9}"
        + "".join(f"{f'λ={d} {t}':>18}" for t in ("float64", "float32") for d in DAMPINGS)
    )
    for name, products in dict.fromkeys(key[:2] for key in errors):
        medians = {
            f"{dtype}, damping {damping}": statistics.median(errors[name, products, dtype, damping])
            for dtype in ("float64", "float32")
            for damping in DAMPINGS
        }
        rows.append({"solver": name, "products": products, **medians})
        print(f"{name:<44}{products:>9}" + "".join(f"{error:>18.4f}" for error in medians.values()))
    write("accuracy", {"seeds": len(SEEDS), "rows": rows})
    figure(rows)


if __name__ == "__main__":
    main()
