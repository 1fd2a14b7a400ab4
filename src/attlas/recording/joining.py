"""Statistics of several steps of one text, joined to those of the whole matrix, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attlas import stats
from attlas.errors import ShapeError
from attlas.stats import Statistic

__all__ = ["Joined", "can_join", "fitting"]

_OF_ROWS = (
    stats.ArgMax,
    stats.Coverage,
    stats.EffectiveKeys,
    stats.Entropy,
    stats.LogitMoments,
    stats.MaxLogit,
    stats.MaxWeight,
    stats.RowMass,
    stats.TailMass,
    stats.TopK,
)


def can_join(statistic: Statistic) -> bool:
    """Return whether the results of a statistic on stacked matrices give its result on the whole.

    Numbers of rows do. Sums and maxima of columns and sums of diagonals do, over all rows and not divided.
    Pictures, spans, means and windows of rows do not: they speak of the size of the whole matrix.

    Parameters
    ----------
    statistic : Statistic
        One of attlas, or of the user's own, of which nothing is known.
    """
    if type(statistic) is stats.ColumnMass:
        return statistic.rows is None and not statistic.mean
    if type(statistic) is stats.ColumnMax:
        return statistic.rows is None
    if type(statistic) is stats.Offsets:
        return not statistic.mean
    return type(statistic) in _OF_ROWS


def fitting(statistic: Statistic, keys: int) -> Statistic:
    """Return a statistic of the k largest weights for a step that has fewer keys than k; any other as it is.

    Parameters
    ----------
    statistic : Statistic
        It is one that can be joined: later steps will have more keys.
    keys : int
        How many keys the step has.
    """
    if 0 < keys < _wanted(statistic):
        return type(statistic)(keys)  # type: ignore[call-arg]  # TopK or TailMass
    return statistic


def _wanted(statistic: Statistic) -> int:
    """Return how many keys a statistic asks for."""
    return statistic.k if isinstance(statistic, stats.TopK) else 0


class Joined:
    """Results of some statistics on the rows that have come so far.

    Parameters
    ----------
    statistics : sequence of Statistic
        Each of them can be joined, if there is more than one step.
    """

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        self.statistics = tuple(statistics)
        self._results: list[list[Any]] = [[] for _ in self.statistics]
        self._sizes: list[tuple[int, int, int]] = []

    def add(self, results: Sequence[Any], m: int, n: int, column: int) -> None:
        """Take the results of one step of m queries and n keys, of which key 0 stands at `column`."""
        self._sizes.append((m, n, column))
        for parts, result in zip(self._results, results, strict=True):
            parts.append(result)

    def finish(self, keys: int) -> list[Any]:
        """Return the results on the whole matrix, which has `keys` keys."""
        for statistic in self.statistics:
            _check_enough(statistic, keys)
        if len(self._sizes) == 1 and self._sizes[0][1:] == (keys, 0):
            return [parts[0] for parts in self._results]
        return [self._whole(s, parts, keys) for s, parts in zip(self.statistics, self._results, strict=True)]

    def _whole(self, statistic: Statistic, parts: list[Any], keys: int) -> Any:
        if isinstance(statistic, stats.ColumnMass | stats.ColumnMax):
            return self._columns(parts, keys, largest=isinstance(statistic, stats.ColumnMax))
        if isinstance(statistic, stats.Offsets):
            return self._diagonals(parts, keys)
        if isinstance(statistic, stats.ArgMax):
            return torch.cat([part + size[2] for part, size in zip(parts, self._sizes, strict=True)], dim=2)
        if type(statistic) is stats.TopK:
            parts = [_filled(part, statistic.k, size[2]) for part, size in zip(parts, self._sizes, strict=True)]
        if isinstance(parts[0], tuple):
            return type(parts[0])(*(torch.cat(column, dim=2) for column in zip(*parts, strict=True)))
        return torch.cat(parts, dim=2)

    def _columns(self, parts: list[Tensor], keys: int, *, largest: bool) -> Tensor:
        out = parts[0].new_zeros(*parts[0].shape[:2], keys)
        for part, (_, n, column) in zip(parts, self._sizes, strict=True):
            stop = min(column + n, keys)  # keys of a static cache that were never written are not kept
            into = out[..., column:stop]
            found = part[..., : stop - column]
            torch.maximum(into, found, out=into) if largest else into.add_(found)
        return out

    def _diagonals(self, parts: list[Tensor], keys: int) -> Tensor:
        rows = sum(m for m, _, _ in self._sizes)
        # Room for each diagonal that any step has; those of keys that are not kept fall off at the end.
        most = max([keys, *(column + n for _, n, column in self._sizes)])
        out = parts[0].new_zeros(*parts[0].shape[:2], rows + most - 1)
        row = 0
        for part, (m, n, column) in zip(parts, self._sizes, strict=True):
            first = column - (row + m - 1) + rows - 1
            out += functional.pad(part, (first, rows + most - 1 - first - (m + n - 1)))
            row += m
        return out[..., : rows + keys - 1]


def _filled(part: stats.Largest, k: int, column: int) -> stats.Largest:
    """Return the largest of a step as keys of the whole, filled up to k with keys that came later."""
    n = part.values.shape[-1]
    values, indices = functional.pad(part.values, (0, k - n)), functional.pad(part.indices, (0, k - n))
    indices[..., n:] = torch.arange(n, k, device=indices.device)
    return stats.Largest(values, indices + column)


def _check_enough(statistic: Statistic, keys: int) -> None:
    if keys < _wanted(statistic):
        name = type(statistic).__name__
        raise ShapeError(
            f"{name}()",
            "k cannot be larger than the number of keys.",
            found=f"k = {_wanted(statistic)}, n = {keys} when the recording ended",
            fix=f"{name}({keys}), or a longer text.",
        )
