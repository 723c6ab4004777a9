"""A plan compiled for a task: it starts, advances and evaluates one seed, or several seeds at once.

Steps run in one compiled loop whose length is an argument, so that the result does not depend on how a run is cut into
pieces. K-FAC compiles itself: it goes step by step.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from saddlefree.convolutions import laid_out
from saddlefree.lab import optimisers
from saddlefree.lab.errors import UserError
from saddlefree.lab.methods import Circumstances
from saddlefree.lab.plan import Plan, cores
from saddlefree.lab.task import Batch, Task, Tree

LIMIT = 250
"""The most steps in one call of `advance`, and of those whose order of examples is made at once."""
_KNOWN = ("aux", "steps", "value")  # figures of a step that say nothing new


def clock() -> float:
    """Seconds: on one core those of the processor, which other programs do not lengthen; otherwise of the wall."""
    alone = cores() == 1 and jax.default_backend() == "cpu"
    return time.process_time() if alone else time.perf_counter()


class Precise(Protocol):
    """A problem or a plan."""

    @property
    def float64(self) -> bool:
        """Whether it is computed with 64 bits."""


@contextmanager
def precision(of: Precise) -> Iterator[None]:
    """The numbers that a problem is computed with."""
    with jax.enable_x64(of.float64), jax.numpy_dtype_promotion("standard"):
        yield


class Program:
    """Everything that one run computes.

    Args:
      plan: what is run; as long as its number of steps is not known, rates do not decay.
      task: the problem's, loaded.
    """

    def __init__(self, plan: Plan, task: Task):
        self._task, self._seeds, self.batch_size = task, plan.seeds, plan.batch_size
        self.mapped, self.steps_per_epoch = plan.mapped, plan.steps_per_epoch
        assert plan.mapped or len(plan.seeds) == 1, "a plan of several programs: see Plan.parts"
        self._span = self.steps_per_epoch * max(1, LIMIT // self.steps_per_epoch)
        around = Circumstances(task, plan.steps or 1, self.batch_size is None)
        try:
            self._method = optimisers.find(plan.optimiser).build(plan.values, around)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._looped = self._method.traceable
        self._order: tuple[int, Any] = (-1, None)
        parts = jax.tree.map(lambda x: x[: plan.evaluated] if plan.evaluated else x, task.parts)
        evaluate = jax.jit(self._over_seeds(task.evaluate, (0, 0, None)))
        self._evaluate = lambda state: evaluate(state.params, state.model_state, parts)
        self.compile_seconds = 0.0
        self._step: Any = None
        self._loop: Any = None

    def _over_seeds(self, fn: Any, axes: tuple) -> Any:
        return jax.vmap(fn, axes) if self.mapped else fn

    def start(self) -> Any:
        """The state before the first step."""
        train = self._task.parts["train"]
        batch = jax.tree.map(lambda x: x[: self.batch_size], train) if self.batch_size else train

        def begin(seed: Any) -> Any:
            return self._method.init(*self._task.init(jax.random.key(seed)), seed, batch)

        try:
            if self.mapped:
                return jax.jit(jax.vmap(begin))(jnp.asarray(self._seeds, jnp.int32))
            return begin(self._seeds[0])
        except ValueError as error:
            raise UserError(str(error)) from error

    def prepare(self, state: Any) -> None:
        """Compiles, if that is not done yet; `compile_seconds` is the time it took."""
        if self._loop is not None or self._step is not None:
            return
        begin = clock()
        if self._looped:
            loop = self._over_seeds(self._turns, (0, None, None if self.batch_size is None else 0, None, None))
            number = jnp.zeros((), jnp.int32)
            arguments = state, self._task.parts["train"], self._order_in(0), number, number
            self._loop = jax.jit(loop, donate_argnums=0).lower(*arguments).compile()
        else:
            self._step = self._step_figures
            if self._method.prepare is not None:
                self._method.prepare(jax.tree.map(jnp.copy, state))
            # The second step may be another program than the first.
            jax.block_until_ready(self._one_by_one(jax.tree.map(jnp.copy, state), 0, 2))
        jax.block_until_ready(self._evaluate(state))
        self.compile_seconds += clock() - begin

    def room(self, step: int) -> int:
        """The most steps that `advance` can make from number `step`."""
        return min(LIMIT, self._span - step % self._span)

    def advance(self, state: Any, step: int, count: int) -> tuple[Any, dict[str, np.ndarray]]:
        """`count` steps from number `step`, if there is room; the old state is gone. Figures are (count[, seeds])."""
        if not self._looped:
            return jax.block_until_ready(self._one_by_one(state, step, count))
        span, place = divmod(step, self._span)
        state, figures = jax.block_until_ready(
            self._loop(state, self._task.parts["train"], self._order_in(span), jnp.int32(place), jnp.int32(count))
        )
        return state, {name: np.moveaxis(np.asarray(values), -1, 0)[:count] for name, values in figures.items()}

    def ended(self, state: Any) -> bool:
        """Whether further steps would change nothing."""
        return self._method.ended(state)

    def evaluate(self, state: Any) -> dict[str, np.ndarray]:
        """Losses and accuracy, for each seed where there are several."""
        return {name: np.asarray(values) for name, values in self._evaluate(state).items()}

    def _turns(self, state: Any, train: Batch, order: Any, place: jax.Array, count: jax.Array) -> tuple[Any, dict]:
        step = laid_out(self._step_figures)
        shapes = jax.eval_shape(step, state, self._batch(train, order, place))[1]
        buffers = {name: jnp.zeros(LIMIT, figure.dtype) for name, figure in shapes.items()}

        def turn(i: jax.Array, carry: tuple[Any, dict]) -> tuple[Any, dict]:
            state, figures = carry
            state, new = step(state, self._batch(train, order, place + i))
            return state, {name: figures[name].at[i].set(new[name]) for name in figures}

        return jax.lax.fori_loop(0, count, turn, (state, buffers))

    def _step_figures(self, state: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        state, figures = self._method.step(state, batch)
        return state, {name: figure for name, figure in figures.items() if name not in _KNOWN}

    def _one_by_one(self, state: Any, step: int, count: int) -> tuple[Any, dict[str, np.ndarray]]:
        if self._method.advance is not None:
            return self._method.advance(state, self._task.parts["train"], count)
        figures = []
        for number in range(step, step + count):
            span, place = divmod(number, self._span)
            batch = self._batch(self._task.parts["train"], self._order_in(span), place)
            state, new = self._step(state, batch)
            figures.append(new)
        return state, {name: np.stack([np.asarray(row[name]) for row in figures]) for name in figures[0]}

    def _batch(self, train: Batch, order: Any, place: Any) -> Batch:
        if self.batch_size is None:
            return train
        chosen = jax.lax.dynamic_slice_in_dim(order, place * self.batch_size, self.batch_size)
        return jax.tree.map(lambda x: x[chosen], train)

    def _order_in(self, span: int) -> Tree:
        """The order of the examples in the epochs of a span, one after another, for each seed."""
        if self.batch_size is None:
            return jnp.zeros(0, jnp.int32)
        if self._order[0] != span:
            count = self._span // self.steps_per_epoch
            used = self.steps_per_epoch * self.batch_size
            orders = _orders(self._seeds, span * count + np.arange(count), self._task.examples)[..., :used]
            orders = orders.reshape(len(self._seeds), -1)
            self._order = span, orders if self.mapped else orders[0]
        return self._order[1]


@functools.partial(jax.jit, static_argnums=2)
def _orders(seeds: Sequence[int], epochs: np.ndarray, examples: int) -> jax.Array:
    def order(seed: jax.Array, epoch: jax.Array) -> jax.Array:
        return jax.random.permutation(jax.random.fold_in(jax.random.key(seed), epoch), examples)

    every_epoch = jax.vmap(order, (None, 0))
    return jax.vmap(every_epoch, (0, None))(jnp.asarray(seeds, jnp.int32), jnp.asarray(epochs, jnp.int32))


def seconds_per_step(program: Program, least: float) -> float:
    """Of a program at its start, compiling apart, measured over at least so many seconds."""
    state = program.start()
    program.prepare(state)
    count, elapsed, steps = 1, 0.0, 0
    state, _ = program.advance(state, 0, 1)
    while elapsed < least:
        count = min(2 * count, program.room(0))
        begin = clock()
        state, _ = program.advance(state, 0, count)
        elapsed, steps = elapsed + clock() - begin, steps + count
    return elapsed / steps
