"""A bias for keys that stand for blocks of the text, behind the keys of the text."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from attlas.foundation.devices import DeviceCopies
from attlas.foundation.tables import of_heads
from attlas.foundation.tiles import Tile
from attlas.scores.base import Score
from attlas.scores.position import RelativeBias, heads_of


class SideBias(Score):
    """One bias of distances for the keys of a text, and another for the keys behind them, which stand for blocks.

    LongT5's transient global attention has it [1]_. Key j is token j of the text for j < n, and block j - n from there
    on. Its distance to a query is j - i, or j - n less the block of the query.

    Parameters
    ----------
    near, side : RelativeBias
        The biases of tokens and of blocks.
    blocks : Tensor of int, shape (batch, n)
        The block of each query.

    References
    ----------
    .. [1] Guo et al., "LongT5: efficient text-to-text transformer for long sequences", 2022, section 3.1.2.
    """

    finite = True
    positional = True
    rounds_tokens = True
    scratch = 3
    stored = ("near", "side", "blocks")

    def __init__(self, near: RelativeBias, side: RelativeBias, blocks: Tensor) -> None:
        super().__init__()
        self.near, self.side = near, side
        self.blocks = blocks.detach()
        self._copies = (DeviceCopies(), DeviceCopies(), DeviceCopies())

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        return 0

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        return cls(**settings)

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        n = self.blocks.shape[-1]
        near = of_heads(self.near.weight, at, at.dtype, self._copies[0], axis=1)
        if not at.scattered and at.columns.stop <= n:
            return near[:, self.near.bucket(at.j - at.i)].unsqueeze(0)
        side = of_heads(self.side.weight, at, at.dtype, self._copies[1], axis=1)
        blocks = self._copies[2].of(self.blocks, at.device)
        # (batch, 1, m, 1), where heads and columns are of every place.
        own = heads_of(blocks[:, None], at)[:, 0, at.i.flatten()].unsqueeze(-1).long()
        of_blocks = side[:, self.side.bucket(at.j - n - own)].transpose(0, 1)
        if not at.scattered and at.columns.start >= n:
            return of_blocks
        return torch.where(at.j < n, near[:, self.near.bucket(at.j - at.i)].unsqueeze(0), of_blocks)
