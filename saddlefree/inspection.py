"""Reading the figures out of an optimiser state."""

from typing import Any

import jax

from saddlefree import space
from saddlefree.optimiser import SaddleFreeState, ScaleBySaddleFreeState
from saddlefree.space import Tree


def diagnostics(state: Any) -> dict[str, jax.Array]:
    """The figures of the last update, as scalars, from anywhere inside an Optax state.

    `damping`, `learning_rate`, `momentum`, the solver's statistics (`products`, `scale`, …), the counters `steps`,
    `rejected_steps` and `nonfinite_steps`, and where the loss is measured `value` and `reduction_ratio`. Where a state
    holds several of this library's transformations, the first one's.

    They are arrays, so that reading them waits for nothing and works under `jit`. For a log, `jax.device_get` fetches
    all of them at once, and `tolist` makes plain numbers of them (lists under `vmap`).

    Args:
      state: of one of this library's transformations, also inside `chain`, `inject_hyperparams`, `apply_if_finite`, …

    >>> import jax.numpy as jnp, optax
    >>> import saddlefree as sf
    >>> tx = optax.chain(sf.adaptive_saddle_free_newton(sf.exact(), initial_damping=0.5), optax.clip(1.0))
    >>> state = tx.init(jnp.ones(2))
    >>> int(diagnostics(state)["rejected_steps"])
    0
    >>> import json
    >>> line = {name: figure.tolist() for name, figure in jax.device_get(diagnostics(state)).items()}
    >>> json.loads(json.dumps(line))["steps"]
    0
    """
    found = _find(state)
    if not found:
        raise ValueError(f"state must hold a saddlefree transformation's state, got {type(state).__name__} without")
    first = found[0]
    counters = {name: getattr(first, name) for name in ("rejected_steps", "nonfinite_steps") if hasattr(first, name)}
    return {"steps": first.count, **first.figures, **counters}


def averaged_params(state: Any, params: Tree) -> Tree:
    """The averaged parameters of an optimiser with `averaging=γ`, from anywhere inside an Optax state.

    With x₁ … x_t the parameters at the updates so far, the weight of x_i is proportional to about i^γ (Shamir & Zhang
    2013), so that the mean is that of the last t/(γ + 1) or so:

        x̄_t = x̄_{t−1} + (γ + 1)/(γ + t)·(x_t − x̄_{t−1}).

    Args:
      state: of `saddle_free_newton` or `adaptive_saddle_free_newton`, also inside `chain`, `inject_hyperparams`, …
      params: the present parameters: for their dtypes, for those that are frozen, and before the first update.

    >>> import jax.numpy as jnp, optax
    >>> import saddlefree as sf
    >>> loss = lambda x: jnp.sum(x**2) / 2
    >>> tx = sf.saddle_free_newton(0.5, damping=0.0, solver=sf.exact(), averaging=0.0)  # the plain mean
    >>> x = jnp.array([4.0])
    >>> state = tx.init(x)
    >>> for _ in range(3):  # at 4, 2 and 1
    ...     updates, state = tx.update(x, state, x, value_fn=loss)
    ...     x = optax.apply_updates(x, updates)
    >>> [round(float(mean), 3) for mean in averaged_params(state, x)]
    [2.333]
    """
    found = [s for s in _find(state) if isinstance(s, SaddleFreeState) and jax.tree.leaves(s.average)]
    if not found:
        raise ValueError(
            f"state must be that of an optimiser with averaging=…, got {type(state).__name__} without an average"
        )
    first = found[0]
    average = space.cast_like(space.fill(first.average, params), params)
    return space.where(first.count > 0, average, params)


def has_figures(state: Any) -> bool:
    """Whether `diagnostics` finds anything in `state`."""
    return bool(_find(state))


def _find(state: Any) -> list[SaddleFreeState | ScaleBySaddleFreeState]:
    kinds = SaddleFreeState | ScaleBySaddleFreeState
    leaves = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]
