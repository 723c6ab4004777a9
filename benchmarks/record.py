"""What benchmarks of the library share: losses of the laboratory's models, a step, a clock that waits, and records.

Optimisers are compared by the laboratory alone: `saddlefree/lab/reproduce.py` is the list.
"""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from saddlefree.lab import models, plan, records
from saddlefree.lab.task import Term

RESULTS = pathlib.Path(__file__).parent.parent / "results"


def network(model: models.Model, key: jax.Array) -> tuple[Any, Callable[[Any, tuple[Any, Any]], jax.Array]]:
    """Parameters of a model, and its loss as a function of them and of (inputs, targets)."""
    params, state = model.init(key)

    def loss(params: Any, batch: tuple[Any, Any]) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return Term(model.apply(params, state, batch[0], True)[0], batch[1]).mean()

    return params, loss


def step_of(optimiser: optax.GradientTransformation, value_fn: Callable[..., jax.Array], **extra: Any) -> Callable:
    """(parameters, state, …) to the next parameters and state, where `value_fn` takes parameters and the rest.

    Args:
      optimiser: of Optax or of this library.
      value_fn: the loss.
      extra: further arguments of `update`.
    """
    tx = optax.with_extra_args_support(optimiser)

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
        of_batch = lambda params: value_fn(params, *batch)  # noqa: E731
        value, grads = jax.value_and_grad(of_batch)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=of_batch, **extra)
        return optax.apply_updates(params, updates), state

    return step


def seconds(fn: Callable[..., Any], *args: Any, repeats: int = 10) -> float:
    """The median wall time of a compiled function, after one call that compiles it."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def shortest(runs: dict[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """The least that each returns, in interleaved rounds."""
    found = [{name: run() for name, run in runs.items()} for _ in range(rounds)]
    return {name: min(times[name] for times in found) for name in runs}


def write(name: str, summary: Any) -> None:
    """Writes results/benchmarks/NAME.json, with the versions and the machine that the figures were measured with."""
    records.write(RESULTS, f"benchmarks/{name}", {**plan.environment(), "summary": summary})
    print(f"written: results/benchmarks/{name}.json")
