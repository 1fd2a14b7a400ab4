"""What a question may carry: whole numbers and words, each checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WHOLE_NUMBER = re.compile(r"[0-9]{1,15}")
_MOST_SHOWN = 40  # characters of a wrong value that an answer repeats


class QuestionError(Exception):
    """A question that cannot be answered: a status as HTTP counts them, one line that says why, and further facts."""

    def __init__(self, status: int, text: str, **more: object) -> None:
        super().__init__(text)
        self.status, self.text, self.more = status, text, more


class Parameters:
    """The parameters of one question, as texts.

    Parameters
    ----------
    params : mapping of str to str
        Names and values; unknown names are not looked at.

    Examples
    --------
    >>> Parameters({"level": "3"}).whole("level", 0, 9)
    3
    """

    def __init__(self, params: Mapping[str, str]) -> None:
        self._params = params

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number from `low` up to and without `high`.

        Raises
        ------
        QuestionError
            400 if it is missing or no number, 404 if it lies outside.
        """
        text = self._params.get(name)
        if text is None and default is not None:
            return default
        if text is None or _WHOLE_NUMBER.fullmatch(text) is None:
            raise QuestionError(400, f"{name} must be a whole number: {_quoted_value(text)}")
        value = int(text)
        if not low <= value < high:
            raise QuestionError(404, f"{name} must be from {low} to {high - 1}: {value}")
        return value

    def word(self, name: str, words: tuple[str, ...], default: str | None = None) -> str:
        """Return one of some words.

        Raises
        ------
        QuestionError
            400 if it is none of them.
        """
        text = self._params.get(name, default)
        if text not in words or text is None:
            raise QuestionError(400, f"{name} must be one of {', '.join(words)}: {_quoted_value(text)}")
        return text

    def text(self, name: str, longest: int) -> str:
        """Return a text that is not empty.

        Raises
        ------
        QuestionError
            400 if it is missing, empty or too long.
        """
        text = self._params.get(name)
        if not text or len(text) > longest:
            raise QuestionError(400, f"{name} must be a text of 1 to {longest} characters")
        return text

    def span(self, start: str, stop: str, size: int) -> range:
        """Return a stretch of an axis, which may be empty.

        Raises
        ------
        QuestionError
            400 if an end is no number or they are in the wrong order, 404 if one lies outside.
        """
        first, last = self.whole(start, 0, size + 1), self.whole(stop, 0, size + 1)
        if last < first:
            raise QuestionError(400, f"{stop} must not be below {start}: {last} < {first}")
        return range(first, last)

    def has(self, *names: str) -> bool:
        """Return whether any of some parameters was given."""
        return any(name in self._params for name in names)

    def equals(self, name: str, word: str) -> bool:
        """Return whether a parameter is a word."""
        return self._params.get(name) == word


def _quoted_value(text: str | None) -> str:
    return "missing" if text is None else f"{text[:_MOST_SHOWN]!a}"
