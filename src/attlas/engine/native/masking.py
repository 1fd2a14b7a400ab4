"""What a mask says, in the fields that every structure of the kernels has for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def of_runs(first: Tensor, stop: Tensor) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return the fields for one run of keys a row, and the tensors that they point to.

    Parameters
    ----------
    first, stop : Tensor of int64, shape (batch or 1, heads or 1, m)
        The first key of each row and the one after its last.
    """
    low, high = (t.to(torch.int32).contiguous() for t in (first, stop))
    fields = {"low": low.data_ptr(), "high": high.data_ptr()}
    return fields | _strides("span", low), (low, high)


def of_cells(cells: Tensor, rows: int, n: int) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return the fields for a cell of each pair, and the tensor that they point to.

    Parameters
    ----------
    cells : Tensor of bool, broadcastable to (batch, heads, rows, n)
        True where a row may see a key.
    rows, n : int
        Number of rows and of keys.
    """
    whole = cells[(None,) * (4 - cells.ndim)].expand(-1, -1, rows, n).contiguous()
    fields = {"allowed": whole.data_ptr(), "allowed_row": n}
    return fields | _strides("allowed", whole), (whole,)


def _strides(name: str, t: Tensor) -> dict[str, int]:
    """Return the strides of batch and heads, 0 where there is one for all."""
    return {f"{name}_{axis}": 0 if t.shape[i] == 1 else t.stride(i) for i, axis in enumerate(("batch", "head"))}
