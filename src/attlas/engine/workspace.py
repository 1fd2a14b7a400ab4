"""Memory that tiles use again and again.

A tile is some megabytes. Given back to the system and asked for again for each tile, its pages are faulted
in each time, which took 40 % of a pass over the matrix on a CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Buffers by name, for one pass over a matrix.

    Parameters
    ----------
    dtype : torch.dtype
        Dtype of the buffers.
    device : torch.device
        Where they live.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the buffer of this name with this shape; what it held before is lost."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            # Twice what there was: the tiles of a causal mask grow, and each new buffer would be faulted in again.
            roomy = size if flat is None else max(size, 2 * flat.numel())
            flat = self._flat[name] = torch.empty(roomy, dtype=self._dtype, device=self._device)
        return flat[:size].view(shape)
