"""Runs: files, clocks, divergence, and coming back after a crash to the same bits."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from saddlefree.lab import checkpoint, optimisers, problems
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import Metrics, read_json, read_lines, write_json
from saddlefree.lab.program import Program, precision
from saddlefree.lab.run import Interrupted, Plan, _alone, open_folder, run

SADDLE = problems.find("saddle")


def plan(optimiser="adam", problem="saddle", seeds=(0,), epochs=30.0, **changes):
    return Plan(problem, optimiser, optimisers.configured(optimiser, problem, changes), seeds, epochs)


def go(a_plan, folder, **options):
    entry = problems.find(a_plan.problem)
    with precision(entry):
        task = entry.load(None)
    open_folder(folder, {"plan": a_plan.record()}, resume=True)
    return run(a_plan, task, folder, **options)


def lines_of(folder):
    return list(read_lines(folder / "metrics.jsonl"))


def final_leaves(folder, a_plan):
    entry = problems.find(a_plan.problem)
    with precision(entry):
        task = entry.load(None)
        program = Program(entry, task, optimisers.find(a_plan.optimiser), a_plan.values, a_plan.seeds, a_plan.epochs)
        state, _ = checkpoint.restore(folder, program.start())
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def test_a_run_leaves_its_files(tmp_path):
    summary = go(plan(), tmp_path, every_step=True)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert all(line["epoch"] == line["step"] for line in lines)
    assert np.all(np.diff([line["seconds"] for line in lines]) > 0)
    assert {"train", "val", "test"} <= set(lines[-1])
    assert summary == read_json(tmp_path / "summary.json")
    assert summary["status"] == "finished"
    assert summary["train"] == [lines[-1]["train"]]
    assert list((tmp_path / "tensorboard").iterdir())
    assert checkpoint.latest(tmp_path) == 30
    # Finished: nothing is computed again.
    before = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert go(plan(), tmp_path, every_step=True) == summary
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_run_is_the_optimiser_and_nothing_else(tmp_path):
    """Against a loop written here."""
    import optax

    go(plan("sgd", learning_rate=0.1), tmp_path)
    task = SADDLE.load(None)
    x, _ = task.init(jax.random.key(0))
    for _ in range(30):
        x = optax.apply_updates(x, jax.tree.map(lambda g: -0.1 * g, jax.grad(task.value)(x)))
    np.testing.assert_allclose(final_leaves(tmp_path, plan("sgd", learning_rate=0.1))[0], x, rtol=1e-5)


def test_batches_of_an_epoch_are_a_permutation(tmp_path):
    entry = problems.find("digits")
    with precision(entry):
        task = entry.load(None)
        program = Program(
            entry, task, optimisers.find("sgd"), configured := {"batch_size": 100, **plan("sgd").values}, (0, 1), 2
        )
        spans = np.stack([np.asarray(program._order_in(span)) for span in (0, 1, 0)])
    assert configured["batch_size"] == program.batch_size
    assert program.steps_per_epoch == task.examples // 100
    np.testing.assert_array_equal(spans[0], spans[2])
    epochs = spans[:2].reshape(-1, program.steps_per_epoch * 100)  # of two seeds
    assert len(epochs) > 4
    for epoch in epochs:
        assert len({*epoch.tolist()} & {*range(task.examples)}) == epoch.size
    assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)


def test_pieces_of_a_run_make_the_whole():
    entry = problems.find("digits")
    with precision(entry):
        values = {"batch_size": 300, **plan("sgd").values}
        program = Program(entry, entry.load(None), optimisers.find("sgd"), values, (0,), 200)
        program.prepare(program.start())

        def losses(pieces):
            state, step = program.start(), 0
            while step < 300:
                count = min(pieces, program.room(step), 300 - step)
                state, _ = program.advance(state, step, count)
                step += count
            return program.evaluate(state)["train"]

        assert program.room(0) > program.steps_per_epoch
        assert losses(1) == losses(7) == losses(1000)


def test_seeds_together_are_the_seeds_alone(tmp_path):
    together = go(plan(seeds=(0, 1, 2)), tmp_path / "together")
    for number in range(3):
        alone = go(plan(seeds=(number,)), tmp_path / str(number))
        np.testing.assert_allclose(together["train"][number], alone["train"][0], rtol=1e-5)
    lines = lines_of(tmp_path / "together")
    assert {line["seed"] for line in lines} == {0, 1, 2}
    assert together["seconds"] == pytest.approx(30 * together["seconds_per_step"])


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    summary = go(plan("sgd", learning_rate=30.0, epochs=200), tmp_path, every_step=True)
    assert summary["status"] == "diverged"
    assert summary["steps"] < 200 or summary["diverged"]
    lines = lines_of(tmp_path)
    assert lines[-1]["train"] is None
    assert all(line["train"] is not None for line in lines[:-1])
    assert summary["diverged"] == {"0": lines[-1]["step"]}


def test_a_budget_ends_the_run(tmp_path):
    a_plan = Plan("saddle", "adam", optimisers.configured("adam", "saddle", {}), (0,), 50, budget=0.2)
    summary = go(a_plan, tmp_path)
    assert 0.2 <= summary["seconds"] < 2
    assert lines_of(tmp_path)[-1]["seconds"] <= summary["seconds"]


def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_from_it(tmp_path):
    whole = plan("low-rank", epochs=400)
    go(whole, tmp_path / "whole", every_step=True)
    shown = []

    def interrupt(step, steps, figures):
        shown.append(figures)
        if len(shown) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as caught:
        go(whole, tmp_path / "cut", every_step=True, display=interrupt)
    assert caught.value.code == 128 + signal.SIGTERM
    stopped = checkpoint.latest(tmp_path / "cut")
    assert 0 < stopped < 400
    assert lines_of(tmp_path / "cut")[-1]["step"] == stopped
    assert {"train", "steps_per_second", "damping"} <= set(shown[-1])
    # What a killed run wrote after its checkpoint is dropped.
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": stopped + 1, "train": 1.0}) + '\n{"step": ')
    go(whole, tmp_path / "cut", every_step=True)
    assert [line["step"] for line in lines_of(tmp_path / "cut")] == list(range(1, 401))
    for a, b in zip(final_leaves(tmp_path / "whole", whole), final_leaves(tmp_path / "cut", whole), strict=True):
        np.testing.assert_array_equal(a, b)


def test_kill_9_at_random_moments_and_resume(tmp_path):
    """Each time the process is killed it gets a little further, and ends where an uninterrupted one does."""
    command = [sys.executable, "-m", "saddlefree.lab.cli", "train", "saddle", "adam", "--epochs", "8000"]
    command += ["--checkpoint-every", "0.1s", "--resume", "--out"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert subprocess.run([*command, str(whole)], capture_output=True, check=False).returncode == 0
    rng = random.Random(0)
    kills = 0
    while kills < 2:
        process = subprocess.Popen([*command, str(cut)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline, before = time.monotonic() + 60, checkpoint.latest(cut)
        while time.monotonic() < deadline and process.poll() is None and checkpoint.latest(cut) == before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.wait()
        kills += 1
    assert subprocess.run([*command, str(cut)], capture_output=True, check=False).returncode == 0
    steps = [line["step"] for line in lines_of(cut)]
    assert steps == list(range(1, len(steps) + 1))
    a_plan = plan("adam", epochs=8000.0)
    for a, b in zip(final_leaves(whole, a_plan), final_leaves(cut, a_plan), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_damaged_checkpoint_is_named(tmp_path):
    go(plan(), tmp_path)
    (tmp_path / "summary.json").unlink()
    largest = max((tmp_path / "checkpoints").rglob("state/d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-5])
    with pytest.raises(UserError, match=f"{largest.name} is damaged or missing: delete .*30 to resume from the start"):
        go(plan(), tmp_path)
    record = tmp_path / "checkpoints" / "30" / "record.json"
    record.write_text(record.read_text()[:40])
    with pytest.raises(UserError, match=r"record.json is damaged: delete .*30 to resume from the start"):
        go(plan(), tmp_path)


def test_a_checkpoint_without_its_record_is_none(tmp_path):
    state = {"x": jax.numpy.arange(3.0), "empty": jax.numpy.zeros((0, 2))}
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state, {"seconds": step})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    (tmp_path / "checkpoints" / "3" / "record.json").unlink()
    assert checkpoint.latest(tmp_path) == 2
    restored, record = checkpoint.restore(tmp_path, state)
    assert record["seconds"] == 2
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    state = {"x": jax.numpy.arange(3.0)}
    checkpoint.save(tmp_path, 1, state, {})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(
        UserError, match=r"2 could not be written .*No space left.*stopped at step 2; make room and go on"
    ):
        checkpoint.save(tmp_path, 2, state, {})
    assert checkpoint.latest(tmp_path) == 1
    checkpoint.restore(tmp_path, state)


def test_a_folder_belongs_to_one_run(tmp_path):
    go(plan(), tmp_path)
    with pytest.raises(UserError, match="holds a run already: go on with --resume, or choose another --out"):
        open_folder(tmp_path, {"plan": plan().record()}, resume=False)
    with pytest.raises(
        UserError, match=r"holds another run \(epochs was 30.0, is 31\): resume with the same arguments"
    ):
        open_folder(tmp_path, {"plan": plan(epochs=31).record()}, resume=True)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        open_folder(blocked / "run", {"plan": {}}, resume=False)


def test_metrics_are_null_where_not_finite_and_whole_lines_only(tmp_path):
    metrics = Metrics(tmp_path, 0, tensorboard=False)
    metrics.write([{"step": 1, "train": float("inf")}, {"step": 2, "train": 1.5}])
    metrics.close()
    path = tmp_path / "metrics.jsonl"
    assert path.read_text() == '{"step": 1, "train": null}\n{"step": 2, "train": 1.5}\n'
    path.write_text(path.read_text() + '{"step": 3, "tr')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2 is damaged"):
        list(read_lines(path))


def test_records_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": [1.0, float("nan")]})
    assert read_json(path) == {"a": [1.0, None]}
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": [1.0, None]}
    path.write_text("{")
    with pytest.raises(UserError, match=r"summary.json is damaged"):
        read_json(path)
    with pytest.raises(UserError, match=r"none.json is missing: is .* the folder of a run"):
        read_json(tmp_path / "none.json")


def test_runs_in_a_thread_do_without_signals(tmp_path):
    failures = []

    def work():
        try:
            go(plan(epochs=2), tmp_path)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    assert (tmp_path / "summary.json").exists()


def test_batch_size_must_fit(tmp_path):
    with pytest.raises(UserError, match="batch_size must be at most the 1150 training examples, got 5000"):
        go(plan("adam", "digits", batch_size=5000), tmp_path)


def test_exact_refuses_what_is_too_large(tmp_path):
    assert isinstance(tmp_path, pathlib.Path)
    entry = problems.find("digits")
    with precision(entry):
        task = entry.load(None)
        values = optimisers.configured("exact", "digits", {})
        large = task._replace(init=lambda key: (jax.numpy.zeros(5000), None))
        program = Program(entry, large, optimisers.find("exact"), values, (0,), 1)
        with pytest.raises(UserError, match="takes at most max_size=4096 parameters, got 5000"):
            program.start()


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    hold = "import sys, pathlib; from saddlefree.lab.run import _alone\n"
    hold += "with _alone(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="in use by another process"), _alone(tmp_path, patience=0.2):
            pass
        other.stdin.close()
    with _alone(tmp_path, patience=0.2):
        pass
