"""Train a classifier

Handwritten digits in mini-batches: Adam, the same Adam with curvature of low rank over it, and the adaptive optimiser
with nothing chosen. One training loop serves all three.
"""

# %%
# The images come with scikit-learn. The network is a pytree and a function, as in any JAX program.
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits

import saddlefree as sf

EPOCHS = 30
HIDDEN = 32
BATCH = 100

images, labels = load_digits(return_X_y=True)
order = jax.random.permutation(jax.random.key(0), len(images))
images, labels = jnp.asarray(images / 16, jnp.float32)[order], jnp.asarray(labels, jnp.int32)[order]
train, test = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def initial(key):
    w, v = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(w, (64, HIDDEN)) / 8, "b": jnp.zeros(HIDDEN)},
        "out": {"w": jax.random.normal(v, (HIDDEN, 10)) / HIDDEN**0.5, "b": jnp.zeros(10)},
    }


def logits(params, x):
    h = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return h @ params["out"]["w"] + params["out"]["b"]


def loss(params, batch):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1]))


# %%
# `make_step` compiles one training step for any Optax optimiser. It takes a loss of parameters, model state, batch and
# key, and returns the loss, the new model state and auxiliary outputs; here there is neither state nor randomness.
def loss_fn(params, model_state, batch, key):
    return loss(params, batch), (model_state, None)


def epoch(key):
    for rows in jax.random.permutation(key, 1400).reshape(-1, BATCH):
        yield train[0][rows], train[1][rows]


def fit(tx):
    step, state = sf.training.make_step(loss_fn, tx), sf.training.init(initial(jax.random.key(1)), tx)
    step(sf.training.init(initial(jax.random.key(1)), tx), (train[0][:BATCH], train[1][:BATCH]))  # compiles it
    losses, seconds = [], 0.0
    for key in jax.random.split(jax.random.key(2), EPOCHS):
        for batch in epoch(key):
            start = time.process_time()
            state, metrics = jax.block_until_ready(step(state, batch))
            seconds += time.process_time() - start
        losses.append(float(loss(state.params, train)))
    return state, metrics, losses, seconds


# %%
# The optimisers. `low_rank` decomposes the curvature every 50 steps and leaves what its 20 directions do not span to
# the Adam that it is given, whose rate and schedule stay as they are.
adam = optax.adam(optax.cosine_decay_schedule(1e-2, EPOCHS * 1400 // BATCH))
optimisers = {
    "Adam": adam,
    "low rank over Adam": sf.saddle_free_newton(0.3, solver=sf.low_rank(rank=20, refresh_every=50, base=adam)),
    "adaptive": sf.adaptive_saddle_free_newton(averaging=8.0),
}

# %%
# The adaptive optimiser keeps an average of the parameters, which is what to evaluate.
curves = {}
print(f"{'':20}{'train loss':>12}{'test loss':>12}{'accuracy':>10}{'CPU s':>9}")
for name, tx in optimisers.items():
    state, metrics, curves[name], seconds = fit(tx)
    params = sf.averaged_params(state.opt_state, state.params) if name == "adaptive" else state.params
    accuracy = jnp.mean(jnp.argmax(logits(params, test[0]), 1) == test[1])
    print(f"{name:20}{loss(params, train):12.4f}{loss(params, test):12.4f}{accuracy:10.3f}{seconds:9.1f}")

# %%
# Figures of the adaptive optimiser's last step. `noise` is how much the losses of two batches differ at the same
# parameters; where it exceeds a threshold, the damping follows the next batch's gradient.
for name in ("damping", "noise", "products", "smallest_ritz", "largest_ritz", "rejected_steps"):
    print(f"{name:16}{metrics[name]:.3g}")

# %%
# Compare at equal time as well as at equal epochs: a step of the adaptive optimiser takes longer than one of Adam's,
# the more so on a network as small as this. [Mini-batches](../mini-batches.md) has more tasks, and what a step costs.
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, losses in curves.items():
    axes.semilogy(range(1, EPOCHS + 1), losses, label=name)
axes.set(xlabel="epoch", ylabel="training loss")
axes.legend(frameon=False)
figure.savefig("classifier.png", dpi=120)
