"""Arguments of one kind in a call, found and replaced; few calls nest anything, and those of torch take long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from attlas.foundation.compat import tree_leaves, tree_map_only

T = TypeVar("T")

_HOLD_NOTHING = (Tensor, int, float, str, type(None), torch.dtype, torch.device)


def arguments_of(kind: type[T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[T]:
    """Return the arguments of a kind in their order, also those in lists, tuples and dicts."""
    leaves = (*args, *kwargs.values())
    found = leaves if _are_single(kind, leaves) else tree_leaves((args, kwargs))
    return [part for part in found if isinstance(part, kind)]


def with_arguments(
    kind: type[T], make: Callable[[T], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with what `make` gives for each of a kind, also in lists, tuples and dicts."""
    if not _are_single(kind, (*args, *kwargs.values())):
        return tree_map_only(kind, make, (args, kwargs))  # type: ignore[no-any-return]  # torch says nothing
    return (
        tuple(make(part) if isinstance(part, kind) else part for part in args),
        {name: make(part) if isinstance(part, kind) else part for name, part in kwargs.items()},
    )


def _are_single(kind: type[Any], parts: tuple[Any, ...]) -> bool:
    """Return whether no part can hold others."""
    return all(isinstance(part, (kind, _HOLD_NOTHING)) for part in parts)
