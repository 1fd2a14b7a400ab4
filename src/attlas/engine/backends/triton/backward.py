"""Gradients of statistics and products of dot products, given the log-sum-exp: one pass by queries, one by keys.

A third one comes before them where a statistic looks at columns: the mean of what the loss wants of each column.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.backends.triton import launch
from attlas.engine.backends.triton.operands import LN2, MOST, Operands, padded
from attlas.engine.gradient import CellGradient
from attlas.engine.problem import sum_heads

_ROW_TERMS = ("log", "square", "mean", "linear", "centre")


class Found(NamedTuple):
    """Gradients of a loss.

    Parameters
    ----------
    q, k : Tensor, shape (batch, heads, m, d) and (batch, key heads, n, d)
        In the tokens of the dot product.
    pooled : Tensor or None, shape (batch, heads, n, e)
        In the vectors of the columns.
    delta : Tensor, shape (batch, heads, m)
        Minus the gradient of the log-sum-exp.
    """

    q: Tensor
    k: Tensor
    pooled: Tensor | None
    delta: Tensor


def takes(operands: Operands, gradient: CellGradient) -> bool:
    """Return whether the kernels find the gradients of a loss from its gradient in each cell."""
    left, right = gradient.left, gradient.right
    return gradient.is_closed and (left is None or (right is not None and left.shape[-1] <= MOST))


def gradients(operands: Operands, lse: Tensor, gradient: CellGradient) -> Found:
    """Return the gradients of a loss from its gradient in each cell.

    Parameters
    ----------
    operands : Operands
        What is read.
    lse : Tensor, shape (batch, heads, m)
        The exact log-sum-exp, without the constant of each row.
    gradient : CellGradient
        Of the loss; `takes` comes first.
    """
    batch, heads, m, n = operands.shape
    pairs, device = batch * heads, operands.q.device
    delta = torch.zeros(batch, heads, m, dtype=torch.float32, device=device)
    delta = delta if gradient.delta is None else delta + gradient.delta.float()
    delta = delta if gradient.lse is None else delta - gradient.lse.float()
    if gradient.column is not None:
        column = gradient.column.float().unsqueeze(-1).contiguous()
        delta = delta + launch.online(operands, (), column, 0).results["out"].squeeze(-1)
    wanted = delta
    if gradient.row is not None and operands.sink is not None:
        # What is the same in each weight of a row counts only beside the weight of the sink.
        share = torch.exp(operands.sink.view(1, -1, 1) * LN2 - lse)
        share = torch.where(lse == -math.inf, 0.0, share).float()
        wanted, delta = delta + gradient.row.float() * (1.0 - share), delta - gradient.row.float() * share
    arguments = _common_arguments(operands, lse, gradient, delta)
    e = 0 if arguments["LEFT"] is None else arguments["VALUES"]
    size = operands.size
    d_q = torch.empty(batch, heads, m, size, dtype=torch.float32, device=device)
    d_k = torch.empty(batch, heads, n, size, dtype=torch.float32, device=device)
    pooled = None if not e else torch.empty(batch, heads, n, e, dtype=torch.float32, device=device)
    for number, own in enumerate(operands.each()):
        into = [None if t is None else torch.empty_like(t) if number else t for t in (d_q, d_k, pooled)]
        launch.gradients("by_query", own, pairs, e, arguments | {"GRADIENT": into[0]})
        launch.gradients("by_key", own, pairs, e, arguments | {"GRADIENT": into[1], "POOLED": into[2]})
        for total, t in zip((d_q, d_k, pooled), into, strict=True):
            if number and total is not None and t is not None:
                total += t
    return Found(d_q, sum_heads(d_k, operands.k.shape[1]), pooled, wanted)


def _common_arguments(operands: Operands, lse: Tensor, gradient: CellGradient, delta: Tensor) -> dict[str, Any]:
    """Return what both kernels take besides the operands and their results."""
    rows: dict[str, Tensor | None] = {name: getattr(gradient, name) for name in _ROW_TERMS}
    if rows["centre"] is not None and operands.row is not None:
        rows["centre"] = rows["centre"] - operands.row
    given = {name.upper(): None if t is None else t.float().contiguous() for name, t in rows.items()}
    given["LOGS"] = given.pop("LOG")
    given["COLUMN"] = None if gradient.column is None else gradient.column.float().contiguous()
    high, low = launch.in_base_2(lse)
    heads = operands.shape[1]
    arguments: dict[str, Any] = {**given, "LSE": high, "LOWS": low, "DELTA": delta.contiguous()}
    e, left, right = 0, None, None
    if gradient.left is not None and gradient.right is not None:
        # Vectors of 16 bits are multiplied as such, and float32 without rounding.
        same = gradient.left.dtype is gradient.right.dtype is operands.q.dtype
        dtype = operands.q.dtype if same else torch.float32
        left, right = (_with_last_axis_dense(t.to(dtype)) for t in (gradient.left, gradient.right))
        e = left.shape[-1]
    arguments |= {"LEFT": left, "RIGHT": right, "VALUES": max(e, 1), "E": padded(max(e, 1))}
    arguments["values_group"] = 1 if right is None else heads // right.shape[1]
    for name, t in (("left", left), ("right", right)):
        strides = (0, 0, 0) if t is None else t.stride()
        arguments |= {f"{name}_{axis}": s for axis, s in zip(("batch", "head", "row"), strides, strict=False)}
    # `rate` is twice the factor over the cap, and `scale2` the cap.
    arguments["scale"] = (0.5 * operands.rate * operands.scale2 * LN2 if operands.cap else operands.scale2) * LN2
    return arguments


def _with_last_axis_dense(t: Tensor) -> Tensor:
    """Return a tensor whose last axis has stride 1: itself or a copy."""
    return t if t.stride(-1) == 1 else t.contiguous()
