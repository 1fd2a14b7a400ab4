"""Weight on target keys: the base class of most scores of a head, and checks of their arguments."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, kind, public
from attlas.foundation.checks import is_integer, wrong_type
from attlas.foundation.tiles import Tile
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas.padding import token_queries
from attlas.stats import Part, Statistic
from attlas.stats.rows import zeros_for_rows

ATLAS_OR_MATRICES = "source must be an Atlas, or AttentionMatrix objects, one for each layer."
_CELLS_PER_RARE_TARGET = 16  # where fewer than one cell in so many is a target, cells are taken one by one


class TargetSums(NamedTuple):
    """Running sums of each row, each of shape (batch, heads, m), and what `prepare` returned."""

    mass: Tensor
    targets: Tensor
    keys: Tensor
    prepared: Any


class TargetWeight(Statistic):
    """Mean weight on target keys, over the queries that have a choice.

    A query has the choice where the mask lets it see a target and a key that is none. A subclass says which
    keys are targets.

    Parameters
    ----------
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include; the default is every one that the mask of the matrix does not tell to be
        padding. In cross-attention of as many queries as keys, name them: the mask tells about the keys alone.
    """

    def __init__(self, query_mask: Tensor | None = None) -> None:
        self.query_mask = query_mask

    @public()
    def start(self, problem: Any) -> TargetSums:
        # Implements `Statistic.start`: sums of 0, and what a subclass needs to tell targets.
        query_mask = check_query_mask(self.query_mask, problem)
        prepared = self.prepare(problem)
        mass, targets, keys = (zeros_for_rows(problem) for _ in range(3))
        return TargetSums(mass, targets, keys, (query_mask, prepared))

    def step(self, carry: TargetSums, part: Part, at: Tile) -> TargetSums:
        # Implements `Statistic.step`: adds the weight and the number of targets of one tile to those of its rows.
        carry.keys[at.place] += part.keys
        _, prepared = carry.prepared
        columns = self.target_columns(at, prepared)
        if not len(columns):
            return carry
        start = columns.start - at.columns.start
        targets = self.targets(at.narrow(columns), prepared)
        sums = carry.mass[at.place], carry.targets[at.place]
        # All three fill `sums` with the same numbers; they differ in time.
        if targets.shape[-2] == 1:
            _add_columns(sums, part, targets, start)
        elif at.device.type == "cpu" and _are_rare(targets):
            _add_rare(sums, part, targets, start)
        else:
            _add_dense(sums, part, targets, start)
        return carry

    def finish(self, carry: TargetSums) -> Tensor:
        # Implements `Statistic.finish`: the mean over rows that see a target and a key that is none.
        choice = (carry.targets > 0) & (carry.keys > carry.targets)
        return mean_of_rows(carry.mass, choice, carry.prepared[0])

    def prepare(self, problem: Any) -> Any:
        """Check the arguments against the sizes of the matrix, and return what `targets` needs."""
        return None

    def target_columns(self, at: Tile, prepared: Any) -> range:
        """Return the columns of a tile that may have a target; the range may be empty."""
        return at.columns

    @abstractmethod
    def targets(self, at: Tile, prepared: Any) -> Tensor:
        """Return True where a key is a target, shape (batches or 1, 1, rows or 1, columns)."""


def _add_dense(sums: tuple[Tensor, Tensor], part: Part, targets: Tensor, start: int) -> None:
    """Add the weight on targets and the number of targets, by products with the whole tile.

    `targets` begins at column `start` of the part.
    """
    mass, count = sums
    stop = start + targets.shape[-1]
    ones = targets.to(mass.dtype)
    mass += (part.weights[..., start:stop] * ones).sum(dim=-1)
    for visible, cells in part.visible_columns:
        first, last = max(visible.start, start), min(visible.stop, stop)
        if first < last:
            some = ones[..., first - start : last - start]
            count += (some if cells is None else some * cells[..., first - visible.start : last - visible.start]).sum(
                dim=-1
            )


def _add_columns(sums: tuple[Tensor, Tensor], part: Part, targets: Tensor, start: int) -> None:
    """Add what `_add_dense` does, where all rows have the same target keys."""
    mass, count = sums
    for b in range(mass.shape[0]):
        j = targets[min(b, len(targets) - 1), 0, 0].nonzero().flatten() + start
        mass[b] += part.weights[b][..., j].sum(dim=-1)
        for visible, cells in part.visible_columns:
            columns = j[(j >= visible.start) & (j < visible.stop)] - visible.start
            count[b] += (
                len(columns) if cells is None else _cells_of_batch(cells, b)[..., columns].to(count.dtype).sum(dim=-1)
            )


def _add_rare(sums: tuple[Tensor, Tensor], part: Part, targets: Tensor, start: int) -> None:
    """Add what `_add_dense` does cell by cell, where targets are rare: copies of a token are one cell in a hundred."""
    mass, count = sums
    ones = count.new_ones(1)
    for b in range(mass.shape[0]):
        i, j = _target_cells(targets[min(b, len(targets) - 1), 0])
        j = j + start
        mass[b].index_add_(-1, i, part.weights[b][:, i, j])
        for visible, cells in part.visible_columns:
            inside = (j >= visible.start) & (j < visible.stop)
            rows, columns = i[inside], j[inside] - visible.start
            if cells is None:
                some = ones.expand(len(count[b]), len(rows))
            else:
                some = _cells_of_batch(cells, b)[:, rows, columns].to(count.dtype).expand(len(count[b]), -1)
            count[b].index_add_(-1, rows, some)


def _are_rare(targets: Tensor) -> bool:
    """Return whether one cell in `_CELLS_PER_RARE_TARGET` or fewer is a target; eight cells with one count as eight."""
    return _cells_by_eights(targets).count_nonzero().item() * 8 * _CELLS_PER_RARE_TARGET <= targets.numel()


def _cells_by_eights(targets: Tensor) -> Tensor:
    """Return the cells of each row eight at a time, as one number that is 0 where none is a target."""
    whole = targets.shape[-1] // 8 * 8
    flat = targets[..., :whole].flatten()
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    return flat.view(torch.int64).view(*targets.shape[:-1], whole // 8)


def _target_cells(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the targets of a tile; finding them eight at a time takes a third of the time."""
    some, eighth = _cells_by_eights(targets).nonzero(as_tuple=True)
    whole = targets.shape[-1] // 8 * 8
    within, offset = targets[:, :whole].unflatten(-1, (whole // 8, 8))[some, eighth].nonzero(as_tuple=True)
    last_i, last_j = targets[:, whole:].nonzero(as_tuple=True)
    return torch.cat([some[within], last_i]), torch.cat([eighth[within] * 8 + offset, last_j + whole])


def _cells_of_batch(cells: Tensor, b: int) -> Tensor:
    """Return the cells of one batch, shape (heads or 1, rows, columns)."""
    cells = cells.view(*(1,) * (4 - cells.ndim), *cells.shape)
    return cells[min(b, len(cells) - 1)]


class Agreement(TargetWeight):
    """Weight of each query on the keys that carry the same label as it does.

    Parameters
    ----------
    queries, keys : Tensor of int, shape (m,) or (batch, m), and (n,) or (batch, n)
        Label of each query and of each key.
    gap : int
        With 1, a query's own position does not count (in self-attention, where the last query is at the last key);
        with 0 it does.

    Raises
    ------
    ShapeError
        If there is not one label for each query and key, or, with a gap, if there are more queries than keys.

    Notes
    -----
    With token ids as labels this is weight on copies of the token; with the id of the token *before* each
    key it is induction on any text, without a repeated block. Memory: a few numbers per row and head.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads import Agreement
    >>> A = attlas.attend(torch.zeros(2, 4), torch.zeros(4, 4))  # uniform weights, 1/4 each
    >>> A.collect(Agreement(torch.tensor([7, 8]), torch.tensor([7, 8, 8, 9])))[0]
    tensor([0.2500, 0.5000])
    """

    def __init__(self, queries: Tensor, keys: Tensor, gap: int = 0) -> None:
        super().__init__()
        self.queries = queries
        self.keys = keys
        self.gap = gap

    @public("Agreement()")
    def prepare(self, problem: Any) -> tuple[Tensor, Tensor, int]:
        # Overrides `TargetWeight.prepare`: labels of queries and of keys, and the position of query 0 for the gap.
        m, n = problem.shape[2:]
        queries = per_batch("queries", self.queries, problem, m, "queries")
        keys = per_batch("keys", self.keys, problem, n, "keys")
        return queries, keys, query_offset(None, problem) if self.gap else 0

    def targets(self, at: Tile, prepared: tuple[Tensor, Tensor, int]) -> Tensor:
        # Implements `TargetWeight.targets`: equal labels, with `gap` positions between query and key at least.
        *labels, first_query = prepared  # labels of queries and keys, and the position of query 0
        queries, keys = (batches_of(t, at) for t in labels)
        rows, columns = (slice(span.start, span.stop) for span in (at.rows, at.columns))
        same = queries[:, rows, None] == keys[:, None, columns]
        if self.gap:
            same &= (at.i + first_query - at.j).abs() >= self.gap
        return same.unsqueeze(1)

    def finish(self, carry: TargetSums) -> Tensor:
        return carry.mass


def mean_of_rows(x: Tensor, choice: Tensor, query_mask: Tensor | None) -> Tensor:
    """Return the mean of (batch, heads, m) over the rows that have a choice and are not masked; 0 where none is."""
    rows = choice if query_mask is None else choice & query_mask
    return torch.where(rows, x, 0.0).sum(dim=-1) / rows.sum(dim=-1).clamp(min=1)


def check_query_mask(query_mask: Tensor | None, problem: Any) -> Tensor | None:
    """Return the queries to include, shape (batch or 1, 1, m): the given ones, or all except padding (None: all)."""
    if query_mask is None:
        tokens = token_queries(problem)
        return None if tokens is None else tokens.unsqueeze(1).to(problem.device)
    if not isinstance(query_mask, Tensor) or query_mask.dtype != torch.bool:
        rule, fix = "query_mask must be a tensor of bool, True for a query to include.", "attention_mask.bool()"
        raise wrong_type(rule, "query_mask", query_mask, f"query_mask={fix}")
    return per_batch("query_mask", query_mask, problem, problem.shape[2], "queries").unsqueeze(1)


def batches_of(t: Tensor, at: Tile) -> Tensor:
    """Return the rows of a tile's batches, or the one row that all batches share."""
    return t if len(t) == 1 else t[at.batches.start : at.batches.stop]


def rows_of_tile(query_mask: Tensor, at: Tile) -> Tensor:
    """Return which rows of a tile to include, shape (batches or 1, 1, rows, 1)."""
    return batches_of(query_mask, at)[:, :, at.rows.start : at.rows.stop, None]


def per_batch(name: str, t: Tensor, problem: Any, size: int, axis: str) -> Tensor:
    """Return a tensor with one entry for each query or key, the same for all texts or not, as (batch or 1, size)."""
    batch = problem.shape[0]
    if isinstance(t, Tensor) and t.ndim and t.shape[-1] == size:
        flat = t.reshape(math.prod(t.shape[:-1]), size)
        if len(flat) in (1, batch):
            return flat.to(problem.device)
    rule = f"{name} must have one entry for each of the {axis}, for all texts alike or for each of the batch."
    given, fix = t if isinstance(t, Tensor) else type(t).__name__, f"a tensor of shape ({size},) or ({batch}, {size})."
    raise ShapeError(rule, f"{size} {axis} and a batch of {batch}", fix, arguments={name: given})


def check_matrices(name: str, matrices: Sequence[object], rule: str, fix: str) -> None:
    """Raise a DtypeError that names the first element that is no AttentionMatrix."""
    for layer, A in enumerate(matrices):
        if not isinstance(A, AttentionMatrix):
            raise DtypeError(rule, kind(A), fix, arguments={f"{name}[{layer}]": A})


def check_layers(layers: Sequence[Any], fits: Callable[[Any], bool], rule: str, fix: str) -> None:
    """Raise a ShapeError where there is no layer, or one does not fit the first."""
    if not layers:
        raise ShapeError("there must be a layer.", "no matrix", "output.attentions")
    for A in layers:
        if not fits(A):
            given = {"first layer": f"shape {tuple(layers[0].shape)}"}
            raise ShapeError(rule, f"a layer of shape {tuple(A.shape)}", fix, arguments=given)


def query_offset(shift: int | None, problem: Any) -> int:
    """Return the position of query 0 among the keys; without `shift`, the last query is at the last key."""
    m, n = problem.shape[2:]
    if shift is None and m <= n:
        return int(n - m)
    if is_integer(shift):
        return shift
    rule = "distance needs a place for each query: the last stands at the last key, or shift says where."
    fix = "shift=0 where query 0 stands at key 0."
    raise ShapeError(rule, f"m = {m} queries, n = {n} keys", fix, shift=repr(shift))
