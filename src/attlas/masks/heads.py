"""Different masks for different heads of one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from attlas.errors import DtypeError, OutOfRangeError, kind
from attlas.masks.base import BlockState, Combined, Mask, _boolean
from attlas.masks.local import Window
from attlas.tiles import Tile

__all__ = ["Heads"]


class Heads(Combined):
    """Each head obeys a mask of its own.

    Parameters
    ----------
    masks : mapping of int to Mask or None
        Mask of each head, by the number of the query head in the whole matrix, from 0; None hides nothing.
    default : Mask, optional
        Mask of all other heads; without one they see every key.

    Raises
    ------
    DtypeError
        If a head is no whole number of 0 or more, or a mask is no mask of attlas.
    ShapeError
        If a mask is additive.
    OutOfRangeError
        At `attend`, if the matrix has no such head.

    See Also
    --------
    Documents, Padding : masks that differ between the sequences of a batch.

    Notes
    -----
    Pair (i, j) of head h is allowed where ``masks[h]`` allows it. Heads keep their numbers in a part of the matrix:
    ``A[:, [3]]`` obeys ``masks[3]``. Heads with one and the same mask object are asked together. A tile is skipped
    where no head of it may attend, and the compiled kernels take runs of keys per head, so a mask of windows of
    different sizes costs as much as its windows.

    Examples
    --------
    >>> from attlas.masks import Causal, Heads, Window
    >>> print(Heads({2: Window(1, 0)}, default=Causal()))
    Heads({2: Window(1, 0)}, default=Causal())
    Window(1, 0)
      ■ · · · · · · ·
      ■ ■ · · · · · ·
      · ■ ■ · · · · ·
      · · ■ ■ · · · ·
      · · · ■ ■ · · ·
      · · · · ■ ■ · ·
      · · · · · ■ ■ ·
      · · · · · · ■ ■
      8 queries × 8 keys
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

    def __init__(self, masks: Mapping[int, Mask | None], default: Mask | None = None) -> None:
        pairs = [*masks.items(), (0, default)] if isinstance(masks, Mapping) else [(masks, default)]
        for head, mask in pairs:
            counts = isinstance(head, int) and not isinstance(head, bool) and head >= 0
            if not counts or not isinstance(mask, Mask | None):
                rule = "masks must map numbers of query heads, from 0, to masks of attlas."
                found = f"mask = {kind(mask)}" if counts else f"head = {head if isinstance(head, int) else kind(head)}"
                fix = "name each head: Heads({0: Window(64, 0), 1: Window(64, 0)}, default=Causal())"
                raise DtypeError("Heads()", rule, found=found, fix=fix)
        every = Window(None, None)
        *own, self.default = (every if mask is None else _boolean(mask, "Heads()") for _, mask in pairs)
        self.heads, self.masks = tuple(masks), tuple(own)

    def to_dict(self) -> dict[str, Any]:
        return dict(zip(map(str, self.heads), self.masks, strict=True)) | {"default": self.default}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Heads:
        return cls({int(head): mask for head, mask in settings.items() if head != "default"}, settings["default"])

    def split(self, at: Tile) -> list[tuple[list[int], Mask, Tile]]:
        """Return which heads of a tile have which mask, and the tile of these heads."""
        own = dict(zip(self.heads, self.masks, strict=True))
        owners = [own.get(head, self.default) for head in at.head_ids.tolist()]
        places = {mask: [i for i, owner in enumerate(owners) if owner is mask] for mask in owners or [self.default]}
        return [(p, mask, replace(at, heads=range(len(p)), head_ids=at.head_ids[p])) for mask, p in places.items()]

    def allows(self, at: Tile) -> Tensor:
        return _merged([(places, mask.allows(part)) for places, mask, part in self.split(at)], at.shape[1:])

    def coverage(self, at: Tile) -> BlockState:
        states = {mask.coverage(part) for _, mask, part in self.split(at)}
        return states.pop() if len(states) == 1 else BlockState.PARTIAL

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        found = [(places, mask.allowed_runs(part)) for places, mask, part in self.split(at)]
        known = [(places, runs) for places, runs in found if runs is not None]
        if len(known) < len(found):
            return None
        first, stop = (_merged([(places, runs[end]) for places, runs in known], at.shape[1:3]) for end in (0, 1))
        return first, stop

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        super().check(batch, heads, m, n)
        if max(self.heads, default=0) >= max(heads, 1):
            rule = "Heads() must name heads that the matrix has."
            found = f"head {max(self.heads)}, {heads} heads"
            raise OutOfRangeError("attend()", rule, {"mask": self.name()}, found=found, fix=f"use 0 to {heads - 1}.")

    def name(self) -> str:
        heads = ", ".join(f"{head}: {mask.name()}" for head, mask in zip(self.heads, self.masks, strict=True))
        return f"Heads({{{heads}}}, default={self.default.name()})"

    def __repr__(self) -> str:
        return "\n".join([self.name(), *map(repr, self.parts)])


def _merged(parts: list[tuple[list[int], Tensor]], sizes: tuple[int, ...]) -> Tensor:
    """Return what holds for all heads, shape (batch or 1, heads, ...), from what holds for some of them."""
    if len(parts) == 1:
        return parts[0][1]
    batch = max(t.shape[0] if t.ndim > len(sizes) else 1 for _, t in parts)
    merged = parts[0][1].new_empty(batch, *sizes)
    for places, t in parts:
        merged[:, places] = t
    return merged
