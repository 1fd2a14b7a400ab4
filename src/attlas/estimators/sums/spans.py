"""A mask of one run of keys for each query, which the kernels skip what lies outside of."""

from __future__ import annotations

from torch import Tensor

from attlas.masks import Mask
from attlas.tiles import Tile

__all__ = ["Spans"]


class Spans(Mask):
    """Query i sees the keys ``first_i <= j < stop_i``.

    Parameters
    ----------
    first, stop : Tensor of int64, shape (m,) or (batch, m)
        A query with ``first >= stop`` sees no key.
    """

    def __init__(self, first: Tensor, stop: Tensor) -> None:
        self.first, self.stop = first, stop

    def allows(self, at: Tile) -> Tensor:
        first, stop = (self._rows(t, at).unsqueeze(-1) for t in (self.first, self.stop))
        return (at.j >= first) & (at.j < stop)

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        return self._rows(self.first, at), self._rows(self.stop, at)

    def _rows(self, t: Tensor, at: Tile) -> Tensor:
        """Return the ends of a tile's rows, shape (batch or 1, 1, rows)."""
        t = t.to(at.i.device)[..., at.i.reshape(-1)]
        return t.view(1, 1, -1) if t.ndim == 1 else t[at.b.reshape(-1)].unsqueeze(1)
