"""Solve an equation

Helmholtz's equation, Δu + k²u = q on the unit square with u = 0 on its edge, solved by a small network. q is chosen so
that the solution is u = sin πx sin 3πy; the error can then be measured.
"""

# %%
# A full batch, a smooth loss, and an answer that should be accurate: use float64.
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import saddlefree as sf

jax.config.update("jax_enable_x64", True)

STEPS = 4000
POINTS = 400  # inside the square
EDGE = 20  # on each side of it
SIZES = (2, 24, 24, 1)
K = 4.0


# %%
# The network is a function of parameters and one point. The parameters are a list of pairs; any pytree will do.
def network(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return (x @ w + b)[0]


def initial(key):
    keys = jax.random.split(key, len(SIZES) - 1)
    pairs = zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    return [(jax.random.normal(k, (n, m)) / n**0.5, jnp.zeros(m)) for k, n, m in pairs]


# %%
# The equation's left-hand side at one point, for any function u, and the points.
def helmholtz(u, x):
    return jnp.trace(jax.hessian(u)(x)) + K**2 * u(x)


def solution(x):
    return jnp.sin(jnp.pi * x[0]) * jnp.sin(3 * jnp.pi * x[1])


x = jax.random.uniform(jax.random.key(1), (POINTS, 2))
q = jax.vmap(lambda x: helmholtz(solution, x))(x)
t = jnp.linspace(0.0, 1.0, EDGE, endpoint=False)
zero, one = jnp.zeros_like(t), jnp.ones_like(t)
edge = jnp.concatenate([jnp.stack(side, 1) for side in ((t, zero), (1 - t, one), (zero, 1 - t), (one, t))])


# %%
# The loss is half the sum of squared residuals. Each residual depends on one point; `sf.pointwise` says so, and all
# rows of the Jacobian together then cost a few gradients.
def equation(params, point):
    return (helmholtz(lambda x: network(params, x), point["x"]) - point["q"]) / POINTS**0.5


def condition(params, point):
    return 10 * network(params, point) / EDGE**0.5


residual_fn = sf.pointwise((equation, {"x": x, "q": q}), (condition, edge))

# %%
# Nothing is left to choose. `progress=True` would show a line while it runs.
result = sf.least_squares(residual_fn, initial(jax.random.key(0)), max_steps=STEPS)
print(result.summary)
print(f"loss {result.value:.1e}")

# %%
# The solution on a grid, beside its error.
t = jnp.linspace(0.0, 1.0, 101)
grid = jnp.stack(jnp.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2)
found = jax.vmap(lambda x: network(result.params, x))(grid)
error = found - jax.vmap(solution)(grid)
print(f"relative error {jnp.linalg.norm(error) / jnp.linalg.norm(found - error):.1e}")

figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for part, (title, values) in zip(axes, {"u": found, "error": error}.items(), strict=True):
    image = part.imshow(values.reshape(101, 101).T, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu")
    part.set(title=title, xlabel="x", ylabel="y")
    figure.colorbar(image, ax=part)
figure.savefig("helmholtz.png", dpi=120)
