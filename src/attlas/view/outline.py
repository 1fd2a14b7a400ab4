"""The named stretches of a text: documents, functions, paragraphs and sentences, by positions of tokens."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeAlias

import torch

from attlas.masks import Documents, Mask, Runs
from attlas.masks.base import And
from attlas.matrix import AttentionMatrix
from attlas.view.source import Source
from attlas.view.structure import Kind, parts_of, shortened
from attlas.view.tokens import Joined, Text

StretchKind: TypeAlias = Literal["named", "document"] | Kind

# Tokens at which a text begins, and at which it ends.
_BEGIN_TOKENS = frozenset(
    ("<s>", "<bos>", "[CLS]", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|im_start|>", "<|bos|>",
     "<|start_header_id|>", "<start_of_turn>", "<｜begin▁of▁sentence｜>")
)  # fmt: skip
_END_TOKENS = frozenset(
    ("</s>", "<eos>", "[SEP]", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eos|>",
     "<end_of_turn>", "<｜end▁of▁sentence｜>", "<pad>", "[PAD]", "<|pad|>")
)  # fmt: skip
_NO_SPACE_BEFORE = re.compile(r"[.,;:!?…)\]}'’”。！？，、]")


class Stretch(NamedTuple):
    """A named stretch of a text: its tokens from `start` to `stop` - 1. A document may have no name."""

    start: int
    stop: int
    kind: StretchKind
    name: str


def outline_of(
    text: Text | None, length: int, borders: Iterable[int] = (), named: Mapping[str, Sequence[int]] | None = None
) -> list[Stretch]:
    r"""Return the stretches of a text, in the order of their first tokens, outer ones first.

    Parameters
    ----------
    text : Text or None
        The tokens; None where only their number is known.
    length : int
        How many there are.
    borders : iterable of int
        Where documents begin, as the mask says; tokens that begin or end a text add to them.
    named : mapping of str to (int, int), optional
        Stretches with names of their own, `atlas.spans`.

    Notes
    -----
    Any two stretches are apart, or one lies within the other: what would cross a stretch with a name of its own,
    or a document, is left out.

    Examples
    --------
    >>> from attlas.view.outline import outline_of
    >>> from attlas.view.tokens import Text
    >>> tokens = ["def", " f", "()", ":\n", "  pass", "<eos>", "It", " rains", ".", " We", " stay", "."]
    >>> for stretch in outline_of(Text(tokens), 12):
    ...     print(*stretch)
    0 5 document def f():
    6 12 document It rains. We stay.
    6 9 sentence It rains.
    9 12 sentence We stay.
    """
    units = [] if text is None else text.units
    own = [Stretch(start, stop, "named", name) for name, (start, stop) in (named or {}).items() if start < stop]
    documents = _documents(units, length, borders)
    found = documents if len(documents) > 1 else []  # a text that is one document has no name for the whole
    for start, stop in [each[:2] for each in documents]:
        found += _parts_of_units(_units_within(units, start, stop))
    apart = [stretch for stretch in found if not any(_do_cross(stretch, other) for other in own)]
    ordered = sorted([*own, *apart], key=lambda stretch: (stretch.start, -stretch.stop))
    # A document of one function is shown once.
    return [stretch for at, stretch in enumerate(ordered) if not at or ordered[at - 1][:2] != stretch[:2]]


def document_borders(A: AttentionMatrix, shift: int) -> list[int]:
    """Return the keys at which documents begin, by the mask of one sequence; empty where it has one document.

    Parameters
    ----------
    A : AttentionMatrix, shape (1, heads, m, n)
        The matrix of the sequence.
    shift : int
        Row i is the token of key i + shift.

    Notes
    -----
    Documents are the ids of `Documents`. Of other masks they are rows one after another whose first allowed key is the
    same, and is that of the first of these rows.
    """
    softmax, n = A.weights.softmax, A.shape[3]
    mask = None if softmax is None else softmax.problem.mask
    if mask is None or not len(A):
        return []
    sequence = int(A.weights.batch_ids[0])  # among those of the mask
    for part in _parts_of_mask(mask):
        if isinstance(part, Documents) and part.keys.count == n:
            ids = part.keys.given.reshape(-1, n)
            changes = ids[sequence if len(ids) > 1 else 0].diff().nonzero().flatten() + 1
            return [0, *changes.tolist()] if len(changes) else []
    first = _first_keys(A, mask, sequence)
    if first is None or len(first) < 2:
        return []
    begins = torch.cat([torch.ones(1, dtype=torch.bool), first.diff() != 0])
    starts, own = first[begins], begins.nonzero().flatten() + shift
    is_document = bool((starts[1:] == own[1:]).all()) and 2 <= len(starts) <= len(first) // 2
    return starts.tolist() if is_document else []


def _parts_of_mask(mask: Mask) -> Iterator[Mask]:
    """Give the masks all of which must allow a pair."""
    for part in mask.parts if isinstance(mask, And) else ():
        yield from _parts_of_mask(part)
    if not isinstance(mask, And):
        yield mask


def _first_keys(A: AttentionMatrix, mask: Mask, sequence: int) -> torch.Tensor | None:
    """Return the first key that each row of head 0 may see; None where it would take to ask for each cell."""
    if isinstance(mask, Runs):
        rows = mask.first[sequence if len(mask.first) > 1 else 0, 0]
        return mask.starts[rows[:-1]].long() if bool((rows.diff() > 0).all()) else None
    runs = A.weights.allowed_runs
    return None if runs is None else runs[0][0, 0].cpu()


def _documents(units: Sequence[Joined], length: int, borders: Iterable[int]) -> list[Stretch]:
    """Return the documents of a text, without tokens that begin or end a text."""
    cuts = {0, length, *(border for border in borders if 0 < border < length)}
    special = set()
    for unit in units:
        mark = unit.text.strip()
        begins, ends = mark in _BEGIN_TOKENS, mark in _END_TOKENS
        if begins or ends:
            special.add(unit.start)
            cuts.add(unit.start if begins else unit.stop)
    found = []
    for start, stop in pairwise(sorted(cuts)):
        while start < stop and start in special:
            start += 1
        while stop > start and stop - 1 in special:
            stop -= 1
        if start < stop:
            text = "".join(unit.text for unit in _units_within(units, start, min(stop, start + 64)))
            lines = [line for line in text.splitlines() if line.strip()]
            found.append(Stretch(start, stop, "document", shortened(lines[0]) if lines else ""))
    return found


def _units_within(units: Sequence[Joined], start: int, stop: int) -> Sequence[Joined]:
    """Return the units of a text that begin from `start` to `stop` - 1."""
    first = bisect_left(units, start, key=lambda unit: unit.start)
    return units[first : bisect_left(units, stop, key=lambda unit: unit.start)]


def _parts_of_units(units: Sequence[Joined]) -> Iterator[Stretch]:
    """Give the parts of a text by tokens; a token that two parts share is the first one's."""
    pieces = _spaced([unit.text for unit in units])
    ends = [*accumulate(map(len, pieces))]
    opened: list[tuple[int, int]] = []  # where the parts end that go on, in characters and in tokens
    free = 0  # the first token after the parts that have ended
    for part in parts_of("".join(pieces)):
        while opened and opened[-1][0] <= part.start:
            free = max(free, opened.pop()[1])
        start = max(units[bisect_right(ends, part.start)].start, free)
        stop = min([units[bisect_left(ends, part.stop)].stop, *(end for _, end in opened[-1:])])
        if start < stop:
            opened.append((part.stop, stop))
            yield Stretch(start, stop, part.kind, part.name)


def _spaced(pieces: list[str]) -> list[str]:
    """Return tokens as the pieces of a text: words that stand without any space get one between them."""
    is_spaced = len(pieces) < 2 or any(any(map(str.isspace, piece)) for piece in pieces)
    if is_spaced or not all(piece.isascii() for piece in pieces):
        return pieces
    return [
        piece if after is None or _NO_SPACE_BEFORE.match(after) else f"{piece} "
        for piece, after in pairwise([*pieces, None])
        if piece is not None
    ]


def _do_cross(a: Stretch, b: Stretch) -> bool:
    """Return whether two stretches share tokens and each has some that the other has not."""
    return a.start < b.start < a.stop < b.stop or b.start < a.start < b.stop < a.stop


class Outlines:
    """The outlines of what is shown, each found once.

    Parameters
    ----------
    source : Source
        What is shown.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[tuple[int | None, ...], list[Stretch]] = {}

    def of(self, entry: int, sequence: int) -> dict[str, list[Stretch] | None]:
        """Return the outlines of queries and keys of a sequence; `key` is None where both are of one text."""
        shown = self._source.entries[entry]
        query, key = shown.texts[sequence] if sequence < len(shown.texts) else (None, None)
        if shown.entry.kind != "cross":
            return {"query": self._outline(entry, sequence, key), "key": None}
        return {"query": self._outline(entry, sequence, query, "query"), "key": self._outline(entry, sequence, key)}

    def _outline(self, entry: int, sequence: int, text: int | None, side: str = "key") -> list[Stretch]:
        """Return the outline of a text, or of the positions of a sequence whose text is not known."""
        shown = self._source.entries[entry]
        is_named = side in shown.sides_with_spans
        place = (text, is_named) if text is not None else (None, is_named, entry, sequence, side == "key")
        if place not in self._known:
            of = None if text is None else self._source.texts[text]
            ends = {"query": shown.entry.queries[1], "key": shown.entry.first_key + shown.entry.shape[3]}
            length = ends[side] if of is None else len(of)
            borders = [] if shown.entry.kind == "cross" else self._borders(entry, sequence, text)
            self._known[place] = outline_of(of, length, borders, shown.atlas.spans if is_named else None)
        return self._known[place]

    def _borders(self, entry: int, sequence: int, text: int | None) -> list[int]:
        """Return where documents begin, by the first mask of a matrix of this text that tells it."""
        for number, shown in enumerate(self._source.entries):
            matrix, first, places = shown.entry.matrix, shown.entry.first_key, [sequence] if number == entry else []
            if text is not None and shown.entry.kind != "cross":
                places = [at for at, (_, key) in enumerate(shown.texts) if key == text][:1]
            if matrix is None or not places:
                continue
            found = document_borders(matrix[places[0] : places[0] + 1], shown.entry.queries[0] - first)
            if found:
                return [first + border for border in found]
        return []
