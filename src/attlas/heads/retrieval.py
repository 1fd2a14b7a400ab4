"""Do heads copy from a needle? Weight on it, and the retrieval score."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.errors import ShapeError, public
from attlas.matrix import AttentionMatrix
from attlas.stats.spans import Span, place_span

_CELLS_AT_ONCE = 2**24  # cells that are read at a time


class Retrieval(NamedTuple):
    """What each head does with a needle while an answer is written; made by `retrieval_score`.

    Parameters
    ----------
    mass : Tensor, shape (..., heads)
        Mean weight of the answer's queries on the needle.
    share : Tensor, shape (..., heads)
        Share of the answer's queries whose largest weight is on a needle token that is the one written.
    score : Tensor, shape (..., heads)
        Retrieval score: share of the needle's tokens that are copied so.

    Examples
    --------
    >>> import torch
    >>> from attlas.heads import Retrieval
    >>> Retrieval(torch.ones(2), torch.ones(2), torch.zeros(2)).score
    tensor([0., 0.])
    """

    mass: Tensor
    share: Tensor
    score: Tensor


@torch.no_grad()
@public("retrieval_score()")
def retrieval_score(
    A: AttentionMatrix,
    needle: Span,
    rows: Span,
    ids: Tensor,
    written: Tensor | None = None,
    shift: int | None = None,
) -> Retrieval:
    """Return the retrieval score of each head for a needle, and its weight on it.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., heads, m, n)
        Self-attention on prompt and answer, in one pass or with the prompt in a cache.
    needle : slice, range or (start, stop)
        Keys of the needle.
    rows : slice, range or (start, stop)
        Queries that write the answer: the one that writes token t is one position before it.
    ids : Tensor of int, shape (n,)
        Token of each key.
    written : Tensor of int, shape (len(rows),), optional
        The token that each of these queries writes. By default the next one of `ids`; the last query of a
        text has none.
    shift : int, optional
        Position of query 0 among the keys; by default the last query is at the last key.

    Returns
    -------
    Retrieval

    Raises
    ------
    ShapeError
        If a span is empty or lies outside the matrix, if tokens do not fit, or if the token that a query
        writes is not known.

    Notes
    -----
    The score of [1]_ (section 2): a head copies a token of the needle where the token that is being written
    is a token of the needle and the key with the head's largest weight is this very token; the score is
    ``|g ∩ k| / |k|`` with g what the head copied and k the needle. Here positions of the needle are counted,
    each once, so that a token that stands there twice can be copied twice; of equal weights the first key
    counts. There a head is called a retrieval head from 0.1 on, in the mean over many needles and contexts.

    Cost: only the answer's rows are computed, ``len(rows) * n`` cells a head, some 64 MiB of them at a time.

    References
    ----------
    .. [1] Wu et al., "Retrieval head mechanistically explains long-context factuality", 2024.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> ids = torch.tensor([1, 7, 8, 2, 7, 8])  # 7 8 is the needle, and copied after token 2
    >>> codes = torch.eye(6)
    >>> A = attlas.attend(
    ...     codes[[0, 0, 0, 1, 2, 0]][None], codes[None], attlas.ScaledDot(30.0), attlas.Causal()
    ... )
    >>> heads.retrieval_score(A, needle=(1, 3), rows=(3, 5), ids=ids).score
    tensor([1.])
    """
    m, n = A.shape[-2:]
    keys, queries = _nonempty_span("needle", needle, n, "keys"), _nonempty_span("rows", rows, m, "queries")
    tokens = _written_tokens(A, queries, ids, written, n - m if shift is None else shift)
    device = A.device
    target, tokens = ids.reshape(-1)[keys.start : keys.stop].to(device), tokens.to(device)
    mass = torch.zeros(A.shape[:-2], dtype=A.dtype, device=device)
    hits = torch.zeros_like(mass)
    copied = torch.zeros(*A.shape[:-2], len(keys), dtype=torch.bool, device=device)
    positions = torch.arange(keys.start, keys.stop, device=device)
    done = 0
    for some, weights in rows_in_blocks(A, torch.arange(queries.start, queries.stop)):
        mass += weights[..., keys.start : keys.stop].sum(dim=(-2, -1))
        best = weights.max(dim=-1)
        top = best.indices.masked_fill_(best.values == 0, -1).unsqueeze(-1)  # a row that sees nothing looks at nothing
        hit = (top == positions) & (tokens[done : done + len(some), None] == target)
        hits += hit.any(dim=-1).sum(dim=-1)
        copied |= hit.any(dim=-2)
        done += len(some)
    return Retrieval(mass / len(queries), hits / len(queries), copied.to(A.dtype).mean(dim=-1))


def rows_in_blocks(A: AttentionMatrix, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of the rows, and their weights (..., rows, n)."""
    heads = max(A.shape[:-2].numel(), 1)
    for some in rows.split(max(_CELLS_AT_ONCE // max(heads * A.shape[-1], 1), 1)):
        yield some, A[..., some, :]


def _nonempty_span(name: str, span: Span, size: int, axis: str) -> range:
    """Return a span as a range of positions; raise an error if it is empty."""
    positions = place_span(name, span, size, axis)
    if not len(positions):
        raise ShapeError(f"{name} must hold one of the {axis} at least.", f"{name} = {span!r}", f"{name}=(0, {size})")
    return positions


def _written_tokens(A: AttentionMatrix, queries: range, ids: Tensor, written: Tensor | None, shift: int) -> Tensor:
    """Return the token that each query writes."""
    n = A.shape[-1]
    tokens = _flat_tokens("ids", ids, n, "ids must hold the token of each key.", f"n = {n} keys")
    if written is not None:
        rule, count = "written must hold one token for each of the rows.", len(queries)
        return _flat_tokens("written", written, count, rule, f"{count} rows")
    first, last = queries.start + shift + 1, queries.stop + shift + 1
    if first < 1 or last > n:
        rule = "the token that a query writes must be known: the next one of ids, or written."
        found = f"rows {queries.start} to {queries.stop - 1} write tokens {first} to {last - 1} of {n}"
        raise ShapeError(rule, found, "leave out the last row, or pass written=.")
    return tokens[first:last]


def _flat_tokens(name: str, t: object, count: int, rule: str, found: str) -> Tensor:
    """Return tokens along one axis, or raise a ShapeError where there are more or fewer than `count`."""
    if isinstance(t, Tensor) and t.numel() == count:
        return t.reshape(-1)
    given = t if isinstance(t, Tensor) else repr(t)
    raise ShapeError(rule, found, f"a tensor of shape ({count},).", arguments={name: given})
