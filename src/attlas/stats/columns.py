"""One number for each key: the mass that it receives, the largest weight, the query that gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attlas.engine.dense import MatrixLike
from attlas.engine.gradient import CellGradient
from attlas.engine.problem import Problem
from attlas.engine.statistic import Part, Statistic, TensorForm, keep_larger, merge_sums
from attlas.errors import ShapeError, public
from attlas.foundation.checks import one_of
from attlas.foundation.tiles import Tile
from attlas.stats.counts import interval_of, queries_of_keys
from attlas.stats.spans import Span, check_span, place_span

Combine: TypeAlias = Literal["sum", "mean"]

_SLAB_ROWS = 32  # rows whose maximum is taken before any is looked at alone


def _zeros_for_columns(problem: Problem) -> Tensor:
    """Return zeros of shape (batch, heads, n)."""
    batch, heads, _, n = problem.shape
    return torch.zeros(batch, heads, n, dtype=problem.dtype, device=problem.device)


def _nothing_for_columns(problem: Problem) -> Tensor:
    """Return what a running maximum of each column starts from: 0, or -inf for weights that may be negative."""
    zeros = _zeros_for_columns(problem)
    return zeros.fill_(-torch.inf) if problem.signed else zeros


def _form_of_columns(problem: Problem, dtype: torch.dtype | None = None) -> TensorForm:
    """Return shape and dtype (`TensorForm`) of a result with one number for each key."""
    batch, heads, _, n = problem.shape
    return TensorForm((batch, heads, n), dtype or problem.dtype)


def _column_slices(at: Tile) -> tuple[slice, slice, slice]:
    """Return the slices of a tile in a tensor of shape (batch, heads, n)."""
    b, h, _ = at.place
    return b, h, slice(at.columns.start, at.columns.stop)


def _rows_inside(at: Tile, window: range) -> slice | None:
    """Return which rows of a tile lie in a window of queries, or None where none does."""
    start, stop = max(at.rows.start, window.start), min(at.rows.stop, window.stop)
    return slice(start - at.rows.start, stop - at.rows.start) if start < stop else None


class _OfQueries(Statistic):
    """A number of each key, over a window of queries."""

    @public()
    def __init__(self, rows: Span | None = None) -> None:
        check_span("rows", rows)
        self.rows = rows
        # With a window the results of stacked matrices do not add up: it would be counted in each of them.
        self.axis = "columns" if rows is None else None

    def forms(self, problem: Problem) -> TensorForm:
        """Return shape and dtype of the result: one number for each key."""
        return _form_of_columns(problem)

    @public()
    def window(self, problem: Problem) -> range:
        """Return the queries that count."""
        return place_span("rows", self.rows, problem.shape[2], "queries")


class ColumnMass(_OfQueries):
    """Mass that each key receives, ``Σ_i A_ij`` over the queries.

    Parameters
    ----------
    rows : slice, range or (start, stop), optional
        Window of queries; the default is all. The last 32 are ``slice(-32, None)``.
    mean : bool, default False
        Whether the sum is divided by the number of queries of the window that may see the key; a key that
        none may see has 0.

    Raises
    ------
    ShapeError
        If `rows` has a step or does not lie within the matrix.

    See Also
    --------
    ColumnMax : the largest weight in place of the sum.

    Notes
    -----
    The accumulated attention by which caches of keys are thinned out: heavy hitters [1]_ over all queries,
    or over a window of the last ones [2]_. Under a causal mask early keys are seen by more queries, which
    `mean` makes up for. Cost: one sum over the tile.

    References
    ----------
    .. [1] Zhang et al., "H2O: heavy-hitter oracle for efficient generative inference", 2023.
    .. [2] Li et al., "SnapKV: LLM knows what you are looking for before generation", 2024.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(2, 8), torch.zeros(2, 8), mask=attlas.Causal())
    >>> A.collect(stats.ColumnMass(), stats.ColumnMass(mean=True))
    (tensor([1.5000, 0.5000]), tensor([0.7500, 0.5000]))
    """

    def __init__(self, rows: Span | None = None, mean: bool = False) -> None:
        super().__init__(rows)
        self.mean = mean
        self.axis = None if mean else self.axis

    merge = merge_sums

    @property
    def is_sum(self) -> bool:  # type: ignore[override]  # computed here
        """Whether it adds up weights: it does without `mean`."""
        return not self.mean

    @property
    def is_mean(self) -> bool:  # type: ignore[override]  # computed here
        """Whether it divides by numbers of allowed cells."""
        return self.mean

    def start(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        # `window` raises here where the rows do not lie within the matrix, and not in the middle of a pass.
        self.window(problem)
        return _zeros_for_columns(problem), _zeros_for_columns(problem) if self.mean else None

    def step(self, carry: tuple[Tensor, Tensor | None], part: Part, at: Tile) -> tuple[Tensor, Tensor | None]:
        # Add the mass of the rows in the window, and for a mean how many of these rows may see each key.
        mass, queries = carry
        rows = _rows_inside(at, self.window(part.problem))
        if rows is None:
            return carry
        whole = rows.stop - rows.start == len(at.rows)
        mass[_column_slices(at)] += part.column_sums if whole else part.weights[..., rows, :].sum(dim=-2)
        if queries is not None:
            into = queries[_column_slices(at)]
            for columns, cells in part.visible_columns:
                seen = float(rows.stop - rows.start) if cells is None else cells[..., rows, :].sum(dim=-2)
                into[..., columns.start : columns.stop] += seen
        return carry

    def finish(self, carry: tuple[Tensor, Tensor | None]) -> Tensor:
        # The mass of each column, for a mean divided by the number of queries that may see its key.
        mass, queries = carry
        return mass if queries is None else mass / queries.clamp(min=1.0)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient | None:
        # A weight counts with the gradient of its column; in a mean divided by the queries of the column. None where
        # the mask does not tell how many these are.
        if self.mean and (self.rows is not None or interval_of(problem) is None):
            return None
        if self.mean:
            grad = grad / queries_of_keys(problem).clamp(min=1.0)

        def of_tile(part: Part) -> Tensor:
            """Return the gradient in the weights of a part: that of each column, 0 in rows that are not counted."""
            rows = _rows_inside(part.at, self.window(problem))
            out = part.scratch("columns").zero_()
            if rows is not None:
                out[..., rows, :] = grad[_column_slices(part.at)].unsqueeze(-2)
            return out

        return CellGradient(column=grad) if self.rows is None else CellGradient(weights=(of_tile,))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # A window of rows, and a mean whose queries the mask does not tell, are left to tiles.
        self.window(problem)
        counted = not self.mean or interval_of(problem) is not None
        return {"column_mass": True} if self.rows is None and counted else None

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> tuple[Tensor, Tensor | None]:
        # The carry: the mass of each column, and for a mean how many queries may see its key.
        return results["column_mass"], queries_of_keys(problem) if self.mean else None


class ColumnMax(_OfQueries):
    """Largest weight that each key receives, ``max_i A_ij``; 0 for a key that no query may see.

    Parameters
    ----------
    rows : slice, range or (start, stop), optional
        Window of queries; the default is all.

    Raises
    ------
    ShapeError
        If `rows` has a step or does not lie within the matrix.

    See Also
    --------
    ColumnArgMax : the query that gives it.
    ColumnMass : the sum.

    Notes
    -----
    Cost: one maximum over the tile.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(2, 8), torch.zeros(2, 8), mask=attlas.Causal())
    >>> A.collect(stats.ColumnMax())[0]
    tensor([1.0000, 0.5000])
    """

    merge = keep_larger

    def start(self, problem: Problem) -> Tensor:
        """Return the maxima before any part; also checks the window."""
        self.window(problem)
        return _nothing_for_columns(problem)

    def finish(self, carry: Tensor) -> Tensor:
        # The largest weight of each column; 0 for a key that no query may see.
        return carry.masked_fill_(carry == -torch.inf, 0.0)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        # The part of `carry` is a view: the larger numbers are written into it.
        rows = _rows_inside(at, self.window(part.problem))
        if rows is not None:
            into = carry[_column_slices(at)]
            into.copy_(self.merge(into, part.weights[..., rows, :].amax(dim=-2)))
        return carry

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # A window of rows is left to tiles.
        self.window(problem)
        return {"column_max": True} if self.rows is None else None


class ColumnArgMax(Statistic):
    """The query that gives each key its largest weight, the first of them; 0 for a key that none may see.

    Raises
    ------
    ShapeError
        If the matrix has no query.

    See Also
    --------
    ColumnMax : the weight itself.

    Notes
    -----
    Cost: that of ColumnMax, and a look at the keys that have found a larger weight.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(2, 8), torch.zeros(2, 8), mask=attlas.Causal())
    >>> A.collect(stats.ColumnArgMax())[0]
    tensor([0, 1])
    """

    differentiable = False

    def forms(self, problem: Problem) -> TensorForm:
        # One int64 for each key.
        return _form_of_columns(problem, torch.int64)

    def start(self, problem: Problem) -> tuple[Tensor, Tensor]:
        # The largest weight so far, and the query that has it.
        if problem.shape[2] == 0:
            rule = "the largest of no queries has no place."
            raise ShapeError(rule, "m = 0 queries", "give attend() a query.", where="ColumnArgMax()")
        largest = _nothing_for_columns(problem)
        return largest, torch.zeros_like(largest, dtype=torch.int64)

    def step(self, carry: tuple[Tensor, Tensor], part: Part, at: Tile) -> tuple[Tensor, Tensor]:
        # Write the larger weights of the part, and the queries that give them, over those found so far.
        largest, query = (t[_column_slices(at)] for t in carry)
        if at.device.type != "cpu":  # how many keys find a larger weight is not asked: the answer would have to wait
            found, row = part.weights.max(dim=-2)
            query.copy_(torch.where(found > largest, row + at.rows.start, query))
            torch.maximum(largest, found, out=largest)
            return carry
        size = _SLAB_ROWS if len(at.rows) % _SLAB_ROWS == 0 else len(at.rows)
        found, slab = part.weights.unflatten(-2, (-1, size)).amax(dim=-2).max(dim=-2)
        # Parts come with growing rows, so that the first of equal queries stays, and ever fewer keys find a
        # larger weight: the query is looked up for those alone, in the slab of rows that has it.
        b, h, j = (found > largest).nonzero(as_tuple=True)
        first = slab[b, h, j] * size
        rows = first.unsqueeze(-1) + torch.arange(size, device=first.device)
        cells = part.weights[b.unsqueeze(-1), h.unsqueeze(-1), rows, j.unsqueeze(-1)]
        query[b, h, j] = first + cells.argmax(dim=-1) + at.rows.start
        torch.maximum(largest, found, out=largest)
        return carry

    def merge(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        (x, i), (y, j) = a, b
        other = (y > x) | ((y == x) & (j < i))  # the first of equal queries
        return torch.where(other, y, x), torch.where(other, j, i)

    def finish(self, carry: tuple[Tensor, Tensor]) -> Tensor:
        # The query with the largest weight of each column.
        return carry[1]


@public("column_mass()")
def column_mass(A: MatrixLike, rows: Span | None = None, mean: bool = False, heads: Combine | None = None) -> Tensor:
    """Return the mass that each key receives; see `ColumnMass`.

    Parameters
    ----------
    A : AttentionMatrix or Tensor, shape (..., m, n), or a tuple of them
        The matrix; ``A[:, 4:8]`` is a group of heads; of several, the result is a tuple.
    rows : slice, range or (start, stop), optional
        Window of queries; the default is all.
    mean : bool, default False
        Whether the sum is divided by the number of queries of the window that may see the key.
    heads : {"sum", "mean"}, optional
        How the heads, the last leading axis of A, are combined after the pass; the default keeps them.

    Returns
    -------
    Tensor, shape (..., n)

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(8, 2, 4), torch.zeros(8, 2, 4), mask=attlas.Causal())
    >>> stats.column_mass(A[:4], heads="mean")
    tensor([1.5000, 0.5000])
    """
    return _with_combined_heads(A, ColumnMass(rows, mean), heads)


@public("column_max()")
def column_max(A: MatrixLike, rows: Span | None = None, heads: Combine | None = None) -> Tensor:
    """Return the largest weight that each key receives; see `ColumnMax`.

    Parameters
    ----------
    A : AttentionMatrix or Tensor, shape (..., m, n), or a tuple of them
        The matrix; ``A[:, 4:8]`` is a group of heads; of several, the result is a tuple.
    rows : slice, range or (start, stop), optional
        Window of queries; the default is all.
    heads : {"sum", "mean"}, optional
        How the heads, the last leading axis of A, are combined after the pass; the default keeps them.

    Returns
    -------
    Tensor, shape (..., n)

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(2, 8), torch.zeros(2, 8), mask=attlas.Causal())
    >>> stats.column_max(A)
    tensor([1.0000, 0.5000])
    """
    return _with_combined_heads(A, ColumnMax(rows), heads)


def _with_combined_heads(A: Any, statistic: Statistic, heads: str | None) -> Any:
    """Return a statistic of columns with its heads combined by "sum" or "mean"; of several matrices, a tuple."""
    if isinstance(A, list | tuple):
        return tuple(_with_combined_heads(one, statistic, heads) for one in A)
    one_of("heads", heads, ("sum", "mean", None), 'heads="mean"')
    if heads is not None and A.ndim < 3:
        wrong = f"heads = {heads!r}, and A has no leading axis"
        raise ShapeError("there must be heads to combine.", wrong, "leave heads out.", A=f"shape {tuple(A.shape)}")
    found = statistic(A)
    if heads is None:
        return found
    return found.sum(dim=-2) if heads == "sum" else found.mean(dim=-2)
