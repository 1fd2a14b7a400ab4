"""Numbers and kinds of every head, from the recording or computed in the background."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas import stats
from attlas.heads import PATTERNS, Head
from attlas.heads.classification import BLOCK_MEASURES, measure_entry, text_ids, text_statistics
from attlas.heads.telling import telling_cell
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.entry import KINDS, statistic_names
from attlas.recording.atlas.table import columns_of
from attlas.stats import Statistic
from attlas.view.codes import finite_or_none
from attlas.view.columns import Column
from attlas.view.known_heads import KnownHead, KnownHeads
from attlas.view.sentences import WORDS, on_text
from attlas.view.source import Source
from attlas.view.worker import Worker

# Cells of all heads together, and of one, up to which numbers that were not recorded are computed: those that tell
# the kinds of heads cost ten times as much as the others. Half a minute of one core, two seconds a step.
_MOST_CELLS_FOR_KINDS = 1 << 31, 1 << 27
_MOST_CELLS_FOR_PLAIN = 1 << 34, 1 << 31


_PATIENCE_SECONDS = 0.5  # seconds that an answer takes at most to look at recorded numbers
_COLUMN_DESCRIPTIONS = (
    Column("entropy", "entropy", "nats", "Mean over the queries of the entropy of their weights."),
    Column("effective_keys", "effective keys", "keys", "Mean over the queries of (Σ w)² / Σ w²."),
    Column("max_weight", "largest weight", "", "Mean over the queries of their largest weight."),
    Column("row_mass", "sum of weights", "", "Mean over the queries of the sum of their weights."),
    Column("first_key_mass", "mass on the first key", "", "Share of key 0 in the weights of all queries."),
    Column("max_logit", "largest logit", "", "Largest log-weight before softmax."),
    Column("logit_mean", "mean logit", "", "Mean log-weight over the allowed keys."),
    Column("logit_variance", "logit variance", "", "Variance of the log-weights of a query, mean over the queries."),
    *(
        Column(kind.measure, f"{kind.name} score", "", f"{kind.definition[0].upper()}{kind.definition[1:]}.")
        for kind in PATTERNS
    ),
    Column("distance", "mean distance", "tokens", "How many places back the weight lies, on average."),
    Column("induction_text", "induction on the text", "", "Weight on keys that follow an earlier copy of the token."),
    Column(
        "top_k_mass",
        "mass of the largest",
        "",
        "Sum of the largest weights of a query that were kept, mean over the queries.",
    ),
    Column("duplicate_text", "copies on the text", "", "Weight on earlier copies of the token itself."),
)
_COLUMNS_BY_NAME = {column.name: column for column in _COLUMN_DESCRIPTIONS}
_MEASURE_NAMES = (*(kind.measure for kind in PATTERNS), "distance", "induction_text", "duplicate_text")
# What the two columns "on the text" are made of: over all queries, where those are over the ones that have a copy.
_RAW_COLUMNS = ("agreement", "agreement_2")
_UNKNOWN_DESCRIPTION = "A statistic of the recording, mean over the queries."


class _MeasuredHeads(NamedTuple):
    """Columns of an entry, a number for each head; the measures of each head, where they are known."""

    columns: dict[str, list[float]]
    heads: tuple[Head, ...]


class HeadTable:
    """One row for each head: its kinds, and each statistic as one number.

    Parameters
    ----------
    source : Source
        What is shown.
    worker : Worker
        Who computes what was not recorded.
    known : KnownHeads, optional
        What the heads are, where that was measured elsewhere; the default is what their own recording says.
    waits : callable, optional
        Returns whether nothing is computed for now.
    """

    def __init__(
        self, source: Source, worker: Worker, known: KnownHeads | None = None, waits: Callable[[], bool] | None = None
    ) -> None:
        self._source, self._worker, self._known_heads, self._waits = source, worker, known, waits
        self._found: dict[int, dict[str, Any]] = {}  # results of entries, as entries hold them
        self._parts: list[tuple[Any, ...]] = []  # of the entry that is not complete, head by head
        self._ready: dict[int, _MeasuredHeads] = {}  # what entries show
        self._missing = self._statistics_to_compute()
        self._computing = threading.Lock()

    def _statistics_to_compute(self) -> dict[int, list[Statistic]]:
        """Return what is to be computed: the statistics of each entry that lacks any of them, by the entry's number.

        Those that the entry has are among them. An entry whose matrix is gone, or too large to be read unnoticed
        (`_wanted_statistics` decides by its cells and those of all entries), is left out.
        """
        entries = self._source.entries
        all_cells = sum(math.prod(shown.entry.shape) for shown in entries if shown.entry.matrix is not None)
        lacking = {}
        for number, shown in enumerate(entries):
            entry = shown.entry
            wanted = _wanted_statistics(shown.atlas, entry, all_cells) if entry.matrix is not None else []
            if any(name not in entry.statistics for name in statistic_names(wanted)):
                lacking[number] = wanted
        return lacking

    def answer(self) -> dict[str, Any]:
        """Return the statistics that are known now: after half a second of work, the rest is left for the next time.

        The most telling head is the strongest induction head, or without one the head that is most of its kind.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        if self._missing and not (self._waits is not None and self._waits()):
            self._worker.ask("heads", self, urgent=False)
        rows: list[dict[str, Any]] = []
        names: dict[str, None] = {}
        known = 0
        telling: tuple[tuple[bool, float], int, int] | None = None
        for number, shown in enumerate(self._source.entries):
            found = self._known_measures(number, shown.entry, end)
            heads = shown.entry.shape[1]
            computed = len(self._parts) if number == next(iter(self._missing), None) else 0
            known += heads if found is not None else min(computed, heads - 1)  # a whole entry only with its columns
            values = {} if found is None else found.columns
            names |= dict.fromkeys(values)
            for head in range(heads):
                known_head, told = self._kinds_and_record(number, head)
                if known_head is not None and shown.entry.matrix is not None and not shown.recording:
                    candidate = known_head.prominence, number, head
                    telling = max(telling or candidate, candidate, key=lambda found: found[0])
                numbers = {name: finite_or_none(column[head]) for name, column in values.items()}
                rows.append({"entry": number, "head": head, **told, "values": numbers})
        order = [
            *(name for name in _COLUMNS_BY_NAME if name in names),
            *(name for name in names if name not in _COLUMNS_BY_NAME),
        ]
        columns = [
            _COLUMNS_BY_NAME.get(name, Column(name, name.replace("_", " "), "", _UNKNOWN_DESCRIPTION))._asdict()
            for name in order
        ]
        for row in rows:
            row["values"] = {name: row["values"].get(name) for name in order}
        return {
            "progress": known / len(rows) if rows else 1.0,
            "columns": columns,
            "rows": rows,
            "kinds": WORDS,
            "on": self._known_heads and {"what": self._known_heads.on, "name": self._known_heads.name},
            "telling": None if telling is None else self._telling(telling[1], telling[2]),
        }

    def _telling(self, number: int, head: int) -> dict[str, Any]:
        """Return entry and head of the most telling head, and the cell at which it shows what the head does."""
        atlas, entry = self._source.entries[number].atlas, self._source.entries[number].entry
        # Where a layer has several kinds of attention, or several passes, the cell is one of the first.
        is_first = next(each for each in atlas.entries if each.layer == entry.layer) is entry
        cell = telling_cell(atlas, entry.layer, entry.heads[head]) if is_first else None
        pin = None if cell is None else {"i": cell[0], "j": cell[1]}
        return {"entry": number, "head": head, "pin": pin}

    def _kinds_and_record(self, number: int, head: int) -> tuple[KnownHead | None, dict[str, Any]]:
        """Return the kinds of a head, None where they are not known, and its record for the page."""
        shown, ready = self._source.entries[number], self._ready.get(number)
        # What was measured elsewhere is about the first recording, and not about the one that it is compared with.
        elsewhere = self._known_heads and not shown.recording and self._known_heads.of(shown.entry, head)
        measured = ready.heads[head] if ready is not None and ready.heads else None
        known_head = elsewhere or (KnownHead.measured(measured) if measured else None)
        if known_head is None:
            return None, {"kinds": [], "share": None, "measures": None, "on_text": None}
        said = on_text(known_head.pattern, measured, elsewhere=bool(elsewhere)) if measured else None
        measures = known_head.measures if elsewhere else None  # those of this text are among its columns
        return known_head, {"kinds": known_head.kinds, "share": known_head.share, "measures": measures, "on_text": said}

    def order(self) -> list[tuple[int, int]]:
        """Return entry and head of all heads, the most telling first; those without known kinds come last."""
        ranked = []
        for number, shown in enumerate(self._source.entries):
            for head in range(shown.entry.shape[1]):
                known_head, _ = self._kinds_and_record(number, head)
                ranked.append(((False, -math.inf) if known_head is None else known_head.prominence, number, head))
        return [(number, head) for _, number, head in sorted(ranked, key=lambda found: found[0], reverse=True)]

    def _known_measures(self, number: int, entry: Entry, end: float) -> _MeasuredHeads | None:
        """Return the measures of an entry; None while they are computed, or where `time.monotonic()` is past `end`."""
        if number not in self._ready:
            if number in self._missing or time.monotonic() > end:
                return None
            self._ready[number] = self._look_at_entry(number, entry, self._source.entries[number].atlas)
        return self._ready[number]

    def _look_at_entry(self, number: int, entry: Entry, atlas: Atlas) -> _MeasuredHeads:
        """Return the columns and the measures of an entry's heads, from statistics that were recorded or computed."""
        entry = replace(entry, statistics={**self._found.get(number, {}), **entry.statistics})
        columns = columns_of(entry)
        measured = measure_entry(atlas, entry) if entry.shape[0] * entry.shape[2] else ()
        if not measured:
            return _MeasuredHeads(columns, ())
        columns = {name: numbers for name, numbers in columns.items() if name not in _RAW_COLUMNS}
        measure_block = isinstance(atlas.details.get("block"), dict)
        names = [name for name in _MEASURE_NAMES if measure_block or name not in BLOCK_MEASURES]
        columns |= {name: [float(getattr(head, name)) for head in measured] for name in names}
        return _MeasuredHeads(columns, measured)

    def step(self) -> bool:
        """Compute the statistics of one head, in one thread at a time; return whether there are more."""
        with self._computing:
            if self._missing:
                self._compute_next()
            return bool(self._missing)

    def _compute_next(self) -> None:
        """Compute the statistics of one head."""
        number, wanted = next(iter(self._missing.items()))
        entry, parts = self._source.entries[number].entry, self._parts
        if entry.matrix is not None and len(parts) < entry.shape[1]:
            head = len(parts)
            try:
                parts.append(entry.matrix[:, head : head + 1].collect(*wanted))
            except (RuntimeError, ValueError, MemoryError):
                parts.extend([()] * (entry.shape[1] - head))
        if len(parts) == entry.shape[1]:
            whole = {} if () in parts else dict(zip(statistic_names(wanted), map(_joined_results, *parts), strict=True))
            self._found[number], self._parts = whole, []
            del self._missing[number]  # after the numbers: other threads look here


def _wanted_statistics(atlas: Atlas, entry: Entry, all_cells: int) -> list[Statistic]:
    """Return the statistics that tell the kinds of the heads of an entry, or the plain ones, or none.

    The fewer cells the matrix of the entry has, and those of all entries together, the more statistics are wanted.
    """
    batch, _, m, n = entry.shape
    if entry.matrix is not None and not entry.matrix.weights.are_shares:  # such rows have no entropy, and no kinds
        return (
            [stats.MaxWeight(), stats.RowMass()]
            if all_cells <= _MOST_CELLS_FOR_PLAIN[0] and batch * m * n <= _MOST_CELLS_FOR_PLAIN[1]
            else []
        )
    cells, ids = batch * m * n, text_ids(atlas, entry) if entry.kind in KINDS else None  # kinds are those of heads
    if ids is not None and all_cells <= _MOST_CELLS_FOR_KINDS[0] and cells <= _MOST_CELLS_FOR_KINDS[1]:
        return [*text_statistics(ids), stats.MaxWeight(), stats.ColumnMass()]
    if all_cells > _MOST_CELLS_FOR_PLAIN[0] or cells > _MOST_CELLS_FOR_PLAIN[1]:
        return []
    return [stats.Entropy(), stats.EffectiveKeys(), stats.MaxWeight(), stats.ColumnMass()]


def _joined_results(*parts: Tensor) -> Tensor:
    return torch.cat([part.cpu() for part in parts], dim=1)
