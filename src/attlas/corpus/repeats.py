"""Weights on copies of a token and on what followed them: only these cells of the matrix are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from attlas.foundation.checks import has_float64
from attlas.foundation.tiles import Tile
from attlas.heads import DuplicateToken, Induction
from attlas.heads.targets import TargetSums
from attlas.matrix import AttentionMatrix
from attlas.scores.base import Dot
from attlas.stats import Part

_LEAST_COUNTED_WEIGHT = 0.01  # weights below it do not count for HeadVis's induction score
_BELOW_LARGE = float(np.nextafter(np.float32(_LEAST_COUNTED_WEIGHT), np.float32(0.0)))
_BLOCK_SIZES = (8, 16, 32, 64)  # rows of a block with several tokens
_CELLS_AT_ONCE = 1 << 18  # cells that are computed at once
_LEAST_ROWS_AT_ONCE = 16  # rows of a block that are computed at once, at least
_LOG2_OF_E = 1 / math.log(2)
_COPY_LAGS = (1, 0)  # what followed a copy, and the copy itself


class _LargeInduction(Induction):
    """Each row's weight on the positions after copies, of weights from 0.01 on: shape (batch, heads, rows)."""

    def step(self, carry: TargetSums, part: Part, at: Tile) -> TargetSums:
        # Adds to the sums of each row what one tile has; `tokens` is what `prepare` returned.
        _, tokens = carry.prepared
        targets = self.targets(at, tokens)
        weights = part.weights
        carry.mass[at.place] += torch.where(targets & (weights >= _LEAST_COUNTED_WEIGHT), weights, 0.0).sum(-1)
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


class _BlockGroup(NamedTuple):
    """Blocks of one size. A block holds the positions of some tokens; their earlier copies are cells of size × size.

    Parameters
    ----------
    queries : Tensor of int64, shape (blocks, size)
        The positions, ascending for each token; any where a block is filled up.
    keys : Tensor of int64, shape (blocks, 2, size)
        What follows them, and the positions.
    hidden : Tensor, shape (blocks, size, 2 size), optional
        0 where a column holds an earlier copy of the row's token, and minus infinity elsewhere; None where a block
        holds a single token, so that the copies are the cells below the diagonal.
    """

    queries: Tensor
    keys: Tensor
    hidden: Tensor | None

    def cut(self, heads: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield queries, keys and hidden cells of some blocks and rows, so that their cells are not too many."""
        blocks, size = self.queries.shape
        blocks_at_once = max(_CELLS_AT_ONCE // (2 * heads * size**2), 1)
        rows = min(max(_CELLS_AT_ONCE // (2 * heads * size), _LEAST_ROWS_AT_ONCE), size)
        for first_block in range(0, blocks, blocks_at_once):
            for row in range(0, size, rows):
                queries = self.queries[first_block : first_block + blocks_at_once, row : row + rows]
                stop = row + queries.shape[1]  # earlier copies stand to the left of the last row
                if self.hidden is None:
                    hidden = torch.full((1, stop - row, stop), -math.inf).triu_(row).repeat(1, 1, 2)
                else:
                    hidden = self.hidden[first_block : first_block + blocks_at_once, row:stop]
                    hidden = hidden if stop == size else hidden.unflatten(-1, (2, -1))[..., :stop].flatten(-2)
                yield queries, self.keys[first_block : first_block + blocks_at_once, :, :stop], hidden


class TokenPositions:
    """Where the tokens of a text stand, and which of them occur more than once.

    Parameters
    ----------
    ids : array of int64, shape (n,)
        Tokens.

    Attributes
    ----------
    tokens : array of int64, shape (u,)
        The different tokens, ascending.
    order, starts : array of int64, shape (n,) and (u,)
        All positions token by token, and where each token begins among them.
    groups : list
        Tokens that occur more than once: blocks of one size together.
    rows : int
        Rows whose token occurred before.
    """

    def __init__(self, ids: NDArray[np.int64]) -> None:
        # A stable sort keeps the positions of each token in ascending order.
        self.order = np.argsort(ids, kind="stable")
        self.tokens, self.starts, self._counts = np.unique(ids[self.order], return_index=True, return_counts=True)
        self.rows = int((self._counts - 1).sum())
        self.groups = list(self._groups_of_blocks())

    def _groups_of_blocks(self) -> Iterator[_BlockGroup]:
        """Yield the blocks of all tokens that occur more than once, those of one size as one group.

        A token goes into the smallest block of `_BLOCK_SIZES` that holds its positions; one with more positions is a
        group alone.
        """
        least = 1
        for size in _BLOCK_SIZES:
            counts = np.unique(self._counts[(self._counts > least) & (self._counts <= size)]).tolist()
            least = size
            if counts:
                packed = [self._positions_in_blocks(count, size) for count in counts]
                token_of_slot = np.arange(size) // np.array(counts)[:, None]  # by how often the tokens of a block occur
                same = np.tril(token_of_slot[:, :, None] == token_of_slot[:, None], -1)
                same = same.repeat([len(each) for each in packed], axis=0)
                blocks = np.concatenate(packed)
                same &= blocks[:, :, None] >= 0
                hidden = np.where(np.tile(same, 2), np.float32(0.0), np.float32(-np.inf))
                yield self._group_of_blocks(blocks, torch.from_numpy(hidden))
        for token in np.flatnonzero(self._counts > least):
            yield self._group_of_blocks(
                self.order[None, self.starts[token] : self.starts[token] + self._counts[token]], None
            )

    def _group_of_blocks(self, blocks: NDArray[np.int64], hidden: Tensor | None) -> _BlockGroup:
        """Return blocks of positions, -1 where they are filled up, as a group; `hidden` is None for one token alone."""
        queries = torch.from_numpy(blocks).clamp(min=0)
        keys = torch.stack([queries + lag for lag in _COPY_LAGS], dim=1).clamp_(max=len(self.order) - 1)
        return _BlockGroup(queries, keys, hidden)

    def _positions_in_blocks(self, count: int, size: int) -> NDArray[np.int64]:
        """Return the positions of the tokens that occur `count` times, in blocks of `size` that -1 fills up."""
        # `starts`: where each token's run of positions begins in `order`, the positions sorted by token.
        each = size // count  # tokens of a block
        starts = self.starts[self._counts == count]
        slots = np.full((-(-len(starts) // each) * each, count), -1)
        slots[: len(starts)] = self.order[starts[:, None] + np.arange(count)]
        packed = slots.reshape(-1, each * count)
        return np.pad(packed, ((0, 0), (0, size - each * count)), constant_values=-1)


class VisibleCopies:
    """Which copies the rows of a text may see.

    Parameters
    ----------
    tokens : TokenPositions
        Where the copies are.
    first, stop : Tensor of int64, shape (n,)
        The run of keys that each row may see.

    Attributes
    ----------
    everything : bool
        Whether each row may see all that stands before it: then it may see each copy, and never nothing else.
    rows : list of int
        Rows that may see such a key and another: what follows copies, and copies.
    """

    def __init__(self, tokens: TokenPositions, first: Tensor, stop: Tensor) -> None:
        self.tokens, self._first, self._stop = tokens, first, stop
        self.everything = bool(((first == 0) & (stop > torch.arange(len(first)))).all())
        self.rows = [tokens.rows] * 2
        if not self.everything:
            parts = [self.cells(*part)[1] for group in tokens.groups for part in group.cut(1)]
            self.rows = [sum(int(part[..., at, :].any(-1).sum()) for part in parts) for at in range(len(_COPY_LAGS))]

    def cells(self, queries: Tensor, keys: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return which copies some rows may see, and those of them in rows that may also see another key.

        Arguments are those that `_Group.cut` yields. Both results have the shape (blocks, rows, 2, keys); the axis of
        size 2 is what followed a copy, and the copy itself.
        """
        first, stop = (end[queries][..., None, None] for end in (self._first, self._stop))
        keys = keys.unsqueeze(1)
        seen = (hidden.unflatten(-1, (2, -1)) == 0) & (first <= keys) & (keys < stop)
        return seen, seen & (stop - first > seen.sum(-1, keepdim=True))


def repeated_weights(A: AttentionMatrix, ids: Tensor, copies: Sequence[VisibleCopies]) -> list[NDArray[np.float64]]:
    """Return the weight on what followed copies of each row's token, and on the copies: one result for each text.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, n, n)
        Self-attention.
    ids : Tensor of int64, shape (batch, n)
        Tokens, on the CPU.
    copies : sequence of VisibleCopies
        Those of each text.

    Returns
    -------
    list of array, shape (3, heads)
        Sums over the rows: on what followed copies, on copies, and the first again of weights from 0.01 on.

    Notes
    -----
    Positions of one token make a small dense matrix: its copies below the diagonal. Where the score is a dot product
    these are computed alone, all tokens of similar frequency together; for other scores the whole matrix is.
    """
    problem = A.problem
    dot = problem.score.as_dot(problem.q, problem.k)
    if dot is None or dot.bias is not None:
        found = A.collect(_AllInduction(ids), _AllDuplicates(ids), _LargeInduction(ids))
        return list(torch.stack([sum_of(t) for t in found], dim=1).cpu().numpy())
    lse = A.softmax_weights.lse()
    if not has_float64(A.device):  # two numbers of float32 there, whose sum it is
        lse, dot = lse.cpu().double().sum(-1), replace(dot, q=dot.q.cpu(), k=dot.k.cpu(), row=_tensor_on_cpu(dot.row))
    return [_sums_over_rows(lse[b], b, dot, of_text) for b, of_text in enumerate(copies)]


def sum_of(t: Tensor) -> Tensor:
    """Return the sums over the last axis in float64: on the CPU where the device has none."""
    return (t if has_float64(t.device) else t.cpu()).sum(-1, dtype=torch.float64)


def _tensor_on_cpu(t: Tensor | None) -> Tensor | None:
    """Return a tensor on the CPU; None where there is none."""
    return None if t is None else t.cpu()


def _sums_over_rows(lse: Tensor, b: int, dot: Dot, visible: VisibleCopies) -> NDArray[np.float64]:
    """Return the sums of text `b` of the batch over its rows, shape (3, heads), as `repeated_weights` describes them.

    `lse` is its log-sum-exp, shape (heads, n), in float64.

    The three are the weight on what followed copies, that on copies, and the first again of weights from
    `_LEAST_COUNTED_WEIGHT` on.
    """
    heads, tokens = len(lse), visible.tokens
    accurate = torch.promote_types(dot.q.dtype, torch.float32)
    lse = lse if dot.row is None else lse - dot.row[b]  # a term of each row, which the products do not have
    lse = torch.where(lse.isfinite(), lse * _LOG2_OF_E, torch.inf).to(accurate)  # a row without a key has weights 0
    # `threshold` keeps what is above its bound: the largest number below _LEAST_COUNTED_WEIGHT.
    below_large = math.nextafter(_LEAST_COUNTED_WEIGHT, 0.0) if accurate is torch.float64 else _BELOW_LARGE
    sums = torch.zeros(heads, 3, dtype=torch.float64, device=lse.device)
    for queries, keys, hidden in (part for group in tokens.groups for part in group.cut(heads)):
        at, columns = (places.ravel().to(lse.device) for places in (queries, keys))
        q = _tokens_at(dot.q[b], at).to(accurate).mul_(dot.scale / dot.cap if dot.cap else dot.scale * _LOG2_OF_E)
        k = _tokens_at(dot.k[b], columns).to(accurate)
        k = k if len(k) == heads else k.repeat_interleave(heads // len(k), dim=0)
        q, k = (t.unflatten(1, (len(queries), -1)).flatten(0, 1) for t in (q, k))
        mask_logits, has_choice = hidden, None  # has_choice: rows that see another key than copies too; None: all
        if not visible.everything:
            seen, has_choice = visible.cells(queries, keys, hidden)
            mask_logits = torch.where(seen.flatten(-2), 0.0, -math.inf)
        # What is added to the products q·k: the mask, less the log-sum-exp.
        offsets = (mask_logits.to(lse) - lse.index_select(1, at).view(heads, *queries.shape, 1)).flatten(0, 1)
        # Axes: heads, rows, what followed a copy or the copy itself (`_COPY_LAGS`), copies.
        weights = _exp2_of_products_(offsets, q, k, dot.cap).view(heads, -1, 2, keys.shape[-1])
        chosen = weights if has_choice is None else weights * has_choice.flatten(0, 1).to(weights)
        sums[:, :2] += chosen.sum(1).sum(-1, dtype=torch.float64)
        large_on_next = functional.threshold(weights[:, :, 0], below_large, 0.0, inplace=True)
        sums[:, 2] += large_on_next.sum(1).sum(-1, dtype=torch.float64)
    return sums.T.cpu().numpy()


def _exp2_of_products_(logits: Tensor, q: Tensor, k: Tensor, cap: float) -> Tensor:
    """Add the products of q and k to `logits`, which are in units of log 2, and return exp2 of them, in place.

    With a cap the products are those of the tanh, and still to be multiplied by the cap.
    """
    if cap:
        logits += torch.bmm(q, k.mT).tanh_().mul_(cap * _LOG2_OF_E)
    else:
        logits.baddbmm_(q, k.mT)
    return logits.exp2_()  # torch's exp is many times slower where its result is 0


def _tokens_at(t: Tensor, at: Tensor) -> Tensor:
    """Return ``t[:, at]`` of tokens, shape (heads, n, d).

    Heads often stand side by side, or beside those of the values. All of them are rows of d numbers then, and none but
    the chosen ones are copied; `index_select` would make the whole tensor contiguous each time.
    """
    heads, n, d = t.shape
    steps = t.stride()
    if steps[2] != 1 or steps[0] % d or steps[1] % d:
        return t[:, at]
    step, next_head = steps[1] // d, steps[0] // d
    rows = t.as_strided(((n - 1) * step + (heads - 1) * next_head + 1, d), (d, 1))
    places = at * step + torch.arange(heads, device=at.device)[:, None] * next_head
    return rows.index_select(0, places.ravel()).view(heads, len(at), d)
