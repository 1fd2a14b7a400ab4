"""Heads without a content pattern: weight on the first token (a sink), on one token, or spread over all keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas import stats
from attlas.errors import ShapeError, public
from attlas.foundation.tiles import Tile
from attlas.heads.targets import check_query_mask, mean_of_rows, per_batch, rows_of_tile
from attlas.stats import Part, Statistic
from attlas.stats.functions import function_of
from attlas.stats.rows import zeros_for_rows

_FEWEST_QUERIES = 8  # that must see a key which is a sink


class FirstVisibleKey(NamedTuple):
    """Number of keys that each query may see, the first of them (n for none) and its weight: (batch, heads, m)."""

    keys: Tensor
    first: Tensor
    weight: Tensor


def no_visible_key(problem: Any) -> FirstVisibleKey:
    """Return the state before the first tile."""
    first = torch.full(problem.shape[:3], problem.shape[3], dtype=torch.int64, device=problem.device)
    return FirstVisibleKey(zeros_for_rows(problem), first, zeros_for_rows(problem))


def update_first_key(carry: FirstVisibleKey, part: Part, at: Tile) -> None:
    """Update the state with one tile; the tiles of a row come from left to right."""
    carry.keys[at.place] += part.keys
    first, weight = carry.first[at.place], carry.weight[at.place]
    # Columns that no row sees are skipped; `cells` says which cells may attend, None for all.
    for columns, cells in part.visible_columns:
        new = first == at.n  # rows that have not seen a key yet
        if not bool(new.any()):
            return
        if cells is None:
            index = torch.zeros_like(first)
        else:
            new = new & cells.any(dim=-1)
            index = cells.to(torch.uint8).argmax(dim=-1).expand(first.shape)
        index = index + columns.start
        weight_there = part.weights.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        first.copy_(torch.where(new, index + at.columns.start, first))
        weight.copy_(torch.where(new, weight_there, weight))


class FirstToken(Statistic):
    """Score of a first-token sink: mean weight on the first token of the text.

    Parameters
    ----------
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    DtypeError
        If `query_mask` is no tensor of bool.

    See Also
    --------
    attlas.heads.Local : the other half of a streaming head.

    Notes
    -----
    ``1/|Q| Σ_{i ∈ Q} A[i, f]`` over the queries Q that may see key f and another, where f is the first key
    that any query of this text may see: with filling on the left it is the first real token. Queries whose
    window has left it behind do not count. Attention sinks are described in [1]_; [2]_ counts a head as one
    from 0.3 on. A learned sink (``A.sum(-1)`` below 1) is another thing and no key.
    Cost: a look at the first tile of each row; memory of three numbers per row and head.

    References
    ----------
    .. [1] Xiao et al., "Efficient streaming language models with attention sinks", 2023.
    .. [2] Gu et al., "When attention sink emerges in language models: an empirical view", 2024.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), mask=attlas.Causal())
    >>> A.collect(heads.FirstToken())[0]  # uniform weights: (1/2 + 1/3) / 2
    tensor([0.4167])
    >>> heads.first_token(A)
    tensor([0.4167])
    """

    def __init__(self, query_mask: Tensor | None = None) -> None:
        self.query_mask = query_mask

    @public("FirstToken()")
    def start(self, problem: Any) -> tuple[FirstVisibleKey, Tensor | None]:
        return no_visible_key(problem), check_query_mask(self.query_mask, problem)

    def step(self, carry: tuple[FirstVisibleKey, Tensor | None], part: Part, at: Tile) -> Any:
        update_first_key(carry[0], part, at)
        return carry

    def finish(self, carry: tuple[FirstVisibleKey, Tensor | None]) -> Tensor:
        # Implements `Statistic.finish`: of the rows whose first key is the first of all, and not their only one.
        seen, query_mask = carry
        if not seen.first.shape[-1]:
            return seen.weight.sum(dim=-1)
        earliest = seen.first.amin(dim=-1, keepdim=True)
        return mean_of_rows(seen.weight, (seen.first == earliest) & (seen.keys > 1), query_mask)


class SinkKeys(Statistic):
    """Which keys are attention sinks of a head: those that most queries give much weight to, whatever they ask for.

    Parameters
    ----------
    threshold : float, default 0.3
        Mean weight from which a key is a sink.

    Raises
    ------
    ShapeError
        If `threshold` is no number between 0 and 1.

    See Also
    --------
    FirstToken : the score of the first key.

    Notes
    -----
    Key j is a sink if ``1/|Q_j| Σ_{i ∈ Q_j} A_ij`` is at least the threshold, over the queries Q_j that may see key j,
    of which there must be 8 or more: the keys near the end of a causal text have few. For the first key this is the
    definition of [1]_, with its threshold. Patches of a picture may be sinks as well [2]_.
    Cost: a column sum; memory of two numbers per key and head.

    References
    ----------
    .. [1] Gu et al., "When attention sink emerges in language models: an empirical view", 2024.
    .. [2] Darcet et al., "Vision transformers need registers", 2023.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> k = torch.zeros(1, 10, 4)
    >>> k[:, 2] = 9.0
    >>> A = attlas.attend(torch.ones(1, 10, 4), k)
    >>> heads.sink_keys(A).nonzero().tolist()
    [[0, 2]]
    """

    @public("SinkKeys()")
    def __init__(self, threshold: float = 0.3) -> None:
        if not isinstance(threshold, float | int) or not 0 < threshold < 1:
            raise ShapeError("threshold must be between 0 and 1.", f"threshold = {threshold!r}", "threshold=0.3")
        self.threshold = threshold

    def start(self, problem: Any) -> tuple[Tensor, Tensor]:
        batch, heads, _, n = problem.shape
        mass = torch.zeros(batch, heads, n, dtype=problem.dtype, device=problem.device)
        return mass, torch.zeros_like(mass)

    def step(self, carry: tuple[Tensor, Tensor], part: Part, at: Tile) -> tuple[Tensor, Tensor]:
        b, h, _ = at.place
        mass, queries = (t[b, h, at.columns.start : at.columns.stop] for t in carry)
        mass += part.column_sums
        for columns, cells in part.visible_columns:
            count = float(part.shape[2]) if cells is None else cells.sum(dim=-2)
            queries[..., columns.start : columns.stop] += count
        return carry

    def finish(self, carry: tuple[Tensor, Tensor]) -> Tensor:
        mass, queries = carry
        return (queries >= _FEWEST_QUERIES) & (mass >= self.threshold * queries)

    def merge(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return a[0] + b[0], a[1] + b[1]


class Broad(Statistic):
    """Score of a broad head: effective keys of a row as a share of the keys that the query may see.

    Parameters
    ----------
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    DtypeError
        If `query_mask` is no tensor of bool.

    See Also
    --------
    attlas.stats.EffectiveKeys : the number.

    Notes
    -----
    ``1/|Q| Σ_{i ∈ Q} N_i / n_i`` over the queries Q that may see two keys or more, with N the effective
    number of keys and n the number that the mask allows: 1 for uniform weights, 1/n for a single key. Broad
    heads are described in [1]_ (section 3.3) by the entropy of their rows.
    Cost: one norm; memory of three numbers per row and head.

    References
    ----------
    .. [1] Clark et al., "What does BERT look at? An analysis of BERT's attention", 2019.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 4, 8), torch.zeros(1, 6, 8), mask=attlas.Causal())
    >>> A.collect(heads.Broad())[0].round(decimals=4)
    tensor([1.])
    >>> heads.broad(A).round(decimals=4)
    tensor([1.])
    """

    of_unsigned = True

    def __init__(self, query_mask: Tensor | None = None) -> None:
        self.query_mask = query_mask
        self._effective = stats.EffectiveKeys()

    @public("Broad()")
    def start(self, problem: Any) -> tuple[Any, Tensor, Tensor | None]:
        # Implements `Statistic.start`: the state of `EffectiveKeys`, the number of keys of each row, and the mask.
        query_mask = check_query_mask(self.query_mask, problem)
        return self._effective.start(problem), zeros_for_rows(problem), query_mask

    def step(self, carry: tuple[Any, Tensor, Tensor | None], part: Part, at: Tile) -> tuple[Any, Tensor, Tensor | None]:
        carry[1][at.place] += part.keys
        return self._effective.step(carry[0], part, at), *carry[1:]

    def finish(self, carry: tuple[Any, Tensor, Tensor | None]) -> Tensor:
        effective, keys = self._effective.finish(carry[0]), carry[1]
        return mean_of_rows((effective / keys.clamp(min=1.0)).clamp(max=1.0), keys > 1, carry[2])


class FavouriteToken(Statistic):
    """Score of a head that keeps returning to one token: mean weight on all its copies, the first key aside.

    Parameters
    ----------
    ids : Tensor of int, shape (n,) or (batch, n)
        Token of each key.
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    ShapeError
        If there is not one token for each key.
    DtypeError
        If `query_mask` is no tensor of bool.

    See Also
    --------
    by_token : the mass of every token.

    Notes
    -----
    ``max_t 1/|Q| Σ_{i ∈ Q} Σ_{t_j = t} A_ij`` over all queries Q, where j runs over the keys after the first token
    of the text. Cost: a column sum; memory of one number per key and head.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.heads import FavouriteToken
    >>> A = attlas.attend(torch.zeros(1, 2, 8), torch.zeros(1, 4, 8))
    >>> A.collect(FavouriteToken(torch.tensor([5, 6, 7, 6])))[0]  # two of four keys
    tensor([0.5000])
    """

    def __init__(self, ids: Tensor, query_mask: Tensor | None = None) -> None:
        self.ids = ids
        self.query_mask = query_mask

    @public("FavouriteToken()")
    def start(self, problem: Any) -> tuple[Tensor, FirstVisibleKey, Tensor | None, Tensor]:
        # Implements `Statistic.start`: weight of each key, first key of each row, mask of rows, token of each key.
        batch, heads, _, n = problem.shape
        query_mask = check_query_mask(self.query_mask, problem)
        ids = per_batch("ids", self.ids, problem, n, "keys").expand(batch, n)
        mass = torch.zeros(batch, heads, n, dtype=problem.dtype, device=problem.device)
        return mass, no_visible_key(problem), query_mask, ids

    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        # Implements `Statistic.step`: adds the weight that each key gets in a tile.
        mass, seen, query_mask, _ = carry
        update_first_key(seen, part, at)
        weights = part.weights if query_mask is None else part.weights * rows_of_tile(query_mask, at)
        b, h, _ = at.place
        mass[b, h, at.columns.start : at.columns.stop] += weights.sum(dim=-2)
        return carry

    def finish(self, carry: Any) -> Tensor:
        # Implements `Statistic.finish`: weight on the token with the most, divided by the rows that see a key.
        mass, seen, query_mask, ids = carry
        out: Tensor = mass.new_zeros(mass.shape[:2])
        rows = seen.keys > 0 if query_mask is None else (seen.keys > 0) & query_mask
        n = mass.shape[-1]
        if not n or not rows.shape[-1]:
            return out
        first = seen.first.amin(dim=(1, 2)).clamp(max=n - 1)
        for b, text in enumerate(ids):
            # All keys but the first, added up by token.
            later = torch.arange(n, device=mass.device) != first[b]
            tokens, index = text[later].unique(return_inverse=True)
            totals = mass.new_zeros(mass.shape[1], len(tokens)).index_add_(1, index, mass[b][:, later].contiguous())
            if len(tokens):
                out[b] = totals.amax(-1) / rows[b].sum(-1).clamp(min=1)
        return out


first_token = function_of(FirstToken, Tensor, "shape (..., heads)")
broad = function_of(Broad, Tensor, "shape (..., heads)")
sink_keys = function_of(SinkKeys, Tensor, "shape (..., heads, n)")
