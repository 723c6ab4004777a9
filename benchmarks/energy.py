"""UCI Energy, the paper's network and split, ten seeds: `low_rank` beside Adam as the paper tuned it.

In batches `low_rank` has the paper's rate, averages and ε of Adam's and the damping 1, so that outside the basis its
step is Adam's. The size and number of its batches there, and its hyperparameters with the full batch, were chosen by
validation loss on other seeds. Seconds are those of one seed, in one program, without compiling. Needs SADDLEFREE_DATA,
and takes two minutes.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import saddlefree as sf
from benchmarks.record import write
from benchmarks.uci_energy import loss, network, split
from saddlefree.lab.paper import TUNED

SEEDS, BATCH, STEPS = 10, 50, 8000
_ADAM = TUNED["uci-energy", "adam"]
RATE, EPSILON = _ADAM["learning_rate"], _ADAM["epsilon"]
AVERAGING, SECOND_MOMENT = (round(1 - _ADAM[f"one_minus_beta{i}"], 12) for i in (1, 2))


def adam(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """With the paper's hyperparameters."""
    return optax.adam(rate, b1=AVERAGING, b2=SECOND_MOMENT, eps=EPSILON)


def low_rank(rate: float, steps: int, refresh_every: int, **adam: float) -> optax.GradientTransformationExtraArgs:
    """Rank 20 over Adam with a cosine decay."""
    base = optax.adam(optax.cosine_decay_schedule(rate, steps), **adam)
    return sf.saddle_free_newton(0.1, damping=0.1, solver=sf.low_rank(20, refresh_every, base=optax.flatten(base)))


OPTIMISERS = {
    "adam, as tuned in the paper": (adam(RATE), 6000, None),
    "adam, cosine decay, batches": (adam(optax.cosine_decay_schedule(RATE, STEPS)), STEPS, BATCH),
    "low_rank": (low_rank(0.02, 3400, 20, b2=0.99), 3400, None),
    "low_rank, batches": (low_rank(RATE, STEPS, 100, b1=AVERAGING, b2=SECOND_MOMENT, eps=EPSILON), STEPS, BATCH),
}


def orders(key: jax.Array, examples: int, batch: int, steps: int) -> jax.Array:
    """The examples of each step: every epoch is a permutation, whose rest is left out."""
    per_epoch = examples // batch
    permute = jax.vmap(lambda key: jax.random.permutation(key, examples)[: per_epoch * batch])
    return permute(jax.random.split(key, -(-steps // per_epoch))).reshape(-1, batch)[:steps]


def trainer(
    optimiser: optax.GradientTransformation, data: tuple[jax.Array, jax.Array], steps: int, batch: int | None
) -> Callable[[jax.Array], list]:
    """From a key to trained parameters, compiled; the full batch in each step where `batch` is None."""
    tx = optax.with_extra_args_support(optimiser)

    def step(carry: tuple, chosen: jax.Array | None) -> tuple:
        params, state = carry
        part = data if chosen is None else (data[0][chosen], data[1][chosen])
        value_fn = lambda params: loss(params, part)  # noqa: E731
        updates, state = tx.update(jax.grad(value_fn)(params), state, params, value_fn=value_fn)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(key: jax.Array) -> list:
        params = network(key)
        chosen = None if batch is None else orders(key, len(data[0]), batch, steps)
        return jax.lax.scan(step, (params, tx.init(params)), chosen, length=steps)[0][0]

    return run


def main() -> None:
    """Prints a line for each optimiser."""
    parts = {name: (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)) for name, (x, y) in split().items()}
    rows = []
    for name, (optimiser, steps, batch) in OPTIMISERS.items():
        run = trainer(optimiser, parts["train"], steps, batch)
        jax.block_until_ready(run(jax.random.key(0)))
        losses, seconds = [], []
        for seed in range(SEEDS):
            begin = time.perf_counter()
            params = jax.block_until_ready(run(jax.random.key(1000 + seed)))
            seconds.append(time.perf_counter() - begin)
            losses.append([float(loss(params, parts[part])) for part in ("train", "val", "test")])
        train, val, test = np.array(losses).T
        row = {"optimiser": name, "steps": steps, "seconds": float(np.median(seconds))}
        row |= {"diverged": int(np.sum(~(train < 0.1)))}
        row |= {part: float(np.median(values)) for part, values in zip(parts, (train, val, test), strict=True)}
        rows.append({**row, "worst_train": float(np.max(train)), "losses": losses})
        print({k: v for k, v in rows[-1].items() if k != "losses"}, flush=True)
    for row in rows:
        row["over_adam"] = row["seconds"] / rows[0]["seconds"]
    write("energy", rows)


if __name__ == "__main__":
    main()
