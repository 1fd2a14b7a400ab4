"""How many cells a mask allows in columns, diagonals and blocks, where every row sees one run of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attlas.engine.outputs import Blocks
from attlas.engine.problem import Problem
from attlas.foundation.devices import to_device


def interval_of(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Return the first key of each row and the one after its last, within the matrix.

    Returns
    -------
    first, stop : Tensor of int64, shape (batch or 1, heads or 1, m)
        ``first == stop`` for a row that sees no key. None where the mask is not one run of keys a row.
    """
    m, n = problem.shape[2:]
    if problem.mask is None:
        first = torch.zeros(1, 1, m, dtype=torch.int64, device=problem.device)
        return first, torch.full_like(first, n)
    return problem.allowed_runs


def _unknown_counts(problem: Problem, *size: int) -> Tensor:
    """Return counts that the mask does not tell, as it is not one run of keys per row.

    All NaN, which no mean can hide.
    """
    return torch.full((1, 1, *size), math.nan, dtype=problem.dtype, device=problem.device)


def _count_of_runs(problem: Problem, size: int, shift: Tensor | int = 0) -> Tensor:
    """Return how many runs of keys (one per row, moved by `shift`) hold each of the positions 0 to `size` - 1."""
    runs = interval_of(problem)
    if runs is None:
        return _unknown_counts(problem, size)
    first, stop = (end + shift for end in runs)
    one = torch.ones_like(first)
    # A run adds 1 at its first position and takes it away after its last: the running sum counts the runs.
    steps = first.new_zeros(*first.shape[:2], size + 1)
    steps.scatter_add_(-1, first, one).scatter_add_(-1, stop, -one)
    return steps.cumsum(-1)[..., :size].to(problem.dtype)


def queries_of_keys(problem: Problem) -> Tensor:
    """Return how many queries may see each key, broadcastable to (batch, heads, n); NaN where that is not known."""
    return _count_of_runs(problem, problem.shape[3])


def cells_of_diagonals(problem: Problem) -> Tensor:
    """Return how many cells of each diagonal are allowed, (batch or 1, heads or 1, m + n - 1); NaN if unknown."""
    m, n = problem.shape[2:]
    # Cell (i, j) lies on diagonal j - i + m - 1: the run of row i is moved by m - 1 - i.
    return _count_of_runs(problem, m + n - 1, m - 1 - torch.arange(m, device=problem.device))


def cells_of_blocks(problem: Problem, blocks: Blocks) -> Tensor:
    """Return how many cells of each block are allowed, (batch or 1, heads or 1, height, width); NaN if unknown."""
    rows, columns = torch.tensor(blocks[0], device="cpu"), torch.tensor(blocks[1], device="cpu")
    if problem.mask is None:
        cells = (rows.diff().unsqueeze(-1) * columns.diff()).to(problem.dtype)[None, None]
        return cells if problem.device.type == "cpu" else to_device(cells, problem.device)
    runs = problem.allowed_runs
    if runs is None:
        return _unknown_counts(problem, len(rows) - 1, len(columns) - 1)
    first, stop = runs
    inside = slice(blocks[0][0], blocks[0][-1])
    bands, edges = len(rows) - 1, len(columns)
    # Where the counts of each row's band of blocks begin in `sums`, with one place more than there are edges.
    band = torch.repeat_interleave(torch.arange(bands, device=rows.device), rows.diff()) * (edges + 1)
    if problem.device.type != "cpu":
        band, columns = to_device(band, problem.device), to_device(columns, problem.device)
    # Left of an edge c a run has max(c - first, 0) - max(c - stop, 0) cells: of each band it is enough to know how many
    # runs begin and end before each edge, and where, which takes far fewer numbers than rows times edges.
    sums = first.new_zeros(2, *first.shape[:2], bands * (edges + 1))
    number, total = sums
    for ends, sign in ((first, 1), (stop, -1)):
        ends = ends[..., inside].contiguous()
        places = torch.searchsorted(columns, ends).add_(band)
        number.scatter_add_(-1, places, torch.full_like(ends, sign))
        total.scatter_add_(-1, places, ends * sign)
    number, total = sums.unflatten(-1, (bands, edges + 1))[..., :edges].cumsum(-1)
    left: Tensor = number * columns - total
    return left.diff(dim=-1).to(problem.dtype)
