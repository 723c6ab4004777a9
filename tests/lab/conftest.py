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
