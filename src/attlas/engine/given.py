"""What compiled kernels compute beside a softmax: statistics of weights that are given, rows of linear attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.native import cells, transport
from attlas.engine.problem import Problem

#: The names of `attlas.engine.outputs` that `cell_sums` finds.
NAMES = cells.NAMES


def cell_sums_unsupported(problem: Problem) -> str | None:
    """Return why no kernel adds up the weights of a matrix; None where one does."""
    return cells.CellSums.unsupported(problem)


def cell_sums(problem: Problem, wanted: Mapping[str, Any]) -> cells.CellSums | None:
    """Return what adds up tiles of weights; None where no kernel does.

    Parameters
    ----------
    problem : Problem
        The matrix that the weights belong to.
    wanted : mapping
        Names of `NAMES` and what they need.
    """
    return cells.CellSums(problem, wanted) if cell_sums_unsupported(problem) is None else None


def transport_rows(
    tensors: Mapping[str, Tensor], heads: int, dtype: torch.dtype, scale: float, rows: Sequence[int], columns: range
) -> Tensor | None:
    """Return some rows of the matrix of a linear attention layer, as `transport.rows`; None where no kernel does."""
    if transport.unsupported(tensors) is not None:
        return None
    return transport.rows(tensors, heads, dtype, scale, rows, columns)
