"""Row space: the exact Gauss-Newton step of a least-squares loss, in the smaller of rows and columns.

For f = ½‖r‖² with N residuals r and their Jacobian J (N×P) the model of the loss is m(s) = ½‖r + Js‖² − ½‖r‖², so that
g = Jᵀr and H ≈ JᵀJ. The step of Levenberg and Marquardt minimises m(s) + ½λ‖s‖², and one identity gives it in either
space:

    d(λ) = (JᵀJ + λI)⁻¹ Jᵀr = Jᵀ (JJᵀ + λI)⁻¹ r.

Where N ≤ P the matrix of the right-hand side, K = JJᵀ (N×N), is the smaller one. It is made once a step; each λ takes
one Cholesky factorisation of it. In the row space this is the natural gradient of Dangel et al. and Guzmán-Cordero et
al. 2025 (ENGD-W), and with λ‖s − μp‖² in place of λ‖s‖², p the previous step, it is SPRING (Goldshlager et al. 2024):

    s = μp − Jᵀ (K + λI)⁻¹ (r + μJp).

K has the square of J's condition number: with ε the rounding error, singular values below about (Nε)^½ of the largest
are lost. In float64 that is 1e-7, in float32 3e-3.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space
from saddlefree.model import Answer, Result, inverse
from saddlefree.problem import Problem
from saddlefree.residuals import ResidualFn, count, gram, jacobian, normal_equations, pointwise
from saddlefree.solvers.base import Solver
from saddlefree.space import Scalar, Space, Vector

_DOUBT = 0.1
"""The relative error at which a direction is not right to one digit."""


@dataclasses.dataclass(frozen=True)
class row_space(Solver):
    """Gauss-Newton with exact linear algebra: d = (JᵀJ + λI)⁻¹ Jᵀr for residuals r with Jacobian J and loss ½‖r‖².

    `update` needs `residual_fn=`, a function of the parameters that returns the N residuals; without `value_fn=` the
    loss is ½‖r‖². The direction is that of r, and what arrives as gradient must be Jᵀr: where it is not, to one digit,
    the result is `BREAKDOWN`.

    With N ≤ P a step costs N reverse passes over all residuals for the Jacobian, N²P for the Gram matrix JJᵀ and N³/3
    for each λ; with P < N it costs P forward passes, P²N and P³/3. Residuals given by `pointwise` cost about one
    gradient in place of those passes: use it where each residual depends on one point of the data. Float64 is advised,
    because JJᵀ has the square of J's condition number.

    Args:
      momentum: μ in [0, 1), SPRING's, or None for none: λ‖s − μp‖² in place of λ‖s‖², with p the last step taken.
      chunk_size: rows or columns of J, ≥ 1, that are computed at a time; fewer take less memory.
      max_bytes: > 0, the memory that J and the Gram matrix may take; more is refused before it is allocated.

    The statistics hold `products`, the passes over all residuals, and `error`, an estimate of the relative error of d
    by rounding.

    >>> import saddlefree as sf
    >>> t, y = jnp.arange(4.0), jnp.array([1.0, 3.0, 5.0, 7.0])
    >>> residual_fn = lambda x: x[0] + x[1] * t - y  # linear: one step
    >>> tx = sf.saddle_free_newton(damping=0.0, solver=row_space())
    >>> x = jnp.zeros(2)
    >>> grads = jax.grad(lambda x: jnp.sum(residual_fn(x) ** 2) / 2)(x)
    >>> updates, state = tx.update(grads, tx.init(x), x, residual_fn=residual_fn)
    >>> updates.round(3)
    Array([1., 2.], dtype=float32)
    """

    momentum: Scalar | None = None
    chunk_size: int = 64
    max_bytes: int = 2**30

    stats = ("products", "error")
    needs = "it needs residuals, which update() takes as residual_fn=; for a product alone use lanczos() or exact()"

    def __post_init__(self) -> None:
        if self.momentum is not None:
            checks.constant("momentum", self.momentum, 0, 1, open_high=True)
        checks.integer("chunk_size", self.chunk_size, low=1)
        checks.integer("max_bytes", self.max_bytes, low=1)

    @property
    def uses_previous(self) -> bool:  # type: ignore[override]
        """Where there is momentum."""
        return self.momentum is not None

    @property
    def has_momentum(self) -> bool:  # type: ignore[override]
        """Unless μ is None."""
        return self.momentum is not None

    def init(self, layout: Space) -> tuple[()]:
        """Nothing is remembered: momentum is that of the previous step."""
        return ()

    def model(self, problem: Problem, dampings: jax.Array, state: tuple[()]) -> tuple["LeastSquares", tuple[()]]:
        """Jacobian and Gram matrix."""
        fn, layout = problem.residuals, problem.space
        if fn is None:
            raise ValueError(
                "residual_fn must be given to update() beside row_space, or to make_step(): a function of the "
                "parameters that returns the residuals, an array or a pytree, whose half squared norm is the loss"
            )
        rows = count(fn, layout.like)
        self._check_memory(rows, layout, isinstance(fn, pointwise))
        g, restore = space.ravel(problem.gradient)
        pull = jnp.zeros_like(g)
        if self.momentum is not None and problem.previous is not None:
            pull = jnp.asarray(self.momentum, g.dtype) * space.ravel(problem.previous)[0]
        if rows <= layout.size:
            r, J = jacobian(fn, layout, self.chunk_size, by_rows=True)
            matrix, slope = gram(J), r
        else:
            r, matrix, slope = normal_equations(fn, layout, self.chunk_size)
            J = None
        stats = {"products": _passes(fn, layout, rows)}
        found = LeastSquares(matrix, slope, J, space.norm(matrix), space.norm(r), pull, restore, stats)
        return dataclasses.replace(found, foreign=found.differs(g, layout.rounding)), state

    def _check_memory(self, rows: int, layout: Space, by_points: bool) -> None:
        """Refuses what would take more than `max_bytes`."""
        small = min(rows, layout.size)
        # The Gram matrix, the same with λ, and its factor; accumulated by points, J is not kept.
        kept = 0 if by_points and rows > layout.size else rows * layout.size
        needed = (kept + 3 * small**2) * jnp.dtype(layout.dtype).itemsize
        if needed > self.max_bytes:
            raise ValueError(
                f"row_space needs {needed:,} bytes for {rows:,} residuals and {layout.size:,} parameters, more than "
                f"max_bytes={self.max_bytes:,}: raise max_bytes, or use lanczos(), which keeps no matrix, with "
                "matvec=sf.gauss_newton(residual_fn, lambda r: jnp.sum(r**2) / 2, params) in update()"
            )


class _Solved(NamedTuple):
    """(A + λI) Y = Z."""

    columns: jax.Array  # Y
    product: jax.Array  # A y, y the first column
    lost: jax.Array  # ‖g‖ along eigenvalues that were left out


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """m(s) = ½‖r + Js‖² − ½‖r‖², by the Gram matrix A of rows, JJᵀ, or of columns, JᵀJ.

    Attributes:
      matrix: A.
      slope: r in the row space, Jᵀr in the column space.
      jacobian: J in the row space; None in the column space, where coordinates are the direction itself.
      peak: ‖A‖ in the Frobenius norm: the largest eigenvalue, or a little more.
      length: ‖r‖.
      pull: μp, towards which λ draws the step.
      restore: from a flat array to a vector.
      stats: see `Model`.
      foreign: whether the gradient that was given is not Jᵀr.
    """

    matrix: jax.Array
    slope: jax.Array
    jacobian: jax.Array | None
    peak: jax.Array
    length: jax.Array
    pull: jax.Array
    restore: Callable[[jax.Array], Vector]
    stats: dict[str, jax.Array]
    foreign: jax.Array | bool = False

    def answer(self, damping: jax.Array) -> Answer:
        """d(λ) = Bᵀy − μp, (A + λI) y = slope + coordinates of μp; B is J in the row space, I in the column space."""
        A, peak, eps = self.matrix, self.peak, jnp.finfo(self.matrix.dtype).eps
        lowest = max(32, A.shape[0]) * eps * peak
        pulled = self._push(self.pull)
        signs = jax.random.rademacher(jax.random.PRNGKey(0), self.slope.shape, A.dtype)
        right = jnp.stack([self.slope + pulled, signs], axis=1)
        # Below the cutoff λ is rounding: the eigenvalues there count as if they were at it.
        lifted = jnp.maximum(damping, lowest)
        # A is symmetric; transposed it is in LAPACK's order already, and is not copied into it for each λ.
        factor = jax.lax.linalg.cholesky((A + lifted * jnp.eye(A.shape[0], dtype=A.dtype)).T, symmetrize_input=False)
        columns = _solve(factor, right)
        # A y without another pass over A, which a loop over λ would transpose for it.
        direct = _Solved(columns, right[:, 0] - lifted * columns[:, 0], jnp.zeros_like(peak))
        failed = (damping == 0) | ~space.all_finite(direct)
        usable = space.all_finite((peak, right))
        found = space.when(failed & usable, lambda _: self._pseudo_inverse(right, damping, lowest), direct)
        y = found.columns[:, 0]
        # One by one: a product with two rows is several times slower than two with one.
        step, spread = self._pull(y), self._pull(found.columns[:, 1])
        d = step - self.pull
        # In the row space Jd = Ay − μJp; in the column space JᵀJd.
        curved = found.product - pulled
        if self.jacobian is None:
            slope, square = space.dot(self.slope, d), space.dot(d, curved)
        else:
            slope, square = space.dot(self.slope, curved), space.dot(curved, curved)
        # A has an error E of norm ε‖A‖, d then one of BᵀA_λ⁻¹Ey; for random signs w, E‖Mw‖² = ‖M‖²_F.
        length = space.norm(step)
        error = eps * peak * space.norm(y) * space.norm(spread) * space.reciprocal(length)
        # What another λ than the one that was asked for changes, to first order.
        moved = (lifted - damping) * space.norm(self._pull(_solve(factor, y[:, None])[:, 0]))
        visible = 32 * lowest * space.reciprocal(jnp.sqrt(peak)) * self.length
        singular = jnp.where(failed, found.lost > visible, moved > _DOUBT * length)
        code = jnp.where(singular, Result.SINGULAR, Result.FINE)
        code = jnp.where((error < _DOUBT) & ~jnp.asarray(self.foreign), code, Result.BREAKDOWN)
        code = jnp.where(space.all_finite(d), code, Result.NONFINITE).astype(jnp.int32)
        return Answer(self.restore(d), square / 2 - slope, code, {"error": error})

    def differs(self, g: jax.Array, rounding: float) -> jax.Array:
        """Whether g is not Jᵀr, beyond what rounding explains."""
        difference = space.norm(g - self._pull(self.slope))
        noise = 32 * max(rounding, float(jnp.finfo(g.dtype).eps)) * jnp.sqrt(self.peak) * self.length
        return ~(difference <= _DOUBT * space.norm(g) + noise)

    def _pseudo_inverse(self, right: jax.Array, damping: jax.Array, lowest: jax.Array) -> _Solved:
        """By eigendecomposition: for λ = 0, and where rounding makes A + λI indefinite."""
        vectors, values = jax.lax.linalg.eigh(self.matrix.T, symmetrize_input=False)
        weights = inverse(values, damping, lowest=lowest)
        slopes = jnp.matmul(vectors.T, right, precision="highest")
        columns = jnp.matmul(vectors, weights[:, None] * slopes, precision="highest")
        product = jnp.matmul(vectors, values * weights * slopes[:, 0], precision="highest")
        dropped = jnp.matmul(vectors, jnp.where(weights == 0, slopes[:, 0], 0), precision="highest")
        return _Solved(columns, product, space.norm(self._pull(dropped)))

    def _pull(self, y: jax.Array) -> jax.Array:
        """Bᵀy."""
        return y if self.jacobian is None else jnp.matmul(y, self.jacobian, precision="highest")

    def _push(self, x: jax.Array) -> jax.Array:
        """Jx in the row space, JᵀJx in the column space."""
        return jnp.matmul(self.matrix if self.jacobian is None else self.jacobian, x, precision="highest")


def _solve(factor: jax.Array, right: jax.Array) -> jax.Array:
    """(LLᵀ)⁻¹ Z."""
    half = jax.lax.linalg.triangular_solve(factor, right, left_side=True, lower=True)
    return jax.lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True)


def _passes(residual_fn: ResidualFn, layout: Space, rows: int) -> jax.Array:
    """The passes over all residuals that the Jacobian takes: for points as many as one of them has residuals."""
    passes = min(rows, layout.size)
    if isinstance(residual_fn, pointwise):
        passes = max(count(pointwise(term), layout.like) // space.length(term[1]) for term in residual_fn.terms)
    return jnp.asarray(passes, jnp.int32)
