"""Tables in text files: delimiter, header, quotes, marks of the byte order; every complaint names its line."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attlas.cli.regress_cells import is_number
from attlas.cli.terminal import UsageError

__all__ = ["DELIMITERS", "Form", "Records", "open_records"]

DELIMITERS = {",": ",", ";": ";", "|": "|", "tab": "\t", "space": " "}
STDIN = "standard input"
_LOOKED_AT = 50  # records that decide about delimiter and header
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@dataclass(frozen=True)
class Form:
    """How a text file is to be read.

    Parameters
    ----------
    delimiter : str, optional
        What stands between cells; the default finds it.
    header : {"auto", "yes", "no"}
        Whether the first record names the columns; "auto" says no where it holds nothing but numbers.
    decimal : {".", ","}
        Decimal sign.
    """

    delimiter: str | None = None
    header: str = "auto"
    decimal: str = "."


@dataclass(frozen=True)
class Records:
    """A text file that is open: its columns, and its records one by one. Made by `open_records`."""

    source: str
    path: Path | None
    names: list[str]
    named: bool
    delimiter: str
    rows: Iterator[tuple[int, list[str]]]


@contextmanager
def open_records(path: Path, form: Form) -> Iterator[Records]:
    """Open a file, or the standard input for ``-``, and find out how it is written.

    Yields
    ------
    Records
        Names of the columns, and an iterator over (number of the line, cells).

    Raises
    ------
    UsageError
        If the file cannot be read, is not text, has no record, or, while it is read, if a record does not fit.
    """
    piped = str(path) == "-"
    source = STDIN if piped else path.name
    try:
        raw: Any = sys.stdin.buffer if piped else path.open("rb")
        first = raw.read(4)
    except OSError as error:
        raise _error(
            "the table must be a file that can be read.", f"{error.strerror or error}: {path}", "a file that exists"
        ) from None
    encoding = next((name for mark, name in _MARKS if first.startswith(mark)), "utf-8")
    text = io.TextIOWrapper(io.BufferedReader(_Rejoined(first, raw)), encoding=encoding, newline="")
    try:
        yield _records(text, source, path, form)
    finally:
        if not piped:
            raw.close()


class _Rejoined(io.RawIOBase):
    """A stream with the bytes before it that were read to see how it is encoded: a pipe cannot be rewound."""

    def __init__(self, first: bytes, rest: io.BufferedIOBase) -> None:
        self.first, self.rest = first, rest

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # io calls it with a memoryview
        """Fill the buffer, with the first bytes first."""
        part = self.first or self.rest.read1(len(buffer))
        part, self.first = part[: len(buffer)], part[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _records(text: io.TextIOWrapper, source: str, path: Path, form: Form) -> Records:
    lines = _decoded(text, source, path)
    head = list(itertools.islice(lines, 4 * _LOOKED_AT))
    if not any(line.strip() for line in head):
        raise _error("the table must not be empty.", f"{source} has no text", "a file with a header and some rows")
    delimiter = form.delimiter or _delimiter(head)
    rows = _cells(itertools.chain(head, lines), delimiter, source)
    line, first = next(rows)
    bare = all(is_number(cell, form.decimal) for cell in first)
    named = form.header == "yes" or (form.header == "auto" and not bare)
    names = [cell.strip() for cell in first] if named else [str(place + 1) for place in range(len(first))]
    if not named:
        # The first record is data.
        rows = itertools.chain([(line, first)], rows)
    return Records(
        source, None if source == STDIN else path, names, named, delimiter, _even(rows, names, source, delimiter)
    )


def _decoded(text: io.TextIOWrapper, source: str, path: Path) -> Iterator[str]:
    """Yield the lines, or say which byte is no text."""
    try:
        yield from text
    except UnicodeDecodeError as error:
        given = shlex.quote(str(path))
        raise _error(
            "the table must be text in UTF-8.",
            f"byte {error.object[error.start]:#04x} in {source}",
            "iconv -f latin1 -t utf-8 |" if source == STDIN else f"iconv -f latin1 -t utf-8 {given} > table.csv",
        ) from None


def _cells(lines: Iterable[str], delimiter: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line in which a record begins, and its cells; empty lines are passed over."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise _error(
                "quotes must enclose whole cells, and be closed.",
                f"{error}",
                "write a quote within quotes twice",
                {source: f"line {line}"},
            ) from None
        if cells is None:
            return
        if delimiter == " " and cells and not cells[-1]:
            cells.pop()  # blanks at the end of a line
        if cells and (len(cells) > 1 or cells[0].strip()):
            yield line, cells
        line = reader.line_num + 1


def _even(
    rows: Iterable[tuple[int, list[str]]], names: list[str], source: str, delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield records, each with a cell for each column."""
    for line, cells in rows:
        if len(cells) != len(names):
            raise _error(
                "every row must have as many cells as the first.",
                f"{_many(len(cells), 'cell')}, {_many(len(names), 'column')} (the delimiter is {delimiter!r})",
                "mend that row, or name another --delimiter",
                {source: f"line {line}"},
            )
        yield line, cells


def _delimiter(head: list[str]) -> str:
    """Return the delimiter that cuts the first records into equally many cells, most of them numbers."""
    best, merit = ",", -1.0
    for delimiter in DELIMITERS.values():
        rows: list[list[str]] = []
        try:
            rows += itertools.islice((cells for _, cells in _cells(head, delimiter, "")), _LOOKED_AT)
        except UsageError:
            if len(rows) < 2:  # a quoted cell may be cut off where the look ends
                continue
        width = len(rows[0]) if rows else 0
        if width < 2:
            continue
        even = sum(len(row) == width for row in rows) / len(rows)
        # A decimal comma counts as well: 1,5;2,5 is two numbers, and not 1 and 5;2 and 5.
        found = [is_number(cell) or is_number(cell, ",") for row in rows for cell in row]
        this = even * (0.01 + sum(found) / len(found))
        if this > merit:
            best, merit = delimiter, this
    return best


def _many(number: int, word: str) -> str:
    return f"{number} {word}" + ("s" if number != 1 else "")


def _error(rule: str, found: str, fix: str, given: dict[str, object] | None = None) -> UsageError:
    return UsageError("regress", rule, given, found=found, fix=fix)
