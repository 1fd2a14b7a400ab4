"""Columns of ``attlas regress`` as features: numbers as they are, texts one-hot, dates as days."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", flags=re.ASCII)
_MISSING = frozenset(("", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none", "?", "-", "–"))
_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?", flags=re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)? ?(?P<zone>Z|[+-]\d\d:?\d\d)?)?", flags=re.ASCII)
_MAYBE_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}([T ,].*)?", flags=re.ASCII)
_LEVELS = 20  # different texts of a column, at most: each becomes a feature with a bandwidth of its own


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
    def of(cls, name: str, column: pd.Series[Any], arguments: Namespace) -> Column:
        """Return what a column holds; "number" where it is nothing else, so that its first other cell is an error."""
        import pandas as pd

        if pd.api.types.is_datetime64_any_dtype(column):
            return cls(name, "date" if column.dt.tz is None else "zoned date")
        if pd.api.types.is_numeric_dtype(column):
            return cls(name)
        texts = [text for text in _texts(column) if not is_missing(text)]
        levels = sorted(set(texts))
        if not texts or any(not math.isnan(cell_value(text, arguments)) for text in levels):
            return cls(name)
        dates = [_DATE.fullmatch(text) for text in levels]
        zones = {bool(date and date["zone"]) for date in dates}
        if all(dates) and len(zones) == 1:
            return cls(name, "zoned date" if zones.pop() else "date")
        looks_otherwise = any(_MAYBE_DATE.fullmatch(text) or NUMBER.match(text) for text in levels)
        if looks_otherwise or len(levels) > min(_LEVELS, len(texts) // 2):
            return cls(name)
        return cls(name, "category", tuple(levels))

    @property
    def features(self) -> list[str]:
        """Names of its features."""
        if self.kind == "category":
            return [f"{self.name}={level}" for level in self.levels]
        return [self.name]

    def numbers(self, column: pd.Series[Any], arguments: Namespace) -> Floats:
        """Return a number for each cell (of a category the index of its level); NaN where there is none."""
        import pandas as pd

        if self.kind.endswith("date"):
            return _days(column, self.kind == "zoned date")
        if self.kind == "category":
            index = {level: float(place) for place, level in enumerate(self.levels)}
            return np.array([index.get(text, math.nan) for text in _texts(column)], dtype=np.float64)
        if pd.api.types.is_datetime64_any_dtype(column):
            return np.full(len(column), math.nan)
        if pd.api.types.is_numeric_dtype(column):
            numbers: Floats = column.to_numpy(dtype=np.float64, na_value=math.nan)
            return numbers
        return np.array([cell_value(text, arguments) for text in _texts(column)], dtype=np.float64)

    def with_present_levels(self, values: Floats) -> tuple[Column, Floats]:
        """Return the column without the levels that no row has, and its numbers in terms of those left."""
        if self.kind != "category":
            return self, values
        present, codes = np.unique(values, return_inverse=True)
        return replace(self, levels=tuple(self.levels[int(code)] for code in present)), codes.astype(np.float64)

    def expand(self, values: Floats) -> Floats:
        """Return the features of numbers, shape (rows, features)."""
        if self.kind != "category":
            return values[:, None]
        one_hot: Floats = (values[:, None] == np.arange(len(self.levels))).astype(np.float64)
        return one_hot

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
    return cell.strip().lower() in _MISSING


def is_grouped(cell: str) -> bool:
    """Tell whether a cell is missing, has no comma, or commas that may separate thousands."""
    return "," not in cell or is_missing(cell) or _GROUPS.fullmatch(cell.strip()) is not None


def _texts(column: pd.Series[Any]) -> list[str]:
    return [str(cell).strip() for cell in column]


def _days(column: pd.Series[Any], zoned: bool) -> Floats:
    """Return days since 1970-01-01; NaN where a cell is no date, or where only one of cell and column has a zone."""
    import pandas as pd

    if not pd.api.types.is_datetime64_any_dtype(column):
        matches = [_DATE.fullmatch(text) for text in _texts(column)]
        texts = [match[0] if match and bool(match["zone"]) == zoned else None for match in matches]
        column = pd.Series(pd.to_datetime(texts, format="ISO8601", errors="coerce", utc=True))
    elif (column.dt.tz is not None) != zoned:
        return np.full(len(column), math.nan)
    start = pd.Timestamp(0, tz="UTC") if column.dt.tz is not None else pd.Timestamp(0)
    days: Floats = ((column - start) / pd.Timedelta(days=1)).to_numpy(dtype=np.float64, na_value=math.nan)
    return days


def cell_value(cell: str, arguments: Namespace) -> float:
    """Return the number in a cell, 1 and 0 for True and False, or NaN."""
    if cell in ("True", "False", "TRUE", "FALSE", "true", "false"):
        return float(cell.lower() == "true")
    other = "." if arguments.decimal == "," else ","
    if arguments.decimal == ",":  # from here on the decimal sign is a point, and the other one a comma
        cell = cell.translate({44: ".", 46: ","})
    if arguments.thousands == other and _GROUPS.fullmatch(cell):
        cell = cell.replace(",", "")
    return float(cell) if NUMBER.fullmatch(cell) else math.nan


def explain_cell(
    cell: str, column: Column, part: pd.Series[Any], delimiter: str, arguments: Namespace
) -> tuple[str, str]:
    """Return why a cell is no number of its column, and what helps; the latter may be empty."""
    shown = repr(cell if len(cell) <= 40 else cell[:39] + "…")
    if all(map(is_missing, _texts(part))):
        return f"{shown}, as in every row: the column is empty", f"--features without {column.name}"
    if is_missing(cell):
        return f"{shown}, a missing value" if cell else "an empty cell", "--drop-missing, which leaves out such rows"
    if column.kind == "category":
        levels = f"{', '.join(column.levels[:8])}{' …' if len(column.levels) > 8 else ''}"
        return f"{shown}, which no row of the fit had ({levels})", "--drop-missing, which gives such rows no prediction"
    if column.kind.endswith("date") or _MAYBE_DATE.fullmatch(cell) or _DATE.fullmatch(cell):
        return _explain_date(cell, shown, column, part)
    sign = "." if arguments.decimal == "," else ","
    texts = _texts(part)
    cells = [text for text in texts if sign in text]
    grouped = all(_GROUPS.fullmatch(text.translate({44: ".", 46: ","} if sign == "." else {})) for text in cells)
    if sign in cell and arguments.thousands is None and grouped and (delimiter == "," or cell.count(sign) > 1):
        return f"{shown}, which has separators of thousands", f"--thousands {sign}"
    if sign == "," and re.fullmatch(r"[+-]?\d*,\d+([eE][+-]?\d+)?", cell):
        both = ", --thousands , if it separates thousands" if grouped and arguments.thousands is None else ""
        return f"{shown}, which has a comma", f"--decimal , if the comma is the decimal sign{both}"
    if sign == "." and NUMBER.fullmatch(cell):
        return f"{shown}, which has a point and no comma", "--decimal . if the point is the decimal sign"
    if NUMBER.fullmatch(cell):
        return f"{shown}, which is beyond the range of float64", ""
    known = {text for text in texts if not is_missing(text)}
    if any(NUMBER.match(text) for text in known):
        return shown, ""
    if column.name in (arguments.target, arguments.weights):
        fix = "attlas.estimators.AttentionClassifier, which learns texts" if column.name == arguments.target else ""
        return f"{shown}, a text", fix
    rule = f"at most {_LEVELS}, each twice on average, become features"
    return f"{shown}, one of {len(known):,} different texts in {len(texts):,} rows; {rule}", ""


def _explain_date(cell: str, shown: str, column: Column, part: pd.Series[Any]) -> tuple[str, str]:
    if _DATE.fullmatch(cell):
        zone = bool(_DATE.fullmatch(cell)["zone"])  # type: ignore[index]  # it matches
        if column.kind == "number":
            zones = all(_DATE.fullmatch(text) or is_missing(text) for text in _texts(part))
            mixed = "a time zone in some rows only" if zones else "a column of numbers or texts"
            return f"{shown}, a date in {mixed}", ""
        if zone != (column.kind == "zoned date"):
            fix = "the same form of dates as in the fit"
            return f"{shown}, a time with{'' if zone else 'out'} a zone, unlike the fit", fix
        return f"{shown}, which no calendar has", "a day that there is"
    if column.kind.endswith("date"):
        return f"{shown} among dates", "dates as 2024-12-31, or 2024-12-31 23:59"
    return f"{shown}, which may be a date", "dates as 2024-12-31 (year-month-day)"
