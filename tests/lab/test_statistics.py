"""Bootstrap statistics against every resample there is, and the paper's table."""

import itertools
import math
import statistics as stdlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saddlefree.lab import paper, statistics

losses = st.floats(1e-3, 1e3)
some_diverged = st.lists(losses | st.sampled_from([None, math.nan, math.inf, -math.inf]), min_size=1)


def all_medians(values):
    return [stdlib.median(draw) for draw in itertools.product(values, repeat=len(values))]


def lines(x, **figures):
    """One seed's lines; a missing value was not measured then."""
    return [
        {"step": x[i], "seconds": 0.5 * x[i], **{name: v[i] for name, v in figures.items() if v[i] != "unmeasured"}}
        for i in range(len(x))
    ]


@pytest.mark.parametrize("values", [[1.0, 2.0, 5.0], [3.0, 1.0, 4.0, 1.5], [2.0, 7.0, 1.0, 8.0, 2.5]])
def test_error_is_that_of_all_resamples(values):
    median, error = statistics.median_and_error(values)
    assert median == stdlib.median(values)
    assert error == pytest.approx(stdlib.pstdev(all_medians(values)), rel=0.1)
    assert error == statistics.median_and_error(values)[1]
    assert error != statistics.median_and_error(values, seed=1)[1]


@given(some_diverged)
def test_diverged_seeds_count_as_infinite(values):
    lost = sum(value is None or not math.isfinite(value) for value in values)
    median, error = statistics.median_and_error(values)
    assert math.isinf(median) == (2 * lost >= len(values))
    assert math.isnan(error) == (len(values) == 1)
    if 2 * lost >= len(values) > 1:
        assert error == math.inf
    if not lost:
        assert median == stdlib.median(values)


@given(st.lists(st.lists(st.tuples(st.integers(1, 50), losses), min_size=1, max_size=6), min_size=1, max_size=3))
def test_profiles_interpolate_and_carry_forward(data):
    runs = [dict(sorted(run)) for run in data]
    grid, values = statistics.profiles([lines(list(run), train=list(run.values())) for run in runs], "step", "train")
    places = sorted(set().union(*runs))
    assert list(grid) == [place for place in places if place >= max(min(run) for run in runs)]
    for run, row in zip(runs, values, strict=True):
        for place, value in zip(grid, row, strict=True):
            before, after = max(x for x in run if x <= place), min((x for x in run if x >= place), default=max(run))
            share = (place - before) / (after - before) if after > before else 0
            assert value == pytest.approx((1 - share) * run[before] + share * run[after])


def test_a_seed_that_diverges_is_infinite_from_then_on():
    """Also for a loss that was not measured when it diverged, and between the last finite value and the first not."""
    good = lines([0, 2, 4, 6], train=[1.0] * 4, test=[1.0, 1.0, "unmeasured", 1.0])
    lost = lines([0, 3, 4], train=[1.0, 1.0, None], test=[2.0, 2.0, "unmeasured"])
    grid, values = statistics.profiles([good, lost], "step", "test")
    np.testing.assert_array_equal(grid, [2, 3, 4, 6])
    np.testing.assert_array_equal(values, [[1, 1, 1, 1], [2, 2, math.inf, math.inf]])
    np.testing.assert_array_equal(statistics.profiles([lost], "seconds", "train")[1], [[1, math.inf]])
    by_validation = lines([1], train=[1.0], val=[None])
    assert [*map(statistics.diverged, [good, lost, by_validation])] == [False, True, True]


def test_bands_of_three_seeds():
    """Of 27 resamples, 7 have the lowest value as their median and 7 the highest: both lie outside of 16 % to 84 %."""
    seeds = [lines([1, 10, 100], train=[value, 2 * value, 3 * value]) for value in (1.0, 2.0, 4.0)]
    found = statistics.curves({"adam": seeds, "silent": seeds[:1]}, "seconds", "train")
    np.testing.assert_array_equal(found["adam"], [[0.5, 5, 50], [2, 4, 6], [1, 2, 3], [4, 8, 12]])
    np.testing.assert_array_equal(found["silent"][1:], [[1, 2, 3]] * 3)
    assert statistics.curves({"adam": seeds}, "step", "test") == {}


def test_long_curves_are_thinned_evenly_on_a_logarithmic_axis():
    x = list(range(1, 5001))
    curve = statistics.curves({"adam": [lines(x, train=[1.0 / step for step in x])]}, "step", "train")["adam"]
    assert curve.x[[0, -1]].tolist() == [1, 5000]
    assert len(curve.x) <= statistics.POINTS
    assert np.diff(np.log(curve.x[curve.x > 50])).max() < 1.5 * np.log(5000) / statistics.POINTS
    np.testing.assert_array_equal(curve.median, 1 / curve.x)


@given(st.dictionaries(st.text(), some_diverged, min_size=1, max_size=4))
def test_ranks_share_their_sum(found):
    ranks = statistics.rankings(found)
    assert sum(rank.rank for rank in ranks.values()) == pytest.approx(len(found) * (len(found) + 1) / 2)
    lowest = [rank.lowest for rank in ranks.values()]
    assert lowest == sorted(lowest)


def test_ranks_of_two_optimisers_over_all_pairs_of_resamples():
    ours, theirs = [1.0, 6.0, 2.0], [4.0, 5.0, 3.0]
    draws = list(itertools.product(range(3), repeat=3))
    better = [stdlib.median(ours[i] for i in draw) < stdlib.median(theirs[i] for i in draw) for draw in draws]
    found = statistics.rankings({"theirs": theirs, "ours": ours, "worse": [7.0, 12.0, 8.0]})
    assert list(found) == ["ours", "theirs", "worse"]
    assert found["ours"].rank == pytest.approx(2 - np.mean(better), abs=0.05)
    assert found["ours"].rank_error == pytest.approx(np.std(better), abs=0.05)
    assert found["worse"][2:] == (3, 0)
    assert found["ours"][:2] == (2, pytest.approx(stdlib.pstdev(all_medians(ours)), rel=0.1))


def test_the_lowest_loss_is_that_of_the_median_profile():
    """Not the median of each seed's lowest loss, which is 0 here."""
    found = statistics.rankings({"adam": [[0.0, 2.0, 3.0], [2.0, 0.0, 3.0], [2.0, 2.0, 0.0]], "lost": [[None] * 3] * 2})
    assert found["adam"].lowest == 2
    assert found["lost"][:3] == (math.inf, math.inf, 2)


def test_summary_of_finals_and_the_best_along_the_way():
    seeds = [
        lines([5, 10], train=[3.0, 1.0], val=[0.5, 2.0], accuracy=[0.5, 0.9]),
        lines([5, 10, 20], train=[3.0, 2.0, 2.0], val=[1.5, 2.5, "unmeasured"], accuracy=[0.5, 0.8, "unmeasured"]),
        lines([5], train=[None], val=[None], accuracy=[0.1]),
    ]
    row = statistics.summarise("adam", seeds)
    known = {"optimiser": "adam", "seeds": 3, "diverged": 1, "train": 2.0, "val": 2.5, "test": None, "test_error": None}
    assert {name: row[name] for name in known} == known
    assert row["train_error"] is None  # infinite: some resamples hold the diverged seed twice
    assert (row["best_val"], row["seconds"], row["seconds_per_step"], row["accuracy"]) == (1.5, 5.0, 0.5, 0.8)
    assert "accuracy" not in statistics.summarise("sgd", [lines([1], train=[1.0])])
    assert statistics.summarise("sgd", seeds[:1] * 2)["train_error"] == 0


def test_the_papers_table_is_whole():
    problems = {"uci-energy": 9, "fashion-mnist": 6, "svhn": 6, "cifar-10": 6}
    assert {p: sum(problem == p for problem, _ in paper.RESULTS) for p in problems} == problems
    assert len(paper.RESULTS) == 27
    assert {optimiser for _, optimiser in paper.RESULTS} == set(paper.LABELS)
    assert paper.RESULTS["uci-energy", "exact-adaptive"].test == (0.001045, 3.7e-05)
    assert paper.RESULTS["uci-energy", "kfac-fixed"].val == (904.1, 810)
    assert paper.RESULTS["cifar-10", "kfac"].train == (0.01466, 0.0012)
