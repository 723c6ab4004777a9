"""Saddle-free Newton for JAX: (|H| + λI)⁻¹ g from Hessian-vector products alone, as an Optax optimiser."""

from saddlefree import training
from saddlefree.acceleration import (
    accelerate,
    levin_d2,
    levin_t,
    pade,
    sablonniere,
    shanks,
    topological_rho,
    vector_rho,
)
from saddlefree.curvature import gauss_newton, hessian, microbatch_map, microbatch_mean
from saddlefree.density import spectral_density
from saddlefree.diagnostics import diagnostics
from saddlefree.minimisation import Minimum, Status, least_squares, minimise
from saddlefree.model import Answers, Result
from saddlefree.neighbours import as_value_fn, check_value_fn
from saddlefree.optimiser import adaptive_saddle_free_newton, saddle_free_newton, scale_by_saddle_free
from saddlefree.residuals import pointwise
from saddlefree.rules.base import Proposal, Rule
from saddlefree.rules.escape import escape
from saddlefree.rules.fixed import fixed_rate
from saddlefree.rules.levenberg_marquardt import levenberg_marquardt
from saddlefree.rules.line_search import line_search
from saddlefree.rules.plane import adaptive_plane
from saddlefree.rules.search import damping_search
from saddlefree.scale import fixed_scale, lanczos_bound, lower_bound, power_iteration, trace_bound
from saddlefree.solvers.base import Solution, Solver, solve
from saddlefree.solvers.blockwise import blockwise
from saddlefree.solvers.exact import exact
from saddlefree.solvers.lanczos import lanczos
from saddlefree.solvers.low_rank import low_rank
from saddlefree.solvers.quasi_newton import quasi_newton
from saddlefree.solvers.row_space import row_space
from saddlefree.solvers.series import series

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


def __getattr__(name: str) -> object:
    """Names what took the place of something that is gone."""
    hint = f": use saddlefree.{_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module 'saddlefree' has no attribute {name!r}{hint}")
