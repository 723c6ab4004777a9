"""Compile time and memory of a series step against the number of terms K, in a loop and unrolled.

The network is the paper's for UCI Energy (8-12×7-1), the batch 588 random rows.
"""

import time
from typing import Any

import jax
import optax

import saddlefree as sf
from benchmarks.record import network, write
from saddlefree.lab import models


def compiled(tx: optax.GradientTransformation, params: Any, loss: Any, batch: tuple) -> tuple[float, int]:
    """Seconds to compile one step, and the bytes of its temporaries."""

    def step(params: Any, state: tuple, batch: tuple) -> tuple:
        value_fn = lambda params: loss(params, batch)  # noqa: E731
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    jax.clear_caches()
    state = tx.init(params)
    start = time.perf_counter()
    executable = jax.jit(step).lower(params, state, batch).compile()
    return time.perf_counter() - start, executable.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Prints both, for each K."""
    params, loss = network(models.mlp(8, *[12] * 7, 1), jax.random.key(0))
    batch = jax.random.normal(jax.random.key(1), (588, 8)), jax.random.normal(jax.random.key(2), (588, 1))
    compiled(sf.saddle_free_newton(solver=sf.series(num_terms=2)), params, loss, batch)  # what is compiled only once
    rows = []
    for unroll, terms in ((1, (5, 10, 20, 40, 50)), (True, (5, 10, 20, 40))):
        for K in terms:
            solver = sf.series(num_terms=K, acceleration=sf.sablonniere(order=2), scale=sf.lower_bound(), unroll=unroll)
            duration, memory = compiled(sf.saddle_free_newton(solver=solver), params, loss, batch)
            rows.append({"unrolled": unroll is True, "K": K, "N": 2, "compile_seconds": duration, "bytes": memory})
            print(f"{'unrolled' if unroll is True else 'loop':>8}  K={K:<3}  {duration:6.2f} s  {memory / 1e6:6.2f} MB")
    loop = {row["K"]: row for row in rows if not row["unrolled"]}
    ratios = {
        "compile_K40_over_K5": loop[40]["compile_seconds"] / loop[5]["compile_seconds"],
        "memory_K50_over_K10": loop[50]["bytes"] / loop[10]["bytes"],
    }
    print(ratios)
    write("compilation", {"rows": rows, **ratios})


if __name__ == "__main__":
    main()
