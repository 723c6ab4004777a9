"""Data sets: real files where there are any, small files in the official formats, downloads from this very machine."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.server
import io
import os
import pathlib
import pickle
import struct
import tarfile
import threading

import numpy as np
import pytest
import scipy.io
from rich.console import Console
from sklearn.datasets import load_diabetes, load_digits

from saddlefree.lab import data
from saddlefree.lab.errors import UserError

REAL = os.environ.get("SADDLEFREE_DATA")
SYSTEM = data.SYSTEM
real = pytest.mark.skipif(not REAL, reason="SADDLEFREE_DATA is not set")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty machine; returns the folder that downloads go to."""
    monkeypatch.delenv("SADDLEFREE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(data, "SYSTEM", tmp_path / "system")
    return tmp_path / "cache" / "saddlefree"


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def text(rows):
    return "\n".join(" ".join(map(repr, row)) for row in rows).encode()


def energy(rng):
    """A table of the right size, its numbers and the file."""
    rows = rng.normal(size=(768, 9))
    return rows, {"data.txt": text(rows.tolist())}


def idx(array):
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + shape + array.tobytes(), mtime=0)


def fashion(rng, train=7, test=5):
    """Images, labels and the four files."""
    arrays = [rng.integers(256, size=(n, 28, 28), dtype=np.uint8) for n in (train, test)]
    labels = [np.arange(n, dtype=np.uint8) % 10 for n in (train, test)]
    parts = [arrays[0], labels[0], arrays[1], labels[1]]
    return arrays, labels, {file.name: idx(part) for file, part in zip(data._FASHION, parts, strict=True)}


def mat(**variables):
    file = io.BytesIO()
    scipy.io.savemat(file, variables, do_compression=True)
    return file.getvalue()


def svhn(rng, train=12, test=4):
    """Images as X has them, digits and the two files."""
    xs = [rng.integers(256, size=(32, 32, 3, n), dtype=np.uint8) for n in (train, test)]
    digits = [np.arange(n) % 10 for n in (train, test)]
    ys = [np.where(d == 0, 10, d).astype(np.uint8)[:, None] for d in digits]
    return xs, digits, {"train_32x32.mat": mat(X=xs[0], y=ys[0]), "test_32x32.mat": mat(X=xs[1], y=ys[1])}


def cifar(rng, batches=(1, 2, 3, 4, 5), each=4):
    """Images NHWC and labels by file name, and the files, written record by record."""
    names = [*(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in batches), "cifar-10-batches-bin/test_batch.bin"]
    truth, files = {}, {}
    for name in names:
        images, labels = rng.integers(256, size=(each, 32, 32, 3), dtype=np.uint8), rng.integers(10, size=each)
        records = [bytes([y]) + x.transpose(2, 0, 1).tobytes() for x, y in zip(images, labels, strict=True)]
        truth[name], files[name] = (images, labels), b"".join(records)
    return truth, files


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@contextlib.contextmanager
def serving(pages, cut=()):
    """A server of `pages` on this machine; of those in `cut` it sends a half. Yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            if name not in pages:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(pages[name])))
            self.end_headers()
            self.wfile.write(pages[name][: len(pages[name]) // (2 if name in cut else 1)])

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def publish(monkeypatch, name, address, pages):
    """Moves the files of a set to `address`, with the lengths and checksums of `pages`."""
    spec = data.SETS[name]
    files = tuple(
        dataclasses.replace(
            file,
            url=address + file.name,
            size=len(pages[file.name]),
            sha256=file.sha256 and hashlib.sha256(pages[file.name]).hexdigest(),
        )
        for file in spec.files
    )
    monkeypatch.setitem(data.SETS, name, dataclasses.replace(spec, files=files))


def left(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


# The real files.


@real
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test", "inputs"),
    [("uci-energy", 692, 76, 8), ("kin8nm", 7373, 819, 8), ("uci-protein", 41157, 4573, 9)],
)
def test_real_tables(name, train, test, inputs):
    dataset = data.load(name, REAL)
    assert dataset.train[0].shape == (train, inputs)
    assert dataset.train[1].shape == (train, 1)
    assert dataset.test[0].shape == (test, inputs)
    assert dataset.rows == {"train": (train, train), "test": (test, test)}
    assert dataset.partial is None
    lines = pathlib.Path(REAL, name, "data.txt").read_text().splitlines()
    order = list(map(int, pathlib.Path(REAL, name, "permutation.txt").read_text().split()))
    for (x, y), row, line in ((dataset.train, 3, order[3]), (dataset.test, -1, order[-1])):
        assert [*x[row], *y[row]] == [float(number) for number in lines[line].split()]


@real
@pytest.mark.data
def test_the_real_energy_file_has_the_listed_checksum():
    raw = pathlib.Path(REAL, "uci-energy", "data.txt").read_bytes()
    (file,) = data.SETS["uci-energy"].files
    assert (len(raw), hashlib.sha256(raw).hexdigest()) == (file.size, file.sha256)


@real
@pytest.mark.data
def test_real_cifar():
    """The first labels of both files (frog, truck, truck, deer, car; cat, ship, ship, plane, frog), known pixels."""
    dataset = data.load("cifar-10", REAL)
    assert dataset.train[1][:5].tolist() == [6, 9, 9, 4, 1]
    assert dataset.test[1][:5].tolist() == [3, 8, 8, 0, 6]
    assert np.bincount(dataset.test[1]).tolist() == [1000] * 10
    np.testing.assert_allclose(dataset.train[0].mean((0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=5e-3)
    assert dataset.train[0][0, :2, :2].tolist() == [[[59, 62, 63], [43, 46, 45]], [[16, 20, 20], [0, 0, 0]]]


@real
@pytest.mark.data
def test_real_svhn():
    dataset = data.load("svhn", REAL)
    assert dataset.train[1][:5].tolist() == [1, 9, 2, 3, 2]
    assert dataset.train[0].shape[1:] == dataset.test[0].shape[1:] == (32, 32, 3)
    assert set(dataset.test[1].tolist()) == set(range(10))
    np.testing.assert_allclose(dataset.train[0].mean((0, 1, 2)) / 255, [0.4377, 0.4438, 0.4728], atol=2e-2)


@pytest.mark.data
@pytest.mark.skipif(not (SYSTEM / "fashion-mnist").is_dir(), reason="the system has no copy of Fashion-MNIST")
def test_the_systems_fashion_mnist(monkeypatch):
    monkeypatch.setattr(data, "SYSTEM", SYSTEM)
    dataset = data.load("fashion-mnist", download=False)
    assert dataset.source == str(SYSTEM / "fashion-mnist")
    assert dataset.rows == {"train": (60_000, 60_000), "test": (10_000, 10_000)}
    assert np.bincount(dataset.train[1]).tolist() == [6000] * 10
    assert dataset.train[1][:5].tolist() == [9, 0, 0, 3, 0]
    assert dataset.train[0].mean() / 255 == pytest.approx(0.2860, abs=1e-4)


# Every format.


def test_digits():
    dataset, bunch = data.load("digits"), load_digits()
    images, labels = map(np.concatenate, zip(dataset.train, dataset.test, strict=True))
    assert (images.dtype, images.shape, labels.dtype) == (np.uint8, (1797, 8, 8, 1), np.int32)
    assert len(dataset.test[0]) == 1797 // 5
    order = np.random.default_rng(0).permutation(1797)
    np.testing.assert_array_equal(images[..., 0], bunch.images[order])
    np.testing.assert_array_equal(labels, bunch.target[order])
    assert (dataset.source, dataset.partial, data.status("digits")) == ("scikit-learn", None, "embedded")


def test_diabetes():
    dataset, bunch = data.load("diabetes"), load_diabetes(scaled=False)
    x, y = map(np.concatenate, zip(dataset.train, dataset.test, strict=True))
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((442, 10), (442, 1), np.float64, np.float64)
    assert len(dataset.test[0]) == 442 // 5
    order = np.random.default_rng(0).permutation(442)
    np.testing.assert_array_equal(np.hstack([x, y]), np.column_stack([bunch.data, bunch.target])[order])


def test_table_in_the_order_of_its_permutation(rng, tmp_path):
    rows, files = energy(rng)
    order = rng.permutation(768)
    write(tmp_path / "uci-energy", files | {"permutation.txt": text(order[:, None].tolist())})
    dataset = data.load("uci-energy", str(tmp_path))
    np.testing.assert_array_equal(np.hstack(dataset.train), rows[order[:692]])
    np.testing.assert_array_equal(np.hstack(dataset.test), rows[order[692:]])
    assert dataset.source == str(tmp_path / "uci-energy")


def test_table_without_a_permutation_comes_in_a_seeded_order_and_the_record_says_so(rng, tmp_path):
    rows, files = energy(rng)
    write(tmp_path / "uci-energy", files)
    dataset = data.load("uci-energy", str(tmp_path))
    order = np.random.default_rng(0).permutation(768)
    np.testing.assert_array_equal(np.vstack([np.hstack(dataset.train), np.hstack(dataset.test)]), rows[order])
    assert dataset.source == f"{tmp_path / 'uci-energy'} (rows in a seeded random order)"


def test_idx(rng, tmp_path):
    images, labels, files = fashion(rng)
    write(tmp_path / "fashion-mnist", files)
    dataset = data.load("fashion-mnist", str(tmp_path))
    for (x, y), image, label in zip((dataset.train, dataset.test), images, labels, strict=True):
        np.testing.assert_array_equal(x, image[..., None])
        np.testing.assert_array_equal(y, label)
        assert (x.dtype, y.dtype) == (np.uint8, np.int32)


def test_matlab(rng, tmp_path):
    xs, digits, files = svhn(rng)
    write(tmp_path / "svhn", files)
    dataset = data.load("svhn", str(tmp_path))
    for (x, y), image, digit in zip((dataset.train, dataset.test), xs, digits, strict=True):
        for i in range(len(x)):
            np.testing.assert_array_equal(x[i], image[:, :, :, i])
        np.testing.assert_array_equal(y, digit)
        assert (x.dtype, y.dtype) == (np.uint8, np.int32)


def test_records_of_the_batches_that_are_there(rng, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "ERRORS", Console(stderr=True, width=40))  # not to break the line
    truth, files = cifar(rng, batches=(2, 4))
    write(tmp_path / "cifar-10", files)
    dataset = data.load("cifar-10", str(tmp_path))
    (images2, labels2), (images4, labels4), (images, labels) = truth.values()
    np.testing.assert_array_equal(dataset.train[0], np.concatenate([images2, images4]))
    np.testing.assert_array_equal(dataset.train[1], np.concatenate([labels2, labels4]))
    np.testing.assert_array_equal(dataset.test[0], images)
    np.testing.assert_array_equal(dataset.test[1], labels)
    said = "8 of 50,000 training and 4 of 10,000 test examples"
    assert dataset.partial == said
    assert capsys.readouterr().err == f"cifar-10: {said} at hand\n"
    assert data.status("cifar-10", str(tmp_path)) == f"at hand: {said} ({tmp_path / 'cifar-10'})"
    assert capsys.readouterr().err == ""


def test_partial_names_only_what_is_short():
    nothing = (np.empty(0), np.empty(0))
    dataset = data.Dataset(nothing, nothing, {"train": (10_000, 50_000), "test": (10_000, 10_000)}, "here")
    assert dataset.partial == "10,000 of 50,000 training examples"
    assert dataset._replace(rows={"train": (5, 5), "test": (3, 3)}).partial is None


# Where it looks.


def test_order_of_places(rng, tmp_path, cache, monkeypatch):
    places = [tmp_path / "given", tmp_path / "variable", data.SYSTEM, cache]
    for place in places:
        write(place / "uci-energy", energy(rng)[1])
    monkeypatch.setenv("SADDLEFREE_DATA", str(tmp_path / "variable"))

    def found(data_dir=None):
        return data.status("uci-energy", data_dir).split()[2]

    assert found(str(tmp_path / "given")) == str(places[0] / "uci-energy")
    for place in places[1:]:
        assert found() == str(place / "uci-energy")
        (place / "uci-energy" / "data.txt").unlink()
        (place / "uci-energy").rmdir()
    assert data.status("uci-energy") == "to be downloaded (35 kB)"


def test_status_of_sets_that_are_not_there(cache):
    assert data.status("cifar-10") == "to be downloaded (170 MB)"
    write(cache / "svhn", {"train_32x32.mat": b""})
    assert data.status("svhn") == "to be downloaded (64 MB)"


def test_an_archive_counts_as_there_once_its_last_member_is(rng, cache):
    """Unpacking that was interrupted is done again; training batches that the user has taken away are not missed."""
    files = cifar(rng, batches=(1,))[1]
    *_, last = files
    write(cache / "cifar-10", {name: files[name] for name in files if name != last})
    assert data.status("cifar-10") == "to be downloaded (170 MB)"
    write(cache / "cifar-10", {last: files[last]})
    assert data.load("cifar-10").rows["train"] == (4, 50_000)


def test_status_of_an_incomplete_folder_is_one_short_line(tmp_path):
    folder = tmp_path / "svhn"
    folder.mkdir()
    assert data.status("svhn", str(tmp_path)) == f"not at hand: {folder / 'train_32x32.mat'} is missing"


def test_unknown_name():
    for call in (data.load, data.status):
        with pytest.raises(UserError, match=r"data set 'cifar10' is not known: did you mean cifar-10\?"):
            call("cifar10")


# What can be wrong with a file.


def refused(name, tmp_path, files, file, why):
    """Loading must fail with one line that has the file, the reason and the address; returns it."""
    folder = write(tmp_path / name, files)
    with pytest.raises(UserError) as caught:
        data.load(name, str(tmp_path))
    message = str(caught.value)
    assert str(folder / file) in message
    assert why in message
    assert data.SETS[name].files[0].url.rpartition("/")[0] in message
    assert "\n" not in message
    assert "run again" not in message  # which would not download into a folder of the user's
    return message


@pytest.mark.parametrize("name", ["uci-energy", "fashion-mnist", "svhn", "cifar-10"])
def test_missing_file(name, tmp_path):
    file = data.SETS[name].files[0]
    refused(name, tmp_path, {"README": b""}, file.names[0], "is missing; fetch")


def test_missing_file_without_download(cache):
    with pytest.raises(UserError, match=r"train_32x32.mat is missing; fetch http://ufldl") as caught:
        data.load("svhn", download=False)
    assert str(cache / "svhn") in str(caught.value)


def test_missing_test_batch(rng, tmp_path):
    files = cifar(rng)[1]
    del files["cifar-10-batches-bin/test_batch.bin"]
    refused("cifar-10", tmp_path, files, "cifar-10-batches-bin/test_batch.bin", "is missing; fetch")


def changed(table, row, column, value):
    rows = [line.split() for line in table.decode().splitlines()]
    rows[row][column] = value
    return "\n".join(map(" ".join, rows)).encode()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda raw: raw[: len(raw) // 2], "columns"),
        (lambda raw: raw.rpartition(b"\n")[0], "767 rows and 9 columns, not 768 and 9"),
        (lambda raw: b"\n".join(line + b" 1" for line in raw.splitlines()), "768 rows and 10 columns, not 768 and 9"),
        (lambda raw: changed(raw, 5, 2, "nan"), "a number is not finite"),
        (lambda raw: changed(raw, 5, 2, "inf"), "a number is not finite"),
        (lambda raw: changed(raw, 5, 2, "five"), "could not convert"),
        (lambda raw: b"\xff\xfe" + raw, "cannot be read"),
        (lambda raw: b"", "no data"),
    ],
)
def test_damaged_table(damage, why, rng, tmp_path):
    _, files = energy(rng)
    refused("uci-energy", tmp_path, {"data.txt": damage(files["data.txt"])}, "data.txt", why)


@pytest.mark.parametrize(
    "order",
    [
        list(range(767)),
        [*range(767), 766],
        list(range(1, 769)),
        [*range(767), "one"],
        [*range(767), "nan"],
        [*range(766), 766.5, 767],
        [],
    ],
)
def test_what_is_not_a_permutation(order, rng, tmp_path):
    _, files = energy(rng)
    write(tmp_path / "uci-energy", files | {"permutation.txt": "\n".join(map(str, order)).encode()})
    with pytest.raises(UserError, match=r"permutation.txt is not a permutation of 0..767; mend it, or delete it"):
        data.load("uci-energy", str(tmp_path))


TRAIN_IMAGES, TRAIN_LABELS = (file.name for file in data._FASHION[:2])


@pytest.mark.parametrize(
    ("file", "damaged", "why"),
    [
        (TRAIN_IMAGES, idx(np.zeros((7, 28, 28), np.uint8))[:40], "Compressed file ended"),
        (TRAIN_IMAGES, b"<html>", "Not a gzipped file"),
        (TRAIN_IMAGES, gzip.compress(b"", mtime=0), "magic number , not 00000803"),
        (TRAIN_IMAGES, idx(np.zeros(7, np.uint8)), "magic number 00000801, not 00000803"),
        (TRAIN_IMAGES, gzip.compress(bytes([0, 0, 8, 3]) + b"\0", mtime=0), "buffer is smaller"),
        (
            TRAIN_IMAGES,
            gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 7, 28, 28) + bytes(784), mtime=0),
            "reshape",
        ),
        (
            TRAIN_IMAGES,
            gzip.compress(bytes([0, 0, 8, 3]) + b"\xff" * 4 + struct.pack(">2I", 28, 28) + bytes(784), mtime=0),
            "reshape",
        ),
        (TRAIN_IMAGES, idx(np.zeros((7, 27, 28), np.uint8)), "shape (27, 28, 1), not (28, 28, 1)"),
        (TRAIN_LABELS, idx(np.zeros(6, np.uint8)), "6 labels for 7 images"),
        (TRAIN_LABELS, idx(np.array([0, 1, 2, 10, 4, 5, 6], np.uint8)), "labels outside 0..9"),
    ],
)
def test_damaged_idx(file, damaged, why, rng, tmp_path):
    refused("fashion-mnist", tmp_path, fashion(rng)[2] | {file: damaged}, file, why)


def test_more_examples_than_there_are(rng, tmp_path, monkeypatch):
    monkeypatch.setitem(data.SETS, "svhn", dataclasses.replace(data.SETS["svhn"], train=11))
    why = "12 examples, where the official file has 11"
    refused("svhn", tmp_path, svhn(rng)[2], "train_32x32.mat", why)


X = np.zeros((32, 32, 3, 5), np.uint8)
Y = np.ones((5, 1), np.uint8)


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (b"", "cannot be read"),
        (b"<html>" * 100, "cannot be read"),
        (mat(X=X, y=Y)[:150], "cannot be read"),
        (mat(X=np.random.default_rng(0).integers(256, size=X.shape, dtype=np.uint8), y=Y)[:9000], "cannot be read"),
        (mat(X=X), "no variables X and y"),
        (mat(X=Y, y=X), "X is uint8 of shape (5, 1)"),
        (mat(X=X.astype(float), y=Y), "X is float64"),
        (mat(X=X[:31], y=Y), "shape (31, 32, 3, 5)"),
        (mat(X=X[..., :0], y=Y[:0]), "0 examples"),
        (mat(X=X, y=Y[:4]), "4 labels for 5 images"),
        (mat(X=X, y=Y * 0), "labels outside 1..10"),
        (mat(X=X, y=Y * 11), "labels outside 1..10"),
        (mat(X=X, y=Y * np.nan), "labels outside 1..10"),
    ],
)
def test_damaged_matlab(damaged, why, rng, tmp_path):
    refused("svhn", tmp_path, svhn(rng)[2] | {"train_32x32.mat": damaged}, "train_32x32.mat", why)


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (bytes(3073 * 4 - 1), "cannot reshape"),
        (b"", "0 examples"),
        (bytes([10]) + bytes(3072), "labels outside 0..9"),
        (bytes(3073 * 10_001), "10,001 examples, where the official file has 10,000"),
    ],
)
def test_damaged_records(damaged, why, rng, tmp_path):
    name = "cifar-10-batches-bin/data_batch_3.bin"
    message = refused("cifar-10", tmp_path, cifar(rng)[1] | {name: damaged}, name, why)
    assert f"cifar-10-binary.tar.gz and unpack it in {tmp_path / 'cifar-10'}" in message


def test_damage_in_the_cache_is_mended_by_running_again(rng, cache):
    write(cache / "svhn", svhn(rng)[2] | {"train_32x32.mat": b"<html>"})
    with pytest.raises(UserError, match="delete it and run again, or fetch http://ufldl"):
        data.load("svhn", download=False)
    write(cache / "cifar-10", cifar(rng)[1] | {"cifar-10-batches-bin/data_batch_2.bin": b"<html>"})
    with pytest.raises(UserError, match=r"delete .*/cifar-10-batches-bin and run again, or fetch https://www"):
        data.load("cifar-10", download=False)


class Trap:
    """Unpickling it is an error."""

    def __reduce__(self):
        return (pytest.fail, ("something was unpickled",))


def test_the_pickled_version_of_cifar_is_refused_and_not_opened(tmp_path):
    bomb = pickle.dumps({b"data": Trap(), b"labels": [0]})
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    write(tmp_path / "cifar-10", {f"cifar-10-batches-py/{name}": bomb for name in names})
    with pytest.raises(UserError, match=r"Python version of CIFAR-10, which is pickled .*/cifar-10-binary.tar.gz and"):
        data.load("cifar-10", str(tmp_path))


@pytest.mark.parametrize("name", [name for name, spec in data.SETS.items() if spec.files])
def test_no_file_is_unpickled(name, tmp_path):
    files = dict.fromkeys((n for file in data.SETS[name].files for n in file.names), pickle.dumps(Trap()))
    write(tmp_path / name, files)
    with pytest.raises(UserError, match="cannot be read"):
        data.load(name, str(tmp_path))


# Downloads.


def test_download_of_files(rng, cache, monkeypatch, capsys):
    images, labels, files = fashion(rng)
    with serving(files) as address:
        publish(monkeypatch, "fashion-mnist", address, files)
        first = data.load("fashion-mnist")
    assert {path.name: path.read_bytes() for path in left(cache)} == files
    assert TRAIN_IMAGES in capsys.readouterr().err
    again = data.load("fashion-mnist")  # the server is gone
    for dataset in (first, again):
        np.testing.assert_array_equal(dataset.train[0][..., 0], images[0])
        np.testing.assert_array_equal(dataset.test[1], labels[1])
        assert dataset.source == str(cache / "fashion-mnist")


def test_download_without_a_checksum(rng, cache, monkeypatch):
    rows = rng.normal(size=(8192, 9))
    files = {"data.txt": text(rows.tolist())}
    with serving(files) as address:
        publish(monkeypatch, "kin8nm", address, files)
        assert data.SETS["kin8nm"].files[0].sha256 == ""
        dataset = data.load("kin8nm")
    np.testing.assert_array_equal(np.hstack(dataset.test), rows[np.random.default_rng(0).permutation(8192)[7373:]])
    assert left(cache) == [cache / "kin8nm" / "data.txt"]


def archive(files):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def test_download_of_an_archive_takes_only_the_members_that_are_needed(rng, cache, monkeypatch):
    truth, files = cifar(rng)
    others = {"cifar-10-batches-bin/readme.html": b"<html>", "../outside": b"escaped"}
    pages = {"cifar-10-binary.tar.gz": archive(files | others)}
    with serving(pages) as address:
        publish(monkeypatch, "cifar-10", address, pages)
        dataset = data.load("cifar-10")
    np.testing.assert_array_equal(dataset.train[0], np.concatenate([x for x, _ in list(truth.values())[:5]]))
    assert left(cache) == sorted(cache / "cifar-10" / name for name in files)


@pytest.mark.parametrize("name", ["uci-energy", "kin8nm"])
def test_cut_download_leaves_nothing_behind(name, rng, cache, monkeypatch):
    """With a checksum and without."""
    pages = {"data.txt": text(rng.normal(size=(100, 9)).tolist())}
    length = len(pages["data.txt"])
    with serving(pages, cut=pages) as address:
        publish(monkeypatch, name, address, pages)
        with pytest.raises(UserError, match=f"cut off after {length // 2:,} of {length:,} bytes") as caught:
            data.load(name)
    assert f"fetch {address}data.txt and put it into {cache / name}" in str(caught.value)
    assert list(cache.iterdir()) == []


def test_wrong_checksum_leaves_nothing_behind(rng, cache, monkeypatch):
    pages = {"cifar-10-binary.tar.gz": archive(cifar(rng)[1])}
    other = {"cifar-10-binary.tar.gz": archive(cifar(rng)[1])}
    expected, found = (hashlib.sha256(*p.values()).hexdigest() for p in (pages, other))
    with serving(other) as address:
        publish(monkeypatch, "cifar-10", address, pages)
        with pytest.raises(
            UserError, match=f"its SHA-256 is {found}; expected are .* with SHA-256 {expected}"
        ) as caught:
            data.load("cifar-10")
    assert f"fetch {address}cifar-10-binary.tar.gz and unpack it in {cache / 'cifar-10'}" in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_failed_download_keeps_the_files_that_came_and_is_taken_up_again(rng, cache, monkeypatch):
    files = svhn(rng)[2]
    with serving(files, cut=["test_32x32.mat"]) as address:
        publish(monkeypatch, "svhn", address, files)
        with pytest.raises(UserError, match=r"test_32x32.mat was not downloaded: cut off"):
            data.load("svhn")
    assert left(cache) == [cache / "svhn" / "train_32x32.mat"]
    with serving({"test_32x32.mat": files["test_32x32.mat"]}) as address:
        publish(monkeypatch, "svhn", address, files)
        assert data.load("svhn").rows == {"train": (12, 73_257), "test": (4, 26_032)}


def test_download_that_finds_no_file_or_no_server(cache, monkeypatch):
    with serving({}) as address:
        publish(monkeypatch, "uci-energy", address, {"data.txt": b""})
        with pytest.raises(UserError, match="was not downloaded: HTTP Error 404"):
            data.load("uci-energy")
    with pytest.raises(UserError, match=r"was not downloaded: .*refused"):
        data.load("uci-energy")
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    publish(monkeypatch, "uci-energy", "http://127.0.0.1:9/", {"data.txt": b""})
    with pytest.raises(UserError, match=r"data.txt was not downloaded: .*Not a directory"):
        data.load("uci-energy")


def test_no_download_into_a_folder_of_the_users(rng, tmp_path, monkeypatch):
    files = svhn(rng)[2]
    write(tmp_path / "svhn", {"train_32x32.mat": files["train_32x32.mat"]})
    with serving(files) as address:
        publish(monkeypatch, "svhn", address, files)
        with pytest.raises(UserError, match=r"test_32x32.mat is missing; fetch"):
            data.load("svhn", str(tmp_path))
