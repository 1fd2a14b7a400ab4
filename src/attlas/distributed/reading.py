"""Cells of a matrix that is divided over ranks: each rank reads its own, and they are summed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attlas.distributed.layout import Layout
from attlas.errors import BackendError
from attlas.indexing import Axes, Where, parse
from attlas.matrix import AttentionMatrix


def parsed(key: object, layout: Layout) -> Where:
    """Return the index of some cells, batches and heads by number, or raise an error for one that is not supported."""
    axes = Axes(layout.leading, (True,) * layout.rank)
    where = parse(key, axes, layout.m, layout.n)
    fix = "A[..., 5:9, :], or stats.Picture and stats.Spans for sums over large parts."
    if layout.order is not None:
        rule, found = "cells are read where tokens are sharded in the order of the text.", "order=..."
        raise BackendError(
            "A[...]", rule, found=found, fix="a statistic, this rank's A.parts, or attend() without order."
        )
    if where is None or where.pairs:
        rule, found = "an index names batches, heads, rows and columns, at most one of them by a list.", f"A[{key!r}]"
        raise BackendError("A[...]", rule, found=found, fix=fix)
    if where.rows is None:
        rule = "an index must name rows or columns: a part of a matrix of DTensors is not lazy."
        raise BackendError("A[...]", rule, found=f"A[{key!r}]", fix=f"attend(q[...], k[...]) of the part, or {fix}")
    batches, heads, kept = where.leading or (slice(None), slice(None), axes)
    sizes = (math.prod(layout.leading[:-1]), layout.leading[-1]) if layout.rank >= 2 else (math.prod(layout.leading), 1)
    batches, heads = (torch.arange(size, device="cpu")[own] for size, own in zip(sizes, (batches, heads), strict=True))
    return where._replace(leading=(batches, heads, kept))


def own_cells(where: Where, layout: Layout, parts: tuple[AttentionMatrix, ...]) -> Tensor:
    """Return the cells of an index that this rank has, and 0 for the others, shape (batch, heads, rows, columns)."""
    asked_batches, asked_heads, _ = where.leading  # type: ignore[misc]  # parsed() fills it in
    asked_rows, asked_columns = _positions(where.rows), _positions(where.columns)
    shape = [len(t) for t in (asked_batches, asked_heads, asked_rows, asked_columns)]
    problem = parts[0].problem
    result = torch.zeros(shape, dtype=problem.dtype, device=problem.device)
    to_batch, batch = (asked_batches.unsqueeze(-1) == problem.batch_ids).nonzero().unbind(-1)
    to_head, head = (asked_heads.unsqueeze(-1) == problem.head_ids).nonzero().unbind(-1)
    to_column, column = _within(asked_columns, layout.columns)
    own = Axes((len(batch), len(head)), (True, True))
    for part, rows in zip(parts, layout.rows, strict=True):
        to_row, row = _within(asked_rows, rows)
        if min(map(len, (batch, head, row, column))) == 0:
            continue
        cells = part._select(Where((batch, head, own), None, None, False))._read(Where(None, row, column, False))
        place = to_batch[:, None, None, None], to_head[:, None, None], to_row[:, None], to_column
        result = result.index_put(tuple(t.to(result.device) for t in place), cells)
    return result


def _positions(index: Any) -> Tensor:
    """Return the positions that an index of rows or columns names."""
    if isinstance(index, Tensor):
        return index.cpu()
    return torch.tensor([index] if isinstance(index, int) else index, dtype=torch.int64, device="cpu")


def _within(asked: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Return which of the positions that are asked for a rank has, and where among its own."""
    to = ((asked >= own.start) & (asked < own.stop)).nonzero().squeeze(-1)
    return to, asked[to] - own.start
