"""The text of a recording: its tokens, and where something is written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["Text"]


class Text:
    """Tokens of a text.

    Parameters
    ----------
    tokens : sequence of str
        What each token shows.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens
        self._folded: tuple[str, list[int]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def search(self, wanted: str, limit: int) -> tuple[list[tuple[int, int]], int]:
        """Return where a text is written: spans of tokens, at most `limit` of them, and how many there are.

        Upper and lower case are the same, and a match may cross tokens. Matches do not overlap.
        """
        whole, ends = self._search_form()
        wanted = wanted.casefold()
        found, total, at = [], 0, whole.find(wanted) if wanted else -1
        while at >= 0:
            total += 1
            if total <= limit:
                # The token in which the first character lies, and the one in which the last does.
                found.append((bisect_right(ends, at), bisect_right(ends, at + len(wanted) - 1) + 1))
            at = whole.find(wanted, at + len(wanted))
        return found, total

    def _search_form(self) -> tuple[str, list[int]]:
        """Return the text without upper case, and where each token ends in it."""
        if self._folded is None:
            parts = [token.casefold() for token in self.tokens]
            self._folded = "".join(parts), list(accumulate(map(len, parts)))
        return self._folded
