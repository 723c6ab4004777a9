"""Inspect a Hessian's spectrum

The distribution of the eigenvalues of a network's Hessian, from products with random vectors, before and after
training.
"""

# %%
# A network that learns a function of two variables, small enough to compare with the dense Hessian.
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import saddlefree as sf

STEPS = 300
WIDTH = 32
PRODUCTS = 60

x = jax.random.uniform(jax.random.key(0), (256, 2), minval=-2.0, maxval=2.0)
y = jnp.sin(2 * x[:, 0]) * jnp.cos(x[:, 1])


def loss(params):
    h = jnp.tanh(x @ params["w"] + params["b"])
    h = jnp.tanh(h @ params["u"] + params["c"])
    return jnp.mean((h @ params["v"] - y) ** 2) / 2


keys = jax.random.split(jax.random.key(1), 3)
params = {
    "w": jax.random.normal(keys[0], (2, WIDTH)),
    "b": jnp.zeros(WIDTH),
    "u": jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH**0.5,
    "c": jnp.zeros(WIDTH),
    "v": jax.random.normal(keys[2], (WIDTH,)) / WIDTH**0.5,
}


# %%
# `sf.hessian` gives the product v ↦ Hv, a pytree in and a pytree out. `sf.spectral_density` runs Lanczos from random
# vectors: Ritz values θᵢ with weights wᵢ that add up to 1, each the share of all eigenvalues that θᵢ stands for.
@jax.jit
def density(params):
    return sf.spectral_density(sf.hessian(loss, params), params, num_products=PRODUCTS, num_samples=4)


before = density(params)
print(f"before training: from {jnp.min(before.values):.3f} to {jnp.max(before.values):.3f}")
print(f"share below -0.01: {jnp.sum(jnp.where(before.values < -0.01, before.weights, 0)):.2f}")

# %%
# The dense Hessian has the same extremes and nearly the same share. It costs as many products as there are parameters.
flat, restore = jax.flatten_util.ravel_pytree(params)
eigenvalues = jnp.linalg.eigvalsh(jax.jit(jax.hessian(lambda flat: loss(restore(flat))))(flat))
print(f"{flat.size} eigenvalues, from {eigenvalues[0]:.3f} to {eigenvalues[-1]:.3f}")
print(f"share below -0.01: {jnp.mean(eigenvalues < -0.01):.2f}")

# %%
# Training, with what the optimiser itself sees of the spectrum. The Ritz values of a step are those of the space that
# it has built. With recycled vectors, as here by default, that space is preconditioned and leaves out large curvature
# that is known already. The recycled values have it, as it was when they were computed.
tx = sf.adaptive_saddle_free_newton()


@jax.jit
def step(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params, value=value, value_fn=loss)
    return optax.apply_updates(params, updates), state


state = tx.init(params)
print("step    loss     smallest  largest  largest kept")
for number in range(1, STEPS + 1):
    params, state = step(params, state)
    if number == 1 or number % (STEPS // 5) == 0:
        figures, kept = sf.diagnostics(state), jnp.max(state.solver.recycled.values)
        print(
            f"{number:<6}  {figures['value']:.1e}  {figures['smallest_ritz']:<+8.2g}  {figures['largest_ritz']:<+7.2g}"
            f"  {kept:+.3g}"
        )

# %%
# After training most eigenvalues are near 0, and few are large.
after = density(params)
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
for part, (title, found) in zip(axes, {"before training": before, "after": after}.items(), strict=True):
    found.plot(part)
    part.set(title=title)
figure.savefig("spectrum.png", dpi=120)
