"""Attention of LongT5's encoder: a window around each token, and (transient global) sums of blocks as further keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attlas.foundation.autocast import cast
from attlas.foundation.compat import BLOCK_IDS
from attlas.huggingface.chunked.longformer import are_given, mask_of_tokens
from attlas.masks import Mask, Window, from_tensor
from attlas.matrix.attend import attend
from attlas.recording.hooks import pooled
from attlas.scores import RelativeBias, ScaledDot, Score
from attlas.scores.side import SideBias


class Places(NamedTuple):
    """What the first layer of an encoder hands to the others in place of its table of biases.

    Parameters
    ----------
    score : Score
        The dot product and the bias of places.
    mask : Mask
        Which pairs attend.
    """

    score: Score
    mask: Mask


def local_attention(
    module: nn.Module,
    original: Callable[..., Any],
    hidden_states: Tensor,
    mask: Tensor | None = None,
    position_bias: Any = None,
    output_attentions: bool = False,
    **others: Any,
) -> Any:
    """Return what a local layer of LongT5 returns, from one matrix of the whole text.

    A padding token sees nothing, where the model lets it see all alike; nothing reads its output.
    """
    if isinstance(position_bias, Tensor) or are_given(others):
        return original(
            hidden_states,
            mask=mask,
            position_bias=position_bias,
            output_attentions=output_attentions,
            **others,
        )
    own: Any = module
    n = hidden_states.shape[1]
    if position_bias is None:
        allowed: Mask = Window(own.local_radius, own.local_radius, offset=0)
        is_token = None if mask is None else _tokens_of_windows(mask, own.block_len)[:, :n]
        if is_token is not None and not bool(is_token.all()):
            allowed = allowed & mask_of_tokens(is_token)
        bias = _relative_bias(module, own.relative_attention_bias) if own.has_relative_attention_bias else None
        score = ScaledDot(scale=1.0)
        position_bias = Places(score if bias is None else score + bias, allowed)
    q, k, v = (_heads(module, layer(hidden_states)) for layer in (own.q, own.k, own.v))
    return _output(module, q, k, v, position_bias, output_attentions)


def transient_global_attention(
    module: nn.Module,
    original: Callable[..., Any],
    hidden_states: Tensor,
    mask: Tensor | None = None,
    position_bias: Any = None,
    output_attentions: bool = False,
    **others: Any,
) -> Any:
    """Return what a transient global layer of LongT5 returns, from one matrix of the whole text.

    Its keys are those of the n tokens, and behind them one of each block of tokens, made of the sum of the block.
    A padding token sees nothing, where the model lets it see all alike; nothing reads its output.
    """
    if isinstance(position_bias, Tensor) or are_given(others):
        return original(
            hidden_states,
            mask=mask,
            position_bias=position_bias,
            output_attentions=output_attentions,
            **others,
        )
    own: Any = module
    is_token = torch.ones(hidden_states.shape[:2], device=hidden_states.device) if mask is None else mask
    blocks_of = getattr(sys.modules[_class_with(module, "compute_side_bias").__module__], BLOCK_IDS)
    block_ids, segments = blocks_of(is_token, own.global_block_size)
    sums = own.global_input_layer_norm(_sums_of_blocks(hidden_states, block_ids, segments.shape[-1]))
    if position_bias is None:
        position_bias = _places(module, is_token > 0, block_ids, segments > 0)
    q = _heads(module, own.q(hidden_states))
    k, v = (_heads(module, torch.cat([layer(hidden_states), layer(sums)], 1)) for layer in (own.k, own.v))
    return _output(module, q, k, v, position_bias, output_attentions)


def _places(module: nn.Module, is_token: Tensor, block_ids: Tensor, segments: Tensor) -> Places:
    """Return score and mask of transient global attention.

    Parameters
    ----------
    module : nn.Module
        The first layer.
    is_token : Tensor of bool, shape (batch, n)
        Which places are no padding.
    block_ids : Tensor of int, shape (batch, n)
        The block of each token.
    segments : Tensor of bool, shape (batch, blocks)
        Which blocks have a token.
    """
    own: Any = module
    is_side = torch.cat([torch.zeros_like(is_token), segments], 1)
    near = Window(own.local_radius, own.local_radius, offset=0) & from_tensor(
        torch.cat([is_token, torch.zeros_like(segments)], 1)[:, None, None, :]
    )
    mask = near | from_tensor(is_side[:, None, None, :])
    if not bool(is_token.all()):
        mask = mask & from_tensor(is_token[:, None, :, None])
    score: Score = ScaledDot(scale=1.0)
    if own.has_relative_attention_bias:
        near_bias = _relative_bias(module, own.relative_attention_bias)
        side_bias = _relative_bias(module, own.global_relative_attention_bias)
        score = score + SideBias(near_bias, side_bias, block_ids)
    return Places(score, mask)


def _output(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, places: Places, output_attentions: bool) -> Any:
    """Return what a layer of LongT5 returns: output, what it hands to the next layer, and weights if asked for."""
    own: Any = module
    A = attend(q, k, score=places.score, mask=places.mask)
    dropout = own.dropout if module.training else 0.0
    # The first query stands at the first key; further keys stand behind the text.
    out, shown = pooled(module, A, v, dropout_p=dropout, first_query=0, first_key=0)
    output = own.o(out.transpose(1, 2).flatten(2))
    return (output, places, shown) if output_attentions else (output, places)


def _heads(module: nn.Module, t: Tensor) -> Tensor:
    """Return projected tokens with the axes (batch, heads, n, d)."""
    own: Any = module
    found: Tensor = cast(t).unflatten(-1, (own.n_heads, own.key_value_proj_dim)).transpose(1, 2)
    return found


def _class_with(module: nn.Module, name: str) -> type:
    """Return the class of a module that defines a method."""
    return next(kind for kind in type(module).__mro__ if name in vars(kind))


def _relative_bias(module: nn.Module, table: nn.Embedding) -> RelativeBias:
    """Return the bias of distances of a layer, with the model's own table, which gets its gradients."""
    own: Any = module
    buckets, most = own.relative_attention_num_buckets, own.relative_attention_max_distance
    with torch.device("meta"):  # its own table is not used
        bias = RelativeBias(own.n_heads, most, buckets=buckets, bidirectional=not own.is_decoder)
    bias.weight = table.weight  # type: ignore[assignment]  # a parameter, but for a sharded model
    return bias


def _tokens_of_windows(mask: Tensor, size: int) -> Tensor:
    """Return which places are tokens, shape (batch, n or more), of a mask (batch, 1, blocks, size, 3 * size).

    Each token sees itself, in the middle block of three.
    """
    return mask[:, 0, :, :, size : 2 * size].diagonal(dim1=-2, dim2=-1).flatten(1) > 0


def _sums_of_blocks(hidden_states: Tensor, block_ids: Tensor, count: int) -> Tensor:
    """Return the sum of the tokens of each block, shape (batch, count, size); block -1 is of no block."""
    batch, _, size = hidden_states.shape
    places = block_ids.long().where(block_ids >= 0, count)[..., None].expand(-1, -1, size)
    return hidden_states.new_zeros(batch, count + 1, size).scatter_add(1, places, hidden_states)[:, :count]
