"""Tiles made by hand, and whole masks put together from them: no engine is needed to test a mask."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from attlas.foundation.tiles import Tile, cut
from attlas.masks import BlockState, Mask


def make_tile(
    m: int,
    n: int,
    rows: range | Sequence[int] | None = None,
    columns: range | Sequence[int] | None = None,
    batch_ids: Sequence[int] = (0,),
    head_ids: Sequence[int] = (0,),
) -> Tile:
    rows = range(m) if rows is None else rows
    columns = range(n) if columns is None else columns
    return Tile(
        batches=range(len(batch_ids)),
        heads=range(len(head_ids)),
        rows=rows if isinstance(rows, range) else range(len(rows)),
        columns=columns if isinstance(columns, range) else range(len(columns)),
        m=m,
        n=n,
        batch_ids=torch.tensor(batch_ids, dtype=torch.int64),
        head_ids=torch.tensor(head_ids, dtype=torch.int64),
        device=torch.device("cpu"),
        row_index=None if isinstance(rows, range) else torch.tensor(rows, dtype=torch.int64),
        column_index=None if isinstance(columns, range) else torch.tensor(columns, dtype=torch.int64),
    )


def ask(mask: Mask, at: Tile) -> np.ndarray:
    allowed = mask.allows(at)
    assert allowed.dtype == torch.bool
    return allowed.broadcast_to(at.shape).numpy()


def make_dense(mask: Mask, m: int, n: int, batches: int = 1, heads: int = 1, step: int = 5) -> np.ndarray:
    """Put the whole mask together from tiles of `step` x `step`."""
    whole = np.zeros((batches, heads, m, n), dtype=bool)
    for rows in cut(m, step):
        for columns in cut(n, step):
            at = make_tile(m, n, rows, columns, range(batches), range(heads))
            whole[:, :, rows.start : rows.stop, columns.start : columns.stop] = ask(mask, at)
    return whole


def draw_part(data: st.DataObject, m: int, n: int) -> tuple[range, range]:
    """Draw rows and columns of a tile of some size."""
    top, first = data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, n - 1))
    bottom, last = data.draw(st.integers(top + 1, m)), data.draw(st.integers(first + 1, n))
    return range(top, bottom), range(first, last)


def check_coverage(mask: Mask, at: Tile, *, exact: bool = False) -> None:
    """Compare what a mask says of a whole tile with its cells: nothing wrong, or all that there is to say."""
    allowed, coverage = ask(mask, at), mask.coverage(at)
    if exact:
        assert coverage is (
            BlockState.FULL if allowed.all() else BlockState.PARTIAL if allowed.any() else BlockState.EMPTY
        )
    assert coverage is not BlockState.EMPTY or not allowed.any()
    assert coverage is not BlockState.FULL or allowed.all()


@pytest.fixture
def tile() -> Callable[..., Tile]:
    return make_tile


@pytest.fixture
def dense() -> Callable[..., np.ndarray]:
    return make_dense


@pytest.fixture
def cells() -> Callable[[Mask, Tile], np.ndarray]:
    return ask
