"""What the tests of the kernels share: an instruction set that is forced, or the test skips; tokens in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tests.stats.definitions import diagonals
from torch import Tensor

import attlas
from attlas import Plan
from attlas.engine.backend import Request
from attlas.engine.backends import reference
from attlas.engine.backends.native import library
from attlas.engine.backends.native.backend import PairwiseKernels

PAIRWISE = PairwiseKernels()
NATIVE = Plan("native")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 3e-3}
each_set = pytest.mark.parametrize("name", library.SETS)
needs_kernels = pytest.mark.skipif(
    not library.runnable(), reason="the kernels are not compiled here; `make native` does it"
)


@pytest.fixture(autouse=True)
def whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests see the kernels also in a run that turns them off for all others."""
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Force an instruction set; skip where this processor cannot run it, or nothing was compiled."""

    def force(name: str) -> None:
        monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
        if name not in library.runnable():
            pytest.skip(f"this processor cannot run {name}, or the kernels are not compiled here")
        monkeypatch.setenv("ATTLAS_NATIVE", name)

    return force


@pytest.fixture
def threads() -> Iterator[None]:
    """Put the number of threads back after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tokens(m: int, n: int, d: int, e: int, dtype: torch.dtype, heads: tuple[int, int, int] = (4, 2, 2)) -> list[Tensor]:
    """Return two sequences of queries, keys and values of so many heads."""
    sizes = zip(heads, (m, n, n), (d, d, e), strict=True)
    return [torch.randn(2, *size, dtype=torch.float64).to(dtype) for size in sizes]


def definition(A: attlas.AttentionMatrix, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in float64."""
    exact = reference.dense(reference.in_float64(A.problem))
    return exact.weights.detach() @ v.double().repeat_interleave(A.shape[1] // v.shape[1], dim=1), exact.lse


def check(
    A: attlas.AttentionMatrix, v: Tensor, tolerance: float | None = None, known: tuple[Tensor, Tensor] | None = None
) -> None:
    """Compare output and log-sum-exp with the definition."""
    out, lse = known or definition(A, v)
    tolerance = tolerance or TOLERANCE[v.dtype]
    found = A @ v
    assert found.dtype == v.dtype
    torch.testing.assert_close(found.double(), out, rtol=tolerance, atol=tolerance)
    within = 1e-10 if A.dtype is torch.float64 else 2e-5
    torch.testing.assert_close(A.lse.double(), lse, rtol=within, atol=within)


# Numbers of the same shape in other layouts.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda t: t[:1].expand_as(t),
    "every second": lambda t: torch.stack([t, t * 9], -1).flatten(-2)[..., ::2],
    "shifted": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t),
}
MASKS: dict[str, Callable[[int, int], Any]] = {
    "none": lambda m, n: None,
    "Causal": lambda m, n: attlas.Causal(),
    "Window": lambda m, n: attlas.Window(5, 2),
    "Padding": lambda m, n: attlas.Padding([n, n // 3]),
    "left Padding and Causal": lambda m, n: attlas.Padding([n // 2, n], side="left") & attlas.Causal(),
    "cells": lambda m, n: attlas.from_function(lambda b, h, i, j: (i + 2 * j + h + b) % 3 == 0),
    "cells of all heads": lambda m, n: attlas.from_tensor(torch.arange(m * n).view(m, n) % 5 < 2),
}
PAIRWISE_SETS = [name for name in library.SETS if name != "amx"]  # its tiles serve dot products alone
each_pairwise_set = pytest.mark.parametrize("name", PAIRWISE_SETS)


@pytest.fixture
def small_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide a matrix into several calls where its mask is made of cells."""
    monkeypatch.setattr("attlas.engine.backends.native.request._MASK_ROWS", 16)


def laid_out(draw: Any, *shape: int) -> Tensor:
    """Return numbers of a shape in some layout: dense, strided, transposed, expanded, off the alignment."""
    kind = draw(st.sampled_from(["dense", "last", "rows", "heads", "expanded", "one", "offset"]))
    batch, heads, rows, size = shape
    if kind == "last":
        return torch.randn(batch, heads, rows, 2 * size)[..., ::2]
    if kind == "rows":
        return torch.randn(batch, heads, size, rows).mT
    if kind == "heads":
        return torch.randn(batch, rows, heads, size).transpose(1, 2)
    if kind == "expanded":
        return torch.randn(1, 1, rows, size).expand(shape)
    if kind == "one":
        return torch.randn(1).expand(shape)
    if kind == "offset":
        return torch.randn(math.prod(shape) + 3)[3:].view(shape)
    return torch.randn(shape)


def request_of(A: attlas.AttentionMatrix) -> Request:
    """Return a matrix as the kernels of pairs are handed it."""
    return PAIRWISE.prepare(Request(A.problem, A.problem.tokens, Plan()))


def run(A: attlas.AttentionMatrix, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the kernels of pairs."""
    found = PAIRWISE.forward(request_of(A), v)
    assert found is not None
    return found


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def check_against_the_reference(v: Tensor, **given: Any) -> None:
    """Compare both products, and numbers of rows from the pass that finds the log-sum-exp and from a later one."""
    A, exact = attlas.attend(**given), attlas.attend(**given, plan=Plan("reference"))
    x = torch.randn(*A.shape[:3], 3, dtype=v.dtype)
    out, lse = run(A, v)
    close(out, exact @ v)
    close(lse, exact.lse)
    close(PAIRWISE.transposed(request_of(A), lse, x), exact.mT @ x)
    asked = {"entropy": True, "max_logit": True}
    for more, known in (({}, None), ({"column_max": True, "squares": True}, exact.lse)):
        found = PAIRWISE.read(request_of(A), asked | more, None, known)
        assert found is not None
        for name, numbers in (
            ("lse", exact.lse),
            ("entropy", attlas.stats.entropy(exact)),
            ("max_logit", attlas.stats.max_logit(exact)),
            ("column_max", attlas.stats.column_max(exact)),
        ):
            if name in {"lse"} | asked.keys() | more.keys():
                close(found[name], numbers)


def all_results(k: int) -> dict[str, Any]:
    """Return what to ask a pass for: numbers of rows, columns and diagonals, and the k largest weights."""
    numbers = ("entropy", "squares", "max_logit", "mean", "variance", "column_mass", "column_max", "offsets")
    return dict.fromkeys(numbers, True) | {"largest": k}


def check_results(found: dict[str, Tensor], exact: attlas.AttentionMatrix, slack: float) -> None:
    """Compare what a pass found with the matrix written out."""
    weights, k = exact.to_dense(), found["top_values"].shape[-1]
    wanted = {
        "entropy": torch.special.entr(weights).sum(-1),
        "squares": weights.square().sum(-1),
        "max_logit": attlas.stats.max_logit(exact),
        "mean": attlas.stats.logit_moments(exact).mean,
        "variance": attlas.stats.logit_moments(exact).variance,
        "column_mass": weights.sum(-2),
        "column_max": weights.amax(-2),
        "offsets": diagonals(weights),
        "top_values": weights.topk(k).values,
    }
    for name, numbers in wanted.items():
        torch.testing.assert_close(
            found[name].double(), numbers, rtol=slack, atol=slack, msg=lambda m, name=name: f"{name}: {m}"
        )


def check_run(
    found: tuple[Tensor, Tensor], numbers: dict[str, Tensor], v: Tensor, exact: attlas.AttentionMatrix, slack: float
) -> None:
    """Compare output, log-sum-exp and what a pass found with the matrix in float64."""
    for one, wanted in zip(found, (exact @ v.double(), exact.lse), strict=True):
        close(one.double(), wanted, slack)
    check_results(numbers, exact, 10 * slack)
