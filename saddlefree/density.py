"""How the eigenvalues of a Hessian are distributed: the picture that people who study curvature want."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saddlefree import checks, space, spectrum
from saddlefree.curvature import MatVec
from saddlefree.space import Vector


class Density(NamedTuple):
    """The spectral density as Σᵢ wᵢ δ(h − θᵢ), Σᵢ wᵢ = 1."""

    values: jax.Array  # θ, Ritz values
    weights: jax.Array  # w, the share of all eigenvalues that each stands for

    def smooth(self, grid: jax.Array, width: Any) -> jax.Array:
        """The density at the points of `grid`, each Ritz value a Gaussian of standard deviation `width` > 0."""
        checks.number("width", width, 0, open_low=True)
        z = (grid[:, None] - self.values) / width
        return jnp.exp(-(z**2) / 2) @ self.weights / (width * jnp.sqrt(2 * jnp.pi).astype(self.values.dtype))

    def plot(self, axes: Any, points: int = 1000, **style: Any) -> None:
        """Draws the density on Matplotlib `axes`, logarithmically, so that outliers are seen beside the bulk."""
        checks.integer("points", points, low=2)
        low, high = float(jnp.min(self.values)), float(jnp.max(self.values))
        width = max(high - low, 1e-12) / 200
        grid = jnp.linspace(low - 10 * width, high + 10 * width, points, dtype=self.values.dtype)
        axes.semilogy(grid, self.smooth(grid, width), **style)
        axes.set(xlabel="eigenvalue of H", ylabel="density", ylim=(1e-6 / (high - low + 1e-12), None))


def spectral_density(
    matvec: MatVec, like: Vector, num_products: int = 80, num_samples: int = 4, *, seed: int = 0
) -> Density:
    """The distribution of the eigenvalues of H by stochastic Lanczos quadrature (Golub & Welsch; Ghorbani et al. 2019).

    For a random v, Lanczos gives Ritz values θᵢ and weights wᵢ = (e₁ᵀsᵢ)², and E Σᵢ wᵢ f(θᵢ) ≈ tr f(H)/P.

    Args:
      matvec: v ↦ H v, as `hessian` returns it.
      like: a pytree in the shape of the parameters.
      num_products: ≥ 1 for each sample; as many vectors are held in memory.
      num_samples: ≥ 1 random starts, one after another.
      seed: of the random starts.

    >>> h = jnp.concatenate([jnp.full(90, 0.0), jnp.full(10, 2.0)])
    >>> density = spectral_density(lambda v: h * v, h, num_products=5)
    >>> round(float(jnp.sum(jnp.where(density.values > 1, density.weights, 0))), 1)
    0.1
    """
    checks.integer("num_products", num_products, low=1)
    checks.integer("num_samples", num_samples, low=1)
    checks.real_parameters(like)
    steps = spectrum.krylov_size(num_products, like)

    def sample(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = space.random_normal(key, space.to_working(like))
        _, T, _ = spectrum.lanczos_decomposition(matvec, start, steps)
        values, vectors = jnp.linalg.eigh(T.dense())
        return values, vectors[0] ** 2

    values, weights = jax.lax.map(sample, jax.random.split(jax.random.key(seed), num_samples))
    return Density(values.reshape(-1), weights.reshape(-1) / num_samples)
