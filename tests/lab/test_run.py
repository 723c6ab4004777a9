"""Runs: files, clocks, divergence, and coming back after a crash to the same bits."""

import collections
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from saddlefree.lab import checkpoint, cli, events, problems
from saddlefree.lab import run as engine
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import Metrics, read_json, read_lines, write_json
from saddlefree.lab.plan import build
from saddlefree.lab.process import alone
from saddlefree.lab.program import Program, precision
from saddlefree.lab.run import Interrupted, load, open_folder, run

SADDLE = problems.find("saddle")


def plan(optimiser="adam", problem="saddle", seeds=(0,), steps=30, budget=None, **changes):
    steps = None if budget else steps
    return build(problem, optimiser, load(problem, None), changes=changes, seeds=seeds, steps=steps, budget=budget)


def go(a_plan, folder, **options):
    return run(a_plan, load(a_plan.problem, None), folder, **{"keep_checkpoint": True, **options})


def lines_of(folder):
    return list(read_lines(folder / "metrics.jsonl"))


def check_same(a, b):
    """The last states of two runs, bit for bit."""
    (a, _), (b, _) = checkpoint.load(a), checkpoint.load(b)
    assert a.keys() == b.keys()
    jax.tree.map(np.testing.assert_array_equal, a, b)


def without_times(lines):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_a_run_ends_where_its_optimiser_has_converged(tmp_path):
    summary = go(plan("minimise", steps=5000), tmp_path, every_step=True)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, summary["steps"] + 1))
    assert summary["steps"] < 5000
    assert lines[-1]["val"] == pytest.approx(-0.25)
    assert go(plan("minimise", steps=5000), tmp_path) == summary


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
    np.testing.assert_allclose(checkpoint.load(tmp_path)[0][".params"], x, rtol=1e-5)


def test_batches_of_an_epoch_are_a_permutation(tmp_path):
    task = load("digits", None)
    program = Program(plan("sgd", "digits", seeds=(0, 1), batch_size=100), task)
    spans = np.stack([np.asarray(program._order_in(span)) for span in (0, 1, 0)])
    assert program.steps_per_epoch == task.examples // 100
    np.testing.assert_array_equal(spans[0], spans[2])
    epochs = spans[:2].reshape(-1, program.steps_per_epoch * 100)  # of two seeds
    assert len(epochs) > 4
    for epoch in epochs:
        assert len({*epoch.tolist()} & {*range(task.examples)}) == epoch.size
    assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)


def test_pieces_of_a_run_make_the_whole():
    a_plan = plan("sgd", "digits", steps=600, batch_size=300)
    with precision(a_plan):
        program = Program(a_plan, load("digits", None))
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


def test_seeds_together_are_the_seedsalone(tmp_path):
    together = go(plan(seeds=(0, 1, 2)), tmp_path / "together")
    for number in range(3):
        alone = go(plan(seeds=(number,)), tmp_path / str(number))
        np.testing.assert_allclose(together["train"][number], alone["train"][0], rtol=1e-5)
    lines = lines_of(tmp_path / "together")
    assert {line["seed"] for line in lines} == {0, 1, 2}
    assert together["together"] == 3
    _, position = checkpoint.load(tmp_path / "together")
    assert together["seconds"] == position["training"] / 3 == pytest.approx(30 * together["seconds_per_step"])
    assert lines[-1]["seconds"] == together["seconds"]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    summary = go(plan("sgd", learning_rate=30.0, steps=200), tmp_path, every_step=True)
    assert summary["status"] == "diverged"
    assert summary["steps"] < 200 or summary["diverged"]
    lines = lines_of(tmp_path)
    assert lines[-1]["train"] is None
    assert all(line["train"] is not None for line in lines[:-1])
    assert summary["diverged"] == {"0": lines[-1]["step"]}


# Races.


def test_a_race_ends_by_its_clock_and_the_steps_it_made_give_the_same_bits(tmp_path):
    race = plan("sgd", "digits", budget=0.3, decay="none")
    assert race.by_clock
    summary = go(race, tmp_path / "race", every_step=True)
    assert summary["seconds"] >= 0.3
    assert summary["status"] == "finished"
    lines = lines_of(tmp_path / "race")
    assert [line["step"] for line in lines] == list(range(1, summary["steps"] + 1))
    assert lines[-1]["seconds"] == summary["seconds"]
    assert sum("val" in line for line in lines) > 1
    # Other evaluations, the same parameters.
    go(plan("sgd", "digits", steps=summary["steps"], decay="none"), tmp_path / "replay", every_step=True)
    check_same(tmp_path / "race", tmp_path / "replay")
    assert lines_of(tmp_path / "replay")[-1]["val"] == lines[-1]["val"]


def test_a_race_whose_rate_decays_has_a_number_of_steps_before_its_first(tmp_path, monkeypatch):
    race = plan("adam", "digits", budget=0.2)
    assert not race.by_clock
    monkeypatch.setattr(engine, "seconds_per_step", lambda program, least: 0.2 / 60)

    def interrupt(event):
        if isinstance(event, events.Progress) and event.step > 10:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        go(race, tmp_path / "race", listener=interrupt)
    assert race.steps is None
    assert read_json(tmp_path / "race" / "config.json")["plan"]["steps"] == 60
    monkeypatch.setattr(engine, "seconds_per_step", None)  # not measured again
    assert go(race, tmp_path / "race")["steps"] == 60
    go(plan("adam", "digits", steps=60), tmp_path / "whole")
    check_same(tmp_path / "race", tmp_path / "whole")
    assert without_times(lines_of(tmp_path / "race")) == without_times(lines_of(tmp_path / "whole"))


def test_a_race_by_the_clock_that_resumes_keeps_its_time(tmp_path):
    race, when = plan("sgd", "digits", budget=0.3, decay="none"), []

    def interrupt(event):
        if isinstance(event, events.Progress) and event.step > 20 and not when:
            when.append(event.step)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        go(race, tmp_path / "race", listener=interrupt)
    _, position = checkpoint.load(tmp_path / "race")
    summary = go(race, tmp_path / "race")
    assert summary["steps"] > position["step"] == when[0]
    assert summary["seconds"] >= max(0.3, position["training"])
    seconds = [line["seconds"] for line in lines_of(tmp_path / "race")]
    assert seconds == sorted(seconds)
    go(plan("sgd", "digits", steps=summary["steps"], decay="none"), tmp_path / "replay")
    check_same(tmp_path / "race", tmp_path / "replay")


def test_times_are_apart_and_add_up_over_resumptions(tmp_path, monkeypatch):
    """By a clock that counts how often it is read: each thing that is timed takes one second."""
    reads = itertools.count()
    for name in ("perf_counter", "process_time"):  # the second is read on one core
        monkeypatch.setattr(time, name, lambda: float(next(reads)))
    a_plan, pieces = plan(steps=4), []

    def interrupt(event):
        if isinstance(event, events.Progress):
            pieces.append(event.step)
            if len(pieces) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        go(a_plan, tmp_path, listener=interrupt)
    summary = go(a_plan, tmp_path, listener=interrupt)
    assert pieces == [1, 2, 3, 4]  # each is evaluated
    assert summary["seconds"] == 4
    assert summary["evaluation_seconds"] == 4
    assert summary["compile_seconds"] == 2
    assert [line["seconds"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]


def test_listeners_are_told_in_order(tmp_path):
    heard = []
    summary = go(plan("sgd", steps=2), tmp_path, listener=heard.append)
    started, compiled, *pieces, finished = heard
    assert started[:3] == ("saddle, sgd, seed 0", 0, 2)
    assert started.state.params.shape == (2,)
    assert compiled.seconds == summary["compile_seconds"] > 0
    assert [type(event).__name__ for event in pieces] == ["Progress", "Evaluated", "Progress", "Evaluated", "Saving"]
    assert [event.step for event in pieces] == [1, 1, 2, 2, 2]
    assert pieces[1].lines == pieces[0].lines == lines_of(tmp_path)[:1]
    assert {"train", "steps_per_second"} <= pieces[0].figures.keys()
    assert finished.summary == summary


def test_where_a_diverged_run_ends_depends_on_its_planalone(tmp_path, monkeypatch):
    """Not on how long its pieces are, nor on which steps have lines."""
    a_plan = plan("sgd", steps=200, learning_rate=30.0, seeds=(0, 1))
    found = []
    for number, (seconds, every_step) in enumerate([(0.0, False), (0.0, True), (1e9, False)]):
        monkeypatch.setattr(engine, "CHUNK_SECONDS", seconds)
        summary = go(a_plan, tmp_path / str(number), every_step=every_step)
        found.append({name: value for name, value in summary.items() if not name.endswith("seconds")})
        del found[-1]["seconds_per_step"]
        last = {line["seed"]: line for line in lines_of(tmp_path / str(number))}
        assert {str(seed): line["step"] for seed, line in last.items()} == summary["diverged"]
        assert all(line["train"] is None for line in last.values())
    assert found[0] == found[1] == found[2]
    assert found[0]["steps"] < 200
    assert found[0]["train"] == [None, None]


def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_from_it(tmp_path):
    whole = plan("exact", steps=400, learning_rate=0.01, momentum=0.4)
    go(whole, tmp_path / "whole", every_step=True)
    shown = []

    def interrupt(event):
        if isinstance(event, events.Progress):
            shown.append(event.figures)
            if len(shown) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as caught:
        go(whole, tmp_path / "cut", every_step=True, listener=interrupt)
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
    check_same(tmp_path / "whole", tmp_path / "cut")


KILLED = """
import os, signal, sys
from saddlefree.lab import checkpoint, cli

write, written = checkpoint.write_json, []

def killed(path, record):
    if len(written) == 4:  # the fifth one's state is there, its record is not
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(path)
    write(path, record)

checkpoint.write_json = killed
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("optimiser", "length"), [("adam", ("--steps", "60")), ("sgd", ("--budget", "0.5s"))], ids=["steps", "race"]
)
def test_kill_9_and_resume(optimiser, length, tmp_path):
    """Killed while its fifth checkpoint is written, a run ends with the bits of one that was never disturbed.

    Both have batches, and the first a rate that decays. A race by the clock makes as many steps as it can, and is
    compared with a run of so many steps. `benchmarks.kills` does the same at random moments of more optimisers.
    """
    command, cut = ["train", "digits", optimiser, "--resume"], tmp_path / "cut"
    command += ["--set", "decay=none"] if optimiser == "sgd" else []
    arguments = [*command, "--out", str(cut), *length]
    often = ["--checkpoint-every", "0.000001s"]  # after each evaluation
    ended = subprocess.run([sys.executable, "-c", KILLED, *arguments, *often], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(list((cut / "checkpoints").glob("*/state"))) == 3
    assert len(list((cut / "checkpoints").glob("*/record.json"))) == 2
    cli.main(arguments)
    steps = read_json(cut / "summary.json")["steps"]
    assert [line["step"] for line in lines_of(cut)] == list(range(1, steps + 1))
    cli.main([*command, "--out", str(tmp_path / "whole"), "--steps", str(steps)])
    check_same(tmp_path / "whole", cut)
    if "--steps" in length:
        assert without_times(lines_of(tmp_path / "whole")) == without_times(lines_of(cut))


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
    restored, position = checkpoint.restore(tmp_path, state)
    assert position == {"seconds": 2}
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"a": {"x": 3}, "c": 2}, r"has \['a'\]\['x'\] as float32\[2\], this run as float32\[3\]"),
        ({"a": {"x": 2}, "b": 2}, r"lacks the leaf \['b'\]"),
        ({"a": {"x": 2}}, r"has a leaf \['c'\] that this run has not"),
    ],
    ids=["shape", "missing", "extra"],
)
def test_a_checkpoint_of_another_layout_is_refused(wanted, message, tmp_path):
    def filled(lengths):
        return jax.tree.map(jax.numpy.zeros, lengths)

    checkpoint.save(tmp_path, 7, filled({"a": {"x": 2}, "c": 2}), {})
    with pytest.raises(
        UserError, match=rf"checkpoints/7 {message}: delete .*checkpoints to start anew, or resume with"
    ):
        checkpoint.restore(tmp_path, filled(wanted))
    dtypes = {"a": {"x": jax.numpy.zeros(2, int)}, "c": jax.numpy.zeros(2)}
    with pytest.raises(UserError, match=r"\['x'\] as float32\[2\], this run as int32\[2\]"):
        checkpoint.restore(tmp_path, dtypes)


def test_leaves_are_found_by_their_names_and_not_by_their_order(tmp_path):
    checkpoint.save(tmp_path, 1, collections.OrderedDict(mean=jax.numpy.zeros(2), variance=jax.numpy.ones(2)), {})
    like = collections.OrderedDict(variance=jax.numpy.full(2, 5.0), mean=jax.numpy.full(2, 5.0))
    restored, _ = checkpoint.restore(tmp_path, like)
    np.testing.assert_array_equal(restored["mean"], [0, 0])
    np.testing.assert_array_equal(restored["variance"], [1, 1])


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    state = {"x": jax.numpy.arange(3.0)}
    checkpoint.save(tmp_path, 7, state, {})
    record = read_json(tmp_path / "checkpoints" / "7" / "record.json")
    assert record["layout"] == {"['x']": [[3], "float32"]}
    for version in (None, 1, checkpoint.VERSION + 1):
        write_json(tmp_path / "checkpoints" / "7" / "record.json", record | {"version": version})
        with pytest.raises(UserError, match=f"7 has version {version} of the format, this is version 2: delete"):
            checkpoint.restore(tmp_path, state)


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
        go(plan(), tmp_path, resume=False)
    for other, changed in (
        (plan(steps=31), "steps was 30, is 31"),
        (plan(learning_rate=0.5), "learning_rate was 0.003, is 0.5"),
        (plan("sgd"), "optimiser was 'adam', is 'sgd'"),
    ):
        message = re.escape(f"holds another run ({changed}): resume with the same arguments, or choose another --out")
        with pytest.raises(UserError, match=message):
            go(other, tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        open_folder(blocked / "run", {"plan": {}}, resume=False)


def test_metrics_are_null_where_not_finite_and_whole_lines_only(tmp_path):
    metrics = Metrics(tmp_path, 0)
    metrics(events.Progress(2, 2, {}, [{"step": 1, "train": float("inf")}, {"step": 2, "train": 1.5}]))
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
            go(plan(steps=2), tmp_path)
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


def test_exact_refuses_what_is_too_large():
    large = load("digits", None)._replace(init=lambda key: (jax.numpy.zeros(5000), None))
    program = Program(plan("exact", "digits"), large)
    with pytest.raises(UserError, match="takes at most max_size=4096 parameters, got 5000"):
        program.start()


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    hold = "import sys, pathlib; from saddlefree.lab.process import alone\n"
    hold += "with alone(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="in use by another process"), alone(tmp_path, patience=0.2):
            pass
        other.stdin.close()
    with alone(tmp_path, patience=0.2):
        pass
