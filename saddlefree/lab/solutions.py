"""Solutions of differential equations that have no closed form, for the test figures of `physics`."""

import jax
import jax.numpy as jnp
import numpy as np


def burgers_solution(z: jax.Array, viscosity: float = 0.01 / np.pi) -> jax.Array:
    """The solution from u(x, 0) = −sin πx, by the Cole-Hopf transformation and Gauss-Hermite quadrature.

    u(x, t) = −∫ sin π(x − y) f(x − y) e^{−y²/4νt} dy / ∫ f(x − y) e^{−y²/4νt} dy,  f(y) = exp(−cos(πy)/2πν)
    (Basdevant et al. 1986).
    """
    nodes, weights = (jnp.asarray(a) for a in np.polynomial.hermite.hermgauss(100))
    shifted = z[:, :1] - jnp.sqrt(4 * viscosity * jnp.maximum(z[:, 1:], 1e-12)) * nodes
    # Relative to the largest, so that nothing overflows; this factor cancels, and so do its derivatives.
    exponent = -jnp.cos(jnp.pi * shifted) / (2 * jnp.pi * viscosity)
    largest = jax.lax.stop_gradient(jnp.max(exponent, axis=1, keepdims=True))
    f = weights * jnp.exp(exponent - largest)
    return -jnp.sum(f * jnp.sin(jnp.pi * shifted), axis=1) / jnp.sum(f, axis=1)


def allen_cahn_solution(modes: int = 4096, steps: int = 500, kept: int = 50) -> np.ndarray:
    """u at times 0, 1/kept, …, 1 (rows) and at −1 + 2i/modes (columns), by Fourier modes in x.

    With û_k the modes and E = e^(−ν(πk)²h), û ↦ e^(ν(πk)²t) û leaves the reaction 5u − 5u³ alone, which the classical
    method of Runge and Kutta integrates with steps h = 1/`steps`; `kept` divides `steps`.
    """
    x, h = -1 + 2 * np.arange(modes) / modes, 1 / steps
    half = np.exp(-1e-4 * (np.pi * np.arange(modes // 2 + 1)) ** 2 * h / 2)

    def reaction(modes_of_u: np.ndarray) -> np.ndarray:
        u = np.fft.irfft(modes_of_u)
        return np.fft.rfft(5 * u - 5 * u**3)

    v = np.fft.rfft(x**2 * np.cos(np.pi * x))
    rows = [np.fft.irfft(v)]
    for step in range(1, steps + 1):
        a = reaction(v)
        b = reaction(half * (v + h / 2 * a))
        c = reaction(half * v + h / 2 * b)
        d = reaction(half * (half * v + h * c))
        v = half**2 * (v + h / 6 * a) + h / 3 * half * (b + c) + h / 6 * d
        if step % (steps // kept) == 0:
            rows.append(np.fft.irfft(v))
    return np.stack(rows)
