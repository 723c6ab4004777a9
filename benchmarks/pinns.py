"""Physics-informed networks at equal wall time: `adaptive_saddle_free_newton()` with its defaults, L-BFGS and Adam.

Float64, full batch, one core, three seeds, 40 s and 160 s; compiling and evaluating are not counted. Adam's rate decays
by a cosine over the whole budget, so that each budget is a run of its own; its first rate is the better of two at 40 s
on the first seed. Takes an hour. `--problems poisson --seeds 1 --seconds 10 20` is a short look.

Poisson: −Δu = f on the unit square with u = sin πx sin 2πy, 800 points inside and 200 on the boundary.
Convection: u_t + 20 u_x = 0 on [0, 2π] × [0, 1], u(x, 0) = sin x, periodic; 1,000 points inside, 128 at t = 0, 100
pairs on the boundary; the residual enters the loss as it is.
"""

import argparse
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import saddlefree as sf
from benchmarks.record import read, write

CHUNK = 10
Problem = tuple[Callable, Callable, Any]
"""The loss and the relative L2 error, functions of the parameters, and the parameters to start from."""


def network(key: jax.Array, sizes: tuple[int, ...]) -> list[tuple[jax.Array, jax.Array]]:
    """Glorot's normal weights, zero biases."""
    keys = jax.random.split(key, len(sizes) - 1)
    init = jax.nn.initializers.glorot_normal()
    return [(init(k, (n, m)), jnp.zeros(m)) for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def u(params: list, z: jax.Array) -> jax.Array:
    """The network with tanh."""
    for w, b in params[:-1]:
        z = jnp.tanh(z @ w + b)
    w, b = params[-1]
    return (z @ w + b)[..., 0]


def derivative(fn: Callable, direction: list[float]) -> Callable:
    """The directional derivative of fn at each point."""
    return lambda z: jax.jvp(fn, (z,), (jnp.broadcast_to(jnp.array(direction), z.shape),))[1]


def relative_error(truth: Callable, x: jax.Array, y: jax.Array) -> Callable:
    """‖u − truth‖/‖truth‖ on a grid."""
    grid = jnp.stack(jnp.meshgrid(x, y), -1).reshape(-1, 2)
    return lambda params: jnp.linalg.norm(u(params, grid) - truth(grid)) / jnp.linalg.norm(truth(grid))


def poisson(seed: int) -> Problem:
    """A smooth elliptic problem."""
    keys = jax.random.split(jax.random.key(seed), 3)
    inside, t = jax.random.uniform(keys[0], (800, 2)), jax.random.uniform(keys[1], (50,))
    zero, one = jnp.zeros(50), jnp.ones(50)
    boundary = jnp.concatenate([jnp.stack(side, 1) for side in ((t, zero), (t, one), (zero, t), (one, t))])
    truth = lambda z: jnp.sin(jnp.pi * z[..., 0]) * jnp.sin(2 * jnp.pi * z[..., 1])  # noqa: E731
    size = 5 * jnp.pi**2

    def loss(params: list) -> jax.Array:
        fn = lambda z: u(params, z)  # noqa: E731
        second = [derivative(derivative(fn, axis), axis)(inside) for axis in ([1.0, 0.0], [0.0, 1.0])]
        residual = -(second[0] + second[1]) / size - truth(inside)
        return 0.5 * jnp.mean(residual**2) + 5 * jnp.mean(fn(boundary) ** 2)

    line = jnp.linspace(0, 1, 50)
    return loss, relative_error(truth, line, line), network(keys[2], (2, 32, 32, 32, 1))


def convection(seed: int) -> Problem:
    """A wave that travels three times around: hard for physics-informed networks (Krishnapriyan et al. 2021)."""
    keys = jax.random.split(jax.random.key(seed), 4)
    inside = jax.random.uniform(keys[0], (1000, 2)) * jnp.array([2 * jnp.pi, 1.0])
    x, t = 2 * jnp.pi * jax.random.uniform(keys[1], (128,)), jax.random.uniform(keys[2], (100,))
    initial, left = jnp.stack([x, jnp.zeros(128)], 1), jnp.stack([jnp.zeros(100), t], 1)
    right = left + jnp.array([2 * jnp.pi, 0.0])

    def loss(params: list) -> jax.Array:
        fn = lambda z: u(params, z)  # noqa: E731
        residual = derivative(fn, [20.0, 1.0])(inside)
        start, around = fn(initial) - jnp.sin(x), fn(left) - fn(right)
        return 0.5 * (jnp.mean(residual**2) + jnp.mean(start**2) + jnp.mean(around**2))

    error = relative_error(
        lambda z: jnp.sin(z[..., 0] - 20 * z[..., 1]), jnp.linspace(0, 2 * jnp.pi, 64), jnp.linspace(0, 1, 50)
    )
    return loss, error, network(keys[3], (2, 50, 50, 50, 1))


PROBLEMS = {"poisson": poisson, "convection": convection}


RATES = {"poisson": 5e-3, "convection": 5e-3}
"""Adam's first rate: the better of 1e-3 and 5e-3 at 40 s on the first seed."""
OPTIMISERS = {
    "lanczos-adaptive": sf.adaptive_saddle_free_newton(),
    "lbfgs": optax.lbfgs(memory_size=20),
    "adam": None,  # its rate decays over each budget
}


def runner(tx: optax.GradientTransformation, loss: Callable, params: Any) -> tuple[Callable, Any]:
    """A compiled function that makes `CHUNK` steps, and what it starts from."""
    tx = optax.with_extra_args_support(tx)

    def step(carry: tuple, _: None) -> tuple:
        params, state = carry
        if optax.tree.get(state, "value") is None or optax.tree.get(state, "grad") is None:
            value, grad = jax.value_and_grad(loss)(params)
        else:  # L-BFGS, whose line search has them already
            value, grad = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    return jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=CHUNK)[0]), carry


def run(tx: optax.GradientTransformation, problem: Problem, marks: list[float]) -> list[dict[str, float]]:
    """Loss and error when each mark is passed, in seconds of computing."""
    loss, error, params = problem
    advance, carry = runner(tx, loss, params)
    measure = jax.jit(lambda params: (loss(params), error(params)))
    # Twice: the state that L-BFGS returns has other types than the one it starts from, and compiles again.
    jax.block_until_ready((advance(advance(carry)), measure(params)))
    history, elapsed, steps = [], 0.0, 0
    for mark in marks:
        while elapsed < mark:
            begin = time.process_time()
            carry = jax.block_until_ready(advance(carry))
            elapsed += time.process_time() - begin
            steps += CHUNK
        value, distance = measure(carry[0])
        history.append({"seconds": mark, "steps": steps, "loss": float(value), "error": float(distance)})
    return history


def adam(rate: float, problem: Problem, budget: float) -> optax.GradientTransformation:
    """Adam with a cosine decay over as many steps as the budget allows."""
    loss, _, params = problem
    advance, carry = runner(optax.adam(rate), loss, params)
    carry = jax.block_until_ready(advance(carry))
    begin = time.process_time()
    for _ in range(20):
        carry = jax.block_until_ready(advance(carry))
    return optax.adam(optax.cosine_decay_schedule(rate, int(budget / (time.process_time() - begin) * 20 * CHUNK)))


def figure(rows: list[dict]) -> None:
    """Draws loss against time, the median over seeds and each seed, into docs/figures."""
    from matplotlib.figure import Figure

    names = [name for name in PROBLEMS if any(row["problem"] == name for row in rows)]
    fig = Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    panels = np.atleast_1d(fig.subplots(1, len(names)))
    for panel, name in zip(panels, names, strict=True):
        mine = [row for row in rows if row["problem"] == name]
        for number, optimiser in enumerate(sorted({row["optimiser"] for row in mine}, reverse=True)):
            runs = [row["history"] for row in mine if row["optimiser"] == optimiser]
            seconds, losses = [h["seconds"] for h in runs[0]], np.array([[h["loss"] for h in run] for run in runs])
            panel.loglog(seconds, np.median(losses, 0), color=f"C{number}", label=optimiser)
            panel.loglog(seconds, losses.T, color=f"C{number}", alpha=0.25, linewidth=0.8)
        panel.set(title=name, xlabel="seconds of one core")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("loss")
    panels[0].legend(fontsize=8)
    fig.savefig(pathlib.Path(__file__).parent.parent / "docs" / "figures" / "pinns.png", dpi=150)


def main() -> None:
    """Prints a line for each run and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--optimisers", nargs="+", default=list(OPTIMISERS), choices=list(OPTIMISERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, nargs=2, default=[40.0, 160.0])
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    short, long = options.seconds
    marks = sorted({short, long, *np.geomspace(short / 20, long, 16).round(1).tolist()})
    for name in options.problems:
        for seed in range(options.seeds):
            problem = PROBLEMS[name](seed)
            for optimiser in options.optimisers:
                runs = {}
                if optimiser == "adam":
                    for budget in (short, long):
                        tx = adam(RATES[name], problem, budget)
                        runs[f"adam, {budget:g} s"] = run(tx, problem, [mark for mark in marks if mark <= budget])
                else:
                    runs[optimiser] = run(OPTIMISERS[optimiser], problem, marks)
                for label, history in runs.items():
                    row = {"problem": name, "seed": seed, "optimiser": label, "history": history}
                    print(name, seed, label, [h for h in history if h["seconds"] in (short, long)], flush=True)
                    same = ("problem", "seed", "optimiser")
                    others = [old for old in read("pinns", []) if any(old[key] != row[key] for key in same)]
                    write("pinns", [*others, row])
    figure(read("pinns", []))


if __name__ == "__main__":
    main()
