"""Saddle-free Newton for JAX: (|H| + λI)⁻¹ g from Hessian-vector products alone, as an Optax optimiser."""

# ruff: noqa: F403, F405 (names are defined late)
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saddlefree.names import *

__version__ = "0.2.0"

__all__ = [
    "Answers",
    "Minimum",
    "Proposal",
    "Result",
    "Rule",
    "Solution",
    "Solver",
    "Status",
    "accelerate",
    "adaptive_plane",
    "adaptive_saddle_free_newton",
    "as_value_fn",
    "averaged_params",
    "blockwise",
    "check_value_fn",
    "damping_search",
    "diagnostics",
    "escape",
    "exact",
    "fixed_rate",
    "fixed_scale",
    "gauss_newton",
    "hessian",
    "lanczos",
    "lanczos_bound",
    "least_squares",
    "levenberg_marquardt",
    "levin_d2",
    "levin_t",
    "line_search",
    "low_rank",
    "lower_bound",
    "microbatch_map",
    "microbatch_mean",
    "minimise",
    "next_batch",
    "next_batch_rate",
    "noise_aware",
    "pade",
    "pointwise",
    "power_iteration",
    "quasi_newton",
    "row_space",
    "sablonniere",
    "saddle_free_newton",
    "scale_by_saddle_free",
    "series",
    "shanks",
    "solve",
    "spectral_density",
    "topological_rho",
    "trace_bound",
    "training",
    "vector_rho",
]

_REMOVED = {
    "adaptive_step": "adaptive_plane, a rule",
    "fixed_damping": "fixed_rate, a rule with learning rate, momentum and damping",
    "fixed_step": "fixed_rate, a rule with learning rate, momentum and damping",
}


def __getattr__(name: str) -> Any:
    """All public names, loaded with the first that is used: the command line has answers that do not need JAX."""
    if name in __all__:
        names = importlib.import_module("saddlefree.names")
        globals().update({known: getattr(names, known) for known in __all__})
        return globals()[name]
    hint = f": use saddlefree.{_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module 'saddlefree' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
