"""Changes of the form of a matrix that stay lazy: axes, device, dtype; and what is read of a diagonal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.foundation.compat import parse_to
from attlas.matrix.protocol import Matrix
from attlas.matrix.reductions import axis_of


def squeezed(A: Any, dim: int | None) -> Any:
    """Leave out a leading axis of size 1, or all axes of size 1; see `AttentionMatrix.squeeze`."""
    axes = range(A.ndim) if dim is None else [axis_of(A, "squeeze", dim)]
    key = tuple(0 if axis in axes and size == 1 else slice(None) for axis, size in enumerate(A.shape))
    rest = key[-2:] if 0 in key[-2:] else ()
    return A[(*key[:-2], *rest)] if rest or 0 in key else A


def unsqueezed(A: Any, dim: int) -> Any:
    """Add an axis of size 1: lazily in front of a batch, on the dense tensor elsewhere."""
    axes = A.axes
    if dim in (0, -A.ndim - 1) and len(axes.layout) >= 2:
        more = replace(axes, layout=(1, *axes.layout), kept=(True, *axes.kept))
        return A.with_weights(A.weights, more)
    return A.on_dense("unsqueeze", dim)


def transposed(A: Any, dim0: int, dim1: int) -> Any:
    """Exchange two axes: lazily the last two, on the dense tensor others."""
    if {axis_of(A, "transpose", dim0), axis_of(A, "transpose", dim1)} == {A.ndim - 2, A.ndim - 1}:
        return A.mT
    return A.on_dense("transpose", dim0, dim1)


def diagonal_of(A: Any, offset: int, dim1: int, dim2: int) -> Tensor:
    """Return the weights of a diagonal; of the last two axes in linear memory."""
    m, n = A.shape[-2:]
    first, second = axis_of(A, "diagonal", dim1), axis_of(A, "diagonal", dim2)
    length = min(m, n - offset) - max(0, -offset)
    if (first, second) != (A.ndim - 2, A.ndim - 1) or length <= 0:
        dense: Tensor = A.on_dense("diagonal", offset, dim1, dim2)
        return dense
    start = max(0, -offset)
    queries = torch.arange(start, start + length, device="cpu")
    cells: Tensor = A[..., queries, queries + offset]  # two lists name cells in pairs
    return cells


def moved(A: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the matrix on another device or with another dtype; see `AttentionMatrix.to`."""
    device, dtype = parse_to(*args, **kwargs)
    device = A.device if device is None else torch.empty(0, device=device).device
    dtype = None if dtype == A.dtype else dtype
    if device == A.device and dtype is None:
        return A
    weights = A.weights.moved(device, dtype)
    return A.on_dense("to", *args, **kwargs) if weights is None else A.with_weights(weights)


def as_written(A: Matrix, most: int) -> str:
    """Return the weights of a small matrix as text, below its name; the name alone for one with longer axes."""
    few = max(A.shape[-2:]) <= most and A.shape[:-2].numel() <= most and A.device.type != "meta"
    return f"{A!r}\n{A.detach().to_dense()}" if few else repr(A)
