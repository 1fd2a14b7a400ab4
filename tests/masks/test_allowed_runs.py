"""The runs of keys that masks name are those that they allow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.masks.conftest import make_tile
from torch import Tensor

import attlas
from attlas.foundation.tiles import Tile
from attlas.masks.base import Mask

BATCH, HEADS = 2, 3
numbers = st.integers(-6, 12)
sizes = st.integers(0, 9)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[int, int, Mask]:
    m, n = draw(st.integers(1, 9)), draw(st.integers(1, 9))

    def ids(count: int) -> Tensor:
        values = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        return torch.tensor(values if draw(st.booleans()) else sorted(values))

    def lengths() -> list[int]:
        return draw(st.lists(st.integers(0, n), min_size=BATCH, max_size=BATCH))

    def single() -> Mask:
        kind = draw(st.integers(0, 7))
        if kind == 0:
            return attlas.Causal(draw(st.none() | numbers))
        if kind == 1:
            left, right = draw(st.none() | sizes), draw(st.none() | sizes)
            return attlas.Window(left, right, draw(st.none() | numbers))
        if kind == 2:
            return attlas.Padding(lengths(), side=draw(st.sampled_from(["left", "right"])))
        if kind == 3:
            return attlas.Prefix(lengths() if draw(st.booleans()) else draw(sizes))
        if kind == 4:
            return attlas.Documents(ids(n), ids(m))
        if kind == 5:
            return attlas.Dilated(draw(sizes), draw(sizes), draw(st.integers(1, 3)))
        if kind == 6:
            return ~attlas.Prefix(draw(sizes))
        return attlas.from_tensor(torch.ones(m, n, dtype=torch.bool))

    mask = single()
    for _ in range(draw(st.integers(0, 2))):
        mask = mask & single() if draw(st.booleans()) else mask | single()
    return m, n, mask


def whole(m: int, n: int) -> Tile:
    return make_tile(m, n, batch_ids=range(BATCH), head_ids=range(HEADS))


def cells(allowed_runs: tuple[Tensor, Tensor], m: int, n: int) -> Tensor:
    first, stop = (t.expand(BATCH, HEADS, m).unsqueeze(-1) for t in allowed_runs)
    j = torch.arange(n)
    return (first <= j) & (j < stop)


@given(matrices())
def test_a_run_is_what_the_mask_allows(matrix: tuple[int, int, Mask]) -> None:
    m, n, mask = matrix
    at = whole(m, n)
    found = mask.allowed_runs(at)
    if found is not None:
        assert torch.equal(cells(found, m, n), mask.allows(at).expand(BATCH, HEADS, m, n))


RUNS = {
    "causal": attlas.Causal(),
    "window": attlas.Window(2, 1),
    "padding": attlas.Padding([3, 8]),
    "padding on the left": attlas.Padding([3, 8], side="left"),
    "prefix": attlas.Prefix(3),
    "step 1": attlas.Dilated(3, 0, 1),
    "documents": attlas.Documents(torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])),
    "both": attlas.Causal() & attlas.Padding([3, 8]),
    "either, touching": attlas.Prefix(3) | attlas.Causal(),
    "either, empty": attlas.Prefix(0) | attlas.Window(0, 0),
}


@pytest.mark.parametrize("name", RUNS)
def test_masks_of_runs_say_so(name: str) -> None:
    found = RUNS[name].allowed_runs(whole(8, 8))
    assert found is not None
    assert all(t.dtype == torch.int64 for t in found)


HOLES = {
    "dilated": attlas.Dilated(None, 0, 2),
    "documents that come back": attlas.Documents(torch.tensor([0, 1, 0, 1, 1, 2, 2, 2])),
    "apart": attlas.Prefix(1) | attlas.Window(0, 0),
    "tensor": attlas.from_tensor(torch.ones(8, 8, dtype=torch.bool)),
    "not": ~attlas.Window(1, 1),
}


@pytest.mark.parametrize("name", HOLES)
def test_masks_with_holes_have_no_runs(name: str) -> None:
    assert HOLES[name].allowed_runs(whole(8, 8)) is None
