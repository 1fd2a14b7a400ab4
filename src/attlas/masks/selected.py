"""Masks of chosen keys: a list of keys, or of blocks of keys, for each query."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, describe, public
from attlas.foundation.checks import as_plain, is_one_or, whole_number
from attlas.foundation.compat import tracing
from attlas.foundation.devices import DeviceCopies, to_device
from attlas.foundation.tiles import Tile, cut
from attlas.masks.base import BlockState, Mask
from attlas.scores.position import heads_of

__all__ = ["Selected"]

_BEYOND_EVERY_KEY = torch.iinfo(torch.int32).max  # an entry beyond every key
_ENTRIES_AT_ONCE = 1 << 22  # entries that are sorted at a time


class Selected(Mask):
    """Each query sees the keys that were chosen for it, one by one or in blocks.

    Parameters
    ----------
    indices : Tensor of int, or nested sequence of int, shape (m, k), (batch, m, k) or (batch, groups, m, k)
        The keys of each query, in any order, or the blocks of keys. Axes of size 1 before the last stand for every
        place; more leading axes are those of the batch. An entry that is negative, or beyond the last key, chooses
        nothing, and so does one that a row has already: rows with fewer keys are filled with -1.
    block : int, default 1
        How many keys an entry stands for: entry e chooses the keys from ``e * block`` up to ``(e + 1) * block``.
    group : int, default 1
        How many neighbouring query heads share one choice: head h has that of group ``h // group``.

    Attributes
    ----------
    indices : Tensor of int32
        The entries as they are stored, each row in ascending order; of equal ones all but one choose nothing.

    Raises
    ------
    DtypeError
        If `indices` are not whole numbers.
    ShapeError
        If they have fewer than two axes, or `block` or `group` is below 1; at `attend`, if their sizes are not those
        of the matrix.

    See Also
    --------
    from_tensor : the same pairs as a tensor of m · n booleans.

    Notes
    -----
    This is the mask of models that let an indexer choose the keys of each query: single keys in DeepSeek-V3.2 [1]_
    and GLM-5, blocks in MiniMax-M3, MoBA [2]_ and NSA. Combine it with `Causal`, as these models do: a choice of k
    keys fills up with later keys where a query has fewer than k before it.

    Memory: 4 bytes per entry, batch · groups · m · k of them, and as many on each device that asks for tiles; no
    tensor of m · n. A tile costs one search per row and its chosen keys. Tiles that no query of theirs chose are
    skipped.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2: pushing the frontier of open large language models", 2025, section 2.1.
    .. [2] Lu et al., "MoBA: mixture of block attention for long-context LLMs", 2025.

    Examples
    --------
    >>> from attlas.masks import Causal, Selected
    >>> print(Selected([[0, -1], [0, 1], [2, 0], [1, 3]]))
    Selected((4, 2))
      ■ · · ·
      ■ ■ · ·
      ■ · ■ ·
      · ■ · ■
      4 queries × 4 keys
    >>> print(Causal() & Selected([[0, 0], [0, 0], [0, 1], [0, 1], [0, 2], [1, 2]], block=2))
    Causal() & Selected((6, 2), block=2)
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      ■ ■ ■ ■ · ·
      ■ ■ · · ■ ·
      · · ■ ■ ■ ■
      6 queries × 6 keys
    """

    stored = ("indices", "block", "group")

    @public("Selected()")
    def __init__(self, indices: Tensor | Sequence[Any], block: int = 1, group: int = 1) -> None:
        t = _checked_entries(indices)
        self.block = whole_number("block", block)
        self.group = whole_number("group", group)
        self.axes = tuple(t.shape)
        t = t[None, None] if t.ndim == 2 else t[:, None] if t.ndim == 3 else t.flatten(0, -4)
        self.entries = _distinct_ascending(t)
        self._copies = DeviceCopies()

    @property
    def indices(self) -> Tensor:
        return self.entries.view(self.axes)

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        return 0 if t.ndim in (3, 4) else None

    def allows(self, at: Tile) -> Tensor:
        # Each group of heads is computed once, and repeated for its heads.
        ids, groups = at.head_ids // self.group, self.entries.shape[1]
        if groups == 1:
            return self._allowed_of_groups(at)
        if tracing():  # a program that is traced asks for all heads, and their numbers cannot be read
            return self._allowed_of_groups(replace(at, head_ids=torch.arange(groups))).repeat_interleave(
                self.group, dim=1
            )
        own, places = torch.unique_consecutive(ids, return_inverse=True)
        allowed = self._allowed_of_groups(replace(at, head_ids=own))
        return allowed if len(own) == len(ids) else allowed[:, to_device(places, allowed.device)]

    def _allowed_of_groups(self, at: Tile) -> Tensor:
        """Return the allowed pairs of a tile whose `head_ids` are numbers of groups, one result for each group."""
        rows = self._entries_of_rows(at, at.device)
        if not rows.shape[-1]:
            return torch.zeros(1, len(at.head_ids), 1, 1, dtype=torch.bool, device=at.device)
        if at.column_index is not None:
            return self._allowed_single_keys(rows, to_device(at.column_index, at.device))
        first, stop = self._touched_blocks(at)
        begin, end = self._slice_of_entries(rows, first, stop)
        # The entries of each row from `begin` up to `end` are blocks of this tile: they are set among its blocks.
        # On a GPU, and where torch traces, the number of entries cannot be read: all are looked at.
        most = rows.shape[-1]
        if rows.device.type == "cpu" and not tracing():
            most = int((end - begin).max()) if end.numel() else 0
        places = begin.unsqueeze(-1) + torch.arange(most, device=rows.device)
        chosen = rows.gather(-1, places.clamp(max=rows.shape[-1] - 1)).long() - first
        chosen = chosen.where(places < end.unsqueeze(-1), stop - first)  # one place more, for entries of later tiles
        blocks = torch.zeros(*rows.shape[:-1], stop - first + 1, dtype=torch.bool, device=rows.device)
        blocks = blocks.scatter_(-1, chosen, True)[..., :-1]
        if self.block > 1:
            start = at.columns.start - first * self.block
            blocks = blocks.repeat_interleave(self.block, dim=-1)[..., start : start + len(at.columns)]
        return blocks

    def _allowed_single_keys(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return which of some single keys each row chose, shape (..., rows, columns).

        A key was chosen where the block that it lies in is an entry.

        Parameters
        ----------
        rows : Tensor of int, shape (..., rows, k)
            The entries of each row, ascending.
        columns : Tensor of int64, shape (columns,)
            The keys.
        """
        asked = (columns // self.block).to(rows.dtype).expand(*rows.shape[:-1], -1).contiguous()
        places = torch.searchsorted(rows, asked).clamp(max=rows.shape[-1] - 1)
        return rows.gather(-1, places) == asked

    def _entries_of_rows(self, at: Tile, device: torch.device) -> Tensor:
        """Return the entries of a tile's rows on a device, shape (batches or 1, groups or 1, rows or 1, k)."""
        t = heads_of(self._copies.of(self.entries, device), at)
        if t.shape[2] == 1:
            return t.contiguous()
        if at.row_index is not None:
            return t.index_select(2, to_device(at.row_index, device))
        return t[:, :, at.rows.start : at.rows.stop].contiguous()

    def _touched_blocks(self, at: Tile) -> tuple[int, int]:
        """Return the range of blocks, first and stop, that a tile's columns touch."""
        return at.columns.start // self.block, -(-at.columns.stop // self.block)

    @staticmethod
    def _slice_of_entries(rows: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the slice of each row's ascending entries that lies in `first` to `stop`: its begin and its end."""
        settings: dict[str, Any] = {"dtype": rows.dtype, "device": rows.device}  # made there: a copy would wait
        asked = (
            torch.arange(first, stop + 1, stop - first, **settings)
            if stop > first
            else torch.full((2,), first, **settings)
        )
        begin, end = torch.searchsorted(rows, asked.expand(*rows.shape[:-1], 2).contiguous()).unbind(-1)
        return begin, end

    def coverage(self, at: Tile) -> BlockState:
        # Whether the tile is allowed whole (FULL), nowhere (EMPTY), or in part, or that is not known (PARTIAL).
        if at.scattered or 0 in at.shape or self.entries.device.type != "cpu" or tracing():
            return BlockState.PARTIAL
        own = replace(at, head_ids=torch.unique_consecutive(at.head_ids // self.group))
        rows = self._entries_of_rows(own, self.entries.device)
        first, stop = self._touched_blocks(at)
        begin, end = self._slice_of_entries(rows, first, stop)
        # No row has an entry twice, so their number says how many blocks of the tile are chosen.
        fewest, most = torch.aminmax(end - begin)
        if not int(most):
            return BlockState.EMPTY
        return BlockState.FULL if int(fewest) == stop - first else BlockState.PARTIAL

    def translate(self, rows: range, columns: range, m: int, n: int) -> Selected | None:
        # Only to a window that begins at a block; else the mask is placed, not translated.
        inside = 0 <= rows.start <= rows.stop <= m and 0 <= columns.start <= columns.stop <= n
        if not inside or columns.start % self.block:
            return None
        own = self.entries if self.entries.shape[2] == 1 else self.entries[:, :, rows.start : rows.stop]
        # Entries are counted from the first block of the window; negative ones choose nothing.
        moved = copy.copy(self)
        moved._copies = DeviceCopies()
        moved.entries = own - columns.start // self.block if columns.start else own
        moved.axes = tuple(moved.entries.shape)
        return moved

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        # Raise an error where the mask does not fit a matrix of these sizes.
        sequences, (own_batch, groups, own_m, _) = math.prod(batch), self.entries.shape  # the last is k
        own_heads = groups * self.group if groups > 1 else 1
        sizes = (("batch", own_batch, sequences), ("heads", own_heads, heads), ("m", own_m, m))
        wrong = [
            f"{name} = {size} in mask, {full} in matrix" for name, size, full in sizes if not is_one_or(size, full)
        ]
        per_head = len(self.axes) == 3 and self.axes[0] == heads
        if wrong:
            rule, found = "indices must have the sizes of the matrix, or 1.", ", ".join(wrong)
            fix = "indices of shape (m, k), (batch, m, k) or (batch, groups, m, k)."
            if groups > 1 and heads % groups == 0 and own_heads != heads:
                fix = f"group={heads // groups}, if neighbouring heads share a choice."
            elif per_head:
                fix = "for one choice per head: indices[None]."
        elif per_head and heads == sequences > 1:
            rule = "the first axis of indices with three axes must be the batch's or the heads', not both."
            found = f"{heads} sequences and {heads} heads"
            fix = "indices[:, None] for one choice per sequence, indices[None] for one per head."
        else:
            return
        given = {"mask": self.name(), "matrix (batch, heads, m, n)": f"{(sequences, heads, m, n)}"}
        raise ShapeError(rule, found, fix, arguments=given, where="attend()")

    def size(self) -> tuple[int | None, int | None]:
        # Numbers of queries and keys of the mask; None where it fits any.
        own_m = self.entries.shape[2]
        # The largest key that is chosen says how many keys there are at least.
        real = self.entries[self.entries < _BEYOND_EVERY_KEY]
        last = (int(real.max()) + 1) * self.block if real.numel() else 0
        return None if own_m == 1 else own_m, max(own_m, last) if own_m > 1 else None

    def reach(self) -> int:
        return self.block

    def name(self) -> str:
        settings = (f", {name}={getattr(self, name)}" for name in ("block", "group") if getattr(self, name) != 1)
        return f"Selected({self.axes}{''.join(settings)})"


def _checked_entries(indices: Any) -> Tensor:
    """Return the indices as a tensor of whole numbers with at least two axes, or raise."""
    fix = "one list of keys per query, filled with -1: [[0, -1], [0, 1]]."
    try:
        t = as_plain("indices", indices) if isinstance(indices, Tensor) else torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DtypeError):
            raise
        raise DtypeError("indices must be whole numbers.", type(indices).__name__, fix) from None
    if t.is_floating_point() or t.is_complex() or t.dtype is torch.bool:
        found = str(t.dtype).removeprefix("torch.")
        fix = "attlas.from_tensor(t), if True means that the query may attend." if t.dtype is torch.bool else fix
        raise DtypeError("indices must be whole numbers.", found, fix, indices=describe(t))
    if t.ndim < 2:
        rule = "indices must have the axes (m, k), (batch, m, k) or (batch, groups, m, k)."
        raise ShapeError(rule, f"{t.ndim} axes", "indices[None, :] for one choice that all queries share.", indices=t)
    return t.detach()


def _distinct_ascending(t: Tensor) -> Tensor:
    """Return entries as int32, each row in ascending order and without an entry that it has twice.

    Sorting takes 8 bytes per entry more than the result, so it goes some rows at a time.
    """
    narrow = t if t.dtype is torch.int32 else t.to(torch.int64).clamp(-1, _BEYOND_EVERY_KEY).to(torch.int32)
    flat = narrow.flatten(0, -2)
    if tracing():
        return flat.sort(dim=-1).values.view(t.shape)
    out = torch.empty_like(flat)
    for rows in cut(len(flat), max(_ENTRIES_AT_ONCE // max(t.shape[-1], 1), 1)):
        part = flat[rows.start : rows.stop].sort(dim=-1).values
        twice = part[:, 1:] == part[:, :-1]
        # On a GPU, to look whether there are any would wait for it.
        if t.device.type != "cpu" or bool(twice.any()):
            part[:, 1:].masked_fill_(twice, _BEYOND_EVERY_KEY)
            part = part.sort(dim=-1).values
        out[rows.start : rows.stop] = part
    return out.view(t.shape)
