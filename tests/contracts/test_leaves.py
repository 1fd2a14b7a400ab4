"""Who gets a gradient, and gradients of tensors that are shared, expanded, not contiguous or infinite in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attlas
from attlas import Plan

TINY = {"batch": 1, "heads": 2, "key_heads": 1, "value_heads": 1, "value_size": 2}


def test_a_learned_additive_mask() -> None:
    bias = torch.randn(5, 6, dtype=torch.float64).masked_fill(torch.rand(5, 6) > 0.8, -torch.inf).requires_grad_()
    q, k, v = (torch.randn(1, 2, t, 3, dtype=torch.float64, requires_grad=True) for t in (5, 6, 6))
    slope = torch.randn(1, 2, 5, 3, dtype=torch.float64)
    wanted = torch.softmax(q @ k.mT / 3**0.5 + bias, -1) @ v
    wanted_gradients = torch.autograd.grad(wanted, (q, k, v, bias), slope)
    for plan in (Plan(), Plan("tiled", rows=2, columns=4)):
        found = attlas.attend(q, k, mask=bias, plan=plan) @ v
        torch.testing.assert_close(found, wanted)
        for a, b in zip(torch.autograd.grad(found, (q, k, v, bias), slope), wanted_gradients, strict=True):
            torch.testing.assert_close(a, b.nan_to_num())


def test_a_kernel_of_flat_top_has_gradient_zero(make: Any, sizes: Any) -> None:
    case = make("Boxcar", "none", sizes(6, 9, **TINY))
    found = torch.autograd.grad((case.matrix() @ case.v).square().sum(), (case.q, case.k))
    assert all(bool((g == 0).all()) for g in found)


@pytest.mark.parametrize("grad_of", ["q", "k", "v", "sink", "score", "nothing"])
@pytest.mark.parametrize("plan", [Plan(), Plan("tiled"), Plan("reference")], ids=["auto", "tiled", "reference"])
def test_only_what_asks_gets_a_gradient(grad_of: str, plan: Plan) -> None:
    tensors = {"q": torch.randn(1, 2, 5, 3), "k": torch.randn(1, 2, 7, 3), "v": torch.randn(1, 2, 7, 4)}
    tensors["sink"] = torch.randn(2)
    score = attlas.ScaledDot() + attlas.RelativeBias(2, 3)
    for p in score.parameters():
        p.requires_grad_(grad_of == "score")
    if grad_of in tensors:
        tensors[grad_of].requires_grad_()
    out = attlas.attend(tensors["q"], tensors["k"], score=score, sink=tensors["sink"], plan=plan) @ tensors["v"]
    assert out.requires_grad == (grad_of != "nothing")
    if grad_of == "nothing":
        return
    out.sum().backward()
    for name, t in tensors.items():
        assert (t.grad is not None) == (name == grad_of)
    assert (score.right.weight.grad is not None) == (grad_of == "score")


def test_gradients_add_up_over_uses() -> None:
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    A = attlas.attend(q, k)
    twice = torch.autograd.grad((A @ v + A @ v).sum(), (q, k, v), allow_unused=True)
    once = torch.autograd.grad((A @ v).sum(), (q, k, v), allow_unused=True)
    for a, b in zip(twice, once, strict=True):
        torch.testing.assert_close(a, 2 * b)


def test_one_tensor_as_query_key_and_value() -> None:
    x = torch.randn(1, 2, 6, 3, dtype=torch.float64, requires_grad=True)
    wanted = torch.softmax(x @ x.mT / 3**0.5, -1) @ x
    for plan in (Plan(), Plan("tiled", rows=2, columns=4)):
        found = attlas.attention(x, x, x, plan=plan)
        torch.testing.assert_close(found, wanted)
        a, b = (torch.autograd.grad(t.square().sum(), x, retain_graph=True)[0] for t in (found, wanted))
        torch.testing.assert_close(a, b)


def test_tensors_that_are_not_contiguous() -> None:
    base = torch.randn(2, 9, 4, 6, dtype=torch.float64, requires_grad=True)
    q, k, v = base.transpose(1, 2), base.transpose(1, 2)[..., ::2].repeat_interleave(2, -1), base.transpose(1, 2)
    wanted = torch.softmax(q @ k.mT / 6**0.5, -1) @ v
    slope = torch.randn(2, 9, 4, 6, dtype=torch.float64).transpose(1, 2)
    for plan in (Plan(), Plan("tiled", rows=2, columns=4)):
        found = attlas.attention(q, k, v, plan=plan)
        torch.testing.assert_close(found, wanted)
        a, b = (torch.autograd.grad(t, base, slope, retain_graph=True)[0] for t in (found, wanted))
        torch.testing.assert_close(a, b)
    expanded = torch.ones((), dtype=torch.float64).expand(2, 4, 9, 6)
    a, b = (torch.autograd.grad(t, base, expanded)[0] for t in (attlas.attention(q, k, v), wanted))
    torch.testing.assert_close(a, b)


def test_sizes_that_broadcast() -> None:
    """One set of queries for a batch of keys, and one set of values for all: their gradients are summed."""
    q = torch.randn(1, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 2, 7, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    wanted = torch.softmax(q @ k.repeat_interleave(2, 1).mT / 3**0.5, -1) @ v
    for plan in (Plan(), Plan("tiled", rows=2, columns=4)):
        found = attlas.attend(q, k, plan=plan) @ v
        torch.testing.assert_close(found, wanted)
        pairs = (torch.autograd.grad(t.square().sum(), (q, k, v), retain_graph=True) for t in (found, wanted))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b)
