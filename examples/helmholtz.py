"""Solves an equation with a network: Δu + k²u = q on the unit square, u = 0 on its edge.

    python examples/helmholtz.py --picture helmholtz.png

q is chosen so that u = sin πx sin 3πy. Each residual depends on one point, which `pointwise` says, so that all rows of
the Jacobian together cost a few gradients.
"""

import argparse

import jax
import jax.numpy as jnp

import saddlefree as sf

K = 4.0


def exact(x):
    return jnp.sin(jnp.pi * x[0]) * jnp.sin(3 * jnp.pi * x[1])


def network(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return (x @ w + b)[0]


def initial(key, sizes=(2, 24, 24, 1)):
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(jax.random.normal(k, (n, m)) / n**0.5, jnp.zeros(m)) for k, n, m in pairs]


def helmholtz(u, x):
    """Δu + k²u at one point."""
    return jnp.trace(jax.hessian(u)(x)) + K**2 * u(x)


def residuals(inside=400, edge=80):
    """Those of the equation at random points, and those of the condition on the edge, each scaled by its number."""
    x = jax.random.uniform(jax.random.key(1), (inside, 2))
    t = jnp.linspace(0.0, 1.0, edge // 4, endpoint=False)
    zero, one = jnp.zeros_like(t), jnp.ones_like(t)
    z = jnp.concatenate([jnp.stack(side, 1) for side in ((t, zero), (1 - t, one), (zero, 1 - t), (one, t))])
    q = jax.vmap(lambda x: helmholtz(exact, x))(x)

    def equation(params, d):
        return (helmholtz(lambda x: network(params, x), d["x"]) - d["q"]) / inside**0.5

    def condition(params, z):
        return 10 * network(params, z) / len(t) ** 0.5

    return sf.pointwise((equation, {"x": x, "q": q}), (condition, z))


def grid(params, size=101):
    """Solution and error on a grid."""
    t = jnp.linspace(0.0, 1.0, size)
    points = jnp.stack(jnp.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2)
    found, truth = (jax.vmap(u)(points).reshape(size, size) for u in (lambda x: network(params, x), exact))
    return found, found - truth


def draw(found, error, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for part, (title, values) in zip(axes, {"u": found, "error": error}.items(), strict=True):
        image = part.imshow(values.T, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu")
        part.set(title=title, xlabel="x", ylabel="y")
        figure.colorbar(image, ax=part)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description="Solves the Helmholtz equation with a network.")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--picture", help="where to draw solution and error")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    result = sf.least_squares(residuals(), initial(jax.random.key(0)), max_steps=options.steps, progress=True)
    found, error = grid(result.params)
    print(f"loss {result.value:.2e}, relative error {jnp.linalg.norm(error) / jnp.linalg.norm(found - error):.2e}")
    if options.picture:
        draw(found, error, options.picture)


if __name__ == "__main__":
    main()
