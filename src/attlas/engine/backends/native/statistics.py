"""Statistics from the results of the kernels, several in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backend import MISSING
from attlas.engine.backends.native import request
from attlas.engine.problem import Problem
from attlas.engine.statistic import Blocks, Statistic

#: Computes the requested outputs of a matrix (`request.compute`), with values and the log-sum-exp where given. Returns
#: None where the tokens are not finite.
Read = Callable[[Mapping[str, Any], Tensor | None, Tensor | None], dict[str, Tensor] | None]

_PICTURES = ("picture_sum", "picture_max")


def _requested_outputs(problem: Problem, statistics: Sequence[Statistic]) -> list[Mapping[str, Any] | None]:
    """Return the outputs that each statistic requests; None for one that must see the tiles."""
    requests: list[Mapping[str, Any] | None] = []
    levels: object = None
    # One set of values in one pass; the kernels normalize the rows of a window over its own keys.
    takes_values = not problem.partial
    for statistic in statistics:
        outputs = statistic.outputs(problem) if statistic.describes("outputs") else None
        if outputs is not None and "coverage" in outputs:
            levels = outputs["coverage"] if levels is None else levels
            outputs = outputs if outputs["coverage"] == levels else None  # one set of levels in one pass
        if outputs is not None and "out" in outputs:
            outputs, takes_values = outputs if takes_values else None, False
        requests.append(outputs)
    return requests


def collect(
    problem: Problem,
    read: Read,
    statistics: Sequence[Statistic],
    lse: Tensor | None,
) -> tuple[list[Any], Tensor] | None:
    """Compute the statistics that request outputs; None where none does, or the tokens are not finite.

    Returns
    -------
    results : list
        One for each statistic, `MISSING` for those that must see the tiles.
    lse : Tensor, shape (batch, heads, m)
        Log-sum-exp of each row.
    """
    requests = _requested_outputs(problem, statistics)
    made = [outputs for outputs in requests if outputs is not None]
    if not made:
        return None
    merged = _merge_requests(made, problem.shape[2:])
    v = merged.pop("out", None)
    if lse is None:
        merged["lse"] = True
    found = read(merged, v, lse)
    if found is None:
        return None
    if lse is None:
        lse = found["lse"]
    results = [
        MISSING if outputs is None else statistic.from_outputs(_select(found, outputs, merged), problem)
        for statistic, outputs in zip(statistics, requests, strict=True)
    ]
    return results, lse


def _merge_requests(requests: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Merge the requests of several statistics: the largest k, and picture blocks that all can be pooled from.

    The blocks cover the whole matrix, as the kernels need it, even if every statistic looks at a window.
    """
    merged: dict[str, Any] = {}
    for outputs in requests:
        for name, value in outputs.items():
            merged[name] = max(merged.get(name, 0), value) if name == "largest" else value
    blocks = [outputs[name] for outputs in requests for name in _PICTURES if name in outputs]
    if blocks:
        rows, columns = (
            torch.cat([*edges, torch.tensor([0, size], device="cpu")]).unique()
            for edges, size in zip(zip(*blocks, strict=True), sizes, strict=True)
        )
        merged |= {name: request.Picture(rows, columns) for name in _PICTURES if name in merged}
    return merged


def _select(found: Mapping[str, Tensor], outputs: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the outputs of one statistic, in the form that it requested."""
    own = dict(found)
    if "largest" in outputs:
        own["top_values"] = found["top_values"][..., : outputs["largest"]]
        own["top_keys"] = found["top_keys"][..., : outputs["largest"]].clone()
    for name in _PICTURES:
        if name in outputs:
            own[name] = _pool_blocks(found[name], merged[name], outputs[name], name == "picture_max")
    return own


def _pool_blocks(table: Tensor, fine: Blocks, coarse: Blocks, largest: bool) -> Tensor:
    """Pool blocks into larger ones whose edges are among theirs; what lies outside of those is left out."""
    for axis, have, want in ((-2, fine[0], coarse[0]), (-1, fine[1], coarse[1])):
        if torch.equal(have, want):
            continue
        places = torch.searchsorted(have, want)
        inside = table.narrow(axis, int(places[0]), int(places[-1] - places[0]))
        parts = inside.split(places.diff().tolist(), dim=axis)
        table = torch.stack([part.amax(axis) if largest else part.sum(axis) for part in parts], dim=axis)
    return table
