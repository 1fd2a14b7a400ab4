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
from attlas.recording.growing import GrowingTensor
from attlas.stats import Statistic
from attlas.stats.largest import name_unseen

_LEAST_ROOM = 64  # places that a growing row of numbers gets at once, at least


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

    Notes
    -----
    Each step is merged when it is added: time and memory of a step do not grow with the steps before it.
    """

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        self.statistics = tuple(statistics)
        self._alone: tuple[Sequence[Any], int, int, int] | None = None  # the only step so far, as `add` got it
        self._merged: list[_JoinedRows | _MergedSums] | None = None  # those of several steps

    def add(self, results: Sequence[Any], m: int, n: int, column: int) -> None:
        """Add the results of one step with m queries and n keys; its key 0 is at column `column` of the whole."""
        if self._alone is None and self._merged is None:
            self._alone = results, m, n, column
        else:
            self._merge_step(results, m, n, column)

    def _merge_step(self, results: Sequence[Any], m: int, n: int, column: int) -> None:
        """Merge one step into those before it."""
        if self._merged is None:
            self._merged = [_JoinedRows(s) if s.axis == "rows" else _MergedSums(s) for s in self.statistics]
        if self._alone is not None:
            first, self._alone = self._alone, None
            self._merge_step(*first)
        for merged, result in zip(self._merged, results, strict=True):
            merged.add(result, m, n, column)

    def finish(self, keys: int) -> list[Any]:
        """Return the results on the whole matrix, which has `keys` keys."""
        for statistic in self.statistics:
            _check_enough(statistic, keys)
        # `_alone`: the results of one step only, its queries and keys, and its first key; nothing was merged yet.
        if self._alone is not None:
            results, m, n, column = self._alone
            if (n, column) == (keys, 0):
                return list(results)
            one = MergedStatistics(self.statistics)
            one._merge_step(results, m, n, column)
            return one.finish(keys)
        return [merged.finish(keys) for merged in self._merged or ()]


class _JoinedRows:
    """The rows of a statistic, step after step.

    Parameters
    ----------
    statistic : Statistic
        One with a result for each row: a tensor or a named tuple of tensors, whose third axis counts the rows.
    """

    def __init__(self, statistic: Statistic) -> None:
        self._k = statistic.k
        self._tuple: type | None = None  # class of the results, if each is a tuple
        self._fields: list[GrowingTensor] = []

    def add(self, result: Any, m: int, n: int, column: int) -> None:
        """Add the rows of one step; the arguments are those of `MergedStatistics.add`."""
        result = _shifted_keys(result, self._k, column)
        fields = result if isinstance(result, tuple) else (result,)
        if not self._fields:
            self._tuple = type(result) if isinstance(result, tuple) else None
            self._fields = [GrowingTensor() for _ in fields]
        for tensor, t in zip(self._fields, fields, strict=True):
            tensor.append(t)

    def finish(self, keys: int) -> Any:
        """Return the rows of all steps; `keys` is the number of keys of the whole matrix."""
        found = [tensor.joined() for tensor in self._fields]
        if self._tuple is None:
            return found[0]
        joined = self._tuple(*found)
        if isinstance(joined, stats.Largest):  # unseen keys may be those of a static cache that never came
            joined = joined._replace(indices=joined.indices.masked_fill(joined.indices >= keys, -1))
            name_unseen(joined.indices)
        return joined


class _MergedSums:
    """The columns, or the diagonals, of a statistic: each step is merged into the numbers of those before it.

    Parameters
    ----------
    statistic : Statistic
        One with a result for each column or diagonal.

    Notes
    -----
    Places count columns from key 0 of the whole. Of diagonals, the place is key minus query: it does not change when
    more rows come, and falls below 0.
    """

    def __init__(self, statistic: Statistic) -> None:
        self._statistic = statistic
        self._rows = 0
        self._numbers: Tensor | None = None  # those of all places from `_low` on; 0 where no step has any
        self._low = 0

    def add(self, result: Tensor, m: int, n: int, column: int) -> None:
        """Merge the numbers of one step into those before; the arguments are those of `MergedStatistics.add`."""
        self._rows += m
        low = column + self._place_of_key_0  # the place of the first number of this step
        numbers = self._numbers_with_room(result, low, low + result.shape[-1])
        into = numbers[..., low - self._low : low - self._low + result.shape[-1]]
        into.copy_(self._statistic.merge(into, result))

    @property
    def _place_of_key_0(self) -> int:
        """The place of key 0 in the last row: the lowest diagonal begins there."""
        return 1 - self._rows if self._statistic.axis == "diagonals" else 0

    def _numbers_with_room(self, result: Tensor, low: int, stop: int) -> Tensor:
        """Return the numbers with some places among them."""
        old, first = self._numbers, self._low
        if old is None:
            first, end, spare = low, low, 0
        else:
            end, spare = first + old.shape[-1], max(old.shape[-1], _LEAST_ROOM)
            if first <= low and stop <= end:
                return old
        self._low = low - spare if low < first else first
        size = (stop + spare if stop > end else end) - self._low
        with torch.inference_mode(False):  # a later pass may write into it outside of inference mode
            self._numbers = (result if old is None else old).new_zeros(*result.shape[:2], size)
        if old is not None:
            self._numbers[..., first - self._low : end - self._low] = old
        return self._numbers

    def finish(self, keys: int) -> Tensor:
        """Return the numbers of all places of a matrix with `keys` keys: a static cache has room for more."""
        numbers: Tensor = self._numbers  # type: ignore[assignment]  # there is a step
        first, stop = self._place_of_key_0, min(self._low + numbers.shape[-1], keys)
        out = numbers.new_zeros(*numbers.shape[:2], keys - first)
        low = max(first, self._low)
        out[..., low - first : stop - first] = numbers[..., low - self._low : stop - self._low]
        return out


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
