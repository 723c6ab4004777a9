"""What a step costs beside Adam's, on random data, in one process and one run.

    python -m benchmarks.step_cost            the MLP 784-50-10 at batch 200
    python -m benchmarks.step_cost resnet     a ResNet-18 at batch 64, about five minutes

On the MLP `low_rank` has its refreshes included, on the step's own batch and on `curvature_fn` with 400 examples; on
one core (`taskset -c 0`) the figures go to a file of their own. On the ResNet, with batch norm by the batch's own
statistics, refreshes are apart: a product is timed, and `low_rank` of rank 10 without any.
"""

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax

import saddlefree as sf
from benchmarks.record import network, seconds, step_of, write
from saddlefree.lab import models
from saddlefree.lab.plan import cores

STEPS, ROUNDS = 200, 9
IMAGES, RANK = 64, 10


def mlp() -> None:
    """Prints and records time per step over Adam's."""
    keys = jax.random.split(jax.random.key(0), 3)
    params, loss = network(models.mlp(784, 50, 10), keys[0])
    x, y = jax.random.normal(keys[1], (STEPS, 200, 784)), jax.random.randint(keys[2], (STEPS, 200), 0, 10)
    large = x[:2].reshape(400, 784), y[:2].reshape(400)
    rank20 = sf.low_rank(rank=20, refresh_every=100)
    over_adam = sf.saddle_free_newton(
        0.3, solver=sf.low_rank(rank=20, refresh_every=100, base=optax.flatten(optax.adam(1e-3)))
    )
    paper = sf.series(num_terms=13, acceleration=sf.sablonniere(order=5), scale=sf.lower_bound())
    optimisers: dict[str, Any] = {
        "adam": optax.adam(1e-3),
        "sgd with momentum": optax.sgd(1e-2, momentum=0.9),
        "low_rank(20, 100)": sf.saddle_free_newton(1e-2, damping=1.0, solver=rank20),
        "low_rank(20, 100) over Adam": over_adam,
        "low_rank(20, 100) over Adam, 400 examples a refresh": over_adam,
        "blockwise(lanczos(5))": sf.saddle_free_newton(1e-2, damping=1.0, solver=sf.blockwise(sf.lanczos(5))),
        "lanczos(10)": sf.saddle_free_newton(1e-2, damping=1.0, solver=sf.lanczos(10)),
        "series(num_terms=13, sablonniere(5)), the paper's V": sf.saddle_free_newton(1e-2, damping=0.1, solver=paper),
    }
    runs = {}
    for name, tx in optimisers.items():
        step = step_of(tx, loss, **({"curvature_fn": lambda params: loss(params, large)} if "400" in name else {}))
        loop = lambda carry, step=step: jax.lax.scan(lambda c, b: (step(*c, b), None), carry, (x, y))[0]  # type: ignore[misc] # noqa: E731
        runs[name] = jax.jit(loop), (params, tx.init(params))
    rows = []
    for name, run in runs.items():
        # Adam beside each, so that a change of the machine's load meets both.
        pairs = [(seconds(*runs["adam"], repeats=1), seconds(*run, repeats=1)) for _ in range(ROUNDS)]
        milliseconds, ratio = 1e3 * median(b for _, b in pairs) / STEPS, median(b / a for a, b in pairs)
        rows.append({"optimiser": name, "milliseconds": milliseconds, "over_adam": ratio})
        print(f"{name:<54}{milliseconds:8.2f} ms{ratio:8.2f} × Adam", flush=True)
    write("step_cost" if cores() > 1 else "step_cost_one_core", rows)


def stepping(tx: Any, params: Any, value_fn: Any) -> Callable[[], Any]:
    """A function that makes a step in place, without a refresh."""
    compiled = jax.jit(lambda p, s, refresh: step_of(tx, value_fn, refresh=refresh)(p, s), donate_argnums=(0, 1))
    carry = jax.tree.map(jnp.array, (params, tx.init(params)))

    def turn() -> Any:
        nonlocal carry
        carry = compiled(*carry, jnp.array(False))
        return carry

    return turn


def resnet() -> None:
    """Prints and records time per step over Adam's, and that of a product."""
    params, loss = network(models.resnet18(), jax.random.key(0))
    batch = jax.random.normal(jax.random.key(1), (IMAGES, 32, 32, 3)), jnp.arange(IMAGES) % 10
    value_fn = lambda params: loss(params, batch)  # noqa: E731
    solver = sf.low_rank(rank=RANK, base=optax.adam(1e-3))
    optimisers = {"adam": optax.adam(1e-3), f"low_rank({RANK})": sf.saddle_free_newton(0.3, solver=solver)}
    times = {}
    for name, tx in optimisers.items():
        times[name] = seconds(stepping(tx, params, value_fn), repeats=7)
        print(name, f"{times[name]:.3f} s, {times[name] / times['adam']:.2f} × Adam", flush=True)
    product = jax.jit(lambda p, v: sf.hessian(value_fn, p)(v))
    times["a product outside loops"] = seconds(product, params, jax.tree.map(jnp.ones_like, params), repeats=3)
    print(f"a product {times['a product outside loops']:.3f} s; a refresh takes {RANK}")
    rows = [{"what": name, "seconds": time, "over_adam": time / times["adam"]} for name, time in times.items()]
    write("resnet_cost", {"parameters": optax.tree.size(params), "rank": RANK, "rows": rows})


if __name__ == "__main__":
    resnet() if sys.argv[1:] == ["resnet"] else mlp()
