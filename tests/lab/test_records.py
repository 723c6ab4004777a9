"""Records, and pages that quote them by key."""

import json

import pytest

from saddlefree.lab import records
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import as_text

RECORD = {
    "plan": {"budget": 40},
    "values": {"terms": 18},
    "summary": {"train": 3.6189e-4, "seconds_per_step": 0.8555, "steps": 6000, "rows": [[3, 0.5], [10, 0.25]]},
}
LIST = {"summary": [{"solver": "lanczos (m)", "products": m, "λ = 0.1": 0.04109 * m} for m in (10, 20)]}


@pytest.fixture
def folder(tmp_path):
    records.write(tmp_path, "uci-energy/mine", RECORD)
    records.write(tmp_path, "benchmarks/accuracy", LIST)
    for seed, train in enumerate((1.0, 5.0, 2.0)):
        records.write(tmp_path, f"race/heat-minimise-{seed}", {"summary": {"marks": [{"at": 80, "train": train}]}})
    records.write(tmp_path, "race/heat-2d-minimise-0", {"summary": {"marks": [{"at": 80, "train": 9.0}]}})
    return tmp_path


def test_a_record_is_read_as_it_was_written(folder):
    assert records.read(folder, "uci-energy/mine") == RECORD
    assert records.names(folder, "uci-energy") == ["uci-energy/mine"]
    assert records.names(folder, "nothing") == []


def test_a_record_is_a_few_lines():
    assert as_text({"a": [1, 2], "b": {"c": {}, "d": None}}) == '{\n "a": [1, 2],\n "b": {"c": {}, "d": null}\n}'
    assert json.loads(as_text([[{"a": [1.5, "∞"]}], []])) == [[{"a": [1.5, "∞"]}], []]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("uci-energy/mine train", 3.6189e-4),
        ("uci-energy/mine plan budget", 40),
        ("uci-energy/mine values terms", 18),
        ("uci-energy/mine rows 10 #1", 0.25),
        ("uci-energy/mine rows #-1 #0", 10),
        ('benchmarks/accuracy "lanczos (m)" 20 "λ = 0.1"', 0.8218),
        ("uci-energy/mine seconds_per_step * 1000", 855.5),
        ("uci-energy/mine rows 3 #1 / uci-energy/mine rows 10 #1", 2),
        ("paper/uci-energy/adam train", 0.000657),
        ("race/heat-minimise-* marks 80 train", 2.0),
        ("race/heat-minimise-* marks 80 train / race/heat-2d-minimise-* marks 80 train", 2 / 9),
    ],
)
def test_key(folder, key, value):
    assert records.evaluate(folder, key) == pytest.approx(value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("uci-energy/yours train", "yours.json is missing"),
        ("uci-energy/yours-* train", "no record of such a name"),
        ("uci-energy/mine test", "there is no 'test'"),
        ("uci-energy/mine values", "is no number"),
        ("uci-energy/mine rows 7 #1", "there is no '7'"),
        ("uci-energy/mine rows #2", "there is no '#2'"),
        ('benchmarks/accuracy "lanczos (m)" "λ = 0.1"', "there is no 'λ = 0.1'"),
        ("paper/uci-energy/mine train", "paper has no uci-energy, mine"),
        ("paper/uci-energy/adam loss", "paper has no"),
        ("__import__('os') train", "is missing"),
    ],
)
def test_a_key_that_leads_nowhere(folder, key, message):
    with pytest.raises(UserError, match=message):
        records.evaluate(folder, key)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("3.62e-4<!-- uci-energy/mine train -->", None),
        ("3.6e-4<!-- uci-energy/mine train -->,", None),
        ("(9.99e-1<!-- uci-energy/mine train -->)", "(3.62e-4<!-- uci-energy/mine train -->)"),
        ("6,000<!-- uci-energy/mine steps --> steps", None),
        ("1,234<!-- uci-energy/mine steps -->", "6,000<!-- uci-energy/mine steps -->"),
        ("0.86<!-- uci-energy/mine seconds_per_step --> s", None),
        ("1<!-- uci-energy/mine seconds_per_step --> s", "0.9<!-- uci-energy/mine seconds_per_step --> s"),
        ("(−0.5<!-- uci-energy/mine train / uci-energy/mine train * -0.5 -->)", None),
        ("a sentence. <!-- a comment --> 3 more", None),
        ("<!-- begin mine -->\nold\n\nlines\n<!-- end -->\n5", "<!-- begin mine -->\n\nnew\n\n<!-- end -->\n5"),
    ],
)
def test_a_page_follows_the_records(folder, before, after):
    assert records.refresh(before, folder, {"mine": lambda: "new\n"}) == (after or before)


def test_an_unknown_block_is_named(folder):
    with pytest.raises(UserError, match="block 'theirs' is not known: there are mine"):
        records.refresh("<!-- begin theirs -->\n<!-- end -->", folder, {"mine": lambda: ""})
