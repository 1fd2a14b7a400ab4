"""Causal, Window and Dilated against their definitions."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks.conftest import check_coverage, draw_part
from tests.messages import refusal

from attlas.errors import DtypeError, ShapeError
from attlas.masks import BlockState, Causal, Dilated, Mask, Window

SIZES = [(1, 1), (8, 8), (3, 11), (11, 3), (1, 9), (9, 1), (0, 4), (4, 0)]
WINDOWS = [
    (0, 0, 1),
    (2, 1, 1),
    (None, 0, 1),
    (None, 2, 1),
    (3, None, 1),
    (None, None, 1),
    (50, 50, 1),
    (4, 0, 2),
    (5, 5, 3),
    (None, 0, 4),
]


def definition(m: int, n: int, left: int | None, right: int | None, offset: int | None, step: int = 1) -> np.ndarray:
    allowed = np.zeros((m, n), dtype=bool)
    for i in range(m):
        own = i + (n - m if offset is None else offset)
        for j in range(n):
            near = (left is None or own - j <= left) and (right is None or j - own <= right)
            allowed[i, j] = near and (j - own) % step == 0
    return allowed


@pytest.mark.parametrize("offset", [None, 0, 3, -2])
@pytest.mark.parametrize(("left", "right", "step"), WINDOWS)
def test_windows_of_every_size(left, right, step, offset, dense):
    masks = [Dilated(left, right, step, offset)] + ([Window(left, right, offset)] if step == 1 else [])
    masks += [Causal(offset)] if (left, right, step) == (None, 0, 1) else []
    for mask, (m, n) in itertools.product(masks, SIZES):
        assert np.array_equal(dense(mask, m, n)[0, 0], definition(m, n, left, right, offset, step)), (mask, m, n)


distance = st.none() | st.integers(0, 12)
local_masks = st.one_of(
    st.builds(Causal, st.none() | st.integers(-15, 15)),
    st.builds(Window, distance, distance, st.none() | st.integers(-15, 15)),
    st.builds(Dilated, distance, distance, st.integers(1, 9), st.none() | st.integers(-15, 15)),
)


@settings(max_examples=150)
@given(mask=local_masks, data=st.data())
def test_coverage_of_a_whole_tile_is_exact(mask: Mask, data, tile):
    m, n = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    check_coverage(mask, tile(m, n, *draw_part(data, m, n)), exact=True)


@settings(max_examples=100)
@given(mask=local_masks, data=st.data())
def test_scattered_tile_is_part_of_the_whole(mask: Mask, data, tile, cells, dense):
    m, n = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    rows = data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=6))
    columns = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=6))
    at = tile(m, n, rows, columns)
    assert np.array_equal(cells(mask, at)[0, 0], dense(mask, m, n)[0, 0][np.ix_(rows, columns)])
    check_coverage(mask, at)


def test_upper_half_of_a_causal_matrix_is_skipped_without_its_cells(tile):
    n = 10**9
    above = tile(n, n, range(10**6), range(10**6, 2 * 10**6))
    below = tile(n, n, range(10**6, 2 * 10**6), range(10**6))
    assert Causal().coverage(above) is BlockState.EMPTY
    assert Causal().coverage(below) is BlockState.FULL


def test_empty_tile_is_not_judged(tile):
    assert Causal().coverage(tile(4, 4, range(2, 2), range(4))) is BlockState.PARTIAL
    assert Causal().coverage(tile(4, 4, [], [1])) is BlockState.PARTIAL


def test_numpy_and_tensor_integers_are_whole_numbers():
    assert Causal(np.int64(2)).offset == 2
    assert Window(torch.tensor(3), 0).left == 3


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (Causal(), "Causal()"),
        (Causal(offset=-1), "Causal(offset=-1)"),
        (Window(3, None), "Window(3, None)"),
        (Window(3, 0, offset=0), "Window(3, 0, offset=0)"),
        (Dilated(4, 0, 2), "Dilated(4, 0, 2)"),
        (Dilated(4, 0, 2, offset=5), "Dilated(4, 0, 2, offset=5)"),
    ],
)
def test_name_makes_the_mask_again(mask, name):
    assert mask.name() == name
    assert eval(name).name() == name


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Causal(offset=1.5), DtypeError, "Causal(): offset = 1.5 (float)"),
        (lambda: Causal(offset=True), DtypeError, "Causal(): offset = True (bool)"),
        (lambda: Window(-4, 0), ShapeError, "Window(): left = -4"),
        (lambda: Window(4, "0"), DtypeError, "Window(): right = '0' (str)"),
        (lambda: Dilated(4, 0, 0), ShapeError, "Dilated(): step = 0"),
    ],
)
def test_bad_input(make, kind, text):
    assert refusal(kind, make) == text
