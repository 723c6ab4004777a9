"""Hostile files: what we read is refused or read as data; nothing is unpickled, run, or written elsewhere.

`tests/lab/test_data.py` and `test_report.py` have downloads, HTML in names, and damage that has a message of its own.
Here bytes and values are changed at random, and an audit hook sees what the interpreter does.
"""

import contextlib
import copy
import hashlib
import io
import json
import os
import pathlib
import pickle
import shutil
import sys
import tarfile
import tempfile

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd import cases

sys.path.append(
    str(pathlib.Path(__file__).parent.parent / "lab")
)  # whose helpers make files that are as they should be
from test_data import Trap, cifar, energy, fashion, publish, serving, svhn, write
from test_report import compare_runs, write_folder

from saddlefree.lab import checkpoint, data, figures, report
from saddlefree.lab.errors import UserError
from saddlefree.lab.plan import build
from saddlefree.lab.run import load, run

FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
WRITING = os.O_WRONLY | os.O_RDWR
allowed, events = None, []  # the folder that may be written to while the hook watches, and what it saw


def hook(event, arguments):
    if allowed is None:
        return
    if event in FORBIDDEN:
        events.append((event, arguments))
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike) and arguments[2] & WRITING:
        path = pathlib.Path(os.fsdecode(arguments[0])).resolve()
        folders = (allowed, jax.config.jax_compilation_cache_dir)
        if not any(path.is_relative_to(folder) for folder in folders) and str(path) != os.devnull:
            events.append((event, arguments))


sys.addaudithook(hook)


@contextlib.contextmanager
def watched():
    """A new folder, the only one that may be written to; nothing forbidden may happen. A UserError is an answer."""
    global allowed
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        allowed = folder
        try:
            with contextlib.suppress(UserError):
                yield folder
        finally:
            allowed = None
        seen = events.copy()
        events.clear()
        assert not seen


def test_the_hook_sees():
    with pytest.raises(AssertionError), watched() as folder:
        pickle.loads(pickle.dumps(np.zeros(1)))
    with pytest.raises(AssertionError), watched() as folder:
        (folder.parent / f"{folder.name}-outside").open("w").close()
    (folder.parent / f"{folder.name}-outside").unlink()
    with watched() as folder:
        (folder / "inside").write_text("")


@st.composite
def damaged(draw, raw):
    """Bytes that were changed, cut, extended, or are others."""
    kind = draw(st.sampled_from(["change", "change", "cut", "extend", "other", "pickle"]))
    if kind == "cut":
        return raw[: draw(st.integers(0, len(raw)))]
    if kind == "extend":
        return raw + draw(st.binary(max_size=20))
    if kind == "other":
        return draw(st.binary(max_size=200))
    if kind == "pickle":
        return pickle.dumps(Trap())
    changed = bytearray(raw)
    for _ in range(draw(st.integers(1, 8))):
        # Headers are at the beginning.
        place = draw(st.integers(0, min(64, len(raw) - 1)) | st.integers(0, len(raw) - 1))
        changed[place] = draw(st.integers(0, 255))
    return bytes(changed)


SETS = {"fashion-mnist": fashion, "svhn": svhn, "cifar-10": cifar, "uci-energy": energy}


@pytest.mark.parametrize("name", SETS)
def test_data_files(name, count, monkeypatch):
    monkeypatch.delenv("SADDLEFREE_DATA", raising=False)
    files = SETS[name](np.random.default_rng(0))[-1]

    @given(st.data())
    @cases(10, 1000)
    def check(draws):
        chosen = draws.draw(st.sampled_from(sorted(files)))
        raw = draws.draw(damaged(files[chosen]))
        count("hostile files of data sets")
        with watched() as folder:
            write(folder / name, {**files, chosen: raw})
            found = data.load(name, str(folder), download=False)
            assert all(np.isfinite(part).all() for part in (*found.train, *found.test))

    check()


ODD_JSON = st.sampled_from(
    [
        *(None, True, -1, 0, 3, 0.5, 1e308, 10**30, "", "x", "\x00", "\ud800"),
        *("<script>run()</script>", "../../outside", "/etc/passwd"),
        *([], {}, [1], ["x"], [[]], [None], {"a": 1}, {"__class__": "x"}),
    ]
)


@st.composite
def other_values(draw, record):
    """A record with one value, anywhere in it, replaced or removed."""
    record = copy.deepcopy(record)
    where, parent = record, None
    for _ in range(draw(st.integers(1, 5))):
        if not isinstance(where, dict | list) or not where:
            break
        parent, key = where, draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
        where = parent[key]
    if parent is None or draw(st.integers(0, 9)) == 0:
        return draw(ODD_JSON)
    if draw(st.booleans()):
        parent[key] = draw(ODD_JSON)
    else:
        del parent[key]
    return record


def damage_json(draws, path):
    """Damages a file of JSON, or of lines of it."""
    raw = path.read_bytes()
    if draws.draw(st.booleans()):
        path.write_bytes(draws.draw(damaged(raw)))
    elif path.suffix == ".jsonl":
        lines = raw.decode().splitlines()
        number = draws.draw(st.integers(0, len(lines) - 1))
        lines[number] = json.dumps(draws.draw(other_values(json.loads(lines[number]))))
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text(json.dumps(draws.draw(other_values(json.loads(raw)))))


def damaged_copy(draws, source, folder):
    """A copy of a run in which one file is damaged."""
    copied = shutil.copytree(source, folder / "run")
    damage_json(draws, copied / draws.draw(st.sampled_from(["config.json", "summary.json", "metrics.jsonl"])))
    return copied


def test_files_of_reports(count, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "save", lambda figure, path, title, table=None: figures.Picture("", table=table))
    write_folder(tmp_path, compare_runs())

    @given(st.data())
    @cases(8, 500)
    def check(draws):
        count("hostile files of runs")
        with watched() as folder:
            page = report.write(damaged_copy(draws, tmp_path, folder)).path.read_text()
            assert "<script" not in page

    check()


def test_a_report_shows_no_file_from_elsewhere(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    (study := tmp_path / "study").mkdir()
    for name in ("../secret.png", str(tmp_path / "secret.png")):
        config = {"command": "study", "title": "", "figures": [{"file": name, "caption": ""}]}
        (study / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="is not in"):
            report.write(study)


def test_a_value_of_another_kind_is_one_line(tmp_path):
    config = json.loads((write_folder(tmp_path, compare_runs()) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"budget": [1]}))
    with pytest.raises(UserError, match="cannot be shown"):
        report.write(tmp_path)


def test_files_of_a_run_that_is_resumed(count, tmp_path):
    plan = build("saddle", "sgd", load("saddle", None), seeds=(0,), steps=3)
    task = load("saddle", None)
    run(plan, task, tmp_path, keep_checkpoint=True)

    @given(st.data())
    @cases(8, 300)
    def check(draws):
        count("hostile files of runs")
        with watched() as folder:
            run(plan, task, damaged_copy(draws, tmp_path, folder))

    check()


STATE = {"x": np.arange(6.0, dtype=np.float32), "n": np.arange(3)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves its event loop open
def test_checkpoints(count, tmp_path):
    """Also where the checksums were made to fit."""
    checkpoint.save(tmp_path, 7, STATE, {"step": 7})
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

    @given(st.data())
    @cases(15, 1000)
    def check(draws):
        chosen = draws.draw(st.sampled_from(names) | st.just("checkpoints/7/record.json"))
        count("hostile checkpoints")
        with watched() as folder:
            shutil.copytree(tmp_path, folder, dirs_exist_ok=True)
            path, record = folder / chosen, folder / "checkpoints/7/record.json"
            if path == record:
                damage_json(draws, path)
            else:
                path.write_bytes(draws.draw(damaged(path.read_bytes())))
                if draws.draw(st.booleans()):
                    fitting = json.loads(record.read_text())
                    name = str(path.relative_to(record.parent / "state"))
                    fitting["sha256"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
                    record.write_text(json.dumps(fitting))
            checkpoint.restore(folder, STATE)

    check()


def member(name, content=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def test_archives(count, tmp_path, monkeypatch):
    """Members that are links, devices, or lead elsewhere under the names that are wanted."""
    monkeypatch.delenv("SADDLEFREE_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(data, "SYSTEM", tmp_path / "system")
    (secret := tmp_path / "secret").write_bytes(bytes(3073))
    good = cifar(np.random.default_rng(0))[-1]
    first = sorted(good)[0]
    evil = [
        [member(first, type=tarfile.SYMTYPE, linkname=str(secret))],
        [member(first, type=tarfile.SYMTYPE, linkname="../../../secret")],
        [member(first, type=tarfile.LNKTYPE, linkname=str(secret))],
        [member(first, type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
        [member(first, type=tarfile.FIFOTYPE)],
        [member(first, type=tarfile.DIRTYPE)],
        [member("cifar-10-batches-bin", type=tarfile.SYMTYPE, linkname=str(tmp_path / "outside"))],
        [],
    ]
    (tmp_path / "outside").mkdir()
    for number, members in enumerate(evil):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            for info, content in [*members, *(member(n, c) for n, c in good.items() if n != first or not members)]:
                tar.addfile(info, io.BytesIO(content))
        pages = {"cifar-10-binary.tar.gz": file.getvalue() if members else b"no archive"}
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{number}"))
        count("hostile archives")
        with serving(pages) as address:
            publish(monkeypatch, "cifar-10", address, pages)
            with contextlib.suppress(UserError):
                data.load("cifar-10")
        assert not list((tmp_path / "outside").iterdir())
        assert secret.read_bytes() == bytes(3073)
