"""A sign of life from a long computation, on the standard error."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Self

_SECONDS_ON_TERMINAL, _SECONDS_IN_LOG = 0.1, 10.0  # seconds between two messages: on a terminal, and in a log


class Progress:
    """Messages of a long computation: one moving line on a terminal, elsewhere a line every ten seconds at most.

    Parameters
    ----------
    name : str
        Who computes.
    on : bool
        Whether anything is written.

    Examples
    --------
    >>> from attlas.foundation.progress import Progress
    >>> with Progress("AttentionRegressor", on=False) as report:
    ...     report("evaluation 1")
    """

    def __init__(self, name: str, on: bool) -> None:
        self._name, self._on = name, on
        self._moves = on and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._begin = time.perf_counter()
        self._told = -_SECONDS_IN_LOG  # seconds at which the last message was written: the first one is written at once
        self._text = ""

    def __call__(self, text: str) -> None:
        """Show a message, unless the last one is too recent."""
        self._text, seconds = text, time.perf_counter() - self._begin
        if self._on and seconds - self._told >= (_SECONDS_ON_TERMINAL if self._moves else _SECONDS_IN_LOG):
            self._told = seconds
            line = f"  {self._name}: {text}, {seconds:.0f} s"
            sys.stderr.write(f"\r\x1b[K{line}" if self._moves else f"{line}\n")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Clear the moving line of a terminal; in a log, write how it ended.
        if self._moves:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        elif self._text and error is None:
            self._told = -_SECONDS_IN_LOG  # the last message too is written at once
            self(f"done, {self._text}")
