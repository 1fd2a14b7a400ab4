"""Masks seen from elsewhere: at other positions, stacked, concatenated, and all pairs but those of a rectangle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.foundation.compat import cached_property
from attlas.foundation.devices import DeviceCopies, to_device
from attlas.foundation.placed import original_tile
from attlas.foundation.tiles import Tile
from attlas.masks.base import BlockState, Mask, edges

OPEN_END = 1 << 62  # the end of a span of positions that has none

_MOST_BLOCKS = 64  # blocks of rows whose coverage is asked one by one


def translated_mask(mask: Mask, rows: range, columns: range, m: int, n: int) -> Mask:
    """Return a mask for a window of its matrix, or for a larger matrix that contains it.

    Parameters
    ----------
    mask : Mask
        The mask of a matrix of m queries and n keys.
    rows, columns : range
        Positions of the other matrix's queries and keys in the matrix of the mask.
    m, n : int
        Sizes of the matrix of the mask.

    Returns
    -------
    Mask
        What `Mask.translate` returns, or a `Placed` where that is None.
    """
    own = mask.translate(rows, columns, m, n)
    # Where the m queries and n keys of the mask stand in the other matrix, whose position 0 is at rows.start here.
    placed = range(-rows.start, m - rows.start), range(-columns.start, n - columns.start)
    return Placed(mask, *placed) if own is None else own


class Placed(Mask):
    """A mask of one matrix, seen from another one: it is evaluated at the positions of its own matrix.

    Parameters
    ----------
    inner : Mask
        The mask of a matrix of ``len(rows)`` queries and ``len(columns)`` keys.
    rows, columns : range
        Where the queries and keys of that matrix stand in the other one. They begin below 0 where the first ones
        were cut off.
    device : torch.device, optional
        Where the mask must be evaluated, if its tensors cannot be moved.

    Notes
    -----
    An additive mask only forbids here: what it adds is a part of the score.

    Examples
    --------
    >>> from attlas.masks import Dilated
    >>> from attlas.masks.placed import Placed
    >>> print(Placed(Dilated(6, 0, 2, offset=0), range(-2, 6), range(8)))
    Dilated(6, 0, 2, offset=0) moved by (-2, 0)
      ■ · ■ · · · · ·
      · ■ · ■ · · · ·
      ■ · ■ · ■ · · ·
      · ■ · ■ · ■ · ·
      ■ · ■ · ■ · ■ ·
      · ■ · ■ · ■ · ■
      · · ■ · ■ · ■ ·
      · · · ■ · ■ · ■
      8 queries × 8 keys
    """

    def __init__(self, inner: Mask, rows: range, columns: range, device: torch.device | None = None) -> None:
        self.inner = inner
        self.rows = rows
        self.columns = columns
        self.device = device

    def original(self, at: Tile) -> Tile:
        """Return a tile at the positions of the mask's own matrix."""
        tile = original_tile(at, self.rows, self.columns)
        return tile if self.device is None else replace(tile, device=self.device)

    def _tile_of_all_columns(self, at: Tile) -> Tile:
        """Return a tile's rows with all columns, at the positions of the mask's own matrix."""
        return replace(self.original(at), columns=range(len(self.columns)), column_index=None)

    def allows(self, at: Tile) -> Tensor:
        return to_device(self.inner.allows(self.original(at)), at.device)

    def coverage(self, at: Tile) -> BlockState:
        return self.inner.coverage(self.original(at))

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        # Runs of the own matrix, moved by where it begins.
        if self.columns.start > 0 or self.columns.stop < at.n:
            return None  # the mask does not tell where runs go on beyond its own matrix
        runs = self.inner.allowed_runs(self._tile_of_all_columns(at))
        if runs is None:
            return None
        first, stop = (to_device(t, at.device) + self.columns.start for t in runs)
        return first, stop

    def first_query(self, m: int, n: int) -> int | None:
        first = self.inner.first_query(len(self.rows), len(self.columns))
        return None if first is None else first - self.rows.start + self.columns.start

    def padding(self, at: Tile) -> Tensor | None:
        keys = self.inner.padding(self._tile_of_all_columns(at))
        return None if keys is None else _flags_at_column(keys.to(at.device), self.columns.start, at.n)

    def name(self) -> str:
        return f"{self.inner.name()} moved by ({self.rows.start}, {self.columns.start})"


def _flags_at_column(flags: Tensor, column: int, n: int) -> Tensor:
    """Place flags of keys, shape (batches, keys), at `column` in a row of n keys, which is False elsewhere."""
    out = flags.new_zeros(len(flags), n)
    first, stop = max(column, 0), min(column + flags.shape[-1], n)
    out[:, first:stop] = flags[:, first - column : stop - column]
    return out


@dataclass(frozen=True, eq=False)
class Block:
    """One of several matrices that are stacked.

    Parameters
    ----------
    mask : Mask or None
        Its mask; None where every query sees all keys of the block.
    rows, columns : range
        Where its queries and keys stand in the whole.
    """

    mask: Mask | None
    rows: range
    columns: range

    @property
    def placed(self) -> Placed | None:
        """The mask at the positions of the whole; None where every query sees all keys of the block."""
        return None if self.mask is None else Placed(self.mask, self.rows, self.columns)


class Stacked(Mask):
    """Masks of several matrices that are stacked on each other: steps of a generation, chunks of a text.

    Parameters
    ----------
    blocks : sequence of Block
        The matrices from top to bottom. A query does not see the keys that its block does not have.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)
        self._starts = torch.tensor([block.rows.start for block in self.blocks], device="cpu")

    def allows(self, at: Tile) -> Tensor:
        # Each row is answered by the block it belongs to.
        rows = torch.arange(at.rows.start, at.rows.stop, device="cpu") if at.row_index is None else at.row_index.cpu()
        owner = torch.searchsorted(self._starts, rows, right=True) - 1  # the block of each row
        if at.row_index is None and len(rows) and int(owner[0]) == int(owner[-1]):
            return self._allowed_of_block(self.blocks[int(owner[0])], at)
        out = torch.zeros(at.shape, dtype=torch.bool, device=at.device)
        for number in owner.unique().tolist():
            some = (owner == number).nonzero().flatten()
            part = replace(at, rows=range(len(some)), row_index=rows[some])
            out[:, :, to_device(some, at.device)] = self._allowed_of_block(self.blocks[number], part).expand(part.shape)
        return out

    def _allowed_of_block(self, block: Block, at: Tile) -> Tensor:
        """Return the allowed pairs of a tile all of whose rows belong to one block."""
        keys, mask = block.columns, block.placed
        inside = (at.j >= keys.start) & (at.j < keys.stop)
        if mask is None:
            return inside
        if at.column_index is None and keys.start <= at.columns.start and at.columns.stop <= keys.stop:
            return mask.allows(at)
        # Keys outside are asked for the nearest key inside, and what is answered for them is dropped.
        nearest = at.j.flatten().clamp(keys.start, keys.stop - 1)
        return mask.allows(replace(at, columns=range(len(nearest)), column_index=nearest)) & inside

    def coverage(self, at: Tile) -> BlockState:
        # Whether the tile is allowed whole (FULL), nowhere (EMPTY), or in part, or that is not known (PARTIAL).
        if at.scattered or not len(at.rows) or not len(at.columns):
            return BlockState.PARTIAL
        ends = torch.tensor([at.rows.start, at.rows.stop - 1], device="cpu")
        first, last = (torch.searchsorted(self._starts, ends, right=True) - 1).tolist()  # blocks of the outer rows
        states = {
            self._coverage_of_block(block, at) for block in self.blocks[first : min(last + 1, first + _MOST_BLOCKS)]
        }
        if last - first >= _MOST_BLOCKS:
            states.add(BlockState.PARTIAL)
        return states.pop() if len(states) == 1 else BlockState.PARTIAL

    def _coverage_of_block(self, block: Block, at: Tile) -> BlockState:
        """Return the coverage of the part of a tile that lies in the rows of one block."""
        keys = block.columns
        if at.columns.stop <= keys.start or at.columns.start >= keys.stop:
            return BlockState.EMPTY
        if at.columns.start < keys.start or at.columns.stop > keys.stop:
            return BlockState.PARTIAL
        rows = range(max(at.rows.start, block.rows.start), min(at.rows.stop, block.rows.stop))
        mask = block.placed
        return BlockState.FULL if mask is None else mask.coverage(replace(at, rows=rows))

    def first_query(self, m: int, n: int) -> int | None:
        mask = self.blocks[0].placed
        return None if mask is None else mask.first_query(m, n)

    def padding(self, at: Tile) -> Tensor | None:
        # Collect the padding of blocks that together have all n keys, from left to right; None if they do not.
        found, known = None, 0  # keys before `known` have been looked at
        while known < at.n:  # no step need have all keys: a sliding cache drops the first ones
            begun = (block for block in self.blocks if block.columns.start <= known)
            block = max(begun, key=lambda block: block.columns.stop, default=None)
            if block is None or block.columns.stop <= known:
                return None
            known, mask = block.columns.stop, block.placed
            if mask is not None:
                flags = mask.padding(at)
                if flags is None:
                    return None
                found = flags if found is None else found | flags
        return found

    def size(self) -> tuple[int | None, int | None]:
        return self.blocks[-1].rows.stop, max(block.columns.stop for block in self.blocks)

    def name(self) -> str:
        return f"{len(self.blocks)} masks stacked"


class Concatenated(Mask):
    """Masks of the parts of a batch, or of the parts of its heads, one after another.

    Parameters
    ----------
    masks : sequence of Mask or None
        Mask of each part, in which batches, or heads, are counted from the first of the part. None allows all pairs.
    sizes : sequence of int
        Number of batches, or heads, of each part.
    axis : {0, 1}
        What the parts divide: 0 for the batch, 1 for the heads.
    """

    def __init__(self, masks: Sequence[Mask | None], sizes: Sequence[int], axis: int) -> None:
        #: Mask of each batch, or head, of the whole, and its number in the part.
        self.owners = [(mask, place) for mask, size in zip(masks, sizes, strict=True) for place in range(size)]
        self.axis = axis

    def allows(self, at: Tile) -> Tensor:
        # Each batch, or head, of the tile is asked alone, under the number that it has in its part.
        found = []
        for number in (at.batch_ids if self.axis == 0 else at.head_ids).tolist():
            mask, place = self.owners[number]
            index = torch.tensor([place], device="cpu")
            if self.axis == 0:
                part = replace(at, batch_ids=index, batches=range(1))
            else:
                part = replace(at, head_ids=index, heads=range(1))
            allowed = torch.ones(1, dtype=torch.bool, device=at.device) if mask is None else mask.allows(part)
            found.append(allowed.expand(part.shape))
        return torch.cat(found, self.axis) if found else torch.ones(at.shape, dtype=torch.bool, device=at.device)

    def name(self) -> str:
        return f"masks of {len(self.owners)} {('batches', 'heads')[self.axis]} concatenated"


@dataclass(frozen=True)
class Positions:
    """Positions in a text, counted from its first token.

    Parameters
    ----------
    edges : tuple of int
        First position of each run of positions, and the one after its last, in turn; strictly ascending. The last
        may be `OPEN_END`.
    """

    edges: tuple[int, ...]

    @property
    def last_required(self) -> int:
        """The last position that a text must have to hold these, -1 for none.

        An open span ``3:`` may be empty, but it must not begin beyond the end of the text: it requires position 2.
        """
        if not self.edges:
            return -1
        return self.edges[-1] - 1 if self.edges[-1] < OPEN_END else self.edges[-2] - 1

    def has(self, positions: Tensor) -> Tensor:
        """Return which of some positions are among these, as bool of the same shape."""
        # A position lies in a run where the number of edges up to it is odd.
        edges, copies = self._edges_with_copies
        return torch.searchsorted(copies.of(edges, positions.device), positions, right=True) % 2 == 1

    @cached_property
    def _edges_with_copies(self) -> tuple[Tensor, DeviceCopies]:
        """The edges as a tensor on the CPU, and the keeper of its copies on devices."""
        return torch.tensor(self.edges, dtype=torch.int64, device="cpu"), DeviceCopies()

    def state(self, first: int, last: int) -> BlockState:
        """Return how many of the positions from `first` to `last` (included) are among these: all, some or none."""
        run = bisect_right(self.edges, first)  # the edges up to `first`; odd where it lies in a run
        alone = run == len(self.edges) or self.edges[run] > last
        return BlockState.PARTIAL if not alone else BlockState.FULL if run % 2 else BlockState.EMPTY

    def gaps(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the runs of positions from `first` up to `stop` that are not among these, each as (start, stop)."""
        ends = [first, *(min(max(edge, first), stop) for edge in self.edges), stop]
        return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]

    def __str__(self) -> str:
        runs = zip(self.edges[::2], self.edges[1::2], strict=True)
        shown = [f"{a}:{'' if b == OPEN_END else b}" for a, b in runs]
        return ", ".join([*shown[:4], *(["..."] if len(shown) > 4 else [])])


class OutsideRectangle(Mask):
    """Pairs outside a rectangle of queries and keys, which are named by their positions in the text.

    Parameters
    ----------
    queries, keys : Positions or None
        The rectangle; None stands for all.
    first_query, first_key : int
        Position of query 0 and of key 0 in the text.
    """

    def __init__(self, queries: Positions | None, keys: Positions | None, first_query: int, first_key: int) -> None:
        self.queries, self.keys = queries, keys
        self.row, self.column = first_query, first_key

    def _queries_in_rectangle(self, at: Tile) -> Tensor:
        """Return which queries of a tile belong to the rectangle, as bool of the shape of `at.i`."""
        i = at.i
        return torch.ones_like(i, dtype=torch.bool) if self.queries is None else self.queries.has(i + self.row)

    def allows(self, at: Tile) -> Tensor:
        rows = self._queries_in_rectangle(at)
        return ~rows if self.keys is None else ~(rows & self.keys.has(at.j + self.column))

    def coverage(self, at: Tile) -> BlockState:
        # EMPTY inside the rectangle; FULL where either the queries or the keys lie wholly outside it.
        ends = edges(at)
        if ends is None:
            return BlockState.PARTIAL
        first_row, last_row, first, last = ends
        states = {
            BlockState.FULL if named is None else named.state(low + shift, high + shift)
            for named, low, high, shift in (
                (self.queries, first_row, last_row, self.row),
                (self.keys, first, last, self.column),
            )
        }
        if BlockState.EMPTY in states:
            return BlockState.FULL
        return BlockState.PARTIAL if BlockState.PARTIAL in states else BlockState.EMPTY

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        # A chosen query attends to the keys outside the rectangle, which are one run unless several gaps are left.
        rows = self._queries_in_rectangle(at).view(1, 1, -1)
        left = [] if self.keys is None else self.keys.gaps(self.column, self.column + at.n)
        if len(left) > 1:
            return None if bool(rows.any()) else (torch.zeros_like(rows, dtype=torch.int64), ~rows * at.n)
        first, stop = (end - self.column for end in left[0]) if left else (0, 0)
        return rows * first, torch.where(rows, stop, at.n)

    def cuts(self, m: int) -> list[int]:
        """Return the rows of a matrix with m queries at which a run of the rectangle's queries begins or ends."""
        named = () if self.queries is None else self.queries.edges
        return [edge - self.row for edge in named if 0 < edge - self.row < m]

    def hides_from(self, query: int) -> bool:
        """Return whether a query of the matrix belongs to the rectangle, and so loses its keys."""
        return self.queries is None or self.queries.state(query + self.row, query + self.row) is BlockState.FULL

    def visible_keys(self, n: int) -> Tensor:
        """Return which of n keys the rectangle's queries still see, as bool of shape (n,)."""
        keys = torch.arange(self.column, self.column + n)
        return torch.zeros(n, dtype=torch.bool) if self.keys is None else ~self.keys.has(keys)

    def translate(self, rows: range, columns: range, m: int, n: int) -> OutsideRectangle:
        return OutsideRectangle(self.queries, self.keys, self.row + rows.start, self.column + columns.start)

    def name(self) -> str:
        named = (f"{name} {'all' if part is None else part}" for name, part in
                 (("queries", self.queries), ("keys", self.keys)))  # fmt: skip
        return f"outside({', '.join(named)})"
