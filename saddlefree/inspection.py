"""Reading the figures out of an optimiser state."""

from typing import Any

import jax

from saddlefree.optimiser import SaddleFreeState, ScaleBySaddleFreeState


def diagnostics(state: Any) -> dict[str, jax.Array]:
    """The figures of the last update, as scalars, from anywhere inside an Optax state.

    `damping`, `learning_rate`, `momentum`, the solver's statistics (`products`, `scale`, …), the counters `steps`,
    `rejected_steps` and `nonfinite_steps`, and where the loss is measured `value` and `reduction_ratio`. Where a state
    holds several of this library's transformations, the first one's.

    Args:
      state: of one of this library's transformations, also inside `chain`, `inject_hyperparams`, `apply_if_finite`, …

    >>> import jax.numpy as jnp, optax
    >>> import saddlefree as sf
    >>> tx = optax.chain(sf.adaptive_saddle_free_newton(sf.exact(), initial_damping=0.5), optax.clip(1.0))
    >>> int(diagnostics(tx.init(jnp.ones(2)))["rejected_steps"])
    0
    """
    found = _find(state)
    if not found:
        raise ValueError(f"state must hold a saddlefree transformation's state, got {type(state).__name__} without")
    first = found[0]
    counters = {name: getattr(first, name) for name in ("rejected_steps", "nonfinite_steps") if hasattr(first, name)}
    return {"steps": first.count, **first.figures, **counters}


def has_figures(state: Any) -> bool:
    """Whether `diagnostics` finds anything in `state`."""
    return bool(_find(state))


def _find(state: Any) -> list[SaddleFreeState | ScaleBySaddleFreeState]:
    kinds = SaddleFreeState | ScaleBySaddleFreeState
    leaves = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]
