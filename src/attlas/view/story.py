"""A tour through a recording: a few heads that do something plain, each at a place of the text where it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from attlas import stats
from attlas.heads import PATTERNS
from attlas.heads.classification import text_ids
from attlas.heads.telling import shows_kind, telling_query
from attlas.recording.atlas.padding import included_rows
from attlas.view.source import Shown, Source

_STEPS = 3  # of a tour, at most
_FEWEST_STEPS = 2  # one head alone is no tour
_FIRST_KINDS = ("induction", "previous token", "first-token sink")
# The other kinds that have one cell to point at, in the order in which they stand in for those.
_OTHER_KINDS = tuple(kind.name for kind in PATTERNS if kind.name not in (*_FIRST_KINDS, "broad"))
_LEAST_WEIGHT = 0.25  # of a cell that shows what a head does; it is the largest of its row as well
_ANCHOR_WEIGHT = 0.5  # from which on a step stays at a token of the step before
_NEAR_BEST = 0.8  # share of the largest weight from which on words are preferred to other tokens
_MOST_CELLS = 1 << 24  # of a head whose largest weights are computed, where they were not recorded


@dataclass(frozen=True)
class Step:
    """A step of the tour: a head, its kind, the query and the key of one cell, its weight, and both tokens."""

    kind: str
    entry: int
    head: int
    i: int
    j: int
    weight: float
    tokens: tuple[str, str]


class _Rows:
    """The largest weight of each query of a head, with its key."""

    def __init__(self, shown: Shown, head: int, ids: Tensor, words: Sequence[str]) -> None:
        self.shown, self.head, self.ids, self.words = shown, head, ids, words
        top = shown.entry.statistics.get("top_k")
        if top is None:
            (top,) = shown.entry.need_matrix()[:1, head : head + 1].collect(stats.TopK(1))
            self.weights, self.keys = top.values[0, 0, :, 0].double().cpu(), top.indices[0, 0, :, 0].cpu()
        else:
            self.weights, self.keys = top.values[0, head, :, 0].double().cpu(), top.indices[0, head, :, 0].cpu()
        included = included_rows(shown.entry)
        if included is not None:
            rows = included.expand(*shown.entry.shape[:3])[0, head].cpu()
            self.weights = self.weights.where(rows, 0.0)

    def step(self, kind: str, number: int, anchors: Sequence[int]) -> Step | None:
        """Return the step of this head at the best place of the text; None where the text has none."""
        weights = self.weights.where(shows_kind(kind, self.ids, self.keys, self.weights), 0.0)
        if float(weights.max()) < _LEAST_WEIGHT:
            return None
        i = next((each for each in anchors if float(weights[each]) >= _ANCHOR_WEIGHT), None)
        if i is None:
            i = self._place_of_induction(weights) if kind == "induction" else None
        if i is None:
            near = (weights >= _NEAR_BEST * weights.max()).nonzero()[:, 0].tolist()
            i = max(near, key=lambda each: (self._is_word(each) + self._is_word(int(self.keys[each])), weights[each]))
        j = int(self.keys[i])
        return Step(kind, number, self.head, i, j, float(weights[i]), (self.words[i], self.words[j]))

    def _place_of_induction(self, weights: Tensor) -> int | None:
        """Return the query at which the report and the cards show an induction head, where it is one of the best."""
        entry, atlas = self.shown.entry, self.shown.atlas
        is_first = next(each for each in atlas.entries if each.layer == entry.layer) is entry
        query = telling_query(atlas, entry.layer, entry.heads[self.head]) if is_first else None
        return query if query is not None and float(weights[query]) >= _LEAST_WEIGHT else None

    def _is_word(self, place: int) -> bool:
        """Return whether a token has a letter or a digit."""
        return any(character.isalnum() for character in self.words[place])


def story(rows: Sequence[Mapping[str, Any]], source: Source) -> list[dict[str, Any]]:
    """Return the steps of the tour through a recording.

    Parameters
    ----------
    rows : sequence of mapping
        The rows of the table of heads, with the kinds of each head.
    source : Source
        What is shown.

    Returns
    -------
    list of dict
        The fields of `Step`: the head that finds repeats, the one that looks at the token before, and the one that
        rests on the first token. Another kind stands in for one that no head is of, or that does not show on this
        text. No steps where fewer than two heads have something to show.

    Notes
    -----
    The cell of a step has the largest weight of its row, at least 0.25, and its key is one that such a head looks at
    by definition. Where it can, a step stays at a token of the step before. Cost: nothing where the largest weights
    were recorded, else one pass over each head that is tried, of at most 4,096 × 4,096 cells.
    """
    steps: list[Step] = []
    for kind in (*_FIRST_KINDS, *_OTHER_KINDS):
        if len(steps) == _STEPS:
            break
        anchors = [place for each in steps for place in (each.j, each.i)]
        heads = [row for row in rows if row["kinds"][:1] == (kind,) and row["share"] is not None]
        for row in sorted(heads, key=lambda row: -row["share"]):
            found = _rows_of_head(source.entries[row["entry"]], row["head"], source)
            step = None if found is None else found.step(kind, row["entry"], anchors)
            if step is not None:
                steps.append(step)
                break
    return [asdict(step) for step in steps] if len(steps) >= _FEWEST_STEPS else []


def _rows_of_head(shown: Shown, head: int, source: Source) -> _Rows | None:
    """Return the largest weights of a head; None of a second recording, and where they or its text are not known."""
    entry, (query, key) = shown.entry, shown.texts[0] if shown.texts else (None, None)
    ids = text_ids(shown.atlas, entry)
    is_large = "top_k" not in entry.statistics and entry.shape[2] * entry.shape[3] > _MOST_CELLS
    if ids is None or query is None or query != key or shown.recording or entry.matrix is None or is_large:
        return None
    return _Rows(shown, head, ids[0].cpu(), source.texts[query].shown)
