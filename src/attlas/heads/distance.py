"""How far back a head looks: the distance that it keeps, and its weight against distance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from attlas import stats
from attlas.errors import public
from attlas.foundation.checks import one_of
from attlas.foundation.tiles import Tile
from attlas.heads.sinks import FirstVisibleKey, no_visible_key, update_first_key
from attlas.heads.targets import check_query_mask, query_offset, rows_of_tile
from attlas.stats import Part, Statistic
from attlas.stats.functions import function_of

if TYPE_CHECKING:
    from attlas.matrix import AttentionMatrix

Bins: TypeAlias = Literal["each", "log"]


class Fixed(NamedTuple):
    """How much a head keeps to one distance, and which.

    Parameters
    ----------
    score : Tensor, shape (..., heads)
        Mean weight on the key at that distance.
    distance : Tensor of int64, shape (..., heads)
        How many positions back it lies; negative for keys after the query, 0 where no distance gets any weight.

    Examples
    --------
    >>> import torch
    >>> from attlas.heads import Fixed
    >>> score, distance = Fixed(torch.ones(2), torch.tensor([3, 4]))
    """

    score: Tensor
    distance: Tensor


class _DiagonalSums(NamedTuple):
    """Weight and allowed cells of each diagonal, and the first visible key of each row."""

    sums: tuple[Tensor, Tensor]
    seen: FirstVisibleKey
    query_mask: Tensor | None
    shift: int

    @property
    def distances(self) -> Tensor:
        """How many positions back each diagonal lies, shape (m + n - 1,)."""
        mass, m = self.sums[0], self.seen.keys.shape[-1]
        return self.shift - torch.arange(mass.shape[-1], device=mass.device) + m - 1


class _MaskedPart(NamedTuple):
    """A tile without the rows that are masked out."""

    weights: Tensor
    visible_columns: tuple[tuple[range, Tensor | None], ...]


class FixedDistance(Statistic):
    """Score of a head that looks a fixed number of tokens away, and that number.

    Parameters
    ----------
    shift : int, optional
        Position of query 0 among the keys; by default the last query is at the last key.
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    ShapeError
        If there are more queries than keys and no `shift`.
    DtypeError
        If `query_mask` is no tensor of bool.

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
    >>> from attlas import heads
    >>> codes = torch.eye(8)[None]
    >>> A = attlas.attend(codes.roll(3, 1), codes, attlas.ScaledDot(30.0), attlas.Causal())
    >>> score, distance = A.collect(heads.FixedDistance())[0]
    >>> score, distance  # query i is made to look at key i - 3
    (tensor([1.]), tensor([3]))
    >>> heads.fixed_distance(A).distance
    tensor([3])
    """

    def __init__(self, shift: int | None = None, query_mask: Tensor | None = None) -> None:
        self.shift = shift
        self.query_mask = query_mask
        self._offsets = stats.Offsets(mean=True)

    @public("FixedDistance()")
    def start(self, problem: Any) -> _DiagonalSums:
        # Implements `Statistic.start`: sums along the diagonals, the first key of each query, the checked settings.
        query_mask, shift = check_query_mask(self.query_mask, problem), query_offset(self.shift, problem)
        mass, cells = self._offsets.start(problem)
        return _DiagonalSums((mass, cast(Tensor, cells)), no_visible_key(problem), query_mask, shift)

    def step(self, carry: _DiagonalSums, part: Part, at: Tile) -> _DiagonalSums:
        # Implements `Statistic.step`: both are filled in place, without the queries that `query_mask` leaves out.
        update_first_key(carry.seen, part, at)
        self._offsets.step(carry.sums, _masked_part(part, at, carry.query_mask), at)
        return carry

    def mean(self, carry: _DiagonalSums) -> tuple[Tensor, Tensor]:
        """Return how far back the weight lies on average, and the share of it behind the queries."""
        mass, distances = carry.sums[0], carry.distances
        total = mass.sum(dim=-1).clamp(min=torch.finfo(mass.dtype).tiny)
        return (mass * distances).sum(-1) / total, torch.where(distances < 0, mass, 0.0).sum(-1) / total

    def finish(self, carry: _DiagonalSums) -> Fixed:
        mass, cells = carry.sums
        if not mass.shape[-1]:
            nothing = mass.sum(dim=-1)
            return Fixed(nothing, nothing.to(torch.int64))
        # Rows that see one key put their weight there whatever they want.
        alone = carry.seen.keys == 1
        if carry.query_mask is not None:
            alone = alone & carry.query_mask
        m = alone.shape[-1]
        diagonal = carry.seen.first - torch.arange(m, device=mass.device) + m - 1
        diagonal = diagonal.clamp(0, mass.shape[-1] - 1)
        mass = mass.scatter_add(-1, diagonal, -torch.where(alone, carry.seen.weight, 0.0))
        cells = cells.scatter_add(-1, diagonal, -alone.to(cells.dtype))
        distances = carry.distances
        # Nearer distances first, so that the nearest of equal ones is taken.
        order = distances.abs().argsort(stable=True)
        # The query itself and the key before it have patterns of their own.
        order = order[(distances[order] != 0) & (distances[order] != 1)]
        if not len(order):
            return Fixed(torch.zeros_like(mass[..., 0]), torch.zeros_like(mass[..., 0], dtype=torch.int64))
        best = mass[..., order].argmax(dim=-1)
        index = order[best].unsqueeze(-1)
        score = (mass.gather(-1, index) / cells.gather(-1, index).clamp(min=1.0)).squeeze(-1)
        some = mass.gather(-1, index).squeeze(-1) > 0
        return Fixed(torch.where(some, score, 0.0).clamp(max=1.0), torch.where(some, distances[order][best], 0))


def _masked_part(part: Part, at: Tile, query_mask: Tensor | None) -> Part:
    """Return a tile without the rows that are masked out, with the fields that `stats.Offsets` reads."""
    if query_mask is None:
        return part
    rows, shape = rows_of_tile(query_mask, at), part.shape
    visible = tuple(
        (columns, (rows if cells is None else rows & cells).expand(*shape[:3], len(columns)))
        for columns, cells in part.visible_columns
    )
    return cast(Part, _MaskedPart(part.weights * rows, visible))


class _MaskedOffsets(stats.Offsets):
    """Mass on each diagonal, and the number of its allowed cells, of the queries that are no padding."""

    def __init__(self) -> None:
        super().__init__(mean=True)

    @public("by_distance()")
    def start(self, problem: Any) -> Any:
        return super().start(problem), check_query_mask(None, problem)

    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        # `Offsets.step`, with a weight of 0 in the rows that `query_mask` leaves out.
        sums, query_mask = carry
        super().step(sums, _masked_part(part, at, query_mask), at)
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


@public("by_distance()")
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
        Position of query 0 among the keys; by default the last query is at the last key.

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
    one_of("bins", bins, ("each", "log"), 'bins="log"')
    offset = query_offset(shift, A.weights)
    mass, cells = A.collect(_MaskedOffsets())[0]
    m, count = A.shape[-2], mass.shape[-1]
    # The last diagonal of `Offsets` is the furthest key after the first query.
    distances = offset + m - 1 - torch.arange(count)
    low, high = (int(distances.min()), int(distances.max())) if count else (0, -1)
    edges = _distance_bin_edges(low, high, bins)
    starts = torch.tensor(edges[:-1], dtype=torch.int64)
    stops = torch.tensor(edges[1:], dtype=torch.int64)
    # The bin of each diagonal.
    of = (torch.searchsorted(starts, distances, right=True) - 1).to(mass.device)
    total, allowed = (torch.zeros(*t.shape[:-1], len(starts), dtype=t.dtype, device=t.device) for t in (mass, cells))
    total.index_add_(-1, of, mass)
    allowed.index_add_(-1, of, cells)
    # Bins in which any head has an allowed cell, the nearest first.
    some = (allowed.reshape(-1, len(starts)) > 0).any(dim=0).cpu()
    nearest = some.nonzero().flatten()
    nearest = nearest[torch.maximum(starts[nearest].abs(), (stops[nearest] - 1).abs()).argsort(stable=True)]
    total, allowed = total[..., nearest.to(total.device)], allowed[..., nearest.to(total.device)]
    everything = total.sum(dim=-1, keepdim=True)
    share = torch.where(everything > 0, total / everything.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
    return DistanceProfile(starts[nearest], stops[nearest], total / allowed.clamp(min=1.0), share)


def _distance_bin_edges(low: int, high: int, bins: str) -> list[int]:
    """Return the edges of the bins of the distances from `low` to `high`, ascending."""
    if bins == "each" or low > high:
        return list(range(low, high + 2))
    doubling = [0, 1]
    while doubling[-1] <= max(high, -low):
        doubling.append(doubling[-1] * 2)
    after = [1 - edge for edge in doubling[:1:-1]]  # -3 to -2 is a bin as 2 to 3 is
    return sorted({low, high + 1, *(edge for edge in [*after, *doubling] if low < edge <= high)})


fixed_distance = function_of(FixedDistance, Fixed, "score and distance of shape (..., heads)")
