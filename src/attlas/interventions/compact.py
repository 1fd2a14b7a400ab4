"""Products of weights from which a span is hidden, at the speed of a mask with one run of keys per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from attlas.indexing import Axes
from attlas.interventions.positions import Outside
from attlas.masks import And, BlockState, Heads, Mask
from attlas.matrix import AttentionMatrix
from attlas.recording.hooks import Pool
from attlas.tiles import Tile
from attlas.windows import Translated, cut_out

if TYPE_CHECKING:
    from attlas.engine.problem import Problem

__all__ = ["per_head", "without_hidden_keys"]

_FEW_ROWS = 64  # a mask of so few rows is written out at once
_MANY_RUNS = 8  # so many runs of rows are computed apart


def without_hidden_keys(pool: Pool) -> Pool:
    """Return the same function of weights and values, which leaves out the keys that an `Outside` hides.

    Heads and queries from which the same keys are hidden are computed together, with the other keys. A mask with one
    run of keys per row then has one again, and the kernels take that faster than any mask of cells.

    Parameters
    ----------
    pool : callable
        Pools values with weights.
    """

    def pooled(A: AttentionMatrix, values: Tensor) -> Tensor:
        problem = A.problem
        parts = list(_parts(problem.mask))
        hides = any(isinstance(part, Outside) or _hides_in_some_heads(part) for part in parts)
        if not hides or problem.shape[2] < _FEW_ROWS or problem.partial or not problem.score.position_free:
            return pool(A, values)

        def again(part: Problem, own: Tensor) -> Tensor:
            return pooled(AttentionMatrix(part, A.plan, Axes(part.shape[:2], (True, True))), own)

        of_heads = next(filter(_hides_in_some_heads, parts), None)
        if isinstance(of_heads, Heads):
            return _by_heads(problem, values, of_heads, [part for part in parts if part is not of_heads], again)
        m = problem.shape[2]
        outside = [part for part in parts if isinstance(part, Outside)]
        cuts = sorted({0, m, *(cut for part in outside for cut in part.cuts(m))})
        if len(cuts) > _MANY_RUNS:
            return pool(A, values)
        if len(cuts) > 2:
            spans = [range(first, stop) for first, stop in pairwise(cuts)]
            return torch.cat([again(_rows_of(problem, parts, rows), values) for rows in spans], dim=2)
        base = replace(problem, mask=_all([part for part in parts if not isinstance(part, Outside)]), versions=())
        found = _compact(base, [part for part in outside if part.hides_from(0)])
        if found is None:
            return pool(A, values)
        compact, keys = found
        kept = values if len(keys) == values.shape[2] else values.index_select(2, keys)
        return pool(AttentionMatrix(compact, A.plan, A._axes), kept)

    return pooled


def per_head(t: Tensor, heads: int) -> Tensor:
    """Return keys or values with a head of their own for each query head."""
    return t.repeat_interleave(heads // t.shape[1], dim=1) if t.shape[1] != heads else t


def _parts(mask: Mask | None) -> Iterator[Mask]:
    """Yield the masks that must all allow a pair."""
    if isinstance(mask, And):
        yield from (*_parts(mask.left), *_parts(mask.right))
    elif mask is not None:
        yield mask


def _all(parts: list[Mask]) -> Mask | None:
    return reduce(and_, parts) if parts else None


def _hides_in_some_heads(mask: Mask) -> bool:
    return isinstance(mask, Heads) and any(isinstance(part, Outside) for part in mask.parts)


def _by_heads(
    problem: Problem, values: Tensor, mask: Heads, others: list[Mask], again: Callable[[Problem, Tensor], Tensor]
) -> Tensor:
    """Compute the heads that have one mask together, and put the outputs in the order of the heads."""
    heads = problem.shape[1]
    outputs, order = [], []
    for places, own, _ in mask.split(problem.tile(range(1), range(heads), range(0), range(0))):
        part = problem.select(slice(None), torch.tensor(places, device="cpu"))
        part = replace(part, mask=_all([*others, own]), versions=())
        outputs.append(again(part, per_head(values, heads)[:, places]))
        order += places
    return torch.cat(outputs, dim=1)[:, torch.tensor(order).argsort().to(values.device)]


def _rows_of(problem: Problem, parts: list[Mask], rows: range) -> Problem:
    """Return some queries of a problem; each part of its mask stays a part."""
    m, n = problem.shape[2:]
    moved = [
        Translated(part, m, n, -rows.start, 0) if (found := part.translate(rows, range(n), m, n)) is None else found
        for part in parts
    ]
    return replace(cut_out(replace(problem, mask=None), rows, range(n)), mask=_all(moved), versions=())


def _compact(base: Problem, outside: list[Outside]) -> tuple[Problem, Tensor] | None:
    """Return a problem without the hidden keys, and the keys that it has; None where it has runs of keys no more."""
    batch, heads, _, n = base.shape
    seen = torch.ones(n, dtype=torch.bool, device=base.device)
    for part in outside:
        seen &= part.seen(n).to(base.device)
    keys = seen.nonzero().flatten()
    if len(keys) == n:
        return base, keys
    mask = None
    if base.mask is not None:
        if base.allowed_runs is None:
            return None
        count = functional.pad(seen.cumsum(0), (1, 0))
        mask = RunPerRow(*(count[end] for end in base.allowed_runs))
    ids = torch.arange(batch, device="cpu"), torch.arange(heads, device="cpu")
    return replace(
        base, k=base.k.index_select(2, keys), mask=mask, batch_ids=ids[0], head_ids=ids[1], versions=()
    ), keys


class RunPerRow(Mask):
    """One run of keys for each query.

    Parameters
    ----------
    first, stop : Tensor of int64, shape (batch or 1, heads or 1, m)
        The first key of each query and the one after its last.
    """

    def __init__(self, first: Tensor, stop: Tensor) -> None:
        self.first, self.stop = first, stop

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor]:
        first, stop = (self._of(t, at) for t in (self.first, self.stop))
        return first, stop

    def allows(self, at: Tile) -> Tensor:
        first, stop = (t.unsqueeze(-1) for t in self.allowed_runs(at))
        return (at.j >= first) & (at.j < stop)

    def coverage(self, at: Tile) -> BlockState:
        if at.scattered or self.first.device.type != "cpu":
            return BlockState.PARTIAL
        (first, stop), columns = self.allowed_runs(at), at.columns
        if bool(((stop <= columns.start) | (first >= columns.stop) | (first >= stop)).all()):
            return BlockState.EMPTY
        whole = bool(((first <= columns.start) & (stop >= columns.stop)).all())
        return BlockState.FULL if whole else BlockState.PARTIAL

    def _of(self, t: Tensor, at: Tile) -> Tensor:
        for axis, ids in ((0, at.batch_ids), (1, at.head_ids)):
            t = t if t.shape[axis] == 1 else t.index_select(axis, ids.to(t.device))
        return t[:, :, at.rows.start : at.rows.stop] if at.row_index is None else t[:, :, at.row_index.to(t.device)]
