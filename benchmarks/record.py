"""What every benchmark needs: a clock that waits, random numbers over decades, and a file for its figures."""

import json
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """A number whose logarithm is uniform."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def seconds(fn: Callable[..., Any], *args: Any, repeats: int = 10) -> float:
    """The median wall time of a compiled function, after one call that compiles it."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def read(name: str, otherwise: Any) -> Any:
    """The figures of an earlier run, or `otherwise` where there is none."""
    path = pathlib.Path(__file__).parent / "results" / f"{name}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else otherwise


def write(name: str, figures: Any) -> None:
    """Writes benchmarks/results/NAME.json, with the versions that the figures were measured with."""
    path = pathlib.Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    versions = {"jax": jax.__version__, "python": platform.python_version(), "backend": jax.default_backend()}
    path.write_text(json.dumps({"versions": versions, "figures": figures}, indent=2) + "\n")
    print(f"written: benchmarks/results/{name}.json")
