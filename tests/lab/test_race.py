"""The race: its cells, their records, and what is rendered of them."""

import json
import re

import pytest

from saddlefree.lab import optimisers, problems, race, records, reproduce
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import write_json, write_lines


def test_every_cell_can_be_run():
    names = [cell.name for cell in race.CELLS]
    assert len(set(names)) == len(names)
    for cell in race.CELLS:
        problem, optimiser, variant, changes = cell.run
        problems.find(problem).variant(variant)
        optimisers.configured(optimiser, problem, changes)
        json.dumps(cell.plan())
    assert {name for of in race.LEFT_OUT.values() for name in of} <= set(race.PEERS)
    # Cells of one problem follow each other, and a seed is done before the next.
    order = [(cell.seed, cell.track) for cell in race.CELLS]
    assert len(set(order)) == 1 + sum(a != b for a, b in zip(order[1:], order, strict=False))


def finished(folder, losses, seconds):
    """The folder of a run with these losses, every other one evaluated."""
    folder.mkdir(parents=True)
    lines = [
        {"step": i + 1, "seconds": t, "train": loss} | ({"test": 10 * loss} if loss is not None and i % 2 else {})
        for i, (t, loss) in enumerate(zip(seconds, losses, strict=True))
    ]
    write_lines(folder / "metrics.jsonl", lines)
    figures = {"steps": len(lines), "seconds": seconds[-1], "seconds_per_step": 1.0, "compile_seconds": 2.0}
    write_json(folder / "summary.json", {"status": "finished", **figures})
    write_json(folder / "config.json", {"plan": {}, "versions": {}, "machine": {}, "peers": {}})


def test_a_record_has_the_lowest_loss_up_to_each_mark(tmp_path):
    cell = race.CELLS[0]
    finished(tmp_path / "run", [8.0, 2.0, 4.0, 1.0, 0.5], [1.0, 5.01, 15.0, 19.0, 79.0])
    race.add(tmp_path, cell, tmp_path / "run")
    marks = records.read(tmp_path, f"race/{cell.name}")["summary"]["marks"]
    assert [(row["at"], row["step"], row["train"], row["test"]) for row in marks] == [
        (5, 2, 2.0, 20.0),
        (20, 4, 1.0, 10.0),
        (80, 5, 0.5, 10.0),
    ]
    assert records.evaluate(tmp_path, f"race/{cell.name} marks 20 train") == 1.0
    # One that diverged, and one whose first step takes longer than the first mark.
    finished(tmp_path / "lost", [8.0, 2.0, None], [1.0, 4.0, 15.0])
    race.add(tmp_path, cell, tmp_path / "lost")
    marks = records.read(tmp_path, f"race/{cell.name}")["summary"]["marks"]
    assert [row["train"] for row in marks] == [2.0, None, None]
    finished(tmp_path / "slow", [8.0, 2.0], [30.0, 60.0])
    race.add(tmp_path, cell, tmp_path / "slow")
    marks = records.read(tmp_path, f"race/{cell.name}")["summary"]["marks"]
    assert [row["train"] for row in marks] == [8.0, 8.0, 2.0]


def test_reproduce_runs_a_shard_once_and_renders_it(tmp_path, monkeypatch):
    factors = {"minimise": 2.0, "lbfgs-20": 1.0, "lbfgs-200": 4.0}
    done = []

    def command(arguments, say):
        folder = tmp_path / "work" / "race" / arguments[arguments.index("--out") + 1].rpartition("/")[2]
        done.append(folder.name)
        factor = next(value for name, value in factors.items() if f"-{name}-0" in folder.name)
        finished(folder, [8 * factor, 2 * factor, factor], [1.0, 5.0, 80.0])

    monkeypatch.setattr(reproduce, "_command", command)
    folders = tmp_path / "work", tmp_path / "results", tmp_path / "docs"
    only = ["race:heat-minimise-0", "race:heat-lbfgs-*-0"]
    left = reproduce.reproduce(*folders, budget=100, only=only, shard=(2, 2))
    assert done == ["heat-lbfgs-20-0"]
    assert left == ["race:heat-minimise-0", "race:heat-lbfgs-200-0"]
    assert reproduce.reproduce(*folders, budget=100, only=only) == []
    assert sorted(done) == ["heat-lbfgs-20-0", "heat-lbfgs-200-0", "heat-minimise-0"]
    assert not list((tmp_path / "work" / "race").iterdir())
    text = race.block(tmp_path / "results")
    assert "| problem | minimise | lbfgs-20 | lbfgs-200 | minimise / best peer | least-squares / best peer |" in text
    assert "| heat | 4.0 | **2.0** | 8.0 | 2.0 | – |" in text
    assert (tmp_path / "docs" / race.FIGURES / "heat.png").read_bytes()[:4] == b"\x89PNG"
    assert race.block(tmp_path / "none").startswith("No run is recorded yet")
    with pytest.raises(UserError, match=r"'race:heat-adm\*' is not known"):
        reproduce.reproduce(*folders, budget=1, only=["race:heat-adm*"])


def test_the_last_seed_of_some_problems_goes_on(tmp_path):
    longer = {cell.track for cell in race.CELLS if cell.seconds > race.SECONDS}
    assert longer == set(race.GOES_ON)
    for method, factor in {"minimise": 1.0, "lbfgs-200": 4.0}.items():
        cells = [cell for cell in race.CELLS if (cell.track, cell.method) == ("wave", method)]
        assert [cell.seconds for cell in cells] == [80, 80, 320]
        for cell in cells:
            folder = tmp_path / cell.name
            finished(folder, [8 * factor, 2 * factor, factor], [1.0, 80.0, cell.seconds + 0.5])
            race.add(tmp_path, cell, folder)
    losses = race.medians(tmp_path)
    assert losses[80]["wave"] == {"minimise": 1.0, "lbfgs-200": 4.0}  # the long seed has 2 and 8 there
    assert losses[320] == {"wave": {"minimise": 1.0, "lbfgs-200": 4.0}}
    text = race.block(tmp_path)
    assert "Training loss after 80 s, median of 3 seeds" in text
    assert "Training loss after 320 s, median of one seed" in text
    errors = text.partition("Relative error of the solution after 80 s")[2]
    assert "| wave | **20** | 80 |" in errors


def test_how_often_the_default_is_first(tmp_path):
    figures = {"heat": {"minimise": 9.0, "least-squares": 1.0, "engd-w": 2.0}, "wave": {"minimise": 6.0, "spring": 4.0}}
    for track, row in figures.items():
        for method, loss in row.items():
            folder = tmp_path / f"{track}-{method}"
            finished(folder, [loss, loss], [1.0, 79.0])
            race.add(tmp_path, race.Cell(track, method, 0), folder)
    text = race.block(tmp_path)
    assert "on 1 of 2 problems after 20 s (above it on wave 1.5 times), and on 1 of 2 problems after 80 s" in text


def test_errors_beside_published_ones(tmp_path):
    assert "No run is recorded yet" in race.published_block(tmp_path)
    in_race, long = race.PUBLISHED[0].cell, race.ACCURACIES[0]
    assert (in_race.seconds, long.seconds) == (80, 1200)
    for cell in (in_race, long):
        folder = tmp_path / cell.part / "run"
        finished(folder, [8.0, 3e-9], [1.0, cell.seconds - 1.0])
        race.add(tmp_path, cell, folder)
    text = race.published_block(tmp_path)
    assert "| Poisson 2D, 257 parameters | `minimise` | 80 | 2 | 3.0e-9 | 3.0e-8 | 1.2e-7 | ENGD |" in text
    assert "| Poisson 5D, 3,500 points | `least-squares` | 1,200 | 2 | 3.0e-9 | 3.0e-8 | 3.5e-8 | ENGD |" in text
    assert "burgers" not in text.lower()
    for cell in race.ACCURACIES:
        problem, optimiser, variant, changes = cell.run
        problems.find(problem).variant(variant)
        optimisers.configured(optimiser, problem, changes)
    # They are no part of the race, neither of its records nor of its medians.
    assert race.found(tmp_path).keys() == {("poisson-2d", "minimise")}


def test_problems_that_are_solved(tmp_path):
    assert "No run is recorded yet" in race.cutest_block(tmp_path)
    times = {"A": {"ours": 0.5, "theirs": 0.01}, "B": {"ours": 2.0, "theirs": None}}
    rows = {name: {m: {"loss": 0.0, "seconds": t} for m, t in row.items()} for name, row in times.items()}
    records.write(tmp_path, race.CUTEST, {"summary": {"problems": rows}})
    text = race.cutest_block(tmp_path)
    assert re.search(r"\| ours +\| 50 +\| 50 +\| 50 +\| 100", text)
    assert re.search(r"\| B +\| 2\.00 +\| – ", text)
    race.draw_cutest(tmp_path, tmp_path / "docs")
    assert (tmp_path / "docs" / race.FIGURES / "cutest.png").stat().st_size > 1000
