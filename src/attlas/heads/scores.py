"""The scores of a head for all patterns, in one pass over its matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attlas.errors import ShapeError, public
from attlas.foundation.tiles import Tile
from attlas.heads.distance import FixedDistance
from attlas.heads.patterns import CurrentToken, DuplicateToken, Induction, Local, PreviousToken, Separator
from attlas.heads.sinks import Broad, FavouriteToken, FirstToken
from attlas.stats import Part, Statistic

if TYPE_CHECKING:
    from attlas.matrix import AttentionMatrix


class HeadScores(Statistic):
    """All measures of a head on a text from which its patterns are named, in one tensor.

    Parameters
    ----------
    ids : Tensor of int, shape (n,) or (batch, n)
        Token of each key.

    Attributes
    ----------
    NAMES : tuple of str
        Names of the numbers along the last axis, those of the fields of `Head`; ``"behind"`` is the share of weight
        on keys after the query.

    See Also
    --------
    scores : the same definitions by the names of their patterns.

    Notes
    -----
    Padding is left out. Cost: one pass; memory of some forty numbers per row and head.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads.scores import HeadScores
    >>> A = attlas.attend(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), mask=attlas.Causal())
    >>> found = A.collect(HeadScores(torch.arange(4)))[0]
    >>> found.shape[-1] == len(HeadScores.NAMES)
    True
    """

    NAMES = (
        "previous",
        "current",
        "near",
        "first",
        "breadth",
        "duplicate_text",
        "induction_text",
        "favourite",
        "fixed",
        "fixed_distance",
        "distance",
        "behind",
    )

    of_unsigned = True  # one of them is an entropy

    def __init__(self, ids: Tensor) -> None:
        self._fixed = FixedDistance()
        # In the order of `NAMES`.
        self._statistics: tuple[Statistic, ...] = (
            *_statistics_by_pattern(ids).values(),
            FavouriteToken(ids),
            self._fixed,
        )

    def start(self, problem: Any) -> list[Any]:
        return [s.start(problem) for s in self._statistics]

    def step(self, carry: list[Any], part: Part, at: Tile) -> list[Any]:
        return [s.step(c, part, at) for s, c in zip(self._statistics, carry, strict=True)]

    def finish(self, carry: list[Any]) -> Tensor:
        # The last statistic is `FixedDistance`: its score, and the distance with that score. Its sums by distance also
        # give the mean distance.
        *scores, (fixed, distance) = (s.finish(c) for s, c in zip(self._statistics, carry, strict=True))
        mean_distance, behind = self._fixed.mean(carry[-1])
        return torch.stack([*scores, fixed, distance.to(fixed.dtype), mean_distance, behind], dim=-1)


@public("scores()")
def scores(
    A: AttentionMatrix,
    ids: Tensor | None = None,
    separators: Iterable[int] = (),
    shift: int | None = None,
    query_mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the score of each head for every pattern, from one pass.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., heads, m, n)
        Self-attention.
    ids : Tensor of int, shape (n,) or (batch, n), optional
        Token of each key, for the duplicate-token, induction and separator scores. Negative ids (filling)
        are like no other token.
    separators : iterable of int, optional
        The tokens that separate; without them there is no separator score.
    shift : int, optional
        Position of query 0 among the keys; by default the last query is at the last key.
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Returns
    -------
    dict of str to Tensor, shape (..., heads)
        ``previous_token``, ``current_token``, ``fixed_distance``, ``first_token``, ``local``, ``broad``, and
        with `ids` ``duplicate_token``, ``induction`` and ``separator``; then ``distance``, the number of
        tokens back that ``fixed_distance`` is about.

    Raises
    ------
    ShapeError
        If there are separators and no tokens, if tokens do not fit the matrix, or if there are more
        queries than keys and no `shift`.
    DtypeError
        If `query_mask` is no tensor of bool.

    See Also
    --------
    measure : names the heads of a layer, from a text and a repeated block.

    Notes
    -----
    Each is defined, with its source, where its class is: `PreviousToken`, `CurrentToken`, `FixedDistance`,
    `FirstToken`, `Local`, `Broad`, `DuplicateToken`, `Induction`, `Separator`. In cross-attention between
    two texts ask for those that have a meaning there: `first_token`, `broad`, `separator`, and
    `duplicate_token` and `induction` with ``query_ids``.
    Of a layer of linear attention, whose weights may be negative, each score is the mean of signed weights, and not a
    share; there is no ``broad``.
    Cost: one pass; memory of some thirty numbers per row and head.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(2, 4, 8), torch.zeros(2, 4, 8), mask=attlas.Causal())
    >>> found = heads.scores(A, torch.tensor([5, 6, 5, 6]))
    >>> found["induction"], found["broad"].round(decimals=4)
    (tensor([0.2917, 0.2917]), tensor([1., 1.]))
    """
    separators = tuple(separators)
    if ids is None and separators:
        rule = "separators are found by the tokens of the keys."
        raise ShapeError(rule, "no ids", "scores(A, ids, separators)", separators=repr(separators))
    statistics = _statistics_by_pattern(ids, shift, query_mask)
    if ids is not None and separators:
        statistics["separator"] = Separator(ids, separators, query_mask)
    statistics = {name: statistic for name, statistic in statistics.items() if A.weights.has(statistic)}
    *results, fixed = A.collect(*statistics.values(), FixedDistance(shift, query_mask))
    named: dict[str, Tensor] = dict(zip(statistics, results, strict=True))
    return named | {"fixed_distance": fixed.score, "distance": fixed.distance}


def _statistics_by_pattern(
    ids: Tensor | None, shift: int | None = None, query_mask: Tensor | None = None
) -> dict[str, Statistic]:
    """Return the statistic of each pattern; without the tokens of the text, of those that need none."""
    statistics: dict[str, Statistic] = {
        "previous_token": PreviousToken(shift, query_mask),
        "current_token": CurrentToken(shift, query_mask),
        "local": Local(shift=shift, query_mask=query_mask),
        "first_token": FirstToken(query_mask),
        "broad": Broad(query_mask),
    }
    if ids is not None:
        statistics["duplicate_token"] = DuplicateToken(ids, shift=shift, query_mask=query_mask)
        statistics["induction"] = Induction(ids, shift=shift, query_mask=query_mask)
    return statistics
