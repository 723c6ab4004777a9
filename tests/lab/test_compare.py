"""Comparisons: rows, seeds, resuming, and the command line around them."""

import re

import numpy as np
import pytest

from saddlefree.lab import cli, events
from saddlefree.lab.metrics import Metrics, read_json, read_lines


def saddlefree(*arguments, code=0):
    """Runs a command; its exit code must be `code`."""
    if not code:
        return cli.main(arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == code
    return None


def one_line(capsys):
    """The single line of an error."""
    text = capsys.readouterr().err.strip()
    assert "\n" not in text
    return re.sub(r"\s+", " ", text)


def test_a_comparison_has_a_row_for_each_optimiser(compare, tmp_path):
    summary = compare("saddle", ["sgd", "newton", "series"], tmp_path, seeds=3, epochs=40)
    assert summary == read_json(tmp_path / "summary.json")
    rows = {row["optimiser"]: row for row in summary["rows"]}
    assert list(rows) == ["sgd", "newton", "series"]
    assert all(row["seeds"] == 3 and row["diverged"] == 0 for row in rows.values())
    # Newton ends on the saddle, the others in a minimum.
    assert rows["newton"]["train"] == pytest.approx(0, abs=1e-6)
    assert rows["series"]["train"] == pytest.approx(-0.25, abs=1e-3)
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    for name in rows:
        assert {line["seed"] for line in lines if line["optimiser"] == name} == {0, 1, 2}
        finals = [line["train"] for line in lines if line["optimiser"] == name and line["step"] == 40]
        assert rows[name]["train"] == pytest.approx(np.median(finals))
    config = read_json(tmp_path / "config.json")
    assert config["command"] == "compare"
    assert config["plan"]["series"]["steps"] == config["epochs"] == 40
    assert [rows[name]["together"] for name in rows] == [3, 1, 3]
    assert all(row["compile_seconds"] > 0 and row["evaluation_seconds"] > 0 for row in rows.values())
    # A run's folder is that of `saddlefree train`.
    assert read_json(tmp_path / "runs" / "sgd" / "config.json")["plan"] == config["plan"]["sgd"]
    assert config["seeds"] == [0, 1, 2]
    assert {"saddlefree", "jax"} <= set(config["versions"])


def test_what_is_finished_is_not_run_again(compare, tmp_path):
    compare("saddle", ["sgd", "adam"], tmp_path, seeds=2, epochs=5)
    (tmp_path / "runs" / "adam" / "summary.json").unlink()
    heard = []
    compare("saddle", ["sgd", "adam"], tmp_path, seeds=2, epochs=5, resume=True, listener=heard.append)
    assert [event.label for event in heard if isinstance(event, events.Started)] == ["saddle, adam, 2 seeds"]


def test_a_budget_is_the_same_for_all_and_seeds_run_alone(compare, tmp_path):
    summary = compare("saddle", ["sgd", "adam"], tmp_path, seeds=2, budget=0.1)
    sgd, adam = summary["rows"]
    assert sgd["seconds"] >= 0.1
    # Adam's rate decays: both seeds end after the number of steps that their folders hold.
    folders = [tmp_path / "runs" / "adam" / f"seed-{seed}" for seed in (0, 1)]
    steps = [read_json(folder / "config.json")["plan"]["steps"] for folder in folders]
    assert [read_json(folder / "summary.json")["steps"] for folder in folders] == steps
    assert adam["seconds"] > 0
    assert sgd["together"] == adam["together"] == 1
    assert (tmp_path / "runs" / "adam" / "seed-1" / "summary.json").exists()


def test_evaluations_are_as_many_as_asked_for_and_a_few_early_ones(compare, tmp_path):
    compare("saddle", ["sgd"], tmp_path, seeds=1, epochs=64, evaluations=2)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 4, 8, 16, 32, 64]


def test_the_commands_from_train_to_report(tmp_path, capsys):
    out = str(tmp_path / "run")
    saddlefree("train", "saddle", "newton", "--epochs", "10", "--seed", "3", "--out", out)
    assert "finished after 10 steps" in capsys.readouterr().out
    config = read_json(tmp_path / "run" / "config.json")
    assert config["seeds"] == [3]
    assert len(list(read_lines(tmp_path / "run" / "metrics.jsonl"))) == 10
    saddlefree("train", "saddle", "newton", "--epochs", "10", "--seed", "3", "--out", out, "--resume")
    saddlefree("report", out)
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
    out = str(tmp_path / "all")
    saddlefree(
        "compare", "saddle", "--optimisers", "sgd,adam", "--set", "sgd.learning_rate=0.2", "--seeds", "2",
        "--epochs", "5", "--out", out,
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "adam" in shown
    assert "report.html" in shown
    assert read_json(tmp_path / "all" / "config.json")["optimisers"]["sgd"]["learning_rate"] == 0.2


def test_folders_that_cannot_be_used(tmp_path, capsys, monkeypatch):
    taken = tmp_path / "taken"
    saddlefree("train", "saddle", "sgd", "--epochs", "1", "--out", str(taken))
    capsys.readouterr()
    saddlefree("train", "saddle", "sgd", "--epochs", "1", "--out", str(taken), code=2)
    assert "holds a run already: go on with --resume" in one_line(capsys)
    (tmp_path / "file").write_text("")
    saddlefree("train", "saddle", "sgd", "--epochs", "1", "--out", str(tmp_path / "file" / "run"), code=2)
    assert "cannot be written" in one_line(capsys)
    # A disk that fills up while metrics are written.
    monkeypatch.setattr(Metrics, "__call__", lambda *args: (_ for _ in ()).throw(OSError(28, "full", "metrics.jsonl")))
    saddlefree("train", "saddle", "sgd", "--epochs", "1", "--out", str(tmp_path / "full"), code=2)
    assert one_line(capsys).endswith("metrics.jsonl: No space left on device")
