"""Odd values for arguments, and how many of them: a few in `make test`, thousands in `make soak`."""

import decimal
import fractions
import os

import hypothesis
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

import saddlefree as sf

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


def cases(few, many):
    """Settings of a property: `few` examples, `many` in `make soak`."""
    checks = [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow]
    return hypothesis.settings(max_examples=many if SOAK else few, deadline=None, suppress_health_check=checks)


class Thing:
    """Of no kind that anything expects."""

    def __repr__(self):
        return "Thing()"


NUMBERS = (
    st.integers(-3, 9)
    | st.floats()
    | st.floats(0, 1)
    | st.sampled_from([2**31, 2**63, 10**30, -(2**63), 10**400, fractions.Fraction(1, 3), decimal.Decimal("0.1")])
    | st.sampled_from([np.float32(0.5), np.float64("nan"), np.float32("inf"), jnp.float32(0.3)])
)
OTHERS = st.sampled_from(
    [
        None,
        True,
        False,
        1 + 2j,
        "",
        "auto",
        "abs",
        "0.1",
        b"1",
        [],
        [0.1],
        (1, 2),
        {},
        {"a": 1},
        np.array("a"),
        np.array(1j),
        np.array(None),
        np.array([0.5]),
        np.ones((2, 2)),
        jnp.zeros(0),
        jnp.array(True),
        Thing(),
        lambda count: 0.5,  # a schedule
        optax.adam(1e-3),
        sf.exact(),
        sf.lanczos(),
        sf.fixed_rate(),
        sf.damping_search(),
        sf.lower_bound(),
        sf.shanks(1),
    ]
)
VALUES = NUMBERS | OTHERS
