"""The spectral density against eigenvalues."""

import jax.numpy as jnp
import numpy as np
import pytest
from problems import symmetric

import saddlefree as sf


def test_moments_are_those_of_the_eigenvalues(x64):
    """∫ hᵏ ρ(h) dh = Σ hᵏ/P, up to the sampling error of random starts; outliers are found exactly."""
    rng = np.random.default_rng(0)
    h = np.concatenate([rng.normal(size=200) * 0.1, [5.0, -3.0]])
    H = jnp.asarray(symmetric(rng, h))
    density = sf.spectral_density(lambda v: H @ v, jnp.zeros(202), num_products=60, num_samples=20)
    assert jnp.sum(density.weights) == pytest.approx(1.0)
    assert jnp.max(density.values) == pytest.approx(5.0)
    assert jnp.min(density.values) == pytest.approx(-3.0)
    for power in (1, 2, 4):
        moment = jnp.sum(density.weights * density.values**power)
        np.testing.assert_allclose(moment, np.mean(h**power), atol=0.25 * np.mean(np.abs(h) ** power))
    grid = jnp.linspace(-6.0, 8.0, 2000)
    assert jnp.trapezoid(density.smooth(grid, 0.05), grid) == pytest.approx(1.0, rel=1e-3)


def test_narrow_parameters_have_a_density_in_float32():
    """A bfloat16 start would not be orthogonal to anything."""
    h = np.linspace(-1.0, 3.0, 40).astype(np.float32)
    params = jnp.zeros(40, jnp.bfloat16)
    density = sf.spectral_density(lambda v: jnp.asarray(h) * v, params, num_products=40, num_samples=20)
    assert density.values.dtype == density.weights.dtype == jnp.float32
    np.testing.assert_allclose([jnp.min(density.values), jnp.max(density.values)], [-1, 3], atol=1e-3)
    np.testing.assert_allclose(jnp.sum(density.weights * density.values), 1.0, atol=0.2)


def test_plot_draws_on_the_axes_it_is_given():
    class Axes:
        def semilogy(self, x, y, **style):
            self.x, self.y, self.style = x, y, style

        def set(self, **labels):
            self.labels = labels

    axes = Axes()
    sf.spectral_density(lambda v: jnp.linspace(-1.0, 2.0, 30) * v, jnp.zeros(30), num_products=10).plot(axes, color="k")
    assert axes.x.shape == axes.y.shape
    assert axes.style == {"color": "k"}
    assert axes.labels["xlabel"] == "eigenvalue of H"


def test_bad_width_and_points():
    density = sf.spectral_density(lambda v: v, jnp.ones(3), num_products=2)
    with pytest.raises(ValueError, match=r"width must be a number in \(0, inf\), got 0.0"):
        density.smooth(jnp.zeros(3), 0.0)
    with pytest.raises(ValueError, match="points must be a whole number ≥ 2, got 1"):
        density.plot(None, points=1)


@pytest.mark.parametrize("name", ["num_products", "num_samples"])
def test_bad_input(name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number ≥ 1, got 0"):
        sf.spectral_density(lambda v: v, jnp.zeros(3), **{name: 0})
