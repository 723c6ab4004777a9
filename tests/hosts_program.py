"""One of several processes that train together: `python hosts_program.py PORT NUMBER COUNT PAIR…`; see test_hosts.py.

Each process holds one device and half of the batch; parameters are sharded over processes where they can be. The first
process prints the parameters after fifteen steps of each pair of solver and rule, as JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from problems import network_batch, network_loss, network_params, network_residuals

import saddlefree as sf

STEPS = 15


def train(pair, mesh):
    """The parameters after fifteen steps, with microbatches of eight examples."""
    from test_acceptance import RULES, SOLVERS  # which computes, and must not before the processes have met

    solver, rule = pair.split(":")
    tx = sf.adaptive_saddle_free_newton(SOLVERS[solver], rule=RULES[rule], packed=mesh is None)
    params, batch = network_params(jax.random.key(0), (3, 8, 1)), network_batch(jax.random.key(1))
    if mesh is not None:
        whole = PartitionSpec()
        spec = [{"w": PartitionSpec(None, "all"), "b": whole}, {"w": PartitionSpec("all"), "b": whole}]

        def place(x, spec):
            return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: np.asarray(x)[index])

        params = jax.tree.map(place, params, spec)
        batch = tuple(place(x, PartitionSpec("all")) for x in batch)

    @jax.jit
    def step(params, state, x, y):
        value_fn = sf.microbatch_mean(network_loss, (x, y), 8)
        value, grads = jax.value_and_grad(value_fn)(params)
        known = {"value_fn": value_fn, "residual_fn": lambda params: network_residuals(params, (x, y))}
        updates, state = tx.update(grads, state, params, value=value, **known)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(STEPS):
        params, state = step(params, state, *batch)
    if mesh is not None:
        params = jax.jit(lambda p: p, out_shardings=NamedSharding(mesh, PartitionSpec()))(params)
    return jnp.concatenate([jnp.ravel(np.asarray(x.addressable_data(0))) for x in jax.tree.leaves(params)]).tolist()


def main():
    port, number, count, *pairs = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number), initialization_timeout=60)
    mesh = jax.make_mesh((int(count),), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    found = {pair: train(pair, mesh) for pair in pairs}
    if number == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main()
