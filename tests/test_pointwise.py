"""Sigmoid, ReLU and SiLU attention: a function of each logit by itself, lazy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import stats
from attlas.errors import DtypeError, ShapeError


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


M, N = 11, 14
FUNCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda s: torch.sigmoid(s - math.log(N)),
    "relu": lambda s: torch.relu(s) / N,
    "silu": lambda s: torch.nn.functional.silu(s) / N,
    attlas.Pointwise("silu", bias=0.5, divisor=2.0): lambda s: torch.nn.functional.silu(s + 0.5) / 2,
}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": attlas.Causal(-2),
    "a tensor of numbers": numbers(M, N, seed=4).masked_fill(numbers(M, N, seed=5) > 1, -math.inf),
}
READS: dict[str, Callable[[Any], Any]] = {
    "product": lambda A: A @ numbers(2, 2, N, 3, seed=6),
    "transposed product": lambda A: A.mT @ numbers(2, 4, M, 3, seed=7),
    "row": lambda A: A[:, 1, 3],
    "cells": lambda A: A[0, 1, 3:7, [2, 5]],
    "row mass": lambda A: A.sum(-1),
    "column mass": lambda A: A.sum(-2),
    "largest": lambda A: A.amax(-1),
    "squares": lambda A: A.square().sum(-2),
    "top": lambda A: A.topk(3).values,
    "difference": lambda A: (A - 0.5 * A.detach()).sum(-1),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_equal_the_dense_ones(function: Any, mask: str) -> None:
    q, k = numbers(2, 4, M, 6, seed=1).requires_grad_(), numbers(2, 2, N, 6, seed=2).requires_grad_()
    score = attlas.ScaledDot() + attlas.Alibi(4)
    A = attlas.attend(q, k, score, MASKS[mask], normalise=function)
    logits = attlas.attend(q, k, score, MASKS[mask]).logits.to_dense()
    dense = torch.where(logits == -math.inf, 0.0, FUNCTIONS[function](logits.masked_fill(logits == -math.inf, 0.0)))
    torch.testing.assert_close(A.to_dense(), dense)
    for name, read in READS.items():
        v = numbers(2, 2, N, 3, seed=6).repeat_interleave(2, 1)
        found, wanted = read(A), dense @ v if name == "product" else read(dense)
        torch.testing.assert_close(found, wanted)
        slope = numbers(*wanted.shape, seed=8)
        pairs = zip(*(torch.autograd.grad(t, (q, k), slope, retain_graph=True) for t in (found, wanted)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b)
    assert A.check() < 1e-12
    part = A.window(slice(2, 9), slice(1, 7))
    torch.testing.assert_close(part.to_dense(), dense[:, :, 2:9, 1:7])
    torch.testing.assert_close((part @ numbers(6, 2)).sum(-2), (dense[:, :, 2:9, 1:7] @ numbers(6, 2)).sum(-2))


def test_values_dropout_and_16_bits() -> None:
    q, k, v = numbers(2, 4, M, 6), numbers(2, 2, N, 6), numbers(2, 2, N, 3).requires_grad_()
    A = attlas.attend(q, k, normalise="sigmoid")
    (A @ v).square().sum().backward()
    dense = A.to_dense()
    (wanted,) = torch.autograd.grad((dense @ v.repeat_interleave(2, 1)).square().sum(), v)
    torch.testing.assert_close(v.grad, wanted)
    torch.manual_seed(0)
    eye = torch.eye(N, dtype=torch.float64).requires_grad_()
    dropped = attlas.attention(q, k, eye, dropout_p=0.5, normalise="sigmoid")
    kept = dropped.detach() != 0
    torch.testing.assert_close(dropped, torch.where(kept, 2 * dense, 0.0))
    (slope,) = torch.autograd.grad(dropped.sum(), eye)
    torch.testing.assert_close(slope, torch.where(kept, 2 * dense, 0.0).sum((0, 1, 2)).unsqueeze(-1).expand(N, N))
    half = attlas.attend(q.bfloat16(), k.bfloat16(), normalise="relu")
    assert (half @ v.detach().bfloat16()).dtype is torch.bfloat16
    assert half.dtype is torch.float32


def test_what_needs_a_softmax_is_refused_by_name() -> None:
    A = attlas.attend(numbers(M, 4), numbers(N, 4), normalise="sigmoid")
    assert "sigmoid(bias=" in repr(A)
    with pytest.raises(ShapeError, match=r"Entropy\(\): weights must be shares"):
        stats.entropy(A)
    with pytest.raises(DtypeError, match="these weights are none"):
        A.lse  # noqa: B018
    torch.testing.assert_close(A.logits[2], attlas.attend(numbers(M, 4), numbers(N, 4)).logits[2])
    assert stats.tail_mass(A, 2).shape == (M,)  # no weight is negative
    with pytest.raises(ShapeError, match=r"TailMass\(\): weights must be shares"):
        stats.tail_mass(attlas.attend(numbers(M, 4), numbers(N, 4), normalise="silu"), 2)
    with pytest.raises(ShapeError, match="normalise must be"):
        attlas.attend(numbers(M, 4), numbers(N, 4), normalise="tanh")  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"normalise must be a name or an attlas\.Pointwise"):
        attlas.attend(numbers(M, 4), numbers(N, 4), normalise=3)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="a sink is one more logit of a softmax"):
        attlas.attend(numbers(2, M, 4), numbers(2, N, 4), sink=numbers(1), normalise="relu")
    with pytest.raises(ShapeError, match=r"Pointwise\(\): divisor must be above 0"):
        attlas.Pointwise("relu", divisor=0.0)
    with pytest.raises(DtypeError, match=r"Pointwise\(\): bias must be a number"):
        attlas.Pointwise("relu", bias="1")  # type: ignore[arg-type]


def test_it_is_in_linear_memory() -> None:
    n = 20_000
    q = torch.randn(1, 1, n, 4)
    A = attlas.attend(q, q, mask=attlas.Causal(), normalise="sigmoid")
    rows = A[0, 0, [5, n - 1]]
    logits = (q[0, 0, [5, n - 1]] @ q[0, 0].mT / 2).masked_fill(
        torch.arange(n) > torch.tensor([[5], [n - 1]]), -math.inf
    )
    torch.testing.assert_close(rows, torch.sigmoid(logits - math.log(n)))
    torch.testing.assert_close((A @ q)[0, 0, -1], rows[1] @ q[0, 0], atol=1e-5, rtol=1e-4)
