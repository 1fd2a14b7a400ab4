"""Distances between queries and keys, and the unit they are measured in: what every kernel is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.autodiff import recorded_gradients
from attlas.errors import DtypeError, ShapeError, kind
from attlas.inputs import as_floats, as_plain
from attlas.tiles import cut

# Cells that the loop over coordinates holds at once: three tensors of this size stay in a core's cache.
_CELLS = 1 << 16


class Distance(torch.autograd.Function):
    """``Σ_c |scale_c (q_ic - k_jc)|^power`` without a (rows, columns, d) tensor, forward or backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(q, k, scale)
        ctx.power = power
        q, k = q.mT.contiguous(), k.mT.contiguous()  # one coordinate of all tokens lies together
        total = q.new_zeros(*q.shape[:-2], q.shape[-1], k.shape[-1])
        for rows in _bands(q, k):
            part = total[..., rows.start : rows.stop, :]
            for c in range(q.shape[-2]):
                gap = _gap(q, k, scale, rows, c)
                if power == 2:
                    part.addcmul_(gap, gap)
                else:
                    part.add_(gap.abs_())
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            gaps = (q.unsqueeze(-2) - k.unsqueeze(-3)) * scale
            powers = gaps.square() if ctx.power == 2 else gaps.abs()
            return *recorded_gradients(powers.sum(-1), (q, k, scale), grad), None
        q, k = q.mT.contiguous(), k.mT.contiguous()
        grad_q, grad_k, grad_scale = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(scale)
        for rows in _bands(q, k):
            above = grad[..., rows.start : rows.stop, :]
            for c in range(q.shape[-2]):
                gap = _gap(q, k, scale, rows, c)
                slope = above * gap if ctx.power == 2 else above * gap.sign()
                grad_q[..., c, rows.start : rows.stop] = slope.sum(-1)
                grad_k[..., c, :] -= slope.sum(-2)
                if ctx.needs_input_grad[2]:
                    grad_scale[c] += torch.dot(slope.flatten(), gap.flatten())
        factor = scale * ctx.power
        return grad_q.mT * factor, grad_k.mT * factor, grad_scale * (ctx.power / scale), None


def _bands(q: Tensor, k: Tensor) -> list[range]:
    # On an accelerator a launch costs more than a cache miss: one band.
    cells = _CELLS if q.device.type == "cpu" else 1 << 62
    columns = max(1, k.shape[:-2].numel() * k.shape[-1])
    return list(cut(q.shape[-1], max(1, cells // columns)))


def _gap(q: Tensor, k: Tensor, scale: Tensor, rows: range, c: int) -> Tensor:
    gap = q[..., c, rows.start : rows.stop].unsqueeze(-1) - k[..., c, :].unsqueeze(-2)
    return gap.mul_(scale[c])


def checked_bandwidth(where: str, bandwidth: object) -> Tensor:
    """Return the bandwidth as a tensor, or raise."""
    value = as_plain(where, "bandwidth", as_floats(bandwidth))
    if not value.is_floating_point():
        rule = "bandwidth must be a number, a sequence of numbers or a floating-point tensor."
        found = f"a {str(value.dtype).removeprefix('torch.')} tensor" if value is bandwidth else kind(bandwidth)
        fix = "give a float, such as bandwidth=1.0, or tensor.float()."
        raise DtypeError(where, rule, {"bandwidth": bandwidth}, found=found, fix=fix)
    if value.ndim > 1 or not value.numel():
        rule = "bandwidth must be one number, or one for each coordinate of q and k."
        found = f"{value.ndim} axes, {value.numel()} numbers"
        fix = "give a scalar, or a tensor of shape (d,)."
        raise ShapeError(where, rule, {"bandwidth": value}, found=found, fix=fix)
    bad = ~(value.detach().isfinite() & (value.detach() > 0))
    if bad.any():
        rule = "every bandwidth must be a finite number above 0."
        fix = "give the distance at which a weight should have fallen, such as bandwidth=1.0."
        raise ShapeError(where, rule, found=f"bandwidth = {value.detach()[bad][0].item()!r}", fix=fix)
    return value
