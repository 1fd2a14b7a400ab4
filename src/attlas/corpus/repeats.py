"""Weights on copies of a token and on what followed them: only these cells of the matrix are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

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

__all__ = ["Copies", "Repeated", "repeated_weights"]

_LARGE = 0.01  # weights below it do not count for HeadVis's induction score
_BELOW_LARGE = float(np.nextafter(np.float32(_LARGE), np.float32(0.0)))
_SIDE = 32  # rows of a block with several tokens
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


class Copies:
    """The positions of a text whose tokens occur twice or more, token by token.

    Parameters
    ----------
    ids : array of int64, shape (n,)
        Tokens.

    Attributes
    ----------
    positions : Tensor of int64, shape (p,)
        Positions of all such tokens, ascending within each, and some that only fill up.
    filled : Tensor of bool, shape (p,)
        Which of them are none that fill up.
    groups : list of (int, int, int)
        The first position, how many blocks, and positions of a block: one has all tokens that are no more than `_SIDE`
        times there, several to a block, and each other one a single token.
    others : Tensor of bool, shape (blocks, _SIDE, _SIDE)
        Cells of the blocks of the first group that are no earlier copy.
    rows : int
        Rows whose token occurred before.
    """

    def __init__(self, ids: NDArray[np.int64]) -> None:
        order = np.argsort(ids, kind="stable")
        _, start, count = np.unique(ids[order], return_index=True, return_counts=True)
        by_count = np.argsort(-count, kind="stable")
        by_count = by_count[count[by_count] > 1]
        start, count = start[by_count], count[by_count]
        large = int((count > _SIDE).sum())
        alone = [order[at : at + size] for at, size in zip(start[:large], count[:large], strict=True)]
        blocks: list[list[int]] = []
        room = 0
        for token in range(large, len(count)):
            if count[token] > room:
                blocks.append([])
                room = _SIDE
            blocks[-1].append(token)
            room -= count[token]
        packed = np.full((len(blocks), _SIDE), -1)
        label = np.full((len(blocks), _SIDE), -1)
        for row, tokens in enumerate(blocks):
            places = np.concatenate([np.arange(start[one], start[one] + count[one]) for one in tokens])
            packed[row, : len(places)] = order[places]
            label[row, : len(places)] = np.repeat(tokens, count[tokens])
        positions = torch.from_numpy(np.concatenate([packed.ravel(), *alone]))
        self.filled, self.positions = positions >= 0, positions.clamp(min=0)
        self.groups = [(0, len(blocks), _SIDE)] if blocks else []
        for one in alone:
            at = sum(count * size for _, count, size in self.groups[-1:]) + (self.groups[-1][0] if self.groups else 0)
            self.groups.append((at, 1, len(one)))
        same = torch.from_numpy((label[:, :, None] == label[:, None, :]) & (label[:, :, None] >= 0))
        self.others = ~same.tril(-1)
        self.rows = int((count - 1).sum())

    def earlier(self, group: tuple[int, int, int], rows: slice) -> Tensor:
        """Return which cells of some rows are earlier copies, shape (blocks, rows, size)."""
        at, blocks, size = group
        if self.is_packed(group):
            first = at // _SIDE
            return ~self.others[first : first + blocks, rows]
        return torch.ones(1, size, size, dtype=torch.bool).tril(-1)[:, rows]

    def is_packed(self, group: tuple[int, int, int]) -> bool:
        """Return whether the blocks of a group hold several tokens each."""
        return group[0] < self.others.shape[0] * _SIDE


def repeated_weights(
    A: AttentionMatrix, ids: Tensor, first: Tensor, stop: Tensor, copies: Sequence[Copies] | None = None
) -> list[Repeated]:
    """Return the weight on copies of each row's token, and on what followed them, one result for each text.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, n, n)
        Self-attention.
    ids : Tensor of int64, shape (batch, n)
        Tokens, on the CPU.
    first, stop : Tensor of int64, shape (batch, n)
        The run of keys that each row may see.
    copies : sequence of Copies, optional
        Those of each text, where they are known.

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
        of_text = Copies(ids[b].numpy()) if copies is None else copies[b]
        # Where a row sees all that stands before it, it sees every earlier copy, and never nothing else.
        plain = bool(((first[b] == 0) & (stop[b] > torch.arange(ids.shape[1]))).all())
        seen = None if plain else _Seen(of_text, first[b], stop[b])
        rows = [of_text.rows] * 2 if seen is None else seen.rows(of_text)
        if slow is not None:
            sums = np.stack([t[b].double().sum(-1).cpu().numpy() for t in slow])
        else:
            sums = _sums(A, b, cast(Dot, dot), of_text, seen)
        out.append(Repeated(sums[0], sums[1], sums[2], rows[0], rows[1], of_text.rows))
    return out


class _Seen:
    """What a mask lets the rows of a text see of copies, where that is not all of them."""

    def __init__(self, copies: Copies, first: Tensor, stop: Tensor) -> None:
        self.copies, positions = copies, copies.positions
        self.positions, self.first, self.stop = positions, first[positions], stop[positions]

    def targets(self, group: tuple[int, int, int], rows: slice, lag: int) -> Tensor:
        """Return which copies (or what followed them) the rows of a group may see, shape (tokens, rows, copies)."""
        at, tokens, size = group
        place = slice(at, at + tokens * size)
        positions, first, stop = (t[place].view(tokens, size) for t in (self.positions, self.first, self.stop))
        j = positions[:, None, :] + lag
        return self.copies.earlier(group, rows) & (first[:, rows, None] <= j) & (j < stop[:, rows, None])

    def useful(self, group: tuple[int, int, int], rows: slice, lag: int) -> Tensor:
        """Return the targets of rows that see another key, too."""
        at, tokens, size = group
        keys = (self.stop - self.first)[at : at + tokens * size].view(tokens, size)[:, rows, None]
        seen = self.targets(group, rows, lag)
        return seen & (keys > seen.sum(-1, keepdim=True))

    def rows(self, copies: Copies) -> list[int]:
        """Return how many rows have the choice, for what followed copies and for copies."""
        found = [0, 0]
        for group in copies.groups:
            for block in _blocks(group, 1):
                for number, lag in ((0, 1), (1, 0)):
                    found[number] += int(self.useful(_part(group, block[0]), block[1], lag).any(-1).sum())
        return found


def _blocks(group: tuple[int, int, int], heads: int) -> Iterator[tuple[slice, slice]]:
    """Yield some tokens of a group and some rows of each, so that their cells are not too many."""
    _, tokens, size = group
    some = max(_CELLS // (size * size * heads), 1)
    rows = size if some > 1 or size * size * heads <= _CELLS else max(_CELLS // (size * heads), 1)
    for token in range(0, tokens, some):
        for row in range(0, size, rows):
            yield slice(token, min(token + some, tokens)), slice(row, min(row + rows, size))


def _part(group: tuple[int, int, int], tokens: slice) -> tuple[int, int, int]:
    at, _, size = group
    return at + tokens.start * size, tokens.stop - tokens.start, size


def _sums(A: AttentionMatrix, b: int, dot: Dot, copies: Copies, seen: _Seen | None) -> NDArray[np.float64]:
    """Return the sums of a text: on what followed copies, on copies, and the first of large weights, (3, heads)."""
    heads, n, _ = dot.q[b].shape
    sums = np.zeros((3, heads))
    accurate = torch.promote_types(dot.q.dtype, torch.float32)
    positions = copies.positions.to(dot.q.device)
    queries = dot.q[b].index_select(1, positions).to(accurate) * dot.scale
    keys = [dot.k[b].index_select(1, (positions + lag).clamp_(max=n - 1)).to(accurate) for lag in (1, 0)]
    keys = [k if len(k) == heads else k.repeat_interleave(heads // len(k), dim=0) for k in keys]
    level = A._known_lse()[b] if dot.row is None else A._known_lse()[b] - dot.row[b]
    level = level.index_select(1, positions)
    # A row without a key, and one that only fills up, has weights 0.
    level = torch.where(level.isfinite() & copies.filled.to(level.device), level, torch.inf).to(accurate)
    large = math.nextafter(_LARGE, 0.0) if accurate is torch.float64 else _BELOW_LARGE
    for group in copies.groups:
        for tokens, rows in _blocks(group, heads):
            part = at, count, size = _part(group, tokens)
            packed = None
            if copies.is_packed(part):
                packed = copies.others[at // size : at // size + count, rows, : rows.stop].to(level.device)
            q, lse, *both = (t[:, at : at + count * size].unflatten(1, (count, size)) for t in (queries, level, *keys))
            for number, lag in ((0, 1), (1, 0)):
                # Earlier copies stand to the left: of some rows, what stands to the right of the last is none.
                logits = torch.matmul(q[:, :, rows], both[number][:, :, : rows.stop].mT)
                logits = dot.cap * torch.tanh(logits / dot.cap) if dot.cap else logits
                weights = logits.sub_(lse[:, :, rows, None]).exp_()
                if packed is None:
                    weights.tril_(rows.start - 1)
                else:
                    weights.masked_fill_(packed, 0.0)
                chosen = weights
                if seen is not None:
                    chosen = weights * seen.useful(part, rows, lag)[..., : rows.stop].to(weights.device)
                    weights = weights * seen.targets(part, rows, lag)[..., : rows.stop].to(weights.device)
                sums[number] += _total(chosen)
                if lag:
                    sums[2] += _total(functional.threshold(weights, large, 0.0, inplace=True))
    return sums


def _total(weights: Tensor) -> NDArray[np.float64]:
    return weights.sum(-1).sum((1, 2), dtype=torch.float64).cpu().numpy()
