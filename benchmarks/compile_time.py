"""Compile time of a step beside that of `optax.adam`: a transformer of 53 leaves, and 192 numbers in 64 leaves or one.

Tracing and compiling, each in a cleared cache; rounds are interleaved and the shortest time of each counts.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import saddlefree as sf
from benchmarks import transformer
from benchmarks.record import write

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


def seconds_to_compile(optimiser: Any, params: Any, value_fn: Any) -> float:
    """Of one step, from Python to machine code."""
    tx = optax.with_extra_args_support(optimiser)

    def step(params: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(step).lower(params, state).compile()
    return time.perf_counter() - start


def shortest(cases: dict[str, tuple[Any, Any, Any]]) -> dict[str, float]:
    """The shortest compile time of each case, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            times[name].append(seconds_to_compile(*case))
    return {name: min(found) for name, found in times.items()}


def main() -> None:
    """Prints seconds and ratios."""
    params, tokens = transformer.network(jax.random.key(0)), transformer.batch(jax.random.key(1))
    print(f"{len(jax.tree.leaves(params))} leaves, {optax.tree.size(params)} parameters")
    value_fn = lambda params: transformer.loss(params, tokens)  # noqa: E731
    times = shortest({name: (tx, params, value_fn) for name, tx in OPTIMISERS.items()})
    over_adam = {name: duration / times["adam"] for name, duration in times.items()}
    for name, ratio in over_adam.items():
        print(f"{name:<34}{times[name]:7.2f} s{ratio:7.2f} × Adam", flush=True)

    one = {"x": jnp.linspace(-1.0, 1.0, 192)}
    many = {f"x{i:02}": part for i, part in enumerate(jnp.split(one["x"], 64))}

    def quartic(params: Any) -> jax.Array:
        x = jnp.concatenate(jax.tree.leaves(params))
        return jnp.sum((x**2 - 1) ** 2) + jnp.sum(x[1:] * x[:-1])

    cases = {
        (name, kind): (tx, p, quartic) for name, tx in OPTIMISERS.items() for kind, p in (("1", one), ("64", many))
    }
    leaves = shortest(cases)  # type: ignore[arg-type]
    growth = {name: leaves[name, "64"] / leaves[name, "1"] for name in OPTIMISERS}  # type: ignore[index]
    for name, ratio in growth.items():
        print(f"{name:<34}64 leaves over one: {ratio:5.2f}")
    write("compile_time", {"seconds": times, "over_adam": over_adam, "64_leaves_over_one": growth})


if __name__ == "__main__":
    main()
