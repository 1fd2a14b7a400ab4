"""Matrices of every kind, each beside its dense definition in float64, and plans that cut it differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tests.stats.definitions import allowed_by_mask
from torch import Tensor

import attlas
from attlas.engine.backends import reference

PLANS = {"whole": None, "small tiles": attlas.Plan("tiled", rows=7, columns=11)}


@dataclass(frozen=True)
class Dense:
    """A matrix and its definition: weights (batch, heads, m, n), and which pairs may attend, of the same shape."""

    A: attlas.AttentionMatrix
    weights: Tensor
    allowed: Tensor
    ids: Tensor

    @property
    def places(self) -> Tensor:
        """Distance of each key from each query, the last query standing at the last key."""
        m, n = self.weights.shape[-2:]
        return torch.arange(m)[:, None] + n - m - torch.arange(n)

    def score(self, targets: Tensor, query_mask: Tensor | None = None) -> Tensor:
        """Return the mean weight on targets (m, n) or (batch, m, n), query by query, over those with a choice."""
        batch, heads, m, n = self.weights.shape
        targets = targets.expand(batch, m, n)
        out = torch.zeros(batch, heads, dtype=torch.float64)
        for b in range(batch):
            for h in range(heads):
                found = []
                for i in range(m):
                    seen = self.allowed[b, h, i]
                    aims = seen & targets[b, i]
                    if aims.any() and (seen & ~targets[b, i]).any() and (query_mask is None or query_mask[b, i]):
                        found.append(self.weights[b, h, i][targets[b, i]].sum())
                out[b, h] = torch.stack(found).mean() if found else 0.0
        return out


def dense(A: attlas.AttentionMatrix, ids: Tensor | None = None) -> Dense:
    weights = reference.dense(reference.in_float64(A.problem)).weights.detach()
    return Dense(A, weights, allowed_by_mask(A.problem), torch.empty(0) if ids is None else ids)


SIZES = {
    "causal": (29, 29, attlas.Causal(), None),
    "bidirectional": (23, 23, None, None),
    "window": (29, 29, attlas.Window(6, 0), None),
    "cache": (5, 31, attlas.Causal(), None),
    "left padding, sinks": (24, 24, attlas.Causal() & attlas.Padding([24, 15], side="left"), torch.arange(4.0)),
    "packed": (26, 26, attlas.Causal() & attlas.Documents(torch.arange(26) // 9), None),
    "one query": (1, 17, None, None),
    "one token": (1, 1, attlas.Causal(), None),
}  # fmt: skip


@pytest.fixture(params=SIZES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=PLANS)
def make(request: pytest.FixtureRequest) -> Callable[[str], Dense]:
    """Return a function from the kind of a matrix to the matrix, in float64, with 4 heads on 2 key heads."""

    def build(kind: str) -> Dense:
        m, n, mask, sink = SIZES[kind]
        q = 2 * torch.randn(2, 4, m, 8, dtype=torch.float64)
        k = torch.randn(2, 2, n, 8, dtype=torch.float64)
        sink = None if sink is None else sink.double()
        A = attlas.attend(q, k, mask=mask, sink=sink, plan=PLANS[request.param])
        return dense(A, torch.randint(5, (2, n)))

    return build
