"""Plans: what a user asks for becomes all that determines a run."""

import json

import pytest

from saddlefree.lab.errors import UserError
from saddlefree.lab.plan import build, configuration, difference
from saddlefree.lab.run import load


@pytest.fixture(scope="module")
def digits():
    return load("digits", None)


def test_epochs_become_steps(digits):
    plan = build("digits", "sgd", digits, epochs=2.5)
    assert (plan.examples, plan.batch_size, plan.steps_per_epoch, plan.steps) == (1150, 100, 11, 28)
    assert build("digits", "sgd", digits).steps == 30 * 11
    assert build("digits", "sgd", digits, epochs=1e-9).steps == 1
    assert build("digits", "sgd", digits, steps=7).steps == 7
    whole = build("digits", "sgd", digits, changes={"batch_size": 1150}, epochs=3)
    assert (whole.batch_size, whole.steps) == (None, 3)
    assert "batch_size" not in whole.values


def test_a_race_has_no_number_of_steps_before_it_is_timed(digits):
    plan = build("digits", "adam", digits, budget=2.0)
    assert (plan.steps, plan.budget, plan.by_clock) == (None, 2.0, False)
    assert build("digits", "adam", digits, budget=2.0, changes={"decay": "none"}).by_clock


@pytest.mark.parametrize("given", [("epochs", "steps"), ("epochs", "budget"), ("steps", "budget")])
def test_one_length_is_enough(given, digits):
    message = f"{given[0]} and {given[1]} both say how long a run is: leave out one of them"
    with pytest.raises(UserError, match=message):
        build("digits", "sgd", digits, **dict.fromkeys(given, 3))


@pytest.mark.parametrize(
    ("optimiser", "options", "mapped"),
    [
        ("low-rank", {}, True),
        ("low-rank", {"apart": True}, False),
        ("low-rank", {"budget": 1.0}, False),
        ("lbfgs", {}, False),
        ("kfac", {}, False),
    ],
)
def test_seeds_run_together_or_one_after_another_with_the_same_algorithm(optimiser, options, mapped, digits):
    plan = build("digits", optimiser, digits, seeds=range(3), **options)
    assert plan.mapped == mapped
    assert [part.seeds for part in plan.parts()] == ([(0, 1, 2)] if mapped else [(0,), (1,), (2,)])
    assert plan.values == build("digits", optimiser, digits, **options).values
    assert not any(part.mapped for part in plan.parts()) or mapped


def test_evaluations_are_spread_evenly_beside_a_few_early_ones(digits):
    def points(**options):
        return build("digits", "sgd", digits, **options).points()

    assert points(steps=100, evaluations=4) == [1, 2, 4, 8, 16, 25, 50, 75, 100]
    assert points(steps=3) == [1, 2, 3]
    assert points(steps=500, evaluations=(10, 100)) == [10, 100, 500]


def test_a_plan_is_the_same_after_a_file(digits):
    plan = build("digits", "sgd", digits, seeds=[3, 4], steps=5, evaluations=(2,))
    record = plan.record()
    assert json.loads(json.dumps(record)) == record
    assert difference(record, plan.record()) is None
    config = configuration("compare", [plan], digits)
    assert config["plan"] == {"sgd": record}
    assert (config["seeds"], config["epochs"], config["batch_size"]) == ([3, 4], 5 / 11, {"sgd": 100})


def test_the_first_difference_is_named(digits):
    plan = build("digits", "sgd", digits, steps=5).record()
    assert difference(plan, plan | {"steps": 6}) == "steps was 5, is 6"
    assert difference(plan, plan | {"steps": None}) is None  # a race that was timed before
    assert difference({"sgd": plan}, {"sgd": plan, "adam": plan}) == "adam is new"
    assert difference({"sgd": plan, "adam": plan}, {"sgd": plan}) == "adam is missing"
    changed = plan | {"values": plan["values"] | {"momentum": 0.5}}
    assert difference({"sgd": plan}, {"sgd": changed}) == "momentum was 0.9, is 0.5"
