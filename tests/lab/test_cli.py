"""The command line: what it answers, in one line where something is wrong, and files of a user's own."""

import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from saddlefree.lab import cli, demo, display, events, optimisers, plugins, problems
from saddlefree.lab.metrics import read_json, read_lines

HEAT = pathlib.Path(__file__).parent.parent.parent / "examples" / "heat.py"
HUGE = str(10**6)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty folder to work in, eighty columns, and registries that are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display.CONSOLE, "_width", 80)
    yield tmp_path
    forget_plugins()


KNOWN = [(entries, dict(entries)) for entries in (problems.PROBLEMS, optimisers.OPTIMISERS, plugins.LOADED)]


def forget_plugins():
    """As in a process that has loaded none."""
    for entries, known in KNOWN:
        entries.clear()
        entries.update(known)
    for name in list(sys.modules):
        if name.startswith("saddlefree_plugin_"):
            del sys.modules[name]


@pytest.fixture
def saddlefree(capsys):
    """Runs a command; returns its exit code, its output and its errors."""

    def run(words="", *more):
        code = 0
        try:
            cli.main([*words.split(), *more])
        except SystemExit as ended:
            code = ended.code or 0
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def test_help_without_arguments_and_version(saddlefree):
    code, out, _ = saddlefree()
    assert code == 0
    assert all(command in out for command in cli.COMMANDS)
    assert re.fullmatch(r"saddlefree \d+\.\d+\.\d+\n", saddlefree("--version")[1])
    assert "PROBLEM OPTIMISER" in saddlefree("train --help")[1]


ANSWERED = """
import contextlib, io, sys
from saddlefree.lab.cli import main

heavy = "jax", "optax", "flax", "matplotlib", "ray", "scipy", "sklearn", "tensorboardX"
for arguments in sys.argv[1:]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments.split())
    print(arguments, [name for name in heavy if name in sys.modules])
"""


def test_answers_without_jax():
    commands = [
        "--help",
        "train --help",
        "optimisers",
        "problems pinn-poisson",
        "train pinn-poison adam",
        "compare digits --optimisers adan",
        "train digits adam --set learning_rate=inf",
        "study sadle",
        "study saddle --seeds 3",
        "study spectrum --problem digts",
        "report nowhere",
    ]
    found = subprocess.run([sys.executable, "-c", ANSWERED, *commands], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [f"{command} []" for command in commands]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train pinn-poison adam", "problem 'pinn-poison' is not known: did you mean pinn-poisson?"),
        ("train digits adan", "optimiser 'adan' is not known: did you mean adam?"),
        (
            "train digits adam --set learnin_rate=1",
            "'learnin_rate' is not a hyperparameter of adam: did you mean learn",
        ),
        (f"train digits low-rank --set rank={HUGE}", "rank must be a whole number from 0 to 1000, got '1000000'"),
        ("train digits adam --set learning_rate=inf", "learning_rate must be a finite number ≥ 0, got 'inf'"),
        ("train digits adam --epochs 1e300", "epochs must be a number from 1e-09 to 1000000000, got 1e+300"),
        ("train digits adam --epochs nan", "epochs must be a number from 1e-09 to 1000000000, got nan"),
        ("train digits adam --steps 99999999999", "steps must be a whole number from 1 to 1000000000, got 99999999999"),
        ("train digits adam --seed 4294967296", "seed must be a whole number from 0 to 2147483647, got 4294967296"),
        ("train digits adam --seed -1", "seed must be a whole number from 0 to 2147483647, got -1"),
        ("train digits adam --batch-size 99999999999", "batch_size must be a whole number from 1 to 1000000000, got 9"),
        ("train digits adam --epochs 2 --budget 5s", "--epochs and --budget both say how long a run is: leave out one"),
        ("train digits adam --steps 2 --epochs 5", "--epochs and --steps both say how long a run is: leave out one of"),
        ("train digits adam --budget soon", "a time must be a number > 0 with s, min or h after it, such as 60s or"),
        ("train digits adam --variant wdth=3", "'wdth' is not a setting of Handwritten digits: did you mean width?"),
        ("train digits adam --variant width=0", "width must be a whole number from 1 to 10000, got '0'"),
        ("train digits adam --variant width", "--variant must be name=value, such as"),
        ("train digits adam --plugin absent.py", "absent.py cannot be read: No such file or directory"),
        ("train digits adam --out @", "--out must be the path of a folder, got an empty one: leave it out, or name"),
        ("compare digits --optimisers @", "--optimisers must be names with commas between, such as adam,lbfgs, got"),
        ("compare digits --optimisers ,", "--optimisers must be names with commas between, such as adam,lbfgs, got"),
        ("compare digits --optimisers adam,sgd,adam", "--optimisers names adam twice: leave out one of them"),
        ("compare digits --seeds 99999", "seeds must be a whole number from 1 to 10000, got 99999"),
        ("compare digits --evaluations 0", "evaluations must be a whole number from 1 to 1000000000, got 0"),
        (
            "compare digits --optimisers adam --set sgd.momentum=1",
            "--set must be optimiser.name=value with one of adam",
        ),
        (
            "compare digits --optimisers adam,sgd --set parameter_average=1",
            "parameter_average must be a number from 0 to 0.99999, got '1'",
        ),
        ("compare digits --epochs 2 --budget 5s", "--epochs and --budget both say how long a run is: leave out one of"),
        ("tune digits adam --configs 0", "configs must be a whole number from 1 to 100000, got 0"),
        ("tune digits adam --max-epochs 1e300", "max-epochs must be a number from 1e-09 to 1000000000, got 1e+300"),
        ("study saddle --steps 99999999999", "steps must be a whole number from 1 to 1000000000, got 99999999999"),
        ("optimisers --problem digit", "problem 'digit' is not known: did you mean digits?"),
        ("problems digit", "problem 'digit' is not known: did you mean digits?"),
        ("train digits adam --set learning_rate", "--set must be name=value, such as learning_rate=0.01, got"),
        ("train saddle kfac --out .", "kfac needs a loss of squared errors or cross-entropies: this problem has none"),
        ("train digits adam --epochs 0", "epochs must be a number from 1e-09 to 1000000000, got 0.0"),
        ("study sadle --out .", "study 'sadle' is not known: did you mean saddle?"),
        ("reproduce --only uci-enrgy --work . --out .", "'uci-enrgy' is not known: did you mean uci-energy?"),
        ("reproduce --budget soon", "a time must be a number > 0 with s, min or h after it, such as 60s or"),
        ("report nowhere", "config.json is missing"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(arguments, message, saddlefree, place):
    code, out, err = saddlefree("", *(argument.replace("@", "") for argument in arguments.split()))
    assert code == 2
    assert err.startswith("saddlefree: ")
    assert err.count("\n") == 1
    assert message in err
    assert not out
    assert not list(place.iterdir())


def test_a_full_disk_does_not_promise_anything(saddlefree, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(cli, "show", full)
    assert saddlefree("report .") == (2, "", "saddlefree: metrics.jsonl: No space left on device\n")


def test_train_ends_with_the_best_validation(saddlefree, place):
    code, out, _ = saddlefree("train diabetes adam --steps 20 --out run")
    assert code == 0
    best = min((line for line in read_lines(place / "run" / "metrics.jsonl") if "val" in line), key=lambda x: x["val"])
    assert f"best validation: {display.plain(best['val'])} at step {best['step']}\n" in out
    assert "finished after 20 steps" in out
    code, out, _ = saddlefree("report run")
    assert code == 0
    assert "Training" in out
    assert "report: run/report.html" in out


def test_a_rank_beyond_the_parameters_is_cut_with_a_sentence(saddlefree):
    code, out, _ = saddlefree(
        "train diabetes low-rank --set rank=900 --variant width=2 --variant depth=1 --steps 2 --out run"
    )
    assert code == 0
    assert "rank 900 is more than the 25 parameters: 25 is used\n" in out


def test_a_run_that_diverged_has_a_code_of_its_own(saddlefree):
    code, out, _ = saddlefree("train saddle sgd --set learning_rate=1e30 --out run")
    assert code == 3
    assert "diverged after" in out
    # The same when it is asked for again.
    assert saddlefree("train saddle sgd --set learning_rate=1e30 --out run", "--resume")[0] == 3


@pytest.mark.usefixtures("undrawn")
def test_compare_fits_eighty_columns_and_says_where_the_time_went(saddlefree, place):
    optimisers.OPTIMISERS["sgd-with-a-long-name"] = optimisers.OPTIMISERS["sgd"]
    code, out, _ = saddlefree("compare saddle --optimisers newton,sgd-with-a-long-name --seeds 2 --epochs 8 --out c")
    assert code == 0
    assert re.search(r"time: training [\d.]+ s, compiling [\d.]+ s, evaluating [\d.]+ s\n", out)
    assert "sgd-with-a-long-name" in out
    assert max(map(len, out.splitlines())) <= 80
    again = saddlefree("report c")[1]
    assert "sgd-with-a-long-name" in again
    rows = read_json(place / "c" / "summary.json")["rows"]
    assert all(row["compile_seconds"] > 0 for row in rows)


@pytest.fixture(scope="module")
def compared(compare, tmp_path_factory):
    """The folder of a comparison."""
    folder = tmp_path_factory.mktemp("compared")
    compare("saddle", ["sgd"], folder, seeds=1, epochs=3)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", b"\x93NUMPY\x01\x00v\x00\xff\n\x80\x81\n", "metrics.jsonl is damaged (no text)"),
        ("metrics.jsonl", b"[1, 2]\n", "metrics.jsonl, line 1 is damaged"),
        ("summary.json", b'{"problem": "saddle", "ro', "summary.json is damaged"),
        ("summary.json", b"\xff\xfe\x00", "summary.json is damaged"),
        ("summary.json", b"[]", "summary.json"),
        ("summary.json", b'{"problem": "saddle", "rows": [{"optimiser": "adam"}]}', "summary.json"),
        ("summary.json", b'{"problem": "saddle", "rows": 3}', "summary.json"),
        ("config.json", b"\xff\xfe\x00", "config.json is damaged"),
        ("config.json", b"{}", "config.json"),
    ],
)
def test_a_damaged_file_in_report(name, content, message, saddlefree, place, compared):
    shutil.copytree(compared, "c")
    (place / "c" / name).write_bytes(content)
    code, _, err = saddlefree("report c")
    assert code == 2
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["problems", "problems pinn-convection", "optimisers", "optimisers --problem svhn"])
def test_lists_fit_the_terminal(command, width, saddlefree, monkeypatch):
    monkeypatch.setattr(display.CONSOLE, "_width", width)
    code, out, _ = saddlefree(command)
    assert code == 0
    assert max(map(len, out.splitlines())) <= width


def test_columns_are_obeyed():
    script = "from saddlefree.lab.display import CONSOLE; print(CONSOLE.width)"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "97"}
    )
    assert found.stdout == "97\n"


def test_optimisers_of_a_problem_have_the_values_of_a_run(saddlefree):
    out = " ".join(saddlefree("optimisers --problem fashion-mnist")[1].split())
    assert "learning_rate=0.000655385518" in out
    assert "batch_size=3200" in out  # K-FAC's
    assert "batch_size=200" in out  # the problem's own
    assert "learning_rate=0.003 " in saddlefree("optimisers")[1]


@pytest.mark.parametrize("name", [name for name, entry in optimisers.OPTIMISERS.items() if entry.package])
def test_a_peer_runs_and_its_licence_is_recorded(name, saddlefree, place):
    if optimisers.find(name).missing:
        pytest.skip(f"{optimisers.find(name).package} is not installed")
    code, out, _ = saddlefree(f"train diabetes {name} --steps 3 --out t")
    assert code == 0
    assert "finished after 3 steps" in out
    (peer,) = read_json(place / "t" / "config.json")["peers"].values()
    assert set(peer) == {"version", "licence"}


def test_a_missing_peer_is_marked(saddlefree, monkeypatch):
    monkeypatch.setattr(optimisers.Optimiser, "missing", property(lambda entry: entry.package == "jinns"))
    lines = [line for line in saddlefree("optimisers")[1].replace("\n    ", "\n").split("\n") if "pip install" in line]
    assert len(lines) == 1
    code, _, err = saddlefree("train saddle jinns-ssbroyden")
    assert code == 2
    assert err == "saddlefree: jinns is missing: pip install '.[peers]' in a checkout of saddlefree installs it\n"


def test_lists_name_everything(saddlefree):
    out = saddlefree("problems")[1]
    assert all(name in out for name in (*problems.PROBLEMS, "embedded", "needs none"))
    out = saddlefree("optimisers")[1]
    assert all(name in out for name in (*optimisers.OPTIMISERS, "the paper's Exact SFN"))


def test_a_problem_describes_itself(saddlefree):
    out = saddlefree("problems pinn-convection")[1]
    for text in ("u_t + β u_x = 0", "5,301 parameters", "float64", "full batch", "Krishnapriyan", "beta", " 20 "):
        assert text in out
    assert "1,150 for training, 288 for validation, 359 for test" in saddlefree("problems digits")[1]


def test_progress_shows_what_there_is_room_for(monkeypatch):
    figures = {"train": 0.01234, "val": 0.5, "damping": 1e-5, "learning_rate": 0.3, "steps_per_second": 12345.6}
    for width, seen, gone in ((80, "loss 0.0123", "λ"), (160, "steps/s 12,346  λ 1e-05  η 0.3", "…")):
        file = io.StringIO()
        monkeypatch.setattr(display, "ERRORS", Console(file=file, force_terminal=True, width=width))
        with display.progress() as listen:
            listen(events.Started("pinn-poisson, lanczos-adaptive, seed 0", 0, 2000, None))
            listen(events.Progress(1000, 2000, figures))
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
        assert seen in text
        assert gone not in text
        assert max(map(len, text.replace("\r", "\n").splitlines())) <= width


@pytest.mark.usefixtures("undrawn")
def test_an_equation_of_ones_own_is_trained_compared_and_reported(saddlefree, place):
    assert len(HEAT.read_text().splitlines()) <= 30
    assert f"```python\n{HEAT.read_text()}```" in (HEAT.parent.parent / "docs" / "laboratory.md").read_text()
    plugin = ["--plugin", str(HEAT)]
    code, out, _ = saddlefree("train heat adam --steps 3 --variant kappa=0.5 --out t", *plugin)
    assert code == 0
    assert "finished after 3 steps" in out
    code, out, _ = saddlefree("compare heat --optimisers sgd --seeds 1 --epochs 3 --out c", *plugin)
    assert code == 0
    assert "sgd" in out
    digest = plugins.load([HEAT])["heat.py"]
    train, compared = (read_json(place / folder / "config.json") for folder in "tc")
    assert train["plugins"] == compared["plugins"] == train["plan"]["plugin"] == {"heat.py": digest}
    assert train["plan"]["variant"] == train["variant"] == {"kappa": 0.5}
    assert compared["variant"] == {}
    assert "kappa" in saddlefree("problems heat", *plugin)[1]
    # A report needs no plugin, nor looks for one.
    forget_plugins()
    code, out, _ = saddlefree("report c")
    assert code == 0
    assert "sgd" in out
    assert not plugins.LOADED
    assert "heat" not in problems.PROBLEMS


def test_a_plugin_is_not_loaded_unless_it_is_given_and_unchanged(saddlefree, place):
    text = "from saddlefree.lab import problem, surfaces\nproblem('mine', 'Mine', epochs=3)(surfaces.saddle)\n"
    pathlib.Path("mine.py").write_text(text)
    command = "train mine sgd --out t"
    assert saddlefree(command, "--plugin", "mine.py")[0] == 0
    for name in ("summary.json", "metrics.jsonl"):
        (place / "t" / name).unlink()
    forget_plugins()
    code, _, err = saddlefree(command, "--resume")
    assert (code, err) == (2, "saddlefree: t was made with --plugin mine.py: give it again to go on\n")
    assert saddlefree(command, "--resume", "--plugin", "mine.py")[0] == 0
    pathlib.Path("mine.py").write_text(text + "\n")
    code, _, err = saddlefree(command, "--resume", "--plugin", "mine.py")
    assert code == 2
    assert err.endswith("mine.py has changed since it was loaded: start again\n")
    forget_plugins()
    code, _, err = saddlefree(command, "--resume", "--plugin", "mine.py")
    assert code == 2
    assert err.startswith("saddlefree: mine.py has changed since t was made (SHA-256 was ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("undrawn")
def test_an_optimiser_of_ones_own(saddlefree, place):
    pathlib.Path("mine.py").write_text(
        "import optax\n"
        "from saddlefree.lab import Setting, optimiser\n"
        "@optimiser('lion', 'Lion, of Optax', {'learning_rate': Setting(1e-3)})\n"
        "def lion(values, run):\n"
        "    return optax.lion(values['learning_rate'])\n"
    )
    code, out, _ = saddlefree("compare saddle --optimisers lion --epochs 3 --plugin mine.py --out c")
    assert code == 0
    assert "lion" in out
    assert "Lion, of Optax" in saddlefree("optimisers --plugin mine.py")[1]
    assert read_json(place / "c" / "config.json")["optimisers"]["lion"] == {"learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "mine.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("\n\nx = 1 / 0", "mine.py, line 3: ZeroDivisionError: division by zero"),
        ("def f(:\n", "mine.py, line 1: SyntaxError: invalid syntax"),
        ("x = 1", "mine.py: it registers nothing: use saddlefree.lab.problem or saddlefree.lab.optimiser"),
        (
            "from saddlefree.lab import problem\nproblem('digits', 'Mine', epochs=1)(lambda d: 1)",
            "mine.py, line 2: problem 'digits' is there already: give yours another name",
        ),
    ],
)
def test_a_plugin_that_fails_is_one_line(text, message, saddlefree):
    pathlib.Path("mine.py").write_text(text)
    before = dict(problems.PROBLEMS)
    code, _, err = saddlefree("problems --plugin mine.py")
    assert code == 2
    assert err.count("\n") == 1
    assert message in err
    assert before == problems.PROBLEMS
    pathlib.Path("mine.txt").write_text(text)
    assert "must be a Python file" in saddlefree("problems --plugin mine.txt")[2]


def test_the_demo_says_what_its_records_hold(saddlefree, place, monkeypatch):
    assert [part.folder for part in demo.PARTS] == ["saddle", "equation", "batches"]
    for part in demo.PARTS:  # each is a command that the command line knows
        with pytest.raises(SystemExit):
            cli.main([*part.command.split(), "--help"])
    row = {"seconds": 10.0, "seconds_per_step": 0.1}
    rows = [{"optimiser": name, "train": train, **row} for name, train in (("minimise", 1.0), ("lbfgs", 4.0))]
    adam = {"optimiser": "adam", "train": 0.5, **row}
    equation = demo.PARTS[1].read
    assert equation({"rows": rows}) == "The loss of minimise is 4 times below lbfgs's."
    assert "It is above that of adam: this machine had time for 100" in equation({"rows": [*rows, adam]})
    monkeypatch.setattr(demo, "PARTS", [demo.PARTS[0]._replace(command="study saddle --steps 20")])
    for _ in range(2):  # the second time nothing is done again
        code, out, _ = saddlefree("demo --out d")
        assert code == 0
        assert "Newton ends on the saddle, at 0; the others go past it, to -0.499." in out
        assert "d/saddle/report.html" in out


def test_variants_are_kept_and_compared_on_resume(saddlefree, place):
    command = "train diabetes sgd --steps 2 --out t --variant width=4 --variant depth=1 --variant activation=tanh"
    assert saddlefree(command)[0] == 0
    variant = {"width": 4, "depth": 1, "activation": "tanh"}
    assert read_json(place / "t" / "config.json")["variant"] == variant
    assert read_json(place / "t" / "config.json")["plan"]["variant"] == {**variant, "dtype": "float32"}
    code, _, err = saddlefree(command, "--variant", "width=5", "--resume")
    assert code == 2
    assert "width was 4, is 5" in err
    assert json.loads((place / "t" / "summary.json").read_text())["steps"] == 2
