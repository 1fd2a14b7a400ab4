"""Which queries of a call are tokens: what its attention mask says, where the matrix agrees with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attlas.atlas.padding import token_queries
from attlas.matrix import AttentionMatrix


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

    Notes
    -----
    A model of several texts (an image and a caption) has attentions that the mask is not about: it is taken only
    where its sizes fit, and where the last query attends to none of the keys that it calls padding. What the mask
    of the matrix itself says about its keys is used elsewhere.
    """
    batch, _, m, _ = A.problem.shape
    if attention_mask is not None and _is_about(A, attention_mask, first_query, first_key, cross=cross):
        queries: Tensor | None = attention_mask[:, first_query : first_query + m]
    else:
        queries = None if cross else token_queries(A.problem)
    return None if queries is None or bool(queries.all()) else queries.expand(batch, m).cpu().clone()


def _is_about(A: AttentionMatrix, attention_mask: Tensor, first_query: int, first_key: int, *, cross: bool) -> bool:
    """Return whether an attention mask has the sizes of a matrix whose last query attends to no key of padding."""
    batch, heads, m, n = A.problem.shape
    if len(attention_mask) != batch or attention_mask.shape[1] < first_query + m:
        return False
    if cross:
        return True
    keys = attention_mask[:, first_key : first_key + n]
    keys = functional.pad(keys, (0, n - keys.shape[1]), value=True)
    if A.problem.mask is None or not m or not heads:
        return bool(keys.all())
    at = A.problem.tile(range(batch), range(1), range(m - 1, m), range(n))
    allowed = A.problem.mask.allows(at).to(keys.device).expand(batch, 1, 1, n)[:, 0, 0]
    return not bool((allowed & ~keys).any())
