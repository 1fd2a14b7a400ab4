"""Statistics from the results of the kernels, several in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backend import MISSING
from attlas.engine.native import request
from attlas.engine.problem import Problem
from attlas.engine.statistic import Blocks, Statistic

__all__ = ["Read", "fold", "fused"]

#: Finds what is wanted of a matrix (`request.compute`), given values and the log-sum-exp if it is known; None where the
#: tokens do not allow it.
Read = Callable[[Mapping[str, Any], Tensor | None, Tensor | None], dict[str, Tensor] | None]

_PICTURES = ("picture_sum", "picture_max")


def fused(problem: Problem, statistics: Sequence[Statistic]) -> list[Mapping[str, Any] | None]:
    """Return what each statistic wants of the whole matrix; None for one that must see the tiles."""
    asked: list[Mapping[str, Any] | None] = []
    levels: object = None
    pooled = False
    for statistic in statistics:
        wants = statistic.outputs(problem) if _speaks_for_itself(statistic) else None
        if wants is not None and "coverage" in wants:
            if levels not in (None, wants["coverage"]):
                wants = None  # one set of levels in one pass
            else:
                levels = wants["coverage"]
        if wants is not None and "out" in wants:
            # One set of values in one pass; the kernels norm the rows of a window over its own keys.
            wants, pooled = (None if pooled or problem.partial else wants), True
        asked.append(wants)
    return asked


def fold(
    problem: Problem,
    read: Read,
    statistics: Sequence[Statistic],
    asked: Sequence[Mapping[str, Any] | None],
    lse: Tensor | None,
) -> tuple[list[Any], Tensor] | None:
    """Compute the statistics that want numbers of the whole matrix; None where the tokens are not finite.

    Returns
    -------
    results : list
        One for each statistic, `MISSING` for those that must see the tiles.
    lse : Tensor, shape (batch, heads, m)
        Log-sum-exp of each row.
    """
    wanted = _together([wants for wants in asked if wants is not None], problem.shape[2:])
    v = wanted.pop("out", None)
    if lse is None:
        wanted["lse"] = True
    found = read(wanted, v, lse)
    if found is None:
        return None
    if lse is None:
        lse = found["lse"]
    results = [
        MISSING if wants is None else statistic.from_outputs(_own(found, wants, wanted), problem)
        for statistic, wants in zip(statistics, asked, strict=True)
    ]
    return results, lse


_STEPS = ("start", "step", "finish", "of", "merge")


def _speaks_for_itself(statistic: Statistic) -> bool:
    """Return whether what a statistic wants was written for what it computes, and not for a class that it changes.

    A class that says what its subclasses want, and leaves `step` to them, speaks for all of them.
    """
    own = type(statistic)
    owner = next(kind for kind in own.__mro__ if "outputs" in vars(kind))
    step = getattr(owner, "step", None)
    if step is None or getattr(step, "__isabstractmethod__", False):
        return True
    return all(getattr(own, name, None) is getattr(owner, name, None) for name in _STEPS)


def _together(asked: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Join what several statistics want: the largest k, and pictures of blocks that all can be made of.

    Blocks cover the whole matrix, as the kernels take it, also where every statistic looks at a window of it.
    """
    wanted: dict[str, Any] = {}
    for wants in asked:
        for name, value in wants.items():
            wanted[name] = max(wanted.get(name, 0), value) if name == "largest" else value
    blocks = [wants[name] for wants in asked for name in _PICTURES if name in wants]
    if blocks:
        rows, columns = (
            torch.cat([*edges, torch.tensor([0, size], device="cpu")]).unique()
            for edges, size in zip(zip(*blocks, strict=True), sizes, strict=True)
        )
        wanted |= {name: request.Picture(rows, columns) for name in _PICTURES if name in wanted}
    return wanted


def _own(found: Mapping[str, Tensor], wants: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what one statistic asked for, in the form that it asked for."""
    own = dict(found)
    if "largest" in wants:
        own["top_values"] = found["top_values"][..., : wants["largest"]]
        own["top_keys"] = found["top_keys"][..., : wants["largest"]].clone()
    for name in _PICTURES:
        if name in wants:
            own[name] = _pooled(found[name], wanted[name], wants[name], name == "picture_max")
    return own


def _pooled(table: Tensor, fine: Blocks, coarse: Blocks, largest: bool) -> Tensor:
    """Pool blocks into larger ones whose edges are among theirs; what lies outside of those is left out."""
    for axis, have, want in ((-2, fine[0], coarse[0]), (-1, fine[1], coarse[1])):
        if torch.equal(have, want):
            continue
        places = torch.searchsorted(have, want)
        inside = table.narrow(axis, int(places[0]), int(places[-1] - places[0]))
        parts = inside.split(places.diff().tolist(), dim=axis)
        table = torch.stack([part.amax(axis) if largest else part.sum(axis) for part in parts], dim=axis)
    return table
