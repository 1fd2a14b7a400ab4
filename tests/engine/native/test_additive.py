"""The additive score as reciprocals: every instruction set gives what the reference gives, and its guard holds."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.native.conftest import (
    MASKS,
    PAIRWISE,
    PAIRWISE_SETS,
    STRIDES,
    all_results,
    check_against_the_reference,
    check_run,
    close,
    each_pairwise_set,
    request_of,
    run,
)
from torch import Tensor

import attlas
from attlas import Plan
from attlas.engine.backend import Request
from attlas.engine.backends.native import additive, library
from attlas.engine.gradient import CellGradient

pytestmark = [
    pytest.mark.usefixtures("small_row_blocks"),
    pytest.mark.skipif(not library.available(), reason="the kernels are not compiled here"),
]


def tokens(m: int, n: int, e: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences, four heads, two key heads, one value head; queries and keys of two sizes."""
    return (
        torch.randn(2, 4, m, 5, dtype=dtype),
        torch.randn(2, 2, n, 3, dtype=dtype),
        torch.randn(2, 1, n, e, dtype=dtype),
    )


def make(hidden: int, spread: float = 1.0, dtype: torch.dtype = torch.float64) -> attlas.Additive:
    """A score whose hidden units are as large as `spread`; one of them has weight 0."""
    score = attlas.Additive(5, 3, hidden, bias=True).to(dtype)
    with torch.no_grad():
        for layer in (score.W_q, score.W_k):
            layer.weight.normal_(std=spread / math.sqrt(layer.weight.shape[1]))
        score.w_v[hidden // 2] = 0.0
    return score


@each_pairwise_set
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_equals_the_reference(name: str, mask: str, spread: float, use: Any) -> None:
    use(name)
    place = list(MASKS).index(mask)
    m, n, hidden, e = [(1, 1, 1, 1), (63, 40, 2, 3), (13, 530, 5, 9), (24, 512, 8, 1), (30, 63, 33, 20)][place % 5]
    sink = torch.randn(4, dtype=torch.float64) if place % 2 else None
    q, k, v = tokens(m, n, e)
    check_against_the_reference(v, q=q, k=k, score=make(hidden, spread), mask=MASKS[mask](m, n), sink=sink)


@each_pairwise_set
@pytest.mark.parametrize("threads", [1, 3, 9])
@pytest.mark.parametrize("mask", ["none", "Causal", "cells"])
def test_gradients_equal_the_references(name: str, threads: int, mask: str, use: Any) -> None:
    """With nine threads there are more workers than heads, and each takes some rows."""
    use(name)
    m, n, hidden, e = {"none": (29, 530, 6, 2), "Causal": (20, 33, 1, 9), "cells": (30, 17, 9, 1)}[mask]
    for spread in (1.0, 300.0):
        score, sink = make(hidden, spread), torch.randn(4, dtype=torch.float64)
        q, k, v = tokens(m, n, e)
        A = attlas.attend(q, k, score=score, mask=MASKS[mask](m, n), sink=sink, plan=Plan("reference"))
        projected = [t.detach().requires_grad_() for t in A.problem.project()]
        B = attlas.attend(
            *projected, score=Projected(score.w_v), mask=MASKS[mask](m, n), sink=sink, plan=Plan("reference")
        )
        v.requires_grad_()
        out = B @ v
        slope = torch.randn_like(out)
        wanted = torch.autograd.grad(out, (*projected, v, score.w_v), slope)
        delta = (slope * out.detach()).sum(-1)
        torch.set_num_threads(threads)
        try:
            found = PAIRWISE.backward(request_of(A), A.lse, CellGradient(slope, v, delta=delta))
        finally:
            torch.set_num_threads(1)
        d_w = [g for g in found.parameters if g is not None]
        d_v = found.pooled.sum(dim=1, keepdim=True)
        for a, b in zip((*found.q, *found.k, d_v, *d_w), wanted, strict=True):
            close(a, b)


class Projected(attlas.Score):
    """The additive score of tokens that are projected already."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = w

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ self.w


@each_pairwise_set
def test_weights_are_exact_to_four_millionths(name: str, use: Any) -> None:
    """For projections of spread up to 3, in float32; from there on tiles take tanh, as exact as that is."""
    use(name)
    for spread in (0.1, 1.0, 3.0, 6.0, 20.0):
        q, k, _ = (t.float() for t in tokens(40, 200, 1))
        score = make(128, spread, torch.float32)
        exact = attlas.attend(q.double(), k.double(), score=make_double(score), plan=Plan("reference"))
        A, each = attlas.attend(q, k, score=score), torch.eye(200).expand(2, 1, -1, -1)
        with torch.no_grad():
            weights, lse = run(A, each)
            # Half of it may be the rounding of the projections, which the plain formula has too.
            assert (weights - exact[:, :, :, :]).abs().max() <= 4e-6 * exact[:, :, :, :].max()
            torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=4e-6 * (1 + spread))


def make_double(score: attlas.Additive) -> attlas.Additive:
    wide = attlas.Additive(5, 3, score.hidden_size, bias=True).double()
    wide.load_state_dict(score.state_dict())
    return wide


@each_pairwise_set
@pytest.mark.parametrize("weights", ["zero", "one of many", "tiny", "huge", "all sizes", "negative"])
def test_weights_of_any_size(name: str, weights: str, use: Any) -> None:
    use(name)
    w = {
        "zero": torch.zeros(37),
        "one of many": torch.eye(37)[3],
        "tiny": torch.randn(37) * 1e-30,
        "huge": torch.randn(37) * 1e4,
        "all sizes": torch.logspace(-12, 0, 37) * torch.randn(37).sign(),
        "negative": -torch.rand(37),
    }[weights]
    score = make(37)
    with torch.no_grad():
        score.w_v.copy_(w)
        q, k, v = tokens(20, 60, 2)
        B = attlas.attend(q, k, score=score, plan=Plan("reference"))
        tolerance = 1e-8 if weights == "huge" else 1e-10
        for a, b in zip(run(attlas.attend(q, k, score=score), v), (B @ v, B.lse), strict=True):
            close(a, b, tolerance)
        wanted = B @ v
        single = attlas.attend(q.float(), k.float(), score=score.float())
        if weights != "huge":
            torch.testing.assert_close(run(single, v.float())[0].double(), wanted, rtol=1e-5, atol=1e-5)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 20)),
    st.sampled_from(list(MASKS)),
    st.sampled_from(list(STRIDES)),
    st.sampled_from([name for name in library.runnable() if name != "amx"] or PAIRWISE_SETS),
    st.floats(0.01, 100.0),
    st.booleans(),
)
def test_any_shape_and_stride(
    sizes: tuple[int, ...], mask: str, stride: str, name: str, spread: float, single: bool
) -> None:
    m, n, hidden, e = sizes
    dtype = torch.float32 if single else torch.float64

    q, k, v = (STRIDES[stride](t) for t in tokens(m, n, e, dtype))
    score = make(hidden, spread, dtype)
    A = attlas.attend(q, k, score=score, mask=MASKS[mask](m, n))
    # The projections are the same on both sides: their rounding is no matter of the kernels.
    projected = [t.double() for t in A.problem.tokens]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("ATTLAS_NATIVE", name)
        request = Request(A.problem, tuple(STRIDES[stride](t) for t in A.problem.tokens), Plan())
        found = PAIRWISE.forward(request, v)
        numbers = PAIRWISE.family(request).statistics(all_results(min(3, n)), found[1])
        w = score.w_v.detach().double()
        exact = attlas.attend(*projected, score=Projected(w), mask=MASKS[mask](m, n), plan=Plan("reference"))
        check_run(found, numbers, v, exact, 1e-5 if single else 1e-11)


def test_reasons() -> None:
    q, k, _ = tokens(4, 5, 1)
    refused = additive.AdditiveKernels.unsupported
    assert refused(attlas.attend(q, k, score=make(3)).problem) is None
    assert refused(attlas.attend(q, k[:, :, :0], score=make(3)).problem) == "there is nothing to compute"
    assert refused(attlas.attend(q, k, score=2 * make(3)).problem) is None
    assert refused(attlas.attend(q, q, score=2 * attlas.Cosine()).problem) == "the score is not additive"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTLAS_NATIVE", "none")
        reason = refused(attlas.attend(q, k, score=make(3)).problem)
    assert reason == "ATTLAS_NATIVE=none turns the kernels off"


SCALED: dict[str, Callable[[attlas.Score, attlas.Score], attlas.Score]] = {
    "score": lambda pairs, places: -1.5 * pairs,
    "sum": lambda pairs, places: 2.0 * (pairs + places),
    "sum of sums": lambda pairs, places: 0.5 * (3.0 * (places + pairs) + attlas.Alibi(4)),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_multiple_of_a_sum_is_the_sum_of_the_multiples(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (t.requires_grad_() for t in tokens(19, 33, 3))
    pairs, cells = make(5), torch.randn(4, 19, 33, dtype=torch.float64)
    score = SCALED[name](pairs, attlas.Alibi(4) + attlas.TensorBias(cells))
    results = []
    for plan in (Plan("native"), Plan("reference")):
        A = attlas.attend(q, k, score=score, mask=attlas.Causal(), plan=plan)
        out, leaves = A @ v, [q, k, v, *pairs.parameters()]
        statistics = A.detach().collect(attlas.stats.Entropy(), attlas.stats.ColumnMass())
        results.append([out, *statistics, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(2))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
