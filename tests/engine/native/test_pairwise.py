"""Which kernels are found for a score, and the statistics that they give."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.engine.native.conftest import PAIRWISE, all_results, request_of

import attlas
from attlas import Plan, stats
from attlas.engine.backend import Request
from attlas.engine.backends.native import library
from attlas.engine.backends.native.backend import PairwiseKernels

needs_kernels = pytest.mark.skipif(not library.available(), reason="the kernels are not compiled here")
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
        "attlas.engine.backends.tiled.collect", lambda _, statistics, *more: (left.extend(statistics) or [], None)
    )
    A.collect(*(s for s in EVERYTHING if not isinstance(s, stats.Pooled)), stats.TopK(5))
    assert not left


@needs_kernels
@pytest.mark.parametrize("score", list(SCORES))
def test_threads_and_callers_at_once_change_nothing(score: str, threads: None) -> None:
    make, d = SCORES[score]
    q, k, v = (torch.randn(2, *size, d) for size in ((4, 50), (2, 700), (1, 700)))
    A = attlas.attend(q, k, score=make().float())

    def everything(_: int = 0) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return PAIRWISE.read(request_of(A), all_results(5) | {"coverage": (0.9,)}, v, None)

    wanted = everything()
    torch.set_num_threads(3)
    with ThreadPoolExecutor(4) as callers:
        for numbers in callers.map(everything, range(4)):
            assert numbers.keys() == wanted.keys()
            for name in wanted:
                assert torch.equal(numbers[name], wanted[name]), name


@needs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", ["Additive", "Gaussian"])
def test_what_is_not_finite_is_left_to_others(score: str, bad: float) -> None:
    make, d = SCORES[score]
    for place in ("q", "k", "v", "w"):
        given = {
            name: torch.randn(2, *size, d).double() for name, size in zip("qkv", ((4, 6), (2, 7), (1, 7)), strict=True)
        }
        made = make()
        if place == "w" and score == "Additive":
            made.w_v.data[0] = bad
        else:
            given["q" if place == "w" else place][0, 0, 3, 1] = bad
        A = attlas.attend(given["q"], given["k"], score=made)
        assert PAIRWISE.forward(request_of(A), given["v"]) is None


@needs_kernels
def test_the_scores_that_they_compute() -> None:
    def reason(score: attlas.Score, d: int = 4) -> str | None:
        problem = attlas.attend(torch.zeros(2, d), torch.zeros(3, d), score=score).problem
        return PairwiseKernels().unsupported(Request(problem, problem.tokens, Plan()), "output")

    assert reason(attlas.Additive(4, 4, 2)) is None
    assert reason(attlas.Boxcar()) is None
    assert reason(attlas.Laplace(), 17) == "the tokens have more than 16 coordinates"
    assert reason(attlas.ScaledDot()) == "the score is no kernel of a distance"
