"""Pooled values as a statistic equal the product, whichever backend computes it."""

import pytest
import torch

import attlas
from attlas import stats
from attlas.testing import _carry_after


def test_two_sets_of_values_and_one_head() -> None:
    q, k, v = torch.randn(3, 130, 8), torch.randn(3, 140, 8), torch.randn(3, 140, 5)
    A = attlas.attend(q, k)
    first, second = A.collect(stats.Pooled(v), stats.Pooled(v[..., :2]))
    torch.testing.assert_close(first, A @ v, atol=2e-6, rtol=0)
    torch.testing.assert_close(second, first[..., :2], atol=2e-6, rtol=0)
    torch.testing.assert_close(A[1].collect(stats.Pooled(v[1]))[0], first[1], atol=2e-6, rtol=0)


def test_what_does_not_fit_is_refused() -> None:
    A = attlas.attend(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8))
    with pytest.raises(attlas.ShapeError, match="found: a matrix of 2 batches, 4 heads and 7 keys"):
        A.collect(stats.Pooled(torch.zeros(2, 3, 7, 5)))
    for shape in ((4, 7, 5), (2, 7, 5)):  # heads, which are not those of two texts; texts without heads
        with pytest.raises(attlas.ShapeError, match="the leading axes of the matrix"):
            A.collect(stats.Pooled(torch.zeros(shape)))
    with pytest.raises(attlas.DtypeError, match="found: int64"):
        stats.Pooled(torch.zeros(7, 5, dtype=torch.int64))


def test_halves_are_merged_to_the_whole() -> None:
    q, k, v = torch.randn(2, 4, 15, 8), torch.randn(2, 2, 17, 8), torch.randn(2, 2, 17, 5)
    A, pooled = attlas.attend(q, k, mask=attlas.Causal()), stats.Pooled(v)
    rows = (range(7), range(17)), (range(7, 15), range(17))
    columns = (range(15), range(8)), (range(15), range(8, 17))
    for halves in (rows, columns):
        carries = [_carry_after(pooled, A.problem, A.softmax_weights.lse(), *half) for half in halves]
        torch.testing.assert_close(pooled.finish(pooled.merge(*carries)), A @ v)
