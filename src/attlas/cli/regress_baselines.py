"""What a regression has to beat: the mean and a linear model, each judged with every row left out in its turn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Judged", "judge", "linear", "mean"]


@dataclass(frozen=True)
class Judged:
    """How well each row is predicted from all others.

    Parameters
    ----------
    error : float
        Root of the mean squared error; NaN where it is not defined.
    r2 : float
        1 - (squared errors) / (squared distances from the mean of all rows).
    """

    error: float
    r2: float


def judge(residuals: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> Judged:
    """Return error and R² of residuals; rows without a prediction, NaN, are left out of both.

    A row of weight 3 counts three times as much as one of weight 1.

    Examples
    --------
    >>> import numpy as np
    >>> judge(np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    Judged(error=0.7071067811865476, r2=0.5)
    """
    known = np.isfinite(residuals)
    if not known.any():
        return Judged(math.nan, math.nan)
    w = np.ones(len(y)) if weights is None else weights
    centre = np.average(y, weights=w)
    # Scaled first: the squares of numbers like 1e200 would overflow.
    scale = max(float(np.abs(residuals[known]).max()), float(np.abs(y - centre).max())) or 1.0
    squares = np.square(residuals[known] / scale)
    total = float(w[known] @ squares)
    spread = float(w[known] @ np.square((y[known] - centre) / scale))
    error = scale * math.sqrt(total / float(w[known].sum()))
    return Judged(error, 1.0 - total / spread if spread else math.nan)


def mean(y: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return what is left of each row when the mean of all others is taken off.

    A row is left out with all its weight.

    Examples
    --------
    >>> import numpy as np
    >>> mean(np.array([0.0, 3.0, 6.0]))
    array([-4.5,  0. ,  4.5])
    """
    n = len(y)
    if n < 2:
        return np.full(n, math.nan)
    w = np.ones(n) if weights is None else weights
    left: NDArray[np.float64] = (y - np.average(y, weights=w)) * (w.sum() / (w.sum() - w))
    return left


def linear(
    x: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return what is left of each row when least squares of all others are taken off.

    Parameters
    ----------
    x : ndarray, shape (rows, features)
        Features; an intercept is added.
    y : ndarray, shape (rows,)
        Target.
    weights : ndarray, shape (rows,), optional
        Weights above 0; a row is left out with all of it.

    Returns
    -------
    ndarray, shape (rows,)
        Residuals; NaN for a row that alone decides about a coefficient.

    Notes
    -----
    Least squares are linear in y, with the hat matrix H of all rows: the residual without row i is
    ``(y_i - ŷ_i) / (1 - H_ii)``, and no model is fitted twice. H is the projection onto the singular vectors of the
    scaled features that are not rounding; features that repeat each other do no harm. Time: O(n d²).

    Examples
    --------
    >>> import numpy as np
    >>> linear(np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([1.0, 3.0, 5.0, 7.0])).round(12) + 0.0
    array([0., 0., 0., 0.])
    """
    n = len(y)
    w = np.ones(n) if weights is None else weights
    root = np.sqrt(w)
    varied = x[:, x.max(0) > x.min(0)]  # of a constant, rounding would be left, and look like a feature
    centred = varied - np.average(varied, axis=0, weights=w)
    columns = centred / np.abs(centred).max(0) * root[:, None]
    columns /= np.sqrt(np.square(columns).sum(0))
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    u = u[:, s > max(n, x.shape[1]) * np.finfo(np.float64).eps * s.max(initial=0.0)]
    left = (y - np.average(y, weights=w)) * root
    left = (left - u @ (u.T @ left)) / root
    free = 1.0 - w / w.sum() - np.square(u).sum(1)
    return np.where(free > 1e-10, left / np.where(free > 1e-10, free, 1.0), math.nan)
