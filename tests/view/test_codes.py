"""Codes of weights: half a thousandth, from 1 down to 2^-64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attlas.view.codes import FIRST, LAST, MASKED, PENDING, ZERO, decode, encode

ALLOWED = np.array([True])


@given(st.floats(2.0**-64, 1.0))
def test_a_weight_survives_within_half_a_thousandth(weight: float) -> None:
    (code,) = encode(np.array([weight]), ALLOWED)
    assert FIRST <= code <= LAST
    assert decode(np.array([code]))[0] == pytest.approx(weight, rel=3.4e-4)


@given(st.integers(FIRST, LAST))
def test_a_code_survives(code: int) -> None:
    assert encode(decode(np.array([code], dtype=np.uint16)), ALLOWED)[0] == code


def test_order_is_kept() -> None:
    weights = np.sort(np.random.default_rng(0).random(1000) ** 20)
    assert (np.diff(encode(weights, np.ones(1000, dtype=bool)).astype(int)) >= 0).all()


@pytest.mark.parametrize(
    ("weight", "allowed", "code"),
    [
        (0.0, True, ZERO),
        (2.0**-64.01, True, ZERO),
        (2.0**-64, True, FIRST),
        (1.0, True, LAST),
        (1.0000002, True, LAST),
        (float("nan"), True, ZERO),
        (0.0, False, MASKED),
        (0.5, False, MASKED),
    ],
)
def test_edges(weight: float, allowed: bool, code: int) -> None:
    for dtype in (np.float32, np.float64):
        assert encode(np.array([weight], dtype=dtype), np.array([allowed]))[0] == code


def test_what_is_not_known_is_not_a_number() -> None:
    assert np.isnan(decode(np.array([PENDING], dtype=np.uint16))).all()
    assert decode(np.array([MASKED, ZERO], dtype=np.uint16)).tolist() == [0.0, 0.0]
