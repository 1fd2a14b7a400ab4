"""What a person is told of an explained logit or map, as plain data: parts by size, who wrote the key, from where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.errors import RecordingError
from attlas.heads.explanation.cell import CellExplanation
from attlas.heads.explanation.explain import explain
from attlas.heads.explanation.parts import Names, Part
from attlas.recording.atlas import Atlas

_PAIRS = 8  # pairs of parts that are told
_SOURCES = 3  # tokens that the writer took its part from
_TOLD_PARTS = 10  # parts of a side of a map that are told by themselves
_MOST_PARTS = 128  # parts of the queries of a map, from which on they are joined by layers


@torch.no_grad()
def summary(
    atlas: Atlas, layer: Any, head: int, *, cell: tuple[int, int], sequence: int = 0, names: Names | None = None
) -> dict[str, Any]:
    """Return why a weight is where it is, as numbers and texts that JSON can hold.

    Parameters
    ----------
    atlas : Atlas
        A recording with parts.
    layer : int, str or tuple
        The layer, as ``atlas[...]`` takes it.
    head : int
        The head, as the model counts it.
    cell : tuple of int
        Query and key, as indices of the matrix.
    sequence : int
        Which sequence of the batch.
    names : mapping of (int, int) to str, optional
        What heads do, by layer and number.

    Returns
    -------
    dict
        ``logit``, ``weight``, ``total`` and ``remainder``; ``above``, the logit minus the mean of its row, and
        ``mean``; ``keys`` and ``queries``, what each part adds to ``above``, the largest first; ``pairs``; ``writer``,
        the part that adds most to the key, None where none adds anything, with ``sources``, the tokens that a head took
        it from by their position in the text, and ``without``, the predicted cell; ``notes``. Where only some rows were
        kept, nothing can be compared with the row: then ``relative`` is False, and the numbers are those of the logit.
    """
    why = explain(atlas, layer, head, cell=cell, sequence=sequence, names=names)
    try:
        told, relative = why.relative(), True
    except RecordingError:
        told, relative = why, False
    keys = _by_size(told.key_parts, told.table.sum(0))
    queries = _by_size(told.query_parts, told.table.sum(1))
    return {
        "layer": layer if isinstance(layer, int) else atlas.entry(layer).layer,
        "head": head,
        "cell": list(why.cell),
        "logit": why.logit,
        "weight": why.weight,
        "total": why.total,
        "remainder": why.remainder,
        "relative": relative,
        "above": told.logit,
        "mean": why.logit - told.logit,
        "keys": keys,
        "queries": queries,
        "pairs": [
            {"query": _named(pair.query), "key": _named(pair.key), "logit": pair.logit} for pair in told.pairs(_PAIRS)
        ],
        "writer": _writer(atlas, layer, why, keys, relative=relative),
        "notes": list(why.notes),
    }


@torch.no_grad()
def map_summary(
    atlas: Atlas, layer: Any, head: int, *, sequence: int = 0, names: Names | None = None
) -> dict[str, Any]:
    """Return what each pair of parts adds where a head looks, above what it adds in the mean of the keys.

    Parameters
    ----------
    atlas : Atlas
        A recording with parts.
    layer : int, str or tuple
        The layer, as ``atlas[...]`` takes it.
    head : int
        The head, as the model counts it.
    sequence : int
        Which sequence of the batch.
    names : mapping of (int, int) to str, optional
        What heads do, by layer and number.

    Returns
    -------
    dict
        ``queries`` and ``keys``, the parts whose numbers are largest, with ``logit``, what each adds with all of the
        other side; ``others``, how many parts of each side are not told by themselves; ``table``, what pairs add, with
        a last row and a last column of these others where there are any; ``total``, the sum of the table; ``notes``.
        Parts of more than 128 of queries are joined by layers.
    """
    groups = ("layer", None) if _has_many(atlas) else None
    why = explain(atlas, layer, head, sequence=sequence, names=names, groups=groups)
    table = why.above_uniform.double()
    queries, rows = _largest_first(why.query_parts, table, 0)
    keys, columns = _largest_first(why.key_parts, table, 1)
    told = _joined(_joined(table[rows][:, columns], len(queries), 0), len(keys), 1)
    return {
        "layer": layer if isinstance(layer, int) else atlas.entry(layer).layer,
        "head": head,
        "queries": queries,
        "keys": keys,
        "others": [table.shape[0] - len(queries), table.shape[1] - len(keys)],
        "table": told.tolist(),
        "total": float(table.sum()),
        "notes": list(why.notes),
    }


def _has_many(atlas: Atlas) -> bool:
    """Return whether queries have so many parts that a table of all pairs takes long."""
    return sum(len(entry.heads) for entry in atlas.entries if entry.kind == "self") > _MOST_PARTS


def _largest_first(parts: Sequence[Part], table: Tensor, axis: int) -> tuple[list[dict[str, Any]], Tensor]:
    """Return the parts of one side with the largest numbers, with what each adds, and the order of all of that side."""
    order = table.abs().amax(1 - axis).argsort(descending=True, stable=True)
    sums = table.sum(1 - axis)
    told = [{**_named(parts[place]), "logit": float(sums[place])} for place in order[:_TOLD_PARTS].tolist()]
    return told, order


def _joined(table: Tensor, count: int, axis: int) -> Tensor:
    """Return a table with all rows (or columns) from a place on as their sum; as it is where there are none."""
    if table.shape[axis] == count:
        return table
    first, rest = table.split([count, table.shape[axis] - count], axis)
    return torch.cat([first, rest.sum(axis, keepdim=True)], axis)


def _by_size(parts: Sequence[Part], sums: Tensor) -> list[dict[str, Any]]:
    """Return parts with what they add, the largest first."""
    found = [{**_named(part), "logit": float(x)} for part, x in zip(parts, sums, strict=True)]
    return sorted(found, key=lambda part: -abs(part["logit"]))


def _named(part: Part) -> dict[str, Any]:
    """Return a part as plain data."""
    return {"name": part.name, "kind": part.kind, "layer": part.layer, "head": part.head, "role": part.role}


def _writer(
    atlas: Atlas, layer: Any, why: CellExplanation, keys: list[dict[str, Any]], *, relative: bool
) -> dict[str, Any] | None:
    """Return the part that adds most to the key, with the tokens it came from and the cell without it."""
    first = next((part for part in keys if part["logit"] > 0), None)
    if first is None:
        return None
    found: dict[str, Any] = {**first, "sources": [], "row": None, "without": None}
    if relative:
        without = why.without(first["name"])
        found["without"] = {"logit": without.logit, "weight": without.weight}
    if first["kind"] == "head":
        entry = atlas.entry(layer)
        try:
            given = why.sources(first["name"])
        except RecordingError:  # that head has a gate, or was not recorded
            return found
        largest = given.abs().topk(min(_SOURCES, len(given))).indices.tolist()
        earlier = atlas.entry((_name_of(atlas, entry.kind, first["layer"], entry.call), entry.call))
        found["row"] = entry.first_key + why.cell[1]
        found["sources"] = [{"at": earlier.first_key + at, "logit": float(given[at])} for at in largest]
        found["others"] = float(given.sum() - given[largest].sum())
    return found


def _name_of(atlas: Atlas, kind: str, layer: int, call: int) -> str:
    """Return the path of the attention of a layer."""
    return next(e.name for e in atlas.entries if (e.kind, e.layer, e.call) == (kind, layer, call))
