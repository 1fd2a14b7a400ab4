"""What softmax does with independent Gaussian logits: exact for any number of keys, and in the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attlas.errors import ShapeError, public
from attlas.foundation.checks import whole_number

_REACH_IN_DEVIATIONS = 9.0  # standard deviations of a logit; what lies beyond has probability 1e-19
_GRID_STEP = 0.45  # nats, of both grids: sums over functions as smooth as these are then exact to 1e-7
_STEP_DEVIATIONS = 0.3  # the same for the grid of the logit, in its standard deviations
_WIDEST_DEVIATION = 32.0  # standard deviation from which on two terms in 1/σ are used
_MARGIN_BELOW, _MARGIN_ABOVE = 36.0, 4.0  # e^-36 is nothing beside 1, and so is exp(-e^4)


@dataclass(frozen=True)
class Expected:
    """What one row of softmax is expected to be.

    Parameters
    ----------
    variance : float
        Variance of the logits.
    entropy : float
        Entropy ``-Σ p ln p`` of the weights, nats.
    largest : float
        Largest weight.
    trace : float
        Trace of the softmax Jacobian, ``Σ p (1 - p)``.

    Examples
    --------
    >>> from attlas.scaling import expected
    >>> round(expected(keys=2, variance=0.0).entropy, 4)  # ln 2
    0.6931
    """

    variance: float
    entropy: float
    largest: float
    trace: float


@public("expected()")
def expected(keys: int, variance: float) -> Expected:
    """Return the expectation of one row of softmax over independent Gaussian logits.

    Parameters
    ----------
    keys : int
        How many logits n the row has.
    variance : float
        Variance σ² of each.

    Returns
    -------
    Expected

    Raises
    ------
    ShapeError
        If `keys` is below 1, or `variance` is negative or not finite.

    See Also
    --------
    limit : closed forms for many keys.
    study : the same, measured on random vectors.

    Notes
    -----
    With ``Z = Σ_j e^{s_j}`` and ``φ(t) = E e^{-t e^s}``, ``1/Z = ∫ e^{-tZ} dt`` turns each mean over n
    independent logits into a product of means over one [1]_:

    - ``E ln Z = ∫ (e^{-t} - φ(t)ⁿ) dt / t``
    - ``E Σ p_j s_j = n ∫ E[s e^s e^{-t e^s}] φ(t)^{n-1} dt``, and the entropy is the difference of the two
    - ``E Σ p_j² = n ∫ t E[e^{2s} e^{-t e^s}] φ(t)^{n-1} dt``, and the trace is 1 less that
    - ``E max p_j``: the same with the other logits kept below the largest.

    Both integrals are sums on an even grid in s and in ln t, which converge exponentially for functions as
    smooth as these; the numbers hold to 1e-7 (the largest weight to 1e-3 of itself). Above σ = 32 two keys
    seldom compete, and ``entropy``, ``1 - largest`` and ``trace`` fall as 1/σ; they are continued by two
    terms in 1/σ, to about 0.5 %.

    Cost: ``(40 σ + 100)²`` exponentials, from a millisecond to a quarter of a second and 40 MB; results are kept.

    References
    ----------
    .. [1] Derrida, "Random-energy model: an exactly solvable model of disordered systems", 1981: the
       logits are energies, and the identity for ln Z gives systems of finite size.

    Examples
    --------
    >>> from attlas.scaling import expected
    >>> scaled, plain = expected(512, 1.0), expected(512, 64.0)
    >>> round(scaled.entropy, 2), round(plain.entropy, 2)  # of ln 512 = 6.24
    (5.74, 0.82)
    """
    whole_number("keys", keys, "keys=512")
    if not (math.isfinite(variance) and variance >= 0.0):
        raise ShapeError("variance must be a finite number, 0 or more.", f"variance = {variance!r}", "variance=1.0")
    if keys == 1 or variance == 0.0:
        return Expected(variance, math.log(keys), 1.0 / keys, 1.0 - 1.0 / keys)
    sigma = math.sqrt(variance)
    # `rest` is 1 - the expected largest weight.
    if sigma <= _WIDEST_DEVIATION:
        entropy, rest, trace = _expected_quantities(keys, sigma)
    else:
        near, far = _expected_quantities(keys, _WIDEST_DEVIATION / 2), _expected_quantities(keys, _WIDEST_DEVIATION)
        ratio = _WIDEST_DEVIATION / sigma
        # a / σ + b / σ², through the two points
        entropy, rest, trace = (
            ratio * (2 * f - n / 2) + ratio**2 * (n / 2 - f) for n, f in zip(near, far, strict=True)
        )
    return Expected(variance, entropy, 1.0 - rest, trace)


def limit(keys: int, variance: float) -> Expected:
    """Return the limit of `expected` for many keys, in closed form.

    Parameters
    ----------
    keys : int
        How many logits n the row has.
    variance : float
        Variance σ² of each.

    Returns
    -------
    Expected
        `largest` is NaN: it has no such form.

    See Also
    --------
    expected : exact for any n.

    Notes
    -----
    The random-energy model [1]_ has a transition at ``σ² = 2 ln n``. Below it many keys share the weight:
    ``entropy = ln n - σ²/2``. Above it a few keys have all of it: the entropy is o(ln n), here 0, and the
    trace of the Jacobian is ``sqrt(2 ln n) / σ`` [2]_, so that without a scale (``σ² = d``) gradients
    through softmax vanish as ``1 / sqrt(d)``. Below, the trace is 1. With the scale, ``σ² = 1``, a row is
    above the transition only if it has one key: this is why one divides by ``sqrt(d)``. Corrections fall
    as ``1 / ln n``: slowly.

    References
    ----------
    .. [1] Derrida, "Random-energy model: an exactly solvable model of disordered systems", 1981.
    .. [2] Gross and Mézard, "The simplest spin glass", 1984.

    Examples
    --------
    >>> from attlas.scaling import expected, limit
    >>> round(limit(4096, 1.0).entropy, 3), round(expected(4096, 1.0).entropy, 3)
    (7.818, 7.818)
    """
    frozen = math.sqrt(2.0 * math.log(max(keys, 1)))
    sigma = math.sqrt(variance)
    entropy = math.log(keys) - variance / 2 if sigma <= frozen else 0.0
    return Expected(variance, entropy, math.nan, min(1.0, frozen / sigma) if sigma > 0.0 else 1.0)


@lru_cache(maxsize=4096)
def _expected_quantities(keys: int, sigma: float) -> tuple[float, float, float]:
    """Return the expected entropy, 1 less the largest weight, and the trace.

    With Z the sum of exp over all logits, they are integrals over t = exp(u) > 0 by ``ln Z = ∫ (e^-t - e^-tZ) dt / t``
    and ``1 / Z = ∫ e^-tZ dt``: the expectation of e^-tZ is a product over the independent keys.
    """
    step = min(_STEP_DEVIATIONS, _GRID_STEP / sigma)
    z = torch.arange(-_REACH_IN_DEVIATIONS, _REACH_IN_DEVIATIONS + step, step, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    density /= density.sum()
    reach = sigma * _REACH_IN_DEVIATIONS
    u = torch.arange(-reach - math.log(keys) - _MARGIN_BELOW, reach + _MARGIN_ABOVE, _GRID_STEP, dtype=torch.float64)
    sums = torch.zeros(4, dtype=torch.float64)
    for part in u.split(max(1, 2**20 // len(z))):
        sums += _grid_contributions(part, z, density, keys, sigma)
    log_z, mean_logit, squares, largest = (sums * _GRID_STEP).tolist()
    return max(log_z - mean_logit, 0.0), max(1.0 - largest, 0.0), max(1.0 - squares, 0.0)


def _grid_contributions(u: Tensor, z: Tensor, density: Tensor, keys: int, sigma: float) -> Tensor:
    """Return the contribution of the grid points t = exp(u) to four integrals.

    They are those for log Z, the mean logit, the sum of squared weights and the largest weight. `z` are values of a
    logit in standard deviations, `density` their probabilities; φ is the expectation of exp(-t e^s) over a logit s.
    """
    s, step = sigma * z, float(z[1] - z[0])
    y = torch.exp((u.unsqueeze(1) + s).clamp(max=8.0))  # t e^s; beyond e^8, e^-y is 0 all the same
    decay = torch.exp(-y)
    # ln φ from 1 - φ: where t is small, φ differs from 1 by less than a float64 can show.
    missing = -torch.expm1(-y) * density
    log_phi = torch.log1p(-missing.sum(1).clamp(max=1.0))
    others = torch.exp((keys - 1) * log_phi)
    weight = y * decay * density
    log_z = torch.exp(-torch.exp(u)) - torch.exp(keys * log_phi)
    mean_logit = keys * (weight @ s) * others
    squares = keys * (weight * y).sum(1) * others
    # The others lie below this logit: half of its own cell of the grid, and Euler and Maclaurin's term for the slope.
    below = decay * density
    alive = below.cumsum(1) - below / 2 + below * (z + y * sigma) * (step / 12)
    largest = keys * (weight * alive.clamp(0.0, 1.0) ** (keys - 1)).sum(1)
    return torch.stack([log_z.sum(), mean_logit.sum(), squares.sum(), largest.sum()])
