"""The small drawing of a mask that its repr shows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attlas.foundation.tiles import Tile

_MOST_CELLS = 16  # cells of a drawing, at most, along each axis
_MOST_SAMPLES = 8  # queries and keys looked at in one cell of a drawing, at most, along each axis
_ALL_ALLOWED, _PART_ALLOWED, _NONE_ALLOWED = "■", "▨", "·"


class Drawable(Protocol):
    """What a drawing asks a `Mask`."""

    def allows(self, at: Tile) -> Tensor:
        """Return which pairs of a tile may attend."""

    def size(self) -> tuple[int | None, int | None]:
        """Return the number of queries and of keys, None where any fits."""

    def reach(self) -> int:
        """Return the length of the pattern in tokens."""


def picture(mask: Drawable, m: int | None = None, n: int | None = None) -> str:
    """Draw a mask in characters: queries go down, keys go across.

    Parameters
    ----------
    mask : Mask
        The mask that is drawn, for batch 0 and head 0.
    m, n : int, optional
        Number of queries and of keys. The default is the size that the mask is made for, or else a size
        at which its pattern can be seen.

    Returns
    -------
    str
        One line a query, or a pooled one for each group of queries, and a line that says the size.
        ``■`` all allowed, ``▨`` some, ``·`` none.

    Notes
    -----
    A drawing has at most 16 × 16 cells, and each is judged by at most 8 × 8 of its pairs, its corners
    among them: a mask of any size is drawn in a millisecond, and the drawing is exact up to 128 × 128.
    A mask that cannot be drawn says so in words; this function does not raise.

    Examples
    --------
    >>> from attlas.masks import Causal
    >>> print(picture(Causal(), m=3, n=6))
      ■ ■ ■ ■ · ·
      ■ ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■ ■
      3 queries × 6 keys
    """
    m, n = _drawn_size(mask, m, n)
    caption = f"  {m:,} {'query' if m == 1 else 'queries'} × {n:,} {'key' if n == 1 else 'keys'}"
    if m < 1 or n < 1:
        return caption
    rows, columns = _SampledAxis(m), _SampledAxis(n)
    try:
        allowed = _sampled_cells(mask, rows, columns)
    except Exception as error:  # noqa: BLE001  # a repr must not raise, whatever a mask of the user's does
        reason = (str(error).splitlines() or [""])[0]
        return f"  (no picture at{caption[1:]}: {type(error).__name__}: {reason})"
    full, some = allowed.all(3).all(1).tolist(), allowed.any(3).any(1).tolist()
    lines = [
        "  "
        + " ".join(
            _ALL_ALLOWED if whole else _PART_ALLOWED if part else _NONE_ALLOWED
            for whole, part in zip(*line, strict=True)
        )
        for line in zip(full, some, strict=True)
    ]
    if rows.step > 1 or columns.step > 1:
        caption += f", a cell is {rows.step:,} × {columns.step:,}"
    if any(_PART_ALLOWED in line for line in lines):
        caption += f", {_PART_ALLOWED} in part"
    return "\n".join([*lines, caption])


class _SampledAxis:
    """The queries, or the keys, that are looked at: `samples` places in each of `cells` cells."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.step = -(-size // _MOST_CELLS)
        self.cells = -(-size // self.step)
        self.samples = min(self.step, _MOST_SAMPLES)
        first = torch.arange(self.cells, device="cpu").view(-1, 1) * self.step
        last = (first + self.step - 1).clamp(max=size - 1)
        # Integer arithmetic keeps both ends of each cell, and sizes above 2**24 exact.
        share = torch.arange(self.samples, device="cpu").view(1, -1)
        self.places = (first + (last - first) * share // max(self.samples - 1, 1)).flatten()


def _sampled_cells(mask: Drawable, rows: _SampledAxis, columns: _SampledAxis) -> Tensor:
    """Return whether the cells that are looked at are allowed, shape (cells, samples, cells, samples)."""
    one = torch.zeros(1, dtype=torch.int64, device="cpu")
    at = Tile(
        batches=range(1),
        heads=range(1),
        rows=range(len(rows.places)),
        columns=range(len(columns.places)),
        m=rows.size,
        n=columns.size,
        batch_ids=one,
        head_ids=one,
        device=torch.device("cpu"),
        row_index=rows.places,
        column_index=columns.places,
    )
    allowed = mask.allows(at).broadcast_to(at.shape)
    return allowed.cpu().view(rows.cells, rows.samples, columns.cells, columns.samples)


def _drawn_size(mask: Drawable, m: int | None, n: int | None) -> tuple[int, int]:
    """Return how many queries and keys are drawn: as given, else as the mask has, else enough for its pattern."""
    own_m, own_n = mask.size()
    n = own_n if n is None else n
    m = own_m if m is None else m
    reach = mask.reach()
    free = 8 if reach < 4 else _MOST_CELLS
    while reach > free // 2 and free >= _MOST_CELLS:  # the pattern takes half of the drawing, so that its shape shows
        free *= 2
    if n is None:
        n = free if m is None else m
    return (n if m is None else m), n
