"""Medians over seeds and how sure they are, as in the paper: by drawing the seeds again, with replacement.

A seed that diverged counts as +∞ and is never left out: where most seeds diverge, so does the median.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 1000
POINTS = 200

Lines = Sequence[Mapping[str, Any]]
"""What one seed logged, in order: each line has `step`, `seconds`, `train` and whatever else was measured then."""


class Curve(NamedTuple):
    """A median over seeds along time or steps, with the 16th to 84th percentile of its bootstrap medians."""

    x: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Rank(NamedTuple):
    """The lowest point of an optimiser's median profile and its place among the others', each with standard error."""

    lowest: float
    error: float
    rank: float  # 1 is best; a mean over resamples
    rank_error: float


def bootstrap_medians(values: ArrayLike, seed: int = 0) -> np.ndarray:
    """Medians over the first axis, the seeds, of each of B = 1000 resamples by `numpy.random.default_rng(seed)`.

    As many seeds are always drawn alike, so that optimisers that share their seeds are compared pair by pair.
    """
    values = as_losses(values)
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    # In pieces, for memory.
    return np.concatenate([np.median(values[piece], axis=1) for piece in np.array_split(draws, 20)])


def median_and_error(values: ArrayLike, seed: int = 0) -> tuple[float, float]:
    """The median over seeds, and the standard deviation of its bootstrap medians (B = 1000, `default_rng(seed)`).

    The error is ∞ where a resample's median is, and NaN, not known, for one seed.

    >>> median_and_error([1.0, 2.0, None])[0], median_and_error([1.0, None, float("nan")])[0]
    (2.0, inf)
    """
    values = as_losses(values)
    return float(np.median(values)), _error(bootstrap_medians(values, seed), len(values))


def diverged(lines: Lines) -> bool:
    """Whether a seed's last training or validation loss is not finite."""
    return not np.all(np.isfinite(as_losses([lines[-1]["train"], lines[-1].get("val", 0.0)])))


def profiles(seeds: Sequence[Lines], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """All places `x` > 0 where a seed measured `y`, and the value of each seed there: (places,), (seeds, places).

    Between its own places a seed's value is interpolated, after them the last one is carried forward. The places begin
    where every seed that measured `y` has a value, and are none where no seed did.
    """
    if not any(y in line for lines in seeds for line in lines):
        return np.zeros(0), np.zeros((len(seeds), 0))
    found = [(at, values) for at, values in (series(lines, x, y) for lines in seeds) if len(at)]
    grid = np.unique(np.concatenate([at for at, _ in found]))
    grid = grid[(grid >= max(at[0] for at, _ in found)) & (grid > 0)]
    return grid, np.stack([_interpolate(grid, at, values) for at, values in found])


def curves(runs: Mapping[str, Sequence[Lines]], x: str, y: str) -> dict[str, Curve]:
    """The curve of each optimiser that measured `y`, at no more than 200 places, spread as a logarithmic axis has them.

    Args:
      runs: optimiser to the lines of each of its seeds.
      x: `step` or `seconds`; seeds need not share their places.
      y: `train`, `test`, or any other figure.
    """
    found = {}
    for name, seeds in runs.items():
        grid, values = profiles(seeds, x, y)
        if len(grid):
            places = np.minimum(np.geomspace(grid[0], grid[-1], POINTS), grid[-1])  # it rounds
            kept = np.unique(np.searchsorted(grid, places))
            grid, values = grid[kept], values[:, kept]
            # An order statistic: between a finite value and ∞ there is nothing to interpolate.
            low, high = np.percentile(bootstrap_medians(values), [16, 84], axis=0, method="nearest")
            found[name] = Curve(grid, np.median(values, axis=0), low, high)
    return found


def rankings(losses: Mapping[str, ArrayLike], seed: int = 0) -> dict[str, Rank]:
    """Optimisers by the lowest loss of their median profile, best first, as in the paper's figure of rankings.

    Each resample of the seeds gives a median profile and its minimum over time, by which optimisers take ranks from 1
    on; equals share theirs. Errors are standard deviations over resamples, and NaN, not known, for one seed.

    Args:
      losses: optimiser to losses of shape (seeds,) or (seeds, places).
      seed: of the resamples.

    >>> rankings({"sgd": [3.0, 3.0], "adam": [1.0, 1.0]})["adam"]
    Rank(lowest=1.0, error=0.0, rank=1.0, rank_error=0.0)
    """
    minima = np.stack([bootstrap_medians(v, seed).reshape(RESAMPLES, -1).min(axis=1) for v in losses.values()])
    below, equal = minima[None] < minima[:, None], minima[None] == minima[:, None]
    ranks = below.sum(axis=1) + (equal.sum(axis=1) + 1) / 2
    found = {}
    for (name, given), sample, rank in zip(losses.items(), minima, ranks, strict=True):
        values = as_losses(given)
        lowest, seeds = float(np.median(values, axis=0).min()), len(values)
        found[name] = Rank(lowest, _error(sample, seeds), float(rank.mean()), _error(rank, seeds))
    return dict(sorted(found.items(), key=lambda item: (item[1].lowest, item[1].rank)))


def summarise(optimiser: str, seeds: Sequence[Lines]) -> dict[str, Any]:
    """An optimiser's row of a comparison: medians over seeds of final values, their errors, and the best along the way.

    A seed that diverged ends at ∞, or for accuracy at −∞; its best validation loss is the best before. None stands for
    what is not finite, not known or not measured, but only a row with `accuracy` has that key.
    """
    row: dict[str, Any] = {"optimiser": optimiser, "seeds": len(seeds), "diverged": sum(map(diverged, seeds))}
    for name in ("train", "val", "test"):
        median, error = median_and_error([_final(lines, name) for lines in seeds])
        row |= {name: _finite(median), f"{name}_error": _finite(error)}
    best = [min(series(lines, "step", "val")[1], default=math.inf) for lines in seeds]
    seconds = [lines[-1]["seconds"] for lines in seeds]
    steps = [max(lines[-1]["step"], 1) for lines in seeds]
    row |= {
        "best_val": _finite(float(np.median(best))),
        "seconds_per_step": float(np.median(np.divide(seconds, steps))),
        "seconds": float(np.median(seconds)),
    }
    if any("accuracy" in line for lines in seeds for line in lines):
        row["accuracy"] = _finite(-float(np.median(as_losses([-_final(lines, "accuracy") for lines in seeds]))))
    return row


def _final(lines: Lines, y: str) -> float:
    return float([math.inf, *series(lines, "step", y)[1]][-1])


def series(lines: Lines, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Where a seed measured `y`, and what; after divergence it is ∞."""
    kept = [line for line in lines if y in line] + ([{x: lines[-1][x], y: None}] if diverged(lines) else [])
    return np.array([line[x] for line in kept], dtype=float), as_losses([line[y] for line in kept])


def _interpolate(grid: np.ndarray, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Linear, and ∞ from the last finite value on to the first infinite one."""
    finite = np.isfinite(values)
    return np.where(np.interp(grid, at, ~finite) > 0, np.inf, np.interp(grid, at, np.where(finite, values, 0)))


def as_losses(values: ArrayLike) -> np.ndarray:
    """As numbers, where ∞ stands for all that is not finite or None."""
    values = np.asarray(values, dtype=float)  # None becomes NaN
    return np.where(np.isfinite(values), values, np.inf)


def _error(samples: np.ndarray, seeds: int) -> float:
    if seeds == 1:
        return math.nan
    return float(np.std(samples)) if np.all(np.isfinite(samples)) else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
