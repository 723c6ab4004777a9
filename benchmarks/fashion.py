"""Fashion-MNIST, MLP 784-50-10, five epochs of batches of 200: low rank, Adam and K-FAC, each tuned by as many trials.

Twenty random configurations each, one seed, by the validation loss (the last 10,000 training images) after five epochs;
then the best one over three seeds. Learning rates decay to zero for all, linearly. Seconds are those of training alone:
compiling and evaluating are not counted. Needs kfac-jax (of the extra `lab`) and the four official files in
SADDLEFREE_DATA/fashion-mnist or where Debian's dataset-fashion-mnist puts them. Takes ten minutes.
"""

import argparse
import gzip
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import saddlefree as sf
from benchmarks.mlp import logits, loss, network
from benchmarks.record import log_uniform, write

EPOCHS, BATCH = 5, 200
PLACES = (pathlib.Path(os.environ.get("SADDLEFREE_DATA", "data")), pathlib.Path("/usr/share/datasets"))


def images(name: str) -> np.ndarray:
    """An idx file, unpacked."""
    for place in PLACES:
        path = place / "fashion-mnist" / f"{name}-ubyte.gz"
        if path.exists():
            raw = gzip.decompress(path.read_bytes())
            dimensions = raw[3]
            shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    raise SystemExit(f"{name}-ubyte.gz not found: put it into SADDLEFREE_DATA/fashion-mnist, or install the package")


def data() -> dict[str, tuple[jax.Array, jax.Array]]:
    """50,000 images for training, 10,000 for validation, 10,000 for test, standardised by the first."""
    x, y = images("train-images-idx3").reshape(-1, 784) / 255, images("train-labels-idx1")
    z, t = images("t10k-images-idx3").reshape(-1, 784) / 255, images("t10k-labels-idx1")
    mean, std = x[:50000].mean(), x[:50000].std()
    parts = {"train": (x[:50000], y[:50000]), "val": (x[50000:], y[50000:]), "test": (z, t)}
    return {
        name: (jnp.asarray((a - mean) / std, jnp.float32), jnp.asarray(b, jnp.int32)) for name, (a, b) in parts.items()
    }


def draw(name: str, rng: np.random.Generator) -> dict[str, float]:
    """One configuration."""
    if name == "adam":
        return {"rate": log_uniform(rng, 1e-3, 1e-2), "beta2": float(rng.choice([0.95, 0.99, 0.999]))}
    if name == "low-rank":
        return {
            "rate": log_uniform(rng, 1e-3, 1e-2),
            "damping": log_uniform(rng, 1e-3, 1.0),
            "beta2": float(rng.choice([0.95, 0.99, 0.999])),
        }
    return {"rate": log_uniform(rng, 1e-3, 1.0), "damping": log_uniform(rng, 1e-3, 1.0)}


Epoch = Callable[[Any, jax.Array, jax.Array, dict[str, float]], Any]
"""(what is trained, batches of indices, number of the first step, configuration) to what is trained."""


def optax_epoch(name: str, train: tuple[jax.Array, jax.Array], steps: int) -> tuple[Callable, Epoch]:
    """Start and epoch of an Optax optimiser, compiled once for all configurations with the same β₂."""

    def optimiser(config: dict[str, Any], beta2: float) -> optax.GradientTransformationExtraArgs:
        rate = lambda count: config["rate"] * (1 - count / steps)  # noqa: E731
        if name == "adam":
            return optax.with_extra_args_support(optax.adam(rate, b2=beta2))
        solver = sf.low_rank(rank=20, refresh_every=100, base=optax.flatten(optax.adam(rate, b2=beta2)))
        return sf.saddle_free_newton(0.3, damping=config["damping"], solver=solver)

    def run(carry: tuple, indices: jax.Array, numbers: dict[str, Any], beta2: float) -> tuple:
        tx = optimiser(numbers, beta2)

        def step(carry: tuple, chosen: jax.Array) -> tuple:
            params, state = carry
            batch = train[0][chosen], train[1][chosen]
            value_fn = lambda params: loss(params, batch)  # noqa: E731
            updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, carry, indices)[0]

    compiled = jax.jit(run, static_argnums=3)

    def start(params: Any, config: dict[str, float]) -> Any:
        return params, optimiser(config, config["beta2"]).init(params)

    def epoch(carry: Any, indices: jax.Array, first: jax.Array, config: dict[str, float]) -> Any:
        numbers = {k: jnp.float32(v) for k, v in config.items() if k != "beta2"}
        return compiled(carry, indices, numbers, config["beta2"])

    return start, epoch


def kfac_epoch(train: tuple[jax.Array, jax.Array], steps: int) -> tuple[Callable, Epoch]:
    """Start and epoch of K-FAC: momentum .9, curvature average .95, inverses every 5 steps (its defaults)."""
    import kfac_jax
    from kfac_jax._src import tag_graph_matcher

    def evaluated(eqn: Any, values: list) -> list:
        """kfac-jax 0.0.8 expects two results of `get_bind_params`, of which JAX 0.10 returns the second alone."""
        outputs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return outputs if isinstance(outputs, list) else [outputs]

    tag_graph_matcher.eval_jaxpr_eqn = evaluated

    def tagged(params: list, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        outputs = logits(params, batch[0])
        kfac_jax.register_softmax_cross_entropy_loss(outputs, batch[1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, batch[1]))

    optimiser = kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(tagged), l2_reg=0.0, num_burnin_steps=0, multi_device=False
    )
    key = jax.random.PRNGKey(0)

    def start(params: Any, config: dict[str, float]) -> Any:
        batch = train[0][:BATCH], train[1][:BATCH]
        return params, optimiser.init(params, key, batch)

    def epoch(carry: Any, indices: jax.Array, first: jax.Array, config: dict[str, float]) -> Any:
        params, state = carry
        for number, chosen in enumerate(indices):
            rate = config["rate"] * (1 - (int(first) + number) / steps)
            params, state, _ = optimiser.step(
                params,
                state,
                key,
                batch=(train[0][chosen], train[1][chosen]),
                learning_rate=jnp.float32(rate),
                momentum=jnp.float32(0.9),
                damping=jnp.float32(config["damping"]),
            )
        return params, state

    return start, epoch


def run(
    start: Callable, epoch: Epoch, config: dict[str, float], seed: int, parts: dict, evaluate: Callable
) -> list[dict[str, float]]:
    """Losses and training seconds after each epoch."""
    per_epoch = parts["train"][0].shape[0] // BATCH
    history, seconds = [], 0.0
    carry = start(network(jax.random.key(seed)), config)
    for number in range(EPOCHS):
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(seed), number), parts["train"][0].shape[0])
        indices = order[: per_epoch * BATCH].reshape(per_epoch, BATCH)
        begin = time.perf_counter()
        carry = jax.block_until_ready(epoch(carry, indices, number * per_epoch, config))
        seconds += time.perf_counter() - begin
        losses = {name: float(evaluate(carry[0], batch)) for name, batch in parts.items()}
        history.append({"epoch": number + 1, "seconds": seconds, **losses})
    return history


def main() -> None:
    """Prints a line for each optimiser and epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    parts, evaluate, rows = data(), jax.jit(loss), []
    steps = EPOCHS * (parts["train"][0].shape[0] // BATCH)
    for name in ("adam", "low-rank", "kfac"):
        start, epoch = kfac_epoch(parts["train"], steps) if name == "kfac" else optax_epoch(name, parts["train"], steps)
        rng, trials = np.random.default_rng(0), []
        for _ in range(options.trials):
            config = draw(name, rng)
            last = run(start, epoch, config, 100, parts, evaluate)[-1]["val"]
            trials.append({**config, "val": last if np.isfinite(last) else None})
        best = min((t for t in trials if t["val"] is not None), key=lambda t: t["val"])
        config = {k: v for k, v in best.items() if k != "val"}
        run(start, epoch, config, 0, parts, evaluate)  # compiled by now, whatever the last trial was
        histories = [run(start, epoch, config, seed, parts, evaluate) for seed in range(options.seeds)]
        rows.append({"optimiser": name, "best": best, "trials": trials, "histories": histories})
        for e in range(EPOCHS):
            middle = {k: float(np.median([h[e][k] for h in histories])) for k in histories[0][e]}
            print(name, {k: round(v, 4) for k, v in middle.items()}, flush=True)
        print(name, "best:", best, flush=True)
    write("fashion", rows)


if __name__ == "__main__":
    main()
