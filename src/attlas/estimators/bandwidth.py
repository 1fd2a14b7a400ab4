"""What bandwidths may be, and the rules of thumb that start the search for better ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attlas.errors import ShapeError
from attlas.scores.kernel import checked_bandwidth

Floats = NDArray[np.float64]

RULES = ("loo", "scott", "silverman")


@dataclass(frozen=True)
class Spread:
    """Where the data lie: mean and standard deviation of each feature, and how many observations that rests on.

    Attributes
    ----------
    centre, deviation : ndarray of float64, shape (d,)
        A feature that is constant has a deviation of exactly 0.
    count : float
        Number of observations, or the sum of their weights where those count observations, or Kish's effective
        number where they do not.
    """

    centre: Floats
    deviation: Floats
    count: float


def check_bandwidth(bandwidth: object) -> None:
    """Raise unless a bandwidth is a rule, a number above 0 or several of them."""
    if not isinstance(bandwidth, str):
        # Raises where it is none; the tensor is not needed here.
        checked_bandwidth(np.asarray(bandwidth) if hasattr(bandwidth, "__array__") else bandwidth)
    elif bandwidth not in RULES:
        rule = "bandwidth must be 'loo', 'scott', 'silverman', a number, or a number for each feature."
        raise ShapeError(rule, f"bandwidth = {bandwidth!r}", "bandwidth='loo'")


def bandwidth_of_features(bandwidth: object, features: int) -> Floats:
    """Return a bandwidth for each feature from a number or a vector that `check_bandwidth` let pass."""
    value = np.asarray(bandwidth, dtype=np.float64)
    if value.ndim and value.shape != (features,):
        rule = "bandwidth must be one number, or one for each feature."
        fix = f"give {features} bandwidths, or one number."
        raise ShapeError(rule, f"{features} features in X, {value.shape[0]} bandwidths", fix)
    return np.broadcast_to(value, (features,)).copy()


def spread_of(X: Floats, sample_weight: Floats | None = None, *, counts: bool = True) -> Spread:
    """Measure the data feature by feature.

    Parameters
    ----------
    X : ndarray, shape (n, d)
        Data, finite.
    sample_weight : ndarray, shape (n,), optional
        Weights above 0.
    counts : bool, default True
        Whether a weight of 3 stands for three observations; else it is three times as important as one of 1.

    Notes
    -----
    Variances are unbiased, as in ``scipy.stats.gaussian_kde``: divided by ``Σw - 1`` for counts, and by
    ``1 - Σp²`` with ``p = w / Σw`` else. Each feature is divided by its largest absolute value first, so that
    squares of 1e200 do not overflow.
    """
    X = np.asarray(X, dtype=np.float64)
    w = np.ones(len(X)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
    p = w / w.sum()
    first = X[0]
    gap = X - first  # a constant feature is 0 here, without rounding
    unit = np.abs(gap).max(0)
    unit[unit == 0] = 1.0
    gap /= unit
    mean = p @ gap
    counted = counts or sample_weight is None
    count = float(w.sum()) if counted else float(1.0 / np.square(p).sum())
    correction = count / (count - 1.0) if count > 1.0 else 0.0
    variance = (p @ np.square(gap - mean)) * correction
    return Spread(first + mean * unit, np.sqrt(variance) * unit, count)


def rule_of_thumb(rule: str, spread: Spread) -> Floats:
    """Return the bandwidths that a rule gives: Scott's ``σ_c n^(-1 / (d + 4))``, or Silverman's.

    Silverman's is Scott's times ``(4 / (d + 2))^(1 / (d + 4))``, where d is the number of features. A constant
    feature has the bandwidth infinity: whatever its value, it tells nothing, and is left out.
    """
    d = len(spread.deviation)
    factor = spread.count ** (-1.0 / (d + 4))
    if rule == "silverman":
        factor *= (4.0 / (d + 2)) ** (1.0 / (d + 4))
    bandwidth: Floats = spread.deviation * factor
    bandwidth[bandwidth == 0] = np.inf
    return bandwidth


def in_bandwidths(X: Floats, centre: Floats, bandwidth: Floats) -> Floats:
    """Return points in units of the bandwidth, from a centre; a feature of infinite bandwidth is left out."""
    used = np.isfinite(bandwidth)
    if not used.any():
        return np.zeros((len(X), 1))
    return (X[:, used].astype(np.float64) - centre[used]) / bandwidth[used]
