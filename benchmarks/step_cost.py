"""What a step costs beside Adam's: the MLP 784-50-10 at batch 200, on random data, in one process and one run.

`low_rank` with its refreshes included, on the step's own batch and on `curvature_fn` with 400 examples. On one core
(`taskset -c 0 python -m benchmarks.step_cost`) the figures go to a file of their own.
"""

import os
from statistics import median

import jax
import optax

import saddlefree as sf
from benchmarks.record import network, seconds, write
from saddlefree.lab import models

STEPS, ROUNDS = 200, 9


def main() -> None:
    """Prints time per step over Adam's."""
    keys = jax.random.split(jax.random.key(0), 3)
    params, loss = network(models.mlp(784, 50, 10), keys[0])
    x, y = jax.random.normal(keys[1], (STEPS, 200, 784)), jax.random.randint(keys[2], (STEPS, 200), 0, 10)
    large = x[:2].reshape(400, 784), y[:2].reshape(400)
    rank20 = sf.low_rank(rank=20, refresh_every=100)
    rank20_adam = sf.low_rank(rank=20, refresh_every=100, base=optax.flatten(optax.adam(1e-3)))
    optimisers = {
        "adam": (optax.adam(1e-3), False),
        "sgd with momentum": (optax.sgd(1e-2, momentum=0.9), False),
        "low_rank(20, 100)": (sf.saddle_free_newton(1e-2, damping=1.0, solver=rank20), False),
        "low_rank(20, 100) over Adam": (sf.saddle_free_newton(0.3, solver=rank20_adam), False),
        "low_rank(20, 100) over Adam, 400 examples a refresh": (sf.saddle_free_newton(0.3, solver=rank20_adam), True),
        "blockwise(lanczos(5))": (
            sf.saddle_free_newton(1e-2, damping=1.0, solver=sf.blockwise(sf.lanczos(5))),
            False,
        ),
        "lanczos(10)": (sf.saddle_free_newton(1e-2, damping=1.0, solver=sf.lanczos(10)), False),
        "series(num_terms=13, sablonniere(5)), the paper's V": (
            sf.saddle_free_newton(
                1e-2,
                damping=0.1,
                solver=sf.series(num_terms=13, acceleration=sf.sablonniere(order=5), scale=sf.lower_bound()),
            ),
            False,
        ),
    }
    runs = {}
    for name, (optimiser, other_batch) in optimisers.items():
        tx = optax.with_extra_args_support(optimiser)
        extra = {"curvature_fn": lambda params: loss(params, large)} if other_batch else {}

        def step(
            carry: tuple, batch: tuple, tx: optax.GradientTransformationExtraArgs = tx, extra: dict = extra
        ) -> tuple:
            params, state = carry
            value_fn = lambda params: loss(params, batch)  # noqa: E731
            updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn, **extra)
            return (optax.apply_updates(params, updates), state), None

        runs[name] = jax.jit(lambda carry, step=step: jax.lax.scan(step, carry, (x, y))[0]), (params, tx.init(params))
    rows = []
    for name, run in runs.items():
        # Adam beside each, so that a change of the machine's load meets both.
        pairs = [(seconds(*runs["adam"], repeats=1), seconds(*run, repeats=1)) for _ in range(ROUNDS)]
        milliseconds, over_adam = 1e3 * median(b for _, b in pairs) / STEPS, median(b / a for a, b in pairs)
        rows.append({"optimiser": name, "milliseconds": milliseconds, "over_adam": over_adam})
        print(f"{name:<54}{milliseconds:8.2f} ms{over_adam:8.2f} × Adam", flush=True)
    write("step_cost" if len(os.sched_getaffinity(0)) > 1 else "step_cost_one_core", rows)


if __name__ == "__main__":
    main()
