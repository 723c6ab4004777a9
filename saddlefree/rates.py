"""A learning rate by the next batch: any Optax optimiser without a learning rate.

The gradient of a batch at the parameters to which the last update led says whether a longer update would have been
better for this batch, which that update has not seen. It is computed anyway, so that a verdict costs an inner product.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from saddlefree import checks, space
from saddlefree.space import Tree

MEMORY = 0.99
"""The decay of the average of squared verdicts."""
SMOOTHING = 0.98
"""The decay of the average of losses."""
PATIENCE = 30
"""Steps after which a loss whose average has not been lower counts as one that does not fall."""
RETURN = 0.8
"""How fast α then returns to its initial value, in place of −δ."""
LASTING = 100
"""Steps after which it counts as one that does not fall with the initial α either, so that α may be less."""


class Progress(NamedTuple):
    """Whether the loss falls."""

    total: jax.Array  # Σ_t (1 − β) β^{n−t} f_t, f the losses
    lowest: jax.Array  # of its bias-corrected values
    idle: jax.Array  # steps since then


class NextBatchRateState(NamedTuple):
    """The rate, and what the next batch judges."""

    base: Any
    learning_rate: jax.Array  # α
    last: Tree  # the last update
    length: jax.Array  # its norm
    square: jax.Array  # Σ_t (1 − β) β^{n−t} c_t², c the verdicts
    progress: Progress
    count: jax.Array  # type: ignore[assignment]  # of updates


def next_batch_rate(
    base: optax.GradientTransformation,
    initial: float = 1e-3,
    *,
    rate: float = 0.05,
    boldness: float = 0.5,
    minimum: float = 1e-8,
    maximum: float = 1e3,
) -> optax.GradientTransformationExtraArgs:
    """An optimiser whose learning rate α follows the verdict of the next batch.

    With u the update of the last batch, u = α·base(…), and g the gradient of the next one,

        c = cos(g, u),    log α ← log α − κ (c − δ √mean(c²)).

    A verdict c < 0 says that a longer update would have lowered the next batch's loss more. It looks one step ahead and
    favours short steps: what a long one loses by noise is seen at once, what it gains later is not. Therefore α rises
    until the mean of c is δ times its root mean square. Averaged parameters make up for the noise of longer steps
    (`averaging=` of the optimisers here, `optax.incremental_update` elsewhere).

    Long steps can also keep a loss from falling at all, and short ones take too long. Pass the loss as `value=` to
    `update`: where its average, over some fifty batches, has not been lower for thirty steps, α returns towards
    `initial` from above (−0.8 in place of δ), and below it follows the verdicts alone. But as long as it has been lower
    within a hundred steps, α does not fall below `initial`.

    Args:
      base: an Optax optimiser with a learning rate of 1, such as `optax.adam(1.0)`.
      initial: α before the first verdict, > 0.
      rate: κ > 0; α changes by a factor of exp(κ (1 + δ)) a step at most.
      boldness: δ in [0, 1); 0 follows the verdicts as they are.
      minimum: of α, > 0.
      maximum: of α, ≥ minimum.

    An update that is not finite is 0, and leaves the state as it was.

    >>> tx = next_batch_rate(optax.adam(1.0))
    >>> loss = lambda x: jnp.sum((x - 3) ** 2)
    >>> x = jnp.zeros(2)
    >>> state = tx.init(x)
    >>> for _ in range(100):
    ...     updates, state = tx.update(jax.grad(loss)(x), state, x)
    ...     x = optax.apply_updates(x, updates)
    >>> bool(state.learning_rate > 0.05), bool(loss(x) < 1)
    (True, True)
    """
    if not (hasattr(base, "init") and hasattr(base, "update")):
        raise ValueError(f"base must be an Optax optimiser such as optax.adam(1.0), got {base!r}")
    checks.constant("initial", initial, 0, open_low=True)
    checks.constant("rate", rate, 0, open_low=True)
    checks.constant("boldness", boldness, 0, 1, open_high=True)
    checks.constant("minimum", minimum, 0, open_low=True)
    checks.constant("maximum", maximum, 0)
    checks.at_least_minimum(maximum, minimum)
    tx = optax.with_extra_args_support(base)

    def init(params: Tree) -> NextBatchRateState:
        dtype = space.scalar_dtype(params)
        alpha, last = jnp.full((), initial, dtype), space.zeros_like(space.to_working(params))
        zero = lambda dtype=dtype: jnp.zeros((), dtype)  # noqa: E731
        progress = Progress(zero(), jnp.full((), jnp.inf, dtype), zero(jnp.int32))
        return NextBatchRateState(tx.init(params), alpha, last, zero(), zero(), progress, zero(jnp.int32))

    def update(
        updates: Tree, state: NextBatchRateState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, NextBatchRateState]:
        g = space.to_working(updates)
        length = space.norm(g)
        # 0 before the first update, and where the last one was 0.
        cosine = space.dot(g, state.last) * space.reciprocal(length) * space.reciprocal(state.length)
        square = MEMORY * state.square + (1 - MEMORY) * cosine**2
        mean = square / (1 - MEMORY ** jnp.maximum(state.count, 1).astype(square.dtype))
        alpha, count = state.learning_rate, optax.safe_increment(state.count)
        progress = _followed(state.progress, count, extra.get("value"))
        drift = jnp.where(progress.idle <= PATIENCE, boldness, jnp.where(alpha > initial, -RETURN, 0))
        change = jnp.exp(-rate * (cosine - drift * jnp.sqrt(mean)))
        least = 0 if extra.get("value") is None else jnp.where(progress.idle <= LASTING, jnp.minimum(alpha, initial), 0)
        alpha = jnp.maximum(alpha * jnp.where(state.count > 0, change, 1), least)
        alpha = jnp.clip(alpha, minimum, maximum)
        # Optax's own optimisers need promotion, also where the user has forbidden it.
        with jax.numpy_dtype_promotion("standard"):
            direction, base = tx.update(updates, state.base, params, **extra)
        new = jax.tree.map(lambda u: alpha.astype(u.dtype) * u, direction)
        last = space.to_working(new)
        taken = NextBatchRateState(base, alpha, last, space.norm(last), square, progress, count)
        finite = jnp.isfinite(length) & jnp.isfinite(taken.length) & jnp.isfinite(alpha) & jnp.isfinite(progress.total)
        return space.where(finite, new, space.zeros_like(new)), space.where(finite, taken, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _followed(old: Progress, count: jax.Array, value: Any) -> Progress:
    """The progress after the count-th loss; where there is no loss the same as before, which is no reason to return."""
    if value is None:
        return old
    dtype = old.total.dtype
    total = SMOOTHING * old.total + (1 - SMOOTHING) * jnp.asarray(value, dtype)
    mean = total / (1 - SMOOTHING ** count.astype(dtype))
    lower = mean < old.lowest
    return Progress(total, jnp.where(lower, mean, old.lowest), jnp.where(lower, 0, old.idle + 1).astype(jnp.int32))
