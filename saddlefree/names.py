"""The public names, from the modules that define them; `saddlefree` has them when the first of them is used."""

# ruff: noqa: F401

import saddlefree.training as training
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
from saddlefree.inspection import averaged_params, diagnostics
from saddlefree.minimisation import Minimum, Status, least_squares, minimise
from saddlefree.model import Answers, Result
from saddlefree.neighbours import as_value_fn, check_value_fn
from saddlefree.optimiser import adaptive_saddle_free_newton, saddle_free_newton, scale_by_saddle_free
from saddlefree.rates import next_batch_rate
from saddlefree.residuals import pointwise
from saddlefree.rules.base import Proposal, Rule
from saddlefree.rules.escape import escape
from saddlefree.rules.fixed import fixed_rate
from saddlefree.rules.levenberg_marquardt import levenberg_marquardt
from saddlefree.rules.line_search import line_search
from saddlefree.rules.next_batch import next_batch
from saddlefree.rules.noise_aware import noise_aware
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
