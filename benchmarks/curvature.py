"""What a product costs in gradients, and what microbatches cost and save."""

import jax
import jax.numpy as jnp

import saddlefree as sf
from benchmarks.record import seconds, write


def predict(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """A tanh network without biases."""
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return x @ params[-1]


def loss(params: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """½ mean squared error."""
    x, y = batch
    return 0.5 * jnp.mean((predict(params, x) - y) ** 2)


def main() -> None:
    """Prints the ratios of one run."""
    sizes = (64, 256, 256, 256, 256, 1)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [jax.random.normal(k, (n, m)) / n**0.5 for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=False)]
    batch = jax.random.normal(keys[-1], (8192, 64)), jnp.ones((8192, 1))
    x, y = batch
    outputs = lambda p: 0.5 * jnp.mean((p - y) ** 2)  # noqa: E731

    functions = {
        "gradient": lambda p, v: jax.grad(loss)(p, batch),
        "hessian": lambda p, v: sf.hessian(lambda p: loss(p, batch), p)(v),
        "hessian, microbatches of 512": lambda p, v: sf.hessian(sf.microbatch_mean(loss, batch, 512), p)(v),
        "gauss_newton": lambda p, v: sf.gauss_newton(lambda p: predict(p, x), outputs, p)(v),
        "gauss_newton, microbatches of 512": lambda p, v: sf.gauss_newton(
            sf.microbatch_map(predict, x, 512), outputs, p
        )(v),
    }
    rows = []
    for name, fn in functions.items():
        executable = jax.jit(fn).lower(params, params).compile()
        memory = executable.memory_analysis().temp_size_in_bytes
        rows.append({"product": name, "seconds": seconds(executable, params, params), "bytes": memory})
    for row in rows:
        row["time_in_gradients"] = row["seconds"] / rows[0]["seconds"]
        print(f"{row['product']:<36} {row['time_in_gradients']:5.2f} gradients  {row['bytes'] / 1e6:8.1f} MB")
    write("curvature", rows)


if __name__ == "__main__":
    main()
