"""torch's CUDA kernels for attention, computed on the CPU by the definition: the same operators, conditions, layouts.

They stand behind torch's own operators, so that the arguments are checked against torch's own schema, and gradients
flow by torch's own rules. ``with pretended(names) as device`` makes tensors of a `PretendDevice` take them; names that
are left out are refused, as ``torch.backends.cuda.enable_...`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from tests.pretend import PretendDevice
from torch import Tensor
from torch.nn.attention import SDPBackend

from attlas.engine import fused

FLASH, EFFICIENT, CUDNN = (kernel.choice for kernel in fused.KERNELS)
ALL = (FLASH, EFFICIENT, CUDNN)
NAMES = {FLASH: "flash", EFFICIENT: "efficient", CUDNN: "cudnn"}
HALF = (torch.float16, torch.bfloat16)


def takes(choice: SDPBackend, given: Any) -> bool:
    """Return what torch answers on a GPU of compute capability 8.0 and newer (sdp_utils.cpp, torch 2.8 to 2.13)."""
    q, k, v = given.query, given.key, given.value
    d, e = q.shape[-1], v.shape[-1]
    if not q.dtype == k.dtype == v.dtype or any(t.stride(-1) != 1 for t in (q, k, v)):
        return False
    if k.shape[1] != v.shape[1] or (q.shape[1] != k.shape[1] and not given.enable_gqa):
        return False
    if choice is EFFICIENT:
        least = 8 if q.dtype in HALF else 4
        return q.dtype in (*HALF, torch.float32) and q.shape[1] == k.shape[1] and d % least == e % least == 0
    if given.is_causal and q.shape[2] != k.shape[2]:
        return False
    return q.dtype in HALF and d == e and d % 8 == 0 and d <= (256 if choice is FLASH else 128)


def wide(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return tensors in float64, with a head for each query head."""
    return [t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in tensors]


def logits_of(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Return logits in float64, by the definition."""
    logits = q @ k.mT * scale
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf) if causal else logits


class Kernels:
    """Operators of CUDA for CPU tensors.

    Attributes
    ----------
    taken : list of str
        The kernels that ran.
    """

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        for name in NAMES.values():
            operator = f"_scaled_dot_product_{name}_attention"
            self.library.impl(operator, getattr(self, name))
            self.library.impl(f"{operator}_backward", getattr(self, f"{name}_backward"))

    def run(self, name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self.taken.append(name)
        left, right, values = wide(q, q, k, v)
        logits = logits_of(left, right, causal, scale)
        return (logits.softmax(-1) @ values).to(q.dtype), logits.logsumexp(-1).float()

    def gradients(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
        left, right, values, grad = wide(q, q, k, v, grad)
        weights = logits_of(left, right, causal, scale).softmax(-1)
        slope = grad @ values.mT
        slope = weights * (slope - (weights * slope).sum(-1, keepdim=True)) * scale
        found = slope @ right, slope.mT @ left, weights.mT @ grad
        shares = (t.unflatten(1, (own.shape[1], -1)).sum(2) for t, own in zip(found, (q, k, v), strict=True))
        return tuple(t.to(q.dtype) for t in shares)

    def flash(self, q, k, v, p=0.0, causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
        none = torch.zeros(0)
        return *self.run("flash", q, k, v, causal, scale), none, none, q.shape[2], k.shape[2], none, none, none

    def flash_backward(self, grad, q, k, v, out, lse, cq, ck, m, n, p, causal, seed, at, *, scale=None):  # type: ignore[no-untyped-def]
        return self.gradients(grad, q, k, v, causal, scale)

    def efficient(self, q, k, v, bias, with_lse, p=0.0, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
        out, lse = self.run("efficient", q, k, v, causal, scale)
        rows = -(-q.shape[2] // 32) * 32 if with_lse else 0
        full = lse.new_full((*lse.shape[:2], rows), torch.nan)
        full[..., : q.shape[2]] = lse
        return out, full, torch.zeros(()), torch.zeros(())

    def efficient_backward(self, grad, q, k, v, bias, out, lse, seed, at, p, wanted, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
        return *self.gradients(grad, q, k, v, causal, scale), torch.zeros(0)

    def cudnn(self, q, k, v, bias, with_lse, p=0.0, causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
        out, lse = self.run("cudnn", q, k, v, causal, scale)
        none = torch.zeros(0)
        return out, lse.unsqueeze(-1), none, none, q.shape[2], k.shape[2], none, none, none

    def cudnn_backward(self, grad, q, k, v, out, lse, seed, at, bias, cq, ck, m, n, p, causal, *, scale=None):  # type: ignore[no-untyped-def]
        return self.gradients(grad, q, k, v, causal, scale)


@contextlib.contextmanager
def pretended(allowed: Collection[SDPBackend] = ALL) -> Iterator[tuple[PretendDevice, Kernels]]:
    """Pretend a GPU whose kernels are computed here, those that are allowed."""
    kernels, device = Kernels(), PretendDevice("cuda")
    own = [
        kernel._replace(takes=lambda given, choice=kernel.choice: choice in allowed and takes(choice, given))
        for kernel in fused.KERNELS
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "KERNELS", tuple(own))
        try:
            with device:
                yield device, kernels
        finally:
            kernels.library._destroy()
