"""Different masks for different heads of one matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.errors import DtypeError, OutOfRangeError, counted, kind
from attlas.foundation.checks import heads_of_three_axes, is_integer
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile
from attlas.masks.base import BlockState, Combined, Mask, _boolean_operand
from attlas.masks.local import Window

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
        fix = "name each head: Heads({0: Window(64, 0), 1: Window(64, 0)}, default=Causal())"
        pairs = [*masks.items()] if isinstance(masks, Mapping) else [(masks, None)]
        for head, mask in (*pairs, (0, default)):
            counts = is_integer(head) and head >= 0
            if not counts or not isinstance(mask, Mask | None):
                rule = "masks must map numbers of query heads, from 0, to masks of attlas."
                found = f"head {head} has {kind(mask)}"
                found = found if counts else f"head = {head if type(head) is int else kind(head)}"
                raise DtypeError(rule, found, fix, where="Heads()")
        every = Window(None, None)  # hides nothing
        *own, self.default = (
            every if m is None else _boolean_operand(m, "Heads()") for m in (*masks.values(), default)
        )
        self.heads, self.masks = tuple(masks), tuple(own)

    def to_dict(self) -> dict[str, Any]:
        return dict(zip(map(str, self.heads), self.masks, strict=True)) | {"default": self.default}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Heads:
        return cls({int(head): mask for head, mask in settings.items() if head != "default"}, settings["default"])

    def split(self, at: Tile) -> list[tuple[list[int], Mask, Tile]]:
        """Return each mask of a tile, the places of its heads in the tile, and the part of the tile with them."""
        of_heads = dict(zip(self.heads, self.masks, strict=True))
        owners = [of_heads.get(head, self.default) for head in at.head_ids.tolist()]
        # By the identity of the mask: equal masks of two heads may differ in a tensor that the user changes.
        places: dict[int, list[int]] = {id(owner): [] for owner in owners or [self.default]}
        for place, owner in enumerate(owners):
            places[id(owner)].append(place)
        known = {id(owner): owner for owner in (*owners, self.default)}
        return [
            (p, known[i], replace(at, heads=range(len(p)), head_ids=at.head_ids[_in_a_row(p) or p]))
            for i, p in places.items()
        ]

    def allows(self, at: Tile) -> Tensor:
        if torch.compiler.is_compiling():
            return self._allowed_while_compiling(at)
        return _join_heads([(places, mask.allows(part)) for places, mask, part in self.split(at)], at.shape[1:])

    def _allowed_while_compiling(self, at: Tile) -> Tensor:
        """Return the allowed pairs while torch compiles, when head numbers cannot be read.

        Each mask is asked for all heads, and `torch.where` chooses.
        """
        allowed = self.default.allows(at)
        for head, mask in zip(self.heads, self.masks, strict=True):
            own = (at.head_ids == head).view(-1, 1, 1).to(allowed.device)
            allowed = torch.where(own, mask.allows(at), allowed)
        return allowed

    def coverage(self, at: Tile) -> BlockState:
        # One state if all masks of the tile agree.
        states = {mask.coverage(part) for _, mask, part in self.split(at)}
        return states.pop() if len(states) == 1 else BlockState.PARTIAL

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        # None where the mask of a head of the tile has no such runs.
        firsts, stops = [], []
        for places, mask, part in self.split(at):
            runs = mask.allowed_runs(part)
            if runs is None:
                return None
            firsts.append((places, runs[0]))
            stops.append((places, runs[1]))
        return _join_heads(firsts, at.shape[1:3]), _join_heads(stops, at.shape[1:3])

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        # Raise an error where the mask does not fit a matrix of these sizes.
        super().check(batch, heads, m, n)
        if max(self.heads, default=0) >= max(heads, 1):
            rule = "Heads() must name heads that the matrix has."
            found = f"head {max(self.heads)}, {counted(heads, 'head')}"
            fix = f"use 0 to {heads - 1}." if heads > 1 else "use 0."
            fix = (heads_of_three_axes(math.prod(batch), batch) if heads == 1 else "") or fix
            raise OutOfRangeError(rule, found, fix, mask=self.name(), where="attend()")

    def name(self) -> str:
        shown = ", ".join(f"{head}: {mask.name()}" for head, mask in zip(self.heads, self.masks, strict=True))
        return f"Heads({{{shown}}}, default={self.default.name()})"

    def __repr__(self) -> str:
        return "\n".join([self.name(), *map(repr, self.parts)])


def _in_a_row(places: list[int]) -> slice | None:
    """Return ascending indices as a slice where they are consecutive, else None."""
    first, stop = (places[0], places[-1] + 1) if places else (0, 0)
    return slice(first, stop) if stop - first == len(places) else None


def _join_heads(parts: Sequence[tuple[list[int], Tensor]], sizes: tuple[int, ...]) -> Tensor:
    """Join tensors of some heads into one of all heads of a tile.

    Parameters
    ----------
    parts : sequence of (list of int, Tensor)
        Places of heads, and a tensor that broadcasts to (batches, these heads, ...).
    sizes : tuple of int
        Sizes without the batch: heads, ...

    Returns
    -------
    Tensor, shape (batches or 1, heads, ...), or the tensor itself where there is one part
    """
    if len(parts) == 1:
        return parts[0][1]
    batch = max(t.shape[0] if t.ndim > len(sizes) else 1 for _, t in parts)
    merged = parts[0][1].new_empty(batch, *sizes)
    for places, t in parts:
        where = _in_a_row(places)
        merged[:, to_device(torch.tensor(places, device="cpu"), t.device) if where is None else where] = t
    return merged
