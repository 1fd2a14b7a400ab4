"""How far back a head looks: the distance that it keeps, and its weight against distance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from attlas import stats
from attlas.errors import ShapeError
from attlas.heads.resting import FirstSeen, follow_first, no_keys_seen
from attlas.heads.targets import place_shift, row_filter
from attlas.stats import Part, Statistic
from attlas.tiles import Tile

if TYPE_CHECKING:
    from attlas.matrix import AttentionMatrix

__all__ = ["DistanceProfile", "Fixed", "FixedDistance", "by_distance", "fixed_distance"]

Bins: TypeAlias = Literal["each", "log"]


class Fixed(NamedTuple):
    """How much a head keeps to one distance, and which.

    Parameters
    ----------
    score : Tensor, shape (..., heads)
        Mean weight on the key at that distance.
    distance : Tensor of int64, shape (..., heads)
        How many places back it lies; negative for keys after the query, 0 where no distance gets any weight.

    Examples
    --------
    >>> import torch
    >>> from attlas.heads import Fixed
    >>> score, distance = Fixed(torch.ones(2), torch.tensor([3, 4]))
    """

    score: Tensor
    distance: Tensor


class _Diagonals(NamedTuple):
    """Mass and allowed cells of each diagonal, and what the rows without a choice put there."""

    sums: tuple[Tensor, Tensor]
    seen: FirstSeen
    counted: Tensor | None
    shift: int
    m: int
    n: int


class _Rows(NamedTuple):
    """A part in which some rows do not count."""

    weights: Tensor
    seen: tuple[tuple[range, Tensor | None], ...]


class FixedDistance(Statistic):
    """Score of a head that looks a fixed number of tokens away, and that number.

    Parameters
    ----------
    shift : int, optional
        Place among the keys at which query 0 stands; by default the last query stands at the last key.
    counted : Tensor of bool, shape (m,) or (batch, m), optional
        Queries that count at all.

    Raises
    ------
    ShapeError
        If there are more queries than keys and no `shift`.
    DtypeError
        If `counted` is no tensor of bool.

    See Also
    --------
    Diagonal : the score for a distance that is known.

    Notes
    -----
    The distance is the one, other than 0 and 1, that gets most weight in all; the score is that of
    `Diagonal` at this distance: the mean over the queries that may see that key and another. Distances 0
    and 1 are current-token and previous-token heads. Diagonal heads are those of [1]_.
    Cost: one sum over the tile; memory of two numbers a diagonal and three a row, for each head.

    References
    ----------
    .. [1] Kovaleva et al., "Revealing the dark secrets of BERT", 2019, section 4.1.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads import FixedDistance
    >>> codes = torch.eye(8)[None]
    >>> A = attlas.attend(codes.roll(3, 1), codes, attlas.ScaledDot(30.0), attlas.Causal())
    >>> score, distance = A.collect(FixedDistance())[0]
    >>> score, distance  # query i is made to look at key i - 3
    (tensor([1.]), tensor([3]))
    """

    def __init__(self, shift: int | None = None, counted: Tensor | None = None) -> None:
        self.shift = shift
        self.counted = counted
        self._offsets = stats.Offsets(mean=True)

    def start(self, problem: Any) -> _Diagonals:
        where = "FixedDistance()"
        counted, shift = row_filter(where, self.counted, problem), place_shift(where, self.shift, problem)
        mass, cells = self._offsets.start(problem)
        return _Diagonals(
            (mass, cast(Tensor, cells)), no_keys_seen(problem), counted, shift, problem.shape[2], problem.shape[3]
        )

    def step(self, carry: _Diagonals, part: Part, at: Tile) -> _Diagonals:
        follow_first(carry.seen, part, at, carry.n)
        some = part if carry.counted is None else cast(Part, _only(part, at, carry.counted))
        self._offsets.step(carry.sums, some, at)
        return carry

    def mean(self, carry: _Diagonals) -> tuple[Tensor, Tensor]:
        """Return how far back the weight lies on average, and the share of it behind the queries."""
        mass = carry.sums[0]
        distances = carry.shift - torch.arange(mass.shape[-1], device=mass.device) + carry.m - 1
        total = mass.sum(dim=-1).clamp(min=torch.finfo(mass.dtype).tiny)
        return (mass * distances).sum(-1) / total, torch.where(distances < 0, mass, 0.0).sum(-1) / total

    def finish(self, carry: _Diagonals) -> Fixed:
        mass, cells = carry.sums
        if not mass.shape[-1]:
            nothing = mass.sum(dim=-1)
            return Fixed(nothing, nothing.to(torch.int64))
        # Rows that see one key put their weight there whatever they want.
        alone = carry.seen.keys == 1
        if carry.counted is not None:
            alone = alone & carry.counted
        diagonal = carry.seen.first - torch.arange(carry.m, device=mass.device) + carry.m - 1
        diagonal = diagonal.clamp(0, mass.shape[-1] - 1)
        mass = mass.scatter_add(-1, diagonal, -torch.where(alone, carry.seen.weight, 0.0))
        cells = cells.scatter_add(-1, diagonal, -alone.to(cells.dtype))
        distances = carry.shift - torch.arange(mass.shape[-1], device=mass.device) + carry.m - 1
        # Nearer distances first, so that the nearest of equal ones is taken.
        order = distances.abs().argsort(stable=True)
        order = order[(distances[order] != 0) & (distances[order] != 1)]
        if not len(order):
            return Fixed(torch.zeros_like(mass[..., 0]), torch.zeros_like(mass[..., 0], dtype=torch.int64))
        best = mass[..., order].argmax(dim=-1)
        place = order[best].unsqueeze(-1)
        score = (mass.gather(-1, place) / cells.gather(-1, place).clamp(min=1.0)).squeeze(-1)
        some = mass.gather(-1, place).squeeze(-1) > 0
        return Fixed(torch.where(some, score, 0.0).clamp(max=1.0), torch.where(some, distances[order][best], 0))


def _only(part: Part, at: Tile, counted: Tensor) -> _Rows:
    """Return a part without the rows that do not count."""
    rows = counted[:, :, at.rows.start : at.rows.stop].expand(part.problem.shape[0], -1, -1)
    rows = rows[at.batches.start : at.batches.stop].unsqueeze(-1)
    shape = part.shape
    seen = tuple(
        (columns, (rows if cells is None else rows & cells).expand(*shape[:3], len(columns)))
        for columns, cells in part.seen
    )
    return _Rows(part.weights * rows, seen)


class _Counted(stats.Offsets):
    """Mass on each diagonal, and the number of its allowed cells, of the queries that are no padding."""

    def __init__(self) -> None:
        super().__init__(mean=True)

    def start(self, problem: Any) -> Any:
        return super().start(problem), row_filter("by_distance()", None, problem)

    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        sums, counted = carry
        super().step(sums, part if counted is None else cast(Part, _only(part, at, counted)), at)
        return carry

    def finish(self, carry: Any) -> Any:
        return carry[0]

    def outputs(self, problem: Any) -> None:
        return None


class DistanceProfile(NamedTuple):
    """Weight against distance, bin by bin from the nearest; made by `by_distance`.

    Parameters
    ----------
    start, stop : Tensor of int64, shape (bins,)
        A bin holds the distances ``start <= i - j < stop``; negative ones are keys after the query.
    weight : Tensor, shape (..., bins)
        Mean weight of the allowed cells at these distances; 0 where a head has none.
    share : Tensor, shape (..., bins)
        Share of all weight that lies there; sums to 1 over the bins.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads import by_distance
    >>> A = attlas.attend(torch.zeros(8, 4), torch.zeros(8, 4), mask=attlas.Causal())
    >>> profile = by_distance(A, bins="log")
    >>> profile.start, profile.stop
    (tensor([0, 1, 2, 4]), tensor([1, 2, 4, 8]))
    """

    start: Tensor
    stop: Tensor
    weight: Tensor
    share: Tensor


def by_distance(A: AttentionMatrix, bins: Bins = "each", shift: int | None = None) -> DistanceProfile:
    """Return the mean weight of each head against the distance from query to key.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The matrix.
    bins : {"each", "log"}, default "each"
        Every distance by itself, or bins that double: 0, 1, 2 to 3, 4 to 7, and the same for keys after
        the query.
    shift : int, optional
        Place among the keys at which query 0 stands; by default the last query stands at the last key.

    Returns
    -------
    DistanceProfile

    Raises
    ------
    ShapeError
        If `bins` is no such word, or if there are more queries than keys and no `shift`.

    Notes
    -----
    Distances at which nothing may attend (keys after the query under a causal mask) are left out. Means are
    over allowed cells, so that far distances, which few queries have, are not made small by their number.
    Heads are told apart by the distance that they look over in [1]_.
    Cost: that of `attlas.stats.Offsets`; memory of two numbers a diagonal and head.

    References
    ----------
    .. [1] Vig and Belinkov, "Analyzing the structure of attention in a transformer language model", 2019.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads import by_distance
    >>> A = attlas.attend(torch.zeros(3, 8), torch.zeros(3, 8), mask=attlas.Causal())
    >>> by_distance(A).weight  # distances 0, 1, 2
    tensor([0.6111, 0.4167, 0.3333])
    """
    if bins not in ("each", "log"):
        rule, fix = 'bins must be "each" or "log".', 'bins="log"'
        raise ShapeError("by_distance()", rule, found=f"bins = {bins!r}", fix=fix)
    place = place_shift("by_distance()", shift, A.problem)
    mass, cells = A.collect(_Counted())[0]
    m, count = A.shape[-2], mass.shape[-1]
    # The last diagonal of `Offsets` is the furthest key after the first query.
    distances = place + m - 1 - torch.arange(count)
    low, high = (int(distances.min()), int(distances.max())) if count else (0, -1)
    edges = _edges(low, high, bins)
    starts = torch.tensor(edges[:-1], dtype=torch.int64)
    stops = torch.tensor(edges[1:], dtype=torch.int64)
    of = (torch.searchsorted(starts, distances, right=True) - 1).to(mass.device)
    total, allowed = (torch.zeros(*t.shape[:-1], len(starts), dtype=t.dtype, device=t.device) for t in (mass, cells))
    total.index_add_(-1, of, mass)
    allowed.index_add_(-1, of, cells)
    some = (allowed.reshape(-1, len(starts)) > 0).any(dim=0).cpu()
    nearest = some.nonzero().flatten()
    nearest = nearest[torch.maximum(starts[nearest].abs(), (stops[nearest] - 1).abs()).argsort(stable=True)]
    total, allowed = total[..., nearest.to(total.device)], allowed[..., nearest.to(total.device)]
    everything = total.sum(dim=-1, keepdim=True)
    share = torch.where(everything > 0, total / everything.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
    return DistanceProfile(starts[nearest], stops[nearest], total / allowed.clamp(min=1.0), share)


def _edges(low: int, high: int, bins: str) -> list[int]:
    """Return where bins begin, ascending, then the end of the last."""
    if bins == "each" or low > high:
        return list(range(low, high + 2))
    doubling = [0, 1]
    while doubling[-1] <= max(high, -low):
        doubling.append(doubling[-1] * 2)
    after = [1 - edge for edge in doubling[:1:-1]]  # -3 to -2 is a bin as 2 to 3 is
    return sorted({low, high + 1, *(edge for edge in [*after, *doubling] if low < edge <= high)})


def fixed_distance(A: AttentionMatrix, shift: int | None = None, counted: Tensor | None = None) -> Fixed:
    """Return how much each head keeps to one distance, and which; see `FixedDistance`.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., heads, m, n)
        The matrix.
    shift : int, optional
        Place among the keys at which query 0 stands; by default the last query stands at the last key.
    counted : Tensor of bool, shape (m,) or (batch, m), optional
        Queries that count at all.

    Returns
    -------
    score, distance : Tensor, shape (..., heads)

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(2, 4, 8), torch.zeros(2, 4, 8), mask=attlas.Causal())
    >>> heads.fixed_distance(A).distance
    tensor([2, 2])
    """
    found: Fixed = A.collect(FixedDistance(shift, counted))[0]
    return found
