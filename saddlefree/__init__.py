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
from saddlefree.damping import damping_search, fixed_damping, levenberg_marquardt
from saddlefree.density import spectral_density
from saddlefree.diagnostics import diagnostics
from saddlefree.escape import escape
from saddlefree.optimiser import adaptive_saddle_free_newton, saddle_free_newton, scale_by_saddle_free
from saddlefree.scale import fixed_scale, lanczos_bound, lower_bound, power_iteration, trace_bound
from saddlefree.solvers.base import Solution, Solver, solve
from saddlefree.solvers.blockwise import blockwise
from saddlefree.solvers.exact import exact
from saddlefree.solvers.lanczos import lanczos
from saddlefree.solvers.low_rank import low_rank
from saddlefree.solvers.series import series
from saddlefree.step import adaptive_step, fixed_step

__all__ = [
    "Solution",
    "Solver",
    "accelerate",
    "adaptive_saddle_free_newton",
    "adaptive_step",
    "blockwise",
    "damping_search",
    "diagnostics",
    "escape",
    "exact",
    "fixed_damping",
    "fixed_scale",
    "fixed_step",
    "gauss_newton",
    "hessian",
    "lanczos",
    "lanczos_bound",
    "levenberg_marquardt",
    "levin_d2",
    "levin_t",
    "low_rank",
    "lower_bound",
    "microbatch_map",
    "microbatch_mean",
    "pade",
    "power_iteration",
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
