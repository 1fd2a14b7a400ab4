"""What layers of older transformers leave to their eager attention, and do not hand to another attention function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attlas.huggingface.masks import MASKING, LazyMask


def as_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    scaling: float | None,
    is_causal: bool | None,
    attention_mask: Tensor | None,
) -> tuple[float | None, bool | None, Tensor | None]:
    """Return scaling, causality and mask of a call as the eager attention of the layer has them.

    In older versions the layers of GPT-2 hand over no factor and, without the mask functions of 4.53, a mask of the
    padding alone: eager attention reads the rest from the layer.

    Parameters
    ----------
    module : nn.Module
        The layer.
    query, key : Tensor, shape (batch, heads, m, d) and (batch, heads, n, d)
        Queries and keys.
    scaling, is_causal, attention_mask
        What the layer hands over.
    """
    own: Any = module
    m, n = query.shape[-2], key.shape[-2]
    if scaling is None and hasattr(module, "scale_attn_weights"):
        scaling = query.shape[-1] ** -0.5 if own.scale_attn_weights else 1.0
        if getattr(module, "scale_attn_by_inverse_layer_idx", False):
            scaling /= own.layer_idx + 1
        hides = getattr(module, "bias", None)
        is_crossing = getattr(module, "is_cross_attention", False)
        if isinstance(hides, Tensor) and hides.dtype is torch.bool and hides.ndim == 4 and not is_crossing:
            if attention_mask is None:
                return scaling, True, None
            if not isinstance(attention_mask, LazyMask):
                attention_mask = _causal_too(attention_mask[..., :n], hides[:, :, n - m : n, :n])
    elif MASKING is None and is_causal is None and attention_mask is None:
        # torch's own attention then is causal, and models make no mask for it; for eager attention they always do.
        is_causal = bool(getattr(module, "is_causal", False)) and m > 1
    return scaling, is_causal, attention_mask


def _causal_too(mask: Tensor, allowed: Tensor) -> Tensor:
    """Return a mask of booleans or numbers that hides what a causal layer hides, too."""
    if mask.dtype is torch.bool:
        return mask & allowed
    return torch.where(allowed, mask, torch.finfo(mask.dtype).min)
