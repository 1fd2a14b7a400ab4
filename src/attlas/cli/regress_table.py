"""Tables of ``attlas regress``: pandas reads them, and every cell that is used must have a number."""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
import shlex
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attlas.cli.checks import need
from attlas.cli.files import read_lines
from attlas.cli.formatting import plural
from attlas.cli.regress_columns import NUMBER, Column, cell_value, explain_cell, is_grouped, is_missing
from attlas.cli.terminal import UsageError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

DELIMITERS = {",": ",", ";": ";", "|": "|", "tab": "\t", "space": " "}
_CELLS = "every cell that is used must be a number, a date, or one of a few texts."


@dataclass(frozen=True)
class Table:
    """Rows of a file as pandas read them: a CSV file as text, with the line in which each row begins."""

    source: str
    frame: pd.DataFrame
    names: list[str]
    named: bool = True
    lines: Any = None
    delimiter: str = ","

    def columns(self, names: list[str], arguments: Namespace) -> list[Column]:
        """Return how each of these features becomes numbers."""
        return [Column.of(name, self.frame.iloc[:, self.names.index(name)], arguments) for name in names]

    def numbers(self, columns: list[Column], arguments: Namespace) -> Floats:
        """Return columns as numbers, one for each cell; NaN where a value is missing and may be.

        Raises
        ------
        UsageError
            If a cell is no number (nor a date or a text of its column), or is missing and may not be: line and
            column are named. If a column holds lists or records.
        """
        from pandas.api.types import is_list_like

        parts = [self.frame.iloc[:, self.names.index(column.name)] for column in columns]
        for column, part in zip(columns, parts, strict=True):
            if part.dtype == object and part.map(is_list_like).any():
                fix = f"--features without {column.name}, or a column for each number in the lists"
                raise UsageError(_CELLS, f"lists or records in column {column.name}", fix, {self.source: column.name})
        values = [column.numbers(part, arguments) for column, part in zip(columns, parts, strict=True)]
        table = np.column_stack(values) if values else np.empty((len(self.frame), 0))
        for row, index in np.argwhere(~np.isfinite(table)):
            column, cell = columns[index], str(parts[index].iloc[row]).strip()
            if arguments.drop_missing and (is_missing(cell) or column.kind == "category"):
                continue
            text, fix = explain_cell(cell, column, parts[index], self.delimiter, arguments)
            choose = self._usable_features(columns, arguments) or "a file whose columns hold numbers"
            fix = fix or ("another column, or numbers in this one" if column.name == arguments.target else choose)
            where = f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"
            raise UsageError(_CELLS, text, fix, {self.source: f"{where}, column {column.name}"})
        return table

    def _usable_features(self, columns: list[Column], arguments: Namespace) -> str:
        """Return the options for the features with a number in each cell, with a decimal comma where it is one."""

        def usable(decimal: str) -> list[str]:
            signs = Namespace(**vars(arguments) | {"decimal": decimal})
            found = []
            for column in columns:
                part = self.frame.iloc[:, self.names.index(column.name)]
                own = column if decimal == arguments.decimal else Column.of(column.name, part, signs)
                if all(is_missing(str(text)) for text in part[~np.isfinite(own.numbers(part, signs))]):
                    found.append(column.name)
            return found

        plain, options = usable(arguments.decimal), ""
        more = [] if self.delimiter == "," else [name for name in usable(",") if name not in plain]
        # A comma in each third place from the right may separate thousands as well.
        if any(not is_grouped(str(cell)) for name in more for cell in self.frame.iloc[:, self.names.index(name)]):
            plain, options = usable(","), "--decimal , "
        good = [name for name in plain if name not in (arguments.target, arguments.weights)]
        return f"{options}--features {join(good)}" if good else ""

    def write(self, path: Path, suffix: str, names: list[str], new: Floats, decimal: str) -> None:
        """Write the rows as they were, with new columns behind them."""
        frame = self.frame.copy()
        if suffix == ".parquet":
            frame.columns = self.names
            frame[names] = new
            frame.to_parquet(path)
            return
        frame.columns = range(frame.shape[1])
        for index, column in enumerate(new.T, frame.shape[1]):
            frame[index] = ["" if math.isnan(value) else repr(value).replace(".", decimal) for value in column.tolist()]
        delimiter = "\t" if suffix == ".tsv" else self.delimiter
        header = [*self.names, *names] if self.named else False
        frame.to_csv(path, sep=delimiter, header=header, index=False, lineterminator="\n", encoding="utf-8")


def read(path: Path, arguments: Namespace) -> Table:
    """Read a table, every cell of a CSV file as text."""
    import pandas as pd

    if path.suffix.lower() in (".parquet", ".pq"):
        need("pyarrow", "Parquet", "pip install pyarrow")
        try:
            frame = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            found = f"{str(error)[:200] if path.exists() else 'nothing there'}: {path}"
            raise UsageError("the file must be Parquet.", found, "a Parquet file that exists") from None
        if any(name is not None for name in frame.index.names):  # an index with a name is a column of the file
            frame = frame.reset_index()
        return Table(path.name, frame, [str(name) for name in frame.columns])
    source, text = read_lines(path, "the table")
    if not text.strip():
        raise UsageError("the table must not be empty.", f"{source} has no text", "a file with a header and some rows")
    delimiter = DELIMITERS.get(arguments.delimiter, arguments.delimiter) or _delimiter(text)
    cells, lines = _rows(text, delimiter, source)
    named = arguments.header == "yes" or (
        arguments.header == "auto" and any(math.isnan(cell_value(cell.strip(), arguments)) for cell in cells.iloc[0])
    )
    names = [cell.strip() for cell in cells.iloc[0]] if named else [str(index + 1) for index in range(cells.shape[1])]
    return Table(source, cells.iloc[int(named) :], names, named, lines[int(named) :], delimiter)


def _rows(text: str, delimiter: str, source: str) -> tuple[pd.DataFrame, NDArray[np.int64]]:
    """Return all records, the header included, and the line in which each begins."""
    import pandas as pd

    body = text.lstrip("\n")
    before = len(text) - len(body)
    try:
        # The engine of Python is strict about quotes, and tells a short row from one with empty cells.
        frame = pd.read_csv(
            io.StringIO(body),
            sep=r"\s+" if delimiter == " " else delimiter,
            header=None,
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
            engine="python",
        )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, csv.Error) as error:
        rule, fix = "quotes must enclose whole cells, and be closed.", "write a quote within quotes twice"
        if ragged := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error)):
            columns, line, cells = map(int, ragged.groups())
            raise _uneven(cells, columns, delimiter, line + before, source) from None
        raise UsageError(rule, str(error).strip(), fix, {source: f"the delimiter is {delimiter!r}"}) from None
    missing, values = frame.isna().to_numpy(), frame.fillna("").to_numpy()
    inside = np.array([sum(cell.count("\n") for cell in row) for row in values], dtype=np.int64)
    lines = np.arange(len(frame)) + 1 + before + np.concatenate([[0], inside.cumsum()[:-1]]).astype(np.int64)
    empty = missing[:, 1:].all(1) & np.array([not row[0].strip() for row in values])
    if values.shape[1] == 1:
        empty = missing[:, 0]
    short = missing.any(1) & ~empty
    if short.any():
        row = int(short.argmax())
        raise _uneven(int((~missing[row]).sum()), frame.shape[1], delimiter, int(lines[row]), source)
    return frame[~empty], lines[~empty]


def _uneven(cells: int, columns: int, delimiter: str, line: int, source: str) -> UsageError:
    found = f"{plural(cells, 'cell')}, {plural(columns, 'column')} (the delimiter is {delimiter!r})"
    fix = "mend that row, or name another --delimiter"
    return UsageError("every row must have as many cells as the first.", found, fix, {source: f"line {line}"})


def _delimiter(text: str) -> str:
    """Return the delimiter that cuts the first records into equally many cells, most of them numbers."""
    head, best, merit = [line for line in text.split("\n", 100)[:100] if line.strip()], ",", -1.0
    for delimiter in DELIMITERS.values():
        try:
            rows = list(csv.reader(head, delimiter=delimiter, skipinitialspace=True))[:50]
        except csv.Error:
            continue
        rows = [row[:-1] if delimiter == " " and row and not row[-1] else row for row in rows]
        if not rows or len(rows[0]) < 2:
            continue
        even = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
        # A decimal comma counts as well: 1,5;2,5 is two numbers, and not 1 and 5;2 and 5.
        cells = [cell.strip() for row in rows for cell in row]
        numbers = sum(bool(NUMBER.fullmatch(cell) or NUMBER.fullmatch(cell.replace(",", "."))) for cell in cells)
        if even * (0.01 + numbers / len(cells)) > merit:
            best, merit = delimiter, even * (0.01 + numbers / len(cells))
    return best


def choose_features(table: Table, arguments: Namespace) -> list[str]:
    """Return the names of the features, after a check that they and the target are columns of the table."""
    names, weights = table.names, [] if arguments.weights is None else [arguments.weights]
    if arguments.features is not None:
        features = split(arguments.features)
    else:
        # A first column without a name is the index that data frames write before the others.
        nameless = [i for i in range(1, len(names)) if not names[i] and table.frame.iloc[:, i].astype(bool).any()]
        if nameless:
            found = f"column {nameless[0] + 1} of {table.source} has none"
            raise UsageError("every column with cells must have a name.", found, "--features A,B,... leaves it out")
        features = [name for name in names if name not in (arguments.target, arguments.weights, "")]
    text = "" if table.named else "; its first line is all numbers, so columns are called by their positions"
    options = (("--target", [arguments.target]), ("--features", features), ("--weights", weights))
    for option, name in ((option, name) for option, each in options for name in each):
        if names.count(name) == 1:
            continue
        rule = "must be columns of the table" if name not in names else "must be names that occur once"
        has = f"{', '.join(names[:24])}{' …' if len(names) > 24 else ''}{text}"
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5) or [other for other in names if other][:1]
        fix = f"rename one of the columns {name}" if name in names else f"{option} {join(close)}"
        rule = f"--target{', --weights' if weights else ''} and --features {rule}."
        raise UsageError(rule, f"{option} {name}; {table.source} has {has}", fix)
    every = [arguments.target, *weights, *features]
    if len(set(every)) < len(every):
        twice = next(name for name in every if every.count(name) > 1)
        raise UsageError("every column can be used once.", f"{twice} twice", "leave it out of --features")
    if not features:
        found = f"{table.source} has {', '.join(names)}"
        raise UsageError("there must be a feature.", found, "--features A,B,..., or another --delimiter")
    return features


def join(names: list[str]) -> str:
    """Return names as an option that `split` reads, quoted for a shell; a name with a comma stands in double quotes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return shlex.quote(text.getvalue())


def split(names: str) -> list[str]:
    """Return the names in an option."""
    return [name.strip() for name in next(csv.reader([names], skipinitialspace=True))]


def number(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, without an exponent where it reads well without.

    Examples
    --------
    >>> number(0.031234), number(1234567.0), number(1.5e-9), number(float("nan"))
    ('0.03123', '1,234,567', '1.5e-09', '–')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits - 1 - size)}f}" if -5 < size < 9 else f"{value:.{digits - 1}g}"
