"""A card of one head: what it does, and the cells about the place of the text where it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from attlas import pictures
from attlas.cli.formatting import PART_OF_CHARACTER, percent
from attlas.cli.terminal import UsageError
from attlas.heads import Head, Pattern
from attlas.heads.classification import measure_entry
from attlas.heads.telling import telling_cell
from attlas.pictures.card import BETWEEN, card
from attlas.recording.atlas import Atlas, Entry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CONTEXT_CHARACTERS = 24  # characters of the text that the example shows
_SEVERAL_BLANKS = re.compile(" {2,}")
_EXAMPLE_KEYS = 3  # keys that the example shows
_LEAST_SHOWN_WEIGHT = 0.05  # weight of a key from which the example shows it
_SIDE = 20  # cells along a side of the map
_AFTER = 4  # cells of it behind the query, and behind the key


def draw_card(atlas: Atlas, entry: Entry | None, head: int | None, title: str) -> Figure:
    """Draw the card of a head, by default the one with the clearest pattern.

    Raises
    ------
    UsageError
        If the weights, the text or the statistics of the head were not recorded.
    """
    entries = [entry] if entry is not None else [atlas.entry(layer) for layer in atlas.layers()]
    measured = [each for one in entries for each in measure_entry(atlas, one) if head is None or each.head == head]
    best = max(measured, key=lambda each: each.prominence, default=None)
    cell = None if best is None else telling_cell(atlas, best.layer, best.head)
    if best is None or cell is None or not atlas.tokens:
        rule = "a card needs the weights, the text and the statistics of a head."
        raise UsageError(rule, "a recording without some of them", "attlas record --text FILE -o run.atlas")
    entry, (query, key) = atlas.entry(best.layer), cell
    tokens, index = atlas.tokens, entry.heads.index(best.head)
    rows, columns = _around(query, entry.shape[2]), _around(key, entry.shape[3])
    cells = pictures.blocks(entry.need_matrix()[0, index], _SIDE, "max", rows, columns)
    sentences = [evidence(best), example_sentence(tokens, atlas.ids, entry, best, query)]
    return card(
        cells,
        ([tokens[row] for row in rows], [tokens[column] for column in columns]),
        (query - rows.start, key - columns.start),
        title=title if not atlas.model or atlas.model in title else f"{title}{BETWEEN}{atlas.model}",
        headline=f"Layer {best.layer}, head {best.head}\n{_headline(best)}",
        sentences=sentences,
    )


def _around(place: int, size: int) -> range:
    """Return the window of a card about a query or a key."""
    stop = min(size, max(place + _AFTER, _SIDE))
    return range(max(0, stop - _SIDE), stop)


def _headline(head: Head) -> str:
    """Return what a head does, in a few words."""
    from attlas.view.sentences import WORDS  # the viewer, which commands that write no page do without

    return str(WORDS[head.patterns[0].name]["headline"])


def evidence(head: Head) -> str:
    """Return the sentence on the share of its weight by which a head is called what it is called."""
    return evidence_of_kind(head.patterns[0], head.of(head.patterns[0]))


def evidence_of_kind(kind: Pattern, share: float) -> str:
    """Return the sentence on the share by which a head is called of a kind."""
    from attlas.view.sentences import WORDS

    return str(WORDS[kind.name]["evidence"]).format(percent(share) if kind.measure else "")


def example_sentence(tokens: Sequence[str], ids: Tensor | None, entry: Entry, head: Head, query: int) -> str:
    """Return a sentence with the keys that get most of a query's weight."""
    top, index = entry.statistics["top_k"], entry.heads.index(head.head)
    keys, weights = (each[0, index, query].tolist() for each in (top.indices, top.values))
    return attention_sentence(tokens, None if ids is None else ids[0], query, keys, weights)


def attention_sentence(
    tokens: Sequence[str], ids: Tensor | None, query: int, keys: Sequence[int], weights: Sequence[float]
) -> str:
    """Return a sentence with a few keys of a query and their weights, the largest first; small ones are left out.

    Parameters
    ----------
    tokens : sequence of str
        The text of each token.
    ids : Tensor of int, shape (n,), optional
        The tokens. With them the sentence says so where the keys follow earlier copies of the query; else it says where
        a single key is.
    query : int
        Place of the query.
    keys, weights : sequence
        Places of the keys, and their weights.
    """
    keys, weights = keys[:_EXAMPLE_KEYS], weights[:_EXAMPLE_KEYS]
    shown = [key for key, weight in zip(keys, weights, strict=True) if weight >= _LEAST_SHOWN_WEIGHT] or keys[:1]
    words = [f"{_quoted_line(tokens[key])} ({percent(weight)})" for key, weight in zip(shown, weights, strict=False)]
    text = _quoted_line(_words_before(tokens, query))
    follow = ids is not None and all(key > 0 and ids[key - 1] == ids[query] for key in shown)
    if follow:
        why = f"{'each ' if len(shown) > 1 else ''}after {_earlier(tokens[query])}"
    else:
        why = _where(query, shown[0]) if len(shown) == 1 else ""
    return f"After {text} it attends to {', '.join([*words, *filter(None, [why])])}."


def _earlier(text: str) -> str:
    """Return words for an earlier copy of a token."""
    return f"an earlier {_quoted_line(text)}" if text else "an earlier copy of this token"


def _where(query: int, key: int) -> str:
    """Return where a key is, seen from a query."""
    match query - key:
        case 0:
            return "the token itself"
        case 1:
            return "the token before"
        case back:
            return "the first token" if key == 0 else f"{abs(back):,} tokens {'back' if back > 0 else 'on'}"


def _words_before(tokens: Sequence[str], query: int) -> str:
    """Return the tokens up to a query, as many as there is room for; of blanks beside each other, one."""
    first, text = query, tokens[query]
    while first > 0 and len(longer := _SEVERAL_BLANKS.sub(" ", tokens[first - 1] + text)) <= _CONTEXT_CHARACTERS:
        first, text = first - 1, longer
    return text.lstrip() or text


def _quoted_line(text: str) -> str:
    """Return text on one line, in quotation marks; the middle of a long one is left out."""
    if not text:
        return PART_OF_CHARACTER
    if len(text) > _CONTEXT_CHARACTERS:
        half = _CONTEXT_CHARACTERS // 2
        text = f"{text[: half - 1]}…{text[-half:]}"
    return json.dumps(text, ensure_ascii=False)
