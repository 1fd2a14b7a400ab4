"""Pooled values as a statistic equal the product, whichever backend walks over the matrix."""

import pytest
import torch

import attlas
from attlas import Plan, stats
from attlas.testing import _carry


@pytest.mark.parametrize("plan", [Plan(), Plan("tiled", rows=7, columns=11)], ids=["auto", "tiled"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_pooled_values_equal_the_product(plan: Plan, key_heads: int) -> None:
    q, k, v = torch.randn(2, 4, 150, 8), torch.randn(2, key_heads, 170, 8), torch.randn(2, key_heads, 170, 5)
    A = attlas.attend(q, k, mask=attlas.Causal(), plan=plan)
    out, entropy, mass = A.collect(stats.Pooled(v), stats.Entropy(), stats.ColumnMass())
    exact = attlas.attend(q.double(), k.double(), mask=attlas.Causal(), plan=Plan("reference"))
    torch.testing.assert_close(out.double(), exact @ v.double(), atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy, stats.entropy(A))
    torch.testing.assert_close(mass, stats.column_mass(A))


def test_two_sets_of_values_and_one_head() -> None:
    q, k, v = torch.randn(3, 130, 8), torch.randn(3, 140, 8), torch.randn(3, 140, 5)
    A = attlas.attend(q, k)
    first, second = A.collect(stats.Pooled(v), stats.Pooled(v[..., :2]))
    torch.testing.assert_close(first, A @ v, atol=2e-6, rtol=0)
    torch.testing.assert_close(second, first[..., :2], atol=2e-6, rtol=0)
    torch.testing.assert_close(A[1].collect(stats.Pooled(v[1]))[0], first[1], atol=2e-6, rtol=0)


def test_what_does_not_fit_is_refused() -> None:
    A = attlas.attend(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8))
    with pytest.raises(attlas.ShapeError) as caught:
        A.collect(stats.Pooled(torch.zeros(2, 3, 7, 5)))
    assert str(caught.value) == (
        "Pooled(): v must have a row for each key, and the leading axes of the matrix.\n"
        "  v (..., n, e): (2, 3, 7, 5) float32 cpu\n"
        "  found: a matrix of 2 batches, 4 heads and 7 keys\n"
        "  fix: v of shape (batch, heads, n, e)."
    )
    with pytest.raises(attlas.DtypeError) as caught:
        stats.Pooled(torch.zeros(7, 5, dtype=torch.int64))
    assert str(caught.value) == (
        "Pooled(): v must be a floating point tensor.\n  v: (7, 5) int64 cpu\n  found: int64\n  fix: v.float()"
    )


def test_halves_are_merged_to_the_whole() -> None:
    q, k, v = torch.randn(2, 4, 15, 8), torch.randn(2, 2, 17, 8), torch.randn(2, 2, 17, 5)
    A, pooled = attlas.attend(q, k, mask=attlas.Causal()), stats.Pooled(v)
    rows = (range(7), range(17)), (range(7, 15), range(17))
    columns = (range(15), range(8)), (range(15), range(8, 17))
    for halves in (rows, columns):
        carries = [_carry(pooled, A.problem, A._exact_lse(), *half) for half in halves]
        torch.testing.assert_close(pooled.finish(pooled.merge(*carries)), A @ v)
