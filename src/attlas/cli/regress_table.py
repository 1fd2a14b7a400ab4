"""Tables of numbers from CSV and Parquet files, whole or some rows at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attlas.cli.regress_cells import is_missing, numbers, trouble
from attlas.cli.regress_csv import Form, Records, open_records
from attlas.cli.terminal import UsageError

if TYPE_CHECKING:
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
        # This room needs scikit-learn, which the command line does without until it fits.
        from attlas.estimators.parquet import ParquetFile

        yield ParquetTable(ParquetFile(path, "regress"))
        return
    with open_records(path, form) as records:
        yield CsvTable(records, form)


def read_table(table: CsvTable | ParquetTable, features: Sequence[str], target: str, *, drop_missing: bool) -> Table:
    """Read the features of all rows, and the target as the last column."""
    parts = [batch.numbers for batch in table.batches(features, target, drop_missing=drop_missing)]
    whole = np.concatenate(parts) if parts else np.empty((0, len(features) + 1))
    full = ~np.isnan(whole).any(axis=1)
    return Table(table.source, whole if full.all() else whole[full], int((~full).sum()))


class CsvTable:
    """A text file that is open for reading."""

    def __init__(self, records: Records, form: Form) -> None:
        self.source, self.names, self.named = records.source, records.names, records.named
        self.delimiter, self.decimal = records.delimiter, form.decimal
        self.records = records
        # As many numbers at a time, however wide the file is: cells are what takes the memory.
        self.rows = max(256, ROWS * 8 // max(8, len(self.names)))

    def parts(self) -> int:
        """Return how many batches there will be, about: quoted cells may hold ends of lines. A pipe: 0."""
        if self.records.path is None:
            return 0
        with self.records.path.open("rb") as file:
            lines = sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
        return max(1, -(-lines // self.rows))

    def batches(self, features: Sequence[str], target: str | None = None, *, drop_missing: bool) -> Iterator[Batch]:
        """Yield features, and the target if there is one, of all rows, some rows at a time.

        Raises
        ------
        UsageError
            If a cell is no number, or is missing and may not be: the line and the column are named.
        """
        wanted = [*features, *([] if target is None else [target])]
        places = [self.names.index(name) for name in wanted]
        while block := list(itertools.islice(self.records.rows, self.rows)):
            cells = [row for _, row in block]
            columns = list(zip(*cells, strict=True))
            found = np.empty((len(cells), len(places)))
            wrong = np.zeros((len(cells), len(places)), dtype=bool)
            for place, column in enumerate(places):
                found[:, place], wrong[:, place] = numbers(columns[column], self.decimal)
            for row, place in np.argwhere(wrong):
                cell = cells[row][places[place]]
                # A missing value of one column must not hide words in the next.
                if not (drop_missing and is_missing(cell)):
                    raise self._trouble(block[row][0], wanted[place], cell, columns, features)
            yield Batch(found, cells)

    def _trouble(
        self, line: int, name: str, cell: str, columns: Sequence[Sequence[str]], features: Sequence[str]
    ) -> UsageError:
        found, fix = trouble(cell, self.decimal)
        good = [other for other in features if not self._wrong(columns[self.names.index(other)])]
        fix = fix or (_choose(good) if name in features else "another --target, or numbers in that column")
        return _error(_RULE, found, fix, {self.source: f"line {line}, column {name}"})

    def _wrong(self, column: Sequence[str]) -> bool:
        wrong = numbers(column, self.decimal)[1]
        return any(not is_missing(column[row]) for row in np.flatnonzero(wrong).tolist())


class ParquetTable:
    """A Parquet file that is open for reading."""

    def __init__(self, file: ParquetFile) -> None:
        self.source, self.names, self.named = file.path.name, file.names, True
        self.delimiter, self.decimal = ",", "."
        self.file = file

    def parts(self) -> int:
        """Return how many batches there will be."""
        return -(-self.file.rows // ROWS)

    def batches(self, features: Sequence[str], target: str | None = None, *, drop_missing: bool) -> Iterator[Batch]:
        """Yield features, and the target if there is one, of all rows, some rows at a time.

        Raises
        ------
        UsageError
            If a column holds no numbers, or a value is missing and may not be: the row and the column are named.
        """
        wanted = [*features, *([] if target is None else [target])]
        good = [name for name in wanted if self.file.kinds[name] in ("number", "bool")]
        for name in wanted:
            if name not in good:
                fix = _choose([n for n in good if n != target]) if name != target else "another --target"
                raise _error(_RULE, f"the column holds {self.file.kinds[name]}", fix, {self.source: f"column {name}"})
        done = 0
        for found in self.file.batches(wanted, ROWS):
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
    return UsageError("regress", rule, given, found=found, fix=fix)
