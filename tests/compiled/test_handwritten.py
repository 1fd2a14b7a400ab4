"""Code of a compiler computes attention that is written out by hand as before, inside of a block of lazily(), too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attlas


class Attention(nn.Module):
    """Attention in all the ways to multiply."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / 2 + q @ k.transpose(-2, -1)
        weights = torch.softmax(scores.masked_fill(scores > 1.0, -torch.inf), dim=-1)
        return torch.einsum("bhij,bhjd->bhid", weights, v) + nn.functional.softmax(scores, dim=-1).matmul(v)


@pytest.mark.parametrize("inside", [True, False])
def test_it_equals_the_model(inside: bool) -> None:
    model = Attention()
    q, k, v = (torch.randn(2, 3, 9, 4, requires_grad=True) for _ in range(3))
    wanted = model(q, k, v)
    compiled = torch.compile(model, backend="eager")
    if not inside:
        compiled(q, k, v)  # a program that is there before
    with attlas.lazily(model):
        found = compiled(q, k, v)
        (grad,) = torch.autograd.grad(found.square().sum(), q)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.square().sum(), q)[0])
    torch.testing.assert_close(compiled(q, k, v), wanted)
