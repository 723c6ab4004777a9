"""Networks in Flax NNX, the paper's among them, as pure functions of parameters and model state."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

Tree = Any
Initialiser = Callable[..., jax.Array]


class Model(NamedTuple):
    """A network without its numbers."""

    init: Callable[[jax.Array], tuple[Tree, Tree]]  # key to (parameters, model state)
    apply: Callable[[Tree, Tree, jax.Array, bool], tuple[jax.Array, Tree]]  # the last two: inputs, training


def functional(make: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """The pure functions of the module that `make` builds."""
    graph = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)[0]

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        return _numbers(make(nnx.Rngs(key)))

    def apply(params: Tree, state: Tree, x: jax.Array, training: bool) -> tuple[jax.Array, Tree]:
        module = nnx.merge(graph, params, state, copy=True)
        module.set_attributes(use_running_average=not training, raise_if_not_found=False)
        outputs = module(x)
        return outputs, _numbers(module)[1]

    return Model(init, apply)


def _numbers(module: nnx.Module) -> tuple[Tree, Tree]:
    _, params, *state = nnx.split(module, nnx.Param, ...)
    return params, state[0]


def haiku_normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    """Haiku's default, which the paper used: normal of scale 1/√fan-in, cut at two, not rescaled for the cut."""
    fan_in = 1
    for size in shape[:-1]:
        fan_in *= size
    return jax.random.truncated_normal(key, -2, 2, shape, dtype) * jnp.asarray(fan_in**-0.5, dtype)


class MLP(nnx.Module):
    """Dense layers of the given sizes; inputs are flattened."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        activation: Callable[[jax.Array], jax.Array],
        initialiser: Initialiser,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.layers = nnx.List(
            nnx.Linear(n, m, kernel_init=initialiser, dtype=dtype, param_dtype=dtype, rngs=rngs)
            for n, m in itertools.pairwise(sizes)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The outputs for a batch."""
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def mlp(
    *sizes: int,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu,
    initialiser: Initialiser = haiku_normal,
    dtype: Any = jnp.float32,
) -> Model:
    """A multi-layer perceptron.

    >>> params, _ = mlp(8, 12, 12, 12, 12, 12, 12, 12, 1).init(jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    1057
    """
    return functional(lambda rngs: MLP(sizes, activation, initialiser, dtype, rngs))


def _conv(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(inputs, outputs, (size, size), strides=stride, use_bias=False, kernel_init=haiku_normal, rngs=rngs)


def _norm(channels: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(channels, momentum=0.9, epsilon=1e-5, rngs=rngs)


class Block(nnx.Module):
    """Two convolutions with batch norm and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs):
        self.first = _conv(inputs, outputs, 3, stride, rngs)
        self.norm1 = _norm(outputs, rngs)
        self.second = _conv(outputs, outputs, 3, 1, rngs)
        self.norm2 = _norm(outputs, rngs)
        same = inputs == outputs and stride == 1
        self.shortcut: Any = None if same else _conv(inputs, outputs, 1, stride, rngs)
        self.norm3: Any = None if same else _norm(outputs, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x, and what the convolutions add to it."""
        h = self.norm2(self.second(jax.nn.relu(self.norm1(self.first(x)))))
        return jax.nn.relu(h + (x if self.shortcut is None else self.norm3(self.shortcut(x))))


class ResNet18(nnx.Module):
    """As Haiku's `ResNet18`: a 7×7 stem of stride 2, max-pooling, four stages of two blocks."""

    def __init__(self, classes: int, width: int, rngs: nnx.Rngs):
        self.stem, self.norm = _conv(3, width, 7, 2, rngs), _norm(width, rngs)
        blocks, inputs = [], width
        for channels, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [Block(inputs, channels, stride, rngs), Block(channels, channels, 1, rngs)]
            inputs = channels
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits for a batch of images."""
        x = jax.nn.relu(self.norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def resnet18(classes: int = 10, width: int = 64) -> Model:
    """ResNet-18 with batch norm, `width` channels in its first stage: at 64, 11,181,642 parameters for ten classes."""
    return functional(lambda rngs: ResNet18(classes, width, rngs))


class RNN(nnx.Module):
    """h ← tanh(W h + U x + b) along a sequence, W orthogonal at first; outputs are linear in the last h."""

    def __init__(self, inputs: int, width: int, outputs: int, rngs: nnx.Rngs):
        self.inputs = nnx.Linear(inputs, width, kernel_init=haiku_normal, rngs=rngs)
        orthogonal = nnx.initializers.orthogonal()
        self.recurrent = nnx.Linear(width, width, use_bias=False, kernel_init=orthogonal, rngs=rngs)
        self.head = nnx.Linear(width, outputs, kernel_init=haiku_normal, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The outputs for a batch of sequences, (examples, length, inputs)."""
        driven, W = jnp.moveaxis(self.inputs(x), 1, 0), self.recurrent.kernel[...]
        last, _ = jax.lax.scan(lambda h, u: (jnp.tanh(h @ W + u), None), jnp.zeros_like(driven[0]), driven)
        return self.head(last)


def rnn(inputs: int, width: int, outputs: int) -> Model:
    """A recurrent network without gates."""
    return functional(lambda rngs: RNN(inputs, width, outputs, rngs))


HEADS = 4


class AttentionBlock(nnx.Module):
    """Causal attention with four heads and a layer of four times the width, each normalised and added."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        def linear(n: int, m: int) -> nnx.Linear:
            return nnx.Linear(n, m, kernel_init=haiku_normal, rngs=rngs)

        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.queries, self.keys, self.values = (linear(width, width) for _ in range(3))
        self.mixed, self.up, self.down = linear(width, width), linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x, and what both add to it."""
        h = self.norm1(x)
        q, k, v = (each(h).reshape(*h.shape[:-1], HEADS, -1) for each in (self.queries, self.keys, self.values))
        x = x + self.mixed(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """A decoder: at each position the logits of the next character."""

    def __init__(self, characters: int, length: int, width: int, depth: int, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(characters, width, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List(AttentionBlock(width, rngs) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, characters, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits for a batch of texts, (examples, length)."""
        h = self.embedding(x) + self.positions(jnp.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def transformer(characters: int, length: int, width: int, depth: int) -> Model:
    """A transformer of four heads; `width` must be a multiple of four.

    >>> params, _ = jax.eval_shape(transformer(128, 64, 128, 5).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    1032704
    """
    return functional(lambda rngs: Transformer(characters, length, width, depth, rngs))
