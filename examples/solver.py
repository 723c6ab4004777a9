"""Write a solver

A solver builds a quadratic model of the loss. This one knows the curvature in the span of the last k gradients. It is
thirty lines, and then works with every rule, with schedules, frozen parameters, `jit`, `scan` and `vmap`.
"""

# %%
# A solver is a frozen dataclass that inherits from `sf.Solver`. What it remembers is in a state, which is passed in and
# returned.
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import saddlefree as sf
from saddlefree.model import Spectral
from saddlefree.solvers.base import keep_finite

STEPS = 150


# %%
# With Q an orthonormal basis of the k gradients, QᵀHQ = S diag(θ) Sᵀ takes k products, and the model's direction is
# d(λ) = Q S (|θ| + λ)⁻¹ SᵀQᵀg. `Spectral` is a model of this kind: it answers any λ without a new product, gives the
# change of the loss that it predicts, and a result code.
class Gradients(NamedTuple):
    last: jax.Array  # k rows, the newest first


@dataclasses.dataclass(frozen=True)
class gradient_space(sf.Solver):
    """Curvature in the span of the last `size` ≥ 1 gradients."""

    size: int = 10

    stats = ("products", "smallest_ritz", "largest_ritz")
    answers = sf.Answers.ANY

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size must be a whole number ≥ 1, got {self.size}")

    def init(self, layout):
        return Gradients(jnp.zeros((min(self.size, layout.size), layout.size), layout.dtype))

    def model(self, problem, dampings, state):
        g = problem.gradient
        row = g / jnp.maximum(jnp.linalg.norm(g), jnp.finfo(g.dtype).tiny)
        last = jnp.concatenate([row[None], state.last[:-1]])
        Q = jnp.linalg.qr(last.T)[0].T  # rows are orthonormal; the first is ± g/‖g‖
        products = jax.lax.map(problem.product(), Q)
        values, S = jnp.linalg.eigh(Q @ products.T)
        stats = {
            "products": jnp.array(len(Q), jnp.int32),
            "smallest_ritz": values[0],
            "largest_ritz": values[-1],
        }
        return Spectral(Q, values, S, S.T @ (Q @ g), stats), keep_finite(Gradients(last), state, g)


# %%
# First test it by itself. In a space of all dimensions it must be exact; before there are as many gradients, the QR
# decomposition fills the basis with other orthonormal vectors.
h = jnp.array([2.0, -0.5, 1.0])
solution = sf.solve(gradient_space(3), lambda v: h * v, jnp.ones(3), damping=0.0)
print(solution.direction.round(4), sf.Result(int(solution.result)).name)


# %%
# Then in an optimiser. Since it answers any λ, the default rule tries several and takes the best.
def loss(x):  # a curved valley in 30 dimensions
    return jnp.sum((1 - x[:-1]) ** 2 + 20 * (x[1:] - x[:-1] ** 2) ** 2)


def run(tx):
    @jax.jit
    def train(x):
        def step(carry, _):
            x, state = carry
            value, grads = jax.value_and_grad(loss)(x)
            updates, state = tx.update(grads, state, x, value=value, value_fn=loss)
            return (optax.apply_updates(x, updates), state), value

        return jax.lax.scan(step, (x, tx.init(x)), length=STEPS)[1]

    return train(-jnp.ones(30))


solvers = {"gradient_space(10)": gradient_space(10), "lanczos(10)": sf.lanczos(10), "exact()": sf.exact()}
curves = {name: run(sf.adaptive_saddle_free_newton(solver)) for name, solver in solvers.items()}
for name, losses in curves.items():
    print(f"{name:20}{losses[0]:.0f} → {losses[-1]:.1e}")

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, losses in curves.items():
    axes.semilogy(losses, label=name)
axes.set(xlabel="step", ylabel="loss")
axes.legend(frameon=False)
figure.savefig("solver.png", dpi=120)

# %%
# With as many products, the Krylov space that `lanczos` builds in each step holds more of the direction than earlier
# gradients do. The library's rules on vectors, non-finite numbers and statistics are in
# [Architecture](../architecture.md#how-to-add-a-solver), with a second solver and a rule. This solver needs one flat
# vector, which is the default; with `packed=False` a vector is a pytree.
