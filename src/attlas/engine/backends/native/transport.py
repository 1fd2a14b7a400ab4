"""Rows of the matrix of a linear attention layer, straight from its queries, keys and gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.native import library

_C_DTYPES = {
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
}
_GATE_NAMES = ("decay", "write", "erase", "p", "r")


def unsupported(tensors: Mapping[str, Tensor]) -> str | None:
    """Return why no kernel computes rows of these tokens; None where one does."""
    if any(t.device.type != "cpu" for t in tensors.values()) or tensors["k"].dtype not in _C_DTYPES:
        return "there is no kernel for their device or dtype"
    return library.current().why_not


def rows(
    tensors: Mapping[str, Tensor], heads: int, dtype: torch.dtype, scale: float, rows: Sequence[int], columns: range
) -> Tensor:
    """Return some rows of the matrix, shape (batch, heads, len(rows), len(columns)).

    ``A_ij = scale write_j q_iᵀ M_i M_{i-1} ... M_{j+1} k_j`` for j ≤ i, with ``M_t = (I + p_t r_tᵀ)
    diag(exp(decay_t))``, or with ``-erase_t k_t k_tᵀ`` in place of ``p_t r_tᵀ``.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Queries ``q``, keys ``k`` and gates ``decay``, ``write``, ``erase``, ``p`` and ``r``, those that there are, each
        of shape (batch or 1, own heads, n or 1, size). Others are left out.
    heads : int
        Heads of the matrix, which the heads of each tensor divide.
    dtype : torch.dtype
        That of cells, float32 or float64.
    scale : float
        Factor of the queries.
    rows : sequence of int
        Tokens of the rows, in ascending order, each once.
    columns : range
        Tokens of the columns.

    Notes
    -----
    Time ``O(len(rows) n d)`` for the n tokens from the first column to the last row. Rows are carried in float64.
    """
    kernels = library.current()
    k, places = tensors["k"], torch.tensor(list(rows), dtype=torch.int64)
    batch, _, _, d = k.shape
    q = tensors["q"].index_select(2, places).to(dtype) * scale
    q = q.repeat_interleave(heads // q.shape[1], dim=1).expand(batch, -1, -1, -1).contiguous()
    kept: list[Tensor] = []

    def given(t: Tensor) -> Any:
        t = t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()
        kept.append(t)  # alive until the call returns
        strides = [0 if size == 1 else stride for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)]
        whole = kernels.structures["Tensor4"](t.data_ptr(), *strides)
        return kernels.structures["OfTokens"](whole, heads // t.shape[1], t.shape[3])

    gates = {name: given(tensors[name].to(dtype)) for name in _GATE_NAMES if name in tensors}
    out = torch.zeros(batch, heads, len(places), len(columns), dtype=dtype)
    kernels.call(
        "transport_rows",
        k=given(k), **gates, queries=q.data_ptr(), rows=places.data_ptr(), out=out.data_ptr(),
        batch=batch, heads=heads, d=d, count=len(places), first=columns.start, stop=columns.stop,
        type=kernels.codes[_C_DTYPES[k.dtype]], threads=torch.get_num_threads(),
    )  # fmt: skip
    return out
