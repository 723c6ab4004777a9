"""Tuning: what is drawn, what is kept of trials, and coming back after a crash."""

import json
import math
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

pytest.importorskip("ray")

from saddlefree.lab import cli, events, search, tune
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import read_json, read_lines, write_json
from saddlefree.lab.optimisers import OPTIMISERS, configured
from saddlefree.lab.plan import build, cores
from saddlefree.lab.run import Interrupted, load

SEARCHED = [name for name, entry in OPTIMISERS.items() if any(s.search for s in entry.settings.values())]


def draw(optimiser="adam", problem="saddle", count=2, seed=0, examples=1150, **fixed):
    return search.draw(problem, optimiser, fixed, examples, count, seed)


def record(number=0, status="finished", val=1.0, **values):
    return {"trial": number, "values": values, "status": status, "val": val, "epoch": 10.0, "seconds": 0.1}


@pytest.mark.parametrize("name", SEARCHED)
def test_configurations_are_the_registered_one_and_random_ones_within_their_ranges(name):
    drawn = draw(name, "digits", 50, seed=3)
    assert drawn[0] == {"batch_size": 100, **configured(name, "digits", {})}
    assert drawn == draw(name, "digits", 50, seed=3)
    assert drawn[1:] != draw(name, "digits", 50, seed=4)[1:]
    assert drawn[:20] == draw(name, "digits", 20, seed=3)
    for values in drawn[1:]:
        for key, setting in OPTIMISERS[name].settings.items():
            if setting.search:
                low, high = setting.search
                assert low <= values[key] <= high
                assert isinstance(values[key], int if setting.whole else float)
            else:
                assert values[key] == drawn[0][key]


@pytest.mark.parametrize("name", SEARCHED)
def test_random_values_have_the_distribution_that_the_registry_says(name):
    """By Kolmogorov and Smirnov: a true distribution is further off than the bound once in a thousand times."""
    count = 4000
    drawn = draw(name, count=count + 1)[1:]
    for key, setting in OPTIMISERS[name].settings.items():
        if not setting.search or key == "order":
            continue
        values = np.sort([float(values[key]) for values in drawn])
        # A whole number k stands for what lies between k and k + 1.
        low, high, reached = setting.search[0], setting.search[1] + setting.whole, values + setting.whole
        if setting.log:
            low, high, reached = np.log(low), np.log(high), np.log(reached)
        expected = (reached - low) / (high - low)
        below = np.searchsorted(values, values, "right") / count
        assert np.abs(below - expected).max() < 1.95 / math.sqrt(count)


def test_terms_and_orders_fit():
    drawn = draw("series", count=3000)[1:]
    assert {values["terms"] for values in drawn} == set(range(1, 21))
    for terms in range(1, 21):
        orders = {values["order"] for values in drawn if values["terms"] == terms}
        assert orders == set(range((terms - 1) // 2 + 1))


def test_a_fixed_order_or_number_of_terms_moves_the_other():
    drawn = draw("series", count=300, order="8")
    assert all(values["order"] == 8 and values["terms"] >= 17 for values in drawn)
    assert {values["terms"] for values in drawn} == {17, 18, 19, 20}
    drawn = draw("series", count=300, terms="6")
    assert all(values["terms"] == 6 for values in drawn)
    assert drawn[0]["order"] == 2
    assert {values["order"] for values in drawn} == {0, 1, 2}


@pytest.mark.parametrize(
    ("examples", "sizes"),
    [(50_000, [50, 100, 200, 400, 800, 1600, 3200]), (1150, [50, 100, 200, 400, 800]), (49, [49]), (1, [1])],
)
def test_batch_sizes(examples, sizes):
    drawn = draw("sgd", "digits", 300, examples=examples)
    assert sorted({values["batch_size"] for values in drawn[1:]}) == sizes
    assert search.space("digits", "sgd", {}, examples)["batch_size"]["range"] == [sizes[0], sizes[-1]]
    assert all("batch_size" not in values for values in draw("sgd", "diabetes", 10, examples=examples))


def test_fixed_values_are_not_searched():
    fixed = {"learning_rate": "0.25", "batch_size": "70", "decay": "linear"}
    for values in draw("adam", "digits", 50, **fixed):
        assert (values["learning_rate"], values["batch_size"], values["decay"]) == (0.25, 70, "linear")
    assert set(search.space("digits", "adam", fixed, 1150)) == {"epsilon", "one_minus_beta1", "one_minus_beta2"}
    with pytest.raises(UserError, match="sgd has nothing left to search on saddle: leave out a --set, or use train"):
        draw("sgd", "saddle", learning_rate="0.1")


def test_the_best_is_the_lowest_of_those_that_went_to_the_end():
    trials = [record(0, val=2.0), record(1, "stopped", 0.5), record(2), record(3, "failed", 0.1)]
    trials += [record(4, "diverged", None), record(5, "unfinished", None)]
    assert search.best(trials)["trial"] == 2
    assert search.best([trial for trial in trials if trial["status"] != "finished"])["trial"] == 1
    assert search.best(trials[3:]) is None
    assert tune._summary("saddle", "sgd", trials[3:], ["learning_rate"], "")["commands"] == []


@pytest.mark.parametrize("name", SEARCHED)
def test_the_commands_stand_for_the_best_values(name, tmp_path):
    fixed = {"batch_size": "64"} if name == "adam" else {}
    values = draw(name, "digits", **fixed)[1]
    write_json(tmp_path / "trials.json", [record(**values)])  # where a resumed search has them from
    names = [*search.space("digits", name, fixed, 1150), *fixed]
    summary = tune._summary("digits", name, read_json(tmp_path / "trials.json"), names, "")
    train, compare = (shlex.split(command) for command in summary["commands"])
    assert train[:4] == ["saddlefree", "train", "digits", name]
    assert compare[:5] == ["saddlefree", "compare", "digits", "--optimisers", name]
    for words, prefix in ((train[4:], ""), (compare[5:], f"{name}.")):
        assert set(words[::2]) == {"--set"}
        assert all(word.startswith(prefix) for word in words[1::2])
        changes = cli.pairs([word.removeprefix(prefix) for word in words[1::2]])
        assert configured(name, "digits", changes) == values


def told(number, error=None, **last_result):
    """A trial as Ray hands it to a callback."""
    return SimpleNamespace(config={"trial": number}, last_result=last_result, get_error=lambda: error)


def test_each_trial_ends_in_one_way(tmp_path):
    shown = []
    trials = tune._Trials(tmp_path, draw(count=5), lambda event: shown.append([r["status"] for r in event.trials]))
    checkpoints = [tmp_path / "trials" / f"{number:03}" / "checkpoints" for number in range(5)]
    for folder in checkpoints:
        folder.mkdir(parents=True)
    for number in range(5):
        trials.on_trial_result(0, [], told(number), {"val": 2.0, "epoch": 1.0, "node": "a", "done": False})
    assert not all(trials.done())
    trials.on_trial_complete(0, [], told(0, epoch=1.0))
    trials.on_trial_result(0, [], told(1), {"val": 0.5, "epoch": 9.0, "seconds": 0.3})
    trials.on_trial_complete(0, [], told(1, status="finished"))
    trials.on_trial_result(0, [], told(2), {"val": tune.WORST, "train": math.nan, "epoch": 4.0})
    trials.on_trial_complete(0, [], told(2, status="diverged"))
    trials.on_trial_error(0, [], told(3, "Traceback:\n  line\nRuntimeError: RESOURCE_EXHAUSTED: out of memory\n"))
    assert shown[-1] == ["stopped", "finished", "diverged", "failed", "unfinished"]
    assert not all(trials.done())
    trials.on_trial_error(0, [], told(4))
    assert all(trials.done())
    kept = read_json(tmp_path / "trials.json")
    assert [each["status"] for each in kept] == ["stopped", "finished", "diverged", "failed", "failed"]
    assert [each["val"] for each in kept] == [2.0, 0.5, None, 2.0, 2.0]
    assert kept[1] | {"epoch": 9.0, "seconds": 0.3, "node": "a"} == kept[1]
    assert [each.get("error") for each in kept[3:]] == [
        "RuntimeError: RESOURCE_EXHAUSTED: out of memory",
        "no reason given",
    ]
    assert not any(folder.exists() for folder in checkpoints)


def test_a_trial_that_is_done_stays_as_it_is(tmp_path):
    ended = record(0, "stopped", 0.5, learning_rate=0.1)
    write_json(tmp_path / "trials.json", [ended, record(1, "unfinished", None)])
    trials = tune._Trials(tmp_path, [], events.ignore)
    trials.on_trial_result(0, [], told(0), {"val": 0.1, "epoch": 50.0})
    trials.on_trial_complete(0, [], told(0, status="finished"))
    trials.on_trial_error(0, [], told(0, "lost"))
    trials.write()
    assert read_json(tmp_path / "trials.json")[0] == ended


def test_a_trial_that_reports_again_replaces_nothing_newer(tmp_path):
    write_json(tmp_path / "trials.json", [record(0, "unfinished", 0.5)])  # after 10 epochs
    trials = tune._Trials(tmp_path, [], events.ignore)
    for epoch, val, known in ((3.0, 2.0, (10.0, 0.5)), (10.0, 0.5, (10.0, 0.5)), (11.0, 0.7, (11.0, 0.7))):
        trials.on_trial_result(0, [], told(0), {"val": val, "epoch": epoch})
        assert (trials.records[0]["epoch"], trials.records[0]["val"]) == known


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nobody_listens_is_one_line_at_once(address, tmp_path, monkeypatch):
    monkeypatch.setattr(tune.ray, "init", None)  # which would try for a minute
    with pytest.raises(UserError, match=rf"Ray cannot be reached at {address} \(Connection refused\): is it running"):
        tune.tune("saddle", "sgd", tmp_path, address=address)


def test_what_listens_at_an_address_may_not_be_ray(tmp_path, monkeypatch, capfd):
    def init(**options):
        assert options["address"] == address
        assert os.environ[patience] == "3"  # seconds, in place of 20
        os.write(2, b"a warning\n")
        raise ConnectionError("Failed to connect\nfor many reasons")

    monkeypatch.setattr(tune.ray, "init", init)
    patience = "RAY_gcs_server_port_wait_time_s"
    monkeypatch.setenv(patience, "")  # so that it is removed again
    monkeypatch.delenv(patience)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            UserError, match=rf"Ray cannot be reached at {address} \(Failed to connect\): is it running"
        ):
            tune.tune("saddle", "sgd", tmp_path, address=address)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("address", ["6379", "localhost", "localhost:ray", "localhost:70000", ":6379"])
def test_an_address_has_a_host_and_a_port(address, tmp_path, monkeypatch):
    monkeypatch.setattr(tune.ray, "init", None)
    with pytest.raises(UserError, match=f"address must be HOST:PORT such as 127.0.0.1:6379, got '{address}'"):
        tune.tune("saddle", "sgd", tmp_path, address=address)


def test_a_damaged_record_of_trials_is_named(tmp_path):
    (tmp_path / "trials.json").write_text('[{"trial": 0,')
    with pytest.raises(UserError, match=r"trials.json is damaged .*restore it from a copy"):
        tune._Trials(tmp_path, draw(), events.ignore)


@pytest.fixture
def reports(monkeypatch):
    """What trials report, in place of Ray."""
    found = []
    monkeypatch.setattr(tune.ray.tune, "report", found.append)
    monkeypatch.setattr(tune.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0123456789"))
    return found


def trial(folder, done=False, epochs=40.0, **changes):
    plan = build("saddle", "sgd", load("saddle", None), changes=changes, epochs=epochs)
    tune._trial({"trial": 0}, plans=[plan], done=[done], folder=folder, files=[], data_dir=None)


def test_a_trial_that_is_done_reports_again_and_runs_nothing(tmp_path, reports, monkeypatch):
    trial(tmp_path)
    lines = list(read_lines(tmp_path / "trials" / "000" / "metrics.jsonl"))
    known = [(line["epoch"], line["val"]) for line in lines]
    assert [epoch for epoch, _ in known] == list(range(1, 41))
    assert [(each["epoch"], each["val"]) for each in reports] == known
    assert all(each["node"] == "01234567" for each in reports)
    assert [each.get("status") for each in reports] == [None] * 39 + ["finished"]
    reports.clear()
    monkeypatch.setattr(tune, "run", None)
    trial(tmp_path, done=True)
    assert [(each["epoch"], each["val"]) for each in reports] == known
    assert not any("status" in each for each in reports)


def test_a_trial_that_was_broken_off_goes_on(tmp_path, reports, monkeypatch):
    trial(tmp_path / "whole")
    whole = reports[-1]
    reports.clear()

    def broken(figures):
        reports.append(figures)
        if figures["epoch"] == 7:
            raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(tune.ray.tune, "report", broken)
        with pytest.raises(SystemExit):
            trial(tmp_path / "cut")
    reports.clear()
    trial(tmp_path / "cut")
    # First what is known, then what is new, though it starts again: there was no checkpoint yet.
    assert [each["epoch"] for each in reports] == [*range(1, 41)]
    assert reports[-1]["status"] == "finished"
    assert reports[-1]["val"] == whole["val"]


def test_a_trial_that_diverges_says_so_and_keeps_saying_it(tmp_path, reports):
    for _ in range(2):  # the second time its summary is there already
        reports.clear()
        trial(tmp_path, epochs=200.0, learning_rate=30.0)
        assert reports[-1]["status"] == "diverged"
        assert reports[-1]["val"] == tune.WORST
        assert all(math.isfinite(each["val"]) for each in reports[:-1])
        assert len(reports) > 1


def test_a_search_is_interrupted_and_goes_on_in_the_same_folder(tmp_path, monkeypatch):
    """All of it but Ray."""
    monkeypatch.setattr(tune, "connected", lambda *args: nullcontext())

    def search(end):
        def work(plans, trials, folder, *rest):
            (folder / "ray").mkdir()
            for number, plan in enumerate(plans[:end]):
                trials.on_trial_result(0, [], told(number), {"val": plan.values["learning_rate"], "epoch": 50.0})
                trials.on_trial_complete(0, [], told(number, status="finished"))
            if end < len(plans):
                raise KeyboardInterrupt

        monkeypatch.setattr(tune, "_search", work)

    search(2)
    with pytest.raises(Interrupted, match="interrupted with 2 of 4 trials done; go on with --resume") as caught:
        tune.tune("saddle", "sgd", tmp_path, configs=4)
    assert caught.value.code == 130
    assert not (tmp_path / "ray").exists()
    with pytest.raises(UserError, match="holds a run already: go on with --resume"):
        tune.tune("saddle", "sgd", tmp_path, configs=4)
    with pytest.raises(UserError, match=r"holds another run \(configs was 4, is 5\)"):
        tune.tune("saddle", "sgd", tmp_path, configs=5, resume=True)
    search(4)
    summary = tune.tune("saddle", "sgd", tmp_path, configs=4, budget=1.0, resume=True)
    rates = [values["learning_rate"] for values in draw("sgd", count=4)]
    assert summary == read_json(tmp_path / "summary.json")
    assert summary["best"]["values"]["learning_rate"] == min(rates)
    assert [each["val"] for each in read_json(tmp_path / "trials.json")] == rates
    monkeypatch.setattr(tune, "_search", None)  # nothing is left to be run
    assert tune.tune("saddle", "sgd", tmp_path, configs=4, resume=True) == summary


def test_more_than_ray_has(tmp_path, monkeypatch):
    monkeypatch.setattr(tune.ray, "cluster_resources", lambda: {"CPU": 2.0})
    for resources, message in (
        ({"cpu": 3, "gpu": 0}, "cpus must be at most the 2 that Ray has, got 3"),
        ({"cpu": 1, "gpu": 0.5}, "gpus must be at most the 0 that Ray has, got 0.5"),
    ):
        with pytest.raises(UserError, match=message):
            tune._search([], tune._Trials(tmp_path, [], events.ignore), tmp_path, [], None, 10.0, 1.0, resources)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["saddle", "sgd", "--configs", "0"], "configs must be a whole number from 1 to 100000, got 0"),
        (["saddle", "sgd", "--max-epochs", "0"], "max-epochs must be a number from 1e-09 to 1000000000, got 0"),
        (["saddle", "sgd", "--budget", "soon"], "a time must be a number > 0 with s, min or h after it"),
        (["saddle", "sgd", "--set", "momentun=0"], "'momentun' is not a hyperparameter of sgd: did you mean momentum"),
        (["sadle", "sgd"], "problem 'sadle' is not known: did you mean saddle"),
    ],
)
def test_an_error_is_said_before_ray_starts(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune.ray, "init", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_kill_9_and_resume(tmp_path):
    """Trials run one after another; the rate is such that some of them diverge, before ASHA can stop them."""
    out, rate = tmp_path / "search", 2.5
    options = f"--set learning_rate={rate} --configs 3 --seed 35 --max-epochs 4000 --cpus {cores()} --resume --out"
    command = [sys.executable, "-m", "saddlefree.lab.cli", "tune", "saddle", "exact", *options.split(), str(out)]
    started = set()

    def go(until=lambda: False):
        """Runs the command, kills it when `until` says so, and returns its exit code."""
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 300
        try:
            while process.poll() is None and not until():
                assert time.monotonic() < deadline
                started.update(psutil.Process(process.pid).children(recursive=True))
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        return process.returncode

    def ended():
        trials = json.loads((out / "trials.json").read_text()) if (out / "trials.json").exists() else []
        return [each for each in trials if each["status"] != "unfinished"]

    # Short, for the names of Ray's sockets; without pytest's eight devices; and no worker waits for other tests.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short, (tmp_path / "printed").open("w+") as printed:
        flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
        environment = os.environ | {"RAY_TMPDIR": short, "XLA_FLAGS": flags, "RAY_worker_niceness": "0"}
        try:
            assert go(until=ended) == -9
            before = ended()
            assert 0 < len(before) < 3
            assert go() == 0, (tmp_path / "printed").read_text()
        finally:
            for process in started:  # two of Ray's processes outlive a killed search by a minute
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(started, timeout=10)
    trials = ended()
    assert [each["trial"] for each in trials] == list(range(3))
    assert [trials[each["trial"]] for each in before] == before
    # x ← x + p with p ← μp − ηx/(1 + λ) grows where η/(1 + λ) > 2(1 + μ).
    grows = [rate / (1 + each["values"]["damping"]) > 2 * (1 + each["values"]["momentum"]) for each in trials]
    assert [each["status"] == "diverged" for each in trials] == grows
    assert [each["val"] is None for each in trials] == grows
    assert grows == [True, True, False]
    for each in trials:
        low, high = {"diverged": (1, 250), "stopped": (250, 3999), "finished": (4000, 4000)}[each["status"]]
        assert low <= each["epoch"] <= high
        assert (out / "trials" / f"{each['trial']:03}" / "metrics.jsonl").exists()
    summary = read_json(out / "summary.json")
    assert summary["best"] == search.best(trials)
    text = (tmp_path / "printed").read_text()
    assert all(line in text for line in summary["commands"])
    assert "finished" in text
    assert "<html" in (out / "report.html").read_text()
    assert not (out / "ray").exists()
