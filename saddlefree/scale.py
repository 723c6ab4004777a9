"""The series' scale V: how H² is shrunk so that the powers of I − H²/V die away.

The series converges for V > λmax(H²)/2, and for V > λmax(H²) each term is positive semi-definite: truncations grow
towards the limit and never beyond it. Smaller is faster: a component with eigenvalue h of H decays like (1 − h²/V)^k.

Each choice of V is a frozen dataclass with `init(gradient)`, its state, and `measure(matvec, gradient, state)`.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from saddlefree import checks, space, spectrum
from saddlefree.curvature import MatVec
from saddlefree.space import Scalar, Vector


class Measurement(NamedTuple):
    """What a choice of V found."""

    V: jax.Array
    state: Any
    products: int  # with H, that finding it took
    squared: Vector | None = None  # H²g, where it came along


@runtime_checkable
class Scale(Protocol):
    """A choice of V."""

    def init(self, gradient: Vector) -> Any:
        """The state before the first step."""

    def measure(self, matvec: MatVec, gradient: Vector, state: Any) -> Measurement:
        """V for the matrix behind `matvec`."""


@dataclasses.dataclass(frozen=True)
class lower_bound:
    """The paper's choice, V ← max{V, ‖H²g‖/‖g‖} from V = `initial`; it shares its products with the series (K ≥ 2).

    It is a bound from *below* on λmax(H²): the series may diverge, and as a running maximum it never comes down.
    With `decay` < 1 it does: V ← max{decay·V, ‖H²g‖/‖g‖}.

    Args:
      initial: V before the first step, > 0; 100 in the paper.
      decay: in (0, 1]; 1 as in the paper.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([20.0, -1.0]))
    >>> solver = sf.series(num_terms=2, scale=lower_bound(initial=100.0))
    >>> float(sf.solve(solver, lambda v: H @ v, jnp.array([1.0, 0.0])).stats["scale"])
    400.0
    """

    initial: float = 100.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        checks.constant("initial", self.initial, 0, open_low=True)
        checks.constant("decay", self.decay, 0, 1, open_low=True)

    def init(self, gradient: Vector) -> jax.Array:
        """V itself is the state."""
        dtype = space.scalar_dtype(gradient)
        # What the first step makes `initial` again, as far as the dtype reaches.
        before = jnp.asarray(self.initial, dtype) / jnp.asarray(self.decay, dtype)
        return jnp.minimum(before, jnp.finfo(dtype).max)

    def measure(self, matvec: MatVec, gradient: Vector, state: jax.Array) -> Measurement:
        """V from H²g, which it hands on to the series."""
        squared = matvec(matvec(gradient))
        bound = space.norm(squared) * space.reciprocal(space.norm(gradient))
        V = jnp.maximum(self.decay * state, bound)
        return Measurement(V, V, 2, squared)


@dataclasses.dataclass(frozen=True)
class power_iteration:
    """V = safety · ‖H² v‖/‖v‖, v the result of `num_iterations` − 1 power iterations with H² from a random start.

    Args:
      num_iterations: ≥ 1; two products each.
      safety: factor > 0 for what the iteration still lacks; it approaches λmax(H²) from below.
      seed: of the random start, drawn anew each step.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([3.0, -1.0]))
    >>> solver = sf.series(num_terms=1, scale=power_iteration(num_iterations=20, safety=1.0))
    >>> round(float(sf.solve(solver, lambda v: H @ v, jnp.ones(2)).stats["scale"]), 3)
    9.0
    """

    num_iterations: int = 10
    safety: float = 1.5
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("num_iterations", self.num_iterations, low=1)
        checks.constant("safety", self.safety, 0, open_low=True)
        checks.seed(self.seed)

    def init(self, gradient: Vector) -> jax.Array:
        """The random key."""
        return jax.random.PRNGKey(self.seed)

    def measure(self, matvec: MatVec, gradient: Vector, state: jax.Array) -> Measurement:
        """V from a few power iterations."""
        key, state = jax.random.split(state)
        start = space.random_normal(key, gradient)

        def iterate(v: Vector, _: None) -> tuple[Vector, jax.Array]:
            v = space.normalise(v)
            v = matvec(matvec(v))
            return v, space.norm(v)

        _, growth = jax.lax.scan(iterate, start, None, length=self.num_iterations)
        return Measurement(self.safety * growth[-1], state, 2 * self.num_iterations)


@dataclasses.dataclass(frozen=True)
class lanczos_bound:
    """V = safety · (max|θ| + β)², from a short Lanczos run on H with a random start: Ritz value plus residual.

    The default. max|θ| + β lies above |λ|max(H) in practice (Zhou & Li 2011), so that each truncation of the series is
    positive definite.

    Args:
      num_products: Lanczos steps m ≥ 1, one product each.
      safety: factor > 0.
      seed: of the random start, drawn anew each step.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([3.0, -1.0]))
    >>> solver = sf.series(num_terms=1, scale=lanczos_bound(num_products=2, safety=1.01))
    >>> round(float(sf.solve(solver, lambda v: H @ v, jnp.ones(2)).stats["scale"]), 3)
    9.09
    """

    num_products: int = 8
    safety: float = 1.05
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("num_products", self.num_products, low=1)
        checks.constant("safety", self.safety, 0, open_low=True)
        checks.seed(self.seed)

    def init(self, gradient: Vector) -> jax.Array:
        """The random key."""
        return jax.random.PRNGKey(self.seed)

    def measure(self, matvec: MatVec, gradient: Vector, state: jax.Array) -> Measurement:
        """V from a short Lanczos run."""
        key, state = jax.random.split(state)
        # A space cannot have more dimensions than the parameters have entries.
        steps = spectrum.krylov_size(self.num_products, gradient)
        _, T, _ = spectrum.lanczos_decomposition(matvec, space.random_normal(key, gradient), steps)
        return Measurement(self.safety * spectrum.largest_magnitude(T) ** 2, state, steps)


@dataclasses.dataclass(frozen=True)
class trace_bound:
    """V = margin · mean ‖H v‖² over standard normal v, an estimate of tr H² = Σ hᵢ² ≥ λmax(H²).

    The paper's m(tr H)² is no bound: for indefinite H the trace may vanish, as that of diag(1, −1) does. tr H² cannot.
    It is loose by the effective rank of H², and then the series is slow.

    Args:
      num_samples: ≥ 1; one product each.
      margin: factor > 0 against an estimate that came out too small.
      seed: of the samples, drawn anew each step.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([1.0, -1.0]))
    >>> solver = sf.series(num_terms=1, scale=trace_bound(num_samples=1000, margin=1.0))
    >>> round(float(sf.solve(solver, lambda v: H @ v, jnp.ones(2)).stats["scale"]))
    2
    """

    num_samples: int = 8
    margin: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("num_samples", self.num_samples, low=1)
        checks.constant("margin", self.margin, 0, open_low=True)
        checks.seed(self.seed)

    def init(self, gradient: Vector) -> jax.Array:
        """The random key."""
        return jax.random.PRNGKey(self.seed)

    def measure(self, matvec: MatVec, gradient: Vector, state: jax.Array) -> Measurement:
        """V from a few random products."""
        key, state = jax.random.split(state)

        def sample(key: jax.Array) -> jax.Array:
            product = matvec(space.random_normal(key, gradient))
            return space.dot(product, product)

        keys = jax.random.split(key, self.num_samples)
        _, squares = jax.lax.scan(lambda _, key: (None, sample(key)), None, keys)
        return Measurement(self.margin * jnp.mean(squares), state, self.num_samples)


@dataclasses.dataclass(frozen=True)
class fixed_scale:
    """V = `value` > 0, known beforehand.

    >>> import saddlefree as sf
    >>> H = jnp.diag(jnp.array([1.0, -1.0]))
    >>> solver = sf.series(num_terms=200, scale=fixed_scale(2.0))
    >>> sf.solve(solver, lambda v: H @ v, jnp.ones(2), damping=0.0).direction.round(4)
    Array([1., 1.], dtype=float32)
    """

    value: Scalar

    def __post_init__(self) -> None:
        checks.constant("value", self.value, 0, open_low=True)

    def init(self, gradient: Vector) -> tuple[()]:
        """Nothing to remember."""
        return ()

    def measure(self, matvec: MatVec, gradient: Vector, state: tuple[()]) -> Measurement:
        """V as given."""
        return Measurement(jnp.asarray(self.value, space.scalar_dtype(gradient)), state, 0)
