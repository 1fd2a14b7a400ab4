"""The exact leave-one-out error of kernel regression, and its gradient by the logarithm of each bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attlas.estimators.kernels import Places, profile
from attlas.estimators.local import lines_through
from attlas.estimators.row_blocks import map_blocks, one_thread, row_blocks

__all__ = ["LeaveOneOut", "Loss", "Objective", "Task", "accuracy", "log_loss", "squared_error"]

# Probabilities below this one are taken as it, so that one point cannot make the mean of the logarithms infinite.
_SMALLEST = 1e-12
# Largest rounding error of a squared distance, in squared bandwidths. Searches run in float32, where it moves the
# loss by some 1e-4 of itself at most; what they find is refined in float64.
_ROUNDING = {torch.float32: 1e-2, torch.float64: 1e-10}


class Losses(NamedTuple):
    """Loss of each row, shape (r,), and its derivative by each prediction, shape (r, e)."""

    loss: Tensor
    slope: Tensor


class Loss(Protocol):
    """What a prediction costs: both arguments have shape (r, e)."""

    def __call__(self, predicted: Tensor, observed: Tensor) -> Losses: ...


class Objective(Protocol):
    """What the search for bandwidths needs: the loss of several, of one with its gradient, and what it predicts."""

    def grid(self, scales: Tensor) -> Tensor: ...

    def value(self, log_bandwidth: Tensor, *, gradient: bool = True) -> tuple[float, Tensor]: ...

    def predictions(self, log_bandwidth: Tensor) -> Tensor: ...


def squared_error(predicted: Tensor, observed: Tensor) -> Losses:
    """Return the squared error, averaged over the outputs."""
    gap = predicted - observed
    return Losses(gap.square().mean(-1), gap * (2.0 / gap.shape[-1]))


def log_loss(predicted: Tensor, observed: Tensor) -> Losses:
    """Return minus the mean logarithm of the probability of the observed classes, given as the share of each."""
    safe = predicted.clamp(min=_SMALLEST)
    return Losses(-(observed * safe.log()).sum(-1), -observed * torch.where(predicted > _SMALLEST, 1.0 / safe, 0.0))


def accuracy(predicted: Tensor, observed: Tensor) -> Losses:
    """Return the share of the observations that are not of the most probable class: a loss without a slope."""
    right = observed.gather(-1, predicted.argmax(-1, keepdim=True)).squeeze(-1)
    return Losses(1.0 - right, torch.zeros_like(predicted))


@dataclass(frozen=True)
class Task:
    """What is predicted from what, and at what price.

    Attributes
    ----------
    kernel : str
        Name of a kernel.
    keys : Tensor, shape (n, d)
        Features, centred, in units of the bandwidth from which a search starts.
    values : Tensor, shape (n, e)
        What is predicted.
    weights : Tensor, shape (n,)
        Weight of each observation, above 0.
    kept : Tensor, shape (n,)
        Weight that an observation keeps when it is left out: 2 where it stands for three repeated ones, else 0.
    loss : Loss
        Price of a prediction.
    degree : int
        0 for a local mean, 1 for a local line.
    """

    kernel: str
    keys: Tensor
    values: Tensor
    weights: Tensor
    kept: Tensor
    loss: Loss
    degree: int = 0

    def to(self, dtype: torch.dtype) -> Task:
        """Return the same task in another precision."""
        keys, values, weights, kept = (t.to(dtype) for t in (self.keys, self.values, self.weights, self.kept))
        return Task(self.kernel, keys, values, weights, kept, self.loss, self.degree)

    def without_neighbours(self, rows: Tensor) -> Tensor:
        """Return what is predicted for rows that have no neighbour but themselves: the mean of all others."""
        left_out = (self.weights - self.kept)[rows].unsqueeze(-1)
        total = (self.weights.unsqueeze(-1) * self.values).sum(0) - left_out * self.values[rows]
        return total / (self.weights.sum() - left_out)


class LeaveOneOut:
    """Leave-one-out error ``L(h) = Σ_i w_i ℓ(ŷ_{-i}(x_i), y_i) / Σ_i w_i`` over some rows, all keys.

    Notes
    -----
    With ``p_ij`` the weights of row i without the pair (i, i), ``θ_c = log h_c`` and ``∂K/∂θ_c = F_ij |u_ijc|^p``,

    ``∂ŷ_i/∂θ_c = Σ_j (w_j F_ij / Σ_l w_l K_il) |u_ijc|^p (y_j - ŷ_i)``

    for a local mean, so that one pass over the pairs gives the loss and the whole gradient. For a local line
    ``l_ij`` and the residuals of the line take the places of ``1 / Σ_l w_l K_il`` and ``y_j - ŷ_i``. A row without
    neighbours is predicted by the mean of all others. Time: ``rows n (3 d + 2 e)`` operations and one exponential a
    pair. Memory: a block of whole rows, n numbers at least.
    """

    def __init__(self, task: Task, rows: Tensor | None = None, dtype: torch.dtype = torch.float64) -> None:
        self.task = task.to(dtype)
        self.rows = torch.arange(len(task.keys), device=task.keys.device) if rows is None else rows
        self._alone = self.task.without_neighbours(self.rows)
        weights = self.task.weights.unsqueeze(-1)
        self._pooled = torch.cat([weights * self.task.values, weights], -1)
        self._across = self._pooled.mT.contiguous()
        self._share = self.task.weights[self.rows] / self.task.weights[self.rows].sum()

    @property
    def pairs(self) -> int:
        """Number of pairs that one evaluation looks at."""
        return len(self.rows) * len(self.task.keys)

    def grid(self, scales: Tensor) -> Tensor:
        """Return the loss for every multiple of the starting bandwidth, in one pass: all share the distances."""
        power = 1 if self.task.kernel == "laplace" else 2
        several = scales.tolist()

        def losses(part: slice) -> Tensor:
            rows = self.rows[part]
            distance = places.distances(self.task.keys[rows])
            self._hide(distance, rows)
            found = []
            for scale in several:
                weight = profile(self.task.kernel, distance / scale**power).weight
                predicted = self._predict(weight, part, 1.0 / scale)[0]
                loss = self.task.loss(predicted, self.task.values[rows]).loss
                found.append((loss * self._share[part]).sum(dtype=torch.float64))
            return torch.stack(found).cpu()

        with one_thread(self.task.keys.device) as threads:
            places = self._places(self.task.keys)
            return torch.stack(map_blocks(losses, self._row_blocks(), threads)).sum(0)

    def value(self, log_bandwidth: Tensor, *, gradient: bool = True) -> tuple[float, Tensor]:
        """Return the loss at the logarithm of the multiple of each starting bandwidth, and its gradient."""
        with one_thread(self.task.keys.device) as threads:
            total = self._loss_and_slopes(self.task.keys / log_bandwidth.to(self.task.keys).exp(), gradient, threads)
        return float(total[0]), total[1:]

    def _loss_and_slopes(self, keys: Tensor, gradient: bool, threads: int) -> Tensor:
        places = self._places(keys)

        def loss_and_slopes(part: slice) -> Tensor:
            rows = self.rows[part]
            distance = places.distances(keys[rows])
            self._hide(distance, rows)
            weight, slope = profile(self.task.kernel, distance, slope=gradient)
            self._keep(weight, rows)
            predicted, lever, residual = self._predict(weight, part, keys=keys, hidden=False)
            loss, price = self.task.loss(predicted, self.task.values[rows])
            slopes = torch.zeros(keys.shape[1], dtype=torch.float64, device=keys.device)
            if gradient and slope is not None:
                slope *= self._spread(price * self._share[part].unsqueeze(-1), residual, lever)
                slopes = places.by_feature(slope, keys[rows]).double()
            return torch.cat([(loss * self._share[part]).sum(dtype=torch.float64).reshape(1), slopes]).cpu()

        return torch.stack(map_blocks(loss_and_slopes, self._row_blocks(), threads)).sum(0)

    def predictions(self, log_bandwidth: Tensor) -> Tensor:
        """Return what each row is predicted to be from all others, shape (rows, e)."""

        def predicted(part: slice) -> Tensor:
            distance = places.distances(keys[self.rows[part]])
            self._hide(distance, self.rows[part])
            return self._predict(profile(self.task.kernel, distance).weight, part, keys=keys)[0]

        with one_thread(self.task.keys.device) as threads:
            keys = self.task.keys / log_bandwidth.to(self.task.keys).exp()
            places = self._places(keys)
            return torch.cat(map_blocks(predicted, self._row_blocks(), threads))

    def _row_blocks(self) -> Iterator[slice]:
        width = self.task.keys.shape[1] + 1 if self.task.degree else 1
        return row_blocks(len(self.rows), len(self.task.keys), self.task.keys.device, width=width)

    def _places(self, keys: Tensor) -> Places:
        return Places(self.task.kernel, keys, _ROUNDING[keys.dtype])

    def _hide(self, distance: Tensor, rows: Tensor) -> None:
        """Put a row's own key out of reach, unless part of its weight stays."""
        own = torch.arange(len(rows), device=rows.device)
        distance[own, rows] = torch.where(self.task.kept[rows] > 0, distance[own, rows], math.inf)

    def _keep(self, weight: Tensor, rows: Tensor) -> None:
        own = torch.arange(len(rows), device=rows.device)
        weight[own, rows] *= self.task.kept[rows] / self.task.weights[rows]

    def _predict(
        self, weight: Tensor, part: slice, scale: float = 1.0, keys: Tensor | None = None, *, hidden: bool = True
    ) -> tuple[Tensor, Tensor, _Residual]:
        """Return predictions (r, e), what multiplies each pair's slope (r, n or 1), and the residuals."""
        rows = self.rows[part]
        if hidden:
            self._keep(weight, rows)
        if self.task.degree:
            keys = self.task.keys * scale if keys is None else keys
            return self._line(weight, part, keys)
        sums = weight @ self._pooled
        mass = sums[:, -1:]
        known = mass > 0
        inverse = torch.where(known, 1.0 / torch.where(known, mass, 1.0), 0.0)
        predicted = torch.where(known, sums[:, :-1] * inverse, self._alone[part])
        return predicted, inverse, _Residual(predicted)

    def _line(self, weight: Tensor, part: slice, keys: Tensor) -> tuple[Tensor, Tensor, _Residual]:
        gaps = keys - keys[self.rows[part]].unsqueeze(1)
        line = lines_through(weight * self.task.weights, gaps, self.task.values)
        predicted = torch.where(line.mass > 0, line.at_zero, self._alone[part])
        return predicted, line.lever(), _Residual(line.mean, line.slopes, line.centred)

    def _spread(self, price: Tensor, residual: _Residual, lever: Tensor) -> Tensor:
        """Return ``lever_ij w_j Σ_e price_ie (y_je - line_ie(x_j))``, shape (r, n)."""
        level = -(price * residual.level).sum(-1, keepdim=True)
        left = torch.cat([price, level], -1)
        if residual.slopes is None or residual.centred is None:
            return (left * lever) @ self._across
        tilt = (residual.slopes * price.unsqueeze(1)).sum(-1, keepdim=True)
        bent = torch.matmul(residual.centred, tilt).squeeze(-1) * self.task.weights
        return (left @ self._across - bent) * lever


class _Residual(NamedTuple):
    """What is left of the values: a level for each row, and the slopes of its line about a centre."""

    level: Tensor
    slopes: Tensor | None = None
    centred: Tensor | None = None
