"""η and μ from the quadratic model in the plane of direction and previous step."""

import dataclasses

import jax
import jax.numpy as jnp

from saddlefree import space
from saddlefree.model import Model, inverse
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, measured
from saddlefree.rules.levenberg_marquardt import RatioDamping
from saddlefree.space import Number


@dataclasses.dataclass(frozen=True)
class adaptive_plane(RatioDamping):
    """K-FAC's adaptive learning rate and momentum (the paper's Appendix A.4), made saddle-free.

    With B an orthonormal basis of the direction d(λ) and the previous step p,

        s = B y,    (|BᵀHB| + λI) y = −Bᵀg,

    with the absolute values of the 2 × 2 matrix's eigenvalues. K-FAC solves BᵀHB y = −Bᵀg with a positive definite
    curvature; with an indefinite Hessian that step may be uphill, or into the saddle. This one always descends. Where H
    is positive definite and d exact, η = 1 and μ = 0 without a previous step. λ is that of `levenberg_marquardt`. It
    costs two products and a loss a step.

    Args:
      initial: λ before the first step, ≥ 0.
      factor: ω in (0, 1), or a schedule, of λ's rule; see `levenberg_marquardt`.
      minimum: ≥ 0.
      maximum: ≥ minimum.
      refusal: ≥ 1.
      max_increase: a step is refused if it makes the loss f worse than f + max_increase·|f|; None never refuses.

    >>> import saddlefree as sf
    >>> tx = sf.adaptive_saddle_free_newton(sf.series(num_terms=1), rule=adaptive_plane())  # d ∝ g
    >>> x = jnp.array([2.0, 0.0])
    >>> updates, state = tx.update(x, tx.init(x), x, value_fn=lambda x: jnp.sum(x**2) / 2)
    >>> round(float(updates[0]), 2), round(float(sf.diagnostics(state)["reduction_ratio"]), 2)
    (-1.98, 1.0)
    """

    initial: Number = 1e-2
    factor: Number = 0.9
    minimum: Number = 1e-8
    maximum: Number = 1e3
    refusal: Number = 2.0
    max_increase: Number | None = 0.2

    figures = ("reduction_ratio",)
    has_momentum = True

    def __post_init__(self) -> None:
        self.check_damping()

    def propose(self, problem: Problem, model: Model, state: jax.Array, count: jax.Array) -> Proposal:
        """The minimiser of the saddle-free model in the plane."""
        damping = self.bounded(state, count)
        answer = model.answer(damping)
        direction, previous, g = answer.whole, problem.previous, problem.loss_gradient
        matvec, eps = problem.product(), jnp.finfo(problem.space.dtype).eps

        first, unit = space.normalise(direction), space.normalise(previous)
        overlap = space.dot(first, unit)
        rest = space.axpy(-overlap, first, unit)
        # A second sweep: the first leaves rounding along d when p is nearly parallel to it.
        correction = space.dot(first, rest)
        rest, overlap = space.axpy(-correction, first, rest), overlap + correction
        height = space.norm(rest)
        height = jnp.where(height > 100 * eps, height, 0)
        second = space.scale(space.reciprocal(height), rest)

        curved = matvec(first), matvec(second)
        between = (space.dot(first, curved[1]) + space.dot(second, curved[0])) / 2
        plane = jnp.array([[space.dot(first, curved[0]), between], [between, space.dot(second, curved[1])]])
        slope = jnp.stack([space.dot(first, g), space.dot(second, g)])
        values, vectors = jnp.linalg.eigh(plane)
        y = -vectors @ (inverse(values, damping) * (vectors.T @ slope))

        along = y[1] * space.reciprocal(height)
        proposal = Proposal(
            space.axpy(y[0], first, space.scale(y[1], second)),
            damping,
            learning_rate=-(y[0] - along * overlap) * space.reciprocal(space.norm(direction)),
            momentum=along * space.reciprocal(space.norm(previous)),
            answer=answer,
        )
        return measured(proposal, problem, slope @ y + y @ plane @ y / 2)
