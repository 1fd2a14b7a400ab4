"""Matrices of every kind, each beside its dense definition in float64, and plans that cut it differently."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.stats.definitions import Case, make_case
from torch import Tensor

import attlas
from attlas import Plan


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
    "strips": lambda: make_case(130, 600, batch=1, heads=2, key_heads=1, plan=Plan(cells=2000, columns=77)),
    "strips, known lse": lambda: with_lse(
        make_case(130, 600, batch=1, heads=2, key_heads=1, plan=Plan(cells=2000, columns=77))
    ),
    "strips, causal": lambda: make_case(
        600, 600, batch=1, heads=2, key_heads=1, mask=attlas.Causal(), plan=Plan(columns=100, rows=33)
    ),
    "strips, random": lambda: make_case(
        63, 130, mask=random_mask(1, 63, 130), plan=Plan(rows=7, columns=11), batch=1, heads=2
    ),
    "strips, sink": lambda: make_case(
        63, 130, sink=torch.tensor([5.0, -5.0]), plan=Plan(rows=7, columns=11), batch=1, heads=2
    ),
    "known lse": lambda: with_lse(make_case(63, 130, mask=random_mask(2, 63, 130))),
}  # fmt: skip


def with_lse(case: Case) -> Case:
    """Return the same case with the log-sum-exp known before any statistic runs."""
    assert case.A.lse.shape == case.A.shape[:-1]
    return case


# Definitions of the cases, which many tests share: each computes them once. The matrix is made anew for each test.
_known: dict[str, Case] = {}


@pytest.fixture(params=CASES)
def fresh(request: pytest.FixtureRequest) -> Callable[[], Case]:
    """Return what makes one of the cases: what a matrix keeps for later reads stays with the matrix before."""
    name = request.param
    if name not in _known:
        _known[name] = CASES[name]()
    return lambda: with_lse(_known[name].again()) if "known lse" in name else _known[name].again()


@pytest.fixture
def case(fresh: Callable[[], Case]) -> Case:
    return fresh()


@pytest.fixture
def make() -> Callable[..., Case]:
    return make_case
