"""The race on mini-batches: its cells, and the table of their records."""

import pytest

from saddlefree.lab import batches, optimisers, problems, records, reproduce


def test_every_cell_can_be_run():
    names = [reproduce.record_name(item) for item in reproduce.MINI_BATCHES]
    assert len(set(names)) == len(names) == sum(map(len, map(batches.methods, batches.TRACKS))) + 16
    for item in reproduce.MINI_BATCHES:
        problems.find(item.part).variant(dict(item.variant))
        optimisers.configured(item.optimiser, item.part, dict(item.changes))


def test_adam_is_the_same_on_every_task():
    """The paper's own hyperparameters, which some problems have, take no part."""
    for item in reproduce.MINI_BATCHES:
        if item.optimiser == "adam" and "-paper-" not in item.label:
            values = optimisers.configured("adam", item.part, dict(item.changes))
            assert (values["epsilon"], values["one_minus_beta1"], values["one_minus_beta2"]) == (1e-8, 0.1, 0.001)
            assert values["decay"] == ("none" if item.label.endswith("-adam") else "cosine")


def test_table(tmp_path):
    assert batches.block(tmp_path).startswith("No run is recorded yet")

    def add(method, loss, seconds):
        curve = {"x": [seconds, 2 * seconds], "median": [0.9, 0.8]}
        summary = {"val": loss, "seconds_per_step": seconds, "seconds": 4 * seconds}
        record = {"summary": summary, "curves": {"val-seconds": curve}}
        records.write(tmp_path, f"{batches.GROUP}/digits-{method}", record)

    add("adaptive", 0.2, 3.0)
    add("adam", 0.4, 1.0)
    assert "| digits | 0.200 | – | 0.400 | – | – | 0.50 | – | 3.0 | – | 0.900 |" in batches.block(tmp_path)
    add("next-batch-rate", 0.3, 1.25)
    for i, rate in enumerate(batches.RATES):
        add(f"adam-{rate}", None if i == 0 else 0.1 * (i + 1), 1.0)
    # The first diverged; the second has 0.2.
    row = "| digits | 0.200 | 0.300 | 0.400 | 0.200 | 1e-3 | 0.50 | 1.00 | 3.0 | 1.2 | 0.900 |"
    assert row in batches.block(tmp_path)


def test_table_of_tuned_ones(tmp_path):
    """The time to the loss that the best Adam has at its end, over Adam's time."""
    name = next(iter(batches.TUNED))

    def add(method, loss, seconds, curve):
        summary = {"val": loss, "seconds": seconds, "seconds_per_step": seconds / 10}
        record = {"summary": summary, "curves": {"val-seconds": {"x": [2.0, 4.0, 6.0], "median": curve}}}
        records.write(tmp_path, f"{batches.GROUP}/{name}-{method}", record)

    for i, rate in enumerate(batches.RATES):
        add(f"adam-{rate}", 0.5 + 0.1 * abs(i - 2), 5.0, [1.0, 0.7, 0.5])
    assert batches.tuned_block(tmp_path).startswith("No run is recorded yet")
    for i, rate in enumerate(batches.RATES):
        add(f"low-rank-{rate}", 0.4 + 0.1 * abs(i - 3), 6.0, [0.6, 0.45, 0.4])
    row = f"| {name} | 0.500 | 2e-3 | 5.0 | 0.400 | 4e-3 | 6.0 | 1.20 | 0.80 × Adam's | 4.4 |"
    assert row in batches.tuned_block(tmp_path)
    add("low-rank-4e-3", 0.4, 6.0, [0.9, 0.8, 0.7])
    assert "| not reached | 4.4 |" in batches.tuned_block(tmp_path)


def test_table_of_peers(tmp_path):
    """Each at the best of its eight rates, once all eight are there."""

    def add(method, loss, seconds):
        summary = {"val": loss, "seconds_per_step": seconds}
        records.write(tmp_path, f"{batches.GROUP}/kin8nm-{method}", {"summary": summary})

    add("adaptive", 0.2, 3.0)
    add("adam", 0.4, 1.0)
    for i, rate in enumerate(batches.RATES):
        assert batches.peers_block(tmp_path).startswith("No run is recorded yet")
        add(f"soap-{rate}", None if i == 0 else 0.1 * (i + 1), 2.5)
    row = "| kin8nm | 0.200 (3.0 ×) | – | – | – | 0.200 (2.5 ×, 1e-3) | – | – |"
    assert row in batches.peers_block(tmp_path)


@pytest.mark.parametrize("name", ["adaptive", "next-batch-rate"])
def test_methods_have_nothing_to_choose(name):
    assert batches.METHODS[name] == (name, {})


def test_table_of_the_papers_optimisers(tmp_path):
    """Beside the paper's Adam; what is not recorded is a dash."""
    for method, loss, seconds in (("adaptive", 1.5, 0.2), ("adam", 2.0, 0.1)):
        summary = {"val": loss, "seconds_per_step": seconds}
        records.write(tmp_path, f"{batches.GROUP}/svhn-narrow-paper-{method}", {"summary": summary})
    table = batches.paper_block(tmp_path)
    assert "| adaptive | – | 1.50 (2.0 ×) |" in table
    assert "| kfac | – | – |" in table
