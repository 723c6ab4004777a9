"""Leaving a saddle on which the gradient says nothing.

A solver that starts from g finds negative curvature only as far as g has a component along it. On a saddle, or on the
way into one, it has none. Now and then a random start is used instead, which has a component along every eigenvector.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from saddlefree import checks, space, spectrum
from saddlefree.model import Model
from saddlefree.problem import Problem
from saddlefree.rules.base import Proposal, Rule
from saddlefree.solvers.base import forwarded
from saddlefree.space import Space, Vector


@dataclasses.dataclass(frozen=True)
class escape:
    """A bounded step along the most negative curvature, where the gradient is nearly orthogonal to it.

    Every so many steps, `num_products` products from a random start give the most negative Ritz value θ of H and its
    vector v. The saddle-free step along v has the length |gᵀv|/(|θ| + λ). Where θ < 0 and that is shorter than
    `radius`, a step of length `radius` down the slope of v, or in a random sense where there is no slope, is added.
    Where the rule measures the loss, it is kept only if it lowers the loss.

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
        checks.constant("radius", self.radius, 0, open_low=True)
        checks.integer("every", self.every, low=1)
        checks.integer("num_products", self.num_products, low=1)
        checks.constant("threshold", self.threshold, 0, 1)
        checks.seed(self.seed)

    def step(self, problem: Problem, damping: jax.Array, key: jax.Array) -> Vector:
        """The step out of a saddle, or 0."""
        g = problem.gradient
        start = space.random_normal(key, g)
        count = spectrum.krylov_size(self.num_products, g)
        basis, T, _ = spectrum.lanczos_decomposition(problem.product(), start, count)
        values, vectors = jnp.linalg.eigh(T.dense())
        v = space.combine(basis, vectors[:, 0])
        slope = space.dot(g, v)
        negative = values[0] < -self.threshold * jnp.max(jnp.abs(values))
        flat = jnp.abs(slope) < self.radius * (jnp.abs(values[0]) + damping)
        # v comes with a random sense, which counts where there is no slope.
        length = jnp.where(slope > 0, -self.radius, self.radius).astype(slope.dtype)
        found = space.scale(length, v)
        return space.where(negative & flat & space.all_finite(found), found, space.zeros_like(g))


@dataclasses.dataclass(frozen=True)
class Escaping(Rule):
    """Another rule, with a way off saddles."""

    rule: Rule
    escape: escape

    asks = forwarded("rule.asks")
    uses_products = forwarded("rule.uses_products")  # those of a search are prepared only where it takes place
    has_momentum = forwarded("rule.has_momentum")
    max_increase = forwarded("rule.max_increase")
    measures = forwarded("rule.measures")

    @property
    def figures(self) -> tuple[str, ...]:  # type: ignore[override]
        """And the length of the escape step."""
        return (*self.rule.figures, "escape")

    def init(self, layout: Space) -> tuple[Any, jax.Array]:
        """The rule's state and a key."""
        return self.rule.init(layout), jax.random.PRNGKey(self.escape.seed)

    def noisy(self, problem: Problem, state: Any, count: jax.Array) -> jax.Array | None:
        """As the rule."""
        return self.rule.noisy(problem, state[0], count)

    def dampings(self, state: Any, count: jax.Array, dtype: Any) -> jax.Array:
        """As the rule."""
        return self.rule.dampings(state[0], count, dtype)

    def propose(self, problem: Problem, model: Model, state: Any, count: jax.Array) -> Proposal:
        """The rule's step, and now and then one out of a saddle."""
        proposal = self.rule.propose(problem, model, state[0], count)
        key, _ = jax.random.split(state[1])
        due = count % self.escape.every == 0
        nothing = (space.zeros_like(proposal.step), jnp.asarray(jnp.inf, problem.space.dtype))

        def search(_: Any) -> tuple[Vector, jax.Array]:
            found = self.escape.step(problem, proposal.damping, key)
            if not self.measures:
                return found, nothing[1]
            return found, problem.loss(space.axpy(1, found, proposal.step))  # type: ignore[misc]

        found, after = space.when(due, search, nothing)
        if self.measures:
            better = after < proposal.after
            found = space.where(better, found, nothing[0])
            proposal = proposal._replace(after=jnp.minimum(after, jnp.asarray(proposal.after)))
        figures = {**proposal.figures, "escape": space.norm(found)}
        return proposal._replace(step=space.axpy(1, found, proposal.step), figures=figures, gradient=None)

    def learn(self, state: Any, count: jax.Array, proposal: Proposal, taken: jax.Array) -> Any:
        """As the rule, and the next key."""
        return self.rule.learn(state[0], count, proposal, taken), jax.random.split(state[1])[1]
