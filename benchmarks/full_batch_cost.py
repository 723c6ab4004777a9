"""What a full-batch step costs beyond its parts, on the laboratory's Poisson equation (2,241 parameters, float64).

    OPENBLAS_NUM_THREADS=1 taskset -c 0 python -m benchmarks.full_batch_cost

A step of `quasi_newton` beside its evaluations of loss and gradient, two reads and one write of the matrix at the
bandwidth of a copy: over as many steps as fill the terms once, so that their way into the matrix is paid for. A step of
`row_space` with the rule of `least_squares` beside Jacobian, Gram matrix, one factorisation for each λ and the rule's
evaluations of the loss. Times are the processor's, in interleaved rounds, and the shortest of each counts.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import saddlefree as sf
from benchmarks.record import shortest, write
from saddlefree import residuals, stages
from saddlefree.lab import problems
from saddlefree.minimisation import Descent
from saddlefree.solvers.factors import capacity
from saddlefree.space import Space

ROUNDS = 3
REPEATS = 3


def clocked(fn: Callable[..., Any], *args: Any, repeats: int = REPEATS) -> Callable[[], float]:
    """Processor seconds of one call, a mean; compiled before."""
    jax.block_until_ready(fn(*args))

    def run() -> float:
        start = time.process_time()
        for _ in range(repeats):
            jax.block_until_ready(fn(*args))
        return (time.process_time() - start) / repeats

    return run


def of_quasi_newton(value_fn: Callable[[Any], jax.Array], params: Any) -> dict[str, float]:
    """Milliseconds of a step and of its parts, and their ratio."""
    size = Space(params).size
    run = Descent(value_fn, stages.single(sf.quasi_newton()), tolerance=0.0)
    state = run.start(params)
    steps = capacity(state.optimisers[0].solver.terms)
    kept = {"state": run.advance(state, steps)[0], "evaluations": 0, "steps": 0}
    matrix, copy = np.ones((size, size)), np.empty((size, size))

    def advance() -> float:
        start = time.process_time()
        kept["state"], rows, _ = run.advance(kept["state"], steps)
        jax.block_until_ready(kept["state"])
        kept["evaluations"] += int(rows["evaluations"].sum())
        kept["steps"] += len(rows["value"])
        return (time.process_time() - start) / max(len(rows["value"]), 1)

    found = shortest(
        {
            "step": advance,
            "evaluation": clocked(jax.jit(jax.value_and_grad(value_fn)), params, repeats=20),
            "copy": clocked(np.copyto, copy, matrix),
        },
        ROUNDS,
    )
    each = kept["evaluations"] / kept["steps"]
    # A copy is one read and one write.
    parts = each * found["evaluation"] + 1.5 * found["copy"]
    return {
        "parameters": size,
        "step_ms": 1e3 * found["step"],
        "evaluations": each,
        "evaluation_ms": 1e3 * found["evaluation"],
        "matrix_ms": 1.5e3 * found["copy"],
        "gigabytes_per_second": 2 * matrix.nbytes / found["copy"] / 1e9,
        "step_over_parts": found["step"] / parts,
    }


def of_row_space(residual_fn: Any, params: Any) -> dict[str, float]:
    """Milliseconds of a step and of its parts, and their ratio."""
    layout, solver, rule = Space(params), sf.row_space(), stages.GAUSS_NEWTON
    tx, value_fn = sf.adaptive_saddle_free_newton(solver, rule=rule), residuals.half_square(residual_fn)
    value, grads = jax.jit(jax.value_and_grad(value_fn))(params)
    state = tx.init(params)

    @jax.jit
    def step(grads: Any, state: Any, params: Any, value: jax.Array) -> Any:
        return tx.update(grads, state, params, value=value, residual_fn=residual_fn)

    @jax.jit
    def rows(params: Any) -> Any:
        return residuals.jacobian(residual_fn, Space(params), solver.chunk_size, by_rows=True)

    @jax.jit
    def factor(matrix: jax.Array) -> jax.Array:
        return jax.lax.linalg.cholesky(matrix + jnp.eye(len(matrix), dtype=matrix.dtype), symmetrize_input=False)

    J = rows(params)[1]
    gram = jax.jit(residuals.gram)
    found = shortest(
        {
            "step": clocked(step, grads, state, params, value),
            "jacobian": clocked(rows, params),
            "gram": clocked(gram, J),
            "factorisation": clocked(factor, gram(J)),
            "loss": clocked(jax.jit(value_fn), params, repeats=20),
        },
        ROUNDS,
    )
    factorisations = 2 * rule.reach + 1
    parts = found["jacobian"] + found["gram"] + factorisations * found["factorisation"]
    parts += rule.evaluations * found["loss"]
    times = {f"{name}_ms": 1e3 * seconds for name, seconds in found.items()}
    counts = {"factorisations": factorisations, "losses": rule.evaluations}
    sizes = {"residuals": J.shape[0], "parameters": layout.size, **counts}
    return {**sizes, **times, "step_over_parts": found["step"] / parts}


def main() -> None:
    """Prints and writes both."""
    jax.config.update("jax_enable_x64", True)
    task = problems.find("pinn-poisson").load()
    params, fixed = task.init(jax.random.key(0))
    batch = task.parts["train"]
    summary = {
        "quasi_newton": of_quasi_newton(lambda p: task.loss(p, fixed, batch, jax.random.key(0))[0], params),
        "row_space": of_row_space(task.residual_fn(fixed, batch), params),
    }
    for name, figures in summary.items():
        print(name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
    write("full_batch_cost", summary)


if __name__ == "__main__":
    main()
