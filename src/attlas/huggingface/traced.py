"""Attention for torch.compile and torch.export: a dense mask and torch operations only, so that no graph breaks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import causal_mask_function, sdpa_mask

from attlas.huggingface.chosen import whole_of
from attlas.masks import Mask


def dense_mask(arguments: dict[str, Any]) -> Tensor:
    """Return the mask of one forward pass as a tensor of booleans, by transformers' own function for SDPA.

    Where torch's kernel can make the mask itself, because it is causal and nothing else, the tensor says so in an
    attribute, and the compiler drops the numbers. A model that slices the mask loses the attribute, and is right too.
    """
    m, n = arguments["q_length"], arguments["kv_length"]
    plain = arguments["mask_function"] is causal_mask_function and m == n
    # It returns None for what it leaves to the kernel, and never where it is told to leave nothing.
    written = sdpa_mask(**arguments, allow_is_causal_skip=plain, allow_is_bidirectional_skip=False)
    if written is None:
        causal = torch.ones(m, n, dtype=torch.bool, device=arguments["device"]).tril()
        written = causal.expand(arguments["batch_size"], 1, m, n)
        written.attlas_causal = True  # type: ignore[attr-defined]  # ours
    return written


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    scaling: float | None,
    *,
    causal: bool,
    dropout: float,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
    chosen: Mask | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the pooled values, shape (batch, heads, m, e), and the dense weights, shape (batch, heads, m, n).

    Both are plain operations of torch. The weights are computed apart from the pooled values, so that the compiler
    drops them where nobody reads them.
    """
    m, n = query.shape[-2], key.shape[-2]
    only_causal = getattr(allowed, "attlas_causal", False) or (allowed is None and causal)
    square = only_causal and m == n and bias is None and chosen is None  # then torch's kernel makes the mask itself
    allowed = None if allowed is None else allowed[..., :n]
    if allowed is None and causal and m > 1:
        allowed = torch.ones(m, n, dtype=torch.bool, device=query.device).tril(n - m)
    if chosen is not None:
        own = whole_of(chosen, query.shape[:3], n, query.device)
        if allowed is not None and allowed.dtype is not torch.bool:
            allowed = allowed.masked_fill(~own, float("-inf"))
        else:
            allowed = own if allowed is None else allowed & own
    with torch.autocast(query.device.type, enabled=False):  # it would round the logits to 16 bits
        weights = _weights(query, key, allowed, scaling, softcap, sink, bias)
    if softcap is None and sink is None:
        added = None if square else _added(allowed, bias, query.dtype)
        grouped = query.shape[1] != key.shape[1]
        pooled = functional.scaled_dot_product_attention(
            query, key, value, added, dropout, is_causal=square, scale=scaling, enable_gqa=grouped
        )
        return pooled, weights
    used = functional.dropout(weights, dropout)
    values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return torch.matmul(used.to(value.dtype), values), weights


def _added(allowed: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask argument of SDPA: the allowed pairs, or one bias that hides the others."""
    if bias is None:
        return allowed if allowed is None or allowed.dtype is torch.bool else allowed.to(dtype)
    if allowed is None:
        return bias.to(dtype)
    if allowed.dtype is torch.bool:
        return bias.to(dtype).masked_fill(~allowed, float("-inf"))
    return (bias + allowed).to(dtype)


def _weights(
    query: Tensor,
    key: Tensor,
    allowed: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return the weights by the definition, in float32 or more; a row without a key has weights 0."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.matmul(query.to(accurate), keys.to(accurate).mT) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    added = _added(allowed, bias, accurate)
    if added is not None:
        logits = logits.masked_fill(~added, float("-inf")) if added.dtype is torch.bool else logits + added
    top = logits.amax(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(accurate)
        top = torch.maximum(top, sink)
    top = top.clamp(min=torch.finfo(accurate).min)  # a row of nothing but -inf
    powers = torch.exp(logits - top)
    total = powers.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    return torch.where(total > 0, powers / total.clamp(min=torch.finfo(accurate).tiny), torch.zeros_like(powers))
