"""Weight on target keys: what nearly every score of a head is, and who is asked for it."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.atlas.padding import token_queries
from attlas.errors import DtypeError, ShapeError, kind
from attlas.stats import Part, Statistic
from attlas.tiles import Tile

__all__ = ["Agreement", "Aim", "OnTargets", "mean_of_rows", "of_each_batch", "place_shift", "row_filter", "rows_of"]


_RARE = 16  # where fewer than one cell in so many is a target, cells are taken one by one


class Aim(NamedTuple):
    """What was seen of each row so far, each of shape (batch, heads, m), and what the targets need to know."""

    mass: Tensor
    targets: Tensor
    keys: Tensor
    facts: Any


class OnTargets(Statistic):
    """Mean weight on target keys, over the queries that have the choice.

    A query has the choice where the mask lets it see a target and a key that is none. A subclass says which
    keys are targets.

    Parameters
    ----------
    counted : Tensor of bool, shape (m,) or (batch, m), optional
        Queries that count at all; the default is every one that the mask of the matrix does not tell to be
        padding. In cross-attention of as many queries as keys, name them: the mask tells about the keys alone.
    """

    def __init__(self, counted: Tensor | None = None) -> None:
        self.counted = counted

    def start(self, problem: Any) -> Aim:
        where = f"{type(self).__name__}()"
        counted = row_filter(where, self.counted, problem)
        facts = self.facts(problem)
        return Aim(rows_of(problem), rows_of(problem), rows_of(problem), (counted, facts))

    def step(self, carry: Aim, part: Part, at: Tile) -> Aim:
        carry.keys[at.place] += part.keys
        _, facts = carry.facts
        columns = self.reach(at, facts)
        if not len(columns):
            return carry
        start = columns.start - at.columns.start
        targets = self.targets(at.narrow(columns), facts)
        found = carry.mass[at.place], carry.targets[at.place]
        if targets.shape[-2] == 1:
            _add_columns(found, part, targets, start)
        elif at.device.type == "cpu" and _are_rare(targets):
            _add_rare(found, part, targets, start)
        else:
            _add_many(found, part, targets, start)
        return carry

    def finish(self, carry: Aim) -> Tensor:
        choice = (carry.targets > 0) & (carry.keys > carry.targets)
        return mean_of_rows(carry.mass, choice, carry.facts[0])

    def facts(self, problem: Any) -> Any:
        """Return what `targets` has to know of the matrix; also the door for checks against the sizes."""
        return None

    def reach(self, at: Tile, facts: Any) -> range:
        """Return the columns of a tile among which there may be a target, perhaps none."""
        return at.columns

    @abstractmethod
    def targets(self, at: Tile, facts: Any) -> Tensor:
        """Return True where a key is a target, shape (batches or 1, 1, rows or 1, columns)."""


def _add_many(found: tuple[Tensor, Tensor], part: Part, targets: Tensor, start: int) -> None:
    """Add the mass on targets that begin at column `start` of the part, and their number, from whole tiles."""
    mass, count = found
    stop = start + targets.shape[-1]
    ones = targets.to(mass.dtype)
    mass += (part.weights[..., start:stop] * ones).sum(dim=-1)
    for seen, cells in part.seen:
        first, last = max(seen.start, start), min(seen.stop, stop)
        if first < last:
            some = ones[..., first - start : last - start]
            count += (some if cells is None else some * cells[..., first - seen.start : last - seen.start]).sum(dim=-1)


def _add_columns(found: tuple[Tensor, Tensor], part: Part, targets: Tensor, start: int) -> None:
    """Add the same for targets that are the same keys for all rows."""
    mass, count = found
    for b in range(mass.shape[0]):
        j = targets[min(b, len(targets) - 1), 0, 0].nonzero().flatten() + start
        mass[b] += part.weights[b][..., j].sum(dim=-1)
        for seen, cells in part.seen:
            columns = j[(j >= seen.start) & (j < seen.stop)] - seen.start
            count[b] += len(columns) if cells is None else _at(cells, b)[..., columns].to(count.dtype).sum(dim=-1)


def _add_rare(found: tuple[Tensor, Tensor], part: Part, targets: Tensor, start: int) -> None:
    """Add the same from the targets alone, where they are few: copies of a token are one cell in a hundred."""
    mass, count = found
    ones = count.new_ones(1)
    for b in range(mass.shape[0]):
        i, j = _places(targets[min(b, len(targets) - 1), 0])
        j = j + start
        mass[b].index_add_(-1, i, part.weights[b][:, i, j])
        for seen, cells in part.seen:
            inside = (j >= seen.start) & (j < seen.stop)
            rows, columns = i[inside], j[inside] - seen.start
            if cells is None:
                some = ones.expand(len(count[b]), len(rows))
            else:
                some = _at(cells, b)[:, rows, columns].to(count.dtype).expand(len(count[b]), -1)
            count[b].index_add_(-1, rows, some)


def _are_rare(targets: Tensor) -> bool:
    return _eights(targets).count_nonzero().item() * 8 * _RARE <= targets.numel()


def _eights(targets: Tensor) -> Tensor:
    """Return the cells of each row eight at a time, as one number that is 0 where none is a target."""
    whole = targets.shape[-1] // 8 * 8
    flat = targets[..., :whole].flatten()
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    return flat.view(torch.int64).view(*targets.shape[:-1], whole // 8)


def _places(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the targets of a tile; finding them eight at a time takes a third of the time."""
    some, eighth = _eights(targets).nonzero(as_tuple=True)
    whole = targets.shape[-1] // 8 * 8
    within, offset = targets[:, :whole].unflatten(-1, (whole // 8, 8))[some, eighth].nonzero(as_tuple=True)
    last_i, last_j = targets[:, whole:].nonzero(as_tuple=True)
    return torch.cat([some[within], last_i]), torch.cat([eighth[within] * 8 + offset, last_j + whole])


def _at(cells: Tensor, b: int) -> Tensor:
    """Return the cells of one batch, shape (heads or 1, rows, columns)."""
    cells = cells.view(*(1,) * (4 - cells.ndim), *cells.shape)
    return cells[min(b, len(cells) - 1)]


class Agreement(OnTargets):
    """Weight of each query on the keys that carry the same label as it does.

    Parameters
    ----------
    queries, keys : Tensor of int, shape (m,) and (n,)
        Label of each query and of each key.
    gap : int
        With 1, a query's own place does not count (in self-attention); with 0 it does.

    Notes
    -----
    With token ids as labels this is weight on copies of the token; with the id of the token *before* each
    key it is induction on any text, without a repeated block. Memory: a few numbers a row and head.

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

    def facts(self, problem: Any) -> tuple[Tensor, Tensor]:
        return self.queries.to(problem.device), self.keys.to(problem.device)

    def targets(self, at: Tile, facts: tuple[Tensor, Tensor]) -> Tensor:
        queries, keys = facts
        same = queries[at.i] == keys[at.j]
        if self.gap:
            same &= (at.i - at.j).abs() >= self.gap
        return same[None, None]

    def finish(self, carry: Aim) -> Tensor:
        return carry.mass


def rows_of(problem: Any) -> Tensor:
    """Return a 0 for each row, shape (batch, heads, m)."""
    return torch.zeros(problem.shape[:3], dtype=problem.dtype, device=problem.device)


def mean_of_rows(x: Tensor, choice: Tensor, counted: Tensor | None) -> Tensor:
    """Return the mean of (batch, heads, m) over the rows that have the choice and count; 0 where none does."""
    rows = choice if counted is None else choice & counted
    return torch.where(rows, x, 0.0).sum(dim=-1) / rows.sum(dim=-1).clamp(min=1)


def row_filter(where: str, counted: Tensor | None, problem: Any) -> Tensor | None:
    """Return which queries count, shape (batch or 1, 1, m): those named, or all that are no padding."""
    if counted is None:
        tokens = token_queries(problem)
        return None if tokens is None else tokens.unsqueeze(1).to(problem.device)
    if not isinstance(counted, Tensor) or counted.dtype != torch.bool:
        raise DtypeError(
            where,
            "counted must be a tensor of bool, True where a query counts.",
            {"counted": counted if isinstance(counted, Tensor) else type(counted).__name__},
            found=str(counted.dtype).removeprefix("torch.") if isinstance(counted, Tensor) else kind(counted),
            fix="counted=attention_mask.bool()",
        )
    return of_each_batch(where, "counted", counted, problem, problem.shape[2], "queries").unsqueeze(1)


def of_each_batch(where: str, name: str, given: Tensor, problem: Any, size: int, axis: str) -> Tensor:
    """Return a tensor with one entry for each query or key, the same for all texts or not, as (batch or 1, size)."""
    batch = problem.shape[0]
    if isinstance(given, Tensor) and given.ndim and given.shape[-1] == size:
        flat = given.reshape(math.prod(given.shape[:-1]), size)
        if len(flat) in (1, batch):
            return flat.to(problem.device)
    raise ShapeError(
        where,
        f"{name} must have one entry for each of the {axis}, for all texts alike or for each of the batch.",
        {name: given if isinstance(given, Tensor) else type(given).__name__},
        found=f"{size} {axis} and a batch of {batch}",
        fix=f"a tensor of shape ({size},) or ({batch}, {size}).",
    )


def place_shift(where: str, shift: int | None, problem: Any) -> int:
    """Return the place among the keys at which the first query stands; the last stands at the last without `shift`."""
    m, n = problem.shape[2:]
    if shift is None and m <= n:
        return int(n - m)
    if isinstance(shift, int) and not isinstance(shift, bool):
        return shift
    raise ShapeError(
        where,
        "distance needs a place for each query: the last stands at the last key, or shift says where.",
        {"shift": repr(shift)},
        found=f"m = {m} queries, n = {n} keys",
        fix="shift=0 where query 0 stands at key 0.",
    )
