"""Tells the queries that are tokens from those that are padding in a batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from attlas.foundation.devices import to_device
from attlas.matrix import AttentionMatrix, Weights

if TYPE_CHECKING:
    from attlas.recording.atlas.entry import Entry


def token_queries(weights: Weights) -> Tensor | None:
    """Return which queries of a self-attention are tokens, by what its mask says about the keys.

    A query is padding where the key at its own position is: of the masks of attlas, `Padding` and a tensor with
    one row of keys per sequence tell padding from text.

    Parameters
    ----------
    weights : Weights, shape (batch, heads, m, n)
        The weights of a matrix. Without a causal mask or a window, as many keys as queries are taken for
        self-attention, and other numbers for cross-attention, where the keys tell nothing about the queries.

    Returns
    -------
    Tensor of bool, shape (batch or 1, m), or None
        None where no query is known to be padding.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.recording.atlas.padding import token_queries
    >>> q = torch.zeros(2, 1, 3, 4)
    >>> A = attlas.attend(q, q, mask=attlas.Causal() & attlas.Padding([3, 2]))
    >>> token_queries(A.weights)
    tensor([[ True,  True,  True],
            [ True,  True, False]])
    """
    queries = _token_queries(weights)
    return None if queries is None or bool(queries.all()) else queries


def _token_queries(weights: Weights) -> Tensor | None:
    """Return which queries are tokens, shape (batch or 1, m), also where all are; None where the mask tells nothing.

    A query is padding where the key at its own position is. A query with no such key counts as a token.
    """
    batch, _, m, n = weights.shape
    if weights.mask is None or 0 in weights.shape:
        return None
    first = weights.mask.first_query(m, n)
    if first is None and m != n:  # cross-attention
        return None
    padding = weights.mask.padding(weights.tile(range(batch), range(1), range(m), range(n)))
    if padding is None:
        return None
    positions = torch.arange(first or 0, (first or 0) + m, device=padding.device)
    known = (positions >= 0) & (positions < n)
    return ~padding[:, positions.clamp(0, n - 1)] | ~known


def included_rows(entry: Entry) -> Tensor | None:
    """Return the rows that means include: queries that are tokens and may attend to a key.

    Parameters
    ----------
    entry : Entry
        An attention of a recording.

    Returns
    -------
    Tensor of bool, broadcastable to (batch, heads, m), or None
        None where all rows count.
    """
    queries = entry.query_mask
    if queries is None and entry.matrix is not None and entry.kind != "cross":
        queries = token_queries(entry.matrix.weights)
    known = _rows_with_keys(entry)
    if queries is None:
        return None if known is None or bool(known.all()) else known
    queries = queries.unsqueeze(1)
    return queries if known is None else queries.to(known.device) & known


def _rows_with_keys(entry: Entry) -> Tensor | None:
    """Return which rows may attend to a key: by the mask, their log-sum-exp, or a statistic if only those were kept."""
    known_rows = None if entry.matrix is None else entry.matrix.weights.rows_with_keys()
    if known_rows is not None:
        return known_rows
    known: dict[str, Any] = entry.statistics
    for name, least in (("max_logit", -math.inf), ("effective_keys", 0.0), ("max_weight", 0.0)):
        t = known.get(name)
        if isinstance(t, Tensor) and tuple(t.shape) == tuple(entry.shape[:3]):
            return t > least
    return None


@torch.no_grad()
def real_queries(
    A: AttentionMatrix, attention_mask: Tensor | None, first_query: int, first_key: int, *, cross: bool
) -> Tensor | None:
    """Return which queries of a matrix are tokens; None where all are.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, m, n)
        The weights of the call.
    attention_mask : Tensor of bool, optional, shape (batch, tokens)
        The attention mask of the call, over the whole text of the queries.
    first_query, first_key : int
        Position in the text of query 0 and of key 0.
    cross : bool
        Whether the keys are those of another text.

    Returns
    -------
    Tensor of bool, shape (batch, m), or None
        Where the matrix is; on a device other than the CPU also where all may be tokens.

    Notes
    -----
    A model of several texts (an image and a caption) has attentions that the mask is not about: it is taken only
    where its sizes fit, and where the last query attends to none of the keys that it calls padding. What the mask
    of the matrix itself says about its keys is used elsewhere.
    """
    batch, _, m, _ = A.weights.shape
    device = A.device
    given = attention_mask if attention_mask is None else to_device(attention_mask, device)
    about = False if given is None else _is_mask_of_matrix(A, given, first_query, first_key, cross=cross)
    told = _token_queries(A.weights) if about is not True and not cross else None
    queries = told
    if given is not None and about is not False:
        queries = given[:, first_query : first_query + m]
        if isinstance(about, Tensor):
            queries = queries | ~about if told is None else torch.where(about, queries, told)
    if queries is None:
        return None
    queries = queries.expand(batch, m)
    if device.type != "cpu":
        return queries.clone()
    return None if bool(queries.all()) else queries.clone()


def _is_mask_of_matrix(
    A: AttentionMatrix, attention_mask: Tensor, first_query: int, first_key: int, *, cross: bool
) -> bool | Tensor:
    """Return whether an attention mask has the sizes of a matrix whose last query attends to no key of padding.

    On a device the answer may be a boolean on it.
    """
    batch, heads, m, n = A.weights.shape
    if len(attention_mask) != batch or attention_mask.shape[1] < first_query + m:
        return False
    if cross:
        return True
    keys = attention_mask[:, first_key : first_key + n]
    keys = functional.pad(keys, (0, n - keys.shape[1]), value=True)
    if A.mask is None or not m or not heads:
        found = keys.all()
    else:
        at = A.weights.tile(range(batch), range(1), range(m - 1, m), range(n))
        allowed = A.mask.allows(at).to(keys.device).expand(batch, 1, 1, n)[:, 0, 0]
        found = ~(allowed & ~keys).any()
    return bool(found) if keys.device.type == "cpu" else found
