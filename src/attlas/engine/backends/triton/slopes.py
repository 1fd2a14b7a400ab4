"""Gradients of scores that are no dot product, for some rows at a time.

The kernel of cells gives the logarithms of the weights of some rows, as many as the plan's memory holds. torch turns
these into the gradient of the loss in each score. Two passes of the kernel of units then sum it, for queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.backends.triton import launch, pairs
from attlas.engine.backends.triton.operands import Operands
from attlas.engine.backends.triton.pairs import Pairs
from attlas.engine.gradient import CellGradient
from attlas.engine.problem import spread_heads, sum_heads

#: Numbers of scratch memory for each cell of the rows: weights, their logarithms, slopes, and what torch needs.
_SCRATCH_PER_CELL = 6


class Found(NamedTuple):
    """Gradients of a loss in what the kernels read.

    Parameters
    ----------
    q, k : Tensor, shape (batch, heads, m, units) and (batch, key heads, n, units)
        In hidden units or coordinates.
    weights : Tensor, shape (units,)
        In the weights of hidden units, or the scales of coordinates.
    pooled : Tensor or None, shape (batch, heads, n, e)
        In the vectors of the columns.
    delta : Tensor, shape (batch, heads, m)
        Minus the gradient of the log-sum-exp.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    pooled: Tensor | None
    delta: Tensor


class _JoinedTokens(NamedTuple):
    """Tokens with their numbers side by side, and the largest hidden unit of each."""

    numbers: Tensor
    far: Tensor | None


def gradients(operands: Operands, lse: Tensor, gradient: CellGradient, budget: int) -> Found:
    """Return the gradients of a loss from its gradient in each cell, which has no functions of tiles.

    Parameters
    ----------
    of : Operands
        What is read.
    lse : Tensor, shape (batch, heads, m)
        The exact log-sum-exp.
    gradient : CellGradient
        Of the loss.
    budget : int
        Numbers of scratch memory.
    """
    own = operands.pairs
    if own is None:
        raise TypeError("the score is a dot product")
    batch, heads, m, n = operands.shape
    size, device = own.units, operands.q.device
    q, k = (_side_by_side(own, t, tokens) for t, tokens in ((own.q, m), (own.k, n)))
    d_q = torch.empty(batch, heads, m, size, dtype=torch.float32, device=device)
    d_k = torch.zeros(batch, heads, n, size, dtype=torch.float32, device=device)
    shares, total = (
        torch.zeros(size, dtype=torch.float64, device=device),
        torch.zeros((), dtype=torch.float32, device=device),
    )
    delta = torch.zeros(batch, heads, m, dtype=torch.float32, device=device)
    delta = delta if gradient.lse is None else delta - gradient.lse.float()
    left, right = gradient.left, gradient.right
    pooled = None if left is None else torch.zeros(batch, heads, n, left.shape[-1], dtype=torch.float32, device=device)
    some = max(budget // (_SCRATCH_PER_CELL * batch * heads * n), 1)
    for start in range(0, m, some):
        rows = slice(start, min(start + some, m))
        log = launch.cells(operands, range(rows.start, rows.stop), range(n), lse, log=True)
        weights = log.exp()
        slopes = torch.zeros_like(log)
        if left is not None and right is not None and pooled is not None:
            x = left[:, :, rows].float()
            torch.matmul(x, spread_heads(right, heads).float().mT, out=slopes)
            pooled += torch.matmul(weights.mT, x)
        _turn_into_slopes(gradient, rows, lse, log, weights, slopes, delta)
        _turn_into_those_of_distances(operands, rows, lse, log, slopes)
        slopes.masked_fill_(log == -torch.inf, 0.0)
        total += slopes.sum()
        own_rows = _JoinedTokens(q.numbers[:, :, rows], None if q.far is None else q.far[:, :, rows])
        found, parts = _sums_over_pairs(own, own_rows, k, slopes, by_query=True)
        d_q[:, :, rows] = found
        if parts is not None:
            shares += parts.double().sum((0, 1, 2))
        d_k += _sums_over_pairs(own, k, own_rows, slopes.mT, by_query=False)[0]
    d_k = sum_heads(d_k, own.k.shape[1])
    if own.kind == pairs.ADDITIVE:  # 1 - tanh² = 4 r (1 - r), and tanh = 1 - 2 r, where r is 1 / (1 + e)
        w = -2.0 * own.weights[:size]  # 4 times that of a unit
        return Found(d_q * w, d_k * w, (total.double() - 2.0 * shares).float(), pooled, delta)
    power = 1.0 if own.kind == pairs.LAPLACE else 2.0
    factor = power * own.weights
    return Found(d_q * factor, d_k * factor, (shares * power / own.weights.double()).float(), pooled, delta)


def _turn_into_slopes(
    gradient: CellGradient, rows: slice, lse: Tensor, log: Tensor, weights: Tensor, slopes: Tensor, delta: Tensor
) -> None:
    """Turn the product's term of the gradient in the weights into the gradient in the logits, in place."""

    def of_rows(t: Tensor) -> Tensor:
        return t[:, :, rows].float().unsqueeze(-1)

    if gradient.is_product:
        slopes.sub_(of_rows(gradient.product[2])).mul_(weights)
        delta[:, :, rows] = gradient.product[2][:, :, rows]
        return
    if gradient.log is not None:
        slopes.add_((log * of_rows(gradient.log)).masked_fill_(log == -torch.inf, 0.0))
    if gradient.square is not None:
        slopes.addcmul_(weights, of_rows(gradient.square))
    if gradient.row is not None:
        slopes.add_(of_rows(gradient.row))
    if gradient.column is not None:
        slopes.add_(gradient.column.float().unsqueeze(-2))
    delta[:, :, rows] += (weights * slopes).masked_fill_(log == -torch.inf, 0.0).sum(-1)
    slopes.sub_(of_rows(delta)).mul_(weights)
    if gradient.mean is not None and gradient.linear is not None and gradient.centre is not None:
        shift = (lse - gradient.centre.double()).nan_to_num(0.0, 0.0, 0.0)
        direct = (log + of_rows(shift)) * of_rows(gradient.linear) + of_rows(gradient.mean)
        slopes.add_(direct.masked_fill_(log == -torch.inf, 0.0))


def _turn_into_those_of_distances(operands: Operands, rows: slice, lse: Tensor, log: Tensor, slopes: Tensor) -> None:
    """Turn the gradient in the logits into that in the distances, of which they are a function, in place."""
    if operands.kind == pairs.GAUSSIAN:
        slopes.mul_(-0.5)
    elif operands.kind == pairs.LAPLACE:
        slopes.neg_()
    elif operands.kind == pairs.BOXCAR:
        slopes.zero_()
    elif operands.kind in (pairs.EPANECHNIKOV, pairs.TRIANGULAR):
        logits = log + lse[:, :, rows].nan_to_num(0.0, 0.0, 0.0).float().unsqueeze(-1)
        slopes.mul_(-torch.exp(-logits))  # one over the kernel itself
        if operands.kind == pairs.TRIANGULAR and operands.pairs is not None:
            plain = replace(
                operands, pairs=operands.pairs._replace(kind=pairs.GAUSSIAN), first=None, stop=None, more=()
            )
            _, _, _, n = operands.shape
            square = launch.cells(plain, range(rows.start, rows.stop), range(n), None) * -2.0
            slopes.mul_(torch.where(square > 0, 0.5 * square.rsqrt(), 0.0))


def _side_by_side(own: Pairs, t: Tensor, tokens: int) -> _JoinedTokens:
    """Return the numbers of each token side by side; those that are not finite count as 0, and their slopes are not."""
    width = 2 * own.units if own.kind == pairs.ADDITIVE else own.units
    numbers = t[..., :width, :tokens].mT.contiguous().nan_to_num(0.0, 0.0, 0.0)
    return _JoinedTokens(numbers, t[..., -1, :tokens].contiguous() if own.kind == pairs.ADDITIVE else None)


def _sums_over_pairs(
    own: Pairs, of: _JoinedTokens, other: _JoinedTokens, slopes: Tensor, *, by_query: bool
) -> tuple[Tensor, Tensor | None]:
    """Return sums over the pairs of each token of `of`, shape (batch, heads, tokens, units), and shares of queries."""
    batch, heads, tokens, others = slopes.shape
    found = torch.empty(batch, heads, tokens, own.units, dtype=torch.float32, device=slopes.device)
    shares = torch.empty_like(found) if by_query else None
    far: dict[str, Any] = {}
    for name, t in (("far", of.far), ("beyond", other.far)):
        far[f"{name}_batch"], far[f"{name}_head"] = (0, 0) if t is None else t.stride()[:2]
    launch.units(
        own,
        tokens,
        batch * heads,
        {
            "OWN": of.numbers,
            "OTHER": other.numbers,
            "WEIGHTS": None if own.kind == pairs.ADDITIVE else own.weights,
            "OWN_FAR": of.far,
            "OTHER_FAR": other.far,
            "SLOPES": slopes,
            "GRADIENT": found,
            "SHARES": shares,
            **{f"own_{axis}": s for axis, s in zip(("batch", "head"), of.numbers.stride(), strict=False)},
            **{f"other_{axis}": s for axis, s in zip(("batch", "head"), other.numbers.stride(), strict=False)},
            **far,
            "slope_pair": tokens * others,
            "slope_own": slopes.stride(2),
            "slope_other": slopes.stride(3),
            "own": tokens,
            "other": others,
            "heads": heads,
            "own_group": heads // of.numbers.shape[1],
            "other_group": heads // other.numbers.shape[1],
        },
    )
    return found, shares


def of_scale(scale: Tensor, d_scale: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the parameters that a scale was made from, with its graph."""
    if not parameters:
        return []
    return list(torch.autograd.grad(scale, list(parameters), d_scale.to(scale.dtype), allow_unused=True))
