"""The attention function that transformers calls in every layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import public
from attlas.foundation.autocast import cast
from attlas.foundation.checks import refuse_context_parallel
from attlas.foundation.compat import changes
from attlas.huggingface.calls import mask_of_call, settings_of_call
from attlas.huggingface.chosen import chosen_keys, whole_of
from attlas.huggingface.keywords import check_keywords
from attlas.huggingface.masks import MASKING, LazyMask, mask_of_positions
from attlas.huggingface.older import as_eager
from attlas.huggingface.returned import AS_TENSORS
from attlas.huggingface.telling import tell
from attlas.huggingface.traced import dense_attention, weights_are_returned, writes_out_masks
from attlas.masks import Mask
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.recording.hooks import is_recording, is_told_by_operators, pooled
from attlas.recording.parallel import refuse_sharded_text, runs_ulysses, text_of_ranks


@public("attlas.huggingface")
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, AttentionMatrix | Tensor | None]:
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
    dropout : float
        Probability that a weight is dropped while `module` is in training mode.
    scaling : float, optional
        Factor of the dot product; the default is ``1 / sqrt(d)``.
    is_causal : bool, optional
        What holds where there is no mask. The default is that every query sees every key, as in ``eager``, whatever
        `module` says of itself: models that are causal make a mask.
    softcap : float, optional
        Bound of the logits (Gemma 2).
    s_aux : Tensor, optional, shape (heads,)
        Sinks: one more logit a head (gpt-oss).
    sinks : Tensor, optional, shape (batch, heads, m, 1)
        Sinks: one more logit a query (Inkling 2). The logits of the returned matrix are counted from it.
    position_bias : Tensor, optional, shape (1 or batch, heads, m, n)
        A bias added to the logits (T5).
    indices : Tensor, optional, shape (batch, m, k)
        The keys that an indexer chose for each query (DeepSeek-V3.2, GLM-5); one below 0 chooses nothing.
    block_indices : Tensor, optional, shape (batch, groups, m, k)
        The blocks of keys that were chosen for each query and group of heads (MiniMax-M3).
    **kwargs
        What else a model passes on. What says nothing about the weights (`attlas.huggingface.keywords.WITHOUT_EFFECT`,
        and what no attention layer names) changes nothing here, but under DeepSpeed's Ulysses, which drops the mask: it
        is made again of ``position_ids`` and ``sliding_window``.

    Returns
    -------
    output : Tensor, shape (batch, m, heads, e)
        Pooled values.
    weights : AttentionMatrix, shape (batch, heads, m, n)
        The weights. They cost nothing until they are read. In a block of `weights_as_tensors` they are a
        `torch.Tensor` by their class. Inside torch.compile and torch.export a dense tensor,
        which the compiler drops where nobody reads it; in torch.export None where the model does not return it.

    Raises
    ------
    BackendError
        If the layer passes a keyword that attlas does not know.

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
    query, key, value = map(cast, (query, key, value))  # layers leave dtypes mixed, and torch's own function does this
    dropout = dropout if module.training else 0.0  # some layers name it outside of training too, and eager ignores it
    check_keywords(module, kwargs)
    if scaling is None or MASKING is None:
        scaling, is_causal, attention_mask = as_eager(module, query, key, scaling, is_causal, attention_mask)
    chosen = chosen_keys(module, query.shape[1], indices, block_indices)
    # Not None inside `attlas.distributed.context_parallel`: the text of which this rank has a part.
    text = text_of_ranks()
    if text is None and writes_out_masks() and not isinstance(attention_mask, LazyMask):
        # torch.compile and torch.export: the mask and, where they are returned, the weights are ordinary tensors.
        output, weights = dense_attention(
            query,
            key,
            value,
            attention_mask,
            scaling,
            causal=bool(is_causal),
            dropout=dropout,
            softcap=softcap,
            sink=sinks if s_aux is None else s_aux.to(query.dtype),
            bias=None if position_bias is None else position_bias[..., : key.shape[-2]],
            chosen=chosen,
            returned=weights_are_returned(kwargs),
        )
        # A recording listens to compiled code by operators: this one sends it the tensors of the call.
        if is_told_by_operators():
            tell(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling,
                softcap,
                causal=bool(is_causal),
                others=(s_aux, sinks, position_bias, indices, block_indices),
            )
        return output.transpose(1, 2).contiguous(), weights
    refuse_context_parallel()
    if attention_mask is None and runs_ulysses():
        mask: Mask | None = mask_of_positions(module, query, key, kwargs)
    else:
        mask = mask_of_call(attention_mask, query, key, causal=bool(is_causal))
    score, mask, sink = settings_of_call(query, key, mask, scaling, softcap, s_aux, sinks, position_bias, chosen)
    if text is not None:
        text.check(attention_mask, query, key, dropout, sinks, position_bias, chosen)
        if is_recording():
            refuse_sharded_text()
        own, divided = text.attend(query, key, value, score, mask, sink)
        return own.transpose(1, 2).contiguous(), divided
    A = attend(query, key if torch.compiler.is_compiling() else _own_keys(key), score=score, mask=mask, sink=sink)

    def pool_step(weights: AttentionMatrix, values: Tensor) -> Tensor:
        """Pool the values of a decoding step by torch's own function, unless an intervention changed something."""
        out: Tensor | None = None
        # Nothing is changed, and no statistic is to come from the same call.
        if weights is A and values is value and not A.weights.announced:
            out = _decode_step(query, key, value, attention_mask, scaling, chosen)
        return weights @ values if out is None else out

    plain = softcap is None and sink is None and position_bias is None and dropout == 0.0
    pool = pool_step if plain and query.shape[2] == 1 else None
    first_query, first_key = getattr(attention_mask, "first_query", None), getattr(attention_mask, "first_key", None)
    out, matrix = pooled(module, A, value, pool, dropout_p=dropout, first_query=first_query, first_key=first_key)
    matrix.layer = getattr(module, "layer_idx", None)
    shown = matrix.as_tensor() if AS_TENSORS.get() else matrix
    return out.transpose(1, 2).contiguous(), shown


def _own_keys(key: Tensor) -> Tensor:
    """Return keys that later steps do not overwrite, for a matrix that is read after them.

    A static cache writes every step into the tensor that it returned before. A tensor that was ever written to in
    place is copied; tensors of inference mode do not count their changes, so they are copied too.
    """
    return key.clone() if key.is_inference() or changes(key) else key


def _decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    chosen: Mask | None,
) -> Tensor | None:
    """Return the pooled values of a step that reads one token from torch's own function; None for a user's mask.

    A row of a mask is as small as a key: it is written out once for all layers, and every microsecond counts.
    """
    if (attention_mask is not None and not isinstance(attention_mask, LazyMask)) or query.dtype is not value.dtype:
        return None
    allowed = None if attention_mask is None or attention_mask.mask is None else attention_mask.row(key.shape[-2])
    if chosen is not None:
        own = whole_of(chosen, query.shape[:3], key.shape[-2], query.device)
        allowed = own if allowed is None else allowed & own
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, allowed, scale=scaling, enable_gqa=grouped)
