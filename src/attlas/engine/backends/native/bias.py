"""Terms of places in the fields of the kernels of dot products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.native import library
from attlas.engine.backends.native.decode import TYPES
from attlas.engine.problem import Problem
from attlas.errors import ShapeError
from attlas.scores.bias import Bias


def of(problem: Problem) -> Bias | None:
    """Return what places add to the dot product, without a graph; None where they add nothing, or have no such form."""
    # Computed once for each problem, which keeps it.
    kept = vars(problem)
    if "bias" not in kept:
        dot = problem.dot
        with torch.no_grad():
            kept["bias"] = (
                None if dot is None or dot.bias is None else dot.bias.bias(problem.tile(*map(range, problem.shape)))
            )
    found: Bias | None = kept["bias"]
    return found


def unsupported(problem: Problem) -> str | None:
    """Return why the kernels do not add what places add to the dot product; None where they do."""
    bias = of(problem)
    if bias is None:
        return "the kernels know no form of the score of places"
    batch, heads, m, n = problem.shape
    terms = {"distance": (m + n - 1,), "key": (n,), "query": (m,), "cell": (m, n)}
    for name, sizes in terms.items():
        t: Tensor | None = getattr(bias, name)
        if t is None:
            continue
        whole = (batch, heads, *sizes)
        # The first axes may have size 1: batch and heads, and of `cell` all.
        may_be_one = whole[:2] if name != "cell" else whole
        fits = t.ndim == len(whole) and all(
            size == full or (size == 1 and place < len(may_be_one))
            for place, (size, full) in enumerate(zip(t.shape, whole, strict=True))
        )
        if not fits:
            rule = f"`{name}` of a Bias must have a size for each batch, head and place."
            found, fix = f"{tuple(t.shape)} for {whole}", "return bias(at) for the rows and columns of the tile."
            raise ShapeError(rule, found, fix, where="Score.bias()")
        if t.device.type != "cpu" or t.dtype not in TYPES:
            return f"there is no kernel for {str(t.dtype).removeprefix('torch.')} numbers of places"
    return None


def fields(kernels: library.Kernels, problem: Problem, rows: slice) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the terms of some rows in the fields of ``AttentionParams``, and the tensors that they point to."""
    bias = of(problem)
    if bias is None:
        return {}, []
    found: dict[str, Any] = {}
    buffers: list[Tensor] = []
    if bias.distance is not None:
        table = bias.distance.to(problem.dtype).contiguous()
        # Number x belongs to j - i = x - (m - 1).
        start = problem.shape[2] - 1 - rows.start
        found["by_distance"] = _strided(kernels, table, start, row=-1, column=1)
        buffers.append(table)
    if bias.cell is not None:
        row, column = (0 if bias.cell.shape[axis] == 1 else bias.cell.stride(axis) for axis in (2, 3))
        start = rows.start * row
        found["by_cell"] = _strided(kernels, bias.cell, start, row=row, column=column, factor=bias.factor)
        buffers.append(bias.cell)
    for name, t, start in (("by_query", bias.query, rows.start), ("by_key", bias.key, 0)):
        if t is not None:
            t = t.to(torch.float64).contiguous()
            found[name] = kernels.structures["TokenBias"](t.data_ptr() + 8 * start, *_heads(t))  # 8 bytes each
            buffers.append(t)
    return found, buffers


def _strided(kernels: library.Kernels, t: Tensor, start: int, *, row: int, column: int, factor: float = 1.0) -> Any:
    """Return a tensor as a `Bias` of the kernels, whose first row and column have number `start` of the tensor."""
    address = t.data_ptr() + start * t.element_size()
    return kernels.structures["Bias"](address, *_heads(t), row, column, factor, kernels.codes[TYPES[t.dtype]])


def _heads(t: Tensor) -> tuple[int, int]:
    """Return the strides of the axes batch and heads; 0 for an axis of size 1, which stands for all."""
    return (0 if t.shape[0] == 1 else t.stride(0)), (0 if t.shape[1] == 1 else t.stride(1))
