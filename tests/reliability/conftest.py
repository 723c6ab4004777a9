"""What was tried is counted, and printed at the end of a run."""

import collections

import pytest


@pytest.fixture
def count(record_property):
    """A function that adds to the count of the given name."""
    counts = collections.Counter()

    def add(name, number=1):
        counts[name] += number

    yield add
    for name, number in counts.items():
        record_property(name, number)


def pytest_terminal_summary(terminalreporter):
    totals = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                for name, number in report.user_properties:
                    totals[name] += number
    if totals:
        terminalreporter.section("what was tried")
        for name in sorted(totals):
            terminalreporter.line(f"{totals[name]:>9,} {name}")
