"""Masks of sequences: what each sequence of a batch says about its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, describe, public
from attlas.foundation.compat import tracing
from attlas.foundation.devices import DeviceCopies, changes_of, to_device
from attlas.foundation.tiles import Tile
from attlas.masks.base import BlockState, Mask, edges

__all__ = ["Documents", "Padding", "Prefix"]

Lengths: TypeAlias = "int | Sequence[int] | Tensor"


class _KeyLengths(Mask):
    """Masks of one length for each sequence, or one for all: so many keys at one end may be attended to.

    Parameters
    ----------
    label : str
        What the errors of a subclass call the lengths.
    lengths : int, sequence of int, or Tensor of int, shape (batch,)
        The lengths.
    """

    side = "right"  # where the keys stand that may not

    def __init__(self, label: str, lengths: Lengths) -> None:
        self.label = label
        self._copies = DeviceCopies()
        #: The tensor that the lengths are copied from, and how often it was changed by then.
        self.given = (lengths, changes_of(lengths)) if isinstance(lengths, Tensor) else None
        self._copy_to_cpu(lengths)

    @public()
    def _copy_to_cpu(self, lengths: Lengths) -> None:
        """Copy the lengths to the CPU, and raise where one is negative.

        They are there because `coverage` reads them for every tile, and must not wait for a GPU.
        """
        label = self.label
        given = _as_int64(type(self).__name__, label, lengths, "give one whole number for each sequence: [7, 5].")
        self.axes, self.lengths = tuple(given.shape), given.flatten()
        # A program that torch traces cannot look at them: where it runs, the mask is made again and does.
        known = given.numel() > 0 and not tracing()
        self.shortest, self.longest = (int(t) for t in self.lengths.aminmax()) if known else (0, 0)
        if self.shortest < 0:
            rule, fix = f"{label} must be 0 or more.", f"use {label} = 0 for a sequence without such keys."
            raise ShapeError(rule, f"{label} = {self.shortest}", fix, arguments={label: lengths})

    def of(self, at: Tile) -> Tensor:
        """Return the lengths of a tile's batch entries, on the CPU, shape (batches,) or (1,)."""
        return self.lengths if self.lengths.numel() == 1 else self.lengths[at.batch_ids]

    def _lengths_on_device(self, at: Tile) -> Tensor:
        """Return the lengths of a tile's batch entries on the tile's device, shape (batches,) or (1,)."""
        if at.device.type == "cpu":
            return self.of(at)
        lengths = self._copies.of(self.lengths, at.device)
        return lengths if lengths.numel() == 1 else lengths[at.b.flatten()]

    def allows(self, at: Tile) -> Tensor:
        lengths = self._lengths_on_device(at).view(-1, 1, 1, 1)
        return at.j < lengths if self.side == "right" else at.j >= at.n - lengths

    def coverage(self, at: Tile) -> BlockState:
        # Whether the tile is allowed whole (FULL), nowhere (EMPTY), or in part, or that is not known (PARTIAL).
        ends, lengths = edges(at), self.of(at)
        if ends is None or not lengths.numel():
            return BlockState.PARTIAL
        _, _, first, last = ends
        if self.side == "left":  # the same rule, from the other end
            first, last = at.n - 1 - last, at.n - 1 - first
        if first >= int(lengths.max()):
            return BlockState.EMPTY
        return BlockState.FULL if last < int(lengths.min()) else BlockState.PARTIAL

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        lengths = self._lengths_on_device(at).view(-1, 1, 1)
        end = torch.full_like(lengths, at.n)
        return (torch.zeros_like(lengths), lengths) if self.side == "right" else (end - lengths, end)

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        # The user may change the tensor of lengths between two matrices: then it is read again.
        if self.given is not None and changes_of(self.given[0]) != self.given[1]:
            self._copy_to_cpu(self.given[0])
            self.given = self.given[0], changes_of(self.given[0])
        fix = f"give {math.prod(batch)} numbers, or one for all."
        if len(self.axes) == 2 and self.axes[1] == n:
            fix = f"{self.label} are counts; from a padding mask t of 0 and 1: {type(self).__name__}(t.sum(-1))."
        _check_batch(type(self).__name__, self.label, self.axes, batch, fix)

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        return 0 if t.ndim == 1 else None

    def name(self) -> str:
        # The expression that makes the mask, without the picture.
        numbers = self.lengths.tolist()
        if len(numbers) == 1:
            return f"{type(self).__name__}({numbers[0]})"
        more = ", ..." if len(numbers) > 4 else ""
        return f"{type(self).__name__}([{', '.join(map(str, numbers[:4]))}{more}])"


class Prefix(_KeyLengths):
    """Every query sees the first keys of its sequence.

    Parameters
    ----------
    length : int, sequence of int, or Tensor of int, shape (batch,)
        Number of keys that all queries see, one for all sequences or one for each. A length above n
        stands for all n keys, so that the same mask serves while a sequence is still being fed.

    Raises
    ------
    DtypeError
        If `length` is not whole numbers.
    ShapeError
        If a length is negative; at `attend`, if there is not one for each sequence.

    See Also
    --------
    Causal : what the tokens after the prefix usually obey.
    Padding : the same pairs, meant as the end of a sequence.

    Notes
    -----
    Key j is allowed where ``j < length``, wherever the query stands. Alone it hides all later keys; the mask
    of a prefix language model [1]_, which reads its prefix in both directions and goes on causally, is
    ``Prefix(length) | Causal()``. The state of a block takes constant time for each sequence and is exact.

    References
    ----------
    .. [1] Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
       transformer", 2020, section 3.2.1.

    Examples
    --------
    >>> import attlas
    >>> print(attlas.Prefix(3) | attlas.Causal())
    (Prefix(3) | Causal())
      ■ ■ ■ · · · · ·
      ■ ■ ■ · · · · ·
      ■ ■ ■ · · · · ·
      ■ ■ ■ ■ · · · ·
      ■ ■ ■ ■ ■ · · ·
      ■ ■ ■ ■ ■ ■ · ·
      ■ ■ ■ ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■ ■ ■ ■
      8 queries × 8 keys
    """

    def __init__(self, length: Lengths) -> None:
        super().__init__("length", length)

    def to_dict(self) -> dict[str, Any]:
        return {"length": self.lengths.view(self.axes)}

    def reach(self) -> int:
        return int(self.lengths[0]) if self.lengths.numel() else 0


class Padding(_KeyLengths):
    """Keys that are tokens, and not the filling that makes sequences of a batch equally long.

    Parameters
    ----------
    lengths : int, sequence of int, or Tensor of int, shape (batch,)
        Number of real keys, one for all sequences or one for each.
    side : {"right", "left"}, optional
        Where the filling stands. The default is "right": the first keys are real.

    Raises
    ------
    DtypeError
        If `lengths` are not whole numbers, as when a mask is given in their place.
    ShapeError
        If a length is negative, or `side` is neither word; at `attend`, if there is not one length for
        each sequence or one is longer than n.

    See Also
    --------
    Documents : several sequences packed one after the other, without filling.

    Notes
    -----
    Key j is allowed where ``j < length``, on the left side where ``j >= n - length``. Only keys are
    masked: a query that is filling still gets weights, which nothing reads; with ``side="left"`` and
    `Causal` it sees no key, and its weights and output are 0. The state of a block takes constant time for each
    sequence and is exact, so tiles of filling are skipped.

    Examples
    --------
    >>> import attlas
    >>> print(attlas.Padding([6, 8], side="left") & attlas.Causal())
    Padding([6, 8], side='left') & Causal()
      · · · · · · · ·
      · · · · · · · ·
      · · ■ · · · · ·
      · · ■ ■ · · · ·
      · · ■ ■ ■ · · ·
      · · ■ ■ ■ ■ · ·
      · · ■ ■ ■ ■ ■ ·
      · · ■ ■ ■ ■ ■ ■
      8 queries × 8 keys
    """

    def __init__(self, lengths: Lengths, side: str = "right") -> None:
        super().__init__("lengths", lengths)
        if side not in ("right", "left"):
            fix = 'use side="left" where the filling stands before the tokens.'
            raise ShapeError('side must be "right" or "left".', f"side = {side!r}", fix, where="Padding()")
        self.side = side

    def to_dict(self) -> dict[str, Any]:
        return {"lengths": self.lengths.view(self.axes), "side": self.side}

    def translate(self, rows: range, columns: range, m: int, n: int) -> Padding:
        # The real keys that are left in the window: on the left side those that end, with the n keys, within it.
        if self.side == "left":
            return Padding((len(columns) + columns.start - n + self.lengths).clamp(0, len(columns)), side="left")
        return Padding((self.lengths - columns.start).clamp(0, len(columns)))

    def padding(self, at: Tile) -> Tensor:
        # This mask is the same for all heads and queries: the first of each is taken.
        return ~self.allows(at)[:, 0, 0]

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        # Raise an error where the mask does not fit a matrix of these sizes.
        super().check(batch, heads, m, n)
        if self.longest > n:
            rule = "the lengths of Padding() must be at most the number of keys."
            found = f"a length of {self.longest}, n = {n}"
            fix = f"count the real keys only: Padding(lengths.clamp(max={n}))."
            raise ShapeError(rule, found, fix, mask=self.name(), keys=f"n = {n}", where="attend()")

    def size(self) -> tuple[int | None, int | None]:
        # Padded sequences are as long as the longest of them.
        return None, self.longest if self.lengths.numel() else None

    def name(self) -> str:
        return super().name() if self.side == "right" else super().name()[:-1] + ", side='left')"


class Documents(Mask):
    """Queries see the keys of their own document, in a sequence of several.

    Parameters
    ----------
    ids : Tensor of int, or sequence of int, shape (n,) or (batch, n)
        Document of each key. Ids may stand in any order, and repeat.
    query_ids : Tensor of int, or sequence of int, shape (m,) or (batch, m), optional
        Document of each query. The default is that the queries are the last m of the n tokens.

    Raises
    ------
    DtypeError
        If ids are not whole numbers.
    ShapeError
        If ids are a single number; at `attend`, if there is not one for each key and query.

    See Also
    --------
    Padding : one sequence in each row of the batch.

    Notes
    -----
    Key j is allowed where ``ids[j] == query_ids[i]``. A causal model reads packed documents with
    ``Documents(ids) & Causal()``. Filling with an id of its own sees itself only, and is harmless.
    Cost: the ids are kept, with a copy on the CPU for `coverage` and one on each device that asks. BlockState
    compares the smallest and largest ids of a tile's rows and columns: time rows + columns, and exact for
    documents one after the other, where only tiles on the diagonal are computed.

    References
    ----------
    .. [1] Krell et al., "Efficient sequence packing without cross-contamination", 2021.

    Examples
    --------
    >>> import attlas
    >>> print(attlas.Documents([0, 0, 0, 1, 1, 2, 2, 2]))
    Documents((8,))
      ■ ■ ■ · · · · ·
      ■ ■ ■ · · · · ·
      ■ ■ ■ · · · · ·
      · · · ■ ■ · · ·
      · · · ■ ■ · · ·
      · · · · · ■ ■ ■
      · · · · · ■ ■ ■
      · · · · · ■ ■ ■
      8 queries × 8 keys
    """

    def __init__(self, ids: Sequence[int] | Tensor, query_ids: Sequence[int] | Tensor | None = None) -> None:
        #: The tensors that the ids are copied from, and how often they were changed by then.
        self.given: tuple[Any, ...] | None = None
        if isinstance(ids, Tensor) or isinstance(query_ids, Tensor):
            self.given = (ids, query_ids, changes_of(ids), changes_of(query_ids))
        self._copy_to_cpu(ids, query_ids)

    def _copy_to_cpu(self, ids: Sequence[int] | Tensor, query_ids: Sequence[int] | Tensor | None) -> None:
        """Copy the ids from what the user gave."""
        self.keys: _TokenIds = _TokenIds("ids", ids)
        self.queries: _TokenIds = self.keys if query_ids is None else _TokenIds("query_ids", query_ids)

    def to_dict(self) -> dict[str, Any]:
        return {"ids": self.keys.given, "query_ids": None if self.queries is self.keys else self.queries.given}

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        return 0 if t.ndim == 2 else None

    def first(self, at: Tile) -> int:
        """Return the index of query 0 among the ids of the queries.

        With shared ids the queries are the last m tokens.
        """
        return at.n - at.m if self.queries is self.keys else 0

    def allows(self, at: Tile) -> Tensor:
        # True where the query's id is the key's.
        first = self.first(at)
        rows = self.queries.tile(at, at.rows, at.row_index, first, at.device)
        columns = self.keys.tile(at, at.columns, at.column_index, 0, at.device)
        return rows[:, None, :, None] == columns[:, None, None, :]

    def coverage(self, at: Tile) -> BlockState:
        # An index on a GPU cannot be read without waiting for it.
        if edges(at) is None or not len(at.batch_ids):
            return BlockState.PARTIAL
        cpu = torch.device("cpu")
        # The smallest and the largest id of the tile's queries and of its keys, for each sequence.
        low, high = torch.aminmax(self.queries.tile(at, at.rows, at.row_index, self.first(at), cpu), dim=1)
        key_low, key_high = torch.aminmax(self.keys.tile(at, at.columns, at.column_index, 0, cpu), dim=1)
        if bool(((high < key_low) | (key_high < low)).all()):
            return BlockState.EMPTY
        same_document = (low == high) & (key_low == key_high) & (low == key_low)
        return BlockState.FULL if bool(same_document.all()) else BlockState.PARTIAL

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        # The run of keys that each row may see; None where a row sees several, or that is not known.
        if not len(at.batch_ids):
            return None
        if bool((self.keys.tile(at, range(at.n), None, 0, torch.device("cpu")).diff(dim=-1) < 0).any()):
            return None  # documents that come back later are not one run
        keys = self.keys.tile(at, range(at.n), None, 0, at.device)
        rows = self.queries.tile(at, at.rows, at.row_index, self.first(at), at.device)
        batch = max(len(keys), len(rows))
        keys, rows = keys.expand(batch, -1).contiguous(), rows.expand(batch, -1).contiguous()
        # As the ids ascend, the keys of a document lie between the first place for its id and the last.
        first, stop = (torch.searchsorted(keys, rows, right=right) for right in (False, True))
        return first.unsqueeze(1), stop.unsqueeze(1)

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        # The user may change the tensors of ids between two matrices: then they are read again.
        if self.given is not None and self.given[2:] != tuple(map(changes_of, self.given[:2])):
            self._copy_to_cpu(*self.given[:2])
            self.given = (*self.given[:2], *map(changes_of, self.given[:2]))
        for ids in (self.keys, self.queries):
            _check_batch("Documents", ids.label, ids.axes[:-1], batch, f"give {ids.label} for {math.prod(batch)}.")
        shared = self.queries is self.keys  # then the queries are the last m of the n tokens
        if self.keys.count != n or (m > n if shared else self.queries.count != m):
            given = {"ids": f"{self.keys.axes}"} | ({} if shared else {"query_ids": f"{self.queries.axes}"})
            rule = "Documents() must have one id for each key, and one for each query."
            found = f"{self.keys.count} ids for n = {n} keys and m = {m} queries"
            fix = "use Documents(ids, query_ids) with shapes (n,) and (m,)."
            raise ShapeError(rule, found, fix, arguments=given, where="attend()")

    def size(self) -> tuple[int | None, int | None]:
        return self.queries.count, self.keys.count

    def name(self) -> str:
        queries = "" if self.queries is self.keys else f", query_ids={self.queries.axes}"
        return f"Documents({self.keys.axes}{queries})"


class _TokenIds:
    """Ids of tokens: one copy on the CPU for coverage, one on each device that asks for tiles.

    Parameters
    ----------
    label : str
        What errors call them.
    ids : sequence of int, or Tensor of int, shape (tokens,) or (batch, tokens)
        Document of each token.
    """

    @public("Documents()")
    def __init__(self, label: str, ids: Sequence[int] | Tensor) -> None:
        given = _as_int64("Documents", label, ids, "number the documents: [0, 0, 1, 1, 1].")
        if given.ndim == 0:
            rule = f"{label} must have one id for each token."
            raise ShapeError(rule, "a single number", "number the documents: [0, 0, 1, 1, 1].", arguments={label: ids})
        self.label = label
        self.given, self.axes = given, tuple(given.shape)
        self.count = self.axes[-1]
        self._ids = given.reshape(math.prod(self.axes[:-1]), self.count)
        self._copies = DeviceCopies()

    def tile(self, at: Tile, span: range, index: Tensor | None, first: int, device: torch.device) -> Tensor:
        """Return the ids of a tile's rows or columns, shape (batches, places) or (1, places).

        Parameters
        ----------
        at : Tile
            The tile.
        span, index : range, Tensor or None
            Its rows or columns: a range, or an index where they are none.
        first : int
            The place of row 0, or of column 0, among the ids.
        device : torch.device
            Where the result is.
        """
        ids = self._ids if device.type == "cpu" else self._copies.of(self._ids, device)
        if index is None:
            ids = ids[:, span.start + first : span.stop + first]
        else:
            ids = ids[:, to_device(index, device) + first]
        if ids.shape[0] == 1:
            return ids
        return ids[at.b.flatten() if device == at.device else at.batch_ids]


def _as_int64(mask: str, label: str, value: Lengths, fix: str) -> Tensor:
    """Return whole numbers as a new tensor of int64 on the CPU, or raise a DtypeError with this fix.

    `mask` is the name of the mask, and `label` that of its argument `value`.
    """
    try:
        given = value if isinstance(value, Tensor) else torch.as_tensor(value)
        empty_list = not isinstance(value, Tensor) and not given.numel()  # torch reads [] as float
    except (TypeError, ValueError, RuntimeError):
        kind, shown = type(value).__name__, type(value).__name__
    else:
        if empty_list or not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
            return given.detach().to("cpu", torch.int64, copy=True)
        kind, shown = str(given.dtype).removeprefix("torch."), describe(value)
        if given.dtype == torch.bool and given.ndim > 1:
            fix = f"{mask} takes counts; for a mask use from_tensor(t[:, None, None, :])."
    raise DtypeError(f"{label} must be whole numbers.", kind, fix, arguments={label: shown})


def _check_batch(mask: str, label: str, axes: tuple[int, ...], batch: tuple[int, ...], fix: str) -> None:
    """Raise a ShapeError unless there is one entry for each sequence of the batch, or one for all."""
    count, wanted = math.prod(axes), math.prod(batch)
    # (6,) may stand for a batch of (2, 3), (3, 2) may not: its numbers would land on other sequences.
    if count == 1 or (count == wanted and (len(axes) == 1 or axes == batch)):
        return
    raise ShapeError(
        f"{mask}() must have one entry for each sequence of the batch, or one for all.",
        f"{count} entries, {wanted} sequences",
        fix,
        arguments={label: f"{axes}", "batch": f"{batch}"},
        where="attend()",
    )
