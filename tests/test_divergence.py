"""Divergences of two matrices: values and gradients in both equal the formulas, written out whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import Plan
from attlas.engine.backends import reference

KINDS = ("kl", "cross_entropy", "squared", "squared_logits")


def formula(kind: str, A: Any, B: Any, heads: str) -> Tensor:
    """Return the divergence of the definitions; of infinite rows, nan."""
    (s, _, p), (z, _, q) = (reference.dense(M.problem) for M in (A, B))
    if kind == "squared_logits":
        seen = (s > -math.inf) & (z > -math.inf)
        return (torch.where(seen, s, 0.0) - torch.where(seen, z, 0.0)).square().sum(-1)
    if heads == "mean":
        p, q = p.mean(1), q.mean(1)
    if kind == "squared":
        return (p - q).square().sum(-1)
    some, seen = p > 0, q > 0
    logs = torch.where(some, p, 1.0).log() if kind == "kl" else 0.0
    found = torch.where(some, p * (logs - torch.where(seen, q, 1.0).log()), 0.0).sum(-1)
    return torch.where((some & ~seen).any(-1), math.inf, found)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def mean_score() -> attlas.Score:
    return attlas.Additive(5, 5, 3).double()


PAIRS: dict[str, Any] = {
    "dots": (lambda: None, None, None, False),
    "another score": (mean_score, None, None, False),
    "causal": (lambda: None, attlas.Causal(-2), attlas.Causal(-2), False),
    "a window in all": (lambda: attlas.SoftCap(attlas.ScaledDot(), 2.0), attlas.Window(3, 0), attlas.Causal(), False),
    "all in a window": (lambda: None, None, attlas.Causal(), False),
    "sinks": (lambda: None, attlas.Causal(), attlas.Causal(), True),
    "distances": (lambda: attlas.Gaussian(1.0), attlas.Causal(), None, True),
    "holes": (lambda: attlas.Gaussian(2.0), None, attlas.from_function(lambda b, h, i, j: (i + j) % 3 > 0), False),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", ["each", "mean"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("plan", [Plan(), Plan("tiled", rows=3, columns=4)], ids=["auto", "tiled"])
def test_values_and_gradients(kind: Any, heads: Any, pair: str, plan: Plan) -> None:
    if kind == "squared_logits" and heads == "mean":
        pytest.skip("logits of heads have no mean here")
    make, first, second, with_sink = PAIRS[pair]
    score = make()
    own = 4 if heads == "each" else 2
    q, k, u, w = leaf(2, 4, 7, 6), leaf(2, 2, 9, 6), leaf(2, own, 7, 5), leaf(2, 1, 9, 5)
    sinks = [leaf(4), leaf(own)] if with_sink else [None, None]
    A = attlas.attend(q, k, mask=first, sink=sinks[0], plan=plan)
    B = attlas.attend(u, w, score=score, mask=second, sink=sinks[1], plan=plan)
    leaves = [q, k, u, w, *(t for t in sinks if t is not None), *(score.parameters() if score else [])]
    found, wanted = attlas.divergence(A, B, kind, heads), formula(kind, A, B, heads)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    finite = wanted.isfinite()
    assert bool(finite.all()) is (pair not in ("all in a window", "holes") or "squared" in kind)
    if not bool(finite.any()):
        return
    slope = torch.randn_like(found)
    exact = torch.autograd.grad((wanted * slope)[finite].sum(), leaves, allow_unused=True)
    for name, one, other in zip(
        "qkuwabcdef", torch.autograd.grad((found * slope)[finite].sum(), leaves), exact, strict=False
    ):
        torch.testing.assert_close(
            one, torch.zeros_like(one) if other is None else other.nan_to_num(), rtol=1e-9, atol=1e-9, msg=name
        )


def test_the_same_matrix_and_half_precision() -> None:
    q, k = (torch.randn(2, 3, 40, 16).bfloat16() for _ in range(2))
    A = attlas.attend(q, k, mask=attlas.Causal())
    for heads in ("each", "mean"):
        assert float(attlas.divergence(A, A, heads=heads).abs().max()) < 1e-4
    torch.testing.assert_close(attlas.divergence(A, A, "cross_entropy"), attlas.stats.entropy(A), atol=1e-4, rtol=1e-4)


def test_only_what_asks_gets_a_gradient() -> None:
    q, u = leaf(2, 5, 4), leaf(2, 5, 4)
    A, B = attlas.attend(q, q), attlas.attend(u, u, score=attlas.SoftCap(attlas.ScaledDot(), 3.0))
    attlas.divergence(A.detach(), B).sum().backward()
    assert q.grad is None
    assert float(u.grad.abs().max()) > 0
    with torch.no_grad():
        assert not attlas.divergence(A, B).requires_grad


def test_transforms_take_the_definition() -> None:
    q, u = torch.randn(2, 5, 4, dtype=torch.float64), leaf(2, 5, 4)

    def loss(u: Tensor) -> Tensor:
        return attlas.divergence(attlas.attend(q, q), attlas.attend(u, u)).sum()

    torch.testing.assert_close(torch.func.grad(loss)(u.detach()), torch.autograd.grad(loss(u), u)[0])


def test_a_second_derivative_of_tiles_is_refused() -> None:
    u = leaf(2, 5, 4)
    A = attlas.attend(u, u)
    (g,) = torch.autograd.grad(attlas.divergence(A, attlas.attend(2 * u, u)).sum(), u, create_graph=True)
    g.sum().backward()  # of products there is one
    with pytest.raises(attlas.GradientError, match="no second derivative"):
        torch.autograd.grad(attlas.divergence(A, A, "squared").sum(), u, create_graph=True)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda A: attlas.divergence(A.to_dense(), A), "A and B must be attention matrices"),
        (lambda A: attlas.divergence(A, A, kind="js"), "kind must be one of 'kl'"),
        (lambda A: attlas.divergence(A, A, heads="all"), "heads must be one of 'each'"),
        (lambda A: attlas.divergence(A, A[:1]), "must have the same shape"),
        (lambda A: attlas.divergence(A[0], A[0], heads="mean"), "heads='mean' compares"),
        (lambda A: attlas.divergence(A, A, "squared_logits", "mean"), "heads='mean' compares"),
    ],
)
def test_messages(call: Any, text: str) -> None:
    with pytest.raises(attlas.AttlasError, match=text):
        call(attlas.attend(torch.zeros(2, 4, 3), torch.zeros(2, 5, 3)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(2, 3), (3, 2), (1, 6)])
def test_heads_share_keys_in_other_groups(kind: Any, heads: tuple[int, int]) -> None:
    # Tiles of three of the six heads: a whole group of one matrix, and a part of a group of the other.
    plan = Plan("tiled", cells=5000)
    tokens = [torch.randn(1, count, 20, 4, dtype=torch.float64) for count in (6, heads[0], 6, heads[1])]
    A, B = attlas.attend(*tokens[:2], plan=plan), attlas.attend(*tokens[2:], score=attlas.Gaussian(2.0), plan=plan)
    torch.testing.assert_close(attlas.divergence(A, B, kind), formula(kind, A, B, "each"))
