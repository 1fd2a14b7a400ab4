"""Positions of a text that an intervention is about, and the mask that hides a rectangle of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.errors import OutOfRangeError, ShapeError
from attlas.foundation.checks import is_integer
from attlas.foundation.tiles import Tile
from attlas.masks import BlockState, Mask
from attlas.masks.base import edges

# A position, a span (slice, range or pair), or a list of positions.
Where: TypeAlias = "int | slice | range | tuple[int, int] | Sequence[int] | Tensor"

_OPEN = 1 << 62  # the end of a span that has none


@dataclass(frozen=True)
class Positions:
    """Positions in a text, counted from its first token.

    Parameters
    ----------
    edges : tuple of int
        First position of each run of positions, and the one after its last, in turn; strictly ascending.
    """

    edges: tuple[int, ...]

    @classmethod
    def of(cls, where: str, name: str, value: Where | None) -> Positions | None:
        """Return the positions that an argument names; None stands for all.

        Raises
        ------
        OutOfRangeError
            If a position is negative.
        ShapeError
            If it is no position, span or list of positions.
        """
        runs = None if value is None else _runs(value)
        if value is None or runs is None:
            if value is None:
                return None
            rule = f"{name} must be a position, a span or a list of positions."
            fix = f"{name}=7, {name}=slice(3, 9), {name}=(3, 9) for the same span, or {name}=[3, 5, 8]"
            raise ShapeError(where, rule, found=f"{name} = {value!r}"[:80], fix=fix)
        negative = min((end for run in runs for end in run), default=0)
        if negative < 0:
            rule = f"{name} must be positions in the text, counted from its first token."
            fix = "count from the first token: len(ids) - 1 is the last of a text of known length."
            raise OutOfRangeError(where, rule, found=f"position {negative}", fix=fix)
        found: list[int] = []
        for start, stop in sorted(runs):
            if start >= stop:
                continue
            if found and start <= found[-1]:
                found[-1] = max(found[-1], stop)
            else:
                found += [start, stop]
        return cls(tuple(found))

    @property
    def last(self) -> int:
        """The last position that is named; that of an open span is its first, less one."""
        if not self.edges:
            return -1
        return self.edges[-1] - 1 if self.edges[-1] < _OPEN else self.edges[-2] - 1

    def has(self, positions: Tensor) -> Tensor:
        """Return which of some positions are among these."""
        table = torch.tensor(self.edges, dtype=torch.int64, device=positions.device)
        return torch.searchsorted(table, positions, right=True) % 2 == 1

    def state(self, first: int, last: int) -> BlockState:
        """Return how much of a range of positions, its last one included, is among these."""
        run = bisect_right(self.edges, first)
        alone = run == len(self.edges) or self.edges[run] > last
        return BlockState.PARTIAL if not alone else BlockState.FULL if run % 2 else BlockState.EMPTY

    def gaps(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the runs of positions of a range that are not among these."""
        ends = [first, *(min(max(edge, first), stop) for edge in self.edges), stop]
        return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]

    def __str__(self) -> str:
        runs = zip(self.edges[::2], self.edges[1::2], strict=True)
        shown = [f"{a}:{'' if b == _OPEN else b}" for a, b in runs]
        return ", ".join([*shown[:4], *(["..."] if len(shown) > 4 else [])])


def _runs(value: Any) -> list[tuple[int, int]] | None:
    """Return the runs of positions that an argument names; None for what is no position."""
    if isinstance(value, slice) and value.step in (None, 1):
        value = (0 if value.start is None else value.start, _OPEN if value.stop is None else value.stop)
        return [value] if all(map(is_integer, value)) else None
    if isinstance(value, range) and value.step == 1:
        return [(value.start, value.stop)]
    if isinstance(value, tuple):
        return [value] if len(value) == 2 and all(map(is_integer, value)) else None
    if isinstance(value, Tensor):
        if value.dtype is torch.bool and value.ndim == 1:
            value = value.nonzero().flatten()
        value = value.tolist() if value.ndim < 2 else None
    items = [value] if is_integer(value) else list(value) if isinstance(value, list | range) else None
    return [(item, item + 1) for item in items] if items is not None and all(map(is_integer, items)) else None


class Outside(Mask):
    """Pairs outside a rectangle of queries and keys, which are named by their positions in the text.

    Parameters
    ----------
    queries, keys : Positions or None
        The rectangle; None stands for all.
    first_query, first_key : int
        Position of query 0 and of key 0 in the text.
    """

    def __init__(self, queries: Positions | None, keys: Positions | None, first_query: int, first_key: int) -> None:
        self.queries, self.keys = queries, keys
        self.row, self.column = first_query, first_key

    def _rows(self, at: Tile) -> Tensor:
        i = at.i
        return torch.ones_like(i, dtype=torch.bool) if self.queries is None else self.queries.has(i + self.row)

    def allows(self, at: Tile) -> Tensor:
        rows = self._rows(at)
        return ~rows if self.keys is None else ~(rows & self.keys.has(at.j + self.column))

    def coverage(self, at: Tile) -> BlockState:
        ends = edges(at)
        if ends is None:
            return BlockState.PARTIAL
        first_row, last_row, first, last = ends
        states = {
            BlockState.FULL if named is None else named.state(low + shift, high + shift)
            for named, low, high, shift in (
                (self.queries, first_row, last_row, self.row),
                (self.keys, first, last, self.column),
            )
        }
        if BlockState.EMPTY in states:
            return BlockState.FULL
        return BlockState.PARTIAL if BlockState.PARTIAL in states else BlockState.EMPTY

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        rows = self._rows(at).view(1, 1, -1)
        left = [] if self.keys is None else self.keys.gaps(self.column, self.column + at.n)
        if len(left) > 1:
            return None if bool(rows.any()) else (torch.zeros_like(rows, dtype=torch.int64), ~rows * at.n)
        first, stop = (end - self.column for end in left[0]) if left else (0, 0)
        return rows * first, torch.where(rows, stop, at.n)

    def cuts(self, m: int) -> list[int]:
        """Return the queries of a matrix at which the chosen ones begin or end."""
        named = () if self.queries is None else self.queries.edges
        return [edge - self.row for edge in named if 0 < edge - self.row < m]

    def hides_from(self, query: int) -> bool:
        """Return whether a query of the matrix is among the chosen ones."""
        return self.queries is None or self.queries.state(query + self.row, query + self.row) is BlockState.FULL

    def visible_keys(self, n: int) -> Tensor:
        """Return which of n keys the chosen queries attend to."""
        keys = torch.arange(self.column, self.column + n)
        return torch.zeros(n, dtype=torch.bool) if self.keys is None else ~self.keys.has(keys)

    def translate(self, rows: range, columns: range, m: int, n: int) -> Outside:
        return Outside(self.queries, self.keys, self.row + rows.start, self.column + columns.start)

    def name(self) -> str:
        named = (f"{name} {'all' if part is None else part}" for name, part in
                 (("queries", self.queries), ("keys", self.keys)))  # fmt: skip
        return f"outside({', '.join(named)})"
