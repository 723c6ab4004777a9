"""Runs that are killed with SIGKILL at random moments, resumed, and compared bit for bit with undisturbed ones.

    python -m benchmarks.kills [KILLS] [SEED]

Cases are K-FAC, L-BFGS and lanczos-adaptive on `digits`, with a fixed number of steps and as a race by the clock, and
two seeds of lanczos-adaptive that are mapped (the others and races run one seed at a time). A case is killed, resumed,
killed again, and so on until its share of kills is used up; then it runs to its end. The first kill strikes at a random
moment of the process's life, most of which is starting and compiling, the others at one after that. A race is compared
with a run of as many steps as it made. Processes share a cache of compiled programs, for time: that compiling again
gives the same bits is what `tests/lab/test_run.py` shows. Writes results/benchmarks/kills.json.
"""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

CASES = [(name, race, 1) for name in ("kfac", "lbfgs", "lanczos-adaptive") for race in (False, True)]
CASES += [("lanczos-adaptive", False, 2)]
STEPS, SECONDS = 200, 4.0
CACHE = pathlib.Path(tempfile.gettempdir()) / "saddlefree-kills-cache"  # of compiled programs, for all processes


def work(folder: str, optimiser: str, steps: int, budget: float, seeds: tuple[int, ...]) -> None:
    """Runs, or goes on: what is killed. `steps` of 0 is a race."""
    from saddlefree.lab import events
    from saddlefree.lab.plan import build
    from saddlefree.lab.run import load, run_seeds

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Compiled):
            print("compiled", flush=True)

    task = load("digits", None)
    length: dict[str, Any] = {"steps": steps} if steps else {"budget": budget}
    plan = build("digits", optimiser, task, seeds=seeds, **length)
    options: dict[str, Any] = {"every_step": True, "checkpoint_every": 0.3, "keep_checkpoint": True}
    run_seeds(plan, task, pathlib.Path(folder), listener=listen, **options)


def start(*arguments: Any) -> subprocess.Popen:
    """`work` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.kills", "--work", json.dumps(arguments)]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def finish(*arguments: Any) -> tuple[float, float]:
    """Runs to the end, and returns how many seconds that took, in all and after the first program was compiled."""
    begin, process = time.monotonic(), start(*arguments)
    assert process.stdout
    process.stdout.readline()
    compiled = time.monotonic()
    process.communicate()
    if process.returncode:
        raise SystemExit(f"{arguments} failed")
    return time.monotonic() - begin, time.monotonic() - compiled


def folders(root: pathlib.Path) -> list[pathlib.Path]:
    """Of the runs in a case."""
    return sorted(path.parent for path in root.rglob("summary.json"))


def same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two runs ended with the same bits: every leaf of the state, and all figures of every step but times."""
    from saddlefree.lab import checkpoint
    from saddlefree.lab.metrics import read_lines

    (a, _), (b, _) = checkpoint.load(one), checkpoint.load(other)
    if a.keys() != b.keys() or any(a[path].tobytes() != b[path].tobytes() for path in a):
        return False
    lines, others = (list(read_lines(folder / "metrics.jsonl")) for folder in (one, other))
    for line, beside in zip(lines, others, strict=True):
        # Evaluated, `train` is the loss after the step; a race is evaluated at other steps than its replay.
        skipped = {"seconds"} | ({"train"} if ("val" in line) != ("val" in beside) else set())
        if any(line[name] != beside[name] for name in line.keys() & beside.keys() - skipped):
            return False
    return True


def case(root: pathlib.Path, optimiser: str, race: bool, seeds: int, kills: int, rng: random.Random) -> dict[str, Any]:
    """One row of the table."""
    from saddlefree.lab import checkpoint
    from saddlefree.lab.metrics import read_json

    numbers, steps = tuple(range(seeds)), 0 if race else STEPS
    whole, cut = root / "whole", root / "cut"
    arguments = (str(cut), optimiser, steps, SECONDS, numbers)
    life, training = finish(str(whole), optimiser, steps, SECONDS, numbers)
    moments: list[float] = []
    resumed = 0
    while len(moments) < kills:
        moment, process = rng.uniform(0, training if moments else life), start(*arguments)
        if moments:
            assert process.stdout
            process.stdout.readline()
        try:
            process.communicate(timeout=moment)
            shutil.rmtree(cut)  # it came to its end before: that was no kill
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            moments.append(moment)
            resumed += any(checkpoint.latest(path.parent) is not None for path in cut.rglob("config.json"))
    finish(*arguments)
    compared = []
    for number, folder in enumerate(folders(cut)):
        if race:
            made = read_json(folder / "summary.json")["steps"]
            finish(str(root / "replay" / str(number)), optimiser, made, SECONDS, (number,))
            compared.append(same(folder, folders(root / "replay" / str(number))[0]))
        else:
            compared.append(same(folder, whole / folder.relative_to(cut)))
    return {
        "optimiser": optimiser,
        "race": race,
        "seeds": seeds,
        "programs": len(compared),
        "kills": kills,
        "moments": [round(moment, 2) for moment in moments],
        "life": round(life, 2),
        "training": round(training, 2),
        "resumed_from_a_checkpoint": resumed,
        "same_bits": bool(np.all(compared)),
    }


def main(kills: int = 30, seed: int = 0) -> None:
    """All cases, with `kills` spread evenly over them."""
    from benchmarks import record

    rng, rows = random.Random(seed), []
    shares = [len(part) for part in np.array_split(range(kills), len(CASES))]
    print(f"{'optimiser':18}{'length':>10}{'seeds':>7}{'kills':>7}{'resumed':>9}{'same bits':>11}")
    for (optimiser, race, seeds), share in zip(CASES, shares, strict=True):
        with tempfile.TemporaryDirectory() as root:
            row = case(pathlib.Path(root), optimiser, race, seeds, share, rng)
        length = f"{SECONDS:g} s" if race else f"{STEPS} steps"
        resumed, verdict = row["resumed_from_a_checkpoint"], "yes" if row["same_bits"] else "NO"
        print(f"{optimiser:18}{length:>10}{seeds:>7}{share:>7}{resumed:>9}{verdict:>11}", flush=True)
        rows.append(row)
    record.write("kills", {"seed": seed, "kills": kills, "rows": rows})
    if not all(row["same_bits"] for row in rows):
        raise SystemExit("some runs ended with other bits")
    shutil.rmtree(CACHE)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*json.loads(sys.argv[2]))
    else:
        main(*map(int, sys.argv[1:]))
