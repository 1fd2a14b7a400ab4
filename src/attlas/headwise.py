"""What differs between the heads of a tile: each group of heads is asked apart, and the answers are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from attlas.errors import DtypeError, kind
from attlas.tiles import Tile

T = TypeVar("T")


def head_mapping(
    where: str, name: str, given: Mapping[int, T], fits: Callable[[object], bool], fix: str
) -> dict[int, T]:
    """Return a mapping of heads to something as a dict, or raise a DtypeError.

    Parameters
    ----------
    where, name : str
        The public function and its argument, for the error text.
    given : mapping of int to T
        Numbers of query heads, from 0.
    fits : callable
        Whether a value is of the right type.
    fix : str
        A right call.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else [(given, None)]
    for head, value in pairs:
        counts = isinstance(head, int) and not isinstance(head, bool) and head >= 0
        if not counts or not fits(value):
            rule = f"{name} must map numbers of query heads, from 0, to {name} of attlas."
            found = (
                f"head {head} has {kind(value)}" if counts else f"head = {head if type(head) is int else kind(head)}"
            )
            raise DtypeError(where, rule, found=found, fix=fix)
    return dict(given)


def groups_of_heads(at: Tile, of_heads: Mapping[int, T], default: T) -> list[tuple[list[int], T, Tile]]:
    """Return which heads of a tile share one object, by their places in the tile, and the tile of these heads."""
    owners = [of_heads.get(head, default) for head in at.head_ids.tolist()]
    places: dict[int, list[int]] = {id(owner): [] for owner in owners or [default]}
    for place, owner in enumerate(owners):
        places[id(owner)].append(place)
    known = {id(owner): owner for owner in (*owners, default)}
    return [(p, known[i], replace(at, heads=range(len(p)), head_ids=at.head_ids[p])) for i, p in places.items()]


def merged_heads(parts: Sequence[tuple[list[int], Tensor]], sizes: tuple[int, ...]) -> Tensor:
    """Return what holds for all heads of a tile, from what holds for some of them.

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
        merged[:, places] = t
    return merged
