"""Step time beside another revision of this library, in one process: `python -m benchmarks.against [REVISION]`.

Every solver on an MLP (784-50-10, batch 200), a transformer (53 leaves) and the Poisson network of the laboratory in
float64. Rounds are interleaved and the shortest time of each counts. For the default adaptive optimiser on Poisson also
its overhead: step time over that of the same gradient, products and trial losses alone. Times are the processor's, so
that other processes do not count. Run it on one core, with OPENBLAS_NUM_THREADS=1: OpenBLAS's threads wait for each
other in every small eigenproblem.
"""

import importlib
import io
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import saddlefree as now
from benchmarks import transformer
from benchmarks.record import network, shortest, step_of, write
from saddlefree.lab import models
from saddlefree.lab import problems as laboratory

ROUNDS = 5


def other_revision(revision: str) -> Any:
    """The library as of `revision`, under another name."""
    folder = pathlib.Path(tempfile.mkdtemp())
    archive = subprocess.run(["git", "archive", revision, "saddlefree"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    (folder / "saddlefree").rename(folder / "saddlefree_before")
    for path in folder.rglob("*.py"):
        path.write_text(re.sub(r"\bsaddlefree\b(?=[ .])", "saddlefree_before", path.read_text()))
    sys.path.insert(0, str(folder))
    return importlib.import_module("saddlefree_before")


def optimisers(sf: Any) -> dict[str, Any]:
    """What both revisions have; the rate is small, so that the point hardly moves."""
    fixed = lambda solver: sf.saddle_free_newton(1e-6, damping=1.0, solver=solver)  # noqa: E731
    return {
        "adaptive": sf.adaptive_saddle_free_newton(),
        "adaptive, recycle=160": sf.adaptive_saddle_free_newton(sf.lanczos(8, "sqrt", memory=1, recycle=160)),
        "lanczos(10)": fixed(sf.lanczos(10)),
        "low_rank()": fixed(sf.low_rank()),
        "series(9, sablonniere(4))": fixed(sf.series(9, sf.sablonniere(4), sf.lower_bound())),
        "blockwise(lanczos(5))": fixed(sf.blockwise(sf.lanczos(5))),
    }


def problems() -> dict[str, tuple[Any, Callable[[Any], jax.Array], int]]:
    """Parameters, loss, and steps in a measurement."""
    keys = jax.random.split(jax.random.key(0), 4)
    batch = jax.random.normal(keys[0], (200, 784)), jax.random.randint(keys[1], (200,), 0, 10)
    tokens = transformer.batch(keys[2])
    params, loss = network(models.mlp(784, 50, 10), keys[3])
    return {
        "mlp": (params, lambda p: loss(p, batch), 100),
        "transformer": (transformer.network(keys[3]), lambda p: transformer.loss(p, tokens), 5),
    }


def poisson() -> tuple[Any, Callable[[Any], jax.Array], int]:
    """The laboratory's, in float64."""
    task = laboratory.find("pinn-poisson").load(None)
    params, model_state = task.init(jax.random.key(0))
    return params, lambda p: task.loss(p, model_state, task.parts["train"], None)[0], 8


def measured(tx: Any, params: Any, value_fn: Callable[[Any], jax.Array], steps: int) -> Callable[[], float]:
    """A function that makes `steps` steps and returns the seconds of one."""
    compiled = jax.jit(step_of(tx, value_fn), donate_argnums=(0, 1))
    start = jax.jit(lambda p: jax.tree.map(jnp.array, (p, tx.init(p))))
    compiled(*start(params))

    def run() -> float:
        carry = jax.block_until_ready(start(params))
        begin = time.process_time()
        for _ in range(steps):
            carry = compiled(*carry)
        jax.block_until_ready(carry)
        return (time.process_time() - begin) / steps

    return run


def floor(params: Any, value_fn: Callable[[Any], jax.Array], products: int, trials: int, steps: int) -> Callable:
    """The same gradient, products and trial losses, and nothing else."""

    @jax.jit
    def work(params: Any) -> Any:
        value, grads = jax.value_and_grad(value_fn)(params)
        product = now.hessian(value_fn, params)
        v, _ = jax.lax.scan(lambda v, _: (product(v), None), grads, None, length=products)
        moved = lambda t: jax.tree.map(lambda p, g: p - t * g, params, v)  # noqa: E731
        return value, jax.lax.map(lambda t: value_fn(moved(t)), jnp.linspace(0.0, 1e-9, trials, dtype=value.dtype)), v

    work(params)

    def run() -> float:
        begin = time.process_time()
        for _ in range(steps):
            jax.block_until_ready(work(params))
        return (time.process_time() - begin) / steps

    return run


def main() -> None:
    """Prints ratios."""
    before = other_revision(sys.argv[1] if len(sys.argv) > 1 else "9b53e9c")
    rows, overhead = [], {}

    def compare(problem: str, params: Any, value_fn: Callable, steps: int, extra: dict[str, Callable]) -> dict:
        found = {}
        old = optimisers(before)
        for name, tx in optimisers(now).items():
            if "160" in name and problem != "poisson":
                continue
            pair = {
                "now": measured(tx, params, value_fn, steps),
                "before": measured(old[name], params, value_fn, steps),
            }
            best = shortest({**pair, **(extra if "adaptive" in name else {})}, ROUNDS)
            rows.append({"problem": problem, "optimiser": name, **{k: 1e3 * v for k, v in best.items()}})
            print(
                f"{problem:<12}{name:<28}{1e3 * best['now']:9.2f} ms, before {1e3 * best['before']:9.2f} ms: "
                f"{best['now'] / best['before']:5.2f}",
                flush=True,
            )
            found[name] = best
        return found

    for problem, (params, value_fn, steps) in problems().items():
        compare(problem, params, value_fn, steps, {})
    with jax.enable_x64(True):
        params, value_fn, steps = poisson()
        extra = {"floor": floor(params, value_fn, 9, 5, steps)}
        for name, best in compare("poisson", params, value_fn, steps, extra).items():
            if "floor" in best:
                overhead[name] = best["now"] / best["floor"] - 1
                print(f"poisson: overhead of {name}: {100 * overhead[name]:.0f} %")
    write("against", {"rows": rows, "overhead": overhead})


if __name__ == "__main__":
    main()
