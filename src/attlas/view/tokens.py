"""The text of a recording: what each token shows, characters of several tokens, and where something is written."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from attlas.foundation.compat import cached_property

_UNKNOWN_PART = "⟨…⟩"  # a part of a character whose bytes were not recorded
_STRAY_BYTES = re.compile("[\udc80-\udcff]+")  # bytes that are no character, as "surrogateescape" decodes them
_HEX_DIGITS = re.compile(r"([0-9a-f]{2}){1,64}")


class Joined(NamedTuple):
    """Tokens that make up one or a few characters together."""

    start: int
    stop: int
    text: str


class Text:
    r"""Tokens of a text.

    Parameters
    ----------
    tokens : sequence of str
        Text of each token; empty for one that ends inside a character, where the last one has it all.
    pieces : mapping of int to bytes, optional
        Bytes of the tokens that are no text of their own.

    Examples
    --------
    >>> from attlas.view.tokens import Text
    >>> text = Text(["a ", "", "日", "b"], {1: b"\xe6", 2: b"\x97\xa5"})
    >>> text.shown, text.joined
    (['a ', '⟨E6⟩', '⟨97 A5⟩', 'b'], [Joined(start=1, stop=3, text='日')])
    >>> text.search("日B", 10)
    ([(1, 4)], 1)
    """

    def __init__(self, tokens: Sequence[str], pieces: Mapping[int, bytes] | None = None) -> None:
        self.shown = list(tokens)
        self.joined: list[Joined] = []
        units: list[Joined] = []
        start = 0
        while start < len(tokens):
            stop, whole = _unit_of_tokens(tokens, start, pieces or {})
            units.append(Joined(start, stop, whole))
            if stop - start > 1 or start in (pieces or {}):
                self.joined.append(units[-1])
                self.shown[start:stop] = _shown_texts(tokens, start, stop, pieces or {})
            start = stop
        #: Tokens that make up characters together, each other token alone: the whole text, in order.
        self.units = units

    def __len__(self) -> int:
        return len(self.shown)

    def joined_in(self, span: range) -> list[Joined]:
        """Return the groups of tokens that touch a stretch of the text."""
        first = bisect_right(self.joined, span.start, key=lambda group: group.stop) if len(span) else len(self.joined)
        found = []
        for group in self.joined[first:]:
            if group.start >= span.stop:
                break
            found.append(group)
        return found

    def search(self, wanted: str, limit: int) -> tuple[list[tuple[int, int]], int]:
        """Return where a text is written: spans of tokens, at most `limit` of them, and how many there are.

        Upper and lower case are the same, and a match may cross tokens. Matches do not overlap.
        """
        whole, ends = self._search_form
        wanted = wanted.casefold()
        found: list[tuple[int, int]] = []
        total, at = 0, whole.find(wanted) if wanted else -1
        while at >= 0:
            total += 1
            if total <= limit:
                # The units of text in which the match begins and ends; `ends` has the place where each unit ends.
                first, last = (self.units[bisect_right(ends, place)] for place in (at, at + len(wanted) - 1))
                found.append((first.start, last.stop))
            at = whole.find(wanted, at + len(wanted))
        return found, total

    @cached_property
    def _search_form(self) -> tuple[str, list[int]]:
        """Return the text without upper case, and where each unit ends in it."""
        parts = [unit.text.casefold() for unit in self.units]
        return "".join(parts), list(accumulate(map(len, parts)))


def pieces_from(recorded: object, sequence: int = 0) -> dict[int, bytes]:
    """Return the bytes of the tokens of a sequence, ``{"17": "e697"}``, from those of one sequence or a list of such.

    What is none of that is left out.
    """
    every = recorded if isinstance(recorded, list) else [recorded]
    recorded = every[sequence] if sequence < len(every) else None
    if not isinstance(recorded, Mapping):
        return {}
    return {
        int(place): bytes.fromhex(digits)
        for place, digits in recorded.items()
        if isinstance(place, str) and place.isdecimal() and isinstance(digits, str) and _HEX_DIGITS.fullmatch(digits)
    }


def _unit_of_tokens(tokens: Sequence[str], start: int, pieces: Mapping[int, bytes]) -> tuple[int, str]:
    """Return the end of the tokens that belong together with the one at `start`, and their text."""
    if start in pieces:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        stop, text = start, ""
        while stop in pieces:
            text += decoder.decode(pieces[stop])
            stop += 1
            if not decoder.getstate()[0]:  # no character is left open
                break
        return stop, text + decoder.decode(b"", final=True)
    stop = start
    while stop < len(tokens) and not tokens[stop] and stop not in pieces:
        stop += 1
    # Empty tokens are part of what follows where that begins with a character of several bytes.
    if stop > start and stop < len(tokens) and stop not in pieces and not tokens[stop][:1].isascii():
        return stop + 1, tokens[stop]
    return start + 1, tokens[start]


def _shown_texts(tokens: Sequence[str], start: int, stop: int, pieces: Mapping[int, bytes]) -> list[str]:
    """Return the shown text of each token of a group: characters that lie in it whole, and the bytes of others."""
    if start not in pieces:
        return [_UNKNOWN_PART] * (stop - start)
    return [_readable_bytes(pieces[place]) for place in range(start, stop)]


def _readable_bytes(piece: bytes) -> str:
    r"""Return bytes as text, with those that are no character of their own in brackets.

    Examples
    --------
    >>> _readable_bytes(b"\x97\xa5b")
    '⟨97 A5⟩b'
    """
    return _STRAY_BYTES.sub(
        lambda stray: f"⟨{stray[0].encode('utf-8', 'surrogateescape').hex(' ').upper()}⟩",
        piece.decode("utf-8", "surrogateescape"),
    )
