"""Reads of a matrix as statistics, so that one backward serves them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.engine.fold import Part, Statistic
from attlas.engine.gradient import CellGradient
from attlas.engine.problem import Problem
from attlas.tiles import Tile

__all__ = ["Cells", "LogSumExp"]


class LogSumExp(Statistic):
    """The log-sum-exp of each row of logits, in float64."""

    def start(self, problem: Problem) -> Tensor:
        return torch.full(problem.shape[:3], -torch.inf, dtype=torch.float64, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        carry[at.place] = part.exact_lse
        return carry

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        return CellGradient(lse=grad, delta=torch.zeros_like(grad))


class Cells(Statistic):
    """Weights or log-weights of some rows and some columns.

    Parameters
    ----------
    rows, columns : range or Tensor
        Which; they may repeat.
    of_logits : bool
        Whether they are log-weights.
    """

    def __init__(self, rows: range | Tensor, columns: range | Tensor, of_logits: bool) -> None:
        self.rows, self.columns = (torch.as_tensor(t, dtype=torch.int64, device="cpu") for t in (rows, columns))
        self.of_logits = of_logits

    def start(self, problem: Problem) -> Tensor:
        shape = (*problem.shape[:2], len(self.rows), len(self.columns))
        return torch.zeros(shape, dtype=problem.dtype, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        cells = part.logits if self.of_logits else part.weights
        return cells[:, :, self.rows][..., self.columns]  # the definition is one part

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        def of_tile(part: Part) -> Any:
            at = part.at
            rows, columns = self.rows - at.rows.start, self.columns - at.columns.start
            inside = [(t >= 0) & (t < some) for t, some in zip((rows, columns), part.shape[2:], strict=True)]
            i, j = (flags.nonzero().squeeze(-1) for flags in inside)
            out = part.scratch("cells").zero_()
            own = grad[at.place[:2]][:, :, i][..., j].to(out.dtype).permute(2, 3, 0, 1)
            out.permute(2, 3, 0, 1).index_put_((rows[i].unsqueeze(-1), columns[j]), own, accumulate=True)
            return out.masked_fill_(part.hidden, 0.0) if self.of_logits else out

        taken = torch.zeros(problem.shape[2], dtype=torch.bool, device="cpu").index_fill_(0, self.rows, True)
        if self.of_logits:
            return CellGradient(rows=taken, logits=(of_tile,))
        return CellGradient(rows=taken, weights=(of_tile,))
