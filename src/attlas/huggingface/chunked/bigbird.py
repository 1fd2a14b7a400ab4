"""Attention of BigBird and BigBird-Pegasus: blocks that see their neighbours, two global blocks and random ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.foundation.autocast import cast
from attlas.foundation.compat import RANDOM_BLOCKS, RANDOM_BLOCKS_OF_PAPER, RANDOM_PLAN
from attlas.huggingface.chunked.longformer import mask_of_tokens
from attlas.masks import Mask, Selected, from_tensor
from attlas.matrix.attend import attend
from attlas.recording.hooks import pooled
from attlas.scores import ScaledDot

_LENGTHS_OF_PAPER = (1024, 3072, 4096)  # for these, random blocks are drawn as the paper draws them
# How many tokens of padding the model has put behind the text that it reads in this thread, to fill the last block.
_PADDING: ContextVar[int] = ContextVar("attlas_bigbird_padding", default=0)


def noting_padding(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the text that a model pads to whole blocks, and note how many tokens of padding it has."""
    found = original(*args, **kwargs)
    _PADDING.set(found[0])
    return found


def block_sparse_attention(
    module: nn.Module,
    original: Callable[..., Any],
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    band_mask: Tensor | None,
    from_mask: Tensor,
    to_mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the output and the weights of a layer of BigBird, from one matrix of the text.

    The blocks at both ends see every key, and are seen by every query. Every other block sees itself, its neighbours
    and random blocks. The model counts a random block once more where a query sees it anyway; outside of training, all
    random blocks are block 0. A key that counts c times has log(c) added to its logit.

    Notes
    -----
    Each weight is the whole share of its key. The model itself returns the share of one of its equal copies.
    """
    batch, heads, length, size = query_layer.shape
    own: Any = module
    n = length - min(_PADDING.get(), own.block_size - 1)
    q, k, v = (cast(t[:, :, :n]) for t in (query_layer, key_layer, value_layer))
    chosen = random_blocks(module, heads, length)
    mask, extra_logits = mask_of_blocks(chosen, own.block_size, n)
    is_token = to_mask[:, 0, 0, :n] > 0
    if not bool(is_token.all()):
        mask = mask & mask_of_tokens(is_token)
    scale = 1 / math.sqrt(size)
    if extra_logits is not None:
        # As coordinates of their own: a query has 1 at the pattern of its block, and keys have the numbers to add.
        flags, numbers = (t.to(q.device, q.dtype) for t in extra_logits)
        q = torch.cat([q * scale, flags.expand(batch, heads, -1, -1)], -1)
        k = torch.cat([k, numbers.expand(batch, heads, -1, -1)], -1)
        scale = 1.0
    A = attend(q, k, score=ScaledDot(scale=scale), mask=mask)
    out, shown = pooled(module, A, v)
    return functional.pad(out.transpose(1, 2), (0, 0, 0, 0, 0, length - n)), shown


def random_blocks(module: nn.Module, heads: int, length: int) -> Tensor:
    """Return the random blocks that a layer draws, as it draws them, int64, shape (1 or heads, blocks - 2, k)."""
    own: Any = module
    size, count = own.block_size, own.num_random_blocks
    if own.training:
        np.random.seed(own.seed)  # noqa: NPY002 - the model draws from this generator, and seeds it so
    if length in _LENGTHS_OF_PAPER:
        draw = getattr(module, RANDOM_BLOCKS_OF_PAPER)
        most = own.max_seqlen
        drawn = [draw(most, most, size, size, count, last_idx=1024)[: length // size - 2] for _ in range(heads)]
    else:
        lengths, counts = getattr(module, RANDOM_PLAN)(length, size, count)
        drawn = getattr(module, RANDOM_BLOCKS)(
            from_seq_length=length,
            to_seq_length=length,
            from_block_size=size,
            to_block_size=size,
            num_heads=heads,
            plan_from_length=lengths,
            plan_num_rand_blocks=counts,
        )
    found = torch.as_tensor(np.stack(drawn)).long()
    return found[:1] if bool((found == found[:1]).all()) else found


def mask_of_blocks(chosen: Tensor, size: int, n: int) -> tuple[Mask, tuple[Tensor, Tensor] | None]:
    """Return which pairs attend, and what is added to the logits of keys that a query counts more than once.

    Parameters
    ----------
    chosen : Tensor of int64, shape (heads or 1, blocks - 2, k)
        The random blocks of each block but the first and the last.
    size : int
        Tokens of a block.
    n : int
        Tokens of the text.

    Returns
    -------
    mask : Mask
        For queries and keys of the text.
    extra_logits : tuple of Tensor, shapes (1, heads or 1, n, p) and (1, heads or 1, n, p), or None
        Numbers of p patterns: query i adds ``queries[i] @ keys[j]`` to the logit of key j. None where each counts once.
    """
    heads, inner, _ = chosen.shape
    count = inner + 2
    places = torch.arange(1, count - 1)
    near = torch.stack([places * 0, places - 1, places, places + 1, places * 0 + count - 1], -1)
    entries = functional.pad(torch.cat([near.expand(heads, -1, -1), chosen], -1), (0, 0, 1, 1), value=-1)
    of_tokens = torch.arange(n) // size
    ends = (of_tokens == 0) | (of_tokens == count - 1)
    mask = Selected(entries[:, of_tokens][None], block=size) | from_tensor(ends[None, None, :, None])
    # How often each block sees each other: what is near counts once, a random block once more each time.
    times = torch.zeros(heads, inner, count, dtype=torch.float64).scatter_(2, near.expand(heads, -1, -1), 1.0)
    times = times.scatter_add(2, chosen, torch.ones_like(chosen, dtype=torch.float64))
    logs = functional.pad(times.clamp(min=1).log(), (0, 0, 1, 1))
    patterns, own = torch.unique(logs.flatten(0, 1), dim=0, return_inverse=True)
    if not bool(patterns.any()):
        return mask, None
    flags = functional.one_hot(own.view(heads, count), len(patterns)).to(logs.dtype)
    real = patterns.any(-1)  # the pattern of nothing to add needs no coordinate
    keys = patterns[real].mT[of_tokens]
    return mask, (flags[None, :, of_tokens][..., real], keys[None, None].expand(1, heads, -1, -1))
