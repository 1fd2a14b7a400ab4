"""Exact weights of one head, or of the mean of heads: any window, any row, any column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attlas import stats
from attlas.indexing import Axes
from attlas.masks import And, Coverage, Mask
from attlas.masks.base import edges
from attlas.matrix import AttentionMatrix
from attlas.recording.places import window_of
from attlas.tiles import Tile, cut
from attlas.view.blocks import Blocks, edges_of

__all__ = ["Band", "ButFirst", "Head", "Table", "Unwanted", "without_first"]

_CELLS = 1 << 22  # cells of weights that are held at once
_ROWS = 1024  # rows whose log-sum-exp is found together


class Unwanted(Exception):
    """Nobody waits for the answer any more."""


class ButFirst(Mask):
    """Every pair but those with key 0."""

    def allows(self, at: Tile) -> Tensor:
        return at.j >= 1

    def coverage(self, at: Tile) -> Coverage:
        found = edges(at)
        if found is None:
            return Coverage.SOME
        first, last = found[2:]
        return Coverage.ALL if first >= 1 else Coverage.NONE if last < 1 else Coverage.SOME

    def interval(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        first = torch.ones_like(at.i).view(1, 1, -1)
        return first, torch.full_like(first, at.n)


def without_first(A: AttentionMatrix) -> AttentionMatrix:
    """Return the matrix in which no query may see key 0: its rows are softmax over the keys that are left."""
    mask: Mask = ButFirst() if A.problem.mask is None else And(A.problem.mask, ButFirst())
    axes = Axes((A.shape[0], A.shape[1]), (True, True))
    return AttentionMatrix(replace(A.problem, mask=mask), A.plan, axes)


class Table(NamedTuple):
    """Blocks of a window: sum and largest weight of each, and how many of its cells are allowed."""

    sum: NDArray[np.float64]
    max: NDArray[np.float64]
    cells: NDArray[np.int64]

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean over the allowed cells of each block, 0 where there are none."""
        return self.sum / np.maximum(self.cells, 1)


class Band(NamedTuple):
    """What one pass finds of some rows: their blocks, numbers of each row, and their part of each column."""

    blocks: Table
    entropy: NDArray[np.float32]
    effective_keys: NDArray[np.float32]
    max_weight: NDArray[np.float32]
    column_mass: NDArray[np.float32]
    column_max: NDArray[np.float32]


class Head:
    """One head of a batch, or the mean of several, as an exact matrix of weights.

    Parameters
    ----------
    A : AttentionMatrix, shape (1, heads, m, n)
        The head; of several heads the mean weight is meant.
    skip_first : bool
        Whether key 0 is left out and the rows are softmax over the keys that remain.

    Notes
    -----
    A window of r rows and c keys costs r c scores a head, given the log-sum-exp of its rows; where that is
    not known yet it is found for 1,024 rows at a time, once, and kept: m numbers a head.
    """

    def __init__(self, A: AttentionMatrix, *, skip_first: bool = False) -> None:
        self.A = without_first(A) if skip_first else A
        _, self.heads, self.m, self.n = A.shape
        self._lse = torch.zeros(1, self.heads, self.m, dtype=A.dtype)
        self._known = np.zeros(-(-self.m // _ROWS), dtype=bool)
        self._shared = self.heads == 1 or _is_shared(self.A)

    def lse(self, rows: range, wanted: Callable[[], bool] | None = None) -> Tensor:
        """Return the log-sum-exp of some rows, shape (1, heads, rows).

        Raises
        ------
        Unwanted
            If `wanted` says so between two steps.
        """
        for block in range(rows.start // _ROWS, -(-rows.stop // _ROWS)):
            if self._known[block]:
                continue
            go_on(wanted)
            some = range(block * _ROWS, min((block + 1) * _ROWS, self.m))
            self._lse[..., some.start : some.stop] = window_of(self.A, some, range(self.n)).lse.cpu()
            self._known[block] = True  # after the numbers: another thread may read them from now on
        return self._lse[..., rows.start : rows.stop]

    def window(self, rows: range, columns: range, wanted: Callable[[], bool] | None = None) -> AttentionMatrix:
        """Return a window as a lazy matrix of its own, every weight as in the whole, shape (1, heads, r, c)."""
        lse = self.lse(rows, wanted).to(self.A.device)
        return window_of(self.A, rows, columns, lse)

    def blocks(
        self, rows: range, columns: range, size: int, pool: str = "mean", wanted: Callable[[], bool] | None = None
    ) -> Table:
        """Return the blocks of ``size × size`` cells of a window that begins at the edge of a block.

        `pool` says which number is needed: the maximum of a mean over heads costs more than its sum.
        """
        edges = edges_of(len(rows), size), edges_of(len(columns), size)
        if 0 in (len(rows), len(columns)):
            empty = np.zeros((len(edges[0]) - 1, len(edges[1]) - 1))
            return Table(empty, empty, empty.astype(np.int64))
        go_on(wanted)
        if self.heads == 1 or (pool == "mean" and self._shared):
            found = self.window(rows, columns, wanted).collect(Blocks(*edges))[0]
            total, largest = (_array(t[0].double().mean(0)) for t in found[:2])
            return Table(total, largest, _array(found.cells[0, 0]))
        return self._dense_blocks(rows, columns, size, wanted)

    def _dense_blocks(self, rows: range, columns: range, size: int, wanted: Callable[[], bool] | None) -> Table:
        """Pool the mean weights of several heads, which must be written out for their maxima."""
        total, largest, cells = (np.zeros((-(-len(rows) // size), -(-len(columns) // size))) for _ in range(3))
        for part, weights, allowed in self.parts(rows, columns, size, wanted):
            high = edges_of(len(part), size)[:-1]
            wide = edges_of(len(columns), size)[:-1]
            place = slice((part.start - rows.start) // size, (part.start - rows.start) // size + len(high))
            for into, values, reduce in (
                (total, weights, np.add),
                (largest, weights, np.maximum),
                (cells, allowed, np.add),
            ):
                across = reduce.reduceat(values, wide, axis=1, dtype=np.float64)
                into[place] = reduce.reduceat(across, high, axis=0)
        return Table(total, largest, cells.astype(np.int64))

    def parts(
        self, rows: range, columns: range, step: int = 1, wanted: Callable[[], bool] | None = None
    ) -> Iterator[tuple[range, NDArray[np.float32], NDArray[np.bool_]]]:
        """Yield some rows of a window at a time, a multiple of `step`: rows, mean weights, and which are allowed."""
        most = max(_CELLS // max(len(columns) * self.heads, 1) // step, 1) * step
        for span in cut(len(rows), most):
            go_on(wanted)
            some = range(rows.start + span.start, rows.start + span.stop)
            yield some, self.cells(some, columns, wanted), self.allowed(some, columns)

    def cells(self, rows: range, columns: range, wanted: Callable[[], bool] | None = None) -> NDArray[np.float32]:
        """Return the weights of a window, shape (rows, columns)."""
        weights = self.window(rows, columns, wanted).to_dense(limit=None)[0]
        return _array((weights[0] if self.heads == 1 else weights.double().mean(0)).float())

    def allowed(self, rows: range, columns: range) -> NDArray[np.bool_]:
        """Return which cells of a window any head may attend to, shape (rows, columns)."""
        problem = self.A.problem
        if problem.mask is None:
            return np.ones((len(rows), len(columns)), dtype=bool)
        at = problem.tile(range(1), range(self.heads), rows, columns)
        return _array(problem.mask.allows(at).expand(at.shape).any(dim=1)[0])

    def sampled(self, rows: Tensor) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return whole rows by their numbers: weights and which are allowed, shape (rows, n)."""
        problem = self.A.problem
        weights = self.A[..., rows, :][0].double().mean(0)
        at = problem.tile(range(1), range(self.heads), range(len(rows)), range(self.n), row_index=rows)
        if problem.mask is None:
            allowed = np.ones((len(rows), self.n), dtype=bool)
        else:
            allowed = _array(problem.mask.allows(at).expand(at.shape).any(dim=1)[0])
        return _array(weights.float()), allowed

    def band(self, rows: range, size: int, wanted: Callable[[], bool] | None = None) -> Band:
        """Return everything that a pass wants of some rows."""
        if self.heads > 1:
            return self._dense_band(rows, size, wanted)
        edges = edges_of(len(rows), size), edges_of(self.n, size)
        found, *numbers = self.window(rows, range(self.n), wanted).collect(
            Blocks(*edges),
            stats.Entropy(),
            stats.EffectiveKeys(),
            stats.MaxWeight(),
            stats.ColumnMass(),
            stats.ColumnMax(),
        )
        total, largest, cells = (_array(t[0, 0]) for t in found[:3])
        arrays = [_array(t[0, 0].float()) for t in numbers]
        empty = _array(found.keys[0, 0]) == 0
        for row in arrays[:3]:
            row[empty] = np.nan
        return Band(Table(total, largest, cells), *arrays)

    def _dense_band(self, rows: range, size: int, wanted: Callable[[], bool] | None) -> Band:
        entropy, effective, largest = (np.full(len(rows), np.nan, dtype=np.float32) for _ in range(3))
        mass, most = np.zeros(self.n), np.zeros(self.n)
        tables: list[Table] = []
        wide = edges_of(self.n, size)[:-1]
        for part, weights, allowed in self.parts(rows, range(self.n), size, wanted):
            place = slice(part.start - rows.start, part.stop - rows.start)
            seen = allowed.any(axis=1)
            logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
            whole = weights.sum(axis=1, dtype=np.float64)
            squares = np.square(weights, dtype=np.float64).sum(axis=1)
            kish = np.divide(whole**2, squares, out=np.zeros_like(whole), where=squares > 0)
            for into, values in (
                (entropy, -(weights * logs).sum(axis=1, dtype=np.float64)),
                (effective, kish),
                (largest, weights.max(axis=1)),
            ):
                into[place] = np.where(seen, values, np.nan)
            mass += weights.sum(axis=0, dtype=np.float64)
            np.maximum(most, weights.max(axis=0), out=most)
            high = edges_of(len(part), size)[:-1]
            pooled = (
                reduce.reduceat(reduce.reduceat(values, wide, axis=1, dtype=np.float64), high, axis=0)
                for values, reduce in ((weights, np.add), (weights, np.maximum), (allowed, np.add))
            )
            total, top, cells = pooled
            tables.append(Table(total, top, cells.astype(np.int64)))
        joined = Table(*(np.concatenate(parts) for parts in zip(*tables, strict=True)))
        return Band(joined, entropy, effective, largest, mass.astype(np.float32), most.astype(np.float32))


def go_on(wanted: Callable[[], bool] | None) -> None:
    """Raise Unwanted if nobody waits any more."""
    if wanted is not None and not wanted():
        raise Unwanted


def _is_shared(A: AttentionMatrix) -> bool:
    """Return whether all heads may see the same keys, as far as that is known without asking for every cell."""
    problem = A.problem
    return problem.mask is None or (problem.interval is not None and problem.interval[0].shape[1] == 1)


def _array(t: Tensor) -> NDArray[np.generic]:
    return t.cpu().numpy()
