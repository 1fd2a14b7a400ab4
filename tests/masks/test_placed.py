"""Masks seen from elsewhere, each kind against its definition, written out with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.masks.conftest import ask, check_coverage, draw_part, make_dense, make_tile

import attlas
from attlas.foundation.tiles import Tile
from attlas.interventions.positions import positions_of
from attlas.masks import Causal, Dilated, Documents, Heads, Mask, Padding, Prefix, Selected, Window, from_function
from attlas.masks.placed import Block, Concatenated, OutsideRectangle, Placed, Stacked, translated_mask

BATCH, HEADS = 2, 3


class Even(Mask):
    """A mask of a user's own, with nothing but `allows`."""

    def allows(self, at: Tile) -> torch.Tensor:
        return (at.b + at.h + at.i + at.j) % 2 == 0


def holes(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.6


MASKS: dict[str, Callable[[int, int], Mask]] = {
    "causal": lambda m, n: Causal(),
    "window": lambda m, n: Window(2, 1, 0),
    "dilated": lambda m, n: Dilated(None, 0, 2),
    "padding": lambda m, n: Padding([n, n // 2]),
    "left padding": lambda m, n: Padding([n, n // 2], side="left") & Causal(),
    "prefix": lambda m, n: Prefix([1, n]) | Causal(),
    "documents": lambda m, n: Documents(torch.arange(n).expand(BATCH, n) // 3, torch.arange(m) // 2),
    "heads": lambda m, n: Heads({0: Window(1, 0), 2: None}, Causal()),
    "not": lambda m, n: ~Window(1, 1),
    "booleans": lambda m, n: attlas.from_tensor(holes(BATCH, HEADS, m, n)),
    "booleans of texts": lambda m, n: attlas.from_tensor(holes(BATCH, m, n)),
    "selected": lambda m, n: Selected(torch.arange(2 * m).view(m, 2) % max(n, 1)),
    "function": lambda m, n: from_function(lambda b, h, i, j: (i + b + h) % 3 != j % 3),
    "own": lambda m, n: Even(),
    "own & padding": lambda m, n: Even() & Padding([n, n // 3]),
    "nothing": lambda m, n: Prefix(0),
    "all": lambda m, n: Window(None, None),
}
names = st.sampled_from(sorted(MASKS))
sizes = st.integers(1, 9)


def draw_tile(data: st.DataObject, m: int, n: int, batch: int = BATCH, heads: int = HEADS) -> Tile:
    """Draw a tile of some batches and heads, in any order; its rows and its columns are a range or a list."""
    rows, columns = draw_part(data, m, n)
    some = st.lists(st.integers(0, 30), min_size=1, max_size=5)
    places = [
        [place % size for place in data.draw(some)] if data.draw(st.booleans()) else span
        for span, size in ((rows, m), (columns, n))
    ]
    ids = [
        data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)) for size in (batch, heads)
    ]
    return make_tile(m, n, *places, *ids)


def places_of(index: torch.Tensor | None, span: range) -> list[int]:
    return list(span) if index is None else index.tolist()


def check_mask(mask: Mask, whole: np.ndarray, data: st.DataObject) -> None:
    """Compare what a mask says of a tile with the part of the whole mask, (batch, heads, m, n), that the tile is."""
    batch, heads, m, n = whole.shape
    at = draw_tile(data, m, n, batch, heads)
    rows, columns = places_of(at.row_index, at.rows), places_of(at.column_index, at.columns)
    expected = whole[np.ix_(at.batch_ids.tolist(), at.head_ids.tolist(), rows, columns)]
    assert np.array_equal(ask(mask, at), expected)
    check_coverage(mask, at)
    runs = mask.allowed_runs(at)
    if runs is not None:  # of all columns of the matrix, whatever columns the tile has
        first, stop = (t.broadcast_to(at.shape[:3]).unsqueeze(-1).numpy() for t in runs)
        j = np.arange(n)
        assert np.array_equal((first <= j) & (j < stop), whole[np.ix_(at.batch_ids, at.head_ids, rows, range(n))])
    padding = mask.padding(make_tile(m, n, batch_ids=range(batch), head_ids=range(heads)))
    if padding is not None:  # no query sees it
        hidden = padding.broadcast_to(batch, n).numpy()
        assert not (whole & hidden[:, None, None, :]).any()


@given(data=st.data(), name=names, m=sizes, n=sizes)
def test_a_placed_mask_is_a_part_of_its_own_matrix(data: st.DataObject, name: str, m: int, n: int) -> None:
    inner = MASKS[name](m, n)
    whole = make_dense(inner, m, n, BATCH, HEADS)
    rows, columns = draw_part(data, m, n)
    part = whole[:, :, rows.start : rows.stop, columns.start : columns.stop]
    placed = range(-rows.start, m - rows.start), range(-columns.start, n - columns.start)
    check_mask(Placed(inner, *placed), part, data)
    check_mask(translated_mask(inner, rows, columns, m, n), part, data)
    # A window of the window.
    again, others = draw_part(data, len(rows), len(columns))
    twice = translated_mask(Placed(inner, *placed), again, others, len(rows), len(columns))
    check_mask(twice, part[:, :, again.start : again.stop, others.start : others.stop], data)


@given(data=st.data(), row=st.integers(0, 4), column=st.integers(0, 4))
def test_a_placed_mask_of_a_formula_holds_beyond_its_matrix(data: st.DataObject, row: int, column: int) -> None:
    i, j = np.arange(10)[:, None] - row, np.arange(12) - column
    rows, columns = range(row, row + 5), range(column, column + 7)
    for inner, formula in (
        (Window(2, 1, 0), (j >= i - 2) & (j <= i + 1)),
        (Causal(), j <= i + 2),
        (from_function(lambda b, h, i, j: (i + j) % 3 > 0), (i + j) % 3 > 0),
    ):
        mask = Placed(inner, rows, columns)
        check_mask(mask, np.broadcast_to(formula, (BATCH, HEADS, 10, 12)), data)
        assert mask.allowed_runs(make_tile(10, 12)) is None  # its own matrix does not have all keys


def test_a_placed_mask_tells_where_its_first_query_stands() -> None:
    placed = Placed(Causal(), range(-2, 3), range(1, 8))
    assert placed.first_query(4, 9) == 5  # 2 by itself, 2 queries later, 1 key further
    assert Placed(Padding([3]), range(2), range(2)).first_query(2, 2) is None
    assert placed.name() == "Causal() moved by (-2, 1)"


@given(data=st.data(), name=names)
def test_padding_moves_with_its_keys(data: st.DataObject, name: str) -> None:
    inner, m, n = MASKS[name](6, 8), 6, 8
    before = inner.padding(make_tile(m, n, batch_ids=range(BATCH), head_ids=range(HEADS)))
    rows, columns = draw_part(data, m, n)
    placed = Placed(inner, range(-rows.start, m - rows.start), range(-columns.start, n - columns.start))
    after = placed.padding(make_tile(len(rows), len(columns), batch_ids=range(BATCH), head_ids=range(HEADS)))
    assert (before is None) is (after is None)
    if before is not None and after is not None:
        assert torch.equal(after, before[:, columns.start : columns.stop])


@given(data=st.data())
def test_stacked_masks_are_their_blocks(data: st.DataObject) -> None:
    blocks, parts, row, n = [], [], 0, 10
    for _ in range(data.draw(st.integers(1, 4))):
        height = data.draw(st.integers(1, 4))
        first = data.draw(st.integers(0, n - 1))
        columns = range(first, data.draw(st.integers(first + 1, n)))
        name = data.draw(st.none() | names)
        mask = None if name is None else MASKS[name](height, len(columns))
        part = np.zeros((BATCH, HEADS, height, n), dtype=bool)
        part[..., columns] = True if mask is None else make_dense(mask, height, len(columns), BATCH, HEADS)
        blocks.append(Block(mask, range(row, row + height), columns))
        parts.append(part)
        row += height
    whole = np.concatenate(parts, axis=2)
    mask = Stacked(blocks)
    assert mask.size() == (row, max(block.columns.stop for block in blocks))
    for _ in range(3):
        check_mask(mask, whole, data)


def test_every_tile_of_a_stack() -> None:
    blocks = [Block(None, range(3), range(2, 6)), Block(Prefix(0), range(3, 5), range(8)),
              Block(Causal(), range(5, 9), range(1, 8)), Block(None, range(9, 10), range(8))]  # fmt: skip
    mask, spans = Stacked(blocks), [range(a, b) for b in range(1, 11) for a in range(b)]
    for rows in spans:
        for columns in (span for span in spans if span.stop <= 8):
            check_coverage(mask, make_tile(10, 8, rows, columns))


@given(data=st.data(), axis=st.sampled_from([0, 1]))
def test_concatenated_masks_are_their_parts(data: st.DataObject, axis: int) -> None:
    m, n = 5, 7
    masks: list[Mask | None] = []
    parts, counts = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.none() | names)
        mask = None if name is None else MASKS[name](m, n)
        count = data.draw(st.integers(1, (BATCH, HEADS)[axis]))
        whole = np.ones((BATCH, HEADS, m, n), dtype=bool) if mask is None else make_dense(mask, m, n, BATCH, HEADS)
        masks.append(mask)
        counts.append(count)
        parts.append(whole[:count] if axis == 0 else whole[:, :count])
    check_mask(Concatenated(masks, counts, axis), np.concatenate(parts, axis=axis), data)


def test_concatenated_masks_of_no_batch() -> None:
    mask = Concatenated([Causal()], [2], 0)
    assert ask(mask, make_tile(3, 4, batch_ids=[])).shape == (0, 1, 3, 4)
    assert mask.name() == "masks of 2 batches concatenated"


@st.composite
def chosen(draw: st.DrawFn) -> tuple[list[int] | slice | None, Sequence[int]]:
    """Draw positions as an argument names them, and as a list."""
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return None, range(100)
    if kind == 1:
        start = draw(st.integers(0, 14))
        return slice(start, None), range(start, 100)
    some = draw(st.lists(st.integers(0, 20), max_size=8))
    return some, some


@given(data=st.data(), queries=chosen(), keys=chosen(), m=sizes, n=sizes)
def test_outside_of_a_rectangle(
    data: st.DataObject,
    queries: tuple[list[int] | slice | None, Sequence[int]],
    keys: tuple[list[int] | slice | None, Sequence[int]],
    m: int,
    n: int,
) -> None:
    first_query, first_key = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    rows = np.isin(np.arange(m) + first_query, list(queries[1]))
    columns = np.isin(np.arange(n) + first_key, list(keys[1]))
    whole = np.broadcast_to(~(rows[:, None] & columns), (BATCH, HEADS, m, n))
    named = positions_of("queries", queries[0]), positions_of("keys", keys[0])
    mask = OutsideRectangle(*named, first_query, first_key)
    for _ in range(2):
        check_mask(mask, whole, data)
    check_coverage(mask, make_tile(m, n, *draw_part(data, m, n)), exact=True)
    window = draw_part(data, m, n)
    part = whole[:, :, window[0].start : window[0].stop, window[1].start : window[1].stop]
    check_mask(mask.translate(*window, m, n), part, data)
    assert mask.visible_keys(n).tolist() == (~columns).tolist()
    assert [mask.hides_from(i) for i in range(m)] == rows.tolist()
    assert mask.cuts(m) == [i for i in range(1, m) if rows[i] != rows[i - 1]]


RUNS = ["causal", "window", "padding", "left padding", "prefix", "documents", "heads", "nothing", "all"]


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_keys_stay_known_where_a_mask_is_placed(name: str) -> None:
    """The kernels take one run of keys per row: a mask that has them keeps them."""
    whole = {"batch_ids": range(BATCH), "head_ids": range(HEADS)}
    placed = Placed(MASKS[name](6, 8), range(-2, 4), range(-1, 7))
    assert MASKS[name](6, 8).allowed_runs(make_tile(6, 8, **whole)) is not None
    assert placed.allowed_runs(make_tile(4, 7, **whole)) is not None


@pytest.mark.parametrize("name", RUNS)
def test_what_is_known_of_a_tile_stays_known_where_a_mask_is_placed(name: str) -> None:
    inner = MASKS[name](6, 8)
    placed = Placed(inner, range(-2, 4), range(-1, 7))
    stacked = Stacked([Block(inner, range(6), range(8)), Block(inner, range(6, 12), range(8))])
    ids = range(BATCH), range(HEADS)
    for rows in (range(2), range(1, 2), range(4)):
        for columns in (range(1), range(3, 5), range(5, 7)):
            keys = range(columns.start + 1, columns.stop + 1)
            before = inner.coverage(make_tile(6, 8, range(rows.start + 2, rows.stop + 2), keys, *ids))
            assert placed.coverage(make_tile(4, 7, rows, columns, *ids)) is before
            below = range(rows.start + 8, rows.stop + 8)
            assert stacked.coverage(make_tile(12, 8, below, keys, *ids)) is before
