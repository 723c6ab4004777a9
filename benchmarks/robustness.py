"""Random hyperparameters over the paper's search ranges (Appendix A.3): no non-finite number reaches the parameters.

UCI Energy, full batch, 300 steps a draw; `exact` 50 steps. Each solver's own options are drawn once for ten draws of
learning rate, momentum and damping, which are compiled and run together. Needs SADDLEFREE_DATA, and takes an hour.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import saddlefree as sf
from benchmarks.record import log_uniform, read, write
from benchmarks.uci_energy import energy, loss, network

TOGETHER = 10
RANGES = ((1e-3, 5), (1e-3, 0.95), (1e-8, 1))

Make = Callable[..., optax.GradientTransformation]
"""An optimiser from three numbers, of RANGES: learning rate, momentum and damping."""


def fixed(solver: Any) -> Make:
    """The paper's "Ours"."""
    return lambda rate, momentum, damping: sf.saddle_free_newton(rate, momentum, damping, solver=solver)


def adaptive(solver: Any) -> Make:
    """The paper's "Ours (Adaptive)", whose initial damping may be ten times as large."""
    return lambda rate, momentum, damping: sf.adaptive_saddle_free_newton(solver, 10 * damping)


def low_rank(rng: np.random.Generator) -> Make:
    """Rank, period, average, which takes the place of momentum, and base at random."""
    base = optax.adam(log_uniform(rng, 1e-4, 1e-1)) if rng.uniform() < 0.5 else None
    solver = sf.low_rank(
        int(rng.integers(1, 21)), int(rng.integers(1, 101)), averaging=float(rng.uniform(0, 0.99)), base=base
    )
    return lambda rate, momentum, damping: sf.saddle_free_newton(rate, damping=damping, solver=solver)


def paper_series(rng: np.random.Generator) -> sf.series:
    """K in [1, 20], N in [0, (K − 1)/2], the paper's V."""
    K = int(rng.integers(1, 21))
    N = int(rng.integers(0, (K - 1) // 2 + 1))
    return sf.series(num_terms=K, acceleration=sf.sablonniere(order=N), scale=sf.lower_bound())


def recycled(rng: np.random.Generator) -> sf.lanczos:
    """Up to twenty products and forty vectors that are kept."""
    return sf.lanczos(int(rng.integers(1, 21)), "sqrt", memory=1, recycle=int(rng.integers(0, 41)))


KINDS: dict[str, tuple[int, Callable[[np.random.Generator], Make]]] = {
    "series": (300, lambda rng: fixed(paper_series(rng))),
    "series-adaptive": (300, lambda rng: adaptive(paper_series(rng))),
    "lanczos": (300, lambda rng: fixed(sf.lanczos(int(rng.integers(1, 21))))),
    "lanczos-adaptive": (300, lambda rng: adaptive(recycled(rng))),
    "low-rank": (300, low_rank),
    "blockwise": (300, lambda rng: fixed(sf.blockwise(sf.lanczos(int(rng.integers(1, 11)))))),
    "exact": (50, lambda rng: fixed(sf.exact())),
}


def tally(make: Make, steps: int, numbers: np.ndarray, seeds: np.ndarray, batch: tuple) -> np.ndarray:
    """How many runs kept all parameters finite after each step, met a non-finite number, and ended with a loss ≥ 1."""

    def run(numbers: jax.Array, seed: jax.Array) -> jax.Array:
        tx = optax.with_extra_args_support(make(*numbers))

        def step(carry: tuple, _: None) -> tuple:
            params, state = carry
            value_fn = lambda params: loss(params, batch)  # noqa: E731
            value, grads = jax.value_and_grad(value_fn)(params)
            updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
            params = optax.apply_updates(params, updates)
            return (params, state), jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params)]))

        params = network(jax.random.key(seed))
        (params, state), finite = jax.lax.scan(step, (params, tx.init(params)), None, length=steps)
        skipping = sf.diagnostics(state)["nonfinite_steps"] > 0
        return jnp.stack([jnp.all(finite), skipping, ~(loss(params, batch) < 1)])

    return np.sum(np.asarray(jax.jit(jax.vmap(run))(jnp.asarray(numbers, jnp.float32), jnp.asarray(seeds))), 0)


def main() -> None:
    """Prints a line for each kind of optimiser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=100, help="of each kind (exact: a twentieth); multiples of ten")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    x, y = energy()
    batch = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    for name in options.kinds:
        steps, draw = KINDS[name]
        rng, counts, draws = np.random.default_rng(0), np.zeros(3, int), 0
        while draws < (max(options.draws // 20, 1) if name == "exact" else options.draws):
            make = draw(rng)
            numbers = np.array([[log_uniform(rng, *ends) for ends in RANGES] for _ in range(TOGETHER)])
            counts += tally(make, steps, numbers, draws + np.arange(TOGETHER), batch)
            draws += TOGETHER
        found = dict(zip(("finite", "skipping", "worse"), counts.tolist(), strict=True))
        row = {"optimiser": name, "draws": draws, "steps": steps, **found}
        print(row, flush=True)
        write("robustness", [*(old for old in read("robustness", []) if old["optimiser"] != name), row])


if __name__ == "__main__":
    main()
