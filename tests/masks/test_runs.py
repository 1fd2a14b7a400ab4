"""Runs of keys: the same pairs as the mask that they were found from, in linear memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.masks.conftest import ask, check_coverage, make_tile
from tests.messages import refusal

import attlas
from attlas import ShapeError, TooLargeError, stats
from attlas.masks import Mask, runs, runs_of
from attlas.masks.runs import RunPerRow
from attlas.testing import check_mask


def allowed(mask: Mask, batch: int, heads: int, m: int, n: int) -> torch.Tensor:
    """Ask for all pairs at once."""
    return torch.from_numpy(ask(mask, make_tile(m, n, batch_ids=range(batch), head_ids=range(heads))))


def chunks(b, h, i, j):
    return (j <= i) & (j // 7 == i // 7)


def image_blocks(b, h, i, j):
    return (j <= i) | ((i // 5 == 2) & (j // 5 == 2))


def each_head(b, h, i, j):
    return (j <= i + h) & (j != b)


def late(b, h, i, j):
    return (i < 20) | (j % (h + 1) == 0)


def checkers(b, h, i, j):
    return (i + j) % 2 == 0


def nothing(b, h, i, j):
    return j < 0


FUNCTIONS = [chunks, image_blocks, each_head, late, checkers, nothing]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(2, 3, 30, 30), (1, 1, 4, 33), (2, 1, 33, 4)], ids=str)
@pytest.mark.parametrize("small", [True, False], ids=["bands", "whole"])
def test_runs_and_bits_allow_the_same_pairs(function, sizes, small, monkeypatch) -> None:
    if small:
        monkeypatch.setattr(runs, "_PAIRS_AT_ONCE", 100)
    mask = attlas.from_function(function)
    wanted = allowed(mask, *sizes)
    assert torch.equal(allowed(runs_of(mask, *sizes), *sizes), wanted)
    assert torch.equal(allowed(runs._packed_bits(mask, *sizes), *sizes), wanted)


@given(st.data())
def test_any_tile_of_any_mask(data: st.DataObject) -> None:
    batch, heads, m, n = (data.draw(st.integers(1, top)) for top in (2, 2, 6, 40))
    dense = torch.tensor(data.draw(st.lists(st.booleans(), min_size=m * n, max_size=m * n))).view(m, n)
    dense = torch.stack([dense.roll(b + h, -1) for b in range(batch) for h in range(heads)]).view(batch, heads, m, n)
    found = runs_of(attlas.from_tensor(dense), batch, heads, m, n)
    assert torch.equal(allowed(found, batch, heads, m, n), dense)
    rows, columns = (range(*sorted((data.draw(st.integers(0, t)), data.draw(st.integers(0, t))))) for t in (m, n))
    at = make_tile(m, n, rows, columns, range(batch), range(heads))
    part = dense[:, :, rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(torch.from_numpy(ask(found, at)), part)
    if part.numel():
        check_coverage(found, at, exact=True)
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    at = make_tile(m, n, None, places, range(batch), range(heads))
    assert torch.equal(torch.from_numpy(ask(found, at)), dense[..., places])


@pytest.mark.parametrize("kind", ["runs", "bits"])
def test_contract_of_masks(kind) -> None:
    mask = attlas.from_function(late)
    check_mask(runs_of(mask, 2, 4, 80, 80) if kind == "runs" else runs._packed_bits(mask, 2, 4, 80, 80), 80, 80, 2, 4)


def test_equal_batches_and_heads_are_kept_once() -> None:
    found = runs_of(attlas.from_function(chunks), 3, 4, 20, 20)
    assert found.first.shape == (1, 1, 21)
    assert len(found.starts) == 20
    found = runs_of(attlas.from_function(each_head, broadcasts=False), 1, 4, 20, 20)
    assert found.first.shape == (1, 4, 21)


def test_linear_memory_at_length() -> None:
    found = runs_of(attlas.from_function(image_blocks), 1, 1, 4096, 4096)
    held = sum(t.numel() * t.element_size() for t in vars(found).values() if isinstance(t, torch.Tensor))
    assert held < 4096 * 64


def test_checkers_are_packed(monkeypatch) -> None:
    monkeypatch.setattr(runs, "_MOST_UNPACKED_BYTES", 100)
    found = runs_of(attlas.from_function(checkers), 1, 2, 70, 70)
    assert isinstance(found, runs.Bits)
    assert found.packed.shape == (1, 1, 70, 9)
    assert found.name() == "Bits(70 queries, 70 keys)"
    monkeypatch.setattr(runs, "_BITS_LIMIT", 600)
    said = refusal(TooLargeError, lambda: runs_of(attlas.from_function(checkers), 1, 2, 70, 70))
    assert said == "runs_of(): 630 bytes, the limit is 600"


def test_weights_are_those_of_the_function() -> None:
    q, k = torch.randn(2, 3, 70, 8), torch.randn(2, 3, 90, 8)
    mask = attlas.from_function(late)
    A, B = attlas.attend(q, k, mask=mask), attlas.attend(q, k, mask=runs_of(mask, 2, 3, 70, 90))
    assert torch.equal(A.to_dense(), B.to_dense())
    assert torch.equal(stats.entropy(A), stats.entropy(B))
    assert torch.equal(A[1, 2, [3, 40], [5, 80]], B[1, 2, [3, 40], [5, 80]])
    assert torch.equal(A[1][[2, 0]][:, :, [7, 1]], B[1][[2, 0]][:, :, [7, 1]])


def test_empty_sizes() -> None:
    for sizes in [(1, 1, 0, 5), (1, 1, 5, 0), (1, 1, 0, 0)]:
        found = runs_of(attlas.from_function(checkers), *sizes)
        assert allowed(found, *sizes).shape == sizes


WRONG = [
    (([[[0, 1]]], [0], [1, 2], 3), "(1,) starts and (2,) stops"),
    (([[[0, 2]]], [0], [1], 3), "first does not count up to the 1 runs"),
    (([[[0, 1]]], [0], [4], 3), "runs from 0 to 4, of 3 keys"),
    (([[[0, 2]]], [0, 1], [1, 3], 3), "a run that is empty, or that touches the one before"),
    (([[0, 2]], [0, 2], [1, 3], 3), "first is (1, 2) torch.int64, not int64 of shape (batch, heads, m + 1)"),
]


@pytest.mark.parametrize(("tables", "found"), WRONG, ids=[found for _, found in WRONG])
def test_tables_that_do_not_fit(tables, found) -> None:
    *tensors, n = tables
    assert refusal(ShapeError, lambda: runs.Runs(*map(torch.tensor, tensors), n)).endswith(f": {found}")


def test_sizes_of_another_matrix() -> None:
    mask = runs_of(attlas.from_function(chunks), 1, 1, 4, 6)
    said = refusal(ShapeError, lambda: attlas.attend(torch.zeros(5, 2), torch.zeros(6, 2), mask=mask))
    assert said == "attend(): (1, 1, 4, 6) in mask, (1, 1, 5, 6) in matrix"
    with pytest.raises(ShapeError, match="packed must be uint8"):
        runs.Bits(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), 30)


def test_one_run_per_row_keeps_the_contract() -> None:
    first = torch.randint(0, 60, (2, 3, 70), generator=torch.Generator().manual_seed(0))
    check_mask(RunPerRow(first, first + 25), m=70, n=90, batch=2, heads=3)
    check_mask(RunPerRow(first[:1, :1], first[:1, :1] + 40), m=70, n=90, batch=2, heads=3)
    check_mask(RunPerRow(first[0, 0], first[0, 0] + 9), m=70, n=90, batch=2, heads=3)
