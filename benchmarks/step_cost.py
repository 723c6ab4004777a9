"""What a step costs beside Adam's, on random data, in one process and one run.

    python -m benchmarks.step_cost            the MLP 784-50-10 at batch 200
    python -m benchmarks.step_cost refreshes  the MLP, a transformer, and a ResNet-18 of a quarter of its width

In the first `low_rank` has its refreshes included, on the step's own batch and on `curvature_fn` with 400 examples; on
one core (`taskset -c 0`) the figures go to a file of their own. In the second refreshes are apart, and beside them as
many products in a loop.
"""

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax

import saddlefree as sf
from benchmarks.record import network, seconds, shortest, step_of, write
from saddlefree import space
from saddlefree.lab import models
from saddlefree.lab.plan import cores
from saddlefree.lab.program import clock

STEPS, ROUNDS = 200, 15


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


def refreshes() -> None:
    """Prints and records a step over Adam's between refreshes, and a refresh over its products, of three networks."""
    images = jax.random.normal(jax.random.key(1), (200, 784)), jnp.arange(200) % 10
    text = jax.random.randint(jax.random.key(1), (32, 64), 0, 128), jnp.zeros((32, 64), jnp.int32)
    coloured = jax.random.normal(jax.random.key(1), (100, 32, 32, 3)), jnp.arange(100) % 10
    found = {
        "mlp": of_network(models.mlp(784, 50, 10), images, rank=20, steps=50),
        "transformer": of_network(models.transformer(128, 64, 128, 5), text, rank=5),
        "resnet": of_network(models.resnet18(10, 16), coloured, rank=5),
    }
    write("refreshes", found)


def of_network(model: models.Model, batch: tuple[jax.Array, jax.Array], rank: int, steps: int = 1) -> dict[str, float]:
    """Least seconds of each, in interleaved rounds of so many steps, and ratios."""
    params, loss = network(model, jax.random.key(0))
    value_fn = lambda params: loss(params, batch)  # noqa: E731
    base = optax.flatten(optax.adam(1e-3))
    ours = sf.saddle_free_newton(0.3, solver=sf.low_rank(rank=rank, base=base))

    def products(params: Any, v: Any) -> Any:
        product = sf.hessian(value_fn, params)
        return jax.lax.scan(lambda v, _: (space.normalise(product(v)), None), v, None, length=rank)[0]

    def stepping(tx: Any, **extra: Any) -> Callable[[], Any]:
        compiled = jax.jit(step_of(tx, value_fn, **extra), donate_argnums=(0, 1))
        carry = jax.tree.map(jnp.array, (params, tx.init(params)))

        def turn() -> Any:
            nonlocal carry
            carry = compiled(*carry)
            return carry

        return turn

    multiply, ones = jax.jit(products), jax.tree.map(jnp.ones_like, params)
    runs = {
        "adam": stepping(base),
        "low_rank": stepping(ours, refresh=False),
        "low_rank with a refresh": stepping(ours, refresh=True),
        "its products": lambda: multiply(params, ones),
    }
    times = shortest({name: timed(turn, steps) for name, turn in runs.items()}, ROUNDS)
    refresh = times["low_rank with a refresh"] - times["low_rank"]
    ratios = {
        "over_adam": times["low_rank"] / times["adam"],
        "refresh_over_products": refresh / times["its products"],
        "product_over_adam": times["its products"] / rank / times["adam"],
    }
    print(f"{optax.tree.size(params)} parameters, rank {rank}:", times, ratios, flush=True)
    return {"parameters": optax.tree.size(params), "rank": rank, **times, **ratios}


def timed(turn: Callable[[], Any], steps: int) -> Callable[[], float]:
    """The mean seconds of so many calls, as a function; the first call compiles."""
    jax.block_until_ready(turn())

    def measure() -> float:
        begin = clock()
        for _ in range(steps):
            jax.block_until_ready(turn())
        return (clock() - begin) / steps

    return measure


if __name__ == "__main__":
    refreshes() if sys.argv[1:] == ["refreshes"] else mlp()
