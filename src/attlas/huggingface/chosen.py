"""The keys that an indexer chose for each query, as models of transformers hand them over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attlas.errors import BackendError
from attlas.foundation.tiles import Tile
from attlas.masks import Mask, Selected


def chosen_keys(module: nn.Module, heads: int, indices: Tensor | None, block_indices: Tensor | None) -> Mask | None:
    """Return the mask of the keys that were chosen for each query; None where none were.

    Parameters
    ----------
    module : nn.Module
        The attention layer, which knows the size of a block.
    heads : int
        Number of query heads.
    indices : Tensor, optional, shape (batch, m, k)
        Chosen keys.
    block_indices : Tensor, optional, shape (batch, groups, m, k)
        Chosen blocks of keys.
    """
    keys = None if indices is None else _mask_of_choice(module, heads, indices, 1)
    if block_indices is None:
        return keys
    blocks = _mask_of_choice(module, heads, block_indices, _block_size(module))
    return blocks if keys is None else keys & blocks


def _mask_of_choice(module: nn.Module, heads: int, indices: Tensor, block: int) -> Selected:
    """Return the mask of one choice, whose entries stand for `block` keys each.

    `indices` has the shape (batch, m, k), one choice for all heads, or (batch, groups, m, k), one for each group of
    neighbouring query heads.
    """
    four = indices[:, None] if indices.ndim == 3 else indices
    groups = four.shape[1] if four.ndim == 4 else 0
    if not groups or heads % groups:
        rule = "chosen keys must have the axes (batch, m, k), or (batch, groups, m, k) where groups divide the heads."
        fix = 'model.set_attn_implementation("eager")'
        raise BackendError(rule, f"{heads} heads here", fix, layer=type(module).__name__, chosen=indices)
    per_group = heads // groups if groups > 1 else 1  # a single group is broadcast to every head
    return Selected(four, block, per_group)


def _block_size(module: nn.Module) -> int:
    """Return how many keys a block of a layer has."""
    size = getattr(getattr(module, "config", None), "index_block_size", None)
    if isinstance(size, int):
        return size
    rule = "a layer that chooses blocks of keys must say how large they are."
    found = "block_indices, and no config.index_block_size"
    raise BackendError(rule, found, 'model.set_attn_implementation("eager")', layer=type(module).__name__)


def whole_of(mask: Mask, sizes: Sequence[int], n: int, device: torch.device) -> Tensor:
    """Return the pairs that a mask allows in a whole matrix of sizes (batch, heads, m) and n keys, as booleans."""
    batch, heads, m = sizes
    own = torch.arange(batch), torch.arange(heads)
    return mask.allows(Tile(range(batch), range(heads), range(m), range(n), m, n, *own, device))
