"""Reads that carry a gradient: rows of the definition, which autograd records, and statistics of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attlas.engine import reference
from attlas.engine.fold import Part, Statistic, lowest
from attlas.engine.problem import Problem
from attlas.engine.tiling import ColumnBlock
from attlas.engine.workspace import Workspace
from attlas.errors import BackendError, TooLargeError
from attlas.inputs import transforming
from attlas.masks.base import BlockState
from attlas.scores.base import Tokens
from attlas.scores.position import TensorBias

__all__ = ["DENSE_LIMIT", "collect", "collect_of", "dense"]

DENSE_LIMIT = 2**30  # bytes that are written out without being asked twice


def dense(
    where: str, problem: Problem, rows: Tensor | range | None = None, tokens: tuple[Tokens, Tokens] | None = None
) -> reference.Dense:
    """Return some rows, or all, with their graph.

    Raises
    ------
    TooLargeError
        If they take more than 1 GiB.
    """
    batch, heads, m, n = problem.shape
    size = batch * heads * (m if rows is None else len(rows)) * n * problem.dtype.itemsize
    if size > DENSE_LIMIT:
        rule = "with a gradient it is computed from whole rows, and they would be larger than the limit."
        given = {"A (batch, heads, m, n)": f"{tuple(problem.shape)} {str(problem.dtype).removeprefix('torch.')}"}
        found = f"{size:,} bytes, the limit is {DENSE_LIMIT:,}"
        fix = "read A.detach(), or under torch.no_grad(), for numbers without a gradient"
        raise TooLargeError(where, rule, given, found=found, fix=f"{fix}; A @ v carries one at any length.")
    return reference.dense(problem, rows, tokens)


def collect(problem: Problem, statistics: Sequence[Statistic]) -> list[Any]:
    """Return statistics with their graph, from the whole matrix at once.

    Raises
    ------
    TooLargeError
        If the matrix takes more than 1 GiB.
    """
    logits = dense("A.collect()", problem).logits
    given = replace(problem, score=TensorBias(logits))
    return _collect(_whole(given, logits), statistics)


def collect_of(problem: Problem, weights: Tensor, statistics: Sequence[Statistic]) -> list[Any]:
    """Return statistics of a dense tensor of weights, shape (batch, heads, m, n), with their graph."""
    weights = weights.to(problem.dtype)
    logits = torch.where(weights > 0, torch.where(weights > 0, weights, 1.0).log(), -math.inf)
    zeros = torch.zeros(problem.shape[:3], dtype=torch.float64, device=problem.device)
    part = _whole(problem, logits, lambda: zeros)
    vars(part)["_raw"] = weights  # they have a gradient also where they are 0, and their logarithm has none
    return _collect(part, statistics)


def _whole(problem: Problem, logits: Tensor, row_lse: Callable[[], Tensor] | None = None) -> Part:
    """Return the part that is the whole matrix."""
    at = problem.tile(*map(range, problem.shape))
    coverage = BlockState.FULL if problem.mask is None else BlockState.PARTIAL
    strip = ColumnBlock(at.columns, ((at.columns, coverage),))
    return _RecordedPart(problem, at, strip, lambda: logits, row_lse, Workspace(problem.dtype, problem.device))


def _collect(part: Part, statistics: Sequence[Statistic]) -> list[Any]:
    try:
        carries = [statistic.start(part.problem) for statistic in statistics]
        if 0 not in part.problem.shape:
            carries = [s.step(carry, part, part.at) for s, carry in zip(statistics, carries, strict=True)]
        return [s.finish(carry) for s, carry in zip(statistics, carries, strict=True)]
    except RuntimeError as error:
        if not transforming():
            raise
        # A carry is written to in place, which torch.vmap cannot follow.
        found, fix = str(error).partition("\n")[0], "A.to_dense() inside of the transform, or a loop in place of it."
        raise BackendError("A.collect()", "no transform of torch may cut it.", found=found, fix=fix) from error


class _RecordedPart(Part):
    """A part that writes into no tensor that the graph needs again."""

    @cached_property
    def _logits(self) -> Tensor:
        return self.score().clamp(min=lowest(self.problem.dtype))

    @cached_property
    def shifted(self) -> Tensor:
        return self._logits - self.shift.unsqueeze(-1)

    @cached_property
    def _raw(self) -> Tensor:
        return self.shifted.exp()

    @cached_property
    def weights(self) -> Tensor:
        return self._raw if self._inverse is None else self._raw * self._inverse.unsqueeze(-1)

    @cached_property
    def logits(self) -> Tensor:
        return self.score()

    def row_products(self, x: Tensor, y: Tensor) -> Tensor:
        # A weight of 0 may stand beside the lowest number, whose product with a gradient would overflow.
        return (x * torch.where(x == 0, 0.0, y)).sum(dim=-1)
