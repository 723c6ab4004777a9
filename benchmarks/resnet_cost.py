"""What a step costs beside Adam's on a ResNet-18 at batch 64: `low_rank` of rank 10, its refreshes apart.

Random images of 32 × 32, batch norm with the batch's own statistics. Takes about five minutes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import saddlefree as sf
from benchmarks.record import seconds, write

BATCH, RANK = 64, 10
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution that keeps the size up to its stride."""
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def norm(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """Batch norm with the batch's own statistics."""
    mean, variance = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["offset"]


def init(key: jax.Array) -> dict[str, Any]:
    """7×7 stem of stride 2, four stages of two blocks, ten classes: 11,181,642 parameters."""
    keys = iter(jax.random.split(key, 64))
    he = jax.nn.initializers.he_normal()
    bn = lambda n: {"scale": jnp.ones(n), "offset": jnp.zeros(n)}  # noqa: E731
    blocks, width = [], 64
    for channels, stride in STAGES:
        for number in range(2):
            block = {
                "first": he(next(keys), (3, 3, width, channels)),
                "norm1": bn(channels),
                "second": he(next(keys), (3, 3, channels, channels)),
                "norm2": bn(channels),
            }
            if number == 0 and (stride > 1 or width != channels):
                block |= {"shortcut": he(next(keys), (1, 1, width, channels)), "norm3": bn(channels)}
            blocks.append(block)
            width = channels
    stem = {"w": he(next(keys), (7, 7, 3, 64)), "norm": bn(64)}
    return {"stem": stem, "blocks": blocks, "w": jnp.zeros((512, 10)), "b": jnp.zeros(10)}


def loss(params: dict[str, Any], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Cross-entropy."""
    x, y = batch
    x = jax.nn.relu(norm(conv(x, params["stem"]["w"], 2), params["stem"]["norm"]))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    strides = [s for _, stride in STAGES for s in (stride, 1)]
    for p, stride in zip(params["blocks"], strides, strict=True):
        h = jax.nn.relu(norm(conv(x, p["first"], stride), p["norm1"]))
        h = norm(conv(h, p["second"]), p["norm2"])
        x = jax.nn.relu(h + (norm(conv(x, p["shortcut"], stride), p["norm3"]) if "shortcut" in p else x))
    logits = jnp.mean(x, (1, 2)) @ params["w"] + params["b"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def main() -> None:
    """Prints time per step over Adam's."""
    params = init(jax.random.key(0))
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
