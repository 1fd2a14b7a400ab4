"""The patterns that heads are known for: a definition, a source and a score from 0 to 1 for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.errors import DtypeError, public
from attlas.foundation.checks import is_integer, whole_number
from attlas.foundation.tiles import Tile
from attlas.heads.targets import TargetWeight, batches_of, per_batch, query_offset
from attlas.stats.functions import function_of

NEAR = 16  # keys, the query's own included, that count as its neighbourhood


class Diagonal(TargetWeight):
    """Score of a head that looks a fixed number of tokens back: mean weight on that one key.

    Parameters
    ----------
    distance : int
        How many positions back: 1 is the token before, 0 the token itself, -1 the token after.
    shift : int, optional
        Position of query 0 among the keys; by default the last query is at the last key, as
        for `attlas.Causal`. Without meaning in cross-attention between two texts.
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    ShapeError
        If there are more queries than keys and no `shift`.
    DtypeError
        If `distance` is no whole number, or `query_mask` no tensor of bool.

    See Also
    --------
    FixedDistance : finds the distance.

    Notes
    -----
    ``1/|Q| Σ_{i ∈ Q} A[i, i - distance]`` over the queries Q that may see that key and another; 0 where
    there is none. The diagonal heads of [1]_, the positional heads of [2]_ at -1 and 1.
    Cost: a product on the tiles that the diagonal crosses.

    References
    ----------
    .. [1] Kovaleva et al., "Revealing the dark secrets of BERT", 2019, section 4.1.
    .. [2] Voita et al., "Analyzing multi-head self-attention: specialized heads do the heavy lifting, the
       rest can be pruned", 2019, section 5.1.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), mask=attlas.Causal())
    >>> A.collect(heads.Diagonal(2))[0]  # uniform weights: (1/3 + 1/4) / 2
    tensor([0.2917])
    >>> heads.diagonal(A, 2)
    tensor([0.2917])
    """

    def __init__(self, distance: int, shift: int | None = None, query_mask: Tensor | None = None) -> None:
        super().__init__(query_mask)
        if not is_integer(distance):
            rule = "distance must be a whole number of positions."
            raise DtypeError(rule, f"distance = {distance!r}", "Diagonal(1)", where="Diagonal()")
        self.distance = distance
        self.shift = shift

    @public()
    def prepare(self, problem: Any) -> int:
        return query_offset(self.shift, problem) - self.distance

    def target_columns(self, at: Tile, prepared: int) -> range:
        return _column_overlap(at.columns, at.rows.start + prepared, at.rows.stop + prepared)

    def targets(self, at: Tile, prepared: int) -> Tensor:
        return (at.i + prepared == at.j)[None, None]


class PreviousToken(Diagonal):
    """Score of a previous-token head: mean weight on the key one position before the query.

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
    Induction : what previous-token heads of an earlier layer make possible.

    Notes
    -----
    ``Diagonal(1)``: the mean over the queries that have a key before them. Heads that do this are described
    in [1]_ (section 3.1) and are the first half of an induction circuit [2]_.

    References
    ----------
    .. [1] Clark et al., "What does BERT look at? An analysis of BERT's attention", 2019.
    .. [2] Elhage et al., "A mathematical framework for transformer circuits", 2021.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), mask=attlas.Causal())
    >>> A.collect(heads.PreviousToken())[0]  # uniform weights: (1/2 + 1/3) / 2
    tensor([0.4167])
    >>> heads.previous_token(A)
    tensor([0.4167])
    """

    def __init__(self, shift: int | None = None, query_mask: Tensor | None = None) -> None:
        super().__init__(1, shift, query_mask)


class CurrentToken(Diagonal):
    """Score of a head that stays with the token itself: mean weight on the query's own position.

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

    Notes
    -----
    ``Diagonal(0)``. A first query that sees itself alone has no choice and does not count. Source: the
    main diagonal of [1]_.

    References
    ----------
    .. [1] Kovaleva et al., "Revealing the dark secrets of BERT", 2019, section 4.1.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), mask=attlas.Causal())
    >>> A.collect(heads.CurrentToken())[0]  # uniform weights: (1/2 + 1/3) / 2
    tensor([0.4167])
    >>> heads.current_token(A)
    tensor([0.4167])
    """

    def __init__(self, shift: int | None = None, query_mask: Tensor | None = None) -> None:
        super().__init__(0, shift, query_mask)


class Local(TargetWeight):
    """Score of a local head: mean weight on the query's neighbourhood.

    Parameters
    ----------
    width : int, default 16
        Keys at a distance below it are near, before and after the query: the own position and 15 before it
        under a causal mask.
    shift : int, optional
        Position of query 0 among the keys; by default the last query is at the last key.
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    ShapeError
        If `width` is below 1, or if there are more queries than keys and no `shift`.
    DtypeError
        If `query_mask` is no tensor of bool.

    Notes
    -----
    ``1/|Q| Σ_{i ∈ Q} Σ_{|i - j| < width} A_ij`` over the queries Q that may see a key further away as well:
    the first ones of a text cannot help being local. That heads differ so much in their span that many need
    only a few keys is from [1]_; that many keep their quality with the last keys and the sink, from [2]_.

    References
    ----------
    .. [1] Sukhbaatar et al., "Adaptive attention span in transformers", 2019.
    .. [2] Xiao et al., "DuoAttention: efficient long-context LLM inference with retrieval and streaming
       heads", 2024.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), mask=attlas.Causal())
    >>> A.collect(heads.Local(2))[0]  # uniform weights: (2/3 + 2/4) / 2
    tensor([0.5833])
    >>> heads.local(A, 2)
    tensor([0.5833])
    """

    @public("Local()")
    def __init__(self, width: int = NEAR, shift: int | None = None, query_mask: Tensor | None = None) -> None:
        super().__init__(query_mask)
        self.width = whole_number("width", width, f"Local(width={NEAR})")
        self.shift = shift

    @public("Local()")
    def prepare(self, problem: Any) -> int:
        return query_offset(self.shift, problem)

    def target_columns(self, at: Tile, prepared: int) -> range:
        return _column_overlap(
            at.columns, at.rows.start + prepared - self.width + 1, at.rows.stop + prepared + self.width - 1
        )

    def targets(self, at: Tile, prepared: int) -> Tensor:
        return ((at.i + prepared - at.j).abs() < self.width)[None, None]


class _QueryAndKeyTokens(NamedTuple):
    """Token of each query and of each key, and the position of query 0; None where these are of two texts."""

    queries: Tensor
    keys: Tensor
    shift: int | None


class DuplicateToken(TargetWeight):
    """Score of a duplicate-token head: mean weight on earlier copies of the query's own token.

    Parameters
    ----------
    ids : Tensor of int, shape (n,) or (batch, n)
        Token of each key. Negative ids (filling) are like no other token.
    query_ids : Tensor of int, shape (m,) or (batch, m), optional
        Token of each query in cross-attention, where all copies count. By default queries are the tokens
        at their positions among the keys, and only earlier copies count.
    shift : int, optional
        Position of query 0 among the keys; by default the last query is at the last key.
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    ShapeError
        If tokens do not fit the sizes of the matrix, or if there are more queries than keys and no
        `query_ids`.
    DtypeError
        If `query_mask` is no tensor of bool.

    See Also
    --------
    Induction : weight on the token after the copy.
    Agreement : the weight of each query, for labels of any kind.

    Notes
    -----
    ``1/|Q| Σ_{i ∈ Q} Σ_{j < i, t_j = t_i} A_ij`` over the queries Q that may see an earlier copy and another
    key. The heads are named in [1]_. Cost: one comparison and one product a cell.

    References
    ----------
    .. [1] Wang et al., "Interpretability in the wild: a circuit for indirect object identification in GPT-2
       small", 2022.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), mask=attlas.Causal())
    >>> A.collect(heads.DuplicateToken(torch.tensor([5, 6, 5, 6])))[0]  # uniform weights: (1/3 + 1/4) / 2
    tensor([0.2917])
    >>> heads.duplicate_token(A, torch.tensor([5, 6, 5, 6]))
    tensor([0.2917])
    """

    lag = 0  # by how many positions the target comes after the copy

    def __init__(
        self,
        ids: Tensor,
        query_ids: Tensor | None = None,
        shift: int | None = None,
        query_mask: Tensor | None = None,
    ) -> None:
        super().__init__(query_mask)
        self.ids = ids
        self.query_ids = query_ids
        self.shift = shift

    @public()
    def prepare(self, problem: Any) -> _QueryAndKeyTokens:
        # Overrides `TargetWeight.prepare`: the token of each query and of each key; equal ones make a target.
        m, n = problem.shape[2:]
        keys = per_batch("ids", self.ids, problem, n, "keys")
        if self.query_ids is not None:
            queries = per_batch("query_ids", self.query_ids, problem, m, "queries")
            shift = None
        else:
            shift = query_offset(self.shift, problem)
            positions = torch.arange(shift, shift + m, device=keys.device)
            inside = (positions >= 0) & (positions < n)
            # A query whose position is that of no key gets a token that no key has.
            queries = torch.where(inside, keys[:, positions.clamp(0, max(n - 1, 0))] if n else positions[None], -1)
        # A key counts as the token `lag` places before it.
        if self.lag:
            keys = torch.cat([torch.full_like(keys[:, : self.lag], -1), keys[:, : -self.lag]], dim=-1)
        # Negative ids are equal to no id, not even to themselves.
        queries, keys = queries.masked_fill(queries < 0, -2), keys.masked_fill(keys < 0, -1)
        if not keys.numel() or int(keys.max()) < 2**31 - 1:  # int32 takes half the memory and half the time
            keys, queries = keys.to(torch.int32), queries.clamp(max=2**31 - 1).to(torch.int32)
        return _QueryAndKeyTokens(queries, keys, shift)

    def target_columns(self, at: Tile, prepared: _QueryAndKeyTokens) -> range:
        # Overrides `TargetWeight.target_columns`: a target has a position below the query's plus `lag`.
        if prepared.shift is None:
            return at.columns
        return _column_overlap(at.columns, 0, at.rows.stop - 1 + prepared.shift + self.lag)

    def targets(self, at: Tile, prepared: _QueryAndKeyTokens) -> Tensor:
        # Implements `TargetWeight.targets`: equal tokens, where the copy comes before the query.
        queries = batches_of(prepared.queries, at)[:, at.rows.start : at.rows.stop, None]
        keys = batches_of(prepared.keys, at)[:, None, at.columns.start : at.columns.stop]
        same = queries == keys
        if prepared.shift is not None:
            # Keys before the first query of the tile are earlier than all of its queries; only later ones are compared.
            first_query = at.rows.start + prepared.shift + self.lag
            later = at.narrow(_column_overlap(at.columns, first_query, at.columns.stop))
            same[..., len(at.columns) - len(later.columns) :] &= later.j - self.lag < at.i + prepared.shift
        return same.unsqueeze(1)


class Induction(DuplicateToken):
    """Score of an induction head: mean weight on the tokens that followed earlier copies of the query's token.

    Parameters
    ----------
    ids : Tensor of int, shape (n,) or (batch, n)
        Token of each key. Negative ids (filling) are like no other token.
    query_ids : Tensor of int, shape (m,) or (batch, m), optional
        Token of each query in cross-attention, where all copies count.
    shift : int, optional
        Position of query 0 among the keys; by default the last query is at the last key.
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    ShapeError
        If tokens do not fit the sizes of the matrix, or if there are more queries than keys and no
        `query_ids`.
    DtypeError
        If `query_mask` is no tensor of bool.

    See Also
    --------
    repeated_block : tokens on which nothing but induction helps.
    measure : the score on both, and the name of the head.

    Notes
    -----
    The prefix-matching score of [1]_: ``1/|Q| Σ_{i ∈ Q} Σ_{j - 1 < i, t_{j-1} = t_i} A_ij`` over the queries
    Q that may see such a key and another. There it is taken on random tokens that are repeated, as
    `repeated_block` gives them; on plain text words that often follow one another raise it for heads of
    other kinds. Cost: one comparison and one product a cell.

    References
    ----------
    .. [1] Olsson et al., "In-context learning and induction heads", 2022.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), mask=attlas.Causal())
    >>> A.collect(heads.Induction(torch.tensor([5, 6, 5, 6])))[0]  # uniform weights: (1/3 + 1/4) / 2
    tensor([0.2917])
    >>> heads.induction(A, torch.tensor([5, 6, 5, 6]))
    tensor([0.2917])
    """

    lag = 1


class Separator(TargetWeight):
    """Score of a separator head: mean weight on separators, as "[SEP]", full stops and line breaks are.

    Parameters
    ----------
    ids : Tensor of int, shape (n,) or (batch, n)
        Token of each key.
    separators : iterable of int
        The tokens that separate.
    query_mask : Tensor of bool, shape (m,) or (batch, m), optional
        Queries to include.

    Raises
    ------
    ShapeError
        If tokens do not fit the sizes of the matrix.
    DtypeError
        If `query_mask` is no tensor of bool.

    Notes
    -----
    ``1/|Q| Σ_{i ∈ Q} Σ_{t_j ∈ separators} A_ij`` over the queries Q that may see a separator and another
    key. BERT's heads give much of their weight to them, which [1]_ (section 3.2) reads as being at rest;
    they are the vertical heads of [2]_. Cost: one product a cell.

    References
    ----------
    .. [1] Clark et al., "What does BERT look at? An analysis of BERT's attention", 2019.
    .. [2] Kovaleva et al., "Revealing the dark secrets of BERT", 2019, section 4.1.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> A = attlas.attend(torch.zeros(1, 3, 8), torch.zeros(1, 4, 8))
    >>> A.collect(heads.Separator(torch.tensor([5, 2, 7, 3]), separators=[2, 3]))[0]
    tensor([0.5000])
    >>> heads.separator(A, torch.tensor([5, 2, 7, 3]), separators=[2, 3])
    tensor([0.5000])
    """

    def __init__(self, ids: Tensor, separators: Iterable[int], query_mask: Tensor | None = None) -> None:
        super().__init__(query_mask)
        self.ids = ids
        self.separators = tuple(separators)

    @public("Separator()")
    def prepare(self, problem: Any) -> Tensor:
        # Overrides `TargetWeight.prepare`: which keys are separators, (batch, n).
        keys = per_batch("ids", self.ids, problem, problem.shape[3], "keys")
        return torch.isin(keys, torch.tensor(self.separators, dtype=keys.dtype, device=keys.device))

    def targets(self, at: Tile, prepared: Tensor) -> Tensor:
        return batches_of(prepared, at)[:, None, None, at.columns.start : at.columns.stop]


def _column_overlap(columns: range, start: int, stop: int) -> range:
    """Return the columns from `start` on and before `stop`; an empty range where there is none."""
    first = max(columns.start, start)
    return range(first, max(first, min(columns.stop, stop)))


previous_token = function_of(PreviousToken, Tensor, "shape (..., heads)")
current_token = function_of(CurrentToken, Tensor, "shape (..., heads)")
diagonal = function_of(Diagonal, Tensor, "shape (..., heads)")
local = function_of(Local, Tensor, "shape (..., heads)")
duplicate_token = function_of(DuplicateToken, Tensor, "shape (..., heads)")
induction = function_of(Induction, Tensor, "shape (..., heads)")
separator = function_of(Separator, Tensor, "shape (..., heads)")
