"""The leave-one-out error of any score, with its gradient through attention itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attlas.estimators.loo import LooTask, Objective
from attlas.masks import from_function
from attlas.matrix.attend import attend
from attlas.scores import Score, TensorBias


def weighted(score: Score, weights: Tensor | None) -> Score:
    """Return a score whose weights are multiplied by one factor for each key."""
    if weights is None:
        return score
    return score + TensorBias(weights.log().unsqueeze(0))


class ScoredLeaveOneOut(Objective):
    """Leave-one-out error of ``softmax(score(x / h, keys / h) + log w) @ values`` with the pairs (i, i) masked.

    Notes
    -----
    Attention is differentiable in its tokens, so that any score can be searched. An observation is left out with all
    its weight. Time: one forward and one backward of attention. Memory: linear in rows and keys.
    """

    def __init__(self, score: Score, task: LooTask, rows: Tensor | None = None) -> None:
        super().__init__(task, rows)
        self.score = score
        # Equal weights add the same number to all logits of a row, and softmax does not see it.
        self._weights = None if bool((task.weights == task.weights[0]).all()) else task.weights

    def grid(self, scales: Tensor) -> Tensor:
        """Return the loss for every multiple of the starting bandwidth."""
        one = torch.ones(self.task.keys.shape[1], dtype=torch.float64)
        return torch.tensor([self.value(one * math.log(s), gradient=False)[0] for s in scales], dtype=torch.float64)

    def value(self, log_bandwidth: Tensor, *, gradient: bool = True) -> tuple[float, Tensor]:
        """Return the loss at the logarithm of the multiple of each starting bandwidth, and its gradient."""
        theta = log_bandwidth.to(self.task.keys).detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            predicted = self.predictions(theta)
            loss = (self.task.loss(predicted, self.task.values[self.rows]).loss * self._row_weights).sum()
        if not gradient:
            return float(loss), torch.zeros_like(log_bandwidth)
        slope = torch.autograd.grad(loss, theta)[0] if loss.requires_grad else torch.zeros_like(theta)
        return float(loss.detach()), slope.double().cpu()

    def predictions(self, log_bandwidth: Tensor) -> Tensor:
        """Return the leave-one-out prediction of each row, shape (rows, e)."""
        keys, rows = self._keys_in_bandwidths(log_bandwidth), self.rows
        others = from_function(lambda b, h, i, j: rows[i] != j)
        matrix = attend(keys[rows], keys, score=weighted(self.score, self._weights), mask=others)
        pooled = matrix @ self.task.values
        alone = (matrix.lse.detach() == -math.inf).unsqueeze(-1)
        return torch.where(alone, self._without_neighbours, pooled)
