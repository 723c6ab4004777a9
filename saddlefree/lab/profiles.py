"""How soon a loss is reached: time to target, and performance profiles over several problems.

A target is reached at the first evaluation that is as low; between evaluations nothing is interpolated, and what is
never reached takes ∞.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from saddlefree.lab import statistics
from saddlefree.lab.statistics import Curve, Lines

Profile = dict[str, np.ndarray]
"""Optimiser to its time over that of the fastest, for each target, ascending."""
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4)
"""Of the targets of one problem, as shares of what lies between the first loss and the lowest."""


def first_below(x: np.ndarray, losses: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The first place where a loss is at or below each target, or ∞.

    >>> first_below(np.array([1.0, 2.0, 3.0]), np.array([4.0, 1.0, 2.0]), np.array([4.0, 1.5, 0.5]))
    array([ 1.,  2., inf])
    """
    places = np.searchsorted(-np.minimum.accumulate(losses), -targets)
    return np.append(np.asarray(x, float), np.inf)[places]


def time_to_target(runs: Mapping[str, Sequence[Lines]], loss: str, points: int = 100) -> dict[str, Curve]:
    """Median seconds over seeds to each of `points` targets, by optimiser, as far down as half of its seeds come.

    Args:
      runs: optimiser to the lines of each of its seeds.
      loss: `train` or `test`; nothing is returned where it is not positive.
      points: from the highest first loss of an optimiser to the lowest that any seed has, evenly in the logarithm.
    """
    found = {
        name: [s for s in (statistics.series(lines, "seconds", loss) for lines in seeds) if len(s[0])]
        for name, seeds in runs.items()
    }
    found = {name: seeds for name, seeds in found.items() if seeds}
    finite = [values[np.isfinite(values)] for seeds in found.values() for _, values in seeds]
    lowest = min((float(values.min()) for values in finite if len(values)), default=0.0)
    if lowest <= 0:
        return {}
    first = [float(np.median([values[0] for _, values in seeds])) for seeds in found.values()]
    targets = np.geomspace(max(value for value in first if np.isfinite(value)), lowest, points)
    curves = {}
    for name, seeds in found.items():
        times = np.stack([first_below(x, values, targets) for x, values in seeds])
        median = np.median(times, axis=0)
        kept = np.isfinite(median)
        if kept.any():
            low, high = np.percentile(statistics.bootstrap_medians(times[:, kept]), [16, 84], axis=0, method="nearest")
            curves[name] = Curve(targets[kept], median[kept], low, high)
    return curves


def instances(curves: Sequence[Mapping[str, Curve]]) -> dict[str, np.ndarray]:
    """Times to the targets of all problems, one after another, by optimiser.

    A problem's targets are L + τ (F − L) for τ in TOLERANCES, with L the lowest median of any optimiser and F the
    highest first one (Moré & Wild 2009).

    Args:
      curves: of each problem, the losses of each optimiser against seconds; all have the same optimisers.
    """
    times: dict[str, list[np.ndarray]] = {name: [] for name in curves[0]}
    for problem in curves:
        medians = [curve.median[np.isfinite(curve.median)] for curve in problem.values()]
        lowest, first = min(m.min() for m in medians if len(m)), max(m[0] for m in medians if len(m))
        targets = lowest + np.array(TOLERANCES) * (first - lowest)
        for name, curve in problem.items():
            times[name].append(first_below(curve.x, curve.median, targets))
    return {name: np.concatenate(found) for name, found in times.items()}


def over_problems(curves: Sequence[Mapping[str, Curve]]) -> Profile:
    """The performance profile over problems, of the optimisers that all of them have.

    Args:
      curves: of each problem, the training loss of each optimiser against seconds.
    """
    shared = [name for name in curves[0] if all(name in one for one in curves)] if len(curves) > 1 else []
    return performance(instances([{name: one[name] for name in shared} for one in curves])) if len(shared) > 1 else {}


def performance(times: Mapping[str, np.ndarray]) -> Profile:
    """The performance profile of each optimiser (Dolan & Moré 2002): its times over those of the fastest, ascending.

    The share of ratios ≤ r is ρ(r), how many targets an optimiser reaches in at most r times the time of the fastest:
    ρ(1) is how often it is the fastest, and ρ of the largest finite ratio how many it reaches at all.

    Args:
      times: optimiser to the time that it takes to each target, in the same order for all; ∞ where it is not reached,
        which at least one optimiser does.

    >>> performance({"a": np.array([1.0, 4.0]), "b": np.array([2.0, np.inf])})
    {'a': array([1., 1.]), 'b': array([ 2., inf])}
    """
    best = np.min(list(times.values()), axis=0)
    return {name: np.sort(taken / best) for name, taken in times.items()}
