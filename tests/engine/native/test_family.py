"""Which kernels are found for a score, and the statistics that they give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attlas
from attlas import Plan, stats
from attlas.engine.native import additive, distance, family, library

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
    "documents": attlas.Documents(torch.arange(300) // 4, torch.arange(250) // 3),
}


@needs_kernels
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("score", list(SCORES))
def test_statistics_equal_the_tiled_backends(score: str, mask: str) -> None:
    make, d = SCORES[score]
    q, k = torch.randn(2, 4, 250, d).double(), torch.randn(2, 2, 300, d).double()
    for sink in (None, torch.randn(4).double()):
        given: dict[str, Any] = {"score": make(), "mask": MASKS[mask], "sink": sink}
        A, B = attlas.attend(q, k, **given), attlas.attend(q, k, **given, plan=Plan("tiled"))
        close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(attlas.attend(q, k, **given).lse, B.lse, **close)
        asked = stats.Entropy(), stats.MaxLogit(), stats.ColumnMass(), stats.RowMass(), stats.ArgMax()
        for found, wanted in zip(A.collect(*asked), B.collect(*asked), strict=True):
            torch.testing.assert_close(found, wanted, **close)
        torch.testing.assert_close(A.lse, B.lse, **close)


@needs_kernels
def test_the_kernels_of_a_score() -> None:
    def found(score: attlas.Score, d: int = 4) -> tuple[object, str]:
        return family.find(attlas.attend(torch.zeros(2, d), torch.zeros(3, d), score=score).problem)

    assert found(attlas.Additive(4, 4, 2)) == (additive.KERNELS, "the score is additive")
    assert found(attlas.Boxcar()) == (distance.KERNELS, "the score is a kernel of few coordinates")
    assert found(attlas.Laplace(), 17) == (None, "the tokens have more than 16 coordinates")
    assert found(attlas.ScaledDot()) == (None, "the score is no kernel of a distance")


def test_what_is_provided() -> None:
    assert family.provides({"entropy": True, "mass": True})
    assert not family.provides({"entropy": True, "largest": 1})
    assert not family.provides(None)
