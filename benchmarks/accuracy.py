"""How far each solver gets with a number of products: relative error to the exact direction (|H| + λI)⁻¹ g.

On the Hessian of the UCI Energy network (8-12×7-1, ReLU, 1,057 parameters) after 100 steps of Adam at 1e-2, the median
of five seeds; the exact direction is NumPy's, in float64. Needs SADDLEFREE_DATA to hold uci-energy/data.txt and
permutation.txt.
"""

import os
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import saddlefree as sf
from benchmarks.record import write

DAMPINGS = (0.1, 0.01)
SEEDS = range(5)


def energy() -> tuple[np.ndarray, np.ndarray]:
    """The 588 training rows of the paper's split, standardised by the 692 rows of training and validation."""
    folder = pathlib.Path(os.environ.get("SADDLEFREE_DATA", "data")) / "uci-energy"
    rows, order = np.loadtxt(folder / "data.txt"), np.loadtxt(folder / "permutation.txt").astype(int)
    known = rows[order][:692]
    known = (known - known.mean(0)) / known.std(0)
    return known[:588, :8], known[:588, 8:9]


def network(key: jax.Array) -> list[dict[str, jax.Array]]:
    """Truncated normal weights of standard deviation 1/√fan-in, zero biases."""
    sizes = [8, *[12] * 7, 1]
    init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    keys = jax.random.split(key, len(sizes) - 1)
    return [{"w": init(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def loss(params: list, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """½ mean squared error."""
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return 0.5 * jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def trained(seed: int, batch: tuple) -> list:
    """The network after 100 steps of Adam."""
    params, tx = network(jax.random.key(seed)), optax.adam(1e-2)

    def step(carry: tuple, _: None) -> tuple:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, batch), state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, length=100))(params)
    return params


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


def main() -> None:
    """Prints the table, in float64 and in float32."""
    jax.config.update("jax_enable_x64", True)
    errors: dict[tuple, list[float]] = {}
    x, y = energy()
    for seed in SEEDS:
        batch = jnp.asarray(x), jnp.asarray(y)
        params = jax.tree.map(lambda p: p.astype(jnp.float64), trained(seed, batch))
        vector, unravel = ravel_pytree(params)
        flat_loss = lambda v, batch=batch, unravel=unravel: loss(unravel(v), batch)  # noqa: E731
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


if __name__ == "__main__":
    main()
