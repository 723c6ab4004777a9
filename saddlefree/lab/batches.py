"""The race on mini-batches: equal epochs for all, averaged parameters for all, and Adam at eight rates.

A cell is a comparison of one optimiser with itself over its seeds, and one record. The best of the eight rates is
chosen by the validation loss that is then compared, which favours the tuned Adam.
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


def changes(track: Track, method: str) -> dict[str, Any]:
    """All hyperparameters that a cell sets."""
    return {**METHODS[method][1], "batch_size": track.batch_size, "parameter_average": track.average}


def block(folder: pathlib.Path) -> str:
    """Validation losses, the default's over those of Adam, and the time of a step over Adam's."""
    rows = [_row(name, found) for name in TRACKS if (found := _found(folder, name)).keys() >= {"adaptive", "adam"}]
    if not rows:
        return "No run is recorded yet: `saddlefree reproduce --only '*:digits-*'`."
    columns = ["task", "default", "`next_batch_rate`", "Adam, 1e-3", "best of eight Adams", "its rate"]
    columns += ["default / Adam", "default / best", "step / Adam's", "`next_batch_rate` / Adam's"]
    return tables.plain(columns, rows)


def _found(folder: pathlib.Path, name: str) -> dict[str, Record]:
    """The records of a task by method."""
    stored = {method: f"{GROUP}/{name}-{method}" for method in METHODS}
    return {m: records.read(folder, of) for m, of in stored.items() if (folder / f"{of}.json").exists()}


def _row(name: str, found: Mapping[str, Record]) -> list[str]:
    values = statistics.as_losses([record["summary"]["val"] for record in found.values()])
    losses = dict(zip(found, values.tolist(), strict=True))
    times = {method: record["summary"]["seconds_per_step"] for method, record in found.items()}
    tuned = {rate: losses[f"adam-{rate}"] for rate in RATES if f"adam-{rate}" in losses}
    best = min(tuned, key=lambda rate: tuned[rate]) if len(tuned) == len(RATES) else None
    return [
        name,
        tables.number(losses["adaptive"]),
        tables.number(losses["next-batch-rate"]) if "next-batch-rate" in losses else "–",
        tables.number(losses["adam"]),
        tables.number(tuned[best]) if best else "–",
        best or "–",
        f"{losses['adaptive'] / losses['adam']:.2f}",
        f"{losses['adaptive'] / tuned[best]:.2f}" if best else "–",
        f"{times['adaptive'] / times['adam']:.1f}",
        f"{times['next-batch-rate'] / times['adam']:.1f}" if "next-batch-rate" in times else "–",
    ]
