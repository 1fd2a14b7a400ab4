"""Reads that carry a gradient: rows of the definition, which autograd records, and statistics of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attlas.engine import reference
from attlas.engine.cover import Strip
from attlas.engine.fold import Part, Statistic, lowest
from attlas.engine.problem import Problem
from attlas.engine.workspace import Workspace
from attlas.errors import BackendError, TooLargeError
from attlas.inputs import transforming
from attlas.masks.base import Coverage
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
        raise TooLargeError(
            where,
            "with a gradient it is computed from whole rows, and they would be larger than the limit.",
            {"A (batch, heads, m, n)": f"{tuple(problem.shape)} {str(problem.dtype).removeprefix('torch.')}"},
            found=f"{size:,} bytes, the limit is {DENSE_LIMIT:,}",
            fix="read A.detach(), or under torch.no_grad(), for numbers without a gradient; "
            "A @ v carries one at any length.",
        )
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
    return _collect(given, _RecordedPart(*_whole(given, logits)), statistics)


def collect_of(problem: Problem, weights: Tensor, statistics: Sequence[Statistic]) -> list[Any]:
    """Return statistics of a dense tensor of weights, shape (batch, heads, m, n), with their graph."""
    weights = weights.to(problem.dtype)
    logits = torch.where(weights > 0, torch.where(weights > 0, weights, 1.0).log(), -math.inf)
    part = _GivenPart(*_whole(problem, logits))
    part.weights = weights
    return _collect(problem, part, statistics)


def _whole(problem: Problem, logits: Tensor) -> tuple[Any, ...]:
    """Return what a part holds that is the whole matrix."""
    at = problem.tile(*map(range, problem.shape))
    coverage = Coverage.ALL if problem.mask is None else Coverage.SOME
    strip = Strip(at.columns, ((at.columns, coverage),))
    return problem, at, strip, lambda: logits, None, Workspace(problem.dtype, problem.device)


def _collect(given: Problem, part: Part, statistics: Sequence[Statistic]) -> list[Any]:
    at = part.at
    try:
        carries = [statistic.start(given) for statistic in statistics]
        if 0 not in given.shape:
            carries = [s.step(carry, part, at) for s, carry in zip(statistics, carries, strict=True)]
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
    def shift(self) -> Tensor:
        # Weights do not depend on it, and so neither do gradients.
        top = self._top.detach().masked_fill(self._top <= lowest(self._top.dtype) / 2, -math.inf)
        top = top if self._sink is None else torch.maximum(top, self._sink.detach())
        return torch.where(top == -math.inf, 0.0, top)

    @cached_property
    def shifted(self) -> Tensor:
        return self._logits - self.shift.unsqueeze(-1)

    @cached_property
    def _raw(self) -> Tensor:
        return self.shifted.exp()

    @cached_property
    def _inverse(self) -> Tensor:
        none = self.exact_lse == -math.inf
        return torch.where(none, 0.0, 1 / torch.where(none, 1.0, self._total))

    @cached_property
    def exact_lse(self) -> Tensor:
        none, total = self._total == 0, self._total.double()
        return torch.where(none, -math.inf, self.shift + torch.log(torch.where(none, 1.0, total)))

    @cached_property
    def weights(self) -> Tensor:
        return self._raw * self._inverse.unsqueeze(-1)

    @cached_property
    def logits(self) -> Tensor:
        return self.score()

    def row_products(self, x: Tensor, y: Tensor) -> Tensor:
        # A weight of 0 may stand beside the lowest number, whose product with a gradient would overflow.
        return (x * torch.where(x == 0, 0.0, y)).sum(dim=-1)


class _GivenPart(_RecordedPart):
    """A part whose weights are known, and whose log-sum-exp is 0."""

    weights: Tensor

    @cached_property
    def shift(self) -> Tensor:
        return torch.zeros_like(self._top)

    @cached_property
    def exact_lse(self) -> Tensor:
        return torch.zeros_like(self._top, dtype=torch.float64)

    @cached_property
    def mass(self) -> Tensor:
        return self.weights.sum(dim=-1)

    def as_weights(self, shifted: Tensor) -> Tensor:
        return torch.exp(shifted)
