"""What one call of an attention layer says of its weights: the score, the mask and the sink."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attlas.huggingface.masks import both, mask_of
from attlas.masks import Causal, Mask, from_tensor
from attlas.scores import ScaledDot, Score, SoftCap, TensorBias


def settings_of_call(
    query: Tensor,
    key: Tensor,
    mask: Mask | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
    chosen: Mask | None,
) -> tuple[Score, Mask | None, Tensor | None]:
    """Return the score, the whole mask and the sink of a call.

    Parameters
    ----------
    query, key : Tensor, shape (batch, heads, m, d) and (batch, key heads, n, d)
        Queries and keys.
    mask : Mask, optional
        The mask of the model.
    scaling, softcap : float, optional
        Factor of the dot product, and bound of the logits.
    s_aux, sinks, position_bias : Tensor, optional
        As `attlas.huggingface.attention_forward` takes them.
    chosen : Mask, optional
        The keys that an indexer chose.
    """
    score = (_score_of_model if torch.compiler.is_compiling() else _cached_score)(
        scaling, softcap
    )  # the compiler warns of it
    mask = both(mask, chosen)
    if position_bias is not None:
        mask = both(mask, from_tensor(position_bias[..., : key.shape[-2]]))
    sink = None if s_aux is None else s_aux.to(query.dtype)
    if sinks is not None:
        # A sink of each query: taken off all logits of its row, it leaves a sink of 0.
        score = score + TensorBias(-sinks)
        sink = query.new_zeros(query.shape[1])
    return score, mask, sink


def mask_of_call(attention_mask: Tensor | None, query: Tensor, key: Tensor, *, causal: bool) -> Mask | None:
    """Return the mask of a call as a mask of attlas; `causal` says what holds where there is none."""
    if attention_mask is not None:
        return mask_of(attention_mask, key.shape[-2])
    # No mask at all: our mask function always returns one, so the model made none. One query sees every key.
    return Causal() if causal and query.shape[-2] > 1 else None


def _score_of_model(scaling: float | None, softcap: float | None) -> Score:
    """Return the score of a model: scaled dot products, with a bound where the model has one."""
    score: Score = ScaledDot(scaling)
    return score if softcap is None else SoftCap(score, softcap)


_cached_score = functools.lru_cache(maxsize=64)(
    _score_of_model
)  # a score holds nothing that changes: all calls share it
