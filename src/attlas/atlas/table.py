"""One record for each recorded head: where it stands, and each statistic as one number."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.atlas.entry import Entry
from attlas.errors import MissingExtraError, ShapeError

__all__ = ["columns_of", "frame", "records"]

Record: TypeAlias = "dict[str, Any]"
_PLACES = ("layer", "head", "kind", "name", "call", "queries", "keys")


def records(entries: Iterable[Entry]) -> list[Record]:
    """Return one record for each head of each entry, all with the same keys.

    Parameters
    ----------
    entries : iterable of Entry
        The entries.

    Returns
    -------
    list of dict
        A statistic that an entry does not have is None.
    """
    tables = []
    names: dict[str, None] = dict.fromkeys(_PLACES)
    for entry in entries:
        columns = columns_of(entry)
        names |= dict.fromkeys(columns)
        tables.append((entry, columns))
    found = []
    for entry, columns in tables:
        m, n = entry.shape[2:]
        for index, head in enumerate(entry.heads):
            place = (entry.layer, head, entry.kind, entry.name, entry.call, m, n)
            record: Record = dict.fromkeys(names)
            record |= zip(_PLACES, place, strict=True)
            record |= {name: numbers[index] for name, numbers in columns.items()}
            found.append(record)
    return found


def columns_of(entry: Entry) -> dict[str, list[float]]:
    """Return each statistic of an entry as one number a head.

    Parameters
    ----------
    entry : Entry
        The entry.

    Returns
    -------
    dict of list of float
        Columns by name; each list has one number for each recorded head. Statistics that are no number of
        a row (pictures, spans, places) have no column.
    """
    if entry.shape[0] * entry.shape[2] == 0:
        return {}
    found: dict[str, Tensor] = {}
    for name, result in entry.statistics.items():
        found |= _columns(name, result, entry.shape)
    return {name: numbers.double().tolist() for name, numbers in found.items()}


def _columns(name: str, result: Any, shape: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """Return the columns of one statistic, each of shape (heads,)."""
    rows = shape[:3]
    plain = re.sub(r"_\d+$", "", name)
    if isinstance(result, tuple):
        parts = dict(zip(getattr(result, "_fields", ()), result, strict=False))
        if plain == "logit_moments" and all(_is(part, rows) for part in parts.values()):
            prefix = name.replace("logit_moments", "logit")
            return {f"{prefix}_{part}": _mean(t) for part, t in parts.items()}
        values = parts.get("values")
        if plain == "top_k" and isinstance(values, Tensor) and values.shape[:-1] == rows:
            return {f"{name}_mass": _mean(values.sum(-1))}
        return {}
    if not isinstance(result, Tensor) or result.is_complex():
        return {}
    if plain == "column_mass" and _is(result, (*shape[:2], shape[3])) and shape[3]:
        total = result.double().sum((0, 2))
        share = result[..., 0].double().sum(0) / total
        return {name.replace("column_mass", "first_key_mass"): torch.where(total == 0, 0.0, share)}
    if plain.startswith("column_") or plain == "arg_max":
        return {}
    if plain == "coverage" and result.shape[:-1] == rows:
        return {f"{name}_{level + 1}": _mean(result[..., level]) for level in range(result.shape[-1])}
    if not _is(result, rows):
        return {}
    return {name: result.amax((0, 2)) if plain == "max_logit" else _mean(result)}


def _is(result: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(result, Tensor) and tuple(result.shape) == shape


def _mean(t: Tensor) -> Tensor:
    """Return the mean over batch and queries of each head."""
    return t.mean((0, 2), dtype=torch.float64)


def frame(found: list[Record], library: str) -> Any:
    """Return records as a data frame of pandas or polars.

    Raises
    ------
    ShapeError
        If `library` is neither.
    MissingExtraError
        If it is not installed.
    """
    if library not in ("records", "pandas", "polars"):
        raise ShapeError(
            "atlas.table()",
            'data must be "records", "pandas" or "polars".',
            found=f"data = {library!r}",
            fix="atlas.table() for a list of dicts.",
        )
    if library == "records":
        return found
    try:
        module = importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "atlas.table()",
            f"{library} must be installed to make its data frame.",
            found=f"no module named {library}",
            fix=f"pip install {library}, or atlas.table() for a list of dicts.",
        ) from error
    return module.DataFrame(found)
