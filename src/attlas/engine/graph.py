"""Reads that carry a gradient: rows of the definition, which autograd records, and statistics of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
from attlas.tiles import cut

__all__ = ["DENSE_LIMIT", "collect", "collect_of", "dense"]

DENSE_LIMIT = 2**30  # bytes that are written out without being asked twice
_WHOLE = 2**26  # bytes of logits up to which the graph of all is kept
_BLOCK = 9 * 2**22  # of a block of a larger matrix: the C library returns what is above 32 MiB to the system at once


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
    """Return statistics with their graph: from the whole matrix, or from blocks of rows that are computed again.

    Raises
    ------
    TooLargeError
        If the matrix takes more than 1 GiB, and a statistic cannot merge what it finds in parts of it.
    """
    batch, heads, m, n = problem.shape
    row = batch * heads * n * problem.dtype.itemsize
    in_blocks = m * row > _WHOLE and not transforming() and all(_merges(statistic) for statistic in statistics)
    if not in_blocks:
        logits = dense("A.collect()", problem).logits
        return _finish(statistics, _carries(_part(problem, logits, range(m)), statistics))
    tokens = problem.project()
    carries: list[Any] | None = None
    for rows in cut(m, max(_BLOCK // row, 1)):
        block = partial(_block, problem, tokens, rows, statistics)
        found = checkpoint(block, use_reentrant=False, preserve_rng_state=False)
        carries = (
            found if carries is None else [s.merge(*two) for s, *two in zip(statistics, carries, found, strict=True)]
        )
    return _finish(statistics, carries or [])


def _merges(statistic: Statistic) -> bool:
    return type(statistic).merge is not Statistic.merge


def _block(problem: Problem, tokens: tuple[Tokens, Tokens], rows: range, statistics: Sequence[Statistic]) -> list[Any]:
    """Return the carries after some rows."""
    logits = reference.dense(problem, rows, tokens).logits
    return _carries(_part(problem, logits, rows), statistics)


def collect_of(problem: Problem, weights: Tensor, statistics: Sequence[Statistic]) -> list[Any]:
    """Return statistics of a dense tensor of weights, shape (batch, heads, m, n), with their graph."""
    weights = weights.to(problem.dtype)
    logits = torch.where(weights > 0, torch.where(weights > 0, weights, 1.0).log(), -math.inf)
    zeros = torch.zeros(problem.shape[:3], dtype=torch.float64, device=problem.device)
    part = _part(problem, logits, range(problem.shape[2]), lambda: zeros)
    vars(part)["_raw"] = weights  # they have a gradient also where they are 0, and their logarithm has none
    return _finish(statistics, _carries(part, statistics))


def _part(problem: Problem, logits: Tensor, rows: range, row_lse: Callable[[], Tensor] | None = None) -> Part:
    """Return the part that is some whole rows, of which these are the logits."""
    batch, heads, _, n = problem.shape
    given = problem if row_lse is not None else replace(problem, score=TensorBias(logits))
    at = given.tile(range(batch), range(heads), rows, range(n))
    state = BlockState.FULL if given.mask is None else BlockState.PARTIAL
    columns = ColumnBlock(at.columns, ((at.columns, state),))
    return _RecordedPart(given, at, columns, lambda: logits, row_lse, Workspace(given.dtype, given.device))


def _carries(part: Part, statistics: Sequence[Statistic]) -> list[Any]:
    """Return the carries after one part."""
    with _explained():
        carries = [statistic.start(part.problem) for statistic in statistics]
        if 0 in part.problem.shape:
            return carries
        return [s.step(carry, part, part.at) for s, carry in zip(statistics, carries, strict=True)]


def _finish(statistics: Sequence[Statistic], carries: Sequence[Any]) -> list[Any]:
    with _explained():
        return [s.finish(carry) for s, carry in zip(statistics, carries, strict=True)]


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do where a transform of torch cannot follow: a carry is written to in place."""
    try:
        yield
    except RuntimeError as error:
        if not transforming():
            raise
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
