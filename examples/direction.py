"""Use the direction alone

The direction (|H| + λI)⁻¹g as one part of an optimiser of your own, first in a loop that you write, then in a chain of
Optax. The problem is A ≈ UVᵀ for a matrix A, started near U = V = 0, where the loss has a saddle.
"""

# %%
# At U = V = 0 the gradient vanishes and the Hessian has eigenvalues ±σ for each singular value σ of A.
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import saddlefree as sf

STEPS = 40
SIZE = 20
RANK = 5

keys = jax.random.split(jax.random.key(0), 4)
A = jax.random.normal(keys[0], (SIZE, RANK)) @ jax.random.normal(keys[1], (RANK, SIZE)) / SIZE


def loss(params):
    return jnp.sum((A - params["U"] @ params["V"].T) ** 2) / 2


start = {name: 1e-3 * jax.random.normal(key, (SIZE, RANK)) for name, key in zip("UV", keys[2:], strict=True)}


# %%
# `sf.solve` takes a solver, a product with any real symmetric H, and a right-hand side g. What is done with the
# direction is up to you; here the step is halved until the loss falls.
@jax.jit
def own_step(params):
    value, grads = jax.value_and_grad(loss)(params)
    matvec = sf.hessian(loss, params)
    solution = sf.solve(sf.lanczos(num_products=10), matvec, grads, damping=0.1)

    def moved(rate):
        return jax.tree.map(lambda p, d: p - rate * d, params, solution.direction)

    rate = jax.lax.while_loop(lambda rate: loss(moved(rate)) > value, lambda rate: rate / 2, jnp.array(1.0))
    return moved(rate), value, solution.stats


params, losses = start, []
for _ in range(STEPS):
    params, value, stats = own_step(params)
    losses.append(float(value))
print(f"loss {losses[0]:.2f} → {losses[-1]:.1e}; {stats['products']} products a step")

# %%
# The same direction in a chain: `sf.scale_by_saddle_free` where `optax.scale_by_adam` would stand. Optax clips, adds
# momentum, and applies the rate.
tx = optax.chain(
    sf.scale_by_saddle_free(sf.lanczos(num_products=10), damping=0.1),
    optax.clip_by_global_norm(1.0),
    optax.trace(decay=0.3),
    optax.scale_by_learning_rate(0.5),
)


def run(tx):
    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value_fn=loss)
        return optax.apply_updates(params, updates), state, value

    params, state, losses = start, tx.init(start), []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


chained = run(tx)
print(f"loss {chained[0]:.2f} → {chained[-1]:.1e}")

# %%
# Beside them gradient descent, and Newton's method, which divides by the eigenvalues as they are and converges to the
# saddle.
gradient = run(optax.with_extra_args_support(optax.sgd(0.3)))
newton = run(sf.saddle_free_newton(damping=0.0, solver=sf.exact(absolute=False)))
print(f"gradient descent {gradient[-1]:.1e}, Newton {newton[-1]:.1e}")

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
curves = {"own loop": losses, "chain": chained, "gradient descent": gradient, "Newton": newton}
for name, values in curves.items():
    axes.semilogy(values, label=name)
axes.set(xlabel="step", ylabel="loss")
axes.legend(frameon=False)
figure.savefig("direction.png", dpi=120)
