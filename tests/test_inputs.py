"""The entry: every layout of q, k and v is brought to (batch, heads, tokens, size), and means what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attlas


def softmax_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the formula with torch's own broadcasting; heads that are grouped are repeated first."""

    def repeated(t: Tensor) -> Tensor:
        grouped = q.ndim >= 4 and t.ndim >= 3 and 1 < t.shape[-3] < q.shape[-3]
        return t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) if grouped else t

    return torch.softmax(q @ repeated(k).mT / q.shape[-1] ** 0.5, -1) @ repeated(v)


LAYOUTS = {
    "tokens alone": ((5, 4), (7, 4), (7, 3)),
    "a batch": ((2, 5, 4), (2, 7, 4), (2, 7, 3)),
    "a batch of queries, one set of keys": ((2, 5, 4), (7, 4), (7, 3)),
    "one set of queries, a batch of keys": ((5, 4), (2, 7, 4), (2, 7, 3)),
    "one set of values": ((2, 5, 4), (2, 7, 4), (7, 3)),
    "batch and heads": ((2, 6, 5, 4), (2, 6, 7, 4), (2, 6, 7, 3)),
    "grouped heads": ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 3)),
    "one key head": ((2, 6, 5, 4), (2, 1, 7, 4), (2, 1, 7, 3)),
    "value heads of their own": ((2, 6, 5, 4), (2, 3, 7, 4), (2, 2, 7, 3)),
    "one query head, many key heads": ((2, 1, 5, 4), (2, 3, 7, 4), (2, 3, 7, 3)),
    "a batch of queries over one batch of keys": ((2, 6, 5, 4), (1, 6, 7, 4), (1, 6, 7, 3)),
    "one batch of queries over a batch of keys": ((1, 6, 5, 4), (2, 6, 7, 4), (2, 6, 7, 3)),
    "values for heads, not for the batch": ((2, 6, 5, 4), (2, 6, 7, 4), (6, 7, 3)),
    "two batch axes": ((3, 2, 6, 5, 4), (3, 2, 3, 7, 4), (3, 2, 3, 7, 3)),
    "two batch axes that broadcast": ((3, 1, 6, 5, 4), (1, 2, 6, 7, 4), (7, 3)),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts(name: str) -> None:
    q, k, v = (torch.randn(s, dtype=torch.float64) for s in LAYOUTS[name])
    wanted = softmax_product(q, k, v)
    A = attlas.attend(q, k)
    assert A.shape == (*wanted.shape[:-1], k.shape[-2])
    torch.testing.assert_close(A @ v, wanted)
    torch.testing.assert_close(attlas.attention(q, k, v), wanted)
    vector = torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(A @ vector, A.to_dense() @ vector)
    torch.testing.assert_close(A.mT @ wanted, A.to_dense().mT @ wanted)
    assert A.mT.shape == (*A.shape[:-2], A.shape[-1], A.shape[-2])
    assert A.mT.mT is A


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_sink_for_all_heads_gets_its_gradient(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 6, 5, 4, dtype=torch.float64) for _ in range(3))
    one = torch.full(shape, 0.5, dtype=torch.float64, requires_grad=True)
    each = torch.full((6,), 0.5, dtype=torch.float64, requires_grad=True)
    a, b = (torch.autograd.grad(attlas.attention(q, k, v, sink=s).square().sum(), s)[0] for s in (one, each))
    torch.testing.assert_close(a.squeeze(), b.sum())
    assert attlas.attend(q, k, sink=one).sink.shape == (6,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_floating_dtype(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, t, 4).to(dtype) for t in (5, 7, 7))
    A = attlas.attend(q, k)
    accumulated = torch.float64 if dtype is torch.float64 else torch.float32
    assert (A @ v).dtype is (A.mT @ q).dtype is dtype
    assert A.dtype is A.lse.dtype is A[0, 0, 0].dtype is A.to_dense().dtype is accumulated
    assert A.device == q.device
    assert A.ndim == 4
