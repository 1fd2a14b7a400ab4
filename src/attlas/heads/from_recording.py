"""Classifies the heads of a recording from the statistics that it stores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attlas.atlas import Atlas, Entry
from attlas.atlas.padding import included_rows
from attlas.heads.classification import Head, from_statistics
from attlas.heads.scores import HeadScores

#: Names of the statistics that the kinds of head are made from, in the order of `text_statistics`.
STATISTIC_NAMES = ("entropy", "effective_keys", "head_scores")


def classify_entry(atlas: Atlas, entry: Entry) -> tuple[Head, ...]:
    """Return the measures of the heads of a layer; none where they were not recorded, or it is not causal.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    entry : Entry
        The layer's pass over the whole text.
    """
    ids = text_ids(atlas, entry)
    if ids is None:
        return ()
    known = [entry.statistics.get(name) for name in STATISTIC_NAMES]
    results = [result for result in known if isinstance(result, Tensor)]
    if len(results) < len(STATISTIC_NAMES) or results[-1].shape[-1] != len(HeadScores.NAMES):
        return ()
    if float(results[-1][..., HeadScores.NAMES.index("behind")].sum()) > 0:  # mass on keys behind the query
        return ()
    block = _block(atlas, entry)
    return from_statistics(results, ids, block, entry.layer, entry.heads, query_mask=included_rows(entry))


def text_ids(atlas: Atlas, entry: Entry) -> Tensor | None:
    """Return the token ids that the queries and the keys of an entry are; None where it is not about the whole text."""
    (_, _, m, n), ids = entry.shape, atlas.ids
    whole = ids is not None and m == n == ids.shape[-1] and n >= 3
    return ids if whole and entry.kind != "cross" and atlas.has_text(entry) else None


def _block(atlas: Atlas, entry: Entry) -> dict[str, Tensor] | None:
    """Return the measures on a random block that occurs twice."""
    block = atlas.details.get("block")
    if not isinstance(block, dict) or entry.kind != "self":
        return None
    numbers = {name: _layer(block.get(name), entry.layer, entry.heads) for name in ("induction", "duplicate")}
    return {name: t for name, t in numbers.items() if t is not None} if None not in numbers.values() else None


def _layer(table: object, layer: int, heads: Sequence[int]) -> Tensor | None:
    if not isinstance(table, list) or layer >= len(table) or max(heads, default=0) >= len(table[layer]):
        return None
    return torch.tensor([float(table[layer][head]) for head in heads], dtype=torch.float64)
