"""Cells of any rows and columns: rows are carried back from their own chunk to those of the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from attlas.engine.problem import spread_heads
from attlas.foundation.checks import sum_dtype
from attlas.foundation.tiles import cut
from attlas.matrix.transport.factors import Factors, each, each_flat, factors, writes_of_run
from attlas.matrix.transport.tokens import GatedTokens

#: Chunks over which the shortest kept transition leads; a power of 2.
STRIDE = 16

#: Transitions of `STRIDE`, ``2 STRIDE``, ``4 STRIDE``, ... chunks, each of shape (batch, heads, count, d, d).
Transitions: TypeAlias = "list[Tensor]"


def cells(
    tokens: GatedTokens, rows: Sequence[int], columns: Sequence[int], transitions: Callable[[], Transitions] | None
) -> tuple[Tensor, Tensor]:
    """Return the cells of some rows and columns, without the diagonal that is added to the matrix.

    Parameters
    ----------
    tokens : GatedTokens
        Queries, keys and gates.
    rows, columns : sequence of int
        Which, in ascending order, each once; no row before the first column, and no column after the last row.
    transitions : callable, optional
        Returns the transitions of many chunks, for gaps between rows and columns; without it rows are carried through
        them chunk by chunk.

    Returns
    -------
    cells : Tensor, shape (batch, heads, len(rows), len(columns))
        The cells.
    carried : Tensor, shape (batch, heads, rows, d)
        The rows of the first column's chunk and later ones, carried back to the start of that chunk.
    """
    size = tokens.chunk
    rows_of, columns_of = by_chunk(rows, size), by_chunk(columns, size)
    found = []
    busy = sorted({*rows_of, *columns_of}, reverse=True)
    x = torch.zeros(tokens.batch, tokens.heads, 0, tokens.size, dtype=tokens.dtype, device=tokens.device)
    at = tokens.chunks  # the rows so far stand at the start of this chunk
    for chunks in _runs_with_or_without_rows(busy, rows_of, tokens.chunks_at_once):
        x = _carry_between_chunks(tokens, x, at, chunks.stop, transitions)
        joining = chunks.start in rows_of
        if joining:
            x, part = _carry_and_join_rows(factors(tokens, chunks), x, chunks, rows_of, columns_of)
        else:
            x, part = _carry_through_rowless(tokens, x, chunks, columns_of)
        found += [functional.pad(t, (0, 0, len(rows) - t.shape[2], 0)) for t in part]
        at = chunks.start
    return torch.cat(found[::-1], -1), x


def transitions_of(tokens: GatedTokens) -> Transitions:
    """Return the transitions of 1, 2, 4, ... times `STRIDE` chunks: ``2 n d² / (C STRIDE)`` numbers a head."""
    whole = tokens.chunks // STRIDE * STRIDE
    found = []
    for chunks in cut(whole, max(tokens.chunks_at_once // STRIDE, 1) * STRIDE):
        t = factors(tokens, chunks, reads=False).transitions()
        t = t.expand(tokens.batch, tokens.heads, len(chunks), -1, -1)
        # Each round joins two neighbours, until a transition leads over STRIDE chunks.
        for _ in range(STRIDE.bit_length() - 1):
            t = _transitions_of_pairs(t)
        found.append(t)
    levels = [torch.cat(found, 2)] if found else []
    while levels and levels[-1].shape[2] > 1:
        levels.append(_transitions_of_pairs(levels[-1]))
    return levels


def _transitions_of_pairs(t: Tensor) -> Tensor:
    """Return the transitions over pairs of neighbours, each later one times the earlier; a last odd one is left out."""
    even = t.shape[2] // 2 * 2
    return t[:, :, 1:even:2] @ t[:, :, 0:even:2]


def by_chunk(places: Sequence[int], size: int) -> dict[int, Sequence[int]]:
    """Return those of some places that lie in each chunk, counted from its start; all in ascending order."""
    if isinstance(places, range):
        chunks = range(places.start // size, -(-places.stop // size))
        return {c: range(max(places.start - c * size, 0), min(places.stop - c * size, size)) for c in chunks}
    return {chunk: [place % size for place in own] for chunk, own in groupby(places, lambda place: place // size)}


def _runs_with_or_without_rows(busy: list[int], rows_of: dict[int, Sequence[int]], most: int) -> Iterator[range]:
    """Yield runs of chunks, the last first, in which all have rows or none has."""
    start, stop = busy[0], busy[0] + 1
    for chunk in busy[1:]:
        if chunk == start - 1 and (chunk in rows_of) == (start in rows_of) and stop - chunk <= most:
            start = chunk
            continue
        yield range(start, stop)
        start, stop = chunk, chunk + 1
    yield range(start, stop)


def _carry_over_chunk(x: Tensor, total: Tensor | None, into: Tensor | None, out_of: Tensor | None) -> Tensor:
    """Return rows carried back over a chunk: ``x T``."""
    kept = x if total is None else x * total
    return kept if into is None or out_of is None else kept + (x @ into.mT) @ out_of


def _chunk_transitions(f: Factors, count: int) -> Iterator[tuple[Tensor | None, ...]]:
    """Yield what carries rows over each chunk, the last first."""
    into, out_of = f.turn or (None, None)
    steps = zip(each(f.total, count), each(into, count), each(out_of, count), strict=True)
    yield from reversed(list(steps))


def _carry_and_join_rows(
    f: Factors,
    x: Tensor,
    chunks: range,
    rows_of: dict[int, Sequence[int]],
    columns_of: dict[int, Sequence[int]],
) -> tuple[Tensor, list[Tensor]]:
    """Carry rows back through chunks whose own rows join them; also return the cells of their columns, last first.

    To carry a row back over a chunk is to multiply it with the chunk's T, see `_carry_over_chunk`.
    """
    found = []
    for chunk, step in zip(reversed(chunks), _chunk_transitions(f, len(chunks)), strict=True):
        own, place = rows_of[chunk], chunk - chunks.start
        if chunk in columns_of:
            some = columns_of[chunk]
            later = x @ _rows_at(f.writes[:, :, place], some).mT
            inside = _rows_at(_rows_at(f.inner[:, :, place], own).mT, some).mT
            found.append(torch.cat([inside, later], 2))
        x = torch.cat([_rows_at(f.reads[:, :, place], own), _carry_over_chunk(x, *step)], 2)
    return x, found


def _carry_through_rowless(
    tokens: GatedTokens, x: Tensor, chunks: range, columns_of: dict[int, Sequence[int]]
) -> tuple[Tensor, list[Tensor]]:
    """Carry rows back through chunks without rows; also return the cells of their columns.

    To carry a row back over a chunk is to multiply it with the chunk's T, see `_carry_over_chunk`.
    """
    if tokens.turns:
        f = factors(tokens, chunks, reads=False)
        after, x = _carry_through_chunks(f, x, len(chunks))
        found = torch.stack(after, 2) @ f.writes.mT  # (batch, heads, chunks, rows, columns)
        found = found.transpose(2, 3).flatten(3)
    else:
        writes, total = writes_of_run(tokens, chunks)
        found = x @ writes.mT
        x = x if total is None else x * total
    if sum(len(columns_of.get(chunk, ())) for chunk in chunks) == found.shape[-1]:
        return x, [found]
    some = [(chunk - chunks.start) * tokens.chunk + place for chunk in chunks for place in columns_of.get(chunk, ())]
    return x, [_rows_at(found.mT, some).mT]


def _carry_through_chunks(f: Factors, x: Tensor, count: int) -> tuple[list[Tensor], Tensor]:
    """Return rows at the end of each chunk, and at the start of the first, carried back through all of them.

    To carry a row back over a chunk is to multiply it with the chunk's T, see `_carry_over_chunk`.
    """
    into, out_of = f.turn or (None, None)
    lead = x.shape[:2]
    totals = each(None if f.total is None else f.total.expand(*lead, -1, -1, -1), count)
    after = [x]
    # One axis for batches and heads: three calls a chunk, which take most of the time of a single row.
    steps = zip(*(each_flat(t, count) for t in (into, out_of)), totals, strict=True)
    for a, b, total in reversed(list(steps)):
        kept = x if total is None else x * total
        if a is not None and b is not None:
            turned = torch.bmm(x.flatten(0, 1), a.mT)
            kept = torch.baddbmm(kept.flatten(0, 1), turned, b).unflatten(0, lead)
        x = kept
        after.append(x)
    return after[-2::-1], x


def _rows_at(t: Tensor, places: Sequence[int]) -> Tensor:
    """Return some rows of a tensor, in ascending order; a view where they are a run."""
    if not places or places[-1] - places[0] + 1 == len(places):
        return t[:, :, places[0] : places[-1] + 1] if places else t[:, :, :0]
    return t[:, :, torch.tensor(places, device=t.device)]


def _carry_between_chunks(
    tokens: GatedTokens, x: Tensor, start: int, stop: int, transitions: Callable[[], Transitions] | None
) -> Tensor:
    """Return rows at the start of chunk `start`, carried back to the start of chunk `stop`.

    To carry a row back over a chunk is to multiply it with the chunk's T, see `_carry_over_chunk`.
    """
    if start <= stop or not x.shape[2]:
        return x
    if not tokens.turns:
        return x * _decay_between(tokens, stop * tokens.chunk, start * tokens.chunk)
    stride = STRIDE
    levels = transitions() if transitions is not None and stop + 2 * stride <= start else []
    while start > stop:
        if levels and start % stride == 0 and start - stride >= stop:
            # The longest kept transition that ends at `start` and leads no further back than to `stop`. On level l they
            # lead over ``stride << l`` chunks each, one after the other.
            level = 0
            while start % (2 * stride << level) == 0 and start - (2 * stride << level) >= stop:
                level += 1
            x = x @ levels[level][:, :, (start // stride >> level) - 1]
            start -= stride << level
            continue
        least = max(stop, (start - 1) // stride * stride if levels else start - tokens.chunks_at_once)
        x = _carry_through_chunks(factors(tokens, range(least, start), reads=False), x, start - least)[1]
        start = least
    return x


def _decay_between(tokens: GatedTokens, start: int, stop: int) -> Tensor:
    """Return the decay over the tokens from `start` to before `stop`, broadcastable to rows."""
    g = tokens.decay
    if g is None:
        return torch.ones((), dtype=tokens.dtype, device=tokens.device)
    total = sum_dtype(g.device)
    if tokens.is_constant(g):
        logs = g.to(total) * (stop - start)
    else:
        logs = g[:, :, start:stop].sum(2, keepdim=True, dtype=total)
    return spread_heads(logs, tokens.heads).exp().to(tokens.dtype)
