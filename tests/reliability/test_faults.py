"""Faults in training: batches that are not finite, losses that raise, disks that are full, clocks that jump, SIGKILL.

What `tests/lab/test_run.py` shows is not repeated here: SIGKILL between a checkpoint's state and its record, a signal,
a checkpoint that cannot be written, a folder of another run.
"""

import errno
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd import SOAK, cases
from problems import network_batch, network_loss, network_params

import saddlefree as sf
from saddlefree.lab import checkpoint, metrics
from saddlefree.lab.errors import UserError
from saddlefree.lab.plan import build
from saddlefree.lab.run import load, run

OPTIMISERS = {
    "adaptive": sf.adaptive_saddle_free_newton(sf.lanczos(num_products=3, memory=1)),
    "over-adam": sf.saddle_free_newton(solver=sf.low_rank(rank=2, refresh_every=3, base=optax.adam(1e-2))),
}


@pytest.mark.parametrize("name", OPTIMISERS if SOAK else ["over-adam"])
def test_batches_that_are_not_finite(name, count):
    """At random steps: each is counted, parameters stay finite, and the loss still falls."""
    tx = OPTIMISERS[name]
    x, y = network_batch(jax.random.key(0))
    start = network_params(jax.random.key(1))
    before = network_loss(start, (x, y))
    step = sf.training.make_step(lambda p, model_state, batch, key: (network_loss(p, batch), (None, ())), tx)

    @given(st.lists(st.sampled_from([0, 0, 0, jnp.nan, jnp.inf, -jnp.inf, 1e38]), min_size=10, max_size=30))
    @cases(4, 200)
    def check(faults):
        state = sf.training.init(start, tx)
        for fault in [*faults, *[0] * 10]:
            count("steps of training with faults")
            state, _ = step(state, (x.at[0, 0].add(fault), y.at[-1, 0].add(fault)))
            assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.params))
        figures = sf.diagnostics(state.opt_state)
        assert figures["nonfinite_steps"] >= sum(not np.isfinite(fault) for fault in faults)
        assert network_loss(state.params, (x, y)) < before

    check()


class MineError(Exception):
    """A user's own error."""


def test_a_loss_that_raises():
    """The user's error arrives as it was raised, and the optimiser works afterwards."""
    x, works = jnp.array([1.0, 2.0]), []

    def value_fn(params):
        if not works:
            raise MineError("no batch")
        return jnp.sum(params**2)

    def stopped(progress):
        raise MineError("enough")

    tx = sf.saddle_free_newton(solver=sf.exact(), max_increase=0.1)
    update = jax.jit(lambda g, state, x: tx.update(g, state, x, value_fn=value_fn)[0])
    with pytest.raises(MineError, match="no batch"):
        update(2 * x, tx.init(x), x)
    with pytest.raises(MineError, match="no batch"):
        sf.minimise(value_fn, x, solver=sf.exact())
    works.append(True)
    np.testing.assert_allclose(update(2 * x, tx.init(x), x), -2 * x / 2.01, rtol=1e-5)
    with pytest.raises(MineError, match="enough"):
        sf.minimise(value_fn, x, solver=sf.exact(), callback=stopped, every=1)


def trained(folder, **options):
    plan = build("saddle", "adam", load("saddle", None), seeds=(0,), steps=12)
    run(plan, load("saddle", None), folder, **{"keep_checkpoint": True, "checkpoint_every": 0.0, **options})
    return checkpoint.load(folder)[0]


def failure(folder):
    """What a run says that cannot go on, or None."""
    try:
        trained(folder)
    except (OSError, UserError) as error:
        return str(error)
    return None


def same(a, b):
    return a.keys() == b.keys() and all(a[path].tobytes() == b[path].tobytes() for path in a)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"))


def test_a_disk_that_is_full_at_some_write(count, undisturbed, tmp_path, monkeypatch):
    """Whichever write fails first, the run ends in one line, and goes on to the same bits when there is room."""
    write = metrics.write_text
    failing = range(40) if SOAK else (0, 1, 3)
    for number in failing:
        left, folder = [number], tmp_path / str(number)

        def full(path, text, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, text)

        monkeypatch.setattr(metrics, "write_text", full)
        told = failure(folder)
        monkeypatch.setattr(metrics, "write_text", write)
        count("runs on a full disk")
        assert same(trained(folder), undisturbed)
        if not told:
            break
        assert "No space left" in told


# Threads and event loops of Orbax's tell it too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not SOAK or os.geteuid() != 0, reason="make soak, as root")
def test_a_file_system_that_is_full(count, undisturbed, tmp_path):
    """A real one, of a few kilobytes."""
    for size in (16, 48, 96, 160):
        folder = tmp_path / str(size)
        folder.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", folder], check=False)
        if mounted.returncode:
            pytest.skip("no file system can be mounted here")
        try:
            assert "No space left" in (failure(folder / "run") or "No space left")
            subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
            count("runs on a full disk")
            assert same(trained(folder / "run"), undisturbed)
        finally:
            subprocess.run(["umount", folder], check=True)


SAVING = """
import pathlib, sys
import numpy as np
from saddlefree.lab import checkpoint

folder = pathlib.Path(sys.argv[1])
for step in range((checkpoint.latest(folder) or 0) + 1, 10**6):
    checkpoint.save(folder, step, {"x": np.full(50_000, step, np.float32)}, {"step": step})
    print(step, flush=True)
"""


def test_sigkill_at_any_moment_of_a_checkpoint(count, tmp_path):
    """What is there afterwards is whole, and no older than what had been saved."""
    rng = random.Random(0)
    for _ in range(25 if SOAK else 1):
        command = [sys.executable, "-c", SAVING, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            saved = [int(child.stdout.readline()) for _ in range(rng.randint(1, 4))][-1]
            time.sleep(rng.uniform(0, 0.1))
            child.send_signal(signal.SIGKILL)
        count("processes killed while they saved")
        leaves, position = checkpoint.load(tmp_path)
        assert position["step"] >= saved
        np.testing.assert_array_equal(leaves["['x']"], np.full(50_000, position["step"], np.float32))


def test_clocks_that_jump(undisturbed, tmp_path, monkeypatch):
    """The clocks that a run reads jump forward, a minute at a time: the bits are the same.

    Those of this process stay as they are: Orbax measures its own time limits by them. Nothing here reads the wall
    clock, which may also go back (the next test).
    """
    rng, now = random.Random(0), [time.perf_counter()]

    def forward():
        now[0] += rng.choice([0.0, 1e-6, 60.0])
        return now[0]

    clocks = types.SimpleNamespace(**dict.fromkeys(("perf_counter", "process_time", "monotonic"), forward))
    for module in ("program", "run"):
        monkeypatch.setattr(f"saddlefree.lab.{module}.time", clocks)
    found = trained(tmp_path)
    monkeypatch.undo()
    assert same(found, undisturbed)


def test_no_code_reads_the_wall_clock():
    """It may be set while a program runs."""
    for path in pathlib.Path(sf.__file__).parent.rglob("*.py"):
        assert not re.search(r"\btime\.time\(|datetime", path.read_text()), path
