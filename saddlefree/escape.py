"""Leaving a saddle on which the gradient says nothing.

A solver that starts from g finds negative curvature only as far as g reaches into it. On a saddle, or on the way into
one, it does not. Now and then a random vector is asked instead, which reaches everywhere.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from saddlefree import checks, spectrum, tree
from saddlefree.curvature import MatVec
from saddlefree.tree import Tree


@dataclasses.dataclass(frozen=True)
class escape:
    """A bounded step along the most negative curvature, where the gradient is nearly orthogonal to it.

    Every so many steps, `num_products` products from a random start give the most negative Ritz value θ of H and its
    vector v. The saddle-free step along v has the length |gᵀv|/(|θ| + λ). Where θ < 0 and that is shorter than
    `radius`, a step of length `radius` down the slope of v, or in a random sense where there is no slope, is added.
    Where the loss is measured, it is kept only if it lowers the loss.

    Args:
      radius: the length of the step, > 0, in the units of the parameters.
      every: steps from one search to the next, ≥ 1.
      num_products: ≥ 1, the price of a search.
      threshold: θ counts as negative below −threshold·max |θ|; in [0, 1].
      seed: of the random starts.

    >>> import optax
    >>> import saddlefree as sf
    >>> loss = lambda x: 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4  # a saddle at 0, minima at (0, ±1)
    >>> def train(escape):
    ...     tx, x = sf.adaptive_saddle_free_newton(sf.exact(), escape=escape), jnp.array([1.0, 0.0])
    ...     state, update = tx.init(x), jax.jit(lambda g, state, x: tx.update(g, state, x, value_fn=loss))
    ...     for _ in range(30):
    ...         updates, state = update(jax.grad(loss)(x), state, x)
    ...         x = optax.apply_updates(x, updates)
    ...     return abs(x).round(2)
    >>> train(None), train(sf.escape(every=5))
    (Array([0., 0.], dtype=float32), Array([0., 1.], dtype=float32))
    """

    radius: float = 0.1
    every: int = 10
    num_products: int = 10
    threshold: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        checks.number("radius", self.radius, 0, open_low=True)
        checks.integer("every", self.every, low=1)
        checks.integer("num_products", self.num_products, low=1)
        checks.number("threshold", self.threshold, 0, 1)

    def init(self) -> jax.Array:
        """The first key."""
        return jax.random.PRNGKey(self.seed)

    def leap(
        self, curvature: Callable[[], MatVec], gradient: Tree, damping: jax.Array, key: jax.Array, count: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """The step out of the saddle, or 0, and the next key."""
        key, following = jax.random.split(key)
        nothing = tree.zeros_like(gradient)
        leap = jax.lax.cond(
            count % self.every == 0, lambda: self._search(curvature(), gradient, damping, key), lambda: nothing
        )
        return leap, following

    def _search(self, matvec: MatVec, gradient: Tree, damping: jax.Array, key: jax.Array) -> Tree:
        start = tree.random_normal(key, gradient)
        steps = spectrum.krylov_size(self.num_products, gradient)
        basis, T, _ = spectrum.lanczos_decomposition(matvec, start, steps)
        values, vectors = jnp.linalg.eigh(T.dense())
        v = spectrum.combine(basis, vectors[:, 0])
        slope = tree.dot(gradient, v)
        negative = values[0] < -self.threshold * jnp.max(jnp.abs(values))
        flat = jnp.abs(slope) < self.radius * (jnp.abs(values[0]) + damping)
        # v comes with a random sense, which counts where there is no slope.
        length = jnp.where(slope > 0, -self.radius, self.radius).astype(slope.dtype)
        leap = tree.scale(length, v)
        return tree.where(negative & flat & tree.all_finite(leap), leap, tree.zeros_like(gradient))
