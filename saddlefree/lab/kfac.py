"""K-FAC from kfac-jax, as a method that the laboratory can run."""

from typing import Any, NamedTuple

import jax
import jax.interpreters.xla
import jax.numpy as jnp

from saddlefree.convolutions import laid_out
from saddlefree.lab.task import Batch, Task, Tree, total

# TensorFlow Probability 0.25, through which kfac-jax samples, looks for this table where JAX 0.10 has it no longer.
jax.interpreters.xla.pytype_aval_mappings = jax.core.pytype_aval_mappings  # type: ignore[attr-defined]

import kfac_jax  # noqa: E402
from kfac_jax._src import patches_second_moment, tag_graph_matcher  # noqa: E402


def _evaluated(eqn: Any, values: list) -> list:
    """kfac-jax 0.0.8 expects two results of `get_bind_params`, of which JAX 0.10 returns the second alone."""
    outputs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return outputs if isinstance(outputs, list) else [outputs]


tag_graph_matcher.eval_jaxpr_eqn = _evaluated
_moments = patches_second_moment.patches_moments


def _fast_moments(inputs: jax.Array, **others: Any) -> tuple[jax.Array, jax.Array]:
    """Moments of image patches, whose convolutions in a loop take nearly all of a step where they are slow."""
    weights = others.pop("weighting_array", None)
    return laid_out(lambda inputs, weights: _moments(inputs, weighting_array=weights, **others))(inputs, weights)


patches_second_moment.patches_moments = _fast_moments


class KfacState(NamedTuple):
    """All that a run carries."""

    params: Tree
    model_state: Tree
    optimiser: Any
    key: jax.Array
    step: jax.Array  # how many there were, for a rate that decays


class Kfac:
    """Init and step of kfac-jax's optimiser; it compiles itself and cannot be put into a loop or mapped."""

    def __init__(self, task: Task, *, adapts: bool, damping: float, ema: float, rate: Any = None, momentum: float = 0):
        self._rate, self._momentum, self._damping, self._adapts = rate, momentum, damping, adapts

        def loss(params: Tree, model_state: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
            terms, model_state = task.terms(params, model_state, batch, True)  # type: ignore[misc]
            examples = jax.tree.leaves(batch)[0].shape[0]
            for term in terms:
                # kfac-jax divides by the first array's length.
                share = examples / term.outputs.shape[0]
                if term.classifies:
                    kfac_jax.register_softmax_cross_entropy_loss(term.outputs, term.targets, weight=share)
                else:
                    kfac_jax.register_squared_error_loss(term.outputs, term.targets, weight=term.weight * share)
            return total(terms), model_state

        self._optimiser = kfac_jax.Optimizer(
            value_and_grad_func=jax.value_and_grad(loss, has_aux=True),
            value_func_has_state=True,
            l2_reg=0.0,
            use_adaptive_learning_rate=adapts,
            use_adaptive_momentum=adapts,
            use_adaptive_damping=adapts,
            initial_damping=damping if adapts else None,
            damping_adaptation_interval=1,
            inverse_update_period=1,
            curvature_ema=ema,
            num_burnin_steps=0,
            min_damping=1e-8,
            max_damping=1e3,  # as ours; without it λ grows on a kink until nothing is left but NaN
        )

    def init(self, params: Tree, model_state: Tree, seed: Any, batch: Batch) -> KfacState:
        """The state before the first step."""
        key = jax.random.PRNGKey(seed)
        params, model_state = jax.tree.map(jnp.array, (params, model_state))
        return KfacState(
            params, model_state, self._optimiser.init(params, key, batch, model_state), key, jnp.zeros((), jnp.int32)
        )

    def step(self, state: KfacState, batch: Batch) -> tuple[KfacState, dict[str, jax.Array]]:
        """One step; the state that is handed in cannot be used again."""
        key, following = jax.random.split(state.key)
        fixed = {}
        if not self._adapts:
            rate = self._rate(int(state.step)) if callable(self._rate) else self._rate
            fixed = {"learning_rate": jnp.asarray(rate), "momentum": jnp.asarray(self._momentum)}
            fixed |= {"damping": jnp.asarray(self._damping)}
        params, optimiser, model_state, stats = self._optimiser.step(
            state.params, state.optimiser, key, batch=batch, func_state=state.model_state, **fixed
        )
        figures = {"loss": stats["loss"], "damping": stats["damping"], "learning_rate": stats["learning_rate"]}
        return KfacState(params, model_state, optimiser, following, state.step + 1), figures
