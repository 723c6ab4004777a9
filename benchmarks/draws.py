"""Random hyperparameters on mini-batches: no parameter ever becomes NaN, and the default does not end above its start.

    python -m benchmarks.draws        about a quarter of an hour; two of the problems need SADDLEFREE_DATA

Every draw is a run of 300 steps with hyperparameters and batch size from all of the range in which the laboratory
searches. Losses may rise, since a drawn rate may be far too large. The default has no hyperparameters: it is run from
several seeds.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.record import write
from saddlefree.lab import plan, problems, search
from saddlefree.lab.program import Program, precision

TASKS = ("digits", "kin8nm", "imbalanced", "fashion-mnist")
OPTIMISERS = ("adaptive", "low-rank", "next-batch-rate", "lanczos", "lanczos-adaptive", "series", "series-adaptive")
DRAWS, SEEDS, STEPS = 25, 5, 300


def run(problem: str, task: Any, optimiser: str, values: dict[str, Any], seed: int) -> dict[str, Any]:
    """The training loss at the start and at the end of a run, and whether all parameters are finite there."""
    planned = plan.build(problem, optimiser, task, changes=values, seeds=[seed], steps=STEPS)
    with precision(planned):
        program = Program(planned, task)
        state, done = program.start(), 0
        program.prepare(state)
        first = float(program.evaluate(state)["train"])
        while done < STEPS:
            count = min(program.room(done), STEPS - done)
            state, _ = program.advance(state, done, count)
            done += count
        last = float(program.evaluate(state)["train"])
        finite = all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(state.params))
    row = {"problem": problem, "optimiser": optimiser, "seed": seed, "first": first, "last": last, "finite": finite}
    print(
        f"{problem:<14}{optimiser:<18}{first:10.4f}{last:12.4g}  {'' if finite else 'NOT FINITE '}{values}", flush=True
    )
    jax.clear_caches()
    return {**row, "values": values}


def main() -> None:
    """Prints and writes all runs, and counts."""
    drawn, default = [], []
    for problem in TASKS:
        task = problems.find(problem).load()
        turns = itertools.islice(itertools.cycle(OPTIMISERS), DRAWS)
        for number, optimiser in enumerate(turns):
            values = search.draw(problem, optimiser, {}, task.examples, 2, seed=number)[1]
            drawn.append(run(problem, task, optimiser, values, number))
        default += [run(problem, task, "adaptive", {}, seed) for seed in range(SEEDS)]
    counts = {
        "draws": len(drawn),
        "not_finite": sum(not row["finite"] for row in drawn + default),
        "above_start": sum(not row["last"] <= row["first"] for row in drawn),
        "default_runs": len(default),
        "default_above_start": sum(not row["last"] <= row["first"] for row in default),
    }
    print(counts)
    for row in drawn + default:
        row["last"] = row["last"] if math.isfinite(row["last"]) else None
    write("draws", {**counts, "rows": drawn + default})


if __name__ == "__main__":
    main()
