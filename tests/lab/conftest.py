"""What the laboratory's tests share."""

import os
import pathlib

import pytest


@pytest.fixture
def data_folder():
    """The folder with the paper's data sets."""
    if not os.environ.get("SADDLEFREE_DATA"):
        pytest.skip("SADDLEFREE_DATA is not set")
    return pathlib.Path(os.environ["SADDLEFREE_DATA"])


@pytest.fixture(scope="session")
def compare():
    """Compares optimisers on a problem; what is asked for in `asked` is an argument of `plan.build`."""
    from saddlefree.lab import compare as comparison
    from saddlefree.lab.plan import build
    from saddlefree.lab.run import load

    def compared(problem, names, folder, *, seeds, resume=False, listener=lambda event: None, **asked):
        task = load(problem, None, asked.get("variant"))
        plans = [build(problem, name, task, seeds=range(seeds), **asked) for name in names]
        return comparison.compare(plans, task, folder, resume=resume, listener=listener)

    return compared


@pytest.fixture
def undrawn(monkeypatch):
    """Reports whose figures are not rendered, for tests of other things."""
    from saddlefree.lab import figures

    def save(figure, path, title, table=None):
        return figures.Picture("", table=table)

    monkeypatch.setattr(figures, "save", save)
