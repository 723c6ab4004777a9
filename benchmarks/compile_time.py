"""Compile time of a step, from Python to machine code, each in a cleared cache.

Beside that of `optax.adam`: a transformer of 53 leaves, and 192 numbers in 64 leaves or one; rounds are interleaved and
the shortest time of each counts. Of the series also against its number of terms K, with the memory of a step's
temporaries: the paper's network for UCI Energy (8-12×7-1) and 588 random rows. Of `minimise` each program beside
`jax.value_and_grad` of the loss, on the laboratory's Poisson equation, by the processor's clock: `start`
and the first stage are compiled in every run, `examine` where it ends or is stuck, the others where they are entered.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import saddlefree as sf
from benchmarks import transformer
from benchmarks.record import network, shortest, step_of, write
from saddlefree import descent, stages
from saddlefree.lab import models, problems
from saddlefree.space import Space

ROUNDS = 3
OPTIMISERS = {
    "adam": optax.adam(1e-3),
    "adaptive_saddle_free_newton()": sf.adaptive_saddle_free_newton(),
    "lanczos(10)": sf.saddle_free_newton(solver=sf.lanczos(10)),
    "low_rank()": sf.saddle_free_newton(solver=sf.low_rank()),
    "low_rank(base=adam)": sf.saddle_free_newton(solver=sf.low_rank(base=optax.adam(1e-3))),
    "low_rank(base=flatten(adam))": sf.saddle_free_newton(solver=sf.low_rank(base=optax.flatten(optax.adam(1e-3)))),
    "series(13, sablonniere(5))": sf.saddle_free_newton(
        solver=sf.series(num_terms=13, acceleration=sf.sablonniere(order=5), scale=sf.lower_bound())
    ),
}


def compiled(optimiser: Any, params: Any, value_fn: Any) -> tuple[float, int]:
    """Seconds to trace and compile one step, and the bytes of its temporaries."""
    step, state = step_of(optimiser, value_fn), jax.eval_shape(optimiser.init, params)
    jax.clear_caches()
    start = time.perf_counter()
    executable = jax.jit(step).lower(params, state).compile()
    return time.perf_counter() - start, executable.memory_analysis().temp_size_in_bytes


def beside_adam() -> dict[str, Any]:
    """Seconds and ratios, by optimiser."""

    def times(cases: dict[Any, tuple[Any, Any, Any]]) -> dict[Any, float]:
        runs = {name: functools.partial(lambda case: compiled(*case)[0], case) for name, case in cases.items()}
        return shortest(runs, ROUNDS)

    params, tokens = transformer.network(jax.random.key(0)), transformer.batch(jax.random.key(1))
    print(f"{len(jax.tree.leaves(params))} leaves, {optax.tree.size(params)} parameters")
    value_fn = lambda params: transformer.loss(params, tokens)  # noqa: E731
    seconds = times({name: (tx, params, value_fn) for name, tx in OPTIMISERS.items()})
    over_adam = {name: duration / seconds["adam"] for name, duration in seconds.items()}
    for name, ratio in over_adam.items():
        print(f"{name:<34}{seconds[name]:7.2f} s{ratio:7.2f} × Adam", flush=True)

    one = {"x": jnp.linspace(-1.0, 1.0, 192)}
    many = {f"x{i:02}": part for i, part in enumerate(jnp.split(one["x"], 64))}

    def quartic(params: Any) -> jax.Array:
        x = jnp.concatenate(jax.tree.leaves(params))
        return jnp.sum((x**2 - 1) ** 2) + jnp.sum(x[1:] * x[:-1])

    leaves = times({(name, len(p)): (tx, p, quartic) for name, tx in OPTIMISERS.items() for p in (one, many)})
    growth = {name: leaves[name, 64] / leaves[name, 1] for name in OPTIMISERS}
    for name, ratio in growth.items():
        print(f"{name:<34}64 leaves over one: {ratio:5.2f}")
    return {"seconds": seconds, "over_adam": over_adam, "64_leaves_over_one": growth}


def of_the_series() -> dict[str, Any]:
    """Seconds and memory, by K."""
    params, loss = network(models.mlp(8, *[12] * 7, 1), jax.random.key(0))
    batch = jax.random.normal(jax.random.key(1), (588, 8)), jax.random.normal(jax.random.key(2), (588, 1))
    rows = []
    for K in (5, 10, 20, 40, 50):
        solver = sf.series(num_terms=K, acceleration=sf.sablonniere(order=2), scale=sf.lower_bound())
        seconds, memory = compiled(sf.saddle_free_newton(solver=solver), params, lambda p: loss(p, batch))
        rows.append({"K": K, "N": 2, "compile_seconds": seconds, "bytes": memory})
        print(f"K={K:<3}  {seconds:6.2f} s  {memory / 1e6:6.2f} MB")
    loop = {row["K"]: row for row in rows}
    ratios = {
        "compile_K40_over_K5": loop[40]["compile_seconds"] / loop[5]["compile_seconds"],
        "memory_K50_over_K10": loop[50]["bytes"] / loop[10]["bytes"],
    }
    print(ratios)
    return {"rows": rows, **ratios}


def of_minimise() -> dict[str, Any]:
    """Processor seconds of each program of `minimise`, and what they are over `jax.value_and_grad` of the loss."""
    with jax.enable_x64(True):
        task = problems.find("pinn-poisson").load()
        params, fixed = task.init(jax.random.key(0))
        value_fn = lambda p: task.loss(p, fixed, task.parts["train"], jax.random.key(0))[0]  # noqa: E731
        chosen = stages.choose(Space(params))
        program = descent.Program(value_fn, chosen, False)
        key = jax.random.PRNGKey(0)
        state = jax.eval_shape(program.start, params, key, None)
        limit, count = jax.ShapeDtypeStruct((), state.norm.dtype), jax.ShapeDtypeStruct((), jnp.int32)
        lowered = {
            "value_and_grad": lambda: jax.jit(jax.value_and_grad(value_fn)).lower(params),
            "start": lambda: program.start.lower(params, key, None),
            **{
                f"run {stage.name}": functools.partial(program.run.lower, i, state, limit, count)
                for i, stage in enumerate(chosen)
            },
            "examine": lambda: program.examine.lower(state),
            "escape": lambda: program.escape.lower(state, jax.eval_shape(program.examine, state)),
        }

        def clocked(lower: Callable[[], Any]) -> float:
            jax.clear_caches()
            start = time.process_time()
            lower().compile()
            return time.process_time() - start

        found = shortest({name: functools.partial(clocked, lower) for name, lower in lowered.items()}, ROUNDS)
    always = found["start"] + found[f"run {chosen[0].name}"]
    for name, duration in found.items():
        print(f"{name:<34}{duration:7.2f} s{duration / found['value_and_grad']:7.2f} × value_and_grad", flush=True)
    return {"seconds": found, "over_value_and_grad": always / found["value_and_grad"]}


def main() -> None:
    """Prints all; what is compiled only once in a process is not the series'."""
    write("compile_time", {**beside_adam(), "minimise": of_minimise()})
    write("compilation", of_the_series())


if __name__ == "__main__":
    main()
