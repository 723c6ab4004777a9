"""The race on mini-batches: equal epochs for all, averaged parameters for all, and Adam at eight rates.

A cell is a comparison of one optimiser with itself over its seeds, and one record. The best of the eight rates is
chosen by the validation loss that is then compared, which favours the tuned Adam. On some tasks others are tuned in the
same way: `low_rank` by the rate of its Adam, and peers by theirs, and nothing else.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from saddlefree.lab import records, statistics, tables
from saddlefree.lab.records import Record

GROUP = "batches"
SEEDS = 3
RATES = ("3e-4", "1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2", "3.2e-2", "6.4e-2")


class Track(NamedTuple):
    """A task, and how it is run."""

    problem: str
    batch_size: int
    epochs: int
    average: float  # the decay of averaged parameters, about 1 − 20/steps
    variant: Mapping[str, Any] = {}


TRACKS = {
    "digits": Track("digits", 100, 30, 0.95),
    "kin8nm": Track("kin8nm", 100, 30, 0.99),
    "fashion-50": Track("fashion-mnist", 50, 1, 0.98),
    "fashion-200": Track("fashion-mnist", 200, 5, 0.98),
    "fashion-1000": Track("fashion-mnist", 1000, 10, 0.96),
    "fashion-4000": Track("fashion-mnist", 4000, 20, 0.92),
    "imbalanced": Track("imbalanced", 200, 10, 0.98),
    "adding": Track("adding", 100, 15, 0.98),
    "autoencoder-narrow": Track("fashion-autoencoder", 200, 5, 0.98, {"layers": "100-50-25-10"}),
    "transformer": Track("transformer", 32, 3, 0.96),
    "cifar-10-narrow": Track("cifar-10", 100, 4, 0.96, {"width": 16}),
    "svhn-narrow": Track("svhn", 100, 4, 0.96, {"width": 16}),
    "autoencoder-deep": Track("fashion-autoencoder", 200, 2, 0.96),
}
_ADAM = {"epsilon": 1e-8, "one_minus_beta1": 0.1, "one_minus_beta2": 0.001}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "adaptive": ("adaptive", {}),
    "next-batch-rate": ("next-batch-rate", {}),
    "adam": ("adam", {"learning_rate": 1e-3, "decay": "none", **_ADAM}),
    **{f"adam-{rate}": ("adam", {"learning_rate": float(rate), "decay": "cosine", **_ADAM}) for rate in RATES},
}
"""A name to the optimiser and its hyperparameters; the last eight decay by a cosine."""
TUNED: dict[str, dict[str, Any]] = {
    "fashion-50": {"rank": 5},
    "fashion-1000": {},
    "autoencoder-narrow": {},
    "transformer": {"rank": 5},
    "cifar-10-narrow": {"rank": 5},
}
"""Tasks on which `low_rank` is tuned, and its rank where a step's gradient takes little time, or a product much."""
BESIDE_PEERS = ("kin8nm", "fashion-1000")
"""Tasks on which peers are tuned."""
PEERS = ("muon", "soap", "psgd-kron", "schedule-free")
BESIDE_THE_PAPER, PAPERS_EPOCHS = ("cifar-10-narrow", "svhn-narrow"), 1
"""Tasks on which the paper's optimisers run with its hyperparameters, the batch size apart, and for how long."""
PAPERS = {
    **dict.fromkeys(("adaptive", "next-batch-rate", "series", "series-adaptive", "sgd", "adam"), SEEDS),
    **dict.fromkeys(("kfac-fixed", "kfac"), 1),
}
"""Two of this library's and the paper's, and the number of seeds: a step of K-FAC takes seconds."""


def _rated(optimiser: str, own: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {f"{optimiser}-{rate}": (optimiser, {"learning_rate": float(rate), **own}) for rate in RATES}


def methods(name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Those that are run on a task."""
    found = METHODS
    if name in TUNED:
        found = found | _rated("low-rank", {"decay": "cosine", "refresh_every": 100, **TUNED[name]})
    if name in BESIDE_PEERS:
        for peer in PEERS:
            found = found | _rated(peer, {} if peer == "schedule-free" else {"decay": "cosine"})
    return found


def changes(track: Track, own: Mapping[str, Any]) -> dict[str, Any]:
    """All hyperparameters that a cell sets."""
    return {**own, "batch_size": track.batch_size, "parameter_average": track.average}


def block(folder: pathlib.Path) -> str:
    """Validation losses, the default's over those of Adam, and the time of a step over Adam's."""
    rows = [_row(name, found) for name in TRACKS if (found := _found(folder, name)).keys() >= {"adaptive", "adam"}]
    if not rows:
        return "No run is recorded yet: `saddlefree reproduce --only '*:digits-*'`."
    columns = ["task", "default", "`next_batch_rate`", "Adam, 1e-3", "best of eight Adams", "its rate"]
    columns += ["default / Adam", "default / best", "step / Adam's", "`next_batch_rate` / Adam's", "in Adam's time"]
    return tables.plain(columns, rows)


def _found(folder: pathlib.Path, name: str) -> dict[str, Record]:
    """The records of a task by method."""
    stored = {method: f"{GROUP}/{name}-{method}" for method in methods(name)}
    return {m: records.read(folder, of) for m, of in stored.items() if (folder / f"{of}.json").exists()}


def _row(name: str, found: Mapping[str, Record]) -> list[str]:
    losses = {method: _loss(record) for method, record in found.items()}
    times = {method: record["summary"]["seconds_per_step"] for method, record in found.items()}
    best = _best(found, "adam")
    tuned = losses[f"adam-{best}"] if best else None
    return [
        name,
        tables.number(losses["adaptive"]),
        tables.number(losses["next-batch-rate"]) if "next-batch-rate" in losses else "–",
        tables.number(losses["adam"]),
        tables.number(tuned) if tuned else "–",
        best or "–",
        f"{losses['adaptive'] / losses['adam']:.2f}",
        f"{losses['adaptive'] / tuned:.2f}" if tuned else "–",
        f"{times['adaptive'] / times['adam']:.1f}",
        f"{times['next-batch-rate'] / times['adam']:.1f}" if "next-batch-rate" in times else "–",
        _in_time(found["adaptive"], found["adam"]["summary"]["seconds"]),
    ]


def _in_time(record: Record, seconds: float) -> str:
    """The validation loss when so much time was over."""
    reached = [loss for at, loss in _validation(record) if at <= seconds]
    return tables.number(reached[-1]) if reached else "–"


def _validation(record: Record) -> list[tuple[float, float]]:
    """Training time and the median of the validation losses."""
    curve = record["curves"]["val-seconds"]
    return list(zip(curve["x"], curve["median"], strict=True))


def tuned_block(folder: pathlib.Path) -> str:
    """Adam and `low_rank`, each at the best of eight rates, and when the second is where the first ends."""
    rows = []
    for name in TUNED:
        found = _found(folder, name)
        rates = _best(found, "adam"), _best(found, "low-rank")
        if None not in rates:
            row = _tuned_row(name, found[f"adam-{rates[0]}"], found[f"low-rank-{rates[1]}"], rates)
            trials = [found[f"{optimiser}-{rate}"] for optimiser in ("adam", "low-rank") for rate in RATES]
            minutes = sum(SEEDS * trial["summary"]["seconds"] for trial in trials) / 60
            rows.append([*row, f"{minutes:.1f}"])
    if not rows:
        return "No run is recorded yet: `saddlefree reproduce --only '*:fashion-1000-low-rank-*'`."
    columns = ["task", "Adam", "its rate", "s", "`low_rank`", "its rate", "s", "step / Adam's", "time to Adam's loss"]
    return tables.plain([*columns, "all trials, min"], rows)


def _tuned_row(name: str, adam: Record, ours: Record, rates: tuple[str | None, str | None]) -> list[str]:
    below = [seconds for seconds, loss in _validation(ours) if loss <= _loss(adam)]
    row = [name]
    for record, rate in zip((adam, ours), rates, strict=True):
        row += [tables.number(_loss(record)), str(rate), f"{record['summary']['seconds']:.1f}"]
    row.append(f"{ours['summary']['seconds_per_step'] / adam['summary']['seconds_per_step']:.2f}")
    return [*row, f"{below[0] / adam['summary']['seconds']:.2f} × Adam's" if below else "not reached"]


def peers_block(folder: pathlib.Path) -> str:
    """Every tuned optimiser at the best of its rates, and the time of its step over that of Adam."""
    rows = []
    for name in BESIDE_PEERS:
        found = _found(folder, name)
        best = {optimiser: _best(found, optimiser) for optimiser in ("adam", "low-rank", *PEERS)}
        if "adaptive" in found and any(best[peer] for peer in PEERS):
            step = found["adam"]["summary"]["seconds_per_step"]
            rows.append([name, _beside(found["adaptive"], None, step)])
            for optimiser, rate in best.items():
                rows[-1].append(_beside(found[f"{optimiser}-{rate}"], rate, step) if rate else "–")
    if not rows:
        return "No run is recorded yet: `saddlefree reproduce --only '*:kin8nm-muon-*'`."
    return tables.plain(["task", "default", "Adam", "`low_rank`", "Muon", "SOAP", "PSGD", "Schedule-Free"], rows)


def paper_block(folder: pathlib.Path) -> str:
    """The paper's optimisers beside the default: validation loss, and the time of a step over that of Adam."""
    rows = []
    for optimiser in PAPERS:
        row = [optimiser]
        for name in BESIDE_THE_PAPER:
            stored = [f"{GROUP}/{name}-paper-{method}" for method in (optimiser, "adam")]
            if all((folder / f"{path}.json").exists() for path in stored):
                own, adam = (records.read(folder, path) for path in stored)
                row.append(_beside(own, None, adam["summary"]["seconds_per_step"]))
            else:
                row.append("–")
        rows.append(row)
    return tables.plain(["optimiser", *BESIDE_THE_PAPER], rows)


def _beside(record: Record, rate: str | None, step: float) -> str:
    """Loss, time of a step over another one, and the rate."""
    told = f"{record['summary']['seconds_per_step'] / step:.1f} ×" + (f", {rate}" if rate else "")
    return f"{tables.number(_loss(record))} ({told})"


def _loss(record: Record) -> float:
    """The validation loss, ∞ where a run diverged."""
    return float(statistics.as_losses([record["summary"]["val"]])[0])


def _best(found: Mapping[str, Record], optimiser: str) -> str | None:
    """The rate with the lowest validation loss, once all are recorded."""
    tuned = {rate: _loss(found[f"{optimiser}-{rate}"]) for rate in RATES if f"{optimiser}-{rate}" in found}
    return min(tuned, key=lambda rate: tuned[rate]) if len(tuned) == len(RATES) else None
