"""The series solver and its scales against eigendecompositions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import saddle_free_direction, solve, symmetric

import saddlefree as sf
from saddlefree.problem import Problem
from saddlefree.space import Space

ACCELERATORS = [sf.shanks, sf.sablonniere, sf.levin_t, sf.pade, sf.vector_rho, sf.topological_rho, sf.levin_d2]
SCALES = [sf.lower_bound(initial=2.0), sf.power_iteration(), sf.lanczos_bound(), sf.trace_bound(), sf.fixed_scale(1.5)]


@pytest.fixture
def matrix():
    rng = np.random.default_rng(0)
    H = symmetric(rng, rng.uniform(0.1, 1, 40) * rng.choice([-1, 1], 40))
    return H, rng.normal(size=40)


def relative_error(solution, expected):
    return np.linalg.norm(np.asarray(solution.direction) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: type(scale).__name__)
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_every_scale_converges_to_the_exact_direction(x64, matrix, scale, damping):
    H, g = matrix
    solution = solve(sf.series(num_terms=4000, scale=scale), H, g, damping)
    # The trace is loose by the effective rank of H², and the series slow accordingly.
    tolerance = 0.2 if isinstance(scale, sf.trace_bound) else 1e-6
    assert relative_error(solution, saddle_free_direction(H, g, damping)) < tolerance
    assert solution.stats["scale"] > 0.5
    assert solution.result == sf.Result.FINE


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda a: a.__name__)
def test_accelerators_in_the_loop_equal_accelerating_the_partial_sums(x64, matrix, accelerator):
    """The solver pushes terms as they come; the same sums handed over at once give the same limit."""
    H, g = jnp.asarray(matrix[0]), jnp.asarray(matrix[1])
    order, K, scale = 2, 9, sf.fixed_scale(1.1)
    sums = [solve(sf.series(num_terms=k, scale=scale), H, g, 0.2).direction for k in range(1, K + 1)]
    expected = sf.accelerate(accelerator(order=order), sums)
    solver = sf.series(num_terms=K, acceleration=accelerator(order=order), scale=scale)
    # The functionals ⟨g, ·⟩ and the sums differ by the factor √V, which every accelerator passes through.
    np.testing.assert_allclose(solve(solver, H, g, 0.2).direction, expected, rtol=1e-6)


def test_paper_configuration_improves_on_the_plain_sum(x64, matrix):
    H, g = matrix
    exact = saddle_free_direction(H, g, 0.0)
    plain = sf.series(num_terms=18, scale=sf.fixed_scale(1.01))
    accelerated = sf.series(num_terms=18, acceleration=sf.sablonniere(order=8), scale=sf.fixed_scale(1.01))
    errors = [relative_error(solve(s, H, g, 0.0), exact) for s in (accelerated, plain)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("acceleration", [None, sf.sablonniere(order=2)])
def test_one_model_answers_the_dampings_that_were_stated(x64, matrix, acceleration):
    """From one run of powers: the answers of a model for each λ alone; in between, that of the nearest λ."""
    H, g = jnp.asarray(matrix[0]), jnp.asarray(matrix[1])
    solver = sf.series(num_terms=12, acceleration=acceleration, scale=sf.fixed_scale(1.1))
    layout, dampings, calls = Space(g), jnp.array([0.01, 0.3, 2.0]), []
    matvec = lambda v: calls.append(1) or H @ v  # noqa: E731

    def traced(damping):
        model, _ = solver.model(Problem(layout, g, lambda part: matvec), dampings, solver.init(layout))
        return model.answer(damping), model.stats

    together, stats = jax.jit(jax.vmap(traced))(jnp.array([0.01, 0.3, 2.0, 0.1, 1.8]))
    assert len(calls) == 1  # in a loop of two, in a loop over terms
    assert stats["products"].tolist() == [22] * 5
    for i, damping in enumerate([0.01, 0.3, 2.0, 0.01, 2.0]):
        alone = solve(solver, H, g, damping)
        assert alone.stats["products"] == 22
        np.testing.assert_allclose(together.direction[i], alone.direction, rtol=1e-9)
        np.testing.assert_allclose(together.stats["error"][i], alone.stats["error"], rtol=1e-6)


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_the_estimated_error_is_near_the_error(x64, matrix, damping):
    """Within a factor of ten either way; from 1 on the result says so."""
    H, g = matrix
    expected = saddle_free_direction(H, g, damping)
    for num_terms in (2, 10, 100, 400):
        solution = solve(sf.series(num_terms=num_terms, scale=sf.fixed_scale(1.1)), H, g, damping)
        error = relative_error(solution, expected)
        assert error / 10 < solution.stats["error"] < 30 * error
        assert (solution.result == sf.Result.FINE) == (solution.stats["error"] < 1)


def test_products_are_counted():
    """By a product that counts its own calls."""
    H = jnp.diag(jnp.array([1.0, -0.5, 0.2]))
    for scale, extra in (
        (sf.fixed_scale(2.0), 0),
        (sf.lower_bound(), 0),
        (sf.lanczos_bound(), 3),
        (sf.trace_bound(), 8),
    ):
        calls = []
        solver = sf.series(num_terms=4, scale=scale)
        matvec = lambda v, calls=calls: calls.append(1) or H @ v  # noqa: E731
        with jax.disable_jit():
            solution = sf.solve(solver, matvec, jnp.ones(3))
        assert solution.stats["products"] == len(calls) == 2 * 3 + extra


def test_lower_bound_ratchets_and_decays():
    """The paper's running maximum, and the option that lets it come down."""

    def scales(scale):
        solver, state, found = sf.series(num_terms=2, scale=scale), None, []
        for h in (1.0, 20.0, 1.0, 1.0):
            solution = sf.solve(solver, lambda v, h=h: h * v, jnp.ones(2), state=state)
            state = solution.state
            found.append(float(solution.stats["scale"]))
        return found

    assert scales(sf.lower_bound(initial=100.0)) == [100.0, 400.0, 400.0, 400.0]
    np.testing.assert_allclose(scales(sf.lower_bound(initial=100.0, decay=0.5)), [100.0, 400.0, 200.0, 100.0])
    assert np.isfinite(sf.lower_bound(decay=1e-178).init(jnp.ones(2)))  # 100/decay is beyond float32


@pytest.mark.parametrize("scale", SCALES[1:4], ids=lambda scale: type(scale).__name__)
def test_no_curvature_is_gradient_descent(scale):
    """H = 0 gives g/λ, not 0/0."""
    solution = sf.solve(sf.series(num_terms=5, scale=scale), lambda v: 0 * v, jnp.array([1.0, -2.0]), damping=0.5)
    np.testing.assert_allclose(solution.direction, [2.0, -4.0], rtol=0.01)
    zero = sf.solve(sf.series(num_terms=5, scale=scale), lambda v: v, jnp.zeros(2), damping=0.5)
    np.testing.assert_array_equal(zero.direction, 0)


def test_random_scales_draw_anew_and_repeat_by_seed():
    H = jnp.diag(jnp.linspace(-1.0, 1.0, 30))
    for make in (sf.lanczos_bound, sf.power_iteration, sf.trace_bound):
        starts = [sf.series(num_terms=1, scale=make(seed=seed)).init(Space(jnp.ones(30))) for seed in (0, 0, 1)]
        found = [solve(sf.series(num_terms=1, scale=make()), H, jnp.ones(30), 0.1, state) for state in starts]
        again = solve(sf.series(num_terms=1, scale=make()), H, jnp.ones(30), 0.1, found[0].state)
        first, same, other, later = (float(solution.stats["scale"]) for solution in (*found, again))
        assert first == same
        assert len({first, other, later}) == 3


def test_parts_are_equal_and_hashable_by_value():
    solver = lambda: sf.series(num_terms=18, acceleration=sf.sablonniere(order=8), scale=sf.lower_bound(initial=100.0))  # noqa: E731
    assert solver() == solver()
    assert len({solver(), solver(), sf.series(num_terms=18)}) == 2
    for part in (*SCALES, *(a(order=2) for a in ACCELERATORS), sf.exact(), sf.fixed_rate(1.0), sf.adaptive_plane()):
        assert hash(part) == hash(type(part)(**{k: getattr(part, k) for k in part.__dataclass_fields__}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sf.series(num_terms=0), "num_terms must be a whole number ≥ 1, got 0"),
        (lambda: sf.series(num_terms=2.5), "num_terms must be a whole number ≥ 1, got 2.5"),
        (
            lambda: sf.series(num_terms=4, acceleration=sf.shanks(order=2)),
            r"num_terms must be a whole number ≥ 5 .* got 4",
        ),
        (lambda: sf.lower_bound(initial=0.0), r"initial must be a number in \(0, inf\), got 0.0"),
        (lambda: sf.lower_bound(decay=1.5), r"decay must be a number in \(0, 1\], got 1.5"),
        (lambda: sf.fixed_scale(-1.0), r"value must be a number in \(0, inf\), got -1.0"),
        (lambda: sf.fixed_scale("1"), r"value must be a number in \(0, inf\), got '1'"),
        (lambda: sf.lanczos_bound(num_products=0), "num_products must be a whole number ≥ 1, got 0"),
        (lambda: sf.lanczos_bound(safety=float("nan")), r"safety must be a number in \(0, inf\), got nan"),
        (lambda: sf.power_iteration(num_iterations=0), "num_iterations must be a whole number ≥ 1, got 0"),
        (lambda: sf.trace_bound(margin=0), r"margin must be a number in \(0, inf\), got 0"),
        (
            lambda: sf.solve(sf.exact(), lambda v: v, jnp.ones(2), damping=-1.0),
            r"damping must be a number in \[0, inf\)",
        ),
        (lambda: sf.solve(sf.exact(), lambda v: v, jnp.ones(2, jnp.int32)), "must be real floating point, got int32"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_memory_does_not_grow_with_the_number_of_terms():
    """Temporaries of the compiled solve, accelerated, at K = 50 against K = 10."""
    h = jnp.linspace(-1.0, 1.0, 10_000)

    def memory(K):
        solver = sf.series(num_terms=K, acceleration=sf.sablonniere(order=2), scale=sf.lower_bound())
        solve = jax.jit(lambda g: sf.solve(solver, lambda v: h * v, g).direction)
        return solve.lower(h).compile().memory_analysis().temp_size_in_bytes

    assert memory(50) <= 1.1 * memory(10)
