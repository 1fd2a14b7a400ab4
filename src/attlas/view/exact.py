"""Exact weights of one head, or of the mean of heads: any window, any row, any column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attlas import stats
from attlas.foundation.tiles import Tile, cut
from attlas.masks import Padding
from attlas.masks.runs import RunPerRow
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.view.blocks import Blocks, Sizes, edges_of
from attlas.view.codes import Array, encode, encode_signed, larger, largest_of_blocks, reduce_blocks

Wanted: TypeAlias = Callable[[], bool] | None

_CELLS_AT_ONCE = 1 << 22  # cells of weights that are held at once
_ROWS_AT_ONCE = 1024  # rows whose log-sum-exp is found together


class Preparation(Protocol):
    """What the cells of a head are read from, computed step by step before the first of them is known."""

    error: str

    @property
    def share(self) -> float:
        """Share that is done."""

    @property
    def is_short(self) -> bool:
        """Whether it takes so little time that a question may wait for it."""

    @property
    def told(self) -> dict[str, Any]:
        """How far it is: steps done, all steps, and seconds left."""

    def step(self) -> bool:
        """Do a little, and return whether there is more."""


class UnwantedError(Exception):
    """Nobody waits for the answer any more."""


def check_wanted(wanted: Wanted) -> None:
    """Raise an UnwantedError if `wanted` says that nobody waits for the answer any more."""
    if wanted is not None and not wanted():
        raise UnwantedError


def _some_rows(A: AttentionMatrix, rows: Tensor) -> AttentionMatrix:
    """Return some rows of a matrix by their numbers; its score must look at tokens alone, its mask be runs of keys."""
    problem = A.problem
    runs = problem.allowed_runs
    mask = None if runs is None else RunPerRow(*(t[..., rows.to(t.device)] for t in runs))
    problem = replace(problem, q=problem.q[:, :, rows.to(problem.device)], mask=mask)
    lse = A.softmax_weights.lse()[:, :, rows.to(A.device)] if problem.partial else None
    return AttentionMatrix(A.softmax_weights.replaced(problem, lse))


def without_first(A: AttentionMatrix) -> AttentionMatrix:
    """Return the matrix in which no query may see key 0: its rows are softmax over the keys that are left.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, m, n)
        The matrix. A sink of its own stays in the denominator, and so do the keys outside of a part of a matrix.
        Value-weighted weights keep their size, as they are no shares of a row.
    """
    m, n = A.weights.shape[2:]
    later = Padding(max(n - 1, 0), side="left")
    mask = later if A.mask is None else A.mask & later
    problem = replace(A.problem, mask=mask)
    # The log-sum-exp of a part of a matrix, or of value-weighted weights, cannot be computed from what is here.
    lse = A.softmax_weights.lse() if problem.partial else None
    if lse is not None and A.weights.are_shares:
        # The new denominator is the old one times (1 - the weight of key 0). Where that weight is nearly 1, rounding
        # leaves nothing of the difference; it is at least the sum over the other keys of this part.
        first_weight = A.window(range(m), range(1)).to_dense(limit=None)[..., 0].cpu().double()
        lse_of_others_here = softmax_matrix(replace(problem, partial=False), A.plan).softmax_weights.lse_on_cpu()
        lse = A.softmax_weights.lse_on_cpu() + torch.log1p(-first_weight.clamp(max=1.0))
        lse = torch.maximum(lse, lse_of_others_here)
    return AttentionMatrix(A.softmax_weights.replaced(problem, lse))


class Table(NamedTuple):
    """Blocks of a window: sum and largest weight of each, by size, and how many of its cells are allowed."""

    sum: Array
    max: Array
    cells: Array

    def pooled(self, pool: str) -> Array:
        """Return the mean over the allowed cells of each block, or the largest of them; 0 where there are none."""
        return self.max if pool == "max" else self.sum / np.maximum(self.cells, 1)


class Band(NamedTuple):
    """What one pass finds of some rows: their blocks, numbers of each row, and their part of each column."""

    blocks: Table
    entropy: Array
    effective_keys: Array
    max_weight: Array
    column_mass: Array
    column_max: Array


class Head:
    """One head of a batch, or the mean of several, as an exact matrix of weights.

    Parameters
    ----------
    A : AttentionMatrix, shape (1, heads, m, n)
        The head; of several heads the mean weight is meant, masked cells counted as 0.
    skip_first : bool
        Whether key 0 is left out and the rows are softmax over the keys that remain.
    unit : float, default 1.0
        What pictures of the head divide its weights by, so that they are at most 1: for value-weighted weights the
        largest norm of a value.
    shares : bool, default True
        Whether weights over `unit` are from 0 to 1. The codes of pictures of others have a sign.

    Notes
    -----
    A window of r rows and c keys costs r c scores per head, given the log-sum-exp of its rows; where that is
    not known yet it is found for 1,024 rows at a time, once, and kept: m numbers per head.

    Examples
    --------
    >>> import attlas
    >>> from attlas.view.exact import Head
    >>> head = Head(attlas.attend(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), mask=attlas.Causal()))
    >>> head.cells(range(1, 3), range(2)).round(3).tolist()
    [[0.5, 0.5], [0.3330000042915344, 0.3330000042915344]]
    """

    def __init__(self, A: AttentionMatrix, *, skip_first: bool = False, unit: float = 1.0, shares: bool = True) -> None:
        self.A = without_first(A) if skip_first else A
        self.preparation: Preparation | None = None  # what its cells are read from, where that is computed first
        self._softmax = self.A.weights.softmax  # None for weights of another kind, whose cells need no log-sum-exp
        self.unit = unit
        self._encode = encode if shares else encode_signed
        _, self.heads, self.m, self.n = A.shape
        self._lse = torch.zeros(1, self.heads, self.m, dtype=torch.float64)
        # Blocks of rows whose `_lse` is computed.
        self._block_has_lse = np.full(-(-self.m // _ROWS_AT_ONCE), fill_value=self._softmax is None)
        self.is_uniform = self.heads == 1 or _have_same_keys(self.A)  # whether all heads may see the same keys

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return self._lse.numel() * self._lse.element_size() + self._block_has_lse.nbytes

    def codes(self, weights: Array, allowed: Array) -> Array:
        """Return the codes of some weights for a picture."""
        return self._encode(weights / self.unit, allowed)

    @property
    def has_lse(self) -> bool:
        """Whether its rows have a log-sum-exp: it is one head, and a softmax."""
        return self.heads == 1 and self._softmax is not None

    @property
    def knows_lse(self) -> bool:
        """Whether the log-sum-exp of every row is known already."""
        return bool(self._block_has_lse.all())

    def lse(self, rows: range, wanted: Wanted = None) -> Tensor:
        """Return the log-sum-exp of some rows, shape (1, heads, rows).

        Raises
        ------
        UnwantedError
            If `wanted` says so between two steps.
        """
        for block in range(rows.start // _ROWS_AT_ONCE, -(-rows.stop // _ROWS_AT_ONCE)):
            if self._block_has_lse[block]:
                continue
            check_wanted(wanted)
            some = range(block * _ROWS_AT_ONCE, min((block + 1) * _ROWS_AT_ONCE, self.m))
            self._lse[..., some.start : some.stop] = self.A.window(some).softmax_weights.lse_on_cpu()
            self._block_has_lse[block] = True  # after the numbers: other threads may read them from now on
        return self._lse[..., rows.start : rows.stop]

    def window(self, rows: range, columns: range, wanted: Wanted = None) -> AttentionMatrix:
        """Return a window as a lazy matrix of its own, every weight as in the whole, shape (1, heads, r, c)."""
        if self._softmax is None:
            return self.A.window(rows, columns)
        lse = self.lse(rows, wanted)
        return self.A.with_weights(self._softmax.window(rows, columns, lse))

    def blocks(self, rows: range, columns: range, size: int, pool: str = "mean", wanted: Wanted = None) -> Table:
        """Return the blocks of ``size × size`` cells of a window; those at its end may be smaller."""
        return self.pooled(rows, columns, (edges_of(len(rows), size), edges_of(len(columns), size)), pool, wanted)

    def pooled(
        self,
        rows: range,
        columns: range,
        edges: tuple[Sequence[int], Sequence[int]],
        pool: str = "mean",
        wanted: Wanted = None,
    ) -> Table:
        """Return blocks of a window.

        Parameters
        ----------
        rows, columns : range
            The window.
        edges : pair of sequence of int
            First row and column of each block, counted from the window's, then the end of the last.
        pool : {"mean", "max"}
            Which number is needed: the maximum of a mean over heads costs more than its sum, and is not
            given where it is not asked for.
        wanted : callable, optional
            Whether somebody still waits.
        """
        if 0 in (len(rows), len(columns)):
            empty = np.zeros((len(edges[0]) - 1, len(edges[1]) - 1))
            return Table(empty, empty, empty.astype(np.int64))
        check_wanted(wanted)
        # Sums are linear: their mean over heads is that of the mean, and where all heads see the same keys
        # (`is_uniform`), so are the counts. Maxima are not: they need the mean written out.
        if self.heads > 1 and not (pool == "mean" and self.is_uniform):
            return self._dense_pooled(rows, columns, edges, wanted)
        return _block_table(self.window(rows, columns, wanted), edges)

    def _dense_pooled(
        self, rows: range, columns: range, edges: tuple[Sequence[int], Sequence[int]], wanted: Wanted
    ) -> Table:
        """Pool the mean weights of several heads, which must be written out for their maxima."""
        tables = []
        high, wide = (np.asarray(ends) for ends in edges)
        cells = int(np.diff(high).max()) * len(columns) * self.heads  # of a row of blocks, at most
        for part in cut(len(high) - 1, max(_CELLS_AT_ONCE // cells, 1)):
            check_wanted(wanted)
            first, last = int(high[part.start]), int(high[part.stop])
            some = range(rows.start + first, rows.start + last)
            weights, allowed = self.cells(some, columns, wanted), self.allowed(some, columns)
            tables.append(_pooled_in_blocks(weights, allowed, high[part.start : part.stop] - first, wide[:-1]))
        return Table(*(np.concatenate(parts) for parts in zip(*tables, strict=True)))

    def parts(
        self, rows: range, columns: range, step: int = 1, wanted: Wanted = None
    ) -> Iterator[tuple[range, Array, Array]]:
        """Yield some rows of a window at a time, a multiple of `step`: rows, mean weights, and which are allowed."""
        most = max(_CELLS_AT_ONCE // max(len(columns) * self.heads, 1) // step, 1) * step
        for span in cut(len(rows), most):
            check_wanted(wanted)
            some = range(rows.start + span.start, rows.start + span.stop)
            yield some, self.cells(some, columns, wanted), self.allowed(some, columns)

    def cells(self, rows: range, columns: range, wanted: Wanted = None) -> Array:
        """Return the weights of a window, float32 of shape (rows, columns)."""
        if 0 in (len(rows), len(columns)):
            return np.zeros((len(rows), len(columns)), dtype=np.float32)
        weights = self.window(rows, columns, wanted).to_dense(limit=None)[0]
        return _cpu_array(weights.mean(0).float())

    def rows(self, i: int) -> Array:
        """Return the weights of one query in each of the heads, float64 of shape (heads, n)."""
        return _cpu_array(self.A.window(range(i, i + 1)).to_dense(limit=None)[0, :, 0].cpu().double())

    def allowed(self, rows: range, columns: range) -> Array:
        """Return which cells of a window any head may attend to, bool of shape (rows, columns)."""
        return self._allowed_by_any_head(self.A.weights.tile(range(1), range(self.heads), rows, columns))

    def _allowed_by_any_head(self, at: Tile) -> Array:
        """Return which cells of a tile any head may attend to."""
        mask = self.A.mask
        if mask is None:
            return np.ones(at.shape[2:], dtype=bool)
        return _cpu_array(mask.allows(at).expand(at.shape).any(dim=1)[0])

    def sampled(self, rows: Tensor, columns: Sequence[int], pool: str = "mean") -> Table:
        """Return blocks of one row each: rows by their numbers, the first key of each block, and the end.

        As in `pooled`, `pool` says which number is needed.
        """
        weights, edges = self.A.weights, (range(len(rows) + 1), columns)
        one_table = self.heads == 1 or (pool == "mean" and self.is_uniform)
        fused = one_table and weights.softmax is not None and weights.softmax.problem.score.position_free
        if fused and (weights.mask is None or weights.allowed_runs is not None):
            return _block_table(_some_rows(self.A, rows), edges)
        at = weights.tile(range(1), range(self.heads), range(len(rows)), range(self.n), row_index=rows)
        cells = _cpu_array(self.A[..., rows, :][0].cpu().double().mean(0))
        return _pooled_in_blocks(cells, self._allowed_by_any_head(at), list(edges[0])[:-1], list(columns)[:-1])

    def logit(self, i: int, j: int) -> float:
        """Return the log-weight of one cell before softmax, -inf where it is masked.

        NaN for a mean of heads, and for weights that are no softmax.
        """
        if self.heads > 1 or self._softmax is None:
            return float("nan")
        return float(self.window(range(i, i + 1), range(j, j + 1)).logits[0, 0, 0, 0])

    def band(self, rows: range, size: int, wanted: Wanted = None) -> Band:
        """Return everything that a pass wants of some rows, with blocks of ``size × size`` cells.

        Numbers of a row that sees no key are NaN; so are entropy and effective keys of weights that are no shares.
        The largest weights are those of largest size, with their sign.
        """
        if self.heads > 1:
            return self._dense_band(rows, size, wanted)
        window = self.window(rows, range(self.n), wanted)
        of_shares = () if not self.A.weights.are_shares else (stats.Entropy(), stats.EffectiveKeys())
        blocks = Blocks(edges_of(len(rows), size), edges_of(self.n, size))
        if self.A.weights.are_signed:
            found, (most, column_most), mass = window.collect(blocks, Sizes(), stats.ColumnMass())
            numbers = [most, mass, column_most]
        else:
            largest = stats.MaxWeight(), stats.ColumnMass(), stats.ColumnMax()
            found, *numbers = window.collect(blocks, *of_shares, *largest)
        unknown = [np.full(len(rows), np.nan, dtype=np.float32) for _ in range(2 - len(of_shares))]
        arrays = [*unknown, *(_cpu_array(t[0, 0].float()) for t in numbers)]
        empty = _cpu_array(found.keys[0, 0]) == 0
        for numbers_of_rows in arrays[:3]:
            numbers_of_rows[empty] = np.nan
        return Band(Table(*(_cpu_array(t[0, 0]) for t in found[:3])), *arrays)

    def sums(self, rows: range, size: int, wanted: Wanted = None) -> Band:
        """Return those numbers of `band` that are the mean of those of the heads; the others are NaN.

        Asked for only where `is_uniform`: sums of blocks and of columns, many times faster than the rest.
        """
        window = self.window(rows, range(self.n), wanted)
        found, mass = window.collect(Blocks(edges_of(len(rows), size), edges_of(self.n, size)), stats.ColumnMass())
        total = _cpu_array(found.sum[0].mean(0))
        unknown, columns = np.full(len(rows), np.nan, dtype=np.float32), np.full(self.n, np.nan, dtype=np.float32)
        table = Table(total, np.full_like(total, np.nan), _cpu_array(found.cells[0, 0]))
        return Band(table, unknown, unknown, unknown, _cpu_array(mass[0].mean(0).float()), columns)

    def _dense_band(self, rows: range, size: int, wanted: Wanted) -> Band:
        """Return what `band` does of the mean weights of several heads, which are written out some rows at a time."""
        shape = len(edges_of(len(rows), size)) - 1, len(edges_of(self.n, size)) - 1
        table = Table(*(np.zeros(shape, dtype) for dtype in ("f8", "f4", "i8")))
        numbers = np.full((3, len(rows)), np.nan, dtype=np.float32)
        mass, most = np.zeros(self.n), np.zeros(self.n, dtype=np.float32)
        columns = self._columns_of(rows, size)
        inside = slice(columns.start, columns.stop)
        wide = slice(columns.start // size, -(-columns.stop // size))
        for part, weights, allowed in self.parts(rows, columns, size, wanted) if len(columns) else ():
            place = slice(part.start - rows.start, part.stop - rows.start)
            numbers[:, place] = _measures_of_rows(weights, allowed)
            mass[inside] += weights.sum(axis=0, dtype=np.float64)
            most[inside] = larger(most[inside], _largest_magnitude(weights, 0))
            found = _pooled_in_blocks(
                weights, allowed, edges_of(len(part), size)[:-1], edges_of(len(columns), size)[:-1]
            )
            high = slice(place.start // size, -(-place.stop // size))
            for into, values in zip(table, found, strict=True):
                into[high, wide] = values
        if not self.A.weights.are_shares:
            numbers[:2] = np.nan
        entropy, effective, largest = numbers
        return Band(table, entropy, effective, largest, mass.astype(np.float32), most)

    def _columns_of(self, rows: range, size: int) -> range:
        """Return the stretch of keys that some rows can see at all, from the edge of a block on."""
        runs = self.A.weights.allowed_runs
        if runs is None:
            return range(self.n)
        first, stop = (t[..., rows.start : rows.stop] for t in runs)
        seen = stop > first
        if not bool(seen.any()):
            return range(0)
        return range(int(first[seen].min()) // size * size, int(stop[seen].max()))


def _measures_of_rows(weights: Array, allowed: Array) -> Array:
    """Return entropy, effective keys and largest weight of rows, NaN where a row sees nothing, shape (3, rows)."""
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    mass = weights.sum(axis=1, dtype=np.float64)
    squares = np.einsum("ij,ij->i", weights, weights, dtype=np.float64)
    effective = np.divide(mass**2, squares, out=np.zeros_like(mass), where=squares > 0)
    entropy = -np.einsum("ij,ij->i", weights, logs, dtype=np.float64)
    found = np.stack([entropy.clip(min=0.0), effective, _largest_magnitude(weights, 1)])
    return np.where(allowed.any(axis=1), found, np.nan).astype(np.float32)


def _block_table(A: AttentionMatrix, edges: tuple[Sequence[int], Sequence[int]]) -> Table:
    """Return the blocks of A, the mean over its heads, which may all see the same keys; `edges` as of `Head.pooled`."""
    found = A.collect(Blocks(*edges))[0]
    total, largest = found.sum[0].cpu().double().mean(0), found.max[0].cpu().double().mean(0)
    return Table(_cpu_array(total), _cpu_array(largest), _cpu_array(found.cells[0, 0]))


def _pooled_in_blocks(weights: Array, allowed: Array, high: Array | list[int], wide: Array | list[int]) -> Table:
    """Pool weights, shape (rows, columns), in blocks of which `high` and `wide` are the first rows and columns."""
    total, cells = (
        reduce_blocks(values, high, wide, np.add, kind) for values, kind in ((weights, "f8"), (allowed, "i8"))
    )
    return Table(total, largest_of_blocks(weights, high, wide, weights.dtype), cells)


def _largest_magnitude(weights: Array, axis: int) -> Array:
    """Return the weight of largest size along an axis, with its sign."""
    return larger(weights.max(axis=axis), weights.min(axis=axis))


def _have_same_keys(A: AttentionMatrix) -> bool:
    """Return whether all heads may see the same keys, as far as that is known without asking for every cell."""
    runs = A.weights.allowed_runs
    return A.mask is None or (runs is not None and runs[0].shape[1] == 1)


def _cpu_array(t: Tensor) -> Array:
    """Return a tensor as an array on the CPU."""
    return t.cpu().numpy()
