"""An equation of one's own: saddlefree compare heat --plugin examples/heat.py --optimisers lanczos-adaptive,lbfgs."""

import jax
import jax.numpy as jnp

from saddlefree.lab import Setting, problem
from saddlefree.lab.physics import Condition, box, derivative, physics


@problem("heat", "Heat in a rod", epochs=300, float64=True, test="relative L2 error", variants={"kappa": Setting(0.25)})
def heat(data_dir, kappa):
    def truth(z):
        return jnp.exp(-kappa * jnp.pi**2 * z[:, 1]) * jnp.sin(jnp.pi * z[:, 0])

    def points(key):
        inside, start, left, right = jax.random.split(key, 4)
        ends = box(left, 30, (0, 0), (0, 1)), box(right, 30, (1, 0), (1, 1))
        return box(inside, 300, (0, 0), (1, 1)), jnp.concatenate([box(start, 60, (0, 0), (1, 0)), *ends])

    def equation(u, z):
        u_xx = derivative(derivative(u, (1.0, 0.0)), (1.0, 0.0))
        return derivative(u, (0.0, 1.0))(z) - kappa * u_xx(z)

    def edge(u, z):
        return u(z) - truth(z)

    line = jnp.linspace(0, 1, 41)
    conditions = [Condition(equation), Condition(edge, weight=5.0)]
    return physics(conditions, points, truth, hidden=(16, 16), grid={"x": line, "t": line})
