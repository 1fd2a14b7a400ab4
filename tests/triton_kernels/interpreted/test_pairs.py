"""Scores that are no dot product in Triton's interpreter, against float64: values, statistics and gradients. No GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.triton_kernels.interpreted.test_kernels import (
    TILED,
    TRITON,
    C,
    Setting,
    agree,
    asked,
    comparing,
    setting,
)
from torch import Tensor

import attlas
from attlas import stats
from attlas.engine import trust
from attlas.engine.backends.triton import slopes, trusted

FIXTURES = (comparing, setting)
gradients = slopes.gradients


def additive(spread: float = 1.0, hidden: int = 6) -> attlas.Additive:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        score = attlas.Additive(5, 5, hidden, bias=True)
    with torch.no_grad():
        score.W_q.weight *= spread
    return score


SCORES: dict[str, Callable[[], attlas.Score]] = {
    "Additive": additive,
    "far hidden units": lambda: additive(40.0),
    "a multiple": lambda: -2.0 * additive(1.0, 8),
    "Gaussian": lambda: attlas.Gaussian([0.5, 1.0, 1.5, 2.0, 1.0]),
    "Laplace": lambda: attlas.Laplace(1.5),
    "Boxcar": lambda: attlas.Boxcar(2.5),
    "Epanechnikov": lambda: attlas.Epanechnikov(2.5),
    "Triangular": lambda: attlas.Triangular([2.5, 3.0, 2.0, 2.5, 9.0]),
}
BOUNDED = ("Boxcar", "Epanechnikov", "Triangular")


def tokens(m: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n)
    lead = ((1, 2, m, 5), (1, 1, n, 5), (1, 1, n, 3))
    q, k, v = (torch.randn(*size, generator=generator).to(dtype) for size in lead)
    return q, k, v


def wide(score: attlas.Score) -> attlas.Score:
    return copy.deepcopy(score).double()


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Additive": (19, 37, {"mask": C}),
    "far hidden units": (35, 19, {"mask": attlas.Window(9, 3)}),
    "a multiple": (19, 20, {"sink": torch.tensor([-1.0, 2.0])}),
    "Gaussian": (20, 19, {"mask": attlas.Causal(-9)}),
    "Laplace": (33, 18, {"mask": attlas.Padding(9)}),
    "Boxcar": (18, 35, {}),
    "Epanechnikov": (17, 20, {"mask": C}),
    "Triangular": (20, 17, {"sink": torch.tensor([-1.0, 2.0])}),
}


@pytest.mark.parametrize("name", SCORES)
def test_values_and_statistics(name: str) -> None:
    """Odd sizes, rows without a key, shared key heads, queries and keys of other numbers, sinks."""
    m, n, given = CASES[name]
    (q, k, v), score = tokens(m, n), SCORES[name]()
    A = attlas.attend(q, k, score=score, **given, plan=TRITON).detach()
    assert attlas.explain(A).backend == "triton"
    right = attlas.attend(q.double(), k.double(), score=wide(score), **given, plan=TILED).detach()
    agree(A @ v, right @ v.double(), atol=1e-5)
    agree(A.lse, right.lse, atol=1e-5)
    chosen = [s for s in asked(m, n) if not (name in BOUNDED and isinstance(s, stats.LogitMoments))]
    found, wanted = A.collect(*chosen), right.collect(*chosen)
    for statistic, own, other in zip(chosen, found, wanted, strict=True):
        if isinstance(statistic, stats.TopK):
            agree(own.values, other.values, atol=1e-5)
        else:
            agree(own, other, atol=2e-5)
    agree(A[..., 3:15, 2:9], right[..., 3:15, 2:9], atol=1e-5)
    # Beside the edge a small difference to 1 is rounded.
    loose = {"rtol": 1e-3} if name in BOUNDED else {"atol": 1e-5}
    agree(A.logits[..., [3, 15], :], right.logits[..., [3, 15], :], **loose)
    if name in BOUNDED:  # which tiles compute, with logits that are -inf
        agree(A.collect(stats.LogitMoments()), right.collect(stats.LogitMoments()), rtol=1e-3)


@pytest.mark.parametrize("name", ["Additive", "Laplace"])
def test_16_bits_and_several_programs(name: str, setting: Setting) -> None:
    setting.splits = 3
    (q, k, v), score = tokens(18, 35, torch.bfloat16), SCORES[name]()
    A = attlas.attend(q, k, score=score, plan=TRITON).detach()
    right = attlas.attend(q.double(), k.double(), score=wide(score), plan=TILED).detach()
    agree(A @ v, right @ v.double(), rtol=2e-2, atol=2e-2)
    agree(A.collect(stats.Entropy(), stats.ColumnMass()), right.collect(stats.Entropy(), stats.ColumnMass()), atol=2e-5)


@pytest.mark.parametrize("name", SCORES)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens, values, sink, and parameters; some rows at a time."""
    m, n, given = CASES[name]
    found, calls = [], []
    monkeypatch.setattr(slopes, "gradients", lambda *own: calls.append(None) or gradients(*own))
    for plan, to in ((attlas.Plan("triton", cells=6 * 2 * n * 11), torch.float32), (TILED, torch.float64)):
        leaves = [t.to(to).requires_grad_() for t in tokens(m, n)]
        score = SCORES[name]() if to is torch.float32 else wide(SCORES[name]())
        own = {key: value.to(to).requires_grad_() if key == "sink" else value for key, value in given.items()}
        every = [*leaves, *score.parameters(), *([own["sink"]] if "sink" in own else [])]
        A = attlas.attend(leaves[0], leaves[1], score=score, **own, plan=plan)
        loss = torch.sin(A @ leaves[2]).sum() + stats.entropy(A).square().sum() + stats.column_mass(A).square().sum()
        found.append(torch.autograd.grad(loss, every, allow_unused=True))
    assert len(calls) == 3
    agree(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Additive", "Laplace", "Triangular"])
def test_kernels_are_compared_first(name: str, comparing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        q, k, v = (t.requires_grad_() for t in tokens(5, 9))
        A = attlas.attend(q, k, score=SCORES[name](), plan=TRITON)
        (A @ v).sum().backward()
        A.detach().collect(stats.Entropy())
        A.detach()[..., 2, :]

    run()
    kinds = trust.results(torch.device("cpu"))["triton"]
    assert set(kinds.values()) == {None}
    assert sorted(kind.split(": ")[0].split(" of ")[0] for kind in kinds) == [
        "entropy, lse known",
        "gradient",
        "output",
        "weights",
    ]
    assert all(f"{name} of" in kind for kind in kinds)
    wrong = slopes.gradients

    def doubled(*given: Any) -> slopes.Found:
        found = wrong(*given)
        return found._replace(k=2.0 * found.k)

    monkeypatch.setattr(trusted, "gradients", doubled)
    monkeypatch.setattr(trust, "_faults_of_process", {})
    with pytest.raises(attlas.BackendError, match="the gradient in k differs"):
        run()
