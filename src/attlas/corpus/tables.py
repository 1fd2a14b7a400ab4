"""The tables of a corpus, made of its sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from attlas.corpus import sketch
from attlas.corpus.measuring import SINGLE, bin_edges
from attlas.corpus.numbers import BLOCK, COUNTS, NUMBERS
from attlas.corpus.state import SIDES, State
from attlas.heads import Head, classify

QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
INTERVALS = 5
TOP = 50  # tokens of each side


def _layer_and_head_columns(state: State) -> dict[str, Any]:
    """Return the columns that name the heads: layer and head."""
    layers, heads = zip(*state.heads, strict=True)
    return {"layer": pa.array(layers, pa.int32()), "head": pa.array(heads, pa.int32())}


def heads_table(state: State, modules: Sequence[str], vocabulary: Sequence[str]) -> pa.Table:
    """Return one row per head: its name and every number."""
    found = state.numbers()
    texts, rows = (state.counts[:, COUNTS.index(name)] for name in ("texts", "rows"))
    # The one distance, from 2 on, that gets most weight; the distances from `SINGLE` on share bins.
    mass = state.by_distance()[0][:, 2:SINGLE]
    best = mass.argmax(axis=1)
    each = np.arange(len(best))
    cells = state.cells[each, best + 2]  # rows that may see a key at that distance
    with np.errstate(invalid="ignore", divide="ignore"):
        fixed = np.where(cells > 0, mass[each, best] / cells, 0.0)
    favourites = [state.by_token(SIDES.index("key_mass"), head) for head in range(len(best))]
    token = [int(weights.argmax()) for weights in favourites]
    further = {
        "fixed": fixed,
        "fixed_distance": best + 2.0,
        "favourite": np.array([weights.max() for weights in favourites]) / np.maximum(rows, 1),
        **{name: state.block[:, j] for j, name in enumerate(BLOCK)},
        "mean_max_activation": found.pop("max_activation"),
        "max_activation": state.high[:, [number.name for number in NUMBERS].index("max_activation")],
    }
    columns = {name: np.asarray(x, dtype=np.float64) for name, x in (found | further).items()}
    kinds = [_pattern_of_head(columns, i, state.heads[i], rows[i] / max(texts[i], 1)) for i in range(len(best))]
    return pa.table(
        _layer_and_head_columns(state)
        | {"module": list(modules), "kind": kinds, "texts": texts, "queries": rows}
        | {name: pa.array(x, pa.float64()) for name, x in columns.items()}
        | {"favourite_token": [vocabulary[one] for one in token]}
    )


def _pattern_of_head(columns: dict[str, NDArray[np.float64]], i: int, place: tuple[int, ...], length: float) -> str:
    """Return the name of the pattern of head `i`, at `place` (layer, head), from the means over all its texts."""
    names = set(Head.__dataclass_fields__) - {"layer", "head", "tokens", "distance", "chance"}
    measures = {name: float(np.nan_to_num(columns[name][i])) for name in names}
    distance = float(columns["qk_distance"][i])
    head = Head(layer=place[0], head=place[1], tokens=round(length), distance=distance, chance=0.0, **measures)
    return classify(head)[0].name


def distributions_table(state: State) -> pa.Table:
    """Return one row per head and number: its distribution over texts."""
    rows = []
    means = state.means()
    for i, place in enumerate(state.heads):
        for j, number in enumerate(NUMBERS):
            counts = state.bins[i, j]
            some = np.flatnonzero(counts)
            edges = sketch.edges_of(number.sketch)
            low, high = (float(x) if len(some) else np.nan for x in (state.low[i, j], state.high[i, j]))
            quantiles = sketch.quantiles(counts, number.sketch, QUANTILES, low, high)
            bins = [x.tolist() for x in (edges[some], edges[some + 1], counts[some])]
            rows.append((*place, number.name, int(counts.sum()), low, high, means[i, j], quantiles, *bins))
    return _table_of_rows(
        rows,
        {"number": pa.string(), "texts": pa.int64()}
        | dict.fromkeys(("min", "max", "mean"), pa.float64())
        | dict.fromkeys(("quantiles", "lower", "upper"), pa.list_(pa.float64()))
        | {"count": pa.list_(pa.int64())},
    )


def _table_of_rows(rows: Sequence[tuple[Any, ...]], columns: dict[str, pa.DataType]) -> pa.Table:
    """Return a table of rows that begin with layer and head; `columns` has the types of what follows."""
    schema = pa.schema({"layer": pa.int32(), "head": pa.int32()} | columns)
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def distances_table(state: State) -> pa.Table:
    """Return one row per head and bin of distance, up to the last that has any weight."""
    weight, kept = state.by_distance()
    used = int(np.flatnonzero(weight.any(axis=0)).max(initial=0)) + 1
    bins = list(pairwise(bin_edges().tolist()))[:used]
    rows = [
        (*place, *ends, weight[i, j], kept[i, j]) for i, place in enumerate(state.heads) for j, ends in enumerate(bins)
    ]
    columns = dict.fromkeys(("lower", "upper"), pa.int64()) | dict.fromkeys(("weight", "kept_weight"), pa.float64())
    return _table_of_rows(rows, columns)


def tokens_table(state: State, vocabulary: Sequence[str]) -> pa.Table:
    """Return the tokens with most weight of each head and side; ids that show the same are one token."""
    texts, group = np.unique(np.array(vocabulary, dtype=object), return_inverse=True)
    rows: list[tuple[Any, ...]] = []
    for i, place in enumerate(state.heads):
        for side, name in enumerate(SIDES):
            weights = np.bincount(group, state.by_token(side, i), len(texts))
            order = np.argsort(-weights, kind="stable")[:TOP]
            order = order[weights[order] > 0]
            rows += [(*place, name, rank, texts[token], weights[token]) for rank, token in enumerate(order)]
    return _table_of_rows(rows, {"side": pa.string(), "rank": pa.int32(), "token": pa.string(), "weight": pa.float64()})


def samples_table(state: State) -> pa.Table:
    """Return one row per head and text that is kept for it."""
    heads_of = {text: state.samples.heads_of(text) for text in state.samples.kept()}
    rows: list[tuple[Any, ...]] = []
    at = [number.name for number in NUMBERS].index("max_activation")
    for i, place in enumerate(state.heads):
        found = state.samples.of_head(i)
        intervals = _intervals_of_texts(state.bins[i, at], [(activation, largest) for *_, activation, largest in found])
        for (text, _, activation, largest), interval in zip(found, intervals, strict=True):
            row = int(np.searchsorted(heads_of[text], i))  # of this head in the file of the text
            rows.append((*place, text, interval, activation, largest, row))
    columns = {"text": pa.int64(), "interval": pa.int32(), "max_activation": pa.float64(), "largest": pa.bool_()}
    return _table_of_rows(rows, columns | {"row": pa.int32()})


def _intervals_of_texts(counts: NDArray[np.int32], sampled: Sequence[tuple[float, bool]]) -> list[int]:
    """Return the interval of each sampled text: its rank among all texts, divided into equal parts.

    Parameters
    ----------
    counts : array of int, shape (bins,)
        Texts in each bin of the largest weight.
    sampled : sequence of (float, bool)
        Largest weight of each sampled text, and whether it is one of the largest of all; the largest first.

    Notes
    -----
    The rank of the largest is known. The other sampled texts of a bin were drawn at random: they divide the ranks of
    the bin evenly. So a head whose largest weight is near 1 in all texts, which then lie in one bin, has each interval.
    """
    ends, total = np.cumsum(counts), int(counts.sum())
    bins = sketch.bin_of(np.array([activation for activation, _ in sampled]), "unit")
    random = np.array([not largest for _, largest in sampled], dtype=bool)
    drawn, known = (np.bincount(bins[which], minlength=len(counts)) for which in (random, ~random))
    before = np.zeros(len(counts), dtype=np.int64)  # drawn ones of a bin that were passed
    found = []
    for rank, (bin_, largest) in enumerate(zip(bins, ~random, strict=True)):
        place = float(total - rank)  # from 1, the smallest
        if not largest:
            # The drawn texts of a bin stand for all of it but its known largest ones, which lie above: they get ranks
            # that divide these evenly.
            others = counts[bin_] - known[bin_]
            place = ends[bin_] - known[bin_] + 0.5 - (before[bin_] + 0.5) * others / drawn[bin_]
            before[bin_] += 1
        found.append(min(max(math.ceil(place * INTERVALS / total), 1), INTERVALS))
    return found
