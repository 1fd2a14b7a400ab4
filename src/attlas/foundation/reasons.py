"""Errors of other packages, in one line."""

from __future__ import annotations


def in_one_line(error: BaseException) -> str:
    r"""Return the class of an error and the first line of its message.

    Examples
    --------
    >>> in_one_line(ValueError("no kernel\nand more"))
    'ValueError: no kernel'
    >>> in_one_line(KeyError())
    'KeyError: '
    """
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
