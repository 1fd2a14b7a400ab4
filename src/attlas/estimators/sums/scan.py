"""Running sums along a line that decay, or start anew, between one key and the next."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_PLACES = 64


def decayed_cumsum(decay: Tensor, terms: Tensor) -> Tensor:
    """Return ``a_i = decay_i a_{i-1} + terms_i`` with ``a_{-1} = 0``.

    Parameters
    ----------
    decay : Tensor, shape (n,)
        Factors in [0, 1]: 1 goes on, 0 starts anew.
    terms : Tensor, shape (n, c)
        What each place adds.

    Returns
    -------
    Tensor, shape (n, c)

    Notes
    -----
    The order of the additions is that of a loop within blocks of 64, then over blocks, and so on: nothing is ever
    subtracted, so that the relative error of a sum of positive terms is below ``3 log_64(n) 64`` units of rounding,
    however the sums grow and decay. Cost: two passes over the terms and 64 vectorised steps a level.
    """
    n, columns = terms.shape
    if n <= _BLOCK_PLACES:
        out = terms.clone()
        for i in range(1, n):
            out[i] += decay[i] * out[i - 1]
        return out
    blocks = -(-n // _BLOCK_PLACES)
    # One row for each place within a block, so that a step reads and writes consecutive numbers.
    share = _array_in_blocks(decay.unsqueeze(-1), blocks).squeeze(-1).contiguous()
    total = _array_in_blocks(terms, blocks).contiguous()
    for i in range(1, _BLOCK_PLACES):
        total[i].addcmul_(share[i].unsqueeze(-1), total[i - 1])
        share[i] *= share[i - 1]
    # `share` is now the product of the factors since the beginning of the block, `total` the sum within the block.
    carried = decayed_cumsum(share[-1], total[-1])
    before = torch.cat([carried.new_zeros(1, columns), carried[:-1]])
    total.addcmul_(share.unsqueeze(-1), before)
    return total.transpose(0, 1).reshape(-1, columns)[:n]


def _array_in_blocks(t: Tensor, blocks: int) -> Tensor:
    """Return an array as (places within a block, blocks, columns), with zeros after its end."""
    padded = t.new_zeros(blocks * _BLOCK_PLACES, t.shape[-1])
    padded[: len(t)] = t
    return padded.view(blocks, _BLOCK_PLACES, -1).transpose(0, 1)
