"""Local lines: weighted least squares about each query, without a ridge."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Directions whose variance is below this share of the largest one have no slope of their own. The variances come
# from sums of squares, whose rounding error is some 100 unit round-offs.
_FLAT_SHARE = {torch.float64: 1e-13, torch.float32: 1e-5}
# Rounding error of a place from its centre, in unit round-offs of the centre.
_CENTRED_ERROR = 1000.0
# Up to this many points for each feature the lines come from singular values, which keep twice the digits.
_FEW_POINTS = 4
# Slopes are refined with the residuals where the variances differ by more than this: the normal equations lose as
# many digits as these differ by, and the residuals half as many. Each step divides the error by a hundred or more.
_REFINED_BELOW = 1e-4
_REFINEMENT_STEPS = 3


class Lines(NamedTuple):
    """A line for each of r queries, through its weighted neighbours; places are measured from the query.

    Attributes
    ----------
    mass : Tensor, shape (r, 1)
        Sum of the weights; 0 for a query without neighbours, whose other numbers mean nothing.
    mean : Tensor, shape (r, e)
        Weighted mean of the values.
    centre : Tensor, shape (r, d)
        Weighted mean of the places.
    slopes : Tensor, shape (r, d, e)
        Slopes of the line through `centre` and `mean`.
    inverse : Tensor, shape (r, d, d)
        Pseudo-inverse of the weighted covariance of the places.
    variance : Tensor, shape (r, d)
        Variance of each feature.
    correlation : Tensor, shape (r,)
        Smallest eigenvalue of the correlations of the features: 0 where they lack a rank, 1 where all are unrelated.
    centred : Tensor, shape (r, n, d), optional
        Places from their centre.
    """

    mass: Tensor
    mean: Tensor
    centre: Tensor
    slopes: Tensor
    inverse: Tensor
    variance: Tensor
    correlation: Tensor
    centred: Tensor | None = None

    @property
    def at_zero(self) -> Tensor:
        """The line at the query itself, shape (r, e)."""
        return self.mean - (self.centre.unsqueeze(1) @ self.slopes).squeeze(1)

    def leverage(self) -> Tensor:
        """Return ``l_ij / K_ij``: by how much each neighbour's value moves the line at the query, shape (r, n)."""
        known = self.mass > 0
        share = torch.where(known, 1.0 / torch.where(known, self.mass, 1.0), 0.0)
        if self.centred is None:
            return share
        tilt = (self.centred @ (self.inverse @ self.centre.unsqueeze(-1))).squeeze(-1)
        return share * (1.0 - tilt)


def lines_through(weight: Tensor, gaps: Tensor, values: Tensor) -> Lines:
    """Fit a line for each query by weighted least squares.

    Parameters
    ----------
    weight : Tensor, shape (r, n)
        Weights, at least 0.
    gaps : Tensor, shape (r, n, d)
        Places of the neighbours, measured from the query.
    values : Tensor, shape (n, e)
        Values.

    Notes
    -----
    The line goes through the weighted mean; its slopes are ``C⁺ Σ_j p_j (x_j - x̄) (y_j - ȳ)ᵀ`` with C the weighted
    covariance of the places. That equals the solution of the normal equations where they have one. A direction in
    which the neighbours do not vary has no slope: the line is level there, as a local mean would be.
    Time: ``r n d (d + e)`` operations. Memory: ``2 r n d`` numbers.
    """
    mass = weight.sum(-1, keepdim=True)
    share = weight / torch.where(mass > 0, mass, 1.0)
    mean = share @ values
    centre = (share.unsqueeze(1) @ gaps).squeeze(1)
    centred = gaps - centre.unsqueeze(1)
    if gaps.shape[1] <= _FEW_POINTS * gaps.shape[2]:
        found = _through_few(share, centred, values - mean.unsqueeze(1), centre)
        return Lines(mass, mean, centre, *found, centred)
    weighted = (centred * share.unsqueeze(-1)).mT
    rounding = centre.square() * (_CENTRED_ERROR * torch.finfo(centre.dtype).eps) ** 2
    inverse, variance, correlation = symmetric_inverse(weighted @ centred, rounding)
    slopes = inverse @ (weighted @ values - weighted.sum(-1, keepdim=True) * mean.unsqueeze(1))
    if bool((correlation < _REFINED_BELOW).any()):
        for _ in range(_REFINEMENT_STEPS):
            left = (values - mean.unsqueeze(1)).sub_(centred @ slopes)
            slopes = slopes + inverse @ (weighted @ (left - share.unsqueeze(1) @ left))
    return Lines(mass, mean, centre, slopes, inverse, variance, correlation, centred)


def _through_few(share: Tensor, centred: Tensor, left: Tensor, centre: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return slopes, inverse, variances and a bound of their correlation from singular values of the places.

    Arguments are the shares (r, n), places from their centre (r, n, d), values less their mean (r, n, e), and the
    centre (r, d).
    """
    root = share.sqrt().unsqueeze(-1)
    design = torch.where(share.isfinite().unsqueeze(-1), root * centred, 0.0)
    rows, size, columns = torch.linalg.svd(design, full_matrices=False)
    eps = torch.finfo(size.dtype).eps
    # Directions in which the places differ by rounding alone are left out of the line.
    floor = _CENTRED_ERROR * eps * torch.linalg.vector_norm(centre, dim=-1, keepdim=True)
    keep = (size > torch.maximum(floor, size[:, :1] * (_CENTRED_ERROR * eps))) & (size > 0)
    factor = torch.where(keep, 1.0 / torch.where(keep, size, 1.0), 0.0).unsqueeze(-1)
    slopes = columns.mT @ (factor * (rows.mT @ (root * left)))
    scaled = columns * factor
    correlation = (size[:, -1] / torch.where(size[:, 0] > 0, size[:, 0], 1.0)).square()
    return slopes, scaled.mT @ scaled, design.square().sum(1), correlation


def lines_from_moments(mass: Tensor, places: Tensor, squares: Tensor, sums: Tensor, products: Tensor) -> Lines:
    """Fit a line for each query from the sums over its neighbours.

    Parameters
    ----------
    mass : Tensor, shape (r,)
        ``Σ_j K_ij``.
    places : Tensor, shape (r, d)
        ``Σ_j K_ij (x_j - q_i)``.
    squares : Tensor, shape (r, d, d)
        ``Σ_j K_ij (x_j - q_i) (x_j - q_i)ᵀ``.
    sums : Tensor, shape (r, e)
        ``Σ_j K_ij y_j``.
    products : Tensor, shape (r, d, e)
        ``Σ_j K_ij (x_j - q_i) y_jᵀ``.

    Notes
    -----
    The covariance is a difference of sums here, whose rounding error is that of ``x̄ x̄ᵀ``: a query that is far
    from its neighbours, in units of their spread, is better served by `lines_through`.
    """
    mass = mass.unsqueeze(-1)
    unit = torch.where(mass > 0, mass, 1.0)
    mean, centre = sums / unit, places / unit
    cross = centre.unsqueeze(-1)
    # Slopes are Cov(x)⁻¹ Cov(x, y), both as the mean of products less the product of means.
    inverse, variance, correlation = symmetric_inverse(squares / unit.unsqueeze(-1) - cross @ cross.mT)
    slopes = inverse @ (products / unit.unsqueeze(-1) - cross @ mean.unsqueeze(1))
    return Lines(mass, mean, centre, slopes, inverse, variance, correlation)


def symmetric_inverse(matrix: Tensor, floor: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pseudo-inverse of covariances, their variances, and how far they are from losing a rank.

    Parameters
    ----------
    matrix : Tensor, shape (r, d, d)
        Symmetric, positive semi-definite but for rounding.
    floor : Tensor, shape (r, d), optional
        Variance of each feature that rounding alone may cause.

    Returns
    -------
    inverse : Tensor, shape (r, d, d)
        Moore-Penrose inverse; 0 for a matrix that is not finite.
    variance : Tensor, shape (r, d)
        The diagonal.
    correlation : Tensor, shape (r,)
        Smallest eigenvalue of the correlations; a feature that does not vary makes it 0.

    Notes
    -----
    Which directions vary is judged on the correlations, so that it does not depend on the units of the features: a
    feature of a very large bandwidth varies little in units of it, and keeps its slope.
    """
    finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    matrix = torch.where(finite, matrix, 0.0)
    variance = matrix.diagonal(dim1=-2, dim2=-1)
    varies = variance > (0.0 if floor is None else floor)
    unit = torch.where(varies, 1.0 / torch.where(varies, variance, 1.0).sqrt(), 0.0)
    size, directions = torch.linalg.eigh(matrix * unit.unsqueeze(-1) * unit.unsqueeze(-2))
    keep = size > _FLAT_SHARE[matrix.dtype] * size.amax(-1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
    factor = torch.where(keep, 1.0 / torch.where(keep, size, 1.0), 0.0)
    left = directions * unit.unsqueeze(-1)
    inverse = (left * factor.unsqueeze(-2)) @ left.mT
    lacking = (~keep.all(-1)).nonzero().squeeze(-1)
    if len(lacking):
        # In units of the deviations other directions are orthogonal: project onto what is orthogonal, in the units of
        # `matrix`, to the directions in which it has no variance.
        back = torch.where(varies, unit, 1.0)[lacking].unsqueeze(-1)
        across = _complement_projections(directions[lacking] * back, keep[lacking])
        inverse[lacking] = across @ inverse[lacking] @ across
    return inverse, variance, size.amin(-1)


def _complement_projections(directions: Tensor, keep: Tensor) -> Tensor:
    """Return the projections onto what is orthogonal to the directions that are not kept, which come first."""
    # I - Q Qᵀ, with Q an orthonormal basis of the directions that are not kept.
    lost = torch.where(keep.unsqueeze(-2), 0.0, directions)
    lost = lost / torch.where(keep.unsqueeze(-2), 1.0, torch.linalg.vector_norm(lost, dim=-2, keepdim=True))
    basis = torch.where(keep.unsqueeze(-2), 0.0, torch.linalg.qr(lost)[0])
    return torch.eye(lost.shape[-1], dtype=lost.dtype, device=lost.device) - basis @ basis.mT
