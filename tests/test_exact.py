"""The exact solver against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import cases, saddle_free_direction, solve, symmetric

import saddlefree as sf
from saddlefree.space import Space


@cases(25)
@given(seed=st.integers(0, 2**16), damping=st.sampled_from([1e-3, 0.1, 10.0]))
def test_direction(seed, damping):
    rng = np.random.default_rng(seed)
    H, g = symmetric(rng, rng.normal(size=7)), rng.normal(size=7)
    tree = {"a": jnp.asarray(g[:3], jnp.float32), "b": jnp.asarray(g[3:].reshape(2, 2), jnp.float32)}

    def matvec(v):
        flat = jnp.asarray(H, jnp.float32) @ jnp.concatenate([v["a"], v["b"].ravel()])
        return {"a": flat[:3], "b": flat[3:].reshape(2, 2)}

    solution = sf.solve(sf.exact(chunk=2), matvec, tree, damping)
    found = np.concatenate([solution.direction["a"], solution.direction["b"].ravel()])
    expected = saddle_free_direction(H, g, damping)
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.linalg.norm(expected))
    values = np.linalg.eigvalsh(H)
    np.testing.assert_allclose(solution.stats["smallest_eigenvalue"], values[0], atol=1e-4)
    np.testing.assert_allclose(solution.stats["largest_eigenvalue"], values[-1], atol=1e-4)
    assert solution.stats["products"] == 7


def test_newton_keeps_signs_and_small_eigenvalues_are_replaced():
    H = jnp.diag(jnp.array([2.0, -0.5, 1e-4, -1e-4]))
    direction = lambda solver, damping=0.0: sf.solve(solver, lambda v: H @ v, jnp.ones(4), damping).direction  # noqa: E731
    np.testing.assert_allclose(direction(sf.exact(absolute=False)), [0.5, -2, 1e4, -1e4], rtol=1e-5)
    np.testing.assert_allclose(direction(sf.exact(absolute=False), 1.0), [1 / 3, 2, 1 / 1.0001, 1 / 0.9999], rtol=1e-5)
    # The paper's rule: |h| < threshold becomes the replacement, whatever its sign.
    replaced = sf.exact(threshold=0.00052, replacement=0.25)
    np.testing.assert_allclose(direction(replaced), [0.5, 2, 4, 4], rtol=1e-5)
    np.testing.assert_allclose(direction(replaced, 0.25), [1 / 2.25, 1 / 0.75, 2, 2], rtol=1e-5)


def test_moving_average_has_its_bias_corrected():
    """C ← β C + (1 − β) H, over the sum of its weights; signed curvature is averaged, before absolute values."""
    solver, state = sf.exact(average=0.75), None
    for h in (1.0, -3.0):
        solution = sf.solve(solver, lambda v, h=h: h * v, jnp.ones(1), 0.0, state)
        state = solution.state
    mean = (0.75 * 0.25 * 1 + 0.25 * -3) / (0.75 * 0.25 + 0.25)
    np.testing.assert_allclose(solution.direction, 1 / abs(mean), rtol=1e-5)


def test_without_an_average_no_matrix_is_kept():
    """Nor with another H at the second call does the first one matter; a decay of 0 is no average either."""
    for solver, kept in ((sf.exact(), 0), (sf.exact(average=0.0), 4)):
        state = solver.init(Space(jnp.ones(2)))
        assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == kept
        for h in (1.0, -3.0):
            solution = solve(solver, h * jnp.eye(2), jnp.ones(2), 0.0, state)
            state = solution.state
        np.testing.assert_allclose(solution.direction, [1 / 3, 1 / 3], rtol=1e-6)


def test_the_average_may_be_traced():
    """Under `jit` and `vmap`, as a sweep over β needs it."""

    def second(beta):
        solver = sf.exact(average=beta)
        state = sf.solve(solver, lambda v: v, jnp.ones(1), 0.0).state
        return sf.solve(solver, lambda v: 4 * v, jnp.ones(1), 0.0, state).direction[0]

    betas = np.array([0.0, 0.5, 0.9])
    mean = (betas * (1 - betas) + 4 * (1 - betas)) / (1 - betas**2)
    np.testing.assert_allclose(jax.jit(jax.vmap(second))(jnp.asarray(betas, jnp.float32)), 1 / mean, rtol=1e-5)


def test_a_non_finite_hessian_does_not_enter_the_average():
    solver = sf.exact(average=0.5)
    good = solve(solver, jnp.eye(2), jnp.ones(2), 0.0, solver.init(Space(jnp.ones(2))))
    bad = solve(solver, jnp.nan * jnp.eye(2), jnp.ones(2), 0.0, good.state)
    assert bad.result == sf.Result.NONFINITE
    jax.tree.map(np.testing.assert_array_equal, bad.state, good.state)
    assert good.state.weight == 0.5


def test_refuses_large_problems_and_says_how_to_go_on():
    with pytest.raises(
        ValueError, match=r"at most max_size=4096 parameters, got 5000; raise max_size, or use a solver"
    ):
        sf.solve(sf.exact(), lambda v: v, jnp.ones(5000))
    with pytest.raises(ValueError, match="max_size=10"):
        sf.saddle_free_newton(solver=sf.exact(max_size=10)).init(jnp.ones(11))
    for make, name in (
        (lambda: sf.exact(threshold=-1), "threshold"),
        (lambda: sf.exact(replacement=0), "replacement"),
        (lambda: sf.exact(average=1.0), "average"),
        (lambda: sf.exact(max_size=0), "max_size"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be"):
            make()
