"""Every test runs with strict dtype promotion and the same random examples; those that need float64 ask for `x64`."""

import gc
import os
import pathlib

# Before jax starts: eight devices, so that sharding is tested on any machine. Compiling is nearly all that these small
# tests do; less optimised, in one piece and without XLA's newer code generator for fused loops it takes a third of the
# time.
# SADDLEFREE_OPTIMISED=1 compiles as a user's program.
flags = ["--xla_force_host_platform_device_count=8"]
if not os.environ.get("SADDLEFREE_OPTIMISED"):
    flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
given = os.environ.get("XLA_FLAGS", "").split()
names = {flag.split("=")[0] for flag in given}
os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in flags if flag.split("=")[0] not in names)])

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tracing makes many objects that live long, and Python's own thresholds have it look through all of them too often.
gc.set_threshold(50_000, 20, 50)

# `make fuzz` and `make soak` draw examples at random, and more of them.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("fuzz", deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("soak", parent=hypothesis.settings.get_profile("fuzz"))
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="session")
def equal_programs_are_compiled_once(tmp_path_factory):
    """Many tests compile the same program from functions of their own; each process has its folder of programs."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs").resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="module")
def programs_are_dropped():
    """A process may map 65,530 pieces of memory on Linux; XLA maps several for each program, and crashes beyond."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()


@pytest.fixture
def x64():
    """Double precision within one test."""
    with jax.enable_x64(True):
        yield
