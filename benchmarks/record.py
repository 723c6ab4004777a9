"""What benchmarks of the library share: losses of the laboratory's models, a clock that waits, and their records.

Optimisers are compared by the laboratory alone: `saddlefree/lab/reproduce.py` is the list.
"""

import importlib.metadata
import os
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import jax

from saddlefree.lab import models, records
from saddlefree.lab.task import Term

RESULTS = pathlib.Path(__file__).parent.parent / "results"


def network(model: models.Model, key: jax.Array) -> tuple[Any, Callable[[Any, tuple[Any, Any]], jax.Array]]:
    """Parameters of a model, and its loss as a function of them and of (inputs, targets)."""
    params, state = model.init(key)

    def loss(params: Any, batch: tuple[Any, Any]) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return Term(model.apply(params, state, batch[0], True)[0], batch[1]).mean()

    return params, loss


def seconds(fn: Callable[..., Any], *args: Any, repeats: int = 10) -> float:
    """The median wall time of a compiled function, after one call that compiles it."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def write(name: str, summary: Any) -> None:
    """Writes results/benchmarks/NAME.json, with the versions and the machine that the figures were measured with."""
    versions = {package: importlib.metadata.version(package) for package in ("saddlefree", "jax", "optax")}
    machine = {"platform": jax.default_backend(), "system": platform.system(), "cores": len(os.sched_getaffinity(0))}
    record = {"versions": {"python": platform.python_version()} | versions, "machine": machine, "summary": summary}
    records.write(RESULTS, f"benchmarks/{name}", record)
    print(f"written: results/benchmarks/{name}.json")
