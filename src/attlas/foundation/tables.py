"""Tables with an entry for each head, and the entries that a tile asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from attlas.foundation.devices import DeviceCopies
from attlas.foundation.tiles import Tile


def of_heads(table: Tensor, at: Tile, dtype: torch.dtype, copies: DeviceCopies, axis: int = 0) -> Tensor:
    """Return the rows of a table (heads, ...), or the columns (`axis` 1), that belong to the heads of a tile.

    Parameters
    ----------
    table : Tensor
        The table; one number alone serves every head.
    at : Tile
        The tile.
    dtype : torch.dtype
        Dtype of the result.
    copies : DeviceCopies
        Where copies of the table are kept.
    axis : int
        The axis of the table that counts the heads, 0 or 1.

    Returns
    -------
    Tensor on the device of the tile, with a first axis of heads
    """
    if at.device.type != "cpu":
        table = copies.of(table, at.device, dtype)
    if table.numel() > 1:
        ids = at.h.flatten() if table.device == at.device else at.head_ids.to(table.device)
        table = (table.mT if axis else table)[ids]
    return table.to(at.device, dtype)
