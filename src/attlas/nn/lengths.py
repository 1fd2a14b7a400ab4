"""Valid lengths: how many of the first keys are real, for each sequence or for each query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attlas._compat import cached_property
from attlas.errors import DtypeError, ShapeError
from attlas.masks import BlockState
from attlas.masks.runs import RunPerRow
from attlas.tiles import Tile


class ValidLengths(RunPerRow):
    """Each query sees the first keys of its sequence: key j where ``j < length``.

    Parameters
    ----------
    where : str
        The layer, for error texts.
    lengths : Tensor of int, shape (batch,) or (batch, m)
        Number of real keys of each sequence, or of each query. A length above n means all keys.
    """

    def __init__(self, where: str, lengths: Tensor) -> None:
        if not isinstance(lengths, Tensor):
            lengths = torch.as_tensor(lengths)
        if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
            rule, given = "valid_lens must be whole numbers.", {"valid_lens": lengths}
            fix = "count the real keys: valid_lens = real.sum(-1); or pass mask=real[:, None, None, :]."
            raise DtypeError(f"{where}()", rule, given, found=str(lengths.dtype).removeprefix("torch."), fix=fix)
        if lengths.ndim not in (1, 2):
            rule = "valid_lens must have the shape (batch,) or (batch, m)."
            fix = "give one length for each sequence: torch.tensor([7, 5])."
            raise ShapeError(f"{where}()", rule, {"valid_lens": lengths}, found=f"{lengths.ndim} axes", fix=fix)
        self.where = where
        self.lengths = lengths if lengths.ndim == 2 else lengths.unsqueeze(1)
        stop = self.lengths.long().unsqueeze(1)
        super().__init__(torch.zeros_like(stop), stop)

    def coverage(self, at: Tile) -> BlockState:
        if at.column_index is not None or not len(at.columns):
            return BlockState.PARTIAL
        least, most = self._ends
        if at.columns.start >= most:
            return BlockState.EMPTY
        return BlockState.FULL if at.columns.stop <= least else BlockState.PARTIAL

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """Least and largest length; read once, since a GPU has to be waited for."""
        if not self.lengths.numel():
            return 0, 0
        least, most = torch.aminmax(self.lengths)
        return int(least), int(most)

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        size = math.prod(batch)
        if self.lengths.shape[0] == size and self.lengths.shape[1] in (1, m):
            return
        rule = "valid_lens must hold one length for each sequence, or one for each query."
        given = {"valid_lens": self.lengths, "matrix (batch, heads, m, n)": f"{(size, heads, m, n)}"}
        found = f"shape {tuple(self.lengths.shape)}, batch = {size}, m = {m}"
        fix = f"give {size} lengths, or a tensor of shape ({size}, {m})."
        raise ShapeError(f"{self.where}()", rule, given, found=found, fix=fix)

    def size(self) -> tuple[int | None, int | None]:
        return None, self._ends[1]

    def name(self) -> str:
        return f"valid_lens {tuple(self.lengths.shape)}"
