"""Weight against distance is a mean over cells."""

from collections.abc import Callable

import pytest
import torch

import attlas
from attlas import heads

close = torch.testing.assert_close


@pytest.mark.parametrize("bins", ["each", "log"])
def test_weight_and_share_are_means_and_sums_over_cells(make: Callable, kind: str, bins: str) -> None:
    case = make(kind)
    found = heads.by_distance(case.A, bins)
    total = case.weights.sum((-2, -1))
    covered = torch.zeros_like(case.places, dtype=torch.bool)
    for index, (start, stop) in enumerate(zip(found.start.tolist(), found.stop.tolist(), strict=True)):
        inside = (case.places >= start) & (case.places < stop)
        covered |= inside
        mass, cells = (case.weights * inside).sum((-2, -1)), (case.allowed & inside).sum((-2, -1))
        close(found.weight[..., index], mass / cells.clamp(min=1))
        close(found.share[..., index], mass / total)
    assert not (case.allowed & ~covered).any()
    close(found.share.sum(-1), torch.ones(2, 4, dtype=torch.float64))


def test_bins_start_near_and_double_on_both_sides() -> None:
    A = attlas.attend(torch.zeros(2, 12, 4), torch.zeros(2, 12, 4))
    each, log = heads.by_distance(A), heads.by_distance(A, "log")
    assert sorted(each.start.tolist()) == list(range(-11, 12))
    assert each.start.abs().tolist() == sorted(each.start.abs().tolist())
    pairs = set(zip(log.start.tolist(), log.stop.tolist(), strict=True))
    assert pairs == {(0, 1), (1, 2), (2, 4), (4, 8), (8, 12), (-1, 0), (-3, -1), (-7, -3), (-11, -7)}
    causal = heads.by_distance(attlas.attend(torch.zeros(2, 12, 4), torch.zeros(2, 12, 4), mask=attlas.Causal()))
    assert causal.start.tolist() == list(range(12))


def test_cross_attention_of_more_queries_says_where_they_stand() -> None:
    A = attlas.attend(torch.randn(2, 9, 4), torch.randn(2, 5, 4))
    found = heads.by_distance(A, shift=0)
    weights = A.to_dense()
    at = found.start.tolist().index(3)
    close(found.weight[:, at], torch.stack([weights[:, i + 3, i] for i in range(5)]).mean(0))
