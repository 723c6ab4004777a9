"""The studies at small sizes: their numbers against NumPy, their files, and that what is finished is not done again."""

import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import saddle_free_direction

import saddlefree as sf
from saddlefree.density import Density
from saddlefree.lab import events, problems, report, studies
from saddlefree.lab import run as engine
from saddlefree.lab.errors import Interrupted, UserError
from saddlefree.lab.metrics import read_json, read_lines
from saddlefree.lab.studies import accelerators, saddle, spectrum, truncation

PNG, SVG = b"\x89PNG", b"<?xml"


def check_files(folder, name):
    """Everything that a study leaves; returns its configuration, lines and summary."""
    config = read_json(folder / "config.json")
    assert config["command"] == "study"
    assert config["study"] == config["plan"]["study"] == name
    assert config["title"]
    assert {"jax", "numpy"} <= config["versions"].keys()
    assert config["machine"]["platform"] == "cpu"
    for figure in config["figures"]:
        assert figure["caption"]
        assert (folder / figure["file"]).read_bytes().startswith(SVG)
        assert (folder / figure["file"]).with_suffix(".png").read_bytes().startswith(PNG)
    for table in config["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    page = report.write(folder).path.read_text()
    assert page.count("<img") == len(config["figures"]) > 0
    assert page.count("<table") == len(config["tables"]) > 0
    return config, list(read_lines(folder / "metrics.jsonl")), read_json(folder / "summary.json")


# The registry.


def test_unknown_study(tmp_path):
    with pytest.raises(UserError, match=r"study 'sadle' is not known: did you mean saddle\?"):
        studies.study("sadle", tmp_path)
    with pytest.raises(UserError, match="there are saddle, truncation, accelerators, spectrum"):
        studies.study("xyz", tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("saddle", {"seeds": 3}, "saddle has no seeds: leave out --seeds, or give steps"),
        (
            "accelerators",
            {"problem": "digits"},
            "accelerators has no problem: leave out --problem, or give seeds, steps",
        ),
        ("saddle", {"steps": 0}, "steps must be a whole number from 1 to 1000000000, got 0"),
        ("truncation", {"seeds": -1}, "seeds must be a whole number from 1 to 1000000000, got -1"),
        ("accelerators", {"steps": 9}, "steps must be a whole number from 10 to 1000000000, got 9"),
        ("spectrum", {"problem": "digts"}, "problem 'digts' is not known: did you mean digits?"),
    ],
)
def test_options_that_a_study_does_not_take(name, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        studies.study(name, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_fewest_terms_are_those_that_every_accelerator_needs():
    needed = [make(order).num_sums for make in accelerators.ACCELERATORS.values() for order in accelerators.ORDERS]
    assert studies.STUDIES["accelerators"].settings["steps"].low == max(needed)


# Saddle.


@pytest.fixture(scope="module")
def saddle_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saddle")
    studies.study("saddle", folder / "out")
    return folder / "out"


def surface(x):
    """Value, gradient and Hessian of the surface, from its formula."""
    a = math.radians(saddle.ANGLE)
    Q = np.array([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
    u, v = Q.T @ x
    slope, curvature = np.array([2 * u, -v / 2 + v**3 / 8]), np.diag([2, -1 / 2 + 3 * v**2 / 8])
    return u**2 - v**2 / 4 + v**4 / 32, Q @ slope, Q @ curvature @ Q.T


def test_newton_ends_on_the_saddle_and_the_others_in_a_minimum(saddle_folder):
    config, lines, summary = check_files(saddle_folder, "saddle")
    sgd, newton, exact, series = (method["end"] for method in summary["methods"].values())
    np.testing.assert_allclose(newton, [0, 0], atol=1e-6)
    np.testing.assert_allclose(surface(saddle.MINIMUM)[1], [0, 0], atol=1e-12)
    assert surface(saddle.MINIMUM)[0] == pytest.approx(-0.5)
    for end, near in ((sgd, 0.1), (exact, 1e-3), (series, 1e-3)):
        np.testing.assert_allclose(end, saddle.MINIMUM, atol=near)
    for line in lines:
        assert line["train"] == pytest.approx(surface([line["x"], line["y"]])[0], abs=1e-6)
    assert config["tables"][0]["columns"][1:-1] == [f"Step {step}" for step in (1, 3, 5, 10, 20)]
    by_step = {(line["method"], line["step"]): line["train"] for line in lines}
    for name, *losses, _ in config["tables"][0]["rows"]:
        assert losses == [by_step[name, step] for step in (1, 3, 5, 10, 20)]


def test_first_updates(saddle_folder):
    lines = [line for line in read_lines(saddle_folder / "metrics.jsonl") if line["step"] == 1]
    _, g, H = surface(saddle.START)
    sgd, newton, exact, series = ([line["x"], line["y"]] - saddle.START for line in lines)
    np.testing.assert_allclose(sgd, -0.3 * g, atol=1e-6)
    np.testing.assert_allclose(newton, -np.linalg.solve(H, g), atol=1e-6)
    np.testing.assert_allclose(exact, -saddle_free_direction(H, g, 0.1), atol=1e-6)
    np.testing.assert_allclose(series, exact, atol=0.2 * np.linalg.norm(exact))


def test_finished_study_is_not_done_again(saddle_folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(saddle, "compute", refuse)
    studies.study("saddle", saddle_folder, resume=True)
    with pytest.raises(UserError, match="holds a run already: go on with --resume"):
        studies.study("saddle", saddle_folder)
    with pytest.raises(UserError, match="steps was 20, is 5"):
        studies.study("saddle", saddle_folder, steps=5, resume=True)
    with pytest.raises(UserError, match="study was 'saddle', is 'accelerators'"):
        studies.study("accelerators", saddle_folder, resume=True)


# Accelerators.


@pytest.fixture
def small(monkeypatch):
    """A few accelerators of small vectors."""
    monkeypatch.setattr(accelerators, "SIZE", 12)
    monkeypatch.setattr(accelerators, "ORDERS", (1, 2))
    names = ("Shanks", accelerators.ERRATIC)
    monkeypatch.setattr(accelerators, "ACCELERATORS", {name: accelerators.ACCELERATORS[name] for name in names})


def test_target_and_partial_sums_are_those_of_the_formula(small, x64):
    H, g = accelerators.draw(3)
    np.testing.assert_array_equal(H, H.T)
    exact = saddle_free_direction(H, g, 0.0)
    np.testing.assert_allclose(jax.jit(accelerators.target)(jnp.asarray(H), jnp.asarray(g)), exact, rtol=1e-9)
    V = 1.01 * np.linalg.norm(H, 2) ** 2
    Z = np.eye(12) - H @ H / V
    expected = [math.comb(2 * k, k) / 4**k * np.linalg.matrix_power(Z, k) @ g / V**0.5 for k in range(8)]
    terms, sums = jax.jit(accelerators.plain, static_argnums=2)(jnp.asarray(H), jnp.asarray(g), 8)
    np.testing.assert_allclose(terms, expected, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(sums, np.cumsum(expected, axis=0), rtol=1e-10, atol=1e-14)


def test_windows_are_accelerated_as_the_sums_up_to_them(x64):
    """By Levin's t-transform, which depends on where a window starts."""
    terms = jnp.asarray(0.8 ** np.arange(20)[:, None] * np.random.default_rng(0).uniform(1, 2, (20, 3)))
    sums, accelerator = jnp.cumsum(terms, axis=0), sf.levin_t(1)
    found = jax.jit(accelerators.limits, static_argnums=0)(accelerator, terms, sums, terms[0])
    assert len(found) == 18  # K = 3, …, 20
    np.testing.assert_allclose(found[12 - 3], sf.accelerate(accelerator, sums[:12]), rtol=1e-9)


def test_comparison_of_accelerators(small, tmp_path):
    seen = []
    studies.study("accelerators", tmp_path, seeds=3, steps=40, listener=seen.append)
    assert seen == [events.Started("accelerators", 0, 4), *(events.Progress(number, 4, {}) for number in (1, 2, 3, 4))]
    config, lines, summary = check_files(tmp_path, "accelerators")
    assert config["plan"] == {"study": "accelerators", "seeds": 3, "steps": 40}
    curves = {}
    for line in lines:
        curves.setdefault((line["accelerator"], line["order"]), {})[line["terms"]] = line
    plain, shanks = curves["Plain series", 0], curves["Shanks", 2]
    assert [*plain] == [*range(1, 41)]
    assert [*shanks] == [*range(5, 41)]
    # The plain series grows towards the target, and Shanks is ahead of it.
    for key in ("cosine", "norm"):
        assert np.all(np.diff([line[key] for line in plain.values()]) > 0)
        assert plain[40][key] < shanks[40][key] < 1.2
    found = []
    for H, g in map(accelerators.draw, range(3)):
        exact = saddle_free_direction(H, g, 0.0)
        found.append(g @ exact / np.linalg.norm(g) / np.linalg.norm(exact))
    assert plain[1]["cosine"] == pytest.approx(np.median(found))  # one term is a multiple of g
    row = summary["rows"][2]
    assert (row["accelerator"], row["order"], row["behind"]) == ("Shanks", 2, 0.0)
    assert row["cosine"] == {str(K): shanks[K]["cosine"] for K in (10, 30, 40)}


# Spectrum.


def adam(x, steps):
    """The points that Adam visits on ½(x² − y²) + ¼y⁴ with a rate that decays from 0.003 to 0."""
    points, m, v = [np.array(x, float)], 0, 0
    for t in range(steps):
        g = points[-1] * [1, -1] + [0, points[-1][1] ** 3]
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        rate = 3e-3 * (1 + math.cos(math.pi * t / steps)) / 2
        points.append(points[-1] - rate * (m / (1 - 0.9 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8))
    return points


@pytest.fixture(scope="module")
def spectrum_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spectrum")
    studies.study("spectrum", folder / "out", problem="saddle", steps=12)
    return folder / "out"


def test_spectrum_along_training(spectrum_folder):
    _, lines, summary = check_files(spectrum_folder, "spectrum")
    assert summary["parameters"] == 2
    assert [row["step"] for row in summary["rows"]] == [0, 10, 12]
    points = adam(problems.find("saddle").load(None).init(jax.random.key(0))[0], 12)
    for row, line in zip(summary["rows"], lines, strict=True):
        x, y = points[row["step"]]
        smallest, largest = np.linalg.eigvalsh([[1, 0], [0, 3 * y**2 - 1]])
        assert row["train"] == pytest.approx((x**2 - y**2) / 2 + y**4 / 4, rel=1e-5)
        assert row["smallest"] == pytest.approx(smallest, rel=1e-5)
        assert row["largest"] == pytest.approx(largest, rel=1e-5)
        assert 0.2 < row["negative"] < 0.8  # one of two, by a few random starts
        assert {key: line[key] for key in row} == row
        assert len(line["values"]) == len(line["weights"]) == 2 * spectrum.SAMPLES


def test_a_spectrum_that_was_broken_off_goes_on(spectrum_folder, tmp_path, monkeypatch):
    """After a signal at its first evaluation it looks at the others alone, and finds what it would have found."""
    run, seen = spectrum.run, []

    def watched(plan, task, folder, *, listener):
        def tell(event):
            listener(event)
            seen.append(event)
            if isinstance(event, events.Evaluated) and event.step == 10:
                os.kill(os.getpid(), signal.SIGTERM)

        return run(plan, task, folder, listener=tell)

    monkeypatch.setattr(spectrum, "run", watched)
    with pytest.raises(Interrupted):
        studies.study("spectrum", tmp_path, problem="saddle", steps=12)
    spectra = tmp_path / "runs" / "adam" / "spectra.jsonl"
    assert [line["step"] for line in read_lines(spectra)] == [0, 10]
    seen.clear()
    studies.study("spectrum", tmp_path, problem="saddle", steps=12, resume=True)
    assert seen[0].step == 10
    for name in ("metrics.jsonl", "summary.json"):
        assert (tmp_path / name).read_bytes() == (spectrum_folder / name).read_bytes()


def test_shares_of_negative_eigenvalues():
    density = Density(np.array([-2.0, -1e-3, 1.0, 4.0]), np.array([0.1, 0.4, 0.3, 0.2]))
    figures = spectrum.summarised(density)
    assert figures["negative"] == pytest.approx(0.1)  # −0.001 may as well be 0
    assert figures["negative_trace"] == pytest.approx((0.2 + 0.4e-3) / (0.2 + 0.4e-3 + 0.3 + 0.8))


# Truncation.


def check_truncation(folder, monkeypatch, lengths, **options):
    """Does the study twice: the second time its runs are read and not run again. Returns the rows of its summary."""
    monkeypatch.setattr(truncation, "TERMS", lengths)
    seen = []
    studies.study("truncation", folder, seeds=2, listener=seen.append, **options)
    _, lines, summary = check_files(folder, "truncation")
    steps = options["steps"]
    ends = [event.summary["steps"] for event in seen if isinstance(event, events.Finished)]
    assert ends == [steps] * len(lengths)
    for terms, row in zip(lengths, summary["rows"], strict=True):
        plan = read_json(folder / "runs" / str(terms) / "config.json")["plan"]
        assert (plan["values"]["terms"], plan["values"]["order"], plan["seeds"]) == (terms, 1, [0, 1])
        last = [line for line in lines if line["terms"] == terms and line["step"] == steps]
        assert [line["seed"] for line in last] == [0, 1]
        assert (row["terms"], row["products"]) == (terms, 2 * (terms - 1))
        for loss in ("train", "test"):
            assert row[loss] == pytest.approx(np.median([line[loss] for line in last]))
    before = {path: path.read_bytes() for path in (folder / "config.json", folder / "summary.json")}
    (folder / "summary.json").unlink()
    monkeypatch.setattr(engine, "Program", None)
    studies.study("truncation", folder, seeds=2, resume=True, **options)
    assert {path: path.read_bytes() for path in before} == before
    return summary["rows"]


def test_truncation(tmp_path, monkeypatch):
    check_truncation(tmp_path, monkeypatch, (3,), problem="saddle", steps=3)
