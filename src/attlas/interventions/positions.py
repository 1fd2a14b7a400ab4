"""Positions of a text that an argument of an intervention names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.errors import OutOfRangeError, ShapeError
from attlas.foundation.checks import is_integer
from attlas.masks.placed import OPEN_END, Positions

# A position, a span (slice, range or pair), or a list of positions.
Where: TypeAlias = "int | slice | range | tuple[int, int] | Sequence[int] | Tensor"


def positions_of(name: str, value: Where | None) -> Positions | None:
    """Return the positions that an argument names; None stands for all.

    Raises
    ------
    OutOfRangeError
        If a position is negative.
    ShapeError
        If it is no position, span or list of positions.
    """
    if value is None:
        return None
    runs = _runs_of_positions(value)
    if runs is None:
        rule = f"{name} must be a position, a span or a list of positions."
        fix = f"{name}=7, {name}=slice(3, 9), {name}=(3, 9) for the same span, or {name}=[3, 5, 8]"
        raise ShapeError(rule, f"{name} = {value!r}"[:80], fix)
    negative = min((end for run in runs for end in run), default=0)
    if negative < 0:
        rule = f"{name} must be positions in the text, counted from its first token."
        fix = "count from the first token: len(ids) - 1 is the last of a text of known length."
        raise OutOfRangeError(rule, f"position {negative}", fix)
    found: list[int] = []
    for start, stop in sorted(runs):
        if start >= stop:
            continue
        if found and start <= found[-1]:
            found[-1] = max(found[-1], stop)
        else:
            found += [start, stop]
    return Positions(tuple(found))


def _runs_of_positions(value: Any) -> list[tuple[int, int]] | None:
    """Return the runs (start, stop) of positions that an argument names; None where it names none that are valid."""
    if isinstance(value, slice) and value.step in (None, 1):
        value = (0 if value.start is None else value.start, OPEN_END if value.stop is None else value.stop)
        return [value] if all(map(is_integer, value)) else None
    if isinstance(value, range) and value.step == 1:
        return [(value.start, value.stop)]
    if isinstance(value, tuple):
        return [value] if len(value) == 2 and all(map(is_integer, value)) else None
    if isinstance(value, Tensor):
        if value.dtype is torch.bool and value.ndim == 1:
            value = value.nonzero().flatten()
        value = value.tolist() if value.ndim < 2 else None
    items = [value] if is_integer(value) else list(value) if isinstance(value, list | range) else None
    return [(item, item + 1) for item in items] if items is not None and all(map(is_integer, items)) else None
