"""Masks of distance: what a query may see depends on how far away the key is."""

from __future__ import annotations

import copy
import operator

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, public
from attlas.foundation.tiles import Tile
from attlas.masks.base import BlockState, Mask, edges

__all__ = ["Causal", "Dilated", "Window"]


class _DistanceMask(Mask):
    """Masks of the distance between a key and the aligned place of a query.

    Parameters
    ----------
    left, right : int or None
        How many keys before and after its own place a query sees; None for no limit.
    offset : int or None
        Which key query 0 is aligned with. None stands for ``n - m``, which aligns the last query with the last key.
    """

    stored: tuple[str, ...] = ("offset",)

    @public()
    def __init__(self, left: int | None, right: int | None, offset: int | None) -> None:
        self.left = None if left is None else _checked_reach("left", left)
        self.right = None if right is None else _checked_reach("right", right)
        self.offset = None if offset is None else _whole_number("offset", offset)

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    def first_query(self, m: int, n: int) -> int:
        return n - m if self.offset is None else self.offset

    def translate(self, rows: range, columns: range, m: int, n: int) -> Mask:
        # The same pattern; the new offset aligns the window's query 0 with the same key as before.
        moved = copy.copy(self)
        moved.offset = self.first_query(m, n) + rows.start - columns.start
        return moved

    def shift(self, at: Tile) -> int:
        """Return the index of the key that query 0 is aligned with: query i is aligned with key ``i + shift``."""
        return self.first_query(at.m, at.n)

    def allows(self, at: Tile) -> Tensor:
        # True where the query may see the key, broadcastable to the tile.
        place = at.i + self.shift(at)  # the key that each query is aligned with
        left, right = self.left, self.right
        distances = self.distances(at)
        if distances is not None:  # a limit that no pair of the tile comes near need not be compared
            left = None if left is None or distances[0] >= -left else left
            right = None if right is None or distances[1] <= right else right
        near = None if left is None else at.j >= place - left
        if right is None:
            return torch.ones(1, 1, dtype=torch.bool, device=at.device) if near is None else near
        return at.j <= place + right if near is None else near & (at.j <= place + right)

    def distances(self, at: Tile) -> tuple[int, int] | None:
        """Return the least and the largest distance from query to key in a tile; None where they cannot be read.

        A distance is negative where the key stands before the query. A tile that is no list of places has all between.
        """
        ends = edges(at)
        if ends is None:
            return None
        first_row, last_row, first_column, last_column = ends
        shift = self.shift(at)
        return first_column - last_row - shift, last_column - first_row - shift

    def coverage(self, at: Tile) -> BlockState:
        # Compares the least and largest distance of the tile with the limits.
        distances = self.distances(at)
        if distances is None:
            return BlockState.PARTIAL
        low, high = distances
        if (self.left is not None and high < -self.left) or (self.right is not None and low > self.right):
            return BlockState.EMPTY
        if (self.left is None or low >= -self.left) and (self.right is None or high <= self.right):
            return BlockState.FULL
        return BlockState.PARTIAL

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        # Ends may lie outside 0 to n.
        place = (at.i + self.shift(at)).view(1, 1, -1)
        first = torch.zeros_like(place) if self.left is None else place - self.left
        return first, torch.full_like(place, at.n) if self.right is None else place + self.right + 1

    def reach(self) -> int:
        return max(self.left or 0, self.right or 0)

    def name(self) -> str:
        shown = [str(getattr(self, limit)) for limit in self.stored if limit != "offset"]
        shown += [] if self.offset is None else [f"offset={self.offset}"]
        return f"{type(self).__name__}({', '.join(shown)})"


class Causal(_DistanceMask):
    """Each query sees the keys up to its own place, and no later one.

    Parameters
    ----------
    offset : int, optional
        How far query 0 stands to the right of key 0. The default aligns the last query with the last key,
        which is ``n - m``: queries that follow a cache of keys. 0 aligns the first with the first.

    Raises
    ------
    DtypeError
        If `offset` is not a whole number.

    See Also
    --------
    Window : a bounded look back.
    Prefix : ``Prefix(length) | Causal()`` is the mask of a prefix language model.

    Notes
    -----
    Key j is allowed where ``j <= i + offset``. With fewer queries than keys::

        Causal()     m = 3, n = 6         Causal(offset=0)     m = 3, n = 6
          ■ ■ ■ ■ · ·                       ■ · · · · ·
          ■ ■ ■ ■ ■ ·                       ■ ■ · · · ·
          ■ ■ ■ ■ ■ ■                       ■ ■ ■ · · ·

    The second is what ``is_causal=True`` of torch's `scaled_dot_product_attention` means; the two agree
    for m = n. With more queries than keys (m > n), the first m - n queries of ``Causal()`` see no key:
    their weights and their output are 0. The state of a tile takes constant time and is exact, so the upper half of the
    matrix costs nothing.

    Examples
    --------
    >>> import attlas
    >>> print(attlas.Causal())
    Causal()
      ■ · · · · · · ·
      ■ ■ · · · · · ·
      ■ ■ ■ · · · · ·
      ■ ■ ■ ■ · · · ·
      ■ ■ ■ ■ ■ · · ·
      ■ ■ ■ ■ ■ ■ · ·
      ■ ■ ■ ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■ ■ ■ ■
      8 queries × 8 keys
    """

    def __init__(self, offset: int | None = None) -> None:
        super().__init__(None, 0, offset)


class Window(_DistanceMask):
    """Each query sees the keys near its own place.

    Parameters
    ----------
    left : int or None
        How many keys before its own place a query sees; None for no limit.
    right : int or None
        How many keys after its own place a query sees; None for no limit.
    offset : int, optional
        How far query 0 stands to the right of key 0. The default aligns the last query with the last key,
        0 the first with the first, as in `Causal`.

    Raises
    ------
    DtypeError
        If an argument is not a whole number.
    ShapeError
        If `left` or `right` is negative.

    See Also
    --------
    Dilated : every step-th key of a window.

    Notes
    -----
    Key j is allowed where ``p - left <= j <= p + right`` with ``p = i + offset``, the query's own key
    included: the sliding window of size W of Mistral or Gemma [1]_ is ``Window(W - 1, 0)``. With fewer
    queries than keys::

        Window(2, 1)     m = 3, n = 6
          · ■ ■ ■ ■ ·
          · · ■ ■ ■ ■
          · · · ■ ■ ■

    The state of a tile takes constant time and is exact: m queries cost m times the window, not m · n.

    References
    ----------
    .. [1] Beltagy, Peters and Cohan, "Longformer: the long-document transformer", 2020, section 3.1.

    Examples
    --------
    >>> import attlas
    >>> print(attlas.Window(2, 0))
    Window(2, 0)
      ■ · · · · · · ·
      ■ ■ · · · · · ·
      ■ ■ ■ · · · · ·
      · ■ ■ ■ · · · ·
      · · ■ ■ ■ · · ·
      · · · ■ ■ ■ · ·
      · · · · ■ ■ ■ ·
      · · · · · ■ ■ ■
      8 queries × 8 keys
    """

    stored = ("left", "right", "offset")

    def __init__(self, left: int | None, right: int | None, offset: int | None = None) -> None:
        super().__init__(left, right, offset)


class Dilated(_DistanceMask):
    """Each query sees every step-th key of a window, counted from its own place.

    Parameters
    ----------
    left : int or None
        How far before its own place a query sees, in keys and not in steps; None for no limit.
    right : int or None
        How far after its own place a query sees; None for no limit.
    step : int
        Distance between the keys that are seen, at least 1; 1 gives `Window`.
    offset : int, optional
        How far query 0 stands to the right of key 0. The default aligns the last query with the last key,
        0 the first with the first, as in `Causal`.

    Raises
    ------
    DtypeError
        If an argument is not a whole number.
    ShapeError
        If `left` or `right` is negative, or `step` is below 1.

    See Also
    --------
    Window : every key of the window.

    Notes
    -----
    Key j is allowed where ``p - left <= j <= p + right`` and ``j - p`` is a multiple of `step`, with
    ``p = i + offset``. A dilated window of w keys on each side [1]_ is ``Dilated(w * step, w * step, step)``;
    ``Dilated(None, 0, step)`` is the strided pattern of sparse transformers [2]_. With fewer queries than
    keys::

        Dilated(4, 0, 2)     m = 3, n = 6
          · ■ · ■ · ·
          ■ · ■ · ■ ·
          · ■ · ■ · ■

    The state of a block takes constant time and is exact. Tiles inside the window are computed whole, so a step saves
    no time.

    References
    ----------
    .. [1] Beltagy, Peters and Cohan, "Longformer: the long-document transformer", 2020, section 3.1.
    .. [2] Child et al., "Generating long sequences with sparse transformers", 2019, section 4.2.

    Examples
    --------
    >>> import attlas
    >>> print(attlas.Dilated(None, 0, 3))
    Dilated(None, 0, 3)
      ■ · · · · · · ·
      · ■ · · · · · ·
      · · ■ · · · · ·
      ■ · · ■ · · · ·
      · ■ · · ■ · · ·
      · · ■ · · ■ · ·
      ■ · · ■ · · ■ ·
      · ■ · · ■ · · ■
      8 queries × 8 keys
    """

    stored = ("left", "right", "step", "offset")

    @public("Dilated()")
    def __init__(self, left: int | None, right: int | None, step: int, offset: int | None = None) -> None:
        super().__init__(left, right, offset)
        self.step = _whole_number("step", step)
        if self.step < 1:
            fix = "use step=1 for every key of the window."
            raise ShapeError("step must be at least 1.", f"step = {self.step}", fix)

    def allows(self, at: Tile) -> Tensor:
        # Remainders of places, not of pairs: a division for each row and column instead of each cell.
        on_grid = at.j % self.step == (at.i + self.shift(at)) % self.step
        return on_grid & super().allows(at)

    def coverage(self, at: Tile) -> BlockState:
        # Whether the tile is allowed whole (FULL), nowhere (EMPTY), or in part, or that is not known (PARTIAL).
        distances = self.distances(at)
        if distances is None:
            return BlockState.PARTIAL
        low, high = distances
        inside = super().coverage(at)  # what the window alone, with a step of 1, allows of the tile
        if inside is BlockState.FULL and (self.step == 1 or (low == high and low % self.step == 0)):
            return BlockState.FULL
        low = low if self.left is None else max(low, -self.left)
        high = high if self.right is None else min(high, self.right)
        # The first multiple of step from low on is beyond high: no cell of the tile is on the grid.
        return BlockState.EMPTY if low + -low % self.step > high else BlockState.PARTIAL

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        return super().allowed_runs(at) if self.step == 1 else None

    def reach(self) -> int:
        return max(super().reach(), self.step)  # a step has to be seen even where the window has no limit


def _whole_number(label: str, value: int) -> int:
    """Return a value as an int, or raise a DtypeError where it is no whole number."""
    try:
        return operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]  # None raises
    except TypeError:
        rule = f"{label} must be a whole number."
        fix = f"leave {label} out, or give an int." if label == "offset" else f"give an int: {label}=4."
        raise DtypeError(rule, f"{label} = {value!r} ({type(value).__name__})", fix) from None


def _checked_reach(label: str, value: int) -> int:
    """Return a limit `left` or `right` as an int, or raise a ShapeError where it is negative."""
    number = _whole_number(label, value)
    if number >= 0:
        return number
    fix = f"use {label}={-number}: distances to both sides are counted from the query, without a sign."
    raise ShapeError(f"{label} must be 0 or more, or None for no limit.", f"{label} = {number}", fix)
