"""Masks that were found by asking every pair once, and are stored small: runs of keys, or packed bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from attlas.errors import ShapeError, TooLargeError, public
from attlas.foundation.devices import DeviceCopies, to_device
from attlas.foundation.tiles import Tile, cut
from attlas.masks.base import BlockState, Mask
from attlas.scores.position import cells_of

__all__ = ["Bits", "Runs", "runs_of"]

_PAIRS_AT_ONCE = 1 << 22  # pairs that are asked for at once
_MOST_UNPACKED_BYTES = 1 << 20  # bytes of runs below which they are never packed
_BITS_LIMIT = 1 << 30  # bytes of packed bits that a mask may take, 92,000 tokens squared


class Runs(Mask):
    """Pairs whose key lies in one of the runs of consecutive keys of the query's row.

    Parameters
    ----------
    first : Tensor of int64, shape (batch, heads, m + 1)
        Where the runs of each row begin in `starts`, and where those of the last row end; an axis of size 1
        stands for every batch or head.
    starts, stops : Tensor of int32 or int64, shape (runs,)
        First key of each run and the key after its last, row by row, ascending, with a gap between any two.
    n : int
        Number of keys.

    Raises
    ------
    ShapeError
        If the tables do not fit each other.

    See Also
    --------
    runs_of : finds the runs of a mask.

    Notes
    -----
    Memory: 8 bytes per row and 8 to 16 per run, linear where a mask is causal, a window, chunks, packed documents
    or blocks of an image. A tile costs two searches a row and one cumulative sum. A GPU that asks for tiles gets a copy
    of the runs, and searches for each pair.

    Examples
    --------
    >>> import torch
    >>> from attlas.masks import Runs
    >>> print(Runs(torch.tensor([[[0, 1, 3]]]), torch.tensor([0, 0, 3]), torch.tensor([2, 1, 4]), 4))
    Runs(2 queries, 4 keys, 3 runs)
      ■ ■ · ·
      ■ · · ■
      2 queries × 4 keys
    """

    stored = ("n", "first", "starts", "stops")

    @public("Runs()")
    def __init__(self, first: Tensor, starts: Tensor, stops: Tensor, n: int) -> None:
        self.first, self.starts, self.stops, self.n = first, starts, stops, n
        fault = self._fault_of_tables()
        if fault:
            fix = "attlas.masks.runs_of(mask, batch, heads, m, n) finds the runs of a mask."
            raise ShapeError("the tables must describe runs of keys.", fault, fix)
        # One ascending line of all rows: key j of row r stands at r * (n + 1) + j, so that a search finds runs.
        rows = torch.repeat_interleave(torch.arange(self._counts.numel(), device="cpu"), self._counts.flatten())
        self._line_starts = rows * (n + 1) + starts
        self._line_stops = rows * (n + 1) + stops
        self._copies = DeviceCopies(), DeviceCopies()
        inner = rows[1:] == rows[:-1]
        if bool((starts >= stops).any()) or bool((inner & (starts[1:] <= stops[:-1])).any()):
            found = "a run that is empty, or that touches the one before"
            fix = "sort the runs of each row, and join those that touch."
            raise ShapeError("the tables must describe runs of keys.", found, fix)

    def _fault_of_tables(self) -> str:
        """Return a description of what is wrong with the tables, or "".

        Also computes `_counts`; the order of the runs is checked by the caller.
        """
        if self.first.ndim != 3 or self.first.shape[-1] < 1 or self.first.dtype is not torch.int64:
            return f"first is {tuple(self.first.shape)} {self.first.dtype}, not int64 of shape (batch, heads, m + 1)"
        if self.starts.ndim != 1 or self.starts.shape != self.stops.shape or self.starts.dtype != self.stops.dtype:
            return f"{tuple(self.starts.shape)} starts and {tuple(self.stops.shape)} stops"
        if self.starts.dtype not in (torch.int32, torch.int64):
            return f"starts of {self.starts.dtype}"
        self._counts = self.first.diff(dim=-1)
        flat = self.first.reshape(-1, self.first.shape[-1])
        ends = [0, *flat[:, -1].tolist()]
        joined = flat[:, 0].tolist() == ends[:-1] and ends[-1] == self.starts.numel()
        if not joined or bool((self._counts < 0).any()):
            return f"first does not count up to the {self.starts.numel()} runs"
        if self.starts.numel() and (int(self.starts.min()) < 0 or int(self.stops.max()) > self.n):
            return f"runs from {int(self.starts.min())} to {int(self.stops.max())}, of {self.n} keys"
        return ""

    def allows(self, at: Tile) -> Tensor:
        # A sum over runs on the CPU, else a search for each cell.
        rows = self._table_rows(at, at.row_index)
        if not at.scattered and at.device.type == "cpu" and not torch.compiler.is_exporting():
            return self._allowed_of_rows(rows, at)  # its sizes depend on numbers, which an export has not
        # The last run that begins at a key or before it has the key, if it ends after it.
        starts, stops = (
            copies.of(t, at.device)
            for copies, t in zip(self._copies, (self._line_starts, self._line_stops), strict=True)
        )
        line = (to_device(rows, at.device) * (self.n + 1)).unsqueeze(-1) + at.j
        run = torch.searchsorted(starts, line, right=True) - 1
        return (run >= 0) & (functional.pad(stops, (0, 1))[run] > line)

    def _table_rows(self, at: Tile, index: Tensor | None) -> Tensor:
        """Return the rows of the table for a tile, as (batches, heads, rows) on the CPU.

        The table numbers the rows of all batches and heads in one line. `index` is `at.row_index`, the rows of a
        scattered tile.
        """
        batch, heads, ends = self.first.shape  # m + 1 ends
        b = at.batch_ids if batch > 1 else at.batch_ids[:1] * 0
        h = at.head_ids if heads > 1 else at.head_ids[:1] * 0
        i = torch.arange(at.rows.start, at.rows.stop, device="cpu") if index is None else index.cpu()
        return ((b.view(-1, 1, 1) * heads) + h.view(-1, 1)) * (ends - 1) + i

    def _allowed_of_rows(self, rows: Tensor, at: Tile) -> Tensor:
        """Return which cells of a tile are allowed: a cumulative sum of +1 at starts of runs and -1 at their stops.

        `rows` are the rows of the table that the tile asks about, as `_table_rows` returns them.
        """
        line, (low, high) = rows.flatten() * (self.n + 1), (at.columns.start, at.columns.stop)
        # Runs that end before the tile or begin after it are left out by two searches a row.
        begin = torch.searchsorted(self._line_stops, line + low, right=True)
        end = torch.searchsorted(self._line_starts, line + high)
        counts = (end - begin).clamp(min=0)
        # For each run in the tile: its row in the tile, and its number in the table.
        row = torch.repeat_interleave(torch.arange(len(line), device="cpu"), counts)
        runs = torch.arange(len(row), device="cpu") - (counts.cumsum(0) - counts - begin)[row]
        width = high - low + 1  # one column more, for runs that go on after the tile
        change = torch.zeros(len(line) * width, dtype=torch.int8, device="cpu")
        change[row * width + (self.starts[runs] - low).clamp(min=0)] = 1
        change[row * width + (self.stops[runs] - low).clamp(max=width - 1)] = -1
        inside = change.view(-1, width).cumsum(-1, dtype=torch.int8)[:, :-1]
        return inside.view(*rows.shape, width - 1).bool()

    def coverage(self, at: Tile) -> BlockState:
        # Whether the tile is allowed whole (FULL), nowhere (EMPTY), or in part, or that is not known (PARTIAL).
        if at.scattered or 0 in at.shape:
            return BlockState.PARTIAL
        line = self._table_rows(at, None).flatten() * (self.n + 1)
        low, high = line + at.columns.start, line + at.columns.stop
        if not len(self.starts):
            return BlockState.EMPTY
        # For each row the last run that begins before the tile ends, and the last that has begun where the tile begins:
        # the tile has an allowed cell if the first one ends in it or later, and is full if the second one covers it.
        last = torch.searchsorted(self._line_starts, high) - 1
        over = torch.searchsorted(self._line_starts, low, right=True) - 1
        if not bool(((last >= 0) & (self._line_stops[last] > low)).any()):
            return BlockState.EMPTY
        whole = bool(((over >= 0) & (self._line_stops[over] >= high)).all())
        return BlockState.FULL if whole else BlockState.PARTIAL

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        own_batch, own_heads, ends = self.first.shape
        _check_sizes("Runs()", (own_batch, own_heads, ends - 1, self.n), batch, heads, m, n)

    def size(self) -> tuple[int | None, int | None]:
        return self.first.shape[-1] - 1, self.n

    def name(self) -> str:
        return f"Runs({self.first.shape[-1] - 1:,} queries, {self.n:,} keys, {len(self.starts):,} runs)"


class RunPerRow(Mask):
    """Pairs whose key lies in the one run of consecutive keys of the query's row.

    Parameters
    ----------
    first, stop : Tensor of int64, shape (m,), or (batch, heads, m), where a size of 1 stands for every place
        The first key of each row and the one after its last; a row with ``first >= stop`` sees no key.

    See Also
    --------
    Runs : several runs per row.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.masks.runs import RunPerRow
    >>> mask = RunPerRow(torch.tensor([0, 2]), torch.tensor([2, 4]))
    >>> attlas.attend(torch.zeros(2, 1), torch.zeros(4, 1), mask=mask)[:, :]
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """

    def __init__(self, first: Tensor, stop: Tensor) -> None:
        self.first, self.stop = (t[(None,) * (3 - t.ndim)] for t in (first, stop))  # as (batch, heads, m)

    def _runs_of_tile(self, at: Tile) -> tuple[Tensor, Tensor]:
        """Return the first key and the stop of each of a tile's rows, on the device of the mask's own tensors."""
        first, stop = (cells_of(t.unsqueeze(-1), at).squeeze(-1) for t in (self.first, self.stop))
        return first, stop

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor]:
        first, stop = self._runs_of_tile(at)
        return to_device(first, at.device), to_device(stop, at.device)

    def allows(self, at: Tile) -> Tensor:
        first, stop = (t.unsqueeze(-1) for t in self.allowed_runs(at))
        return (at.j >= first) & (at.j < stop)

    def coverage(self, at: Tile) -> BlockState:
        # EMPTY where no row's run meets the columns, FULL where each row's run has them all.
        if at.scattered or self.first.device.type != "cpu":
            return BlockState.PARTIAL
        (first, stop), columns = self._runs_of_tile(at), at.columns
        if bool(((stop <= columns.start) | (first >= columns.stop) | (first >= stop)).all()):
            return BlockState.EMPTY
        whole = bool(((first <= columns.start) & (stop >= columns.stop)).all())
        return BlockState.FULL if whole else BlockState.PARTIAL


class Bits(Mask):
    """Pairs whose bit is set, eight keys a byte; `runs_of` packs where runs would take more.

    Parameters
    ----------
    packed : Tensor of uint8, shape (batch, heads, m, ceil(n / 8))
        Bit ``j % 8`` of byte ``j // 8`` is key j; an axis of size 1 stands for every batch or head.
    n : int
        Number of keys.

    Raises
    ------
    ShapeError
        If the bytes are not those of n keys.

    See Also
    --------
    Runs : much smaller where keys follow each other.

    Examples
    --------
    >>> import torch
    >>> from attlas.masks.runs import Bits
    >>> print(Bits(torch.tensor([[[[5], [2]]]], dtype=torch.uint8), 3))
    Bits(2 queries, 3 keys)
      ■ · ■
      · ■ ·
      2 queries × 3 keys
    """

    stored = ("n", "packed")

    def __init__(self, packed: Tensor, n: int) -> None:
        if packed.ndim != 4 or packed.dtype is not torch.uint8 or packed.shape[-1] != -(-n // 8):
            rule = "packed must be uint8 of shape (batch, heads, m, ceil(n / 8))."
            found = f"{packed.dtype} of shape {tuple(packed.shape)}"
            fix = "attlas.masks.runs_of(mask, batch, heads, m, n) packs a mask."
            raise ShapeError(rule, found, fix, packed=packed, n=n, where="Bits()")
        self.packed, self.n = packed, n

    def allows(self, at: Tile) -> Tensor:
        # Take the bytes of the tile's rows, then of each key its byte `j // 8` and in it bit `j % 8`.
        cells = self.packed
        for axis, ids in ((0, at.batch_ids), (1, at.head_ids)):
            cells = cells.index_select(axis, ids) if cells.shape[axis] > 1 else cells
        here = replace(at, device=torch.device("cpu"))  # the same tile, with its positions on the CPU
        cells, j = cells.index_select(2, here.i.flatten()), here.j.flatten()
        if at.device.type == "cpu":
            return ((cells.index_select(3, j // 8) >> (j % 8).to(torch.uint8)) & 1).bool()
        # Eight keys a byte are copied, and taken apart there.
        first, last = (int(end) // 8 for end in j.aminmax()) if len(j) else (0, -1)
        cells, j = to_device(cells[..., first : last + 1], at.device), at.j.flatten()
        return ((cells.index_select(3, j // 8 - first) >> (j % 8).to(torch.uint8)) & 1).bool()

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        _check_sizes("Bits()", (*self.packed.shape[:3], self.n), batch, heads, m, n)

    def size(self) -> tuple[int | None, int | None]:
        return self.packed.shape[2], self.n

    def name(self) -> str:
        return f"Bits({self.packed.shape[2]:,} queries, {self.n:,} keys)"


def _check_sizes(name: str, own: tuple[int, ...], batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
    """Raise a ShapeError unless a mask of sizes `own` (batch, heads, m, n) fits; its batch and heads may be 1."""
    wanted = (torch.Size(batch).numel(), heads, m, n)
    if own[2:] == wanted[2:] and all(size in (1, full) for size, full in zip(own[:2], wanted[:2], strict=True)):
        return
    rule = f"{name} must have the sizes of the matrix (batch, heads, m, n), or 1 for batch and heads."
    fix = "find the runs again for a matrix of this size: runs_of(mask, batch, heads, m, n)."
    raise ShapeError(rule, f"{own} in mask, {wanted} in matrix", fix, where="attend()")


def runs_of(mask: Mask, batch: int, heads: int, m: int, n: int, device: torch.device | str = "cpu") -> Runs | Bits:
    """Return the same mask as runs of keys, or as packed bits where these take less memory.

    Parameters
    ----------
    mask : Mask
        The mask; what it adds to the scores is not looked at.
    batch, heads, m, n : int
        Sizes of the matrix that it is asked for.
    device : torch.device or str, default "cpu"
        Where it is asked; what is found lies on the CPU.

    Returns
    -------
    Runs or Bits
        With one batch, or one head, where all are alike.

    Raises
    ------
    TooLargeError
        If the bits would take more than 1 GiB.

    See Also
    --------
    Runs : how the runs are kept.

    Notes
    -----
    Asks for every pair once, in tiles. Memory: a tile, and the runs that were found.

    Examples
    --------
    >>> import attlas
    >>> from attlas.masks import runs_of
    >>> print(runs_of(attlas.from_function(lambda b, h, i, j: (j <= i) & (j // 3 == i // 3)), 1, 1, 5, 6))
    Runs(5 queries, 6 keys, 5 runs)
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      · · · ■ · ·
      · · · ■ ■ ·
      5 queries × 6 keys
    """
    # For each band of rows its runs; and how many batches and heads the result must have, 1 while all are alike.
    blocks, together = [], (1, 1)
    found = 0  # runs so far, as many as the result would hold
    for rows in _bands_of_rows(batch, heads, m, n):
        allowed = _allowed_rows(mask, (batch, heads, m, n), rows, device)
        together = max(together[0], allowed.shape[0]), max(together[1], allowed.shape[1])
        blocks.append(_find_runs(allowed))
        found += blocks[-1].starts.numel() * together[0] * together[1] // (allowed.shape[0] * allowed.shape[1])
        packed = together[0] * together[1] * m * -(-n // 8)
        if 8 * found > max(packed, _MOST_UNPACKED_BYTES):
            return _packed_bits(mask, batch, heads, m, n, device)
    return _concatenated_bands(blocks, *together, m, n)


class _RowRuns(NamedTuple):
    """The runs of some rows: how many each row has, where they begin and end."""

    counts: Tensor
    starts: Tensor
    stops: Tensor


def _bands_of_rows(batch: int, heads: int, m: int, n: int) -> Iterator[range]:
    """Yield ranges of rows that are asked for at once, so that each has about `_PAIRS_AT_ONCE` pairs in all."""
    return cut(m, max(1, _PAIRS_AT_ONCE // max(1, batch * heads * n)))


def _allowed_rows(mask: Mask, sizes: tuple[int, int, int, int], rows: range, device: torch.device | str) -> Tensor:
    """Return which pairs of some rows are allowed, with one batch, or one head, where all are alike.

    `sizes` are those of the matrix: batch, heads, m, n. The result has the shape (batch or 1, heads or 1, rows, n), on
    the CPU; `device` is where the mask is asked.
    """
    batch, heads, m, n = sizes
    all_batches, all_heads = (torch.arange(size, device="cpu") for size in (batch, heads))
    at = Tile(range(batch), range(heads), rows, range(n), m, n, all_batches, all_heads, torch.device(device))
    allowed = mask.allows(at).cpu()
    allowed = allowed[(None,) * (4 - allowed.ndim)]
    for axis in (0, 1):
        if allowed.shape[axis] > 1 and bool((allowed == allowed.narrow(axis, 0, 1)).all()):
            allowed = allowed.narrow(axis, 0, 1)
    return allowed.expand(-1, -1, len(rows), n)


def _find_runs(allowed: Tensor) -> _RowRuns:
    """Return the runs of allowed keys of each row of `allowed`, shape (batch, heads, rows, n).

    Along a row, places where the value changes are starts and stops in turn.
    """
    turns = functional.pad(allowed, (1, 1)).to(torch.int8).diff(dim=-1).ne(0)
    places = turns.nonzero()[:, -1]
    kind = torch.int32 if allowed.shape[-1] < 2**31 else torch.int64
    return _RowRuns(turns.sum(-1) // 2, places[0::2].to(kind), places[1::2].to(kind))


def _concatenated_bands(blocks: list[_RowRuns], batch: int, heads: int, m: int, n: int) -> Runs:
    """Return the runs of all bands of rows as one table, batch by batch and head by head.

    A band with one batch, or one head, stands for all.
    """
    # Counts, starts and stops in the order of the table.
    tables: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.int64, device="cpu")], [], []]
    # Where the runs of each batch and head end in those of a band.
    cuts = [functional.pad(block.counts.sum(-1).flatten().cumsum(0), (1, 0)) for block in blocks]
    for b in range(batch):
        for h in range(heads):
            for block, ends in zip(blocks, cuts, strict=True):
                source = min(b, block.counts.shape[0] - 1), min(h, block.counts.shape[1] - 1)
                flat = source[0] * block.counts.shape[1] + source[1]
                span = slice(int(ends[flat]), int(ends[flat + 1]))
                row_runs = block.counts[source], block.starts[span], block.stops[span]
                for table, part in zip(tables, row_runs, strict=True):
                    table.append(part)
    counts = torch.cat(tables[0]).view(batch, heads, m)
    ends = counts.flatten().cumsum(0).view(batch, heads, m)
    first = torch.cat([(ends - counts)[..., :1], ends], -1) if m else counts.new_zeros(batch, heads, 1)
    none = torch.zeros(0, dtype=torch.int32, device="cpu")
    starts, stops = (torch.cat(table) if table else none for table in tables[1:])
    return Runs(first, starts, stops, n)


def _packed_bits(mask: Mask, batch: int, heads: int, m: int, n: int, device: torch.device | str = "cpu") -> Bits:
    """Return what a mask allows, eight keys a byte; raise a TooLargeError where that takes more than the limit."""
    blocks: list[Tensor] = []
    size = 0
    for rows in _bands_of_rows(batch, heads, m, n):
        allowed = _allowed_rows(mask, (batch, heads, m, n), rows, device).numpy()
        packed = torch.from_numpy(np.packbits(allowed, axis=-1, bitorder="little"))
        blocks.append(packed)
        size = max(size, packed.shape[0] * packed.shape[1] * m * packed.shape[-1])
        if size > _BITS_LIMIT:
            rule = "a mask without long runs of keys must fit the limit of packed bits."
            found = f"{size:,} bytes, the limit is {_BITS_LIMIT:,}"
            fix = "keep statistics and not q and k, or use a mask of attlas, which is stored by its settings."
            raise TooLargeError(rule, found, fix, mask=mask.name(), where="runs_of()")
    sizes = [max(block.shape[axis] for block in blocks) for axis in (0, 1)]
    return Bits(torch.cat([block.expand(*sizes, -1, -1) for block in blocks], dim=2), n)
