"""Gradients of statistics of dot products in Triton's interpreter, against tiles in float64. No GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.triton_kernels.interpreted.test_kernels import TILED, TRITON, C, agree, comparing, setting
from torch import Tensor

import attlas
from attlas import stats
from attlas.engine import trust
from attlas.engine.backend import Request
from attlas.engine.backends.triton import backward, trusted
from attlas.engine.backends.triton.operands import operands_of

FIXTURES = (comparing, setting)


class OfQueries(attlas.Score):
    """A number of each query."""

    finite = positional = True

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return 0.1 * at.i.to(at.dtype)

    def bias(self, at: attlas.Tile) -> attlas.scores.Bias:
        return attlas.scores.Bias(query=0.1 * torch.arange(at.rows.start, at.rows.stop, dtype=at.dtype).view(1, 1, -1))


DOT = attlas.ScaledDot()
FORGET = attlas.Forget(torch.linspace(-1, 0, 2 * 35).view(2, 35))
gradients = backward.gradients


def tokens(m: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries of two heads, and keys and values of one; numbers that 16 bits hold."""
    generator = torch.Generator().manual_seed(m + n)
    lead = ((1, 2, m, 6), (1, 1, n, 6), (1, 1, n, 3))
    return [torch.randn(*size, generator=generator).bfloat16().to(dtype) for size in lead]


def every(v: Tensor) -> list[stats.Statistic]:
    """Return statistics that need every term of a gradient."""
    return [
        *(stats.Entropy(), stats.EffectiveKeys(), stats.ColumnMass(), stats.LogitMoments()),
        stats.Pooled(v),
    ]


def for_sinks(v: Tensor) -> list[stats.Statistic]:
    """Return those with closed terms beside a sink too."""
    return [stats.Entropy(), stats.RowMass(), *every(v)[2:]]


CASES: dict[str, tuple[int, int, torch.dtype, dict[str, Any], Callable[[Tensor], list[stats.Statistic]]]] = {
    "all terms": (19, 37, torch.float32, {"mask": C}, every),
    "one term": (35, 20, torch.float32, {}, lambda v: [stats.Entropy()]),
    "cap": (18, 35, torch.float32, {"score": attlas.SoftCap(DOT, 1.5) + attlas.Alibi(2)}, every),
    "keys and queries": (35, 35, torch.float32, {"score": DOT + FORGET, "mask": C}, lambda v: every(v)[:3]),
    "queries": (20, 35, torch.float32, {"score": DOT + OfQueries(), "mask": C}, every),
    "sink": (20, 19, torch.float32, {"sink": torch.tensor([-1.0, 2.0]), "mask": attlas.Window(9, 3)}, for_sinks),
    "empty rows": (20, 18, torch.float32, {"mask": attlas.Causal(-9)}, every),
    "two runs": (
        20,
        19,
        torch.float32,
        {"mask": C & (attlas.Window(5, 0) | attlas.Padding(3))},
        lambda v: every(v)[:3],
    ),
    "16 bits": (33, 20, torch.bfloat16, {"mask": C}, every),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_statistics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens, values and sink; odd sizes, shared key heads, and several statistics in one backward."""
    m, n, dtype, given, statistics = CASES[name]
    calls: list[None] = []
    monkeypatch.setattr(backward, "gradients", lambda *own: calls.append(None) or gradients(*own))
    found = []
    for plan, to in ((TRITON, dtype), (TILED, torch.float64)):
        q, k, v = (t.requires_grad_() for t in tokens(m, n, to))
        own = {key: value.double().requires_grad_() if key == "sink" else value for key, value in given.items()}
        A = attlas.attend(q, k, **own, plan=plan)
        results = torch.utils._pytree.tree_leaves(A.collect(*statistics(v)))
        loss = sum((t.double().nan_to_num(0.0, 0.0, 0.0).square().sum() for t in results), torch.zeros(()))
        leaves = [q, k, v, *([own["sink"]] if "sink" in own else [])]
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    assert len(calls) == 1
    loose = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    largest = max(float(t.abs().max()) for t in found[1] if t is not None)
    agree(found[0], found[1], rtol=loose, atol=loose * largest)


def test_kernels_are_compared_first(comparing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        q, k, v = (t.requires_grad_() for t in tokens(5, 9, torch.float32))
        A = attlas.attend(q, k, mask=C, plan=TRITON)
        sum(t.sum() for t in torch.utils._pytree.tree_leaves(A.collect(*every(v)))).backward()

    run()
    kinds = {kind: fault for kind, fault in trust.results(torch.device("cpu"))["triton"].items() if "gradients" in kind}
    assert list(kinds.values()) == [None], kinds
    assert "16 numbers of float32 and float32, row, log, square, column, mean, linear, centre" in next(iter(kinds))
    A = attlas.attend(*tokens(5, 9, torch.float32)[:2], mask=C)
    of = operands_of(Request(A.problem, A.problem.tokens, TRITON))
    assert trusted.compare_gradients(of, ["lse", "column"], 0, None) is None
    monkeypatch.setattr(trusted, "gradients_of_dots", lambda *own: gradients(*own)._replace(q=torch.ones(1, 2, 20, 6)))
    monkeypatch.setattr(trust, "_faults_of_process", {})
    with pytest.raises(attlas.BackendError, match="the gradient in q differs"):
        run()
