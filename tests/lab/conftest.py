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


@pytest.fixture
def undrawn(monkeypatch):
    """Reports whose figures are not rendered, for tests of other things."""
    from saddlefree.lab import figures

    def save(figure, path, title, table=None):
        return figures.Picture("", table=table)

    monkeypatch.setattr(figures, "save", save)
