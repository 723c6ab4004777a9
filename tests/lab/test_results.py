"""Records of results, the pages that quote them, and the list of what is to be done."""

import pathlib
import re
import shutil

import pytest

from saddlefree.lab import optimisers, paper, problems, records, reproduce, results, studies
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import read_json
from saddlefree.lab.studies import saddle

ROOT = pathlib.Path(__file__).parents[2]
PLAN = {"seeds": 2, "epochs": 20, "budget": None, "configs": 0, "changes": {}}


@pytest.fixture(scope="module")
def compared(compare, tmp_path_factory):
    """Folders of two small comparisons."""
    folder = tmp_path_factory.mktemp("compared")
    for name in ("sgd", "adam"):
        compare("saddle", [name], folder / name, seeds=2, epochs=20)
    return folder


@pytest.fixture
def kept(compared, tmp_path):
    for name in ("adam", "sgd"):
        results.add(tmp_path / "results", f"saddle/{name}", compared / name, PLAN)
    results.draw(tmp_path / "results", tmp_path / "docs", "saddle")
    return tmp_path


def test_pages_are_what_the_records_say(tmp_path):
    """All of them: a number that is not its record's, or a block that is not rendered anew, changes the page."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    shutil.copy(ROOT / "README.md", tmp_path)
    assert reproduce.refresh(ROOT / "results", tmp_path / "docs") == []


def test_figures_of_all_records_are_there():
    shown = {path.name for path in (ROOT / "docs" / results.FIGURES).iterdir()}
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(rf"\({results.FIGURES}/(.*?)\)", page.read_text()):
            assert name in shown
    for problem in problems.PROBLEMS:
        for record in results.rows(ROOT / "results", problem):
            assert {f"{problem}-{key}.png" for key in record["curves"] if not key.startswith("val")} <= shown


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_measured_numbers_have_keys(page):
    text = (ROOT / page).read_text()
    assert not re.search(r"<!-- \S+/\S+ .*-->", records.KEYED.sub("", text)), "a key without a number before it"
    found = [one for one in unkeyed(text) if not any(known in one for known in NOT_MEASURED)]
    assert not found, (
        "quote a record (saddlefree/lab/records.py says how), or add what is no measurement to NOT_MEASURED"
    )


NOT_MEASURED = (
    "Python 3.11",
    "JAX 0.10",
    "Orbax every 30 s",  # a default
    "it is the paper's: 5 minutes",
    "since 2.59",  # of Ray
    "all from 2.61",
    "digits of 8 × 8",
    "between 1e-8 and 1e3",  # bounds
    "entries of 1e-30 and 1e30",
    "by more than 3 %",  # a test's bound
    "2 × 2",
    "1.54·10⁻⁴",  # the published code's
    "a run of 80 s and a record",  # the plan of the race
    "up to 5, 20 and 80 s",
    "u_t = 1e-4 u_xx",  # an equation
    "20 updates take more than 1 GB",  # what the default chooses by
    "a matrix of P² numbers takes at most 256 MB",
    "after 20 s",  # marks of the race
    "after 80 s",
    "in 80 s makes",
    "on a GPU reached 1.2e-7 in 1,000 s",  # published
    "root mean square error of 2.8e-8",
    "f ≤ L + 1e-6 (F − L)",  # a definition
    "after 5 s and stays there",  # marks of the race
    "longer than 5 s to find the way",
    "one seed of three goes on to 320 s",
    "of seed 2 and Burgers 4.8e-11 (one seed, not recorded)",  # tried
    "after 320 s, one seed",
    "with after 5 s, with at its end",
    "eight rates from 3e-4 to 6.4e-2",  # the plan of the race on mini-batches
    "Where they differ by more than , 0.1 %,",  # defaults
    "differs from the next one by less than 1 %",
    "its first value, 1e-3",
)


def unkeyed(text):
    """What looks like a measured number and has no key, with a few words around it.

    That is a number with a unit of time, percent or "times" behind it, one with an exponent, and one with three digits
    or more of which some are behind the point. Code, links and blocks that are rendered from records do not count.
    """
    text = records.BLOCK.sub("", records.KEYED.sub("", text))
    text = re.sub(r"^```.*?^```|^(?: {4}|\t)[^\n]*|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    unit = r"\s?(?:s|ms|%|times|×|seconds|minutes|MB|GB)(?!\w)"
    kinds = rf"\d[\d,]*(?:\.\d+)?{unit}|\.\d+{unit}|\d(?:\.\d+)?e-?\d+|(?:[1-9]\d*\.|0?\.0*[1-9])\d\d+|[1-9]\d+\.\d+"
    for found in re.finditer(rf"(?<![\w.])(?:{kinds})(?![\w.]*\d)", text):
        yield " ".join(text[max(0, found.start() - 40) : found.end() + 40].split())


@pytest.mark.parametrize(
    "text",
    ["after 40 s", "3.3 times as", "a loss of 3.62e-4,", "is .330 and", "about 4 % off", "it has 0.345.", "12.5 ms"],
)
def test_a_measured_number_without_a_key_is_found(text):
    assert len(list(unkeyed(f"It is {text} here"))) == 1
    keyed = re.sub(r"([\d.e-]*\d)", r"\1<!-- uci-energy/adam train -->", text)
    assert not list(unkeyed(f"It is {keyed} here"))
    assert not list(unkeyed(f"`{text}`\n\n    {text}\n\n```\n{text}\n```\n<!-- begin x -->\n{text}\n<!-- end -->"))


def test_a_record_holds_what_was_compared(kept, compared):
    assert records.names(kept / "results", "saddle") == ["saddle/adam", "saddle/sgd"]
    for record in results.rows(kept / "results", "saddle"):
        (summary,) = read_json(compared / record["name"] / "summary.json")["rows"]
        assert summary.pop("optimiser") == record["optimiser"] == record["name"]
        assert record["summary"] == summary | {"steps": 20}
        assert record["plan"] == PLAN
        assert record["run"] == read_json(compared / record["name"] / "config.json")["plan"][record["name"]]
        assert record["values"] == optimisers.configured(record["name"], "saddle", {})
        assert {"python", "saddlefree", "jax"} <= record["versions"].keys()
        assert set(record["curves"]) == {"train-seconds", "test-seconds", "train-step", "test-step", "val-seconds"}
        assert [path.name for path in (kept / "docs" / results.FIGURES).glob("*train-step.png")] == [
            "saddle-train-step.png"
        ]


def test_a_record_is_replaced_and_the_others_stay(kept, compared):
    folder = kept / "results"
    before = (folder / "saddle" / "sgd.json").read_bytes()
    results.add(folder, "saddle/adam", compared / "sgd", {**PLAN, "configs": 3})
    assert (folder / "saddle" / "sgd.json").read_bytes() == before
    assert records.read(folder, "saddle/adam")["optimiser"] == "sgd"
    assert results.holds(folder, "saddle/adam", {**PLAN, "configs": 3})
    assert not results.holds(folder, "saddle/adam", PLAN)
    assert not results.holds(folder, "saddle/newton", PLAN)


def test_a_record_of_an_earlier_algorithm_is_named_and_measured_anew(kept):
    folder = kept / "results"
    records.write(folder, "saddle/adam", {**records.read(folder, "saddle/adam"), "version": "0.1.0"})
    assert not results.holds(folder, "saddle/adam", PLAN)
    assert results.blocks(folder)["results"]().count("adam (version 0.1.0)") == 2


def test_a_study_brings_its_tables_and_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(saddle, "METHODS", {"SGD": saddle.METHODS["SGD"]})
    made, out, docs = tmp_path / "made", tmp_path / "results", tmp_path / "docs"
    studies.study("saddle", made, steps=2)
    results.add_study(out, docs, "saddle", made, {"options": []})
    reproduce.refresh(out, docs)
    assert results.holds(out, "studies/saddle", {"options": []})
    record = records.read(out, "studies/saddle")
    text = (docs / "results.md").read_text()
    assert record["title"] in text
    assert record["summary"]["tables"] == read_json(made / "config.json")["tables"]
    for figure in record["figures"]:
        assert f"({results.FIGURES}/{figure['file']})" in text
        assert (docs / results.FIGURES / figure["file"]).read_bytes()[:4] == b"\x89PNG"


def test_every_item_can_be_done():
    names = [reproduce.full_name(item) for item in reproduce.ITEMS]
    assert len(set(names)) == len(names)
    for item in reproduce.ITEMS:
        if isinstance(item, reproduce.Study):
            assert item.name in studies.STUDIES
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


def test_what_has_results_is_neither_done_nor_drawn_again(small, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(results, "draw", lambda out, docs, problem: drawn.append(problem))
    folders = tmp_path / "work", tmp_path / "results", tmp_path / "docs"
    assert reproduce.reproduce(*folders, budget=100, only=["saddle:sgd"]) == ["saddle:adam"]
    assert len(small) == 1
    assert reproduce.reproduce(*folders, budget=100) == []
    assert len(small) == 2
    shutil.rmtree(tmp_path / "work")
    assert reproduce.reproduce(*folders, budget=100) == []
    assert len(small) == len(drawn) == 2
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
    assert records.names(tmp_path / "results", "saddle") == ["saddle/sgd"]


def test_an_unknown_part_is_named(tmp_path):
    with pytest.raises(UserError, match="uci-enrgy"):
        reproduce.reproduce(tmp_path, tmp_path, tmp_path, budget=1, only=["uci-enrgy"])
