"""How many cells a mask allows in columns, diagonals and blocks, where every row sees one run of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attlas.engine.fold import Blocks
from attlas.engine.problem import Problem

__all__ = ["cells_of_blocks", "cells_of_diagonals", "interval_of", "queries_of_keys"]

_EDGES = 1 << 18  # pairs of a row and an edge of blocks that are counted at a time


def interval_of(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Return the first key of each row and the one after its last, within the matrix.

    Returns
    -------
    first, stop : Tensor of int64, shape (batch or 1, heads or 1, m)
        ``first == stop`` for a row that sees no key. None where the mask is not one run of keys a row.
    """
    m, n = problem.shape[2:]
    if problem.mask is None:
        return torch.zeros(1, 1, m, dtype=torch.int64), torch.full((1, 1, m), n)
    return problem.interval


def _interval(problem: Problem) -> tuple[Tensor, Tensor]:
    found = interval_of(problem)
    return found if found is not None else (torch.zeros(1, 1, 0), torch.zeros(1, 1, 0))


def _counted(first: Tensor, stop: Tensor, size: int) -> Tensor:
    """Return how many of the runs [first, stop) hold each of `size` places."""
    one = torch.ones_like(first)
    steps = first.new_zeros(*first.shape[:2], size + 1)
    steps.scatter_add_(-1, first, one).scatter_add_(-1, stop, -one)
    return steps.cumsum(-1)[..., :size]


def queries_of_keys(problem: Problem) -> Tensor:
    """Return how many queries may see each key, broadcastable to (batch, heads, n)."""
    first, stop = _interval(problem)
    return _counted(first, stop, problem.shape[3]).to(problem.dtype)


def cells_of_diagonals(problem: Problem) -> Tensor:
    """Return how many cells of each diagonal are allowed, broadcastable to (batch, heads, m + n - 1)."""
    first, stop = _interval(problem)
    m, n = problem.shape[2:]
    shift = m - 1 - torch.arange(m, device=first.device)
    return _counted(first + shift, stop + shift, m + n - 1).to(problem.dtype)


def cells_of_blocks(problem: Problem, blocks: Blocks) -> Tensor:
    """Return how many cells of each block are allowed, broadcastable to (batch, heads, height, width)."""
    rows, columns = blocks
    if problem.mask is None:
        return (rows.diff().unsqueeze(-1) * columns.diff()).to(problem.dtype)[None, None]
    first, stop = _interval(problem)
    inside = slice(int(rows[0]), int(rows[-1]))
    first, stop = first[..., inside], stop[..., inside]
    band = torch.repeat_interleave(torch.arange(len(rows) - 1), rows.diff())
    counts = first.new_zeros(*first.shape[:2], len(rows) - 1, len(columns))  # cells left of each edge
    some = max(_EDGES // (max(math.prod(first.shape[:2]), 1) * len(columns)), 1)
    for low, high, place in zip(first.split(some, dim=-1), stop.split(some, dim=-1), band.split(some), strict=True):
        left = torch.minimum(columns, high.unsqueeze(-1)).sub_(low.unsqueeze(-1)).clamp_(min=0)
        counts.index_add_(-2, place, left)
    return counts.diff(dim=-1).to(problem.dtype)
