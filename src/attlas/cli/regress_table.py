"""Tables of numbers from CSV and Parquet files, whole or some rows at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attlas.cli.regress_cells import is_missing, numbers, trouble
from attlas.cli.regress_csv import Form, Records, open_records
from attlas.cli.terminal import UsageError
from attlas.errors import explain
from attlas.estimators.parquet import ParquetFile

__all__ = ["ROWS", "Batch", "CsvTable", "ParquetTable", "Table", "open_table", "read_table"]

_RULE = "every cell that is used must be a number."
ROWS = 65_536  # rows that are in memory at a time


@dataclass(frozen=True)
class Batch:
    """Some rows of a table.

    Parameters
    ----------
    numbers : ndarray, shape (rows, columns)
        The wanted columns; NaN where a value is missing and may be.
    cells : list of list of str
        The rows as the file holds them, all columns; empty for Parquet.
    """

    numbers: NDArray[np.float64]
    cells: list[list[str]]


@dataclass(frozen=True)
class Table:
    """Columns of a file that was read whole.

    Parameters
    ----------
    source : str
        What the file is called.
    numbers : ndarray, shape (rows, columns)
        The wanted columns.
    dropped : int
        Rows that were left out for a missing value.
    """

    source: str
    numbers: NDArray[np.float64]
    dropped: int


@contextmanager
def open_table(path: Path, form: Form) -> Iterator[CsvTable | ParquetTable]:
    """Open a file of either kind; what does not end in .parquet is text.

    Yields
    ------
    CsvTable or ParquetTable
        Names of the columns, and a way to read some of them.
    """
    if path.suffix.lower() in (".parquet", ".pq"):
        if not path.is_file():
            raise _error("the table must be a file that can be read.", f"no such file: {path}", "a file that exists")
        yield ParquetTable(ParquetFile(path, "regress"))
        return
    with open_records(path, form) as records:
        yield CsvTable(records, form)


def read_table(table: CsvTable | ParquetTable, wanted: Sequence[str], *, drop_missing: bool) -> Table:
    """Read the wanted columns of all rows."""
    parts = [batch.numbers for batch in table.batches(wanted, drop_missing=drop_missing)]
    whole = np.concatenate(parts) if parts else np.empty((0, len(wanted)))
    full = ~np.isnan(whole).any(axis=1)
    return Table(table.source, whole if full.all() else whole[full], int((~full).sum()))


class CsvTable:
    """A text file that is open for reading."""

    def __init__(self, records: Records, form: Form) -> None:
        self.source, self.names, self.named = records.source, records.names, records.named
        self.delimiter, self.decimal = records.delimiter, form.decimal
        self.records = records
        self.rows: int | None = None  # nobody knows before it is read

    def batches(self, wanted: Sequence[str], *, drop_missing: bool, rows: int = ROWS) -> Iterator[Batch]:
        """Yield the wanted columns of all rows, some rows at a time.

        Raises
        ------
        UsageError
            If a cell is no number, or is missing and may not be: the line and the column are named.
        """
        places = [self.names.index(name) for name in wanted]
        # As many numbers at a time, however wide the file is: cells are what takes the memory.
        rows = max(256, rows * 8 // max(8, len(self.names)))
        while block := list(itertools.islice(self.records.rows, rows)):
            cells = [row for _, row in block]
            columns = list(zip(*cells, strict=True))
            found = np.empty((len(cells), len(places)))
            wrong = np.zeros((len(cells), len(places)), dtype=bool)
            for place, column in enumerate(places):
                found[:, place], wrong[:, place] = numbers(columns[column], self.decimal)
            for row, place in np.argwhere(wrong):
                cell = cells[row][places[place]]
                if not (drop_missing and is_missing(cell)):
                    raise self._trouble(block[row][0], wanted[place], cell, columns, wanted)
            yield Batch(found, cells)

    def _trouble(
        self, line: int, name: str, cell: str, columns: Sequence[Sequence[str]], wanted: Sequence[str]
    ) -> UsageError:
        found, fix = trouble(cell, self.decimal)
        good = [w for w in wanted if w != name and not self._wrong(columns[self.names.index(w)])]
        return _error(_RULE, found, fix or _choose(good), {self.source: f"line {line}, column {name}"})

    def _wrong(self, column: Sequence[str]) -> bool:
        wrong = numbers(column, self.decimal)[1]
        return any(not is_missing(column[row]) for row in np.flatnonzero(wrong))


class ParquetTable:
    """A Parquet file that is open for reading."""

    def __init__(self, file: ParquetFile) -> None:
        self.source, self.names, self.named = file.path.name, file.names, True
        self.delimiter, self.decimal = ",", "."
        self.file = file
        self.rows: int | None = file.rows

    def batches(self, wanted: Sequence[str], *, drop_missing: bool, rows: int = ROWS) -> Iterator[Batch]:
        """Yield the wanted columns of all rows, some rows at a time.

        Raises
        ------
        UsageError
            If a column holds no numbers, or a value is missing and may not be: the row and the column are named.
        """
        good = [w for w in wanted if self.file.kinds[w] in ("number", "bool")]
        for name in wanted:
            if name not in good:
                found = f"the column holds {self.file.kinds[name]}"
                raise _error(_RULE, found, _choose(good), {self.source: f"column {name}"})
        done = 0
        for found in self.file.batches(wanted, rows):
            bad = np.isinf(found) if drop_missing else ~np.isfinite(found)
            if bad.any():
                row, place = np.argwhere(bad)[0]
                given: dict[str, object] = {self.source: f"row {done + row + 1}, column {wanted[place]}"}
                if np.isinf(found[row, place]):
                    raise _error(_RULE, "an infinite value", "leave such rows out of the file", given)
                raise _error(_RULE, "a missing value", "--drop-missing, which leaves such rows out", given)
            done += len(found)
            yield Batch(found, [])


def _choose(good: Sequence[str]) -> str:
    """Return the option that leaves columns without numbers out."""
    return f"--features {','.join(good)}" if good else "a file whose columns hold numbers"


def _error(rule: str, found: str, fix: str, given: dict[str, object] | None = None) -> UsageError:
    return UsageError(explain("regress", rule, given, found=found, fix=fix))
