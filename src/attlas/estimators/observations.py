"""Observations in one order, equal ones joined: what is learned from data does not depend on how they are listed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import _check_sample_weight

from attlas.errors import ShapeError

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


def are_copies(data: Observations) -> bool:
    """Tell whether observations of equal features are copies of each other, and left out together.

    Notes
    -----
    They are, unless half of the observations or more share their features with one of another target. Such data
    repeat measurements (categories, whole numbers), each of which is news about the others.
    """
    order, group = _distinct_rows(data.X)
    values = data.values[order]
    first = np.searchsorted(group, np.arange(group[-1] + 1))
    other = np.bincount(group, (values != values[first[group]]).any(1)) > 0
    weights = np.ones(len(order)) if data.weights is None else data.weights[order]
    return bool(group[-1] > 0 and 2.0 * weights[other[group]].sum() < weights.sum())


def average_copies(data: Observations) -> tuple[Observations, NDArray[np.int64]]:
    """Return one observation for all of equal features, with their mean and the sum of their weights.

    Returns
    -------
    Observations
        In lexical order of the features.
    ndarray of int64, shape (n,)
        Which of them each of the observations belongs to.

    Notes
    -----
    A local mean or line through the means is the one through all observations.
    """
    order, group = _distinct_rows(data.X)
    first = np.searchsorted(group, np.arange(group[-1] + 1))
    weights = np.ones(len(order)) if data.weights is None else data.weights[order]
    total = np.add.reduceat(weights, first)
    values = np.add.reduceat(weights[:, None] * data.values[order], first) / total[:, None]
    single = np.diff(first, append=len(order)) == 1
    values[single] = data.values[order[first[single]]]  # without rounding
    back = np.empty_like(group)
    back[order] = group
    return Observations(data.X[order[first]], values, None if (total == 1.0).all() else total), back


def _distinct_rows(X: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lexical order of the rows, and the number of the distinct row that each is, in that order."""
    order = np.lexsort(X.T[::-1])
    return order, np.concatenate([[0], (X[order[1:]] != X[order[:-1]]).any(1).cumsum()]).astype(np.int64)


def used_weights(X: Array, y: Array, sample_weight: ArrayLike | None) -> tuple[Array, Array, Array | None, Array]:
    """Return copies of the points that have a weight, their weights (None if all are 1), and which ones they are."""
    every = np.arange(len(X))
    if sample_weight is None:
        return X.copy(), y.copy(), None, every
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    kept = np.flatnonzero(weights > 0)
    if not len(kept):
        rule = "at least one sample weight must be above 0."
        raise ShapeError(rule, f"{len(weights)} weights of 0", "leave sample_weight out.", where="fit()")
    weights = weights[kept]
    return X[kept], y[kept], None if (weights == 1.0).all() else weights, kept
