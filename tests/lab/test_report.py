"""The page of a result folder, as text and in a browser."""

import json
import math
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saddlefree.lab import display, figures, profiles, report, sections, statistics, tables
from saddlefree.lab.errors import UserError
from saddlefree.lab.metrics import read_lines

EVIL = "<script>document.title = 'run'</script> & my_adam | $x^2"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def write_folder(folder, runs, **config):
    """A result folder; `runs` maps optimiser to the lines of its seeds."""
    folder.mkdir(exist_ok=True)
    config = {
        "command": "compare",
        "problem": "uci-energy",
        "title": "A <b>title</b>",
        "optimisers": {name: {"learning_rate": 0.01, "name": EVIL} for name in runs},
        "seeds": [0, 1, 2],
        "epochs": 6000,
        "budget": None,
        "batch_size": dict.fromkeys(runs),
        "data": {"source": "from a file", "partial": None},
        "versions": {"saddlefree": "0.1.0"},
        "machine": {"platform": "cpu", "cores": 2},
        **config,
    }
    (folder / "config.json").write_text(json.dumps(config))
    texts = [json.dumps(line) + "\n" for seeds in runs.values() for lines in seeds for line in lines]
    (folder / "metrics.jsonl").write_text("".join(texts))
    rows = [statistics.summarise(name, seeds) for name, seeds in runs.items()]
    (folder / "summary.json").write_text(json.dumps({"problem": "uci-energy", "rows": rows}))
    return folder


def seed_lines(level, seed=0, until=40, **figures):
    lines = []
    for step in (1, 2, 5, 10, 20, 40):
        loss = level * (1 + 1 / step + 0.1 * seed) if step <= until else None
        more = {name: value * (1 + step) for name, value in figures.items()}
        lines.append({"step": step, "seconds": 0.01 * step * (1 + seed), "train": loss, "seed": seed, **more})
        if loss is None:
            break
        lines[-1] |= {"val": 3 * loss, "test": 2 * loss, "accuracy": 0.9}
    return lines


def compare_runs():
    adaptive = {"damping": 0.1, "momentum": 0.5, "reduction_ratio": 40.0, "smallest_ritz": -0.1, "largest_ritz": 9.0}
    return {
        "adam": [[{"optimiser": "adam", **line} for line in seed_lines(0.011, seed)] for seed in range(3)],
        EVIL: [[{"optimiser": EVIL, **line} for line in seed_lines(0.1, seed, 5 + 20 * seed)] for seed in range(3)],
        "exact-adaptive": [
            [{"optimiser": "exact-adaptive", **line} for line in seed_lines(0.0006, seed, **adaptive)]
            for seed in range(3)
        ],
    }


class Page(HTMLParser):
    """Tags, addresses and the text of table rows."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.rows, self.text, self.cell = [], [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        # A fragment names a part of the same page.
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href") and not v.startswith("#")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("th", "td")

    def handle_data(self, data):
        self.text += data
        if self.cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    write_folder(folder, compare_runs(), data={"source": "from a file", "partial": "460 of 692 training examples"})
    assert report.write(folder).path == folder / "report.html"
    return folder


def check_comparison(page):
    head, adam, evil, exact = page.rows[:4]
    assert head[:4] == ["Optimiser", "Training loss", "Validation loss", "Test loss"]
    assert adam[0] == "adampaper: Adam"
    assert re.fullmatch(r"0\.0124 ± 0\.00\d+paper: 6\.57e-4 ± 4\.0e-5", adam[1])  # 0.011·(1 + 1/40 + 0.1)
    assert evil[:2] == [EVIL, "∞"]
    assert evil[-3] == "2 of 3"
    assert exact[4] == "90.0"
    assert page.tags.count("svg") == page.tags.count("figure") == 12
    assert page.tags.count("table") == 13
    assert "diverged with seeds 0, 1." in page.text
    assert "Partial data: 460 of 692 training examples." in page.text
    assert "3 optimisers on uci-energy, 3 seeds, 6,000 epochs: lowest median test loss 1.35e-3" in page.text


def test_comparison_is_one_page_that_needs_nothing_else(compared):
    text = (compared / "report.html").read_text()
    page = Page(text)
    check_comparison(page)
    assert page.addresses == []
    assert not {"script", "link", "b"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import", text)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_nothing_runs_and_a_phone_need_not_scroll(compared, tmp_path):
    def dump(path):
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    dumped = dump(compared / "report.html")
    check_comparison(Page(dumped))
    assert "<title>A &lt;b&gt;title&lt;/b&gt;</title>" in dumped
    measure = "<script>parent.postMessage([document.documentElement.scrollWidth, innerWidth], '*')</script>"
    (tmp_path / "page.html").write_text((compared / "report.html").read_text() + measure)
    phone = "<script>onmessage = event => document.title = event.data</script><iframe src=page.html width=390></iframe>"
    (tmp_path / "phone.html").write_text(phone)
    width, available = map(int, re.search(r"<title>(\d+),(\d+)</title>", dump(tmp_path / "phone.html")).groups())
    assert width <= available == 390


def test_figures_stand_beside_the_page(compared):
    losses = {"train": "Training loss", "test": "Test loss"}
    shown = {f"{loss}-{x}": losses[loss] for loss in losses for x in ("seconds", "step")}
    shown |= {f"ranking-{loss}": losses[loss] for loss in losses}
    shown |= {"target-train": "Time to a training loss", "target-test": "Time to a test loss"}
    shown |= {name: sections.QUANTITIES[name] for name in ("damping", "momentum", "reduction_ratio")}
    shown |= {"spectrum": "Extreme Ritz values"}
    assert {path.stem for path in (compared / "figures").glob("*.png")} == set(shown)
    page = (compared / "report.html").read_text()
    for name, title in shown.items():
        svg = (compared / "figures" / f"{name}.svg").read_text()
        root = xml.etree.ElementTree.fromstring(svg)
        texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {title, "exact-adaptive"} <= texts
        assert ("<script>document.title" in texts) == (name not in [*sections.QUANTITIES, "spectrum"])
        assert "currentColor" in svg
        assert figures.INK not in svg
        assert svg[svg.index("<svg") :] in page


def test_tables_for_markdown_and_latex(compared):
    _, _, head, rule, adam, evil, exact = (compared / "table.md").read_text().splitlines()
    assert head.count("|") == rule.count("|") == adam.count("|") == exact.count("|") == 10
    assert adam.startswith("| adam (paper: Adam) | 0.0124 ± ")
    assert evil.startswith("| &lt;script>document.title = 'run'&lt;/script> &amp; my_adam \\| $x^2 | ∞ |")
    latex = (compared / "table.tex").read_text()
    assert r"\textless{}/script> \& my\_adam | \$x\textasciicircum{}2 & $\infty$ &" in latex
    rows = latex.splitlines()[3:]
    assert [row.count(" & ") for row in rows if row.endswith(r"\\")] == [8] * 4


def test_training_run_of_one_seed(tmp_path):
    """Its lines name neither optimiser nor seed, a killed run has cut the last one, and the page is reproducible."""
    lines = [{k: v for k, v in line.items() if k != "seed"} for line in seed_lines(0.2)]
    write_folder(tmp_path, {"mine": [lines]}, command="train", seeds=[7], budget=30.0, test="relative error")
    (tmp_path / "summary.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "tr')
    first = report.write(tmp_path).path.read_text()
    page = Page(first)
    assert page.rows[1] == ["mine", "0.205", "0.615", "0.410", "90.0", "0.615", "0 of 1", "10.0", "0.400"]
    assert "mine on uci-energy, 1 seed, 30 seconds: test relative error 0.410." in page.text
    assert page.tags.count("svg") == 4
    assert page.text.count("Test relative error") == 3  # the table's and two figures'
    assert not {"Ranking", "Adaptive quantities"} & set(re.findall("<h2>(.*)</h2>", first))
    assert report.write(tmp_path).path.read_text() == first


def test_a_variant_is_not_the_papers_problem(tmp_path, undrawn):
    runs = {"adam": compare_runs()["adam"]}
    for variant, beside in (({}, True), ({"width": 6, "activation": "tanh"}, False)):
        page = Page(report.write(write_folder(tmp_path, runs, variant=variant)).path.read_text())
        assert ("paper: 6.57e-4" in page.text) == beside
        assert ("width = 6, activation = tanh" in page.text) != beside
    assert "paper" not in (tmp_path / "table.md").read_text()


def write_solution(folder, prediction):
    folder.mkdir(parents=True, exist_ok=True)
    truth = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    axes = {"x": [0.0, 0.5, 1.0], "time": [0.0, 1.0]}
    (folder / "solution.json").write_text(json.dumps({"axes": axes, "prediction": prediction, "truth": truth}))


def test_a_solved_equation_has_a_picture(tmp_path):
    names = ["adam", "exact-adaptive"]
    write_folder(tmp_path, {name: compare_runs()[name] for name in names})
    write_solution(tmp_path / "runs" / "adam", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.5]])
    write_solution(tmp_path / "runs" / "exact-adaptive" / "seed-0", [[0.0, None, 2.0], [3.0, 4.0, 5.0]])  # diverged
    page = Page(report.write(tmp_path).path.read_text())
    place = page.rows.index(["Relative L2 error", "Largest error", "Largest true value"])
    assert page.rows[place + 1] == ["0.0674", "0.500", "5.00"]  # 0.5/√55
    assert page.text.count("Relative L2 error") == 1
    svg = (tmp_path / "figures" / "solution-adam.svg").read_text()
    texts = [element.text for element in xml.etree.ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"adam", "Prediction", "Truth", "Error", "time"} <= set(texts)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)


def test_a_run_leaves_what_the_picture_shows(compare, tmp_path, undrawn):
    """Of the first of the seeds that ran together: its test figure is that of the picture."""
    compare("pinn-poisson", ["adam"], tmp_path, seeds=2, epochs=2, variant={"width": 4, "depth": 1})
    record = json.loads((tmp_path / "runs" / "adam" / "solution.json").read_text())
    prediction, truth = np.array(record["prediction"]), np.array(record["truth"])
    first = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["seed"] == 0]
    error = np.linalg.norm(prediction - truth) / np.linalg.norm(truth)
    assert error == pytest.approx(first[-1]["test"], rel=1e-4)
    across, up = (np.array(values) for values in record["axes"].values())
    assert truth == pytest.approx(np.sin(np.pi * across) * np.sin(2 * np.pi * up[:, None]), abs=1e-5)
    assert "Relative L2 error" in report.write(tmp_path).path.read_text()


@pytest.mark.parametrize("prediction", [[[0.0, 1.0], [2.0, 3.0]], [[0.0], [1.0, 2.0]], ["text"]])
def test_a_damaged_solution_is_one_line(tmp_path, prediction):
    lines = [{k: v for k, v in line.items() if k != "seed"} for line in seed_lines(0.2)]
    write_folder(tmp_path, {"mine": [lines]}, command="train", seeds=[7])
    write_solution(tmp_path, prediction)
    with pytest.raises(UserError, match=r"solution.json is damaged: delete it, or run again"):
        report.write(tmp_path)


def test_several_comparisons_are_one_page(tmp_path):
    """The profile is of the optimisers that all problems have."""
    runs = compare_runs()
    write_folder(tmp_path / "one", runs)
    write_folder(tmp_path / "two", {name: runs[name] for name in ("adam", "exact-adaptive")}, title="Another")
    page = Page(report.write(tmp_path).path.read_text())
    assert "2 comparisons" in page.text
    assert "Another. Final values" in page.text
    profile = page.rows[-2:]
    # In both problems exact-adaptive has the lowest loss, and both have the same times.
    assert profile == [["adam", "0", "0", "0", "0"], ["exact-adaptive", "100", "100", "100", "100"]]
    assert page.tags.count("svg") == 1
    write_folder(tmp_path / "two", {"sgd": [seed_lines(1.0)]}, command="train")
    page = Page(report.write(tmp_path).path.read_text())  # a run is no comparison
    assert "1 comparison" in page.text
    assert "svg" not in page.tags
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(UserError, match=r"config.json is missing"):
        report.write(tmp_path)


def test_time_to_target():
    x, losses = np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 0.1, 0.5, 0.01])
    times = profiles.first_below(x, losses, np.array([2.0, 1.0, 0.5, 0.1, 0.05, 0.001]))
    assert times.tolist() == [1, 1, 2, 2, 8, math.inf]
    seeds = [
        [{"step": i, "seconds": f * t, "train": y} for i, (t, y) in enumerate(zip(x, losses, strict=True))]
        for f in (1, 2, 3)
    ]
    stuck = [[{"step": 1, "seconds": 1.0, "train": 1.0}], [{"step": 1, "seconds": 1.0, "train": None}]]
    curves = profiles.time_to_target({"a": seeds, "stuck": stuck}, "train", points=5)
    assert curves["a"].x.tolist() == pytest.approx(np.geomspace(1, 0.01, 5).tolist())
    assert curves["a"].median.tolist() == [2, 4, 4, 16, 16]
    assert "stuck" not in curves  # half of its seeds never reach the first target
    assert profiles.time_to_target({"a": [[{"step": 1, "seconds": 1.0, "train": -1.0}]]}, "train") == {}


@given(st.lists(st.lists(st.floats(1e-3, 1e3) | st.just(math.inf), min_size=4, max_size=4), min_size=2, max_size=5))
def test_performance_profile(times):
    """Somebody is the fastest to each target that is reached, and nobody is faster than the fastest."""
    times = {str(i): np.array([1.0, *row]) for i, row in enumerate(times)}
    times["reaches all"] = np.full(5, 1e3)
    found = profiles.performance(times)
    assert all(np.all(ratios >= 1) and np.all(np.diff(ratios[np.isfinite(ratios)]) >= 0) for ratios in found.values())
    assert sum(np.mean(ratios == 1) for ratios in found.values()) >= 1
    for name, taken in times.items():
        assert np.isfinite(found[name]).sum() == np.isfinite(taken).sum()


def test_every_seed_diverges_at_once(tmp_path):
    runs = {name: [[{"optimiser": name, **seed_lines(1.0, until=0)[0]}]] for name in ("adam", "sgd")}
    page = Page(report.write(write_folder(tmp_path, runs, seeds=[0])).path.read_text())
    assert page.rows[1][1].startswith("∞")
    assert "most seeds diverged" in page.text
    assert page.text.count("diverged with seed 0") == 2


def test_study(tmp_path):
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><script>document.title = "run"</script></svg>'
    (tmp_path / "saddle.svg").write_text(svg)
    tables = [{"caption": "Norms", "columns": ["K", "error"], "rows": [[3, 0.123456], [10, None]]}]
    config = {"command": "study", "study": "saddle", "title": "Saddle", "tables": tables}
    config["figures"] = [{"file": "saddle.svg", "caption": '"Paths" & more'}]
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = Page(report.write(tmp_path).path.read_text())
    assert page.rows == [["K", "error"], ["3", "0.123"], ["10", "–"]]
    assert [address[:26] for address in page.addresses] == ["data:image/svg+xml;base64,"]
    assert not {"script", "svg"} & set(page.tags)
    assert '"Paths" & more' in page.text
    (tmp_path / "saddle.svg").unlink()
    with pytest.raises(UserError, match=r"saddle.svg must be a PNG or an SVG file; `saddlefree study` writes it"):
        report.write(tmp_path)


def trial(number, val, status="finished", **values):
    return {"trial": number, "values": values, "status": status, "val": val, "epoch": 30.0, "seconds": 4.2}


PLACE = "../<b>a</b>"  # as a hyperparameter
TRIALS = [
    trial(0, 0.5, learning_rate=0.01),
    trial(1, 0.1, "stopped", learning_rate=0.02, **{PLACE: 3}) | {"epoch": 1.875},
    trial(2, 0.2, learning_rate=0.012345, **{PLACE: 4}),
    trial(3, None, "diverged", learning_rate=0.1, **{PLACE: 5}),
    trial(4, None, "failed", learning_rate=0.05, **{PLACE: 6}) | {"error": EVIL, "epoch": 0.0},
    trial(5, None, "unfinished", learning_rate=0.06, **{PLACE: 7}) | {"epoch": 0.0},
    trial(6, 0.01, "failed", learning_rate=0.07, **{PLACE: 8}) | {"error": EVIL, "epoch": 6000.0},
]


def write_tuning(folder, trials=TRIALS, best=2, commands=(f"saddlefree train digits adam --set decay={EVIL}",)):
    """A tuning folder; `best` is the place of the best trial."""
    folder.mkdir(exist_ok=True)
    config = {
        "command": "tune",
        "title": "Tuning <b>adam</b>",
        "problem": "digits",
        "optimiser": "adam",
        "configs": 7,
        "epochs": 30,
        "budget": 300.0,
        "seeds": [0],
        "searched": {
            "learning_rate": {"range": [1e-3, 0.1], "log": True, "whole": False},
            PLACE: {"range": [0, 9], "log": False, "whole": True},
        },
        "data": {"source": "scikit-learn", "partial": None},
    }
    summary = {"best": None if best is None else trials[best], "commands": commands}
    for name, record in (("config", config), ("trials", trials), ("summary", summary)):
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


def test_tuning(tmp_path):
    first = report.write(write_tuning(tmp_path / "run")).path.read_text()
    page = Page(first)
    assert page.rows == [
        ["Trial", "learning_rate", PLACE, "Validation loss", "Epochs", "Status"],
        ["2", "0.0123", "4", "0.200", "30", "finished"],
        ["1", "0.0200", "3", "0.100", "1.88", "stopped early"],
        ["0", "0.0100", "–", "0.500", "30", "finished"],
        ["5", "0.0600", "7", "–", "0", "unfinished"],
        ["6", "0.0700", "8", "0.0100", "6,000", "failed"],
        ["3", "0.100", "5", "∞", "30", "diverged"],
        ["4", "0.0500", "6", "–", "0", "failed"],
    ]
    assert "7 configurations: 2 finished, 1 stopped early, 1 unfinished, 1 diverged, 2 failed." in page.text
    assert "Best validation loss 0.200, of trial 2." in page.text
    assert f"Trials 4, 6 failed: {EVIL}" in page.text
    assert f"saddlefree train digits adam --set decay={EVIL}" in page.text
    assert page.tags.count("strong") == 6 + 1  # the best row's cells, and the failed trials
    assert re.search(r"Configurations\s*7\s*Epochs\s*30\s*Budget\s*300.0 s", page.text)
    assert page.addresses == []
    assert not {"script", "link", "b"} & set(page.tags)
    assert page.tags.count("svg") == 2
    assert (tmp_path / "run" / "table.md").read_text().count("\n| ") == 9
    assert PLACE in (tmp_path / "run" / "table.tex").read_text().replace(r"\textless{}", "<")
    names = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert names == {f"val-{name}.{kind}" for name in ("learning_rate", "----b-a--b-") for kind in ("png", "svg")}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert report.write(tmp_path / "run").path.read_text() == first


def test_tuning_that_found_nothing(tmp_path):
    trials = [trial | {"val": None} for trial in TRIALS[3:6]]
    page = Page(report.write(write_tuning(tmp_path, trials, best=None, commands=[])).path.read_text())
    assert [row[0] for row in page.rows[1:]] == ["5", "3", "4"]
    assert "3 configurations: 1 unfinished, 1 diverged, 1 failed. None has a finite validation loss." in page.text
    assert "pre" not in page.tags
    assert page.tags.count("svg") == 2


def test_only_the_best_trials_are_in_the_table():
    losses = np.random.default_rng(0).permutation(np.linspace(0.01, 0.99, 30)).tolist()
    table = tables.tuning([trial(i, loss) for i, loss in enumerate(losses)], [], int(np.argmin(losses)))
    assert table.caption.startswith("20 of 30 trials")
    assert [row[0].text for row in table.rows] == [str(i) for i in np.argsort(losses)[:20]]
    assert [row[0].best for row in table.rows] == [True] + 19 * [False]


def test_the_terminal_has_the_same_table():
    shown = display.ranked(TRIALS, ["learning_rate"], width=200)
    found = tables.tuning(TRIALS, ["learning_rate"], shown=12)
    assert [list(column.cells) for column in shown.columns] == [
        [row[i].text for row in found.rows] for i in range(len(found.columns))
    ]
    assert shown.title == found.caption
    assert len(display.ranked(TRIALS, ["learning_rate"], width=50).columns) < len(found.columns)


@pytest.mark.parametrize(("shift", "scale"), [(0, "log"), (-1, "linear")])
def test_trials_beyond_the_frame_are_on_its_edge(shift, scale):
    """An outlier and what diverged are seen, and flatten nothing; nor does a value that has no logarithm."""
    trials = [trial(i, loss + shift, rate=0.01) for i, loss in enumerate([0.1, 0.2, 0.3, 0.4, 1e6])]
    trials += [trial(5, None, "diverged", rate=0.02), trial(6, 0.2 + shift, "stopped", rate=0.0)]
    trials += [trial(7, None, "unfinished", rate=0.03), trial(8, 0.3 + shift)]
    (axes,) = figures.tuning(trials, "rate", {"range": [1e-3, 0.1], "log": True}, best=0).axes
    (left, right), (_, top) = axes.get_xlim(), axes.get_ylim()
    assert left < 1e-3 < 0.1 < right < 0.2
    assert 0.4 < top - shift < 1
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", scale)
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert points == {
        "finished": [[0.01, loss + shift] for loss in (0.1, 0.2, 0.3, 0.4)] + [[0.01, top]],
        "stopped early": [[left, 0.2 + shift]],
        "diverged": [[0.02, top]],
        "best": [[0.01, 0.1 + shift]],
    }


def test_trials_without_a_loss_are_on_the_top_edge():
    (axes,) = figures.tuning(TRIALS[3:6], "learning_rate", {"range": [1e-3, 0.1], "log": True}, best=None).axes
    top = axes.get_ylim()[1]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[0.1, top]], [[0.05, top]]]
    assert len(axes.get_yticks()) == 0


def write_compared(folder):
    return write_folder(folder, compare_runs())


@pytest.mark.parametrize(
    ("write", "command", "name"),
    [
        *((write_compared, "compare", name) for name in ("config.json", "metrics.jsonl", "summary.json")),
        *((write_tuning, "tune", name) for name in ("config.json", "trials.json", "summary.json")),
    ],
)
def test_missing_file(tmp_path, write, command, name):
    (write(tmp_path) / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing.*`saddlefree {command}`"):
        report.write(tmp_path)


DAMAGED = [
    ("config.json", '{"command": ', r"config.json is damaged"),
    ("config.json", "[]", r"config.json has no object"),
    ("config.json", '{"command": "train", "title": ""}', r"config.json has no problem, optimisers, seeds, epochs"),
    ("config.json", '{"command": 5, "title": ""}', r"config.json: command must be a text, got '5'"),
    ("summary.json", '{"rows": [{"train": 1.0}]}', r"summary.json has no val, test, "),
    ("summary.json", '{"rows": 5}', r"summary.json: rows must be a list, got '5'"),
    ("summary.json", '{"rows": [5]}', r"summary.json has no object"),
    ("summary.json", json.dumps({"rows": [dict.fromkeys(report.ROW, "x")]}), "summary.json: train must be a number"),
    ("summary.json", "\x00\ufffd", r"summary.json is damaged"),
    ("metrics.jsonl", '{"step": 1, "seconds": "a", "train": 1.0}\n', "metrics.jsonl, line 1 is damaged"),
    ("metrics.jsonl", '{"step": 1, "seconds": 1.0, "train": 1.0}\n{"st\n{}\n', "metrics.jsonl, line 2 is damaged"),
    ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl, line 1 is damaged"),
    ("metrics.jsonl", "12\n", "metrics.jsonl, line 1 is damaged"),
]
DAMAGED_TUNING = [
    ("config.json", '{"command": "tune", "title": ""}', r"config.json has no problem, optimiser, searched"),
    ("trials.json", "{}", r"trials.json has no trials"),
    ("trials.json", "[]", r"trials.json has no trials"),
    ("trials.json", '[{"trial": 0}]', r"trials.json has no values, status, val, epoch"),
    ("trials.json", json.dumps([trial(0, 1.0, "lost")]), r"trials.json: status must be one of .*, got 'lost'"),
    ("summary.json", '{"best": {}}', r"summary.json has no commands"),
    ("summary.json", '{"best": {}, "commands": []}', r"summary.json has no trial, val"),
]


@pytest.mark.parametrize(
    ("write", "name", "text", "message"),
    [*((write_compared, *case) for case in DAMAGED), *((write_tuning, *case) for case in DAMAGED_TUNING)],
)
def test_damaged_file(tmp_path, write, name, text, message):
    (write(tmp_path) / name).write_text(text)
    with pytest.raises(UserError, match=message):
        report.write(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
def test_a_binary_file_is_one_line(tmp_path, name):
    (write_compared(tmp_path) / name).write_bytes(bytes(range(128, 256)))
    with pytest.raises(UserError, match=rf"{name} is damaged"):
        report.write(tmp_path)


@given(st.floats(1e-30, 1e30), st.integers(2, 4), st.floats(1e-5, 1e5))
def test_numbers_keep_their_digits(value, digits, like):
    for text in (tables.number(value, digits), tables.number(value, digits, like=value)):
        assert float(text) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))
    assert ("e" in tables.number(value, digits, like=like)) == (not (1e-2 <= like < 1e4 and value < 1e6))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(w * ((p + 0.055) / 1.055) ** 2.4 for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


@pytest.mark.parametrize("colour", figures.COLOURS)
def test_lines_are_seen_on_both_backgrounds(colour):
    """A contrast of 3 or more, as the accessibility guidelines ask of graphics."""
    template = (pathlib.Path(report.__file__).parent / "templates" / "report.html").read_text()
    light, dark = (luminance(background) for background in re.findall(r"--paper: (#\w+)", template))
    assert (light + 0.05) / (luminance(colour) + 0.05) >= 3
    assert (luminance(colour) + 0.05) / (dark + 0.05) >= 3


@pytest.mark.parametrize(("starts", "top"), [([2, 1], 6), ([1, 1e9], 3), ([4, 1e9, math.inf, 1, 2], 12)])
def test_what_diverges_does_not_flatten_the_rest(starts, top):
    values = [np.array([start, 1e30]) for start in starts]
    assert figures.top([statistics.Curve(np.arange(2), median, median, median) for median in values]) == top
