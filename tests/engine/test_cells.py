"""Cells of a matrix, read tile by tile or by a backend of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import Plan
from attlas.engine import operations
from attlas.engine.backend import Backend, Form, Request
from attlas.engine.backends import reference
from attlas.engine.costs import Operation
from attlas.engine.problem import Problem
from attlas.engine.tiling import cut_heads
from attlas.foundation.tiles import Tile

PLANS = [Plan(), Plan("tiled", cells=2000), Plan("tiled", rows=3, columns=4), Plan("tiled", cells=16)]
ROWS: dict[str, range | Tensor] = {
    "some": range(3, 9),
    "listed": torch.tensor([7, 0, 0, 9]),
    "listed in order": torch.tensor([4, 5, 6]),
    "none": range(0),
}
COLUMNS: dict[str, range | Tensor] = {"all": range(13), "some": range(2, 5), "listed": torch.tensor([12, 1, 1])}


def problem_of(scale: float = 1.0, **more: Any) -> Problem:
    """Return a problem of 2 batches, 6 heads with 2 key heads, 10 queries and 13 keys."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 6, 10, 4, generator=g) * scale, torch.randn(2, 2, 13, 4, generator=g)
    return attlas.attend(q, k, **more).problem


def place(problem: Problem, rows: range | Tensor, columns: range | Tensor, batches: range, heads: range) -> Tile:
    """Return the tile of some rows and columns."""
    spans = [range(len(some)) if isinstance(some, Tensor) else some for some in (rows, columns)]
    i, j = (some if isinstance(some, Tensor) else None for some in (rows, columns))
    return problem.tile(batches, heads, spans[0], spans[1], row_index=i, column_index=j)


@pytest.mark.parametrize("plan", PLANS, ids=["default", "few cells", "small tiles", "single rows"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_cells_are_those_of_the_definition(rows: str, columns: str, plan: Plan) -> None:
    problem = problem_of(mask=attlas.Window(4, 2), sink=torch.zeros(6))
    logits, lse, weights = reference.dense(reference.in_float64(problem))
    wanted: dict[Form, Tensor] = {"weights": weights, "logits": logits, "log weights": logits - lse.unsqueeze(-1)}
    # Heads that begin and end within a group of query heads that share a key head.
    at = place(problem, ROWS[rows], COLUMNS[columns], range(1, 2), range(1, 5))
    i, j = (torch.as_tensor(list(some)) for some in (ROWS[rows], COLUMNS[columns]))
    for form, whole in wanted.items():
        expected = whole[1:2, 1:5][:, :, i.long()][..., j.long()].float()
        for known in (None, lse):
            found = operations.cells(problem, at, plan, known, form)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_large_logits_are_read_with_the_sum_of_their_own_kernel() -> None:
    problem = problem_of(scale=3000.0)
    _, lse, weights = reference.dense(reference.in_float64(problem))
    at = place(problem, range(10), range(2, 7), range(2), range(6))
    wrong = lse + 0.5  # as if another kernel had rounded
    found = operations.cells(problem, at, Plan(), wrong, "log weights").exp()
    torch.testing.assert_close(found, weights[..., 2:7].float(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("heads", [range(6), range(1, 6), range(2, 9), range(5, 7), range(0)])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 20])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_heads_are_cut_at_their_groups(heads: range, most: int, group: int) -> None:
    pieces = list(cut_heads(heads, most, group))
    assert [head for piece in pieces for head in piece] == list(heads)
    for piece in pieces:
        assert 0 < len(piece) <= most
        whole = piece.start % group == 0 == len(piece) % group
        assert whole or piece.start // group == (piece.stop - 1) // group


class _Sevens(Backend):
    """A backend that reads 7 in each cell, but in logits."""

    name, row, computes = "sevens", "sdpa", frozenset({"cells"})

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        assert operation == "cells"
        return None

    def cells(self, request: Request, at: Tile, lse: Tensor | None, form: Form) -> Tensor | None:
        return None if form == "logits" else torch.full(at.shape, 7.0)


@pytest.fixture
def sevens(add_backend: Callable[..., None]) -> None:
    """Add a backend of cells that is cheaper than tiles."""
    add_backend("sevens", _Sevens())


@pytest.mark.usefixtures("sevens")
def test_a_backend_serves_every_read() -> None:
    q, k = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    A, B = attlas.attend(q, k), attlas.attend(q, k, score=attlas.SoftCap(attlas.ScaledDot(), 3.0))
    assert bool((A[0] == 7).all())
    assert A[1, 2, 3] == 7
    assert bool((A[..., torch.tensor([3, 1]), :].to_dense() == 7).all())
    assert bool((A.logits[0] != 7).all())  # what it does not compute is left to the tiles
    q.requires_grad_()
    assert bool((attlas.attend(q, k)[0, 3] == 7).all())
    own = A.to_dense().double().sum()
    assert own == 7 * A.numel()
    divergence = attlas.divergence(A, B, "squared")
    weights = attlas.attend(q.detach(), k) @ torch.eye(9)
    torch.testing.assert_close(divergence, (weights - torch.tensor(7.0).exp()).square().sum(-1), rtol=1e-4, atol=0)
