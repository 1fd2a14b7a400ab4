"""Merges the statistics of several steps of one text to those of the whole matrix, exactly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attlas import stats
from attlas.errors import ShapeError
from attlas.stats import Statistic
from attlas.stats.largest import name_unseen


def can_merge(statistic: Statistic) -> bool:
    """Return whether the results of a statistic for each step determine its result on the whole matrix (`axis`).

    Pictures, spans, means and windows of rows cannot be merged: they depend on the size of the whole matrix. A user's
    own class that overrides a step must set `axis` itself; an inherited one is about the results of the base class.
    """
    return statistic.axis is not None and statistic.describes("axis")


def with_keys(statistic: Statistic, keys: int) -> Statistic:
    """Return a statistic with k limited to the keys of a step; one without k is returned as it is.

    Parameters
    ----------
    statistic : Statistic
        One that can be merged: later steps have more keys.
    keys : int
        Number of keys of the step.
    """
    if not 0 < keys < statistic.k:
        return statistic
    limited = copy.copy(statistic)
    limited.k = keys
    return limited


class MergedStatistics:
    """Results of some statistics on the rows of the steps so far.

    Parameters
    ----------
    statistics : sequence of Statistic
        Each of them can be merged, if there is more than one step.
    """

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        self.statistics = tuple(statistics)
        self._results: list[list[Any]] = [[] for _ in self.statistics]
        self._sizes: list[tuple[int, int, int]] = []

    def add(self, results: Sequence[Any], m: int, n: int, column: int) -> None:
        """Add the results of one step with m queries and n keys; its key 0 is at column `column` of the whole."""
        self._sizes.append((m, n, column))
        for parts, result in zip(self._results, results, strict=True):
            parts.append(result)

    def finish(self, keys: int) -> list[Any]:
        """Return the results on the whole matrix, which has `keys` keys."""
        for statistic in self.statistics:
            _check_enough(statistic, keys)
        if len(self._sizes) == 1 and self._sizes[0][1:] == (keys, 0):
            return [parts[0] for parts in self._results]
        return [self._merged(s, parts, keys) for s, parts in zip(self.statistics, self._results, strict=True)]

    def _merged(self, statistic: Statistic, parts: list[Any], keys: int) -> Any:
        """Return the result of one statistic on the whole matrix, from its results on the steps."""
        if statistic.axis == "rows":
            columns = [column for _, _, column in self._sizes]
            parts = [_shifted_keys(part, statistic.k, column) for part, column in zip(parts, columns, strict=True)]
            if isinstance(parts[0], tuple):
                found = type(parts[0])(*(torch.cat(column, dim=2) for column in zip(*parts, strict=True)))
                if isinstance(found, stats.Largest):  # unseen keys may be those of a static cache that never came
                    name_unseen(found.indices.masked_fill_(found.indices >= keys, -1))
                return found
            return torch.cat(parts, dim=2)
        # The lowest diagonal begins in the last row: before column 0 stand the diagonals of all rows but one.
        rows = sum(m for m, _, _ in self._sizes)
        before = rows - 1 if statistic.axis == "diagonals" else 0
        # Room for each key that any step has: those of a static cache that were never written are not kept.
        most = max([keys, *(column + n for _, n, column in self._sizes)])
        out = parts[0].new_zeros(*parts[0].shape[:2], before + most)
        row = 0
        for part, (m, _, column) in zip(parts, self._sizes, strict=True):
            row += m
            start = column + (rows - row if before else 0)
            into = out[..., start : start + part.shape[-1]]
            into.copy_(statistic.merge(into, part))
        return out[..., : before + keys]


def _shifted_keys(part: Any, k: int, column: int) -> Any:
    """Return the result of a step with its key numbers shifted by `column`, and with k keys per row."""
    if isinstance(part, stats.Largest):  # filled up with keys that came later
        n = part.values.shape[-1]
        values, indices = functional.pad(part.values, (0, k - n)), functional.pad(part.indices, (0, k - n))
        indices[..., n:] = torch.arange(n, k, device=indices.device)
        return stats.Largest(values, indices + column)
    return part + column if k and isinstance(part, Tensor) and not part.is_floating_point() else part


def _check_enough(statistic: Statistic, keys: int) -> None:
    """Raise an error where a statistic keeps more keys than the joined matrix has."""
    if keys < statistic.k:
        name, rule = type(statistic).__name__, "k cannot be larger than the number of keys."
        found = f"k = {statistic.k}, n = {keys} when the recording ended"
        raise ShapeError(rule, found, f"{name}({keys}), or a longer text.", where=f"{name}()")
