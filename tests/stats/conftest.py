"""Matrices of every kind, each beside its dense definition in float64, and plans that cut it differently."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attlas
from attlas import Plan
from attlas.engine import reference


@dataclass(frozen=True)
class Case:
    """A matrix and its definition; arrays have shape (batch, heads, m, n)."""

    A: attlas.AttentionMatrix
    weights: np.ndarray
    logits: np.ndarray
    allowed: np.ndarray
    tolerance: float

    @property
    def m(self) -> int:
        return self.weights.shape[2]

    @property
    def n(self) -> int:
        return self.weights.shape[3]

    def close(self, found: Tensor, expected: np.ndarray, scale: float = 1.0) -> None:
        assert found.dtype == self.A.dtype
        assert tuple(found.shape) == expected.shape
        np.testing.assert_allclose(
            found.double().numpy(), expected, rtol=self.tolerance, atol=self.tolerance * scale, equal_nan=True
        )


def make_case(
    m: int,
    n: int,
    score: attlas.Score | None = None,
    mask: Any = None,
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    key_heads: int = 2,
    batch: int = 2,
    sink: Tensor | None = None,
    plan: Plan | None = None,
    offset: float = 0.0,
) -> Case:
    generator = torch.Generator().manual_seed(m * 1009 + n)
    q = torch.randn(batch, heads, m, 8, generator=generator, dtype=torch.float64) + offset
    k = torch.randn(batch, key_heads, n, 8, generator=generator, dtype=torch.float64) + offset
    q, k = q.to(dtype), k.to(dtype)
    A = attlas.attend(q, k, score=score, mask=mask, sink=sink, plan=plan)
    return Case(A, *definition(A), 1e-11 if dtype is torch.float64 else 2e-5)


def definition(A: attlas.AttentionMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, logits and allowed cells of a matrix from the reference; nobody may write to them."""
    batch, heads, m, n = A.shape
    exact = reference.dense(reference.in_float64(A.problem))
    at = A.problem.tile(range(batch), range(heads), range(m), range(n))
    allowed = torch.ones(1, dtype=torch.bool) if A.problem.mask is None else A.problem.mask.allows(at)
    allowed = allowed.expand(batch, heads, m, n) & (exact.logits > -math.inf)
    found = exact.weights.detach().numpy(), exact.logits.detach().numpy(), allowed.numpy()
    for array in found:
        array.flags.writeable = False
    return found


def random_mask(batch: int, m: int, n: int) -> Tensor:
    """Return a mask with empty rows, empty columns and one full row."""
    mask = torch.rand(batch, 1, m, n, generator=torch.Generator().manual_seed(5)) < 0.3
    mask[:, :, 1 % m] = False
    mask[:, :, :, 2 % n] = False
    mask[:, :, m - 1] = True
    return mask


def ids(n: int) -> Tensor:
    return torch.arange(n) // max(n // 3, 1)


CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: make_case(63, 130),
    "one": lambda: make_case(1, 1),
    "one key": lambda: make_case(63, 1),
    "one query": lambda: make_case(1, 130),
    "no query": lambda: make_case(0, 7),
    "no key": lambda: make_case(5, 0),
    "no batch": lambda: make_case(5, 7, batch=0),
    "thousand": lambda: make_case(300, 1000, heads=2),
    "float64": lambda: make_case(63, 130, dtype=torch.float64),
    "bfloat16": lambda: make_case(130, 63, dtype=torch.bfloat16, mask=attlas.Causal()),
    "causal": lambda: make_case(130, 130, mask=attlas.Causal()),
    "causal, cached keys": lambda: make_case(63, 1000, mask=attlas.Causal()),
    "causal, empty rows": lambda: make_case(130, 63, mask=attlas.Causal()),
    "causal, long": lambda: make_case(600, 600, mask=attlas.Causal(), heads=2, key_heads=1, batch=1),
    "window": lambda: make_case(600, 700, mask=attlas.Window(100, 20), heads=1, key_heads=1, batch=1),
    "padding": lambda: make_case(63, 130, mask=attlas.Padding([0, 77])),
    "documents": lambda: make_case(130, 130, mask=attlas.Documents(ids(130)) & attlas.Causal()),
    "documents, long": lambda: make_case(900, 900, mask=attlas.Documents(ids(900)), heads=1, key_heads=1, batch=1),
    "random": lambda: make_case(63, 130, mask=random_mask(2, 63, 130)),
    "random, float64": lambda: make_case(130, 63, mask=random_mask(2, 130, 63), dtype=torch.float64),
    "additive mask": lambda: make_case(63, 130, mask=torch.linspace(-3, 3, 130).expand(63, 130)),
    "gaussian": lambda: make_case(63, 130, score=attlas.Gaussian(1.5)),
    "gaussian, causal": lambda: make_case(130, 130, score=attlas.Gaussian(1.5), mask=attlas.Causal()),
    "epanechnikov": lambda: make_case(63, 130, score=attlas.Epanechnikov(3.0), dtype=torch.float64),
    "epanechnikov, random": lambda: make_case(
        63, 130, score=attlas.Epanechnikov(3.0), mask=random_mask(2, 63, 130), dtype=torch.float64
    ),
    "softcap": lambda: make_case(63, 130, score=attlas.SoftCap(attlas.ScaledDot(), 1.0)),
    "alibi": lambda: make_case(130, 130, score=attlas.ScaledDot() + attlas.Alibi([0.5, 0.25, 0.1, 0.0])),
    "steep": lambda: make_case(130, 130, score=attlas.ScaledDot(2.0), mask=attlas.Causal()),
    "steep, float64": lambda: make_case(130, 300, score=attlas.ScaledDot(40.0), dtype=torch.float64),
    "flat": lambda: make_case(130, 130, score=attlas.ScaledDot(0.1), mask=random_mask(2, 130, 130)),
    "flat, low sink": lambda: make_case(130, 63, score=attlas.ScaledDot(0.1), sink=torch.tensor([-90.0, 3, 20, 0])),
    "flat, high sink": lambda: make_case(130, 63, score=attlas.ScaledDot(0.1), sink=torch.tensor([0.0, 3, 30, 0])),
    "sink": lambda: make_case(63, 130, sink=torch.tensor([0.0, 5.0, -5.0, -math.inf])),
    "sink, random": lambda: make_case(63, 130, mask=random_mask(2, 63, 130), sink=torch.tensor([0.0, 5.0, -5.0, 25.0])),
    "strips": lambda: make_case(130, 600, plan=Plan(cells=2000, columns=77)),
    "strips, known lse": lambda: with_lse(make_case(130, 600, plan=Plan(cells=2000, columns=77))),
    "strips, causal": lambda: make_case(600, 600, mask=attlas.Causal(), plan=Plan(columns=100, rows=33)),
    "strips, random": lambda: make_case(63, 130, mask=random_mask(2, 63, 130), plan=Plan(rows=7, columns=11)),
    "strips, sink": lambda: make_case(63, 130, sink=torch.tensor([0.0, 5.0, -5.0, 1.0]), plan=Plan(rows=7, columns=11)),
    "known lse": lambda: with_lse(make_case(63, 130, mask=random_mask(2, 63, 130))),
}  # fmt: skip


def with_lse(case: Case) -> Case:
    """Return the same case with the log-sum-exp known before any statistic runs."""
    assert case.A.lse.shape == case.A.shape[:-1]
    return case


# Definitions of the cases, which many tests share: each computes them once. The matrix is made anew for each test.
_known: dict[str, Case] = {}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    name = request.param
    if name not in _known:
        _known[name] = CASES[name]()
    known = _known[name]
    A = known.A  # and what it keeps for later reads stays with the test before
    fresh = replace(known, A=attlas.AttentionMatrix(replace(A.problem), A.plan, A._axes))
    return with_lse(fresh) if "known lse" in name else fresh


@pytest.fixture
def make() -> Callable[..., Case]:
    return make_case
