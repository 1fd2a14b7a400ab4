"""The mask function that transformers calls once a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from attlas.huggingface.masks import LazyMask, Rule, causal_mask_function, lazy_mask, mask_of_all_ranks
from attlas.huggingface.telling import note_mask
from attlas.huggingface.traced import dense_mask, writes_out_masks
from attlas.recording.attn_implementation import NONE_FOR_ALL
from attlas.recording.hooks import is_told_by_operators
from attlas.recording.parallel import text_of_ranks


def attention_mask(
    *,
    batch_size: int,
    q_length: int | None = None,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Rule = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool | None = None,
    cache_position: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> Tensor | None:
    """Return the mask of one forward pass, never as numbers.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Sizes of the mask.
    q_offset, kv_offset : int
        Absolute position of the first query and of the first key; they differ with a cache.
    mask_function : callable
        Batch, head, query and key (absolute positions) to True where the pair may attend.
    attention_mask : Tensor, optional, shape (batch, tokens)
        True for text, False for padding.
    use_vmap : bool, optional
        Whether `mask_function` takes single numbers only and must be vectorised. The default is False, and True with
        `cache_position`: its versions of transformers vectorise every function.
    cache_position : Tensor, optional, shape (m,)
        Absolute positions of the queries; older transformers give them in place of `q_length` and `q_offset`.
    dtype, device
        Dtype and device of the tensor that the mask stands for.
    **kwargs
        Hints for other implementations; of these, `allow_is_bidirectional_skip` counts in a block of `lazily`, and for
        Informer, which `config` tells.

    Returns
    -------
    LazyMask, shape (batch, 1, m, n)
        Never None: a model without `is_causal` takes None for "causal". Only where a whole model writes its attention
        out by hand, in a block of `lazily`, and for Informer, it is None where nothing is hidden, as on eager.
        Inside torch.compile and torch.export, where no intervention is applied, a tensor of booleans.

    Examples
    --------
    >>> import torch
    >>> from attlas.huggingface import attention_mask
    >>> padding = torch.tensor([[0, 1, 1, 1]])
    >>> attention_mask(batch_size=1, q_length=4, kv_length=4, attention_mask=padding)
    LazyMask(Causal(offset=0) & Padding(3, side='left'), shape=(1, 1, 4, 4), dtype=torch.float32)
    """
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    q_length = kv_length if q_length is None else q_length
    use_vmap = cache_position is not None if use_vmap is None else use_vmap
    text = text_of_ranks()
    if text is not None:
        mask = mask_of_all_ranks(mask_function, text, (q_length, kv_length, int(q_offset), kv_offset))
        return LazyMask(mask, (batch_size, 1, q_length, kv_length), dtype, device)
    if writes_out_masks():
        given = {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
            "use_vmap": use_vmap,
            "device": device,
        }
        written = dense_mask(given)
        if is_told_by_operators():
            note_mask(written, given)
        return written
    sizes, first_query = (batch_size, q_length, kv_length), int(q_offset)  # a static cache passes a tensor
    lazy = lazy_mask(
        sizes, first_query, kv_offset, mask_function, attention_mask, device, dtype, broadcasts=not use_vmap
    )
    # Informer's encoder halves the text between its layers (`distil`), and no layer takes a mask of the size before.
    takes_none = NONE_FOR_ALL.get() or getattr(kwargs.get("config"), "distil", False)
    if takes_none and kwargs.get("allow_is_bidirectional_skip") and lazy.mask is None:
        return None
    return lazy
