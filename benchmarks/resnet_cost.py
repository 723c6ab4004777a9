"""What a step costs beside Adam's on a ResNet-18 at batch 64: `low_rank` of rank 10, its refreshes apart.

Random images of 32 × 32, batch norm with the batch's own statistics. Takes about five minutes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import saddlefree as sf
from benchmarks.record import network, seconds, write
from saddlefree.lab import models

BATCH, RANK = 64, 10


def main() -> None:
    """Prints time per step over Adam's."""
    params, loss = network(models.resnet18(), jax.random.key(0))
    batch = jax.random.normal(jax.random.key(1), (BATCH, 32, 32, 3)), jnp.arange(BATCH) % 10
    solver = sf.low_rank(rank=RANK, base=optax.adam(1e-3))
    optimisers = {"adam": optax.adam(1e-3), "low_rank(10)": sf.saddle_free_newton(0.3, solver=solver)}
    times = {}
    for name, optimiser in optimisers.items():
        tx = optax.with_extra_args_support(optimiser)
        value_fn = lambda params: loss(params, batch)  # noqa: E731

        def step(params: Any, state: Any, refresh: jax.Array, tx: Any = tx, value_fn: Any = value_fn) -> tuple:
            grads = jax.grad(value_fn)(params)
            updates, state = tx.update(grads, state, params, value_fn=value_fn, refresh=refresh)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step, donate_argnums=(0, 1))
        carry = jax.tree.map(jnp.array, (params, tx.init(params)))

        def turn(compiled: Any = compiled, holder: list = [carry]) -> Any:  # noqa: B006
            holder[0] = compiled(*holder[0], jnp.array(False))
            return holder[0]

        times[name] = seconds(turn, repeats=7)
        print(name, f"{times[name]:.3f} s, {times[name] / times['adam']:.2f} × Adam", flush=True)
    vector = jax.tree.map(jnp.ones_like, params)
    product = jax.jit(lambda p, v: sf.hessian(lambda p: loss(p, batch), p)(v))
    times["a product outside loops"] = seconds(product, params, vector, repeats=3)
    print(f"a product {times['a product outside loops']:.3f} s; a refresh takes {RANK}")
    rows = [{"what": name, "seconds": time, "over_adam": time / times["adam"]} for name, time in times.items()]
    write("resnet_cost", {"parameters": sum(x.size for x in jax.tree.leaves(params)), "rank": RANK, "rows": rows})


if __name__ == "__main__":
    main()
