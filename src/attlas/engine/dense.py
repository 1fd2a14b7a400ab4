"""Statistics of a dense tensor of weights, and the types of what statistics are computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from attlas.engine.autodiff import graph
from attlas.engine.backends import tiled
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.engine.statistic import Statistic, statistic_of_tensor
from attlas.errors import DtypeError, ShapeError, public
from attlas.foundation.indexing import Axes
from attlas.foundation.tiles import Tile
from attlas.scores.position import TensorBias


class Collects(Protocol):
    """A matrix that computes statistics: an `AttentionMatrix`, or one of which several ranks have parts."""

    def collect(self, *statistics: Statistic) -> tuple[Any, ...]:
        """Return the results of several statistics, computed in one pass."""


# What the functions of `attlas.stats` take. Of several, they return a tuple of what they return of one.
MatrixLike: TypeAlias = Collects | Tensor | Sequence[Collects | Tensor]


@statistic_of_tensor.register(Tensor)
def _statistic_of_weights(weights: Tensor, statistic: Statistic) -> Any:
    """Return a statistic of a dense tensor of weights, as a problem whose logits are their logarithms.

    No cell is masked.
    """
    where = f"stats.{type(statistic).__name__} of a tensor"
    if statistic.of_logits:
        fix = "attlas.attend(q, k), which knows the log-weights."
        raise DtypeError("weights do not tell log-weights.", "weights after softmax", fix, A=weights, where=where)
    with public(where):
        _check_weights(weights)
    lead = tuple(weights.shape[:-2])
    heads = lead[-1] if len(lead) > 1 else 1
    weights = weights.reshape(math.prod(lead) // max(heads, 1), heads, *weights.shape[-2:])
    batch, heads, m, n = weights.shape
    q, k = (weights.new_zeros(1).expand(batch, heads, length, 1) for length in (m, n))
    problem = Problem(q, k, _LogWeights(weights), None, None)
    if torch.is_grad_enabled() and weights.requires_grad and statistic.differentiable:
        result = graph.collect_of(problem, weights, [statistic])[0]
    else:
        empty = (weights == 0).all(dim=-1)
        lse = torch.zeros_like(empty, dtype=problem.dtype).masked_fill_(empty, -math.inf)
        result = tiled.collect(problem, [statistic], Plan(), lse)[0][0]
    return Axes(lead, (True,) * len(lead)).restore_all(result)


def _check_weights(weights: Tensor) -> None:
    """Raise a ShapeError unless a tensor holds weights: no number below 0, no row sum above 1."""
    rule, fix = "", "the attentions of a model, or softmax(scores, dim=-1)."
    if weights.ndim < 2 or not weights.is_floating_point():
        rule = "a tensor of weights has the axes (..., m, n), and is of floating point."
    elif weights.numel():
        least, most = (float(x) for x in (weights.detach().amin(), weights.detach().sum(-1).amax()))
        # Rounding of the weights, and of their sum.
        slack = 1e-3 + weights.shape[-1] ** 0.5 * torch.finfo(weights.dtype).eps
        if not (least >= 0 and most <= 1 + slack):
            rule = "weights are not negative, and those of a row sum to 1, or to less with a sink."
            raise ShapeError(rule, f"minimum {least}, row sum {most}", fix, A=weights)
    if rule:
        raise ShapeError(rule, f"{weights.ndim} axes, {weights.dtype}", fix, A=weights)


class _LogWeights(TensorBias):
    """Log-weights of a dense tensor of weights, made tile by tile."""

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # The weights of the tile, and their logarithm.
        return super().forward(q, k, at).log()
