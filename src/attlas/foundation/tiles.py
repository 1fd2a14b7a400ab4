"""A tile: one rectangle of the attention matrix, and how a matrix is cut into tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attlas.foundation.devices import IdCopies, ids_on, to_device


@dataclass(frozen=True, eq=False)
class Tile:
    """The place of one rectangle of the attention matrix.

    Scores, masks and statistics are asked about one tile at a time. They see the place of its cells in
    the whole matrix through four index tensors that broadcast to ``(batches, heads, rows, columns)``:
    `b`, `h`, `i` and `j`, the arguments of a FlexAttention ``mask_mod``.

    Parameters
    ----------
    batches, heads, rows, columns : range
        Where the tile lies in the tensors of its problem.
    m, n : int
        Number of queries and of keys of the whole matrix.
    batch_ids, head_ids : Tensor, shape (len(batches),) and (len(heads),)
        Batch and head that the user counts, on the CPU. They differ from `batches` and `heads` after
        ``A[0, 3]``, which is a problem of one head, and that head is head 3.
    device : torch.device
        Where the index tensors are made.
    dtype : torch.dtype
        The dtype that scores are computed in.
    row_index : Tensor, optional, shape (len(rows),)
        Rows that are not a range (a sample, or a list that the user gave).
    column_index : Tensor, optional, shape (len(columns),)
        Columns that are not a range.
    id_copies : IdCopies, optional
        Batches and heads of the whole matrix on `device`, where that is not the CPU. `b` and `h` are parts of them.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.zeros(4, 2), torch.zeros(6, 2))
    >>> at = A.problem.tile(range(1), range(1), range(1, 3), range(6))
    >>> (at.j <= at.i).int()
    tensor([[1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0]], dtype=torch.int32)
    """

    batches: range
    heads: range
    rows: range
    columns: range
    m: int
    n: int
    batch_ids: Tensor
    head_ids: Tensor
    device: torch.device
    dtype: torch.dtype = torch.float32
    row_index: Tensor | None = None
    column_index: Tensor | None = None
    id_copies: IdCopies | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the tile: batches, heads, rows, columns."""
        return len(self.batches), len(self.heads), len(self.rows), len(self.columns)

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """Where the rows of this tile lie in a tensor of shape (batch, heads, m)."""
        return _as_slice(self.batches), _as_slice(self.heads), _as_slice(self.rows)

    @property
    def scattered(self) -> bool:
        """Whether rows or columns are a list of places, and not a range."""
        return self.row_index is not None or self.column_index is not None

    @property
    def b(self) -> Tensor:
        """Batch of each cell, shape (batches, 1, 1, 1)."""
        return ids_on(self.device, self.batch_ids, 0, self.id_copies).view(-1, 1, 1, 1)

    @property
    def h(self) -> Tensor:
        """Head of each cell, shape (1, heads, 1, 1)."""
        return ids_on(self.device, self.head_ids, 1, self.id_copies).view(1, -1, 1, 1)

    @property
    def i(self) -> Tensor:
        """Query of each cell, shape (rows, 1)."""
        return _positions_tensor(self.rows, self.row_index, self.device).view(-1, 1)

    @property
    def j(self) -> Tensor:
        """Key of each cell, shape (1, columns)."""
        return _positions_tensor(self.columns, self.column_index, self.device).view(1, -1)

    def narrow(self, columns: range) -> Tile:
        """Return the part of this tile that lies in `columns` (a range of the whole matrix)."""
        settings = self.m, self.n, self.batch_ids, self.head_ids, self.device, self.dtype, self.row_index
        # `dataclasses.replace` would take four times as long.
        return type(self)(self.batches, self.heads, self.rows, columns, *settings, None, self.id_copies)


def _as_slice(span: range) -> slice:
    """Return a range of step 1 as a slice."""
    return slice(span.start, span.stop)


def _positions_tensor(span: range, index: Tensor | None, device: torch.device) -> Tensor:
    """Return the positions of rows or columns as a tensor: those of `index`, or of `span` where there is none."""
    return torch.arange(span.start, span.stop, device=device) if index is None else to_device(index, device)


def cut(size: int, step: int) -> Iterator[range]:
    """Yield consecutive ranges of at most `step` that cover ``range(size)``.

    Examples
    --------
    >>> list(cut(5, 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    for start in range(0, size, step):
        yield range(start, min(start + step, size))
