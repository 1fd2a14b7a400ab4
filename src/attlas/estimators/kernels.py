"""The kernels by name: as a score, and as a function of the distance with its slope for the bandwidth."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, kind
from attlas.estimators.sums.task import KERNELS
from attlas.scores import Score
from attlas.scores.kernel import distances

# Log-weights end here, relative to the largest of a row: far below rounding, and above the numbers that are not
# normalised, with which CPUs compute twenty times as slowly.
_SMALLEST_LOG = {torch.float32: -50.0, torch.float64: -300.0}


class Profile(NamedTuple):
    """Weights of pairs, and how they grow with the bandwidths.

    `slope` times ``|u_c|^power`` is the derivative of `weight` by the logarithm of the bandwidth of feature c,
    with u the difference in bandwidths. Both carry the same factor for each row.
    """

    weight: Tensor
    slope: Tensor | None


def check_kernel(kernel: object) -> None:
    """Raise unless a kernel is one of the names, or a score."""
    if isinstance(kernel, Score) or (isinstance(kernel, str) and kernel in KERNELS):
        return
    rule, fix = f"kernel must be {', '.join(map(repr, KERNELS))}, or an attlas.Score.", "kernel='gaussian'"
    if isinstance(kernel, str):
        raise ShapeError(rule, f"kernel = {kernel!r}", fix)
    fix = f"kernel={kernel.__name__}(), an object and not its class." if isinstance(kernel, type) else fix
    raise DtypeError(rule, kind(kernel), fix)


class PreparedKeys:
    """Keys in units of the bandwidth, prepared for their distances from many blocks of queries.

    Parameters
    ----------
    kernel : str
        Name of a kernel.
    keys : Tensor, shape (n, d)
        Keys.
    rounding : float, default 0.0
        Rounding error of a squared distance that does no harm.

    Notes
    -----
    What belongs to the keys alone is computed once: a block of few queries would spend most of its time on it.
    Differences are taken coordinate by coordinate, with a rounding error that does not grow with the spread of the
    data. Where that of a matrix product stays below `rounding` it is used instead: it takes a fifth of the time.
    """

    def __init__(self, kernel: str, keys: Tensor, rounding: float = 0.0) -> None:
        self.kernel, self.keys = kernel, keys
        exact = product_error(keys) <= rounding  # then distances, and sums over them, are taken by matrix products
        self._columns = keys.mT.contiguous()
        # The factor of the keys, shape (d + 2, n), of the product that gives squared distances.
        self._factor: Tensor | None = None
        if exact and kernel not in ("laplace", "triangular"):
            squares = keys.square().sum(1).unsqueeze(0)
            self._factor = torch.cat([self._columns, torch.ones_like(squares), squares])
        # The two columns of a feature that `by_feature` needs: |x - k|² = x² - 2 x k + k².
        self._powers = torch.cat([keys, keys.square()], 1) if exact and kernel != "laplace" else None

    def distances(self, x: Tensor) -> Tensor:
        """Return ``Σ_c |x_c - k_c|^p`` of all pairs, shape (r, n): p is 1 for Laplace, 2 for the other kernels."""
        if self._factor is None:
            return distances(x.mT, self._columns, 1 if self.kernel == "laplace" else 2)
        left = torch.cat([x * -2.0, x.square().sum(1, keepdim=True), torch.ones_like(x[:, :1])], 1)
        return (left @ self._factor).clamp_(min=0.0)

    def by_feature(self, slope: Tensor, x: Tensor) -> Tensor:
        """Return ``Σ_ij slope_ij |x_ic - k_jc|^p`` for each feature c, shape (d,); `slope` has the shape (r, n)."""
        if self._powers is not None:
            first, second = (slope @ self._powers).split(x.shape[1], 1)
            return (x.square() * slope.sum(1, keepdim=True) - 2.0 * x * first + second).sum(0)
        # One feature after the other; the differences |x_ic - k_jc| take the memory of one matrix (r, n).
        found = []
        for c, column in enumerate(self._columns):
            gap = x[:, c, None] - column
            gap = gap.abs_() if self.kernel == "laplace" else gap.square_()
            found.append(gap.mul_(slope).sum())
        return torch.stack(found)


def product_error(keys: Tensor) -> float:
    """Return about the largest rounding error of a squared distance that is made of sums of squares."""
    if not keys.numel():
        return 0.0
    most = float(keys.abs().amax())
    return most * most * keys.shape[1] * torch.finfo(keys.dtype).eps  # a power would raise where this is infinite


def profile(kernel: str, distance: Tensor, *, slope: bool = False) -> Profile:
    """Return the weights of pairs at their distance, of which one at least is finite in every row.

    With D the `distance` (squared, but for Laplace), K is ``exp(-D/2)`` (gaussian), ``exp(-D)`` (laplace), 1
    (boxcar), ``1 - D`` (epanechnikov) or ``1 - sqrt(D)`` (triangular); the last three are 0 from D = 1 on. `slope`
    asks for `Profile.slope` too: ``-2 dK/dD``, ``-dK/dD`` for Laplace.

    The weights of the kernels without bounds are divided by the largest of their row, so that a row far from all
    keys does not underflow; what is smaller than all rounding, an infinite distance too, is a tiny number and not 0.
    """
    if kernel in ("gaussian", "laplace"):
        factor = 0.5 if kernel == "gaussian" else 1.0
        weight = torch.sub(distance.amin(-1, keepdim=True) * factor, distance, alpha=factor)
        weight.clamp_(min=_SMALLEST_LOG[distance.dtype]).exp_()
        return Profile(weight, weight if slope else None)
    inside = distance < 1.0
    if kernel == "boxcar":
        weight = inside.to(distance.dtype)
        return Profile(weight, torch.zeros_like(weight) if slope else None)
    if kernel == "epanechnikov":
        return Profile((1.0 - distance).clamp_(min=0.0), inside.to(distance.dtype) * 2.0 if slope else None)
    root = distance.sqrt()
    weight = (1.0 - root).clamp_(min=0.0)
    # The weight has a corner at distance 0; the slope is multiplied by a difference of 0 there.
    return Profile(weight, torch.where(inside & (root > 0), 1.0 / root, 0.0) if slope else None)
