"""From Adam to `low_rank(base=optax.adam(rate))` at Adam's own rate: six problems, two dtypes, five seeds, equal steps.

For each problem the training loss (full data) at the end beside Adam's, with the standard error of their difference
over seeds, and the largest entry of an update over the largest of Adam's own update for the same gradients. Digits come
with scikit-learn; kin8nm, where SADDLEFREE_DATA has it, takes the place of a random regression.
"""

import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import saddlefree as sf
from benchmarks.record import write

SEEDS = 5


class Problem(NamedTuple):
    """A network, its data and how long it trains."""

    sizes: tuple[int, ...]
    data: tuple[np.ndarray, np.ndarray]
    loss: Callable[[Any, Any], jax.Array]  # from outputs and targets
    rate: float
    steps: int
    batch: int | None  # None: the full batch
    activation: Callable[[jax.Array], jax.Array] = jnp.tanh


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """½ mean squared error."""
    return 0.5 * jnp.mean((outputs - targets) ** 2)


def cross_entropy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean negative log-likelihood."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[:, None], axis=1))


def problems() -> Iterator[tuple[str, Problem]]:
    """The six."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels / 16 - 0.3
    yield "digits, batches of 100", Problem((64, 32, 10), (pixels, labels), cross_entropy, 1e-3, 600, 100)
    yield "digits, rate 1e-2", Problem((64, 32, 10), (pixels, labels), cross_entropy, 1e-2, 300, 100, jax.nn.relu)
    rare = np.flatnonzero(np.random.default_rng(0).uniform(size=len(labels)) < 0.7**labels)
    yield "imbalanced digits", Problem((64, 10), (pixels[rare], labels[rare]), cross_entropy, 3e-3, 400, 50)
    yield "auto-encoder of digits", Problem((64, 32, 8, 32, 64), (pixels, pixels), squared_error, 1e-3, 600, 200)
    folder = pathlib.Path(os.environ.get("SADDLEFREE_DATA", "")) / "kin8nm" / "data.txt"
    if folder.is_file():
        table = np.loadtxt(folder)[:4096]
        table = (table - table.mean(0)) / table.std(0)
        x, y = table[:, :8], table[:, 8:]
    else:
        x = np.random.default_rng(1).normal(size=(4096, 8))
        y = np.sin(x[:, :1] * x[:, 1:2]) + x[:, 2:3]
    yield "kin8nm, full batch", Problem((8, 50, 1), (x, y), squared_error, 3e-3, 600, None)
    x = np.random.default_rng(2).normal(size=(256, 64))
    wide = x, np.argmax(x[:, :8] + 0.5 * x[:, 8:16], axis=1)
    yield "wide network, full batch", Problem((64, 512, 512, 8), wide, cross_entropy, 1e-3, 40, None)


def network(key: jax.Array, sizes: tuple[int, ...], dtype: Any) -> list[dict[str, jax.Array]]:
    """Normal weights of standard deviation 1/√fan-in, zero biases."""
    keys = jax.random.split(key, len(sizes))
    return [
        {"w": (jax.random.normal(k, (n, m)) / n**0.5).astype(dtype), "b": jnp.zeros(m, dtype)}
        for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]


def train(problem: Problem, tx: Any, dtype: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss at the end, and the largest entry of an update over that of Adam's own, at its largest."""
    x, y = (jnp.asarray(a, jnp.int32 if np.issubdtype(a.dtype, np.integer) else dtype) for a in problem.data)

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch[0]
        for layer in params[:-1]:
            h = problem.activation(h @ layer["w"] + layer["b"])
        outputs = h @ params[-1]["w"] + params[-1]["b"]
        with jax.numpy_dtype_promotion("standard"):
            return problem.loss(outputs.astype(jnp.float32), batch[1])

    start, order = jax.random.split(key)
    params, reference = network(start, problem.sizes, dtype), optax.adam(problem.rate)
    # Adam's own moments in float32, as the base has them.
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, state, own = carry
        batch = (x, y)
        if problem.batch is not None:
            rows = jax.random.randint(key, (problem.batch,), 0, len(x))
            batch = x[rows], y[rows]
        value_fn = lambda params: loss(params, batch)  # noqa: E731
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
        theirs, own = reference.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), own)
        largest = lambda u: jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(u)]))  # noqa: E731
        ratio = largest(updates).astype(jnp.float32) / largest(theirs)
        return (optax.apply_updates(params, updates), state, own), ratio

    carry = params, tx.init(params), reference.init(wide)
    (params, _, _), ratios = jax.lax.scan(step, carry, jax.random.split(order, problem.steps))
    return loss(params, (x, y)), jnp.max(ratios)


def main() -> None:
    """Prints both, for each problem and dtype."""
    rate, damping = (float(a) for a in (sys.argv[1:] or ("0.3", "0.01"))[:2])
    rows = []
    for name, problem in problems():
        for dtype in (jnp.float32, jnp.bfloat16):
            contestants = {
                "adam": optax.with_extra_args_support(optax.adam(problem.rate)),
                "low_rank": sf.saddle_free_newton(
                    rate, damping=damping, solver=sf.low_rank(base=optax.adam(problem.rate))
                ),
            }
            keys = jax.random.split(jax.random.key(0), SEEDS)
            ends = {}
            for who, tx in contestants.items():
                run = jax.jit(jax.vmap(functools.partial(train, problem, tx, dtype)))
                ends[who] = [np.asarray(a, np.float64) for a in run(keys)]
            ours, theirs = ends["low_rank"][0], ends["adam"][0]
            difference = ours - theirs
            error = float(np.std(difference, ddof=1) / SEEDS**0.5)
            row = {
                "problem": name,
                "dtype": jnp.dtype(dtype).name,
                "adam": float(np.mean(theirs)),
                "low_rank": float(np.mean(ours)),
                "difference": float(np.mean(difference)),
                "standard_error": error,
                "largest_entry_over_adam": float(np.max(ends["low_rank"][1])),
            }
            rows.append(row)
            verdict = "not above" if row["difference"] <= 2 * error else "ABOVE"
            print(
                f"{name:<26}{row['dtype']:<10}Adam {row['adam']:9.4g}  low_rank {row['low_rank']:9.4g}  "
                f"{verdict:<10} ± {error:8.2g}  largest entry {row['largest_entry_over_adam']:5.2f} × Adam's",
                flush=True,
            )
    write("over_adam", {"learning_rate": rate, "damping": damping, "rows": rows})


if __name__ == "__main__":
    main()
