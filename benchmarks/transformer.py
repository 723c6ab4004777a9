"""A transformer of four layers on random tokens: 53 leaves, 213,376 parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

VOCABULARY, WIDTH, LENGTH, HEADS, LAYERS = 96, 64, 32, 4, 4


def network(key: jax.Array) -> dict[str, Any]:
    """Normal weights of standard deviation 1/√fan-in."""
    keys = iter(jax.random.split(key, 3 + 6 * LAYERS))

    def matrix(n: int, m: int) -> jax.Array:
        return jax.random.normal(next(keys), (n, m)) / n**0.5

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    def layer() -> dict[str, Any]:
        attention = {name: matrix(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
        hidden = {"w1": matrix(WIDTH, 4 * WIDTH), "b1": jnp.zeros(4 * WIDTH)}
        return {
            **attention,
            **hidden,
            "w2": matrix(4 * WIDTH, WIDTH),
            "b2": jnp.zeros(WIDTH),
            "norm1": norm(),
            "norm2": norm(),
        }

    return {
        "tokens": matrix(VOCABULARY, WIDTH),
        "places": 0.1 * matrix(LENGTH, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": norm(),
        "head": matrix(WIDTH, VOCABULARY),
    }


def batch(key: jax.Array, size: int = 16) -> jax.Array:
    """Random tokens."""
    return jax.random.randint(key, (size, LENGTH + 1), 0, VOCABULARY)


def _normalised(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Cross-entropy of the next token."""
    x = params["tokens"][tokens[:, :-1]] + params["places"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for p in params["layers"]:
        h = _normalised(x, p["norm1"])
        query, key, value = (
            (h @ p[name]).reshape(*h.shape[:2], HEADS, -1).swapaxes(1, 2) for name in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(2, 3) / query.shape[-1] ** 0.5
        attended = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1) @ value
        x = x + attended.swapaxes(1, 2).reshape(h.shape) @ p["out"]
        x = x + jax.nn.gelu(_normalised(x, p["norm2"]) @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    logits = _normalised(x, params["norm"]) @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))
