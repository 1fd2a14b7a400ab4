"""Additive and bilinear scores against their formula in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.messages import refusal

import attlas.scores.additive as additive
from attlas.errors import ShapeError
from attlas.scores import Additive, Bilinear


def array(t):
    return t.detach().double().numpy()


def tokens(dq=5, dk=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 7, dq, generator=g, dtype=dtype)
    return q, torch.randn(2, 2, 11, dk, generator=g, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [1, 1 << 17])
def test_additive_formula(bias, block, logits, monkeypatch):
    monkeypatch.setitem(additive._UNIT_CELLS_AT_ONCE, "cpu", block)
    score = Additive(5, 3, 6, bias=bias)
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        score = score.to(dtype)
        q, k = tokens(dtype=dtype)
        hidden_q = array(q) @ array(score.W_q.weight).T + (array(score.W_q.bias) if bias else 0.0)
        hidden_k = (array(k) @ array(score.W_k.weight).T).repeat(2, axis=1)
        expected = np.tanh(hidden_q[..., :, None, :] + hidden_k[..., None, :, :]) @ array(score.w_v)
        torch.testing.assert_close(logits(score, q, k).double(), torch.from_numpy(expected), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("block", [1, 1 << 17])
def test_additive_gradients(block, logits, monkeypatch):
    monkeypatch.setitem(additive._UNIT_CELLS_AT_ONCE, "cpu", block)
    score = Additive(2, 3, 4, bias=True).double()
    q, k = tokens(2, 3)
    q, k = q[:1, :, :3].requires_grad_(), k[:1, :, :4].requires_grad_()
    parameters = list(score.parameters())
    assert [name for name, _ in score.named_parameters()] == ["w_v", "W_q.weight", "W_q.bias", "W_k.weight"]
    assert torch.autograd.gradcheck(lambda q, k, *_: logits(score, q, k), (q, k, *parameters))


def test_additive_saturates_without_overflow(logits):
    score = Additive(2, 2, 3)
    q = torch.tensor([[[[1e30, 1e30], [-1e4, 1e4]]]], requires_grad=True)
    k = torch.tensor([[[[0.0, 0.0], [-1e30, 1e30]]]], requires_grad=True)
    out = logits(score, q, k)
    assert out.isfinite().all()
    assert out.abs().max() <= score.w_v.abs().sum() + 1e-6
    for grad in torch.autograd.grad(out.sum(), (q, k)):
        assert grad.isfinite().all()


def test_additive_runs_in_the_dtype_of_the_tokens(logits):
    q, k = tokens(dtype=torch.float32)
    assert logits(Additive(5, 3, 4).bfloat16(), q, k).dtype is torch.float32
    assert logits(Bilinear(5, 3).double(), q, k).dtype is torch.float32


@pytest.mark.parametrize(("dq", "dk"), [(5, 3), (3, 5), (4, 4)])
def test_bilinear_projects_to_the_smaller_size(dq, dk):
    assert [t.shape[-1] for t in Bilinear(dq, dk).double().project(*tokens(dq, dk))] == [min(dq, dk)] * 2


def test_bilinear_starts_at_unit_variance(logits):
    torch.manual_seed(0)
    out = logits(Bilinear(64, 32), torch.randn(1, 1, 100, 64), torch.randn(1, 1, 100, 32))
    assert 0.8 < out.var().item() < 1.25


def test_repr():
    assert repr(Additive(5, 3, 4)).startswith("Additive(\n  query_size=5, key_size=3, hidden_size=4\n")
    assert repr(Bilinear(5, 3, scale=2)) == "Bilinear(query_size=5, key_size=3, scale=2.0)"


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_message_size(size):
    assert refusal(ShapeError, lambda: Additive(2, 3, size)) == (f"Additive(): hidden_size = {size!r}")
    assert refusal(ShapeError, lambda: Bilinear(2, size)) == (f"Bilinear(): key_size = {size!r}")


def test_message_scale():
    assert refusal(ShapeError, lambda: Bilinear(2, 3, scale=math.nan)) == "Bilinear(): scale = nan"


def test_message_tokens():
    q, k = torch.ones(5, 4), torch.ones(7, 3)
    assert refusal(ShapeError, lambda: Additive(5, 3, 8).check(q, k, 1)) == "attend(): 4 in q, 3 in k"
    assert refusal(ShapeError, lambda: Bilinear(5, 3).check(q, k, 1)) == "attend(): 4 in q, 3 in k"
