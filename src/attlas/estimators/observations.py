"""Observations in one order, equal ones joined: what is learned from data does not depend on how they are listed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import _check_sample_weight

from attlas.errors import ShapeError

__all__ = ["Observations", "distinct", "used_weights"]

Array = NDArray[Any]


class Observations(NamedTuple):
    """Features (n, d), what is predicted (n, e), and weights (n,) or None for 1."""

    X: NDArray[Any]
    values: NDArray[np.float64]
    weights: NDArray[np.float64] | None


def distinct(data: Observations, *, join: bool) -> Observations:
    """Return observations in lexical order; with `join` equal ones become one with the sum of their weights.

    Notes
    -----
    Time: that of sorting n rows. Joining is exact where a weight counts observations: leaving one of them out then
    leaves the others.
    """
    columns = np.concatenate([data.X.astype(np.float64), data.values], 1)
    order = np.lexsort(columns.T[::-1])
    columns = columns[order]
    weights = np.ones(len(order)) if data.weights is None else data.weights[order]
    first = np.ones(len(order), dtype=bool)
    if join:
        first[1:] = (columns[1:] != columns[:-1]).any(1)
        weights = np.add.reduceat(weights, np.flatnonzero(first))
    order = order[first]
    return Observations(data.X[order], data.values[order], None if (weights == 1.0).all() else weights)


def used_weights(X: Array, y: Array, sample_weight: ArrayLike | None) -> tuple[Array, Array, Array | None, Array]:
    """Return copies of the points that have a weight, their weights (None if all are 1), and which ones they are."""
    every = np.arange(len(X))
    if sample_weight is None:
        return X.copy(), y.copy(), None, every
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    kept = np.flatnonzero(weights > 0)
    if not len(kept):
        raise ShapeError(
            "fit()",
            "at least one sample weight must be above 0.",
            found=f"{len(weights)} weights of 0",
            fix="leave sample_weight out.",
        )
    weights = weights[kept]
    return X[kept], y[kept], None if (weights == 1.0).all() else weights, kept
