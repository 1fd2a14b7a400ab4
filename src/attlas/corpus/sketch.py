"""Distributions over texts: counts in fixed bins, which add up exactly whatever the order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SIZE = 2048  # bins of each number, the larger kind
_UNITS_PER_ONE = 1000
ABSOLUTE = 0.5 / _UNITS_PER_ONE  # error of a quantile of a number from 0 to 1
RELATIVE = 0.01  # error of a quantile of any other, as a share of it
_LEAST_NUMBER = 1e-4  # below it, numbers of the second kind count as 0
_LOG_BIN_WIDTH = math.log((1 + RELATIVE) / (1 - RELATIVE))


def bin_of(x: NDArray[np.float64], sketch: str) -> NDArray[np.int64]:
    """Return the bin of each number, -1 for NaN; `sketch` is "unit", equal bins from 0 to 1, or "log".

    Bin 0 of "log" holds what is below `_LEAST_NUMBER`; each further bin is wider by a factor
    exp(_LOG_BIN_WIDTH) than the one before.
    """
    filled = np.nan_to_num(x, nan=0.0, posinf=np.finfo(float).max)
    if sketch == "unit":
        bins = np.clip(filled * _UNITS_PER_ONE, 0, _UNITS_PER_ONE - 1)
    else:
        bins = np.where(
            filled < _LEAST_NUMBER, 0.0, 1 + np.log(np.maximum(filled, _LEAST_NUMBER) / _LEAST_NUMBER) / _LOG_BIN_WIDTH
        )
        bins = np.minimum(bins, SIZE - 1)
    return np.where(np.isnan(x), -1, bins.astype(np.int64))


def edges_of(sketch: str) -> NDArray[np.float64]:
    """Return the edges of all bins, ascending: one more than bins."""
    if sketch == "unit":
        return np.arange(_UNITS_PER_ONE + 1) / _UNITS_PER_ONE
    return np.concatenate([[0.0], _LEAST_NUMBER * np.exp(_LOG_BIN_WIDTH * np.arange(SIZE))])


def quantiles(counts: NDArray[np.int32], sketch: str, levels: Sequence[float], low: float, high: float) -> list[float]:
    """Return the quantiles of a distribution, to within `ABSOLUTE` or `RELATIVE`; the ends are exact.

    Parameters
    ----------
    counts : array of int, shape (SIZE,)
        Texts in each bin.
    sketch : str
        Kind of the bins.
    levels : sequence of float
        From 0 to 1; the number at rank ``floor(level * (texts - 1))`` is meant.
    low, high : float
        Smallest and largest number.
    """
    total = int(counts.sum())
    if not total:
        return [math.nan] * len(levels)
    edges, ranks = edges_of(sketch), np.cumsum(counts)
    out = []
    for level in levels:
        at = int(np.searchsorted(ranks, math.floor(level * (total - 1)), side="right"))
        lower, upper = float(edges[at]), float(edges[min(at + 1, len(edges) - 1)])
        # Between the edges of a bin of the second kind, this one is off by the same share of either.
        middle = (lower + upper) / 2 if sketch == "unit" or not lower else 2 * lower * upper / (lower + upper)
        out.append(low if level <= 0 else high if level >= 1 else min(max(middle, low), high))
    return out
