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
    first, stop : Tensor of int64, shape (m,)
        A query with ``first >= stop`` sees no key.
    """

    def __init__(self, first: Tensor, stop: Tensor) -> None:
        self.first, self.stop = first, stop

    def allows(self, at: Tile) -> Tensor:
        first, stop = (t.to(at.i.device)[at.i] for t in (self.first, self.stop))
        return (at.j >= first) & (at.j < stop)

    def interval(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        return tuple(t.to(at.i.device)[at.i.reshape(-1)].view(1, 1, -1) for t in (self.first, self.stop))  # type: ignore[return-value]  # two
