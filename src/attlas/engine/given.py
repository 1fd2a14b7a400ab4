"""What compiled kernels compute beside a softmax: statistics of weights that are given, rows of linear attention.

The kernels are imported when they are first asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attlas.engine.problem import Problem

if TYPE_CHECKING:
    from attlas.engine.backends.native.cells import CellSums

#: The names of `attlas.engine.outputs` that `cell_sums` finds. Weights are taken as they are: ``picture_max`` is the
#: weight of a block that is the largest by its size, and weights that no tile has count as 0.
NAMES = frozenset({"mass", "largest", "column_mass", "column_max", "offsets", "picture_sum", "picture_max"})


def cell_sums_unsupported(problem: Problem) -> str | None:
    """Return why no kernel adds up the weights of a matrix; None where one does."""
    from attlas.engine.backends.native import cells

    return cells.CellSums.unsupported(problem)


def cell_sums(problem: Problem, wanted: Mapping[str, Any]) -> CellSums | None:
    """Return what adds up tiles of weights; None where no kernel does.

    Parameters
    ----------
    problem : Problem
        The matrix that the weights belong to.
    wanted : mapping
        Names of `NAMES` and what they need.
    """
    from attlas.engine.backends.native import cells

    return cells.CellSums(problem, wanted) if cell_sums_unsupported(problem) is None else None


def transport_rows(
    tensors: Mapping[str, Tensor], heads: int, dtype: torch.dtype, scale: float, rows: Sequence[int], columns: range
) -> Tensor | None:
    """Return some rows of the matrix of a linear attention layer, as `transport.rows`; None where no kernel does."""
    from attlas.engine.backends.native import transport

    if transport.unsupported(tensors) is not None:
        return None
    return transport.rows(tensors, heads, dtype, scale, rows, columns)
