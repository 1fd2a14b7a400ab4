"""Stick-breaking attention, lazy: equal to its definition, values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas
from attlas import stats
from attlas.errors import DtypeError, ShapeError
from attlas.interventions import Suppress
from attlas.matrix.kinds import stick_breaking
from attlas.recording.atlas import Atlas, Entry


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


M, N = 11, 14
MASKS: dict[str, Any] = {
    "none": None,
    "before the query": attlas.Causal(N - M - 1),
    "a tensor of numbers": numbers(M, N, seed=4).masked_fill(numbers(M, N, seed=5) > 1, -math.inf),
}
READS: dict[str, Callable[[Any], Any]] = {
    "transposed product": lambda A: A.mT @ numbers(2, 4, M, 3, seed=7),
    "row": lambda A: A[:, 1, 3],
    "cells": lambda A: A[0, 1, 3:7, [5, 2]],
    "row mass": lambda A: A.sum(-1),
    "column mass": lambda A: A.sum(-2),
    "entropy": lambda A: stats.entropy(A) if isinstance(A, attlas.AttentionMatrix) else _entropy(A),
    "top": lambda A: A.topk(3).values,
    "difference": lambda A: (A - 0.5 * A.detach()).sum(-1),
}


def _entropy(dense: Tensor) -> Tensor:
    seen = dense > 0
    return -torch.where(seen, dense * torch.where(seen, dense, 1.0).log(), 0.0).sum(-1)


def definition(logits: Tensor) -> Tensor:
    """Each key in turn, from the last: it takes its share of what is left."""
    left, columns = torch.ones_like(logits[..., 0]), []
    for z in reversed(logits.unbind(-1)):
        share = torch.where(z == -math.inf, 0.0, torch.sigmoid(z.masked_fill(z == -math.inf, 0.0)))
        columns.append(left * share)
        left = left * (1 - share)
    return torch.stack(columns[::-1], -1)


@pytest.fixture(params=["kept", "again"])
def few_cells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the logits of some rows, or compute them again for each block, and of one row at a time."""
    if request.param == "again":
        monkeypatch.setattr(stick_breaking, "_MOST_KEPT_LOGITS", 1)
        monkeypatch.setattr(stick_breaking, "_KEYS_AT_ONCE", 3)


@pytest.mark.usefixtures("few_cells")
@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_definition(mask: str) -> None:
    q, k = numbers(2, 4, M, 6, seed=1).requires_grad_(), numbers(2, 2, N, 6, seed=2).requires_grad_()
    v = numbers(2, 2, N, 3, seed=6).requires_grad_()
    plan = attlas.Plan(rows=3, columns=4)
    A = attlas.attend(q, k, attlas.ScaledDot() + attlas.Alibi(4), MASKS[mask], plan=plan, normalise="stick-breaking")
    dense = definition(attlas.attend(q, k, attlas.ScaledDot() + attlas.Alibi(4), MASKS[mask]).logits.to_dense())
    same = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(A.to_dense(), dense, **same)
    pairs = {name: (read(A), read(dense)) for name, read in READS.items()}
    pairs["product"] = A @ v, dense @ v.repeat_interleave(2, 1)
    for name, (found, wanted) in pairs.items():
        torch.testing.assert_close(found, wanted, **same)
        leaves = (q, k, v) if name == "product" else (q, k)
        slope = numbers(*wanted.shape, seed=8)
        own, other = (torch.autograd.grad(t, leaves, slope, retain_graph=True) for t in (found, wanted))
        for a, b in zip(own, other, strict=True):
            torch.testing.assert_close(a, b, **same)
    assert A.check() < 1e-12
    part = A.window(slice(2, 9), slice(1, 7))
    torch.testing.assert_close(part.to_dense(), dense[:, :, 2:9, 1:7], **same)
    torch.testing.assert_close(part @ numbers(6, 2), dense[:, :, 2:9, 1:7] @ numbers(6, 2), **same)
    found = part.detach().collect(stats.ColumnMax(), stats.RowMass())
    torch.testing.assert_close(found[0], dense[:, :, 2:9, 1:7].amax(-2), **same)


def test_that_of_the_paper_in_float32_and_linear_memory() -> None:
    n = 6_000
    q, v = torch.randn(1, 1, n, 8), torch.randn(1, 1, n, 2)
    A = attlas.attend(q, q, mask=attlas.Causal(-1), normalise="stick-breaking")
    rows = [5, n - 1]
    z = (q[0, 0, rows] @ q[0, 0].mT / 8**0.5).double()
    wanted = definition(z.masked_fill(torch.arange(n) >= torch.tensor([[5], [n - 1]]), -math.inf))
    torch.testing.assert_close(A[0, 0, rows].double(), wanted, rtol=1e-4, atol=2e-6)
    part = A.window(rows=(n - 300, n))
    torch.testing.assert_close((part @ v)[0, 0, -1].double(), wanted[1] @ v[0, 0].double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(A[0, 0, 0], torch.zeros(n))  # no key before the first query


def test_what_it_is_not_is_refused_by_name(tmp_path: Path) -> None:
    q, k = numbers(1, 2, M, 4), numbers(1, 2, N, 4)
    A = attlas.attend(q, k, normalise="stick-breaking")
    assert "stick-breaking" in repr(A)
    with pytest.raises(DtypeError, match="these weights are none"):
        A.lse  # noqa: B018
    with pytest.raises(DtypeError, match="MaxLogit"):
        A.collect(stats.MaxLogit())
    with pytest.raises(ShapeError, match="a sink is one more logit of a softmax"):
        attlas.attend(q, k, sink=numbers(2), normalise="stick-breaking")
    torch.testing.assert_close(A.logits[0, 1, 2], attlas.attend(q, k).logits[0, 1, 2])
    shape = (1, 2, M, N)
    Atlas([Entry("attn", 0, "self", 0, (0, 1), (0, M), 0, shape, A)]).save(tmp_path / "run.atlas")
    torch.testing.assert_close(attlas.load(tmp_path / "run.atlas")[0].to_dense(), A.to_dense(), rtol=0, atol=0)
    assert A.to(torch.float32).dtype is torch.float32
    dropped = attlas.attention(q, k, torch.eye(N, dtype=torch.float64), dropout_p=0.5, normalise="stick-breaking")
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, 2 * A.to_dense(), 0.0))


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attlas.attention(x, x, x, mask=attlas.Causal(-1), normalise="stick-breaking")


def test_is_recorded_and_changed() -> None:
    model, x = Layer(), numbers(2, 3, 9, 4)
    with attlas.record(model, values=True, statistics=[stats.Entropy(), stats.MaxLogit()]) as atlas:
        out = model(x)
    torch.testing.assert_close(atlas[0] @ atlas.entry(0).values, out)
    assert atlas.entry(0).statistics.keys() == {"entropy"}
    dense = atlas[0].to_dense().clone()
    dense[..., 2:4] = 0.0
    with attlas.intervene(model, Suppress(keys=(2, 4), when="after")):
        torch.testing.assert_close(model(x), dense @ x)
