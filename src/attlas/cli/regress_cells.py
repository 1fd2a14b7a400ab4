"""Cells of a table as numbers: what counts as one, what counts as missing, and what is said of the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["MISSING", "is_missing", "is_number", "numbers", "trouble"]

# What programs write where there is no value; an empty cell is one too.
MISSING = frozenset(("", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?", "-", "–"))
# float() would take more than numbers as files hold them: 1_000, infinity, digits of other scripts.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", flags=re.ASCII)
_STRANGE = re.compile(r"[^0-9eE+\-. \t\n]")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?", flags=re.ASCII)


def is_missing(cell: str) -> bool:
    """Return whether a cell says that there is no value.

    Examples
    --------
    >>> is_missing(" NA"), is_missing("0")
    (True, False)
    """
    return cell.strip().lower() in MISSING


def is_number(cell: str, decimal: str = ".") -> bool:
    """Return whether a cell is a number with this decimal sign.

    Examples
    --------
    >>> is_number("-1.5e3"), is_number("1,5"), is_number("1,5", ","), is_number("1.234", ",")
    (True, False, True, False)
    """
    text = cell.strip()
    if decimal == ",":
        # A point is a separator of thousands there: reading 1.234 as one and a bit would be a silent mistake.
        return "." not in text and _NUMBER.fullmatch(text.replace(",", ".")) is not None
    return _NUMBER.fullmatch(text) is not None


def numbers(column: Sequence[str], decimal: str = ".") -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a column as numbers, and which of its cells are none.

    Parameters
    ----------
    column : sequence of str
        Cells, as the file holds them.
    decimal : {".", ","}
        Decimal sign.

    Returns
    -------
    values : ndarray, shape (rows,)
        NaN where a cell is no finite number.
    wrong : ndarray of bool, shape (rows,)
        Where that is.

    Notes
    -----
    A column of plain numbers is converted as a whole, 0.2 µs a cell; only one that has other cells is looked at
    cell by cell.

    Examples
    --------
    >>> values, wrong = numbers(["1", "2.5", "NA"])
    >>> values.tolist(), wrong.tolist()
    ([1.0, 2.5, nan], [False, False, True])
    """
    values = None
    if decimal == "." and not _STRANGE.search("\n".join(column)):
        try:
            values = np.array(list(map(float, column)), dtype=np.float64)
        except ValueError:
            values = None
    if values is None:
        values = np.array(
            [float(c.replace(",", ".")) if is_number(c, decimal) else math.nan for c in column], dtype=np.float64
        )
    wrong = ~np.isfinite(values)
    values[wrong] = np.nan
    return values, wrong


def trouble(cell: str, decimal: str = ".") -> tuple[str, str]:
    """Say what a cell holds that is no number, and what to type now.

    Returns
    -------
    tuple of str
        What was found; the fix, empty where there is none but to change the file or to leave the column out.

    Examples
    --------
    >>> trouble("NA")
    ("'NA', a missing value", '--drop-missing, which leaves such rows out')
    """
    text = cell.strip()
    shown = repr(text if len(text) <= 40 else text[:39] + "…")
    if text.lower() in MISSING:
        return (
            f"{shown}, a missing value" if text else "an empty cell",
            "--drop-missing, which leaves such rows out",
        )
    if is_number(text, decimal):
        return f"{shown}, which is beyond the range of float64", ""
    if decimal == "." and _DECIMAL_COMMA.fullmatch(text):
        return f"{shown}, which has a comma", "--decimal , if the comma is the decimal sign"
    if decimal == "," and _NUMBER.fullmatch(text):
        return f"{shown}, which has a point and no comma", "--decimal . if the point is the decimal sign"
    return shown, ""
