"""Twenty problems of CUTEst, at most ten seconds each: how many a method solves, and how soon.

    OPENBLAS_NUM_THREADS=1 taskset -c 0 python -m benchmarks.cutest

A problem is solved where f ≤ L + 1e-6 (F − L), with F the loss at its start and L the lowest that any method found. The
methods are the laboratory's, compiled before the clock starts; a run ends early once its loss has stood still for a
second. Nothing is looked at more often than every few milliseconds, so shorter times count as that.
"""

from typing import Any

import jax
import numpy as np

from benchmarks.record import RESULTS, write
from saddlefree.lab import plan, problems, profiles, race, run
from saddlefree.lab.program import Program, clock, precision

SECONDS = 10.0
STILL = 1.0
TOLERANCE = 1e-6
SHORTEST = 0.01
"""Seconds; less is not told apart."""
DENSE = 5_000
"""The most variables for a method with several copies of a dense matrix."""
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "minimise": ("minimise", {}),
    "lbfgs-20": ("lbfgs", {"memory": 20, "iterations": 1}),
    "lbfgs-200": ("lbfgs", {"memory": 200, "iterations": 1}),
    "jinns-ssbroyden": ("jinns-ssbroyden", {}),
    "optimistix-bfgs": ("optimistix-bfgs", {}),
}
WITH_MATRIX = ("jinns-ssbroyden", "optimistix-bfgs")


def curve(name: str, method: str) -> tuple[list[float], list[float]]:
    """Seconds, and the lowest loss until then; the first is that of the start."""
    optimiser, changes = METHODS[method]
    task = run.load("cutest", None, {"name": name})
    made = plan.build("cutest", optimiser, task, changes=changes, budget=SECONDS, variant={"name": name})
    with precision(made):
        program = Program(made, task)
        state = program.start()
        first = float(program.evaluate(state)["train"])
        if method in WITH_MATRIX and sum(x.size for x in jax.tree.leaves(state.params)) > DENSE:
            return [0.0], [first]
        program.prepare(state)
        times, losses, step, count = [0.0], [first], 0, 1
        while times[-1] < SECONDS and times[-1] - times[losses.index(losses[-1])] < STILL and not program.ended(state):
            begin = clock()
            state, _ = program.advance(state, step, count)
            spent = clock() - begin
            step += count
            found = float(program.evaluate(state)["train"])
            times.append(times[-1] + spent)
            losses.append(min(losses[-1], found) if np.isfinite(found) else losses[-1])
            count = min(count if spent > SHORTEST else 2 * count, program.room(step))
        return times, losses


def solved(curves: dict[str, tuple[list[float], list[float]]]) -> dict[str, float]:
    """Method to the seconds until it has solved the problem, or ∞."""
    lowest = min(losses[-1] for _, losses in curves.values())
    first = max(losses[0] for _, losses in curves.values())
    target = np.array([lowest + TOLERANCE * (first - lowest)])
    found = {
        m: profiles.first_below(np.array(times), np.array(losses), target)[0] for m, (times, losses) in curves.items()
    }
    return {method: max(float(taken), SHORTEST) for method, taken in found.items()}


def main() -> None:
    """Prints and writes loss and time of each method on each problem."""
    rows: dict[str, Any] = {}
    for name in problems.CUTEST:
        curves = {method: curve(name, method) for method in METHODS}
        taken = solved(curves)
        rows[name] = {
            m: {"loss": curves[m][1][-1], "seconds": taken[m] if np.isfinite(taken[m]) else None} for m in METHODS
        }
        print(f"{name:<12}" + "".join(f"  {m} {curves[m][1][-1]:.6g} {taken[m]:.2f} s" for m in METHODS), flush=True)
        jax.clear_caches()
    count = {m: sum(row[m]["seconds"] is not None for row in rows.values()) for m in METHODS}
    print(count)
    write("cutest", {"seconds": SECONDS, "tolerance": TOLERANCE, "problems": rows, "solved": count})
    race.draw_cutest(RESULTS, RESULTS.parent / "docs")


if __name__ == "__main__":
    main()
