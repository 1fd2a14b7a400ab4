"""A tile for a whole matrix, and a score run on it as the engine runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attlas.foundation.tiles import Tile
from attlas.scores import Score


def place(q: Tensor, k: Tensor, rows: range | None = None, columns: range | None = None, **index: Tensor) -> Tile:
    batch, heads, m, n = *q.shape[:3], k.shape[2]
    return Tile(
        range(batch),
        range(heads),
        range(m) if rows is None else rows,
        range(n) if columns is None else columns,
        m,
        n,
        torch.arange(batch),
        torch.arange(heads),
        q.device,
        q.dtype,
        **index,
    )


def through(tokens: object, f: Callable[[Tensor], Tensor]) -> object:
    return f(tokens) if isinstance(tokens, Tensor) else tuple(through(part, f) for part in tokens)


def logits_of(score: Score, q: Tensor, k: Tensor, rows: range | None = None, columns: range | None = None) -> Tensor:
    """Logits of a matrix or of one rectangle: check, project, repeat key heads, slice, forward."""
    score.check(q, k, q.shape[1])
    at = place(q, k, rows, columns)
    q_all, k_all = score.project(q, k)
    q_tile = through(q_all, lambda t: t[:, :, at.rows.start : at.rows.stop])
    k_tile = through(
        k_all,
        lambda t: t.repeat_interleave(q.shape[1] // t.shape[1], 1)[:, :, at.columns.start : at.columns.stop],
    )
    return score(q_tile, k_tile, at).expand(at.shape)


@pytest.fixture
def logits() -> Callable[..., Tensor]:
    return logits_of


@pytest.fixture
def tile_at() -> Callable[..., Tile]:
    return place
