"""Attention of Longformer and LED's encoder: a window around each token, and global tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import RecordingError
from attlas.foundation.autocast import cast
from attlas.masks import Mask, Window, from_tensor
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.recording.hooks import are_values_kept, pooled
from attlas.scores import ScaledDot


def without_padding(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the text of a model as it is, where its own code pads it to whole windows.

    The masks of attlas need no whole windows, and positions of weights are those of the text. What is returned has the
    order of the arguments: input_ids, attention_mask, then (of Longformer) token_type_ids and position_ids, and
    inputs_embeds.
    """
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "pad_token_id")
    given = dict(zip(names, args, strict=False)) | kwargs
    return (0, *(given[name] for name in names[:-1] if name in given))


class Transposable:
    """Weights that a model transposes, as it does its own band of weights, and gets back as they are.

    Parameters
    ----------
    weights : AttentionMatrix or Tensor
        What the model is to return.
    is_cut : bool
        Whether the model cuts the transposed weights to the text.
    """

    def __init__(self, weights: Any, *, is_cut: bool = False) -> None:
        self.weights = weights
        self.is_cut = is_cut

    @property
    def shape(self) -> torch.Size:
        """Shape of the weights."""
        return self.weights.shape  # type: ignore[no-any-return]

    def transpose(self, *_: int) -> Any:
        """Return the weights, or what gives them when it is cut; their axes are those of the model's outputs."""
        return self if self.is_cut else self.weights

    def __getitem__(self, _: Any) -> Any:
        # The text is not padded, so that nothing is cut.
        return self.weights


def sliding_window_attention(
    cuts: bool,
    module: nn.Module,
    original: Callable[..., Any],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> Any:
    """Return what a layer of Longformer returns, from one matrix of the whole text.

    A token sees the tokens of its window and all global ones. A global token sees every token, by projections of its
    own: its row is a softmax of other queries and keys. Both are one dot product of vectors of twice the size: queries
    are zero in the half that they do not use.

    Notes
    -----
    A padding token sees nothing and has output 0, as in the model.
    """
    if is_index_masked is None or is_index_global_attn is None or are_given(others):
        return original(
            hidden_states,
            attention_mask=attention_mask,
            is_index_masked=is_index_masked,
            is_index_global_attn=is_index_global_attn,
            is_global_attn=is_global_attn,
            output_attentions=output_attentions,
            **others,
        )
    own: Any = module
    batch, n, size = hidden_states.shape
    is_global = is_index_global_attn if is_global_attn else None

    def split(t: Tensor) -> Tensor:
        """Return tokens with the axes (batch, heads, n, d)."""
        heads: int = own.num_heads
        found: Tensor = cast(t).view(batch, n, heads, -1).transpose(1, 2)
        return found

    factor = 1 / math.sqrt(own.head_dim)
    q, k, v = split(own.query(hidden_states)), split(own.key(hidden_states)), split(own.value(hidden_states))
    values_global: Tensor | None = None
    rows: Tensor | None = None
    if is_global is not None:
        _refuse_values(module)
        rows = is_global[:, None, :, None]
        chosen = own.query_global(hidden_states[is_global])
        q_global = split(chosen.new_zeros(batch, n, size).masked_scatter(is_global[..., None], chosen))
        q = torch.cat([q.masked_fill(rows, 0.0), q_global], -1)
        k = torch.cat([k, split(own.key_global(hidden_states))], -1)
        values_global = split(own.value_global(hidden_states))
    mask = mask_of_windows(own.one_sided_attn_window_size, is_index_masked, is_global)
    A = attend(q, k, score=ScaledDot(scale=factor), mask=mask)
    dropout = own.dropout if module.training else 0.0

    def pool(weights: AttentionMatrix, values: Tensor) -> Tensor:
        """Return the pooled values; rows of global tokens pool values of their own."""
        if values_global is None or rows is None:
            return weights.pooled(values, dropout)
        both = weights.pooled(torch.cat([values, values_global], -1), dropout)
        return torch.where(rows, both[..., values.shape[-1] :], both[..., : values.shape[-1]])

    out, shown = pooled(module, A, v, pool)
    output = out.transpose(1, 2).reshape(batch, n, size)
    if not output_attentions:
        return (output,)
    # Longformer's model cuts what it returns to the text, LED's does so only where it padded.
    returned = Transposable(shown, is_cut=cuts)
    if is_global is None:
        return output, returned
    return output, returned, Transposable(rows_of_global_tokens(shown, is_global))


def are_given(others: dict[str, Any]) -> bool:
    """Return whether a layer is called with arguments that attlas does not know, as masks of heads in old versions."""
    return any(value is not None for value in others.values())


def mask_of_windows(size: int, is_padding: Tensor, is_global: Tensor | None) -> Mask:
    """Return which pairs of a Longformer attend.

    Parameters
    ----------
    size : int
        How many tokens before and after its own a token sees.
    is_padding, is_global : Tensor of bool, shape (batch, n)
        Which tokens are padding, and which are global.
    """
    mask: Mask = Window(size, size, offset=0)
    if is_global is not None:
        mask = mask | from_tensor(is_global[:, None, None, :]) | from_tensor(is_global[:, None, :, None])
    return mask & mask_of_tokens(~is_padding) if bool(is_padding.any()) else mask


def mask_of_tokens(is_token: Tensor) -> Mask:
    """Return the mask in which tokens see tokens, and padding neither sees nor is seen; `is_token` is (batch, n)."""
    return from_tensor(is_token[:, None, None, :]) & from_tensor(is_token[:, None, :, None])


def rows_of_global_tokens(A: AttentionMatrix, is_global: Tensor) -> Tensor:
    """Return the rows of the global tokens, keys before queries, as a model of transformers returns them.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, n, n)
        The weights.
    is_global : Tensor of bool, shape (batch, n)
        Which tokens are global.

    Returns
    -------
    Tensor, shape (batch, heads, n, most global tokens of a text)
        A text with fewer has rows of zeros, where the model has numbers without meaning.
    """
    places = [flags.nonzero()[:, 0] for flags in is_global]
    most = max(map(len, places))
    rows = [A[number : number + 1, :, place, :] for number, place in enumerate(places)]
    return torch.cat([nn.functional.pad(row, (0, 0, 0, most - row.shape[2])) for row in rows]).transpose(2, 3)


def _refuse_values(module: nn.Module) -> None:
    """Raise a RecordingError where a recording keeps values: those of global tokens are others."""
    if are_values_kept():
        rule = "values are recorded of attention that pools one kind of values."
        found = f"{type(module).__name__} with global tokens, which pool values of their own"
        fix = "record(model) without values, or a text without global tokens."
        raise RecordingError(rule, found, fix, where="record()")
