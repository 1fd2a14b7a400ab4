"""Tables of ``attlas regress``: rows of CSV or Parquet files, and a number for every cell that is used."""

from __future__ import annotations

import csv
import difflib
import io
import math
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attlas.cli.checks import need
from attlas.cli.files import read_lines
from attlas.cli.formatting import plural
from attlas.cli.regress_columns import Cells, Column, Floats, Signs, explain_cell, is_missing
from attlas.cli.terminal import UsageError

if TYPE_CHECKING:
    import pandas as pd

DELIMITERS = {",": ",", ";": ";", "|": "|", "tab": "\t", "space": " "}
_CELLS_RULE = "every cell that is used must be a number, a date, or one of a few texts."


@dataclass(frozen=True)
class Table:
    """Rows of a file: those of a CSV file as text, with the line in which each begins."""

    source: str
    frame: pd.DataFrame
    names: list[str]
    named: bool = True
    lines: Sequence[int] | None = None
    delimiter: str = ","

    def cells(self, name: str) -> Cells:
        """Return the cells of a column: numbers where it has a type of numbers, texts in any other column."""
        from pandas.api.types import is_list_like, is_numeric_dtype

        column = self.frame.iloc[:, self.names.index(name)]
        if is_numeric_dtype(column):
            numbers: Floats = column.to_numpy(dtype=np.float64, na_value=math.nan)
            return numbers
        if self.lines is None and column.map(is_list_like).any():
            fix = f"--features without {name}, or a column for each number in the lists"
            raise UsageError(_CELLS_RULE, f"lists or records in column {name}", fix, arguments={self.source: name})
        return [str(cell).strip() for cell in column]

    def columns(self, names: list[str], arguments: Namespace) -> list[Column]:
        """Return how each of these features becomes numbers."""
        return [Column.of(name, self.cells(name), _signs_of_numbers(arguments)) for name in names]

    def numbers(self, columns: list[Column], arguments: Namespace) -> Floats:
        """Return columns as numbers, one for each cell; NaN where a value is missing and may be.

        Raises
        ------
        UsageError
            If a cell is no number (nor a date or a text of its column), or is missing and may not be: line and
            column are named. If a column holds lists or records.
        """
        cells = [self.cells(column.name) for column in columns]
        values = [
            column.numbers(part, _signs_of_numbers(arguments)) for column, part in zip(columns, cells, strict=True)
        ]
        table = np.column_stack(values) if values else np.empty((len(self.frame), 0))
        for row, index in np.argwhere(~np.isfinite(table)):
            column, cell = columns[index], str(cells[index][row])
            if arguments.drop_missing and (is_missing(cell) or column.kind == "category"):
                continue
            text, fix = explain_cell(cell, column, cells[index], self.delimiter, arguments)
            choose = self._usable_features(columns, arguments) or "a file whose columns hold numbers"
            fix = fix or ("another column, or numbers in this one" if column.name == arguments.target else choose)
            where = f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"
            raise UsageError(_CELLS_RULE, text, fix, arguments={self.source: f"{where}, column {column.name}"})
        return table

    def _usable_features(self, columns: list[Column], arguments: Namespace) -> str:
        """Return the options for the features with a number in each cell, with a decimal comma where it is one."""
        signs, comma, options = _signs_of_numbers(arguments), Signs(","), ""
        features = [column.name for column in columns if column.name not in (arguments.target, arguments.weights)]
        good = [column.name for column in columns if self._is_usable(column, signs)]
        if signs == Signs() and self.delimiter != ",":
            of_comma = {name: Column.of(name, self.cells(name), comma) for name in features}
            by_comma = [column.name for column in columns if self._is_usable(of_comma.get(column.name, column), comma)]
            # A comma in each third place from the right may separate thousands as well.
            if not all(self._is_usable(Column(name), Signs(".", ",")) for name in by_comma if name not in good):
                good, options = by_comma, "--decimal , "
        good = [name for name in good if name in features]
        return f"{options}--features {join(good)}" if good else ""

    def _is_usable(self, column: Column, signs: Signs) -> bool:
        """Tell whether every cell of a column has a number, or is missing."""
        cells = self.cells(column.name)
        finite = np.isfinite(column.numbers(cells, signs))
        return all(known or is_missing(str(cell)) for cell, known in zip(cells, finite, strict=True))

    def write(self, path: Path, suffix: str, names: list[str], new: Floats, decimal: str) -> None:
        """Write the rows as they were, with new columns behind them."""
        import pandas as pd

        if suffix == ".parquet":
            self.frame.set_axis(self.names, axis=1).assign(**dict(zip(names, new.T, strict=True))).to_parquet(path)
            return
        pd.concat([self.frame, pd.DataFrame(new, self.frame.index)], axis=1).to_csv(
            path,
            sep="\t" if suffix == ".tsv" else self.delimiter,
            header=[*self.names, *names] if self.named else False,
            index=False,
            decimal=decimal,
            lineterminator="\n",
            encoding="utf-8",
        )


def _signs_of_numbers(arguments: Namespace) -> Signs:
    """Return the decimal and thousands signs that the arguments name."""
    return Signs(arguments.decimal, arguments.thousands)


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
    delimiter = DELIMITERS.get(arguments.delimiter, arguments.delimiter) or _best_delimiter(text)
    rows, lines = _rows_and_lines(text, delimiter, source)
    first = [cell.strip() for cell in rows[0]]
    named = arguments.header == "yes" or (
        arguments.header == "auto" and not all(map(_signs_of_numbers(arguments).reads, first))
    )
    names = first if named else [str(index + 1) for index in range(len(first))]
    frame = pd.DataFrame(rows[named:], columns=range(len(first)), dtype=object)
    return Table(source, frame, names, named, lines[named:], delimiter)


def _rows_and_lines(text: str, delimiter: str, source: str) -> tuple[list[list[str]], list[int]]:
    """Return all records, the header included, and the line in which each begins."""
    rows: list[list[str]] = []
    lines: list[int] = []
    text = text.replace("\t", " ") if delimiter == " " else text
    try:
        for line, cells in _records_with_lines(text, delimiter, strict=True):
            columns = len(rows[0]) if rows else len(cells)
            if len(cells) == 1 < columns and not cells[0].strip():
                continue  # a line of blanks
            if len(cells) != columns:
                found = f"{plural(len(cells), 'cell')}, {plural(columns, 'column')} (the delimiter is {delimiter!r})"
                rule, place = "every row must have as many cells as the first.", {source: f"line {line}"}
                raise UsageError(rule, found, "mend that row, or name another --delimiter", arguments=place)
            rows.append(cells)
            lines.append(line)
    except csv.Error as error:
        rule, fix = "quotes must enclose whole cells, and be closed.", "write a quote within quotes twice"
        raise UsageError(rule, str(error), fix, arguments={source: f"the delimiter is {delimiter!r}"}) from None
    return rows, lines


def _records_with_lines(text: str, delimiter: str, *, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the cells of each record that is no empty line; wrong quotes raise if `strict`."""
    reader, line = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True, strict=strict), 1
    for cells in reader:
        cells = cells[:-1] if delimiter == " " and cells[-1:] == [""] else cells  # spaces at the end of a line
        if cells:
            yield line, cells
        line = reader.line_num + 1


def _best_delimiter(text: str) -> str:
    """Return the delimiter that cuts the first records into equally many cells, most of them numbers."""
    head, best, merit = "\n".join(text.split("\n", 100)[:100]), ",", -1.0
    for delimiter in DELIMITERS.values():
        try:
            rows = [cells for _, cells in islice(_records_with_lines(head, delimiter, strict=False), 50) if any(cells)]
        except csv.Error:
            continue
        if not rows or len(rows[0]) < 2:
            continue
        even = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
        # A decimal comma counts as well: 1,5;2,5 is two numbers, and not 1 and 5;2 and 5.
        cells = [cell.strip() for row in rows for cell in row]
        numbers = sum(Signs(".").reads(cell) or Signs(",").reads(cell) for cell in cells)
        # 0.01: a table without any number is judged by its even rows.
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
