"""Which kernels are found for a score, and the statistics that they give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attlas
from attlas import Plan, stats
from attlas.engine.backend import Request
from attlas.engine.native import library
from attlas.engine.native.backend import PairwiseKernels

needs_kernels = pytest.mark.skipif(not library.has("distance"), reason="the kernels are not compiled here")
SCORES: dict[str, tuple[Callable[[], attlas.Score], int]] = {
    "Additive": (lambda: attlas.Additive(4, 4, 9).double(), 4),
    "Gaussian": (lambda: attlas.Gaussian(1.0), 4),
    "Gaussian of 8": (lambda: attlas.Gaussian(2.0), 8),
    "Boxcar": (lambda: attlas.Boxcar(1.0), 2),
    "Laplace": (lambda: attlas.Laplace(1.0), 3),
}
MASKS: dict[str, Any] = {
    "none": None,
    "some see nothing": attlas.Causal(-3),
    "documents": attlas.Documents(torch.arange(150) // 4, torch.arange(130) // 3),
}


ROWS = stats.Entropy(), stats.MaxLogit()  # one pass finds them together with the log-sum-exp
EVERYTHING: tuple[stats.Statistic, ...] = (
    *ROWS,
    stats.EffectiveKeys(),
    stats.MaxWeight(),
    stats.RowMass(),
    stats.LogitMoments(),
    stats.TailMass(3),
    stats.ColumnMass(),
    stats.ColumnMax(),
    stats.Offsets(),
    stats.Coverage(),
    stats.Picture(17, 23),
    stats.Picture(130, 150, pool="max"),
    stats.Spans([(0, 50), (50, 130)], [(5, 149), (149, 150)]),
    stats.Pooled(torch.randn(2, 2, 150, 5, generator=torch.Generator().manual_seed(0)).double()),
)


def flat(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    return [part for part in parts if isinstance(part, torch.Tensor)]


@needs_kernels
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("score", list(SCORES))
def test_statistics_equal_the_tiled_backends(score: str, mask: str) -> None:
    make, d = SCORES[score]
    q, k = torch.randn(2, 4, 130, d).double(), torch.randn(2, 2, 150, d).double()
    for sink in (None, torch.randn(4).double()):
        given: dict[str, Any] = {"score": make(), "mask": MASKS[mask], "sink": sink}
        A, B = attlas.attend(q, k, **given), attlas.attend(q, k, **given, plan=Plan("tiled"))
        close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(attlas.attend(q, k, **given).lse, B.lse, **close)
        everything = B.collect(*EVERYTHING)
        for asked, known in ((ROWS, everything[: len(ROWS)]), (EVERYTHING, everything)):
            for found, wanted in zip(attlas.attend(q, k, **given).collect(*asked), known, strict=True):
                for x, y in zip(flat(found), flat(wanted), strict=True):
                    torch.testing.assert_close(x, y, **close, equal_nan=True)  # blocks that see nothing
        values, keys = A.topk(5)
        torch.testing.assert_close(values, B.topk(5).values, **close)
        there = values > 0  # of equal weights, as Boxcar has, each backend may name others
        torch.testing.assert_close(A.to_dense().gather(-1, keys.clamp(min=0))[there], values[there], **close)
        torch.testing.assert_close(A.lse, B.lse, **close)


@needs_kernels
@pytest.mark.parametrize("score", list(SCORES))
def test_statistics_are_taken_by_the_kernels(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, d = SCORES[score]
    A = attlas.attend(torch.randn(130, d).double(), torch.randn(150, d).double(), score=make())
    left: list[Any] = []
    monkeypatch.setattr(
        "attlas.engine.tiled.collect", lambda _, statistics, *more: (left.extend(statistics) or [], None)
    )
    A.collect(*(s for s in EVERYTHING if not isinstance(s, stats.Pooled)), stats.TopK(5))
    assert not left


@needs_kernels
def test_the_scores_that_they_compute() -> None:
    def reason(score: attlas.Score, d: int = 4) -> str | None:
        problem = attlas.attend(torch.zeros(2, d), torch.zeros(3, d), score=score).problem
        return PairwiseKernels().unsupported(Request(problem, problem.tokens, Plan()), "output")

    assert reason(attlas.Additive(4, 4, 2)) is None
    assert reason(attlas.Boxcar()) is None
    assert reason(attlas.Laplace(), 17) == "the tokens have more than 16 coordinates"
    assert reason(attlas.ScaledDot()) == "the score is no kernel of a distance"
