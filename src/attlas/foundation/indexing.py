"""Parses the index of ``A[...]``, which gives cells as a Tensor or a smaller lazy matrix."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attlas.errors import DtypeError, OutOfRangeError, ShapeError, kind


@dataclass(frozen=True)
class Axes:
    """The leading axes that the user sees, over the (batch, heads) of the engine.

    Parameters
    ----------
    layout : tuple of int
        Sizes of the leading axes: none, ``(batch,)`` or ``(..., heads)``; an axis taken away by an integer
        index stays here with size 1.
    kept : tuple of bool
        Which of them the user still sees.
    """

    layout: tuple[int, ...]
    kept: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading axes that the user sees."""
        if all(self.kept):
            return tuple(self.layout)
        return tuple(size for size, kept in zip(self.layout, self.kept, strict=True) if kept)

    def restore(self, t: Tensor) -> Tensor:
        """Give a result of shape (batch, heads, ...) the leading axes that the user sees."""
        if t.shape[:2] == self.layout and all(self.kept):
            return t
        return t.reshape((*self.shape, *t.shape[2:]))

    def restore_all(self, result: Any) -> Any:
        """Give a result, a tensor or a (named) tuple of tensors, the leading axes that the user sees."""
        if isinstance(result, Tensor):
            return self.restore(result)
        parts = map(self.restore_all, result)
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)

    def spread(self, t: Tensor) -> Tensor:
        """Return a factor of a product with an axis of size 1 for each leading axis that an index has dropped."""
        if all(self.kept):
            return t
        lead = (1,) * (sum(self.kept) - (t.ndim - 2)) + tuple(t.shape[:-2])
        sizes = iter(lead)
        return t.reshape(*(next(sizes) if kept else 1 for kept in self.kept), *t.shape[-2:])


class Where(NamedTuple):
    """A parsed index: which batches and heads, and which rows and columns if they are asked for."""

    leading: tuple[Any, Any, Axes] | None
    rows: Any
    columns: Any
    pairs: bool

    def squeezed(self, cells: Tensor) -> Tensor:
        """Drop the axes of rows or columns that one integer named."""
        cells = cells.squeeze(-2) if isinstance(self.rows, int) else cells
        return cells.squeeze(-1) if isinstance(self.columns, int) else cells


def parse(key: Any, axes: Axes, m: int, n: int) -> Where | None:
    """Parse an index of a lazy matrix.

    Parameters
    ----------
    key : Any
        What stands in the square brackets.
    axes : Axes
        Leading axes of the matrix.
    m, n : int
        Sizes of its last two axes.

    Returns
    -------
    Where, or None where the index is one that only the dense tensor knows
        `leading` is None where all batches and heads are meant; `rows` is None where only leading axes were
        indexed. Rows and columns are an int, a range or an index tensor.

    Raises
    ------
    OutOfRangeError
        If an index lies outside its axis.
    ShapeError
        If there are more indices than axes, or index lists that do not fit.
    DtypeError
        If an index is of a kind that no tensor knows.
    """
    shape = (*axes.shape, m, n)
    entries = list(key) if isinstance(key, tuple) else [key]
    entries = [torch.from_numpy(entry) if isinstance(entry, np.ndarray) else entry for entry in entries]
    if any(entry is None or isinstance(entry, bool) or getattr(entry, "ndim", 0) > 1 for entry in entries):
        return None  # new axes, and tensors of indices or truths
    dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1:
        fix = "A[..., 17, :] for one row of all heads."
        raise _wrong("there is at most one Ellipsis.", shape, f"{len(dots)} of them", fix)
    if len(entries) - len(dots) > len(shape):
        found, fix = f"{len(entries) - len(dots)} indices, {len(shape)} axes", "A[0, 3, 17, :] for one row of one head."
        raise _wrong("there are more indices than axes.", shape, found, fix)
    missing = [None] * (len(shape) - (len(entries) - len(dots)))
    split = dots[0] if dots else len(entries)
    # None marks an axis that was not named: a matrix stays lazy while its last two axes are not named.
    named = [*map(_checked, entries[:split]), *missing, *map(_checked, entries[split + 1 :])]
    lists = [axis for axis, entry in enumerate(named) if isinstance(entry, Tensor | range)]
    pairs = lists == [len(shape) - 2, len(shape) - 1]
    if len(lists) > 1 and not pairs:
        return None
    resolved = [
        None if entry is None else _resolve(entry, size, axis, shape)
        for axis, (entry, size) in enumerate(zip(named, shape, strict=True))
    ]
    leading = _leading(resolved[:-2], axes)
    rows, columns = resolved[-2:]
    if rows is None and columns is None:
        return Where(leading, None, None, False)
    rows = range(m) if rows is None else rows
    columns = range(n) if columns is None else columns
    if pairs and 1 in (len(rows), len(columns)):
        rows, columns = torch.broadcast_tensors(rows, columns)
    if pairs and len(rows) != len(columns):
        rule = "two lists of indices name cells in pairs and must have the same length."
        fix = "A[..., rows, :][..., columns] for every row with every column."
        raise _wrong(rule, shape, f"{len(rows)} rows, {len(columns)} columns", fix)
    return Where(leading, rows, columns, pairs)


def _wrong(rule: str, shape: tuple[int, ...], found: str, fix: str, error: type[ShapeError] = ShapeError) -> ShapeError:
    return error(rule, found, fix, A=f"shape {shape}", where="A[...]")


def _checked(entry: Any) -> Any:
    """Return one index as an int, a slice, a range or an index tensor; raise a DtypeError for other types."""
    if isinstance(entry, slice | range):
        return entry
    if isinstance(entry, Tensor) and entry.ndim == 0 and not entry.is_floating_point() and entry.dtype != torch.bool:
        return int(entry)
    if isinstance(entry, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in entry):
        return torch.tensor(entry, dtype=torch.int64, device="cpu")
    if isinstance(entry, list | tuple) and entry and all(isinstance(i, bool) for i in entry):
        return torch.tensor(entry, device="cpu")
    if isinstance(entry, Tensor) and entry.ndim == 1 and not (entry.is_floating_point() or entry.is_complex()):
        return entry.cpu() if entry.dtype in (torch.bool, torch.uint8) else entry.to("cpu", torch.int64)
    if not isinstance(entry, bool | Tensor) and hasattr(entry, "__index__"):
        return operator.index(entry)
    rule = "an index is an integer, a slice, a list of integers, or True and False for each cell of an axis."
    given = {"index": entry if isinstance(entry, Tensor) else repr(entry)[:60]}
    raise DtypeError(rule, kind(entry), "A[0, 3, 5:9, :] or A[..., [2, 5], :].", arguments=given, where="A[...]")


def _resolve(entry: Any, size: int, axis: int, shape: tuple[int, ...]) -> Any:
    """Return an index counted from 0: an int, a range of step 1, or an index tensor on the CPU."""
    if isinstance(entry, slice):
        span = range(size)[entry]
        if span.step == 1:
            return range(span.start, max(span.stop, span.start))
        return torch.tensor(span, device="cpu").long()
    index = entry if isinstance(entry, Tensor) else torch.tensor(entry, dtype=torch.int64, device="cpu")
    if index.dtype in (torch.bool, torch.uint8):
        if len(index) != size:
            found = f"{len(index)} of them on axis {axis} of size {size}"
            raise _wrong("an index of True and False has one for each cell of its axis.", shape, found, "A[..., mask]")
        return index.nonzero().flatten()
    outside = index[(index < -size) | (index >= size)]
    if outside.numel():
        fix = f"use an index from {-size} to {size - 1}." if size else "this axis is empty."
        found = f"index {int(outside[0])} on axis {axis} of size {size}"
        raise _wrong("an index lies outside its axis.", shape, found, fix, OutOfRangeError)
    index = index % size if size else index
    return index if index.ndim else int(index)


def _leading(entries: list[Any], axes: Axes) -> tuple[Any, Any, Axes] | None:
    """Return the selected batches and heads, as slices if possible, and the remaining leading axes."""
    if all(entry is None for entry in entries):
        return None
    rest = iter(entries)
    chosen: list[Any] = [next(rest) if kept else None for kept in axes.kept]
    kept = tuple(k and not isinstance(entry, int) for k, entry in zip(axes.kept, chosen, strict=True))
    picks = [_pick(entry, size) for entry, size in zip(chosen, axes.layout, strict=True)]
    layout = tuple(map(len, picks))
    batch_axes = len(picks) - 1 if len(picks) >= 2 else len(picks)
    batches = torch.arange(math.prod(axes.layout[:batch_axes]), device="cpu").reshape(axes.layout[:batch_axes])
    for axis, pick in enumerate(picks[:batch_axes]):
        batches = batches.index_select(axis, pick)
    heads = picks[-1] if len(picks) >= 2 else torch.zeros(1, dtype=torch.int64, device="cpu")
    return _as_slice(batches.flatten()), _as_slice(heads), Axes(layout, kept)


def _pick(entry: Any, size: int) -> Tensor:
    """Return a resolved index of an axis as a tensor of positions; None stands for all."""
    if isinstance(entry, Tensor):
        return entry
    span = range(size) if entry is None else range(entry, entry + 1) if isinstance(entry, int) else entry
    return torch.arange(span.start, span.stop, device="cpu")


def _as_slice(index: Tensor) -> Tensor | slice:
    """Return consecutive positions as a slice, so that indexing with it gives a view."""
    if len(index) == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    consecutive = last - first + 1 == len(index) and bool((index.diff() == 1).all())
    return slice(first, last + 1) if consecutive else index
