"""How many cells a mask of runs allows, against counting them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.stats.definitions import allowed_by_mask, diagonals
from torch import Tensor

import attlas
from attlas.engine.problem import Problem
from attlas.stats.counts import cells_of_blocks, cells_of_diagonals, interval_of, queries_of_keys

SIZES = (11, 17)
MASKS: dict[str, Callable[[], attlas.Mask | None]] = {
    "none": lambda: None,
    "causal": attlas.Causal,
    "causal beyond the matrix": lambda: attlas.Causal(-4) & attlas.Window(3, 30, 0),
    "far": lambda: attlas.Causal(100),
    "padding": lambda: attlas.Padding([0, 5]),
    "padding on the left": lambda: attlas.Padding([3, 17], side="left"),
    "documents": lambda: attlas.Documents(torch.arange(17) // 4, torch.arange(11) // 3),
    "prefix": lambda: attlas.Prefix(3) | attlas.Causal(0),
}


def problem_of(mask: attlas.Mask | None) -> tuple[Problem, Tensor]:
    m, n = SIZES
    problem = attlas.attend(torch.randn(2, 3, m, 4), torch.randn(2, 3, n, 4), mask=mask).problem
    return problem, allowed_by_mask(problem)


@pytest.mark.parametrize("mask", MASKS)
def test_cells_are_counted(mask: str) -> None:
    problem, allowed = problem_of(MASKS[mask]())
    m, n = SIZES
    first, stop = interval_of(problem)
    assert torch.equal((stop - first).expand(2, 3, m), allowed.sum(-1))
    assert torch.equal(queries_of_keys(problem).expand(2, 3, n), allowed.sum(-2).float())
    assert torch.equal(cells_of_diagonals(problem).expand(2, 3, m + n - 1), diagonals(allowed).float())
    rows, columns = [2, 3, 7, 11], [1, 8, 9, 16]
    blocks = [
        [allowed[:, :, a:b, c:d].sum((-1, -2)) for c, d in ((1, 8), (8, 9), (9, 16))]
        for a, b in ((2, 3), (3, 7), (7, 11))
    ]
    wanted = torch.stack([torch.stack(row, dim=-1) for row in blocks], dim=-2)
    assert torch.equal(cells_of_blocks(problem, (rows, columns)).expand(2, 3, 3, 3), wanted.float())


def test_counts_of_a_mask_of_holes_are_not_known() -> None:
    assert interval_of(problem_of(attlas.Dilated(None, 0, 2))[0]) is None
    problem, _ = problem_of(attlas.from_tensor(torch.rand(11, 17) > 0.5))
    assert interval_of(problem) is None
    blocks = [0, 4, 11], [0, 9, 17]
    for found, size in (
        (queries_of_keys(problem), (17,)),
        (cells_of_diagonals(problem), (27,)),
        (cells_of_blocks(problem, blocks), (2, 2)),
    ):
        assert found.shape == (1, 1, *size)
        assert bool(found.isnan().all())
