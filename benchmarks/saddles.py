"""Random starts on functions with many saddles: how often a run ends as converged where the Hessian is not.

    python -m benchmarks.saddles

A run counts where it says that it has converged, and the smallest eigenvalue of the Hessian there is below −1e-6 of the
largest. Half of the starts are on symmetric places, from which the gradient leads straight to a saddle. Beside
`minimise`: `optax.lbfgs`, and Newton's method H⁻¹g with halved steps, both stopped by the same gradient norm.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import saddlefree as sf

STARTS = 1_000
STEPS = 500
TOLERANCE = 1e-8
THRESHOLD = 1e-6

Function = Callable[[jax.Array], jax.Array]
Method = Callable[[Function, jax.Array], tuple[jax.Array, bool]]
"""From a function and a start to the end of a run, and whether it says that it has converged."""


def _bowl(x: jax.Array) -> jax.Array:
    return 0.01 * jnp.sum(x**2)


def _factors(x: jax.Array) -> jax.Array:
    """A matrix of rank 1 as a product of two vectors."""
    a, b = x[:3], x[3:]
    target = jnp.outer(jnp.array([1.0, -2.0, 0.5]), jnp.array([0.5, 1.0, 1.5]))
    return jnp.sum((jnp.outer(a, b) - target) ** 2)


def _network(x: jax.Array) -> jax.Array:
    """Two equal hidden units are a saddle between two different ones."""
    w, v, b = x[:2], x[2:4], x[4:]
    t = jnp.linspace(-2.0, 2.0, 9)
    return jnp.mean((jnp.tanh(t[:, None] * w + b) @ v - jnp.sin(2 * t)) ** 2) + 1e-3 * jnp.sum(x**2)


FUNCTIONS: dict[str, tuple[Function, int]] = {
    "quartic": (lambda x: 0.5 * (x[0] ** 2 - x[1] ** 2) + 0.25 * x[1] ** 4, 2),
    "cosines": (lambda x: jnp.sum(jnp.cos(x)) + _bowl(x), 4),
    "factors": (_factors, 6),
    "monkey": (lambda x: x[0] ** 3 - 3 * x[0] * x[1] ** 2 + jnp.sum(x**4) - 0.01 * x[1] ** 2, 2),
    "product": (lambda x: (jnp.prod(x) - 1) ** 2 + 0.01 * jnp.sum((x - jnp.mean(x)) ** 2) + 0.001 * jnp.sum(x**4), 4),
    "waves": (lambda x: jnp.sin(x[0]) * jnp.sin(x[1]) + _bowl(x), 2),
    "wells": (lambda x: jnp.sum((x**2 - 1) ** 2) + 0.1 * jnp.sum(x[1:] * x[:-1]), 6),
    "network": (_network, 6),
}


def start(size: int, seed: int) -> jax.Array:
    """Random, and with every second seed a symmetric place: equal entries, or all but one 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size)
    if seed % 4 == 1:
        x[:] = x[0]
    elif seed % 4 == 3:
        x[1:] = 0
    return jnp.asarray(x)


def minimised(fn: Function, x: jax.Array) -> tuple[jax.Array, bool]:
    """`minimise` as it is."""
    result = sf.minimise(fn, x, max_steps=STEPS)
    return result.params, result.status == sf.Status.CONVERGED


@functools.lru_cache(maxsize=4)
def _lbfgs(fn: Function) -> Callable[[jax.Array], jax.Array]:
    tx = optax.lbfgs()

    def step(carry: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], None]:
        x, state = carry
        value, g = optax.value_and_grad_from_state(fn)(x, state=state)
        updates, state = tx.update(g, state, x, value=value, grad=g, value_fn=fn)
        return (optax.apply_updates(x, updates), state), None

    return jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), None, STEPS)[0][0])


@functools.lru_cache(maxsize=4)
def _newton(fn: Function) -> Callable[[jax.Array], jax.Array]:
    lengths = jnp.concatenate([0.5 ** jnp.arange(12.0), jnp.zeros(1)])

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        g, H = jax.grad(fn)(x), jax.hessian(fn)(x)
        d = jnp.linalg.solve(H + 1e-12 * jnp.eye(x.size), g)
        # The gradient decides: Newton's method looks for a point where it vanishes.
        tried = x - lengths[:, None] * d
        norms = jnp.linalg.norm(jax.vmap(jax.grad(fn))(tried), axis=1)
        return tried[jnp.nanargmin(norms)], None

    return jax.jit(lambda x: jax.lax.scan(step, x, None, 100)[0])


def _peer(make: Callable[[Function], Callable]) -> Method:
    def run(fn: Function, x: jax.Array) -> tuple[jax.Array, bool]:
        x = make(fn)(x)
        return x, bool(jnp.linalg.norm(jax.grad(fn)(x)) < TOLERANCE)

    return run


METHODS = {"minimise": minimised, "optax.lbfgs": _peer(_lbfgs), "newton": _peer(_newton)}


@functools.lru_cache(maxsize=8)
def _hessian(fn: Function) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jax.hessian(fn))


def ended_on_saddles(method: Method, name: str, seeds: Iterable[int]) -> int:
    """The runs that end as converged on a saddle or a maximum."""
    fn, size = FUNCTIONS[name]
    found = 0
    for seed in seeds:
        x, converged = method(fn, start(size, seed))
        values = np.linalg.eigvalsh(_hessian(fn)(x))
        found += bool(converged and values[0] < -THRESHOLD * np.abs(values).max())
    return found


def main() -> None:
    """Prints and writes the counts."""
    jax.config.update("jax_enable_x64", True)
    summary: dict[str, Any] = {"starts": STARTS, "ended_on_saddles": {}}
    for name in FUNCTIONS:
        counts = {method: ended_on_saddles(run, name, range(STARTS)) for method, run in METHODS.items()}
        print(f"{name:<12}" + "".join(f"{method:>14} {count:5}" for method, count in counts.items()), flush=True)
        summary["ended_on_saddles"][name] = counts
    totals = {method: sum(c[method] for c in summary["ended_on_saddles"].values()) for method in METHODS}
    from benchmarks.record import write  # needs the laboratory, which users of the functions above do not

    write("saddles", {**summary, "total": totals})


if __name__ == "__main__":
    main()
