"""Every test runs with strict dtype promotion; the ones that need float64 ask for `x64`."""

import os

# Before jax starts: eight devices, so that sharding is tested on any machine.
# Compiling is nearly all that these small tests do, and less optimised it takes two thirds of the time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def x64():
    """Double precision within one test."""
    with jax.enable_x64(True):
        yield
