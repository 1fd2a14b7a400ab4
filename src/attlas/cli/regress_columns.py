"""Columns of ``attlas regress`` as features: numbers as they are, texts one-hot, dates as days."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# The cells of a column: numbers, where the file has the type of a number for it, or else texts without blanks around.
Cells: TypeAlias = Floats | Sequence[str]

_MISSING_TEXTS = frozenset(("", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none", "?", "-", "–"))
_BOOLEAN_TEXTS = {text: float(text.lower() == "true") for text in ("True", "False", "TRUE", "FALSE", "true", "false")}
_DATE_PATTERN = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)? ?(?P<zone>Z|[+-]\d\d:?\d\d)?)?", flags=re.ASCII
)
_MAYBE_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}([T ,].*)?", flags=re.ASCII)
_BEGINS_AS_NUMBER = re.compile(r"[+-]?\.?\d", flags=re.ASCII)
_MOST_LEVELS = 20  # different texts of a column, at most: each becomes a feature with a bandwidth of its own


class Signs(NamedTuple):
    """The signs in numbers: those of ``1.234,5`` are ``Signs(decimal=",", thousands=".")``."""

    decimal: str = "."
    thousands: str | None = None

    def reads(self, cell: str) -> bool:
        """Tell whether a cell is a number, True or False."""
        return cell in _BOOLEAN_TEXTS or _number_pattern(self).fullmatch(cell) is not None

    def value(self, cell: str) -> float:
        """Return the number in a cell, 1 and 0 for True and False, or NaN."""
        if cell in _BOOLEAN_TEXTS:
            return _BOOLEAN_TEXTS[cell]
        if not _number_pattern(self).fullmatch(cell):
            return math.nan
        plain = cell if self.thousands is None else cell.replace(self.thousands, "")
        return float(plain.replace(self.decimal, "."))


@cache
def _number_pattern(signs: Signs) -> re.Pattern[str]:
    """Return the form of numbers. Signs of thousands stand in every third place, or nowhere."""
    point = re.escape(signs.decimal)
    form = rf"(\d+{point}?\d*|{point}\d+)([eE][+-]?\d+)?"
    if signs.thousands is not None:
        form += rf"|[1-9]\d{{0,2}}({re.escape(signs.thousands)}\d{{3}})+({point}\d+)?"
    return re.compile(rf"[+-]?({form})", flags=re.ASCII)


@dataclass(frozen=True)
class Column:
    """How the cells of a column become features.

    Attributes
    ----------
    name : str
        The column.
    kind : str
        "number", "category" (one feature of 0 and 1 per level), "date" (days since 1970-01-01) or "zoned date" (the
        same for times with a zone, in UTC).
    levels : tuple of str
        The different texts of a category, sorted.
    """

    name: str
    kind: str = "number"
    levels: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, cells: Cells, signs: Signs) -> Column:
        """Return the kind of a column; "number" where no other kind fits, so that its first other cell is an error."""
        if isinstance(cells, np.ndarray):
            return cls(name)
        texts = [text for text in cells if not is_missing(text)]
        levels = set(texts)
        if not texts or any(map(signs.reads, levels)):
            return cls(name)
        dates = [_DATE_PATTERN.fullmatch(text) for text in levels]
        zones = {bool(date and date["zone"]) for date in dates}
        if all(dates) and len(zones) == 1:
            return cls(name, "zoned date" if zones.pop() else "date")
        looks_otherwise = any(_MAYBE_DATE.fullmatch(text) or _BEGINS_AS_NUMBER.match(text) for text in levels)
        if looks_otherwise or len(levels) > min(_MOST_LEVELS, len(texts) // 2):
            return cls(name)
        return cls(name, "category", tuple(sorted(levels)))

    @property
    def features(self) -> list[str]:
        """Names of its features."""
        if self.kind == "category":
            return [f"{self.name}={level}" for level in self.levels]
        return [self.name]

    def numbers(self, cells: Cells, signs: Signs) -> Floats:
        """Return a number for each cell (of a category the index of its level); NaN where there is none."""
        if isinstance(cells, np.ndarray):
            return cells if self.kind == "number" else np.full(len(cells), math.nan)
        if self.kind.endswith("date"):
            return _days_since_1970(cells, self.kind == "zoned date")
        if self.kind == "category":
            places = {level: float(place) for place, level in enumerate(self.levels)}
            return np.array([places.get(text, math.nan) for text in cells], dtype=np.float64)
        # `signs` knows the decimal and the thousands sign.
        return np.array([signs.value(text) for text in cells], dtype=np.float64)

    def expand(self, numbers: Floats) -> Floats:
        """Return the features of numbers, shape (rows, features)."""
        if self.kind != "category":
            return numbers[:, None]
        features: Floats = (numbers[:, None] == np.arange(len(self.levels))).astype(np.float64)
        return features

    def learn(self, numbers: Floats) -> tuple[Column, Floats]:
        """Return the column without the levels that no row has, and its features."""
        # Of a category one column of 0 and 1 for each level.
        features = self.expand(numbers)
        if self.kind != "category":
            return self, features
        present = np.flatnonzero(features.any(0))
        return replace(self, levels=tuple(self.levels[place] for place in present)), features[:, present]

    def describe(self) -> str:
        """Say which features the column becomes; an empty text for numbers."""
        if self.kind == "number":
            return ""
        if self.kind == "category":
            levels = f"{len(self.levels)} {'level' if len(self.levels) == 1 else 'levels'}"
            return f"{self.name}: {levels}, one feature of 0 and 1 for each ({', '.join(self.levels)})"
        return f"{self.name}: dates, as days since 1970-01-01{' in UTC' if self.kind == 'zoned date' else ''}"


def is_missing(cell: str) -> bool:
    """Tell whether a cell stands for a missing value."""
    return cell.lower() in _MISSING_TEXTS


def _days_since_1970(texts: Sequence[str], zoned: bool) -> Floats:
    """Return days since 1970-01-01; NaN where a cell is no date, or where only one of cell and column has a zone."""
    import pandas as pd

    matches = [_DATE_PATTERN.fullmatch(text) for text in texts]
    dates = [match[0] if match and bool(match["zone"]) == zoned else None for match in matches]
    times = pd.Series(pd.to_datetime(dates, format="ISO8601", errors="coerce", utc=True))
    days: Floats = ((times - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)).to_numpy(np.float64, na_value=math.nan)
    return days


def explain_cell(cell: str, column: Column, cells: Cells, delimiter: str, arguments: Namespace) -> tuple[str, str]:
    """Return why a cell is no number of its column, and what helps; the latter may be empty."""
    texts = [str(text) for text in cells]
    present = {text for text in texts if not is_missing(text)}
    shown = repr(cell if len(cell) <= 40 else cell[:39] + "…")
    if not present:
        return f"{shown}, as in every row: the column is empty", f"--features without {column.name}"
    if is_missing(cell):
        return f"{shown}, a missing value" if cell else "an empty cell", "--drop-missing, which leaves out such rows"
    if column.kind == "category":
        levels = f"{', '.join(column.levels[:8])}{' …' if len(column.levels) > 8 else ''}"
        return f"{shown}, which no row of the fit had ({levels})", "--drop-missing, which gives such rows no prediction"
    if column.kind.endswith("date") or _MAYBE_DATE.fullmatch(cell) or _DATE_PATTERN.fullmatch(cell):
        return _explain_date(cell, shown, column, present)
    explained = _explain_sign(cell, shown, present, delimiter, arguments)
    if explained is not None:
        return explained
    if Signs(arguments.decimal, arguments.thousands).reads(cell):
        return f"{shown}, which is beyond the range of float64", ""
    if any(map(_BEGINS_AS_NUMBER.match, present)):
        return shown, ""
    if column.name in (arguments.target, arguments.weights):
        fix = "attlas.estimators.AttentionClassifier, which learns texts" if column.name == arguments.target else ""
        return f"{shown}, a text", fix
    rule = f"at most {_MOST_LEVELS}, each twice on average, become features"
    return f"{shown}, one of {len(present):,} different texts in {len(texts):,} rows; {rule}", ""


def _explain_sign(
    cell: str, shown: str, present: set[str], delimiter: str, arguments: Namespace
) -> tuple[str, str] | None:
    """Return what was found in a refused cell that is a number with other signs, and the fix; None for other cells.

    `shown` is the cell as the error shows it, `present` are the texts of its column that are not missing.
    """
    other, name = (".", "point") if arguments.decimal == "," else (",", "comma")
    as_decimal, as_thousands = Signs(other), Signs(arguments.decimal, other)
    numbers = [text for text in present if other in text and (as_decimal.reads(text) or as_thousands.reads(text))]
    if cell not in numbers:
        return None
    maybe_thousands = arguments.thousands is None and all(map(as_thousands.reads, numbers))
    # "1,000" may be 1 or 1000. A file that is delimited by commas has thousands there: who writes decimal commas
    # delimits by semicolons, and here each such cell would need quotes.
    if maybe_thousands and (delimiter == "," or not as_decimal.reads(cell)):
        return f"{shown}, which has separators of thousands", f"--thousands {other}"
    if not as_decimal.reads(cell):
        return None
    fix = f"--decimal {other} if the {name} is the decimal sign"
    return f"{shown}, which has a {name}", fix + (f", --thousands {other} if it separates thousands" * maybe_thousands)


def _explain_date(cell: str, shown: str, column: Column, present: set[str]) -> tuple[str, str]:
    """Return what was found in a refused cell that is, or may be, a date, and the fix; empty where there is none.

    `shown` is the cell as the error shows it, `present` are the texts of its column that are not missing.
    """
    date = _DATE_PATTERN.fullmatch(cell)
    if date is None:
        if column.kind.endswith("date"):
            return f"{shown} among dates", "dates as 2024-12-31, or 2024-12-31 23:59"
        return f"{shown}, which may be a date", "dates as 2024-12-31 (year-month-day)"
    if column.kind == "number":
        dates = all(map(_DATE_PATTERN.fullmatch, present))
        return f"{shown}, a date in {'a time zone in some rows only' if dates else 'a column of numbers or texts'}", ""
    if bool(date["zone"]) != (column.kind == "zoned date"):
        fix = "the same form of dates as in the fit"
        return f"{shown}, a time with{'' if date['zone'] else 'out'} a zone, unlike the fit", fix
    return f"{shown}, which no calendar has", "a day that there is"
