"""Fitted data as tokens, and everything that is read from their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.estimators.kernels import PreparedKeys, profile
from attlas.estimators.local import lines_from_moments, lines_through
from attlas.estimators.row_blocks import row_blocks
from attlas.estimators.scored import weighted
from attlas.estimators.sums import Sums, kernel_sums
from attlas.estimators.sums.task import KERNELS
from attlas.foundation.compat import cached_property
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.scores import Score

# Below this many times the error of a second moment, a variance is summed again from the residuals, and so is a
# local line whose neighbours hardly vary in some direction.
_TRUSTED_RATIO = 1e4
_TRUSTED_LINE = 1e7
_MOST_FEATURES = 16  # of kernel_sums with moments
_NEAR_MASS = 0.01  # kernel mass, in training points at the query itself, below which a query is far from all data
_QUERIES_AT_ONCE = 1 << 15  # whose moments are held at once


@dataclass(frozen=True)
class Pool:
    """Keys with values, in units of the bandwidth, and a kernel.

    Attributes
    ----------
    kernel : str or Score
        Name of a kernel, or a score of these tokens.
    keys : Tensor, shape (n, d)
        Places, divided by the bandwidths.
    values : Tensor, shape (n, e)
        What is pooled, centred.
    weights : Tensor, shape (n,), optional
        Weight of each key, above 0; None for 1.
    degree : int
        0 for a local mean, 1 for a local line.
    tolerance : float
        Of `kernel_sums`.
    """

    kernel: str | Score
    keys: Tensor
    values: Tensor
    weights: Tensor | None = None
    degree: int = 0
    tolerance: float = 1e-7

    def matrix(self, x: Tensor) -> AttentionMatrix:
        """Return the weights of all keys for each query, lazy, shape (m, n)."""
        score = self.kernel if isinstance(self.kernel, Score) else KERNELS[self.kernel]()
        return attend(x, self.keys, score=weighted(score, self.weights))

    def sums(self, x: Tensor, values: Tensor, *, moments: int = 0, leave_one_out: bool = False) -> Sums:
        """Return the sums of a kernel that has a name; with `leave_one_out` x are the keys, each without itself."""
        return kernel_sums(
            str(self.kernel), x, self.keys, values, 1.0, weights=self.weights, tolerance=self.tolerance,
            moments=moments, leave_one_out=leave_one_out,
        )  # fmt: skip

    def mean(self, x: Tensor) -> Tensor:
        """Return the prediction, shape (m, e); NaN where a query has no neighbour."""
        if self.degree:
            return self._lines_at_queries(x)
        if isinstance(self.kernel, str):
            return self.sums(x, self.values).mean()
        matrix = self.matrix(x)
        pooled = (matrix @ self.values).detach()
        return pooled.masked_fill((matrix.lse == -math.inf).unsqueeze(-1), math.nan)

    def variance(self, x: Tensor, mean: Tensor) -> Tensor:
        """Return ``Σ_j p_ij (y_j - ŷ_ij)²``, shape (m, e), with ŷ_ij the prediction, or the local line at key j."""
        if self.degree or not isinstance(self.kernel, str):
            return self._variance_of_residuals(x)
        sums = self.sums(x, torch.cat([self.values, self.values.square()], -1)).mean()
        first, second = sums.split(self.values.shape[1], -1)
        variance: Tensor = second - first.square()
        # A difference of squares loses digits: where `error`, its bound, is not small beside it, residuals are summed.
        error = self.values.square().amax(0) * max(self.tolerance, 16 * torch.finfo(x.dtype).eps)
        doubtful = (variance < error * _TRUSTED_RATIO).any(-1).nonzero().squeeze(-1)
        if len(doubtful):
            variance[doubtful] = self._variance_of_residuals(x[doubtful])
        return variance

    def _variance_of_residuals(self, x: Tensor) -> Tensor:
        """Return the variance from the residuals themselves."""
        found = [self.values.new_zeros(0, self.values.shape[1])]
        for rows, share in self.shares(x):
            if self.degree:
                moved = self._along_line(x[rows], share)
                moved -= share.unsqueeze(1) @ moved
                found.append((share.unsqueeze(1) @ moved.square()).squeeze(1))
                continue
            mean = share @ self.values
            columns = [(share * (self.values[:, c] - mean[:, c, None]).square()).sum(-1) for c in range(mean.shape[1])]
            found.append(torch.stack(columns, -1))
        return torch.cat(found)

    def _along_line(self, x: Tensor, share: Tensor) -> Tensor:
        """Return the values moved along each query's local line to the query, shape (r, n, e)."""
        gaps = self.keys - x.unsqueeze(1)
        line = lines_through(share, gaps, self.values)
        return self.values - gaps @ line.slopes

    def quantiles(self, x: Tensor, levels: Tensor) -> Tensor:
        """Return the weighted quantiles of the values, shape (m, e, levels): the least value whose share reaches one.

        With a local line, values are moved along it to the query first. NaN where a query has no neighbour.
        """
        e = self.values.shape[1]
        found = torch.full((len(x), e, len(levels)), math.nan, dtype=x.dtype, device=x.device)
        ordered, place = self.values.sort(dim=0, stable=True)
        for rows, share in self.shares(x):
            if self.degree:
                ordered, place = self._along_line(x[rows], share).sort(dim=1, stable=True)
            for c in range(e):
                own, values = (t[..., c].expand(len(share), -1) for t in (place, ordered))
                found[rows, c] = _first_reaching(share.gather(1, own), values, levels)
        return found

    def shares(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of whole rows of weights, each row's sum 1, or 0 where it has no neighbour."""
        width = self.keys.shape[1] + self.values.shape[1] if self.degree else 1
        if not isinstance(self.kernel, str):
            matrix = self.matrix(x)
            for rows in row_blocks(len(x), len(self.keys), x.device, width=width):
                yield rows, matrix[rows, :]
            return
        for rows, distance in self._distances_in_blocks(x, self.kernel, width):
            weight = profile(self.kernel, distance).weight
            if self.weights is not None:
                weight *= self.weights
            mass = weight.sum(-1, keepdim=True)
            yield rows, weight / torch.where(mass > 0, mass, 1.0)

    def _distances_in_blocks(self, x: Tensor, kernel: str, width: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of queries, and their distances from all keys as a kernel measures them."""
        keys = PreparedKeys(kernel, self.keys)
        for rows in row_blocks(len(x), len(self.keys), x.device, width=width):
            yield rows, keys.distances(x[rows])

    def _lines_at_queries(self, x: Tensor) -> Tensor:
        """Return each query's local line at the query itself."""
        found = [self.values.new_zeros(0, self.values.shape[1])]
        for part in x.split(_QUERIES_AT_ONCE):
            if isinstance(self.kernel, str) and self.keys.shape[1] <= _MOST_FEATURES:
                predicted, doubtful = self._lines_by_moments(part)
                again = doubtful.nonzero().squeeze(-1)
                if len(again):
                    predicted[again] = self._lines_by_residuals(part[again])
            else:
                predicted = self._lines_by_residuals(part)
            found.append(predicted)
        return torch.cat(found)

    def _lines_by_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each query's local line at the query from weighted moments, and whether rounding spoils it."""
        # Slopes divide by small variances: moments are summed to more digits than the prediction needs.
        tolerance = self.tolerance * 1e-4
        sums = replace(self, tolerance=tolerance).sums(x, self.values, moments=1)
        if sums.first is None:  # they were asked for
            return sums.numerator, torch.ones_like(sums.denominator, dtype=torch.bool)
        first, error = sums.first, max(tolerance, torch.finfo(x.dtype).eps)
        line = lines_from_moments(sums.denominator, first.offset, first.outer, sums.numerator, first.cross)
        # A variance is a second moment less a square: the rounding of that difference, in parts of the variance, is
        # judged feature by feature, whatever its units. One of rounding alone is doubtful at once.
        variance = line.variance.clamp(min=0.0)
        loss = ((variance + line.centre.square()) / variance).nan_to_num(math.inf, math.inf).amax(-1)
        doubtful = ~(line.correlation > loss * (error * _TRUSTED_LINE)) & (sums.denominator > 0)
        return line.at_zero.masked_fill(line.mass == 0, math.nan), doubtful

    def _lines_by_residuals(self, x: Tensor) -> Tensor:
        """Return each query's local line at the query from all weights: slower than by moments, and always exact."""
        found = [self.values.new_zeros(0, self.values.shape[1])]
        pool = self._with_distinct_keys
        for rows, share in pool.shares(x):
            line = lines_through(share, pool.keys - x[rows].unsqueeze(1), pool.values)
            found.append(line.at_zero.masked_fill(line.mass == 0, math.nan))
        return torch.cat(found)

    @cached_property
    def _with_distinct_keys(self) -> Pool:
        """The same pool with equal keys merged, so that a line is the same whether a key repeats or has a weight."""
        return self.merge_keys(*torch.unique(self.keys, dim=0, return_inverse=True))

    def merge_keys(self, keys: Tensor, place: Tensor) -> Pool:
        """Return the pool with merged keys (g, d); `place` (n,) has the merged key of each."""
        weights = self.keys.new_ones(len(self.keys)) if self.weights is None else self.weights
        mass = weights.new_zeros(len(keys)).index_add_(0, place, weights)
        sums = self.values.new_zeros(len(keys), self.values.shape[1])
        sums.index_add_(0, place, weights.unsqueeze(-1) * self.values)
        return replace(self, keys=keys, values=sums / mass.unsqueeze(-1), weights=mass)

    def neighbours(self, x: Tensor, *, counts: bool) -> Tensor:
        """Return Kish's effective number of neighbours, ``(Σ_j w_j K_ij)² / Σ_j w_j K_ij²``, shape (m,).

        Where weights do not count observations (`counts` is False) they are squared too: ``Σ_j (w_j K_ij)²``.
        """
        weights = self.keys.new_ones(len(self.keys)) if self.weights is None else self.weights
        squared = weights if counts else weights.square()
        if isinstance(self.kernel, str):
            name = self.kernel
            blocks = (profile(name, distance).weight for _, distance in self._distances_in_blocks(x, name))
        else:
            matrix = attend(x, self.keys, score=self.kernel)
            blocks = (matrix[rows, :] for rows in row_blocks(len(x), len(self.keys), x.device))
        found = [self.keys.new_zeros(0)]
        for kernel in blocks:
            square = kernel.square() @ squared
            found.append((kernel @ weights).square() / torch.where(square > 0, square, 1.0))
        return torch.cat(found)

    def supported(self, x: Tensor, *, counts: bool) -> Tensor:
        """Tell which queries have the neighbours that a spread needs: two of them, of which one is near, shape (m,)."""
        # `counts` says whether weights count observations, as in `neighbours`, which decides where the mass does not.
        enough = torch.ones(len(x), dtype=torch.bool, device=x.device)
        doubtful = enough
        if isinstance(self.kernel, str):
            sums = self.sums(x, self.keys.new_zeros(len(self.keys), 1))
            weights = self.keys.new_ones(1) if self.weights is None else self.weights
            # Sum of the kernel in units of the mean weight: so many training points at the query itself would give it.
            mass = sums.denominator * sums.log_scale.exp().to(x) / weights.mean()
            enough = mass >= _NEAR_MASS
            # No kernel is above 1: a mass of two neighbours is made by two at least.
            doubtful = enough & (mass < 2.0 * weights.amax() / weights.mean() * (1.0 + 1e-5))
        again = doubtful.nonzero().squeeze(-1)
        enough[again] = self.neighbours(x[again], counts=counts) >= 2.0 - 1e-5
        return enough

    def nearest(self, x: Tensor) -> Tensor:
        """Return the key that is nearest to each query, in bandwidths, shape (m,); the first of several."""
        kernel = self.kernel if isinstance(self.kernel, str) else "gaussian"
        found = [distance.argmin(-1) for _, distance in self._distances_in_blocks(x, kernel)]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=x.device), *found])


def _first_reaching(share: Tensor, ordered: Tensor, levels: Tensor) -> Tensor:
    """Return for each row the first of its ordered values at which the sum of shares reaches each level.

    `share` and `ordered` have the shape (r, n): `share` is in the order of the values. The result is (r, levels).
    """
    total = share.cumsum(-1, dtype=torch.float64)
    whole = total[:, -1:]
    # A sum that should be exactly the level may be short of it by rounding.
    target = levels * whole * (1.0 - 1e-12)
    place = torch.searchsorted(total, target.expand(len(total), -1).contiguous()).clamp(max=total.shape[1] - 1)
    # A level of 0 is reached by nobody's share: the least value that has a weight is meant.
    first = (share > 0).to(torch.int8).argmax(-1, keepdim=True)
    found = ordered.gather(1, torch.maximum(place, first))
    return torch.where(whole > 0, found, math.nan)
