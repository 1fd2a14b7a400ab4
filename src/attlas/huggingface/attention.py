"""The attention function that transformers calls in every layer."""

from __future__ import annotations

from torch import Tensor, nn

from attlas.attend import attend, attention
from attlas.huggingface.masks import mask_of
from attlas.masks import Causal, Mask, from_tensor
from attlas.matrix import AttentionMatrix
from attlas.recording.tap import offer
from attlas.scores import ScaledDot, Score, SoftCap

__all__ = ["attention_forward"]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, AttentionMatrix]:
    """Attend as ``eager`` does, and return the weights as a lazy matrix.

    Parameters
    ----------
    module : nn.Module
        The attention layer that calls.
    query : Tensor, shape (batch, heads, m, d)
        Queries, after rotary embedding and normalisation.
    key, value : Tensor, shape (batch, key heads, n, d) and (batch, key heads, n, e)
        Keys and values, after the cache update; heads are not repeated.
    attention_mask : Tensor, optional
        A `LazyMask`, or a mask with four axes that the user made, boolean or additive.
    scaling : float, optional
        Factor of the dot product; the default is ``1 / sqrt(d)``.
    dropout : float
        Probability that a weight is dropped.
    is_causal : bool, optional
        What holds where there is no mask; the default is what `module` says of itself.
    softcap : float, optional
        Bound of the logits (Gemma 2).
    s_aux : Tensor, optional, shape (heads,)
        Sinks: one more logit a head (gpt-oss).
    position_bias : Tensor, optional, shape (1 or batch, heads, m, n)
        A bias added to the logits (T5).
    **kwargs
        What else a model passes on; it changes nothing here.

    Returns
    -------
    output : Tensor, shape (batch, m, heads, e)
        Pooled values.
    weights : AttentionMatrix, shape (batch, heads, m, n)
        The weights. They cost nothing until they are read.

    Notes
    -----
    A query that may see no key (left padding) has output 0 and weights 0 here; ``eager`` gives it uniform
    weights over all keys, the future and the padding included.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from attlas.huggingface import attention_forward
    >>> q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    >>> output, A = attention_forward(nn.Identity(), q, k, v, None, is_causal=True)
    >>> output.shape, A.shape
    (torch.Size([1, 5, 4, 8]), torch.Size([1, 4, 5, 5]))
    """
    score: Score = ScaledDot(scaling)
    if softcap is not None:
        score = SoftCap(score, softcap)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    mask = _mask(attention_mask, query, key, bool(causal))
    if position_bias is not None:
        bias = from_tensor(position_bias[..., : key.shape[-2]])
        mask = bias if mask is None else mask & bias
    sink = None if s_aux is None else s_aux.to(query.dtype)
    A = attend(query, key, score=score, mask=mask, sink=sink)
    if dropout > 0.0:
        pooled = attention(query, key, value, score=score, mask=mask, sink=sink, dropout_p=dropout)
    else:
        pooled = A @ value
    first_query, first_key = (getattr(attention_mask, name, None) for name in ("first_query", "first_key"))
    offer(module, A, first_query=first_query, first_key=first_key)
    return pooled.transpose(1, 2).contiguous(), A


def _mask(given: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Mask | None:
    if given is not None:
        return mask_of(given, key.shape[-2])
    # No mask at all: our mask function always returns one, so the model made none. One query sees every key.
    return Causal() if causal and query.shape[-2] > 1 else None
