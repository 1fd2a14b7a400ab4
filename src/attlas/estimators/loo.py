"""The exact leave-one-out error of kernel regression, and its gradient by the logarithm of each bandwidth."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.estimators.kernels import PreparedKeys, profile
from attlas.estimators.local import Lines, lines_through
from attlas.estimators.row_blocks import map_blocks, one_thread, row_blocks
from attlas.scores import Score

# Probabilities below this one are taken as it, so that one point cannot make the mean of the logarithms infinite.
_SMALLEST_PROBABILITY = 1e-12
# Largest rounding error of a squared distance, in squared bandwidths. Searches run in float32, where it moves the
# loss by some 1e-4 of itself at most; what they find is refined in float64.
_MOST_ROUNDING = {torch.float32: 1e-2, torch.float64: 1e-10}


class Losses(NamedTuple):
    """Loss of each row, shape (r,), and its derivative by each prediction, shape (r, e)."""

    loss: Tensor
    slope: Tensor


# The loss of predictions and what was observed, both of shape (r, e).
Loss: TypeAlias = Callable[[Tensor, Tensor], Losses]


def squared_error(predicted: Tensor, observed: Tensor) -> Losses:
    """Return the squared error, averaged over the outputs."""
    gap = predicted - observed
    return Losses(gap.square().mean(-1), gap * (2.0 / gap.shape[-1]))


def log_loss(predicted: Tensor, observed: Tensor) -> Losses:
    """Return minus the mean logarithm of the probability of the observed classes, given as the share of each."""
    safe = predicted.clamp(min=_SMALLEST_PROBABILITY)
    return Losses(
        -(observed * safe.log()).sum(-1), -observed * torch.where(predicted > _SMALLEST_PROBABILITY, 1.0 / safe, 0.0)
    )


def accuracy(predicted: Tensor, observed: Tensor) -> Losses:
    """Return the share of the observations that are not of the most probable class: a loss without a slope."""
    right = observed.gather(-1, predicted.argmax(-1, keepdim=True)).squeeze(-1)
    return Losses(1.0 - right, torch.zeros_like(predicted))


@dataclass(frozen=True)
class LooTask:
    """Leave-one-out prediction: what is predicted from what, and the loss of a prediction.

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
        Loss of a prediction.
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

    @classmethod
    def create(
        cls, kernel: str | Score, keys: Tensor, values: Tensor, weights: Tensor | None, loss: Loss, degree: int,
        *, repeated: bool,
    ) -> LooTask:  # fmt: skip
        """Return a task in float64, `repeated` where a weight counts observations; the kernel of a Score is ``""``."""
        keys, values = keys.double(), values.double()
        weights = keys.new_ones(len(keys)) if weights is None else weights.double()
        kept = (weights - 1.0).clamp(min=0.0) if repeated else torch.zeros_like(weights)
        return cls(kernel if isinstance(kernel, str) else "", keys, values, weights, kept, loss, degree)

    def to(self, dtype: torch.dtype) -> LooTask:
        """Return the same task in another precision."""
        keys, values, weights, kept = (t.to(dtype) for t in (self.keys, self.values, self.weights, self.kept))
        return replace(self, keys=keys, values=values, weights=weights, kept=kept)

    def without_neighbours(self, rows: Tensor) -> Tensor:
        """Return the prediction for rows that have no neighbour but themselves: the mean of all others."""
        left_out = (self.weights - self.kept)[rows].unsqueeze(-1)
        total = (self.weights.unsqueeze(-1) * self.values).sum(0) - left_out * self.values[rows]
        return total / (self.weights.sum() - left_out)


class Objective(ABC):
    """The leave-one-out error of a task over some of its rows, which the search for bandwidths minimises.

    Parameters
    ----------
    task : LooTask
        What is predicted, in the precision that the error is computed in.
    rows : Tensor of int64, optional
        Rows that are predicted; all by default.
    """

    def __init__(self, task: LooTask, rows: Tensor | None) -> None:
        # `rows` are those over which the error is taken, by default all.
        self.task = task
        self.rows = torch.arange(len(task.keys), device=task.keys.device) if rows is None else rows
        self._without_neighbours = task.without_neighbours(self.rows)
        self._row_weights = task.weights[self.rows] / task.weights[self.rows].sum()  # of the losses of the rows

    @abstractmethod
    def grid(self, scales: Tensor) -> Tensor:
        """Return the loss, shape (g,), for each of g multiples of all starting bandwidths."""

    @abstractmethod
    def value(self, log_bandwidth: Tensor, *, gradient: bool = True) -> tuple[float, Tensor]:
        """Return the loss at the logarithm of the multiple of each starting bandwidth, and its gradient."""

    @abstractmethod
    def predictions(self, log_bandwidth: Tensor) -> Tensor:
        """Return the leave-one-out prediction of each row, shape (rows, e)."""

    def _keys_in_bandwidths(self, log_bandwidth: Tensor) -> Tensor:
        """Return the keys in bandwidths."""
        return self.task.keys / log_bandwidth.to(self.task.keys).exp()


def factors_with_own(log_scale: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors with which the sums of the other observations, and an observation itself, are added.

    The kernel of an observation at itself is 1. Both factors are relative to the larger scale, and never overflow.

    Parameters
    ----------
    log_scale : Tensor, shape (r,)
        Logarithm of the scale of the sums.
    kept : Tensor, shape (r,)
        Weight that the observation keeps when it is left out.
    """
    top = torch.where(kept > 0, log_scale.clamp(min=0.0), log_scale)
    top = torch.where(top == -math.inf, 0.0, top)
    own = (kept * (-top).exp().to(kept)).masked_fill(kept == 0, 0.0)
    return (log_scale - top).exp().to(kept), own


class LeaveOneOut(Objective):
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

    def __init__(self, task: LooTask, rows: Tensor | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(task.to(dtype), rows)
        weights = self.task.weights.unsqueeze(-1)
        # Columns w_j y_j and w_j: kernel @ _pooled is the numerator and the denominator of the mean.
        self._pooled = torch.cat([weights * self.task.values, weights], -1)
        self._pooled_columns = self._pooled.mT.contiguous()

    def grid(self, scales: Tensor) -> Tensor:
        """Return the loss for every multiple of the starting bandwidth, in one pass: all share the distances."""
        power = 1 if self.task.kernel == "laplace" else 2
        factors = scales.tolist()

        def losses(part: slice) -> Tensor:
            """Return the loss summed over a block of rows, one number for each scale."""
            rows = self.rows[part]
            distance = self._distances_to_others(prepared, self.task.keys, rows)
            totals = []
            for scale in factors:
                # Distances of keys in `scale` times the bandwidth.
                weight = self._reduce_own_weight(profile(self.task.kernel, distance / scale**power).weight, rows)
                # Only a local line needs the keys themselves.
                keys = self.task.keys * (1.0 / scale) if self.task.degree else self.task.keys
                predicted = self._predict_rows(weight, part, keys)[0]
                loss = self.task.loss(predicted, self.task.values[rows]).loss
                totals.append((loss * self._row_weights[part]).sum(dtype=torch.float64))
            return torch.stack(totals).cpu()

        with one_thread(self.task.keys.device) as threads:
            prepared = self._prepare_keys(self.task.keys)
            return torch.stack(map_blocks(losses, self._row_blocks(), threads)).sum(0)

    def value(self, log_bandwidth: Tensor, *, gradient: bool = True) -> tuple[float, Tensor]:
        """Return the loss at the logarithm of the multiple of each starting bandwidth, and its gradient."""

        def loss_and_slopes(part: slice) -> Tensor:
            """Return the loss summed over a block of rows, then its derivative for each feature, shape (1 + d,)."""
            rows = self.rows[part]
            weight, slope = profile(self.task.kernel, self._distances_to_others(prepared, keys, rows), slope=gradient)
            predicted, leverage, line = self._predict_rows(self._reduce_own_weight(weight, rows), part, keys)
            loss, loss_slope = self.task.loss(predicted, self.task.values[rows])
            slopes = torch.zeros(keys.shape[1], dtype=torch.float64, device=keys.device)
            if gradient and slope is not None:
                # From ∂K/∂θ to ∂L/∂θ of each pair: times ∂L/∂K.
                slope *= self._pair_slopes(
                    loss_slope * self._row_weights[part].unsqueeze(-1), predicted, line, leverage
                )
                slopes = prepared.by_feature(slope, keys[rows]).double()
            return torch.cat([(loss * self._row_weights[part]).sum(dtype=torch.float64).reshape(1), slopes]).cpu()

        with one_thread(self.task.keys.device) as threads:
            keys = self._keys_in_bandwidths(log_bandwidth)
            prepared = self._prepare_keys(keys)
            total = torch.stack(map_blocks(loss_and_slopes, self._row_blocks(), threads)).sum(0)
        return float(total[0]), total[1:]

    def predictions(self, log_bandwidth: Tensor) -> Tensor:
        """Return the leave-one-out prediction of each row, shape (rows, e)."""

        def predicted(part: slice) -> Tensor:
            """Return what a block of rows is predicted to be."""
            rows = self.rows[part]
            weight = profile(self.task.kernel, self._distances_to_others(prepared, keys, rows)).weight
            return self._predict_rows(self._reduce_own_weight(weight, rows), part, keys)[0]

        with one_thread(self.task.keys.device) as threads:
            keys = self._keys_in_bandwidths(log_bandwidth)
            prepared = self._prepare_keys(keys)
            return torch.cat(map_blocks(predicted, self._row_blocks(), threads))

    def _row_blocks(self) -> Iterator[slice]:
        """Return blocks of rows whose pairs with all keys fit into memory; a local line needs more of it."""
        width = self.task.keys.shape[1] + 1 if self.task.degree else 1
        return row_blocks(len(self.rows), len(self.task.keys), self.task.keys.device, width=width)

    def _prepare_keys(self, keys: Tensor) -> PreparedKeys:
        """Return keys in the form from which distances are computed."""
        return PreparedKeys(self.task.kernel, keys, _MOST_ROUNDING[keys.dtype])

    def _distances_to_others(self, prepared: PreparedKeys, keys: Tensor, rows: Tensor) -> Tensor:
        """Return the distances of rows from all keys; the own key is at infinity, unless some of its weight is kept."""
        distance = prepared.distances(keys[rows])
        own = torch.arange(len(rows), device=rows.device)
        distance[own, rows] = torch.where(self.task.kept[rows] > 0, distance[own, rows], math.inf)
        return distance

    def _reduce_own_weight(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Reduce the weight of each row's own key to the part that is kept, in place."""
        own = torch.arange(len(rows), device=rows.device)
        weight[own, rows] *= self.task.kept[rows] / self.task.weights[rows]
        return weight

    def _predict_rows(self, weight: Tensor, part: slice, keys: Tensor) -> tuple[Tensor, Tensor, Lines | None]:
        """Return predictions (r, e), the leverage of each pair (r, n or 1), and the lines; None for local means.

        With K the `weight`, value j has the share ``w_j K_ij leverage_ij`` of prediction i. The leverage of a local
        mean is ``1 / Σ_l w_l K_il``.
        """
        if self.task.degree:
            return self._predict_by_lines(weight, part, keys)
        sums = weight @ self._pooled
        mass = sums[:, -1:]
        known = mass > 0
        leverage = torch.where(known, 1.0 / torch.where(known, mass, 1.0), 0.0)
        predicted = torch.where(known, sums[:, :-1] * leverage, self._without_neighbours[part])
        return predicted, leverage, None

    def _predict_by_lines(self, weight: Tensor, part: slice, keys: Tensor) -> tuple[Tensor, Tensor, Lines]:
        """Return what `_predict_rows` does, for local lines."""
        gaps = keys - keys[self.rows[part]].unsqueeze(1)
        line = lines_through(weight * self.task.weights, gaps, self.task.values)
        predicted = torch.where(line.mass > 0, line.at_zero, self._without_neighbours[part])
        return predicted, line.leverage(), line

    def _pair_slopes(self, loss_slope: Tensor, predicted: Tensor, line: Lines | None, leverage: Tensor) -> Tensor:
        """Return the derivative of the loss by each pair's kernel, shape (r, n).

        That is ``leverage_ij w_j Σ_e loss_slope_ie (y_je - line_ie(x_j))``.
        """
        constant = -(loss_slope * (predicted if line is None else line.mean)).sum(-1, keepdim=True)
        coefficients = torch.cat([loss_slope, constant], -1)  # of the columns w_j y_j and w_j
        if line is None or line.centred is None:
            return (coefficients * leverage) @ self._pooled_columns
        line_slope = (line.slopes * loss_slope.unsqueeze(1)).sum(-1, keepdim=True)
        along_line = torch.matmul(line.centred, line_slope).squeeze(-1) * self.task.weights
        return (coefficients @ self._pooled_columns - along_line) * leverage
