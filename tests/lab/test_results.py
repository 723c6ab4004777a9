"""Results that are kept, the page made of them, and the list of what is to be done."""

import json
import pathlib
import shutil

import pytest

from saddlefree.lab import optimisers, paper, problems, reproduce, results, studies
from saddlefree.lab.compare import compare
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import read_json, read_lines

ROOT = pathlib.Path(__file__).parents[2]
PLAN = {"seeds": 2, "epochs": 20, "budget": None, "configs": 0, "changes": {}}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Folders of two small comparisons."""
    folder = tmp_path_factory.mktemp("compared")
    for name in ("sgd", "adam"):
        compare("saddle", [name], folder / name, seeds=2, epochs=20)
    return folder


@pytest.fixture
def kept(compared, tmp_path):
    for name in ("adam", "sgd"):
        results.add(tmp_path / "results", "saddle", name, compared / name, PLAN, None)
    results.write_page(tmp_path / "results", tmp_path / "docs", ["uci-energy: sgd"])
    return tmp_path


def test_the_committed_page_is_what_the_committed_results_say():
    assert (ROOT / "docs" / "results.md").read_text() == results.page(ROOT / "results")


def test_what_is_left_out_is_what_has_no_results():
    assert read_json(ROOT / "results" / "left-out.json") == reproduce.left_out(ROOT / "results")


def test_a_row_holds_what_was_compared(kept, compared):
    record = json.loads((kept / "results" / "saddle.json").read_text())
    assert [row["name"] for row in record["rows"]] == ["sgd", "adam"]
    for row in record["rows"]:
        (summary,) = read_json(compared / row["name"] / "summary.json")["rows"]
        assert {name: row[name] for name in summary} == summary
        assert row["steps"] == 20
        assert row["values"] == optimisers.configured(row["name"], "saddle", {})
        text = (kept / "docs" / "results.md").read_text()
        assert results.tables.with_error(row, "train") in text
    assert "- uci-energy: sgd" in text


def test_a_row_is_replaced_and_the_others_stay(kept, compared):
    folder = kept / "results"
    before = read_json(folder / "saddle.json")["rows"]
    results.add(folder, "saddle", "adam", compared / "sgd", {**PLAN, "configs": 3}, None)
    after = read_json(folder / "saddle.json")["rows"]
    assert [row["name"] for row in after] == ["adam", "sgd"]
    assert after[1] == before[0]
    assert after[0]["method"] == "sgd"
    assert results.holds(folder, "saddle", "adam", {**PLAN, "configs": 3})
    assert not results.holds(folder, "saddle", "adam", PLAN)
    names = [line["name"] for line in read_lines(folder / "saddle.jsonl")]
    assert sorted(set(names)) == ["adam", "sgd"]
    assert names.count("adam") == names.count("sgd")


def test_time_to_a_loss_is_where_the_curve_first_falls_below(kept):
    folder = kept / "results"
    (line,) = [
        line
        for line in read_lines(folder / "saddle.jsonl")
        if (line["name"], line["along"], line["loss"]) == ("sgd", "seconds", "train")
    ]
    curve = results._curves(folder, "saddle")["seconds", "train"]["sgd"]
    assert results._reach(curve, line["median"][3]) == line["x"][3]
    assert results._reach(curve, min(line["median"]) - 1) is None


def test_a_study_brings_its_tables_and_figures(tmp_path):
    made, out, docs = tmp_path / "made", tmp_path / "results", tmp_path / "docs"
    studies.study("saddle", made, steps=2)
    results.add_study(out, docs, "saddle", made, {"options": []})
    results.write_page(out, docs, [])
    assert results.holds(out, "studies", "saddle", {"options": []})
    (row,) = read_json(out / "studies.json")["rows"]
    text = (docs / "results.md").read_text()
    assert row["title"] in text
    for figure in row["figures"]:
        assert f"({results.FIGURES}/{figure['file']})" in text
        assert (docs / results.FIGURES / figure["file"]).read_bytes()[:4] == b"\x89PNG"


def test_what_is_said_may_use_every_row(kept):
    (kept / "results" / "reading.md").write_text('Adam: {{ number(row("saddle", "adam").train) }}.\n')
    row = read_json(kept / "results" / "saddle.json")["rows"][1]
    assert f"Adam: {results.tables.number(row['train'])}." in results.page(kept / "results")
    (kept / "results" / "reading.md").write_text('{{ row("saddle", "newton").train }}')
    with pytest.raises(UserError, match=r"reading.md speaks of newton on saddle, which has no results"):
        results.page(kept / "results")


def test_every_item_can_be_done():
    names = [reproduce.full_name(item) for item in reproduce.ITEMS]
    assert len(set(names)) == len(names)
    for item in reproduce.ITEMS:
        if isinstance(item, reproduce.Study):
            studies.find(item.name)
        else:
            problems.find(item.part)
            optimisers.configured(item.optimiser, item.part, dict(item.changes))
    ours = {(item.part, item.optimiser) for item in reproduce.ITEMS if isinstance(item, reproduce.Item)}
    images = {pair for pair in paper.RESULTS if pair[0] in ("svhn", "cifar-10")}
    assert paper.RESULTS.keys() - images <= ours, "rows of the paper's table that are never measured"


def fake(compared, calls, broken=()):
    """In the place of commands: leaves the folder of a comparison."""

    def command(arguments, say):
        calls.append(arguments[:3])
        if arguments[2] == "--optimisers" and arguments[3] in broken:
            raise UserError("it ended with 2")
        shutil.copytree(compared / arguments[3], arguments[arguments.index("--out") + 1])

    return command


@pytest.fixture
def small(monkeypatch, compared):
    items = [reproduce.Item("saddle", name, 2, epochs=20) for name in ("adam", "sgd")]
    monkeypatch.setattr(reproduce, "ITEMS", items)
    calls = []
    monkeypatch.setattr(reproduce, "_command", fake(compared, calls))
    return calls


def test_what_has_results_is_not_done_again(small, tmp_path):
    folders = tmp_path / "work", tmp_path / "results", tmp_path / "docs"
    assert reproduce.reproduce(*folders, budget=100, only=["saddle:sgd"]) == ["saddle:adam"]
    assert len(small) == 1
    assert reproduce.reproduce(*folders, budget=100) == []
    assert len(small) == 2
    shutil.rmtree(tmp_path / "work")
    assert reproduce.reproduce(*folders, budget=100) == []
    assert len(small) == 2
    assert "Nothing that was planned." in (tmp_path / "docs" / "results.md").read_text()


def test_what_there_is_no_time_for_is_named(small, tmp_path):
    left = reproduce.reproduce(tmp_path / "work", tmp_path / "results", tmp_path / "docs", budget=-1)
    assert left == ["saddle:adam", "saddle:sgd"]
    assert not small
    assert "- saddle:adam\n" in (tmp_path / "docs" / "results.md").read_text()


def test_what_fails_is_left_out_alone(small, tmp_path, monkeypatch, compared):
    monkeypatch.setattr(reproduce, "_command", fake(compared, small, broken=["adam"]))
    said = []
    folders = tmp_path / "work", tmp_path / "results", tmp_path / "docs"
    assert reproduce.reproduce(*folders, budget=100, say=said.append) == ["saddle:adam"]
    assert said == ["it ended with 2"]
    assert [row["name"] for row in read_json(tmp_path / "results" / "saddle.json")["rows"]] == ["sgd"]


def test_an_unknown_part_is_named(tmp_path):
    with pytest.raises(UserError, match="uci-enrgy"):
        reproduce.reproduce(tmp_path, tmp_path, tmp_path, budget=1, only=["uci-enrgy"])
