"""Weights on copies of a token and on what followed them: only these cells of the matrix are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from attlas.heads import DuplicateToken, Induction
from attlas.heads.targets import TargetSums
from attlas.matrix import AttentionMatrix
from attlas.scores.base import Dot
from attlas.stats import Part
from attlas.tiles import Tile

__all__ = ["Repeated", "repeated_weights"]

_LARGE = 0.01  # weights below it do not count for HeadVis's induction score
_below_large = float(np.nextafter(np.float32(_LARGE), np.float32(0.0)))
_CELLS = 1 << 18  # cells that are computed at once


class Repeated(NamedTuple):
    """Sums of a text, each of shape (heads,), and the rows that they are over.

    Parameters
    ----------
    induction, duplicate : array
        Weight on the positions after earlier copies of a row's token, and on the copies.
    large : array
        The first, of weights from 0.01 on.
    induction_rows, duplicate_rows : int
        Rows that may see such a key and another.
    rows : int
        Rows whose token occurred before.
    """

    induction: NDArray[np.float64]
    duplicate: NDArray[np.float64]
    large: NDArray[np.float64]
    induction_rows: int
    duplicate_rows: int
    rows: int


class _LargeInduction(Induction):
    """Each row's weight on the positions after copies, of weights from 0.01 on: shape (batch, heads, rows)."""

    def step(self, carry: TargetSums, part: Part, at: Tile) -> TargetSums:
        targets = self.targets(at, carry.prepared[1])
        weights = part.weights
        carry.mass[at.place] += torch.where(targets & (weights >= _LARGE), weights, 0.0).sum(-1)
        return carry

    def finish(self, carry: TargetSums) -> Tensor:
        return carry.mass


class _AllInduction(Induction):
    """Each row's weight on the positions after copies, 0 where it has no choice."""

    def finish(self, carry: TargetSums) -> Tensor:
        choice = (carry.targets > 0) & (carry.keys > carry.targets)
        return torch.where(choice, carry.mass, 0.0)


class _AllDuplicates(DuplicateToken):
    """Each row's weight on earlier copies, 0 where it has no choice."""

    finish = _AllInduction.finish


def repeated_weights(A: AttentionMatrix, ids: Tensor, first: Tensor, stop: Tensor) -> list[Repeated]:
    """Return the weight on copies of each row's token, and on what followed them, one result for each text.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, n, n)
        Self-attention.
    ids : Tensor of int64, shape (batch, n)
        Tokens, on the CPU.
    first, stop : Tensor of int64, shape (batch, n)
        The run of keys that each row may see.

    Notes
    -----
    Positions of one token make a small dense matrix: its copies below the diagonal. Where the score is a dot product
    these are computed alone, all tokens of similar frequency together; for other scores the whole matrix is.
    """
    problem = A.problem
    dot = problem.score.as_dot(problem.q, problem.k)
    dot = None if dot is None or dot.bias is not None else dot
    slow = None if dot is not None else A.collect(_AllInduction(ids), _AllDuplicates(ids), _LargeInduction(ids))
    out = []
    for b in range(len(ids)):
        sums = np.zeros((3, problem.shape[1]))
        rows = np.zeros(3, dtype=np.int64)
        # Where a row sees all that stands before it, it sees every earlier copy, and never nothing else.
        plain = bool(((first[b] == 0) & (stop[b] > torch.arange(ids.shape[1]))).all())
        for group in _groups(ids[b].numpy(), problem.shape[1]):
            if plain:
                rows += int((group[:, 1:] >= 0).sum())
            else:
                _count(rows, group, first[b], stop[b])
            if dot is not None:
                _add(sums, A, b, dot, group, first[b], stop[b], plain=plain)
        if slow is not None:
            sums = np.stack([t[b].double().sum(-1).cpu().numpy() for t in slow])
        out.append(Repeated(*sums, *(int(count) for count in rows)))
    return out


def _groups(ids: NDArray[np.int64], heads: int) -> Iterator[Tensor]:
    """Yield the positions of tokens that occur twice or more, shape (tokens, copies), ascending; -1 fills a row."""
    order = np.argsort(ids, kind="stable")
    _, start, count = np.unique(ids[order], return_index=True, return_counts=True)
    many = count > 1
    start, count = start[many], count[many]
    sizes = 1 << np.ceil(np.log2(np.maximum(count, 2))).astype(int)
    sizes = np.where(count > 64, count, sizes)  # few tokens are so frequent: they need no filling
    for size in np.unique(sizes):
        these = sizes == size
        within = np.arange(size)
        place = start[these][:, None] + within
        filled = within < count[these][:, None]
        positions = np.where(filled, order[np.minimum(place, len(order) - 1)], -1)
        step = max(_CELLS // (int(size) ** 2 * heads), 1)
        for part in range(0, len(positions), step):
            yield torch.from_numpy(positions[part : part + step])


def _targets(group: Tensor, rows: slice, lag: int, first: Tensor, stop: Tensor) -> Tensor:
    """Return which copies (or what followed them) the rows of a group may see, shape (tokens, rows, copies)."""
    i, j = group[:, rows, None].clamp(min=0), group[:, None, :] + lag
    earlier = torch.ones(group.shape[1], group.shape[1], dtype=torch.bool).tril(-1)[rows]
    real = (group[:, rows, None] >= 0) & (group[:, None, :] >= 0)
    return earlier & real & (first[i] <= j) & (j < stop[i])


def _blocks(size: int, heads: int) -> Iterator[slice]:
    step = max(_CELLS // (size * heads), 1)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _count(rows: NDArray[np.int64], group: Tensor, first: Tensor, stop: Tensor) -> None:
    """Add the rows of a group that have the choice, for what followed copies and for copies, and all that repeat."""
    rows[2] += int((group[:, 1:] >= 0).sum())
    keys = (stop - first)[group.clamp(min=0)]
    for block in _blocks(group.shape[1], 1):
        for number, lag in ((0, 1), (1, 0)):
            targets = _targets(group, block, lag, first, stop).sum(-1)
            rows[number] += int(((targets > 0) & (keys[:, block] > targets)).sum())


def _add(
    sums: NDArray[np.float64],
    A: AttentionMatrix,
    b: int,
    dot: Dot,
    group: Tensor,
    first: Tensor,
    stop: Tensor,
    *,
    plain: bool,
) -> None:
    """Add the weights of a group of tokens, in every head."""
    k, device = dot.k[b], dot.q.device
    accurate = torch.promote_types(k.dtype, torch.float32)
    some = group.clamp(min=0).to(device)
    filled, keys = (group >= 0).to(device), (stop - first)[group.clamp(min=0)]
    columns = [k[:, (some + lag).clamp(max=k.shape[1] - 1)].to(accurate) for lag in (1, 0)]
    columns = [t.repeat_interleave(len(sums[0]) // len(t), dim=0).mT for t in columns]
    for block in _blocks(group.shape[1], len(sums[0])):
        here = some[:, block]
        rows = dot.q[b][:, here].to(accurate) * dot.scale
        level = A._known_lse()[b][:, here].unsqueeze(-1)
        if dot.row is not None:
            level = level - dot.row[b][:, here].unsqueeze(-1)
        # A row without a key, and one that only fills, has weights 0.
        level = torch.where(level.isfinite() & filled[:, block, None], level, torch.inf).to(accurate)
        for number, lag in ((0, 1), (1, 0)):
            logits = torch.matmul(rows, columns[number])
            logits = dot.cap * torch.tanh(logits / dot.cap) if dot.cap else logits
            weights = torch.exp(logits.sub_(level)).tril_(block.start - 1)  # earlier copies stand to the left
            chosen = weights
            if not plain:
                seen = _targets(group, block, lag, first, stop)
                weights = weights * seen.to(device)
                chosen = weights * (keys[:, block, None] > seen.sum(-1, keepdim=True)).to(device)
            sums[number] += _total(chosen)
            if lag:
                large = math.nextafter(_LARGE, 0.0) if accurate is torch.float64 else _below_large
                sums[2] += _total(functional.threshold_(weights, large, 0.0))


def _total(weights: Tensor) -> NDArray[np.float64]:
    return weights.sum(-1).sum((1, 2), dtype=torch.float64).cpu().numpy()
