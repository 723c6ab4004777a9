"""The damping λ: how far the quadratic model is trusted.

(|H| + λI)⁻¹ g is a Newton step where |H| ≫ λ and a gradient step of length 1/λ where |H| ≪ λ. A rule is a frozen
dataclass: `init(dtype)` is its state, `value(state, count)` is λ, and `update` learns from the step that λ gave. The
reduction ratio ρ is the actual change of the loss over the one that the model predicted.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from saddlefree import checks
from saddlefree.tree import Number, at


class Damping(Protocol):
    """A rule for λ."""

    @property
    def learns(self) -> bool:
        """Whether it needs the reduction ratio, which costs a loss and up to one product a step."""

    def init(self, dtype: Any) -> Any:
        """The state before the first step."""

    def value(self, state: Any, count: jax.Array) -> jax.Array:
        """λ for step number `count`."""

    def update(self, state: Any, count: jax.Array, damping: jax.Array, ratio: jax.Array, refused: jax.Array) -> Any:
        """The state after a step with λ = `damping` and reduction ratio ρ, or after one that was refused."""


class _Learned:
    """What rules share whose state is λ itself."""

    initial: Number
    minimum: Number
    maximum: Number

    @property
    def learns(self) -> bool:
        """It does."""
        return True

    def init(self, dtype: Any) -> jax.Array:
        """λ itself is the state."""
        return at(self.initial, jnp.zeros((), jnp.int32), dtype)

    def value(self, state: jax.Array, count: jax.Array) -> jax.Array:
        """λ within its bounds."""
        return jnp.clip(state, at(self.minimum, count, state.dtype), at(self.maximum, count, state.dtype))


@dataclasses.dataclass(frozen=True)
class fixed_damping:
    """λ as given: a number ≥ 0 or a schedule.

    >>> rule = fixed_damping(0.1)
    >>> float(rule.value(rule.init(jnp.float32), jnp.array(0)))
    0.10000000149011612
    """

    damping: Number

    def __post_init__(self) -> None:
        checks.number("damping", self.damping, 0)

    @property
    def learns(self) -> bool:
        """It does not."""
        return False

    def init(self, dtype: Any) -> jax.Array:
        """Zero, of the dtype that λ is given in."""
        return jnp.zeros((), dtype)

    def value(self, state: jax.Array, count: jax.Array) -> jax.Array:
        """λ."""
        return at(self.damping, count, state.dtype)

    def update(
        self, state: jax.Array, count: jax.Array, damping: jax.Array, ratio: jax.Array, refused: jax.Array
    ) -> jax.Array:
        """Nothing to learn."""
        return state


@dataclasses.dataclass(frozen=True)
class levenberg_marquardt(_Learned):
    """λ by the agreement of model and loss (the paper's Appendix A.4; Moré 1978):

        λ ← λ/ω  where ρ < ¼,    λ ← ω λ  where ρ > ¾,    clipped to [minimum, maximum];

    after a refused step, or one that met a non-finite number, λ ← `refusal`·λ.

    Args:
      initial: λ before the first step, ≥ 0.
      factor: ω in (0, 1), or a schedule.
      minimum: ≥ 0. With `maximum`, it keeps λ in bounds on a flat loss, where ρ says nothing.
      maximum: ≥ minimum.
      refusal: ≥ 1.

    >>> rule = levenberg_marquardt(initial=1.0, factor=0.5)
    >>> state = rule.init(jnp.float32)
    >>> for ratio in (1.0, 1.0, 0.0):
    ...     state = rule.update(state, jnp.array(0), state, jnp.array(ratio), refused=jnp.array(False))
    >>> float(rule.value(state, jnp.array(0)))
    0.5
    """

    initial: Number = 1e-2
    factor: Number = 0.9
    minimum: Number = 1e-8
    maximum: Number = 1e3
    refusal: Number = 2.0

    def __post_init__(self) -> None:
        checks.number("initial_damping", self.initial, 0)
        checks.number("factor", self.factor, 0, 1, open_low=True, open_high=True)
        checks.number("minimum", self.minimum, 0)
        checks.number("refusal", self.refusal, 1)
        if not callable(self.minimum) and not isinstance(self.minimum, jax.core.Tracer):
            checks.number("maximum", self.maximum, float(self.minimum))

    def update(
        self, state: jax.Array, count: jax.Array, damping: jax.Array, ratio: jax.Array, refused: jax.Array
    ) -> jax.Array:
        """λ up or down by ω."""
        omega, refusal = at(self.factor, count, state.dtype), at(self.refusal, count, state.dtype)
        change = jnp.where(ratio < 0.25, 1 / omega, jnp.where(ratio > 0.75, omega, 1))
        # From λ = 0 nothing would ever raise it.
        state = jnp.maximum(state, jnp.where(refused, 1e-6, 0))
        return self.value(state * jnp.where(refused, refusal, change), count)


@dataclasses.dataclass(frozen=True)
class damping_search(_Learned):
    """λ by trial: several values around the last one, on one basis, and the one with the lowest loss is kept.

        λ ← argmin f(x − d(λᵢ)),    λᵢ = λ·spreadⁱ,    i = −reach … reach.

    It needs a solver that keeps its basis, such as `lanczos`: there every d(λ) comes without a new product, and a
    search costs 2·reach + 1 evaluations of the loss. After a refused step λ ← λ·spread^{reach + 1}.

    Args:
      initial: λ before the first step, > 0.
      spread: the ratio of neighbouring trials, > 1.
      reach: trials on either side, ≥ 1.
      minimum: > 0.
      maximum: ≥ minimum.

    >>> rule = damping_search(initial=1.0, spread=10.0, reach=1)
    >>> [round(float(damping), 3) for damping in rule.trials(rule.init(jnp.float32), jnp.array(0))]
    [0.1, 1.0, 10.0]
    """

    initial: Number = 1e-2
    spread: float = 2.0
    reach: int = 2
    minimum: float = 1e-10
    maximum: float = 1e6

    def __post_init__(self) -> None:
        checks.number("initial_damping", self.initial, 0, open_low=True)
        checks.number("spread", self.spread, 1, open_low=True)
        checks.integer("reach", self.reach, low=1)
        checks.number("minimum", self.minimum, 0, open_low=True)
        checks.number("maximum", self.maximum, float(self.minimum))

    def trials(self, state: jax.Array, count: jax.Array) -> jax.Array:
        """λ and its neighbours."""
        powers = self.spread ** jnp.arange(-self.reach, self.reach + 1, dtype=state.dtype)
        return self.value(state * powers, count)

    def update(
        self, state: jax.Array, count: jax.Array, damping: jax.Array, ratio: jax.Array, refused: jax.Array
    ) -> jax.Array:
        """The best λ is the middle of the next trials; where none was good, one beyond them."""
        return self.value(jnp.where(refused, state * self.spread ** (self.reach + 1), damping), count)
