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

from saddlefree.lab import report, statistics
from saddlefree.lab.errors import UserError

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
        lines.append({"step": step, "seconds": 0.01 * step * (1 + seed), "train": loss, "seed": seed, **figures})
        if loss is None:
            break
        lines[-1] |= {"val": 3 * loss, "test": 2 * loss, "accuracy": 0.9}
    return lines


def compare_runs():
    adaptive = {"damping": 0.1, "momentum": 0.5, "reduction_ratio": 40.0}
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
    assert report.write(folder) == folder / "report.html"
    return folder


def check_comparison(page):
    head, adam, evil, exact = page.rows
    assert head[:4] == ["Optimiser", "Training loss", "Validation loss", "Test loss"]
    assert adam[0] == "adampaper: Adam"
    assert re.fullmatch(r"0\.0124 ± 0\.00\d+paper: 6\.57e-4 ± 4\.0e-5", adam[1])  # 0.011·(1 + 1/40 + 0.1)
    assert evil[:2] == [EVIL, "∞"]
    assert evil[-3] == "2 of 3"
    assert exact[4] == "90.0"
    assert page.tags.count("svg") == page.tags.count("figure") == 9
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
    shown |= {name: report.QUANTITIES[name] for name in ("damping", "momentum", "reduction_ratio")}
    assert {path.stem for path in (compared / "figures").glob("*.png")} == set(shown)
    page = (compared / "report.html").read_text()
    for name, title in shown.items():
        svg = (compared / "figures" / f"{name}.svg").read_text()
        root = xml.etree.ElementTree.fromstring(svg)
        texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {title, "exact-adaptive"} <= texts
        assert ("<script>document.title" in texts) == (name not in report.QUANTITIES)
        assert "currentColor" in svg
        assert report.INK not in svg
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
    first = report.write(tmp_path).read_text()
    page = Page(first)
    assert page.rows[1] == ["mine", "0.205", "0.615", "0.410", "90.0", "0.615", "0 of 1", "10.0", "0.400"]
    assert "mine on uci-energy, 1 seed, 30 seconds: test relative error 0.410." in page.text
    assert page.tags.count("svg") == 4
    assert page.text.count("Test relative error") == 3  # the table's and two figures'
    assert not {"Ranking", "Adaptive quantities"} & set(re.findall("<h2>(.*)</h2>", first))
    assert report.write(tmp_path).read_text() == first


def test_every_seed_diverges_at_once(tmp_path):
    runs = {name: [[{"optimiser": name, **seed_lines(1.0, until=0)[0]}]] for name in ("adam", "sgd")}
    page = Page(report.write(write_folder(tmp_path, runs, seeds=[0])).read_text())
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
    page = Page(report.write(tmp_path).read_text())
    assert page.rows == [["K", "error"], ["3", "0.123"], ["10", "–"]]
    assert [address[:26] for address in page.addresses] == ["data:image/svg+xml;base64,"]
    assert not {"script", "svg"} & set(page.tags)
    assert '"Paths" & more' in page.text
    (tmp_path / "saddle.svg").unlink()
    with pytest.raises(UserError, match=r"saddle.svg must be a PNG or an SVG file; `saddlefree study` writes it"):
        report.write(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
def test_missing_file(tmp_path, name):
    (write_folder(tmp_path, compare_runs()) / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing.*`saddlefree compare`"):
        report.write(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"command": ', r"config.json is damaged"),
        ("config.json", "[]", r"config.json has no object"),
        ("config.json", '{"command": "train", "title": ""}', r"config.json has no problem, optimisers, seeds, epochs"),
        ("summary.json", '{"rows": [{"train": 1.0}]}', r"summary.json has no val, test, "),
        ("metrics.jsonl", '{"step": 1, "seconds": 1.0, "train": 1.0}\n{"st\n{}\n', "metrics.jsonl, line 2 is damaged"),
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl, line 1 is damaged"),
        ("metrics.jsonl", "12\n", "metrics.jsonl, line 1 is damaged"),
    ],
)
def test_damaged_file(tmp_path, name, text, message):
    (write_folder(tmp_path, compare_runs()) / name).write_text(text)
    with pytest.raises(UserError, match=message):
        report.write(tmp_path)


@given(st.floats(1e-30, 1e30), st.integers(2, 4), st.floats(1e-5, 1e5))
def test_numbers_keep_their_digits(value, digits, like):
    for text in (report.number(value, digits), report.number(value, digits, like=value)):
        assert float(text) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))
    assert ("e" in report.number(value, digits, like=like)) == (not (1e-2 <= like < 1e4 and value < 1e6))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(w * ((p + 0.055) / 1.055) ** 2.4 for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


@pytest.mark.parametrize("colour", report.COLOURS)
def test_lines_are_seen_on_both_backgrounds(colour):
    """A contrast of 3 or more, as the accessibility guidelines ask of graphics."""
    template = (pathlib.Path(report.__file__).parent / "templates" / "report.html").read_text()
    light, dark = (luminance(background) for background in re.findall(r"--paper: (#\w+)", template))
    assert (light + 0.05) / (luminance(colour) + 0.05) >= 3
    assert (luminance(colour) + 0.05) / (dark + 0.05) >= 3


@pytest.mark.parametrize(("starts", "top"), [([2, 1], 6), ([1, 1e9], 3), ([4, 1e9, math.inf, 1, 2], 12)])
def test_what_diverges_does_not_flatten_the_rest(starts, top):
    values = [np.array([start, 1e30]) for start in starts]
    assert report._top([statistics.Curve(np.arange(2), median, median, median) for median in values]) == top
