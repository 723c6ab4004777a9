"""Every test runs with strict dtype promotion; the ones that need float64 ask for `x64`."""

import os

# Before jax starts: eight devices, so that sharding is tested on any machine.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def x64():
    """Double precision within one test."""
    with jax.enable_x64(True):
        yield
