"""Random hyperparameters over the paper's search ranges (Appendix A.3): no non-finite number reaches the parameters.

UCI Energy, full batch, 300 steps a draw; `exact` 50 steps. Needs SADDLEFREE_DATA, and takes a quarter of an hour.
"""

import argparse
import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import saddlefree as sf
from benchmarks.record import log_uniform, read, write
from benchmarks.uci_energy import energy, loss, network


def paper_series(rng: np.random.Generator) -> sf.series:
    """K in [1, 20], N in [0, (K − 1)/2], the paper's V."""
    K = int(rng.integers(1, 21))
    N = int(rng.integers(0, (K - 1) // 2 + 1))
    return sf.series(num_terms=K, acceleration=sf.sablonniere(order=N), scale=sf.lower_bound())


def fixed(rng: np.random.Generator, solver: Any) -> optax.GradientTransformation:
    """Learning rate, momentum and damping of the paper's "Ours"."""
    numbers = log_uniform(rng, 1e-3, 5), log_uniform(rng, 1e-3, 0.95), log_uniform(rng, 1e-8, 1)
    return sf.saddle_free_newton(*numbers, solver=solver)


def adaptive(rng: np.random.Generator, solver: Any) -> optax.GradientTransformation:
    """Initial damping of the paper's "Ours (Adaptive)"."""
    return sf.adaptive_saddle_free_newton(solver, log_uniform(rng, 1e-8, 10))


def recycled(rng: np.random.Generator) -> sf.lanczos:
    """Up to twenty products and forty vectors that are kept."""
    return sf.lanczos(int(rng.integers(1, 21)), "sqrt", memory=1, recycle=int(rng.integers(0, 41)))


def low_rank(rng: np.random.Generator) -> optax.GradientTransformation:
    """Learning rate and damping of the paper's "Ours"; rank, period, average and metric at random."""
    solver = sf.low_rank(
        int(rng.integers(1, 21)),
        int(rng.integers(1, 101)),
        averaging=float(rng.uniform(0, 0.99)),
        metric=str(rng.choice(["identity", "adam"])),  # type: ignore[arg-type]
    )
    return sf.saddle_free_newton(log_uniform(rng, 1e-3, 5), damping=log_uniform(rng, 1e-8, 1), solver=solver)


KINDS = {
    "series": (300, lambda rng: fixed(rng, paper_series(rng))),
    "series-adaptive": (300, lambda rng: adaptive(rng, paper_series(rng))),
    "lanczos": (300, lambda rng: fixed(rng, sf.lanczos(int(rng.integers(1, 21))))),
    "lanczos-adaptive": (300, lambda rng: adaptive(rng, recycled(rng))),
    "low-rank": (300, lambda rng: low_rank(rng)),
    "blockwise": (300, lambda rng: fixed(rng, sf.blockwise(sf.lanczos(int(rng.integers(1, 11)))))),
    "exact": (50, lambda rng: fixed(rng, sf.exact())),
}


def finite_run(tx: optax.GradientTransformation, steps: int, seed: int, batch: tuple) -> tuple[bool, float, int]:
    """Whether all parameters were finite after each step, the last loss, and the steps that met a non-finite number."""

    def step(carry: tuple, _: None) -> tuple:
        params, state = carry
        value_fn = lambda params: loss(params, batch)  # noqa: E731
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
        params = optax.apply_updates(params, updates)
        return (params, state), jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params)]))

    params = network(jax.random.key(seed))
    run = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, length=steps))
    (params, state), finite = run(params)
    return bool(jnp.all(finite)), float(loss(params, batch)), int(sf.diagnostics(state)["nonfinite_steps"])


def main() -> None:
    """Prints a line for each kind of optimiser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--draws", type=int, default=100, help="random configurations of each kind (exact: a twentieth)"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    draws = options.draws
    x, y = energy()
    batch = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    for name in options.kinds:
        steps, make = KINDS[name]
        rng, tally = np.random.default_rng(0), collections.Counter()
        number = max(draws // 20, 1) if name == "exact" else draws
        for draw in range(number):
            finite, last, skipped = finite_run(make(rng), steps, draw, batch)
            tally.update(finite=int(finite), skipping=int(skipped > 0), worse=int(not last < 1.0))
        row = {"optimiser": name, "draws": number, "steps": steps, **tally}
        print(row, flush=True)
        write("robustness", [*(old for old in read("robustness", []) if old["optimiser"] != name), row])


if __name__ == "__main__":
    main()
