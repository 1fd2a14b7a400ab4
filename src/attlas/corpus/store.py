"""A file of rows and arrays, each with a checksum: SQLite, in which a commit is whole or has not happened.

SQLite finds a page that cannot be one, and never a wrong number in a page. So each entry has a checksum of what it says
and of where it stands, and who reads a file counts the entries that must be there.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from attlas.errors import FileError, RecordingError
from attlas.foundation.files import sync_folder

_SCHEMA_STATEMENTS = (
    "CREATE TABLE entries (kind TEXT NOT NULL, number INTEGER NOT NULL, chunk INTEGER NOT NULL, data BLOB NOT NULL, "
    "digest BLOB NOT NULL, PRIMARY KEY (kind, number, chunk))"
)
_CHUNK_BYTES = 1 << 26  # bytes of an entry; SQLite takes less than 10⁹
_PAGE_BYTES = 1 << 14
_WAIT_SECONDS = 120.0  # seconds until a lock that another process holds is an error
_SYNCHRONOUS_MODE = "EXTRA"  # what is committed is on disk, and so is the end of the commit
# Errors that say nothing of the file: there is no room for it, or it may not be written.
_DISK_ERRORS = {
    getattr(sqlite3, name, None)
    for name in ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_NOMEM")
}
_DAMAGED_ERRORS = {
    getattr(sqlite3, f"SQLITE_IOERR_{name}", None) for name in ("READ", "SHORT_READ", "CORRUPTFS", "DATA")
}
_LOCKED_ERRORS = {getattr(sqlite3, name, None) for name in ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")}


class Store:
    """A file of entries, open.

    Parameters
    ----------
    path : Path
        The file, which is there.
    shown : Path, optional
        What errors name instead, for a copy.

    Raises
    ------
    RecordingError
        If it is no such file.

    Notes
    -----
    One process writes, any number read: SQLite's locks let a reader see a file between two commits, and undo the
    commit of a process that was killed. There is no write-ahead log, since that does not work on network disks.
    """

    def __init__(self, path: Path, shown: Path | None = None) -> None:
        self.path, self._shown = path, path if shown is None else shown
        if not path.is_file():
            raise self.damaged("a folder" if path.is_dir() else "no such file")
        if not path.stat().st_size:
            raise self.damaged("an empty file")
        if _journal_path(path).is_dir():
            raise self.damaged(f"a folder {_journal_path(path).name} beside it")
        with self._errors_in_words():
            self._connection = _connect_safely(path)
        try:
            with self._errors_in_words():
                found = list(self._connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type DESC"))
                # Nothing else is in it: neither a view, which could stand in the place of the table, nor a trigger.
                if found != [("table", "entries", _SCHEMA_STATEMENTS), ("index", "sqlite_autoindex_entries_1", None)]:
                    raise self.damaged("other tables")
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, kind: str, number: int, data: bytes) -> None:
        """Make a file with one entry; it has its name when that is on disk."""
        begun = path.with_name(f"begun-{path.name}")
        for stale in (
            begun,
            _journal_path(begun),
            _journal_path(path),
        ):  # of a process that was killed, or a file removed
            stale.unlink(missing_ok=True)
        with _worded_disk(begun, path), closing(_connect_safely(begun, create=True)) as connection:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute("BEGIN")
            connection.execute(_SCHEMA_STATEMENTS)
            connection.execute(
                "INSERT INTO entries VALUES (?, ?, 0, ?, ?)",
                (kind, number, data, _checksum_of_entry(kind, number, 0, data)),
            )
            connection.execute("COMMIT")
        begun.replace(path)
        sync_folder(path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was not committed is gone."""
        self._connection.close()

    def damaged(self, found: str) -> RecordingError:
        """Return the error that says what is wrong with the file, and what to do."""
        rule = "each file of an unfinished corpus must be as attlas wrote it."
        fix = "remove this file, and run the same attlas corpus again: what was read into it is read again."
        return RecordingError(rule, found, fix, file=str(self._shown), where="corpus()")

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        """Raise an error of attlas where SQLite raises one."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._error_in_words(error) from error

    def _error_in_words(self, error: sqlite3.Error) -> RecordingError | FileError:
        """Return the error of attlas for one of SQLite: the file is locked or damaged, or the disk fails."""
        code = getattr(error, "sqlite_errorcode", None)
        if code not in _DAMAGED_ERRORS and code is not None:
            if code & 0xFF in _LOCKED_ERRORS:
                rule = "a file must be read and written within two minutes of another process."
                fix = "end what else has it open, and run the same command again."
                return RecordingError(rule, str(error), fix, file=str(self._shown), where="corpus()")
            if code & 0xFF in _DISK_ERRORS:
                return _disk_error(error, self._shown)
        return self.damaged(str(error))

    @contextmanager
    def parsing(self) -> Iterator[None]:
        """Raise the error of a damaged file where what an entry says cannot be."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, RecordingError):
                raise
            raise self.damaged(f"an entry that cannot be read ({type(error).__name__})") from error

    def check_pages(self) -> None:
        """Raise an error where pages are lost, or belong to two things, before they are written to.

        Cost: the file is read once.
        """
        with self._errors_in_words():
            (found,) = next(self._connection.execute("PRAGMA quick_check(1)"))
        if found != "ok":
            raise self.damaged((str(found).splitlines() or ["pages"])[0])

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Let everything in a ``with`` block be written, or nothing of it."""
        with self._errors_in_words():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    with suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                raise

    def hold_still(self) -> None:
        """Let the file be as it is now until it is closed: a process that commits meanwhile waits."""
        with self._errors_in_words():
            self._connection.execute("BEGIN")
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()

    def copy_to(self, path: Path) -> None:
        """Copy the file as it is between two commits."""
        with self._errors_in_words(), closing(sqlite3.connect(path)) as target:
            target.execute("PRAGMA synchronous = OFF")
            self._connection.backup(target)

    def put(self, kind: str, number: int, data: bytes | memoryview, chunk: int = 0) -> None:
        """Write an entry, in the place of one that is there."""
        given = (kind, number, chunk, data, _checksum_of_entry(kind, number, chunk, data))
        self._connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", given)

    def entries(self, kind: str, number: int | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, chunk and data of all entries of a kind, ascending, or of those of one number."""
        where, given = ("kind = ?", (kind,)) if number is None else ("kind = ? AND number = ?", (kind, number))
        asked = f"SELECT number, chunk, data, digest FROM entries WHERE {where} ORDER BY number, chunk"
        with self._errors_in_words():
            for at, chunk, data, digest in self._connection.execute(asked, given):
                if not isinstance(data, bytes) or digest != _checksum_of_entry(kind, at, chunk, data):
                    raise self.damaged(f"entry {kind} {at}: other bytes than were written")
                yield at, chunk, data

    def get(self, kind: str, number: int) -> bytes:
        """Return the data of chunk 0 of an entry, which is all of what `put` writes; arrays have further chunks."""
        first_chunk = [data for _, chunk, data in self.entries(kind, number) if chunk == 0]
        if len(first_chunk) != 1:
            raise self.damaged(f"no entry {kind} {number}")
        return first_chunk[0]

    def put_arrays(self, kind: str, number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write arrays under a number."""
        described = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
        self.put(kind, number, json.dumps(described).encode())
        chunk = 0
        for array in arrays.values():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk += 1
                self.put(kind, number, data[start : start + _CHUNK_BYTES], chunk)

    def get_arrays(self, kind: str, number: int) -> dict[str, NDArray[Any]]:
        """Return the arrays that `put_arrays` has written under a number: chunk 0 names them, the others have them."""
        found: dict[str, NDArray[Any]] = {}
        entries = self.entries(kind, number)
        with self.parsing():
            at, chunk, data = next(entries, (number, -1, b""))
            described = json.loads(data) if chunk == 0 else None
            if described is None:
                raise self.damaged(f"no entry {kind} {number}")
            for name, (dtype, shape) in described.items():
                array = np.empty(shape, np.dtype(dtype))
                view = array.reshape(-1).view(np.uint8)
                for start in range(0, len(view), _CHUNK_BYTES):
                    expected = min(_CHUNK_BYTES, len(view) - start)
                    at, chunk, data = next(entries, (number, -1, b""))
                    if len(data) != expected:
                        raise self.damaged(f"entry {kind} {at}: {len(data)} bytes of {expected}")
                    view[start : start + expected] = np.frombuffer(data, np.uint8)
                found[name] = array
        return found

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of all entries of a kind, ascending."""
        with self._errors_in_words():
            asked = "SELECT DISTINCT number FROM entries WHERE kind = ? ORDER BY number"
            return [number for (number,) in self._connection.execute(asked, (kind,))]

    def remove(self, kind: str, number: int) -> None:
        """Remove what is under a number."""
        self._connection.execute("DELETE FROM entries WHERE kind = ? AND number = ?", (kind, number))


def _checksum_of_entry(kind: str, number: int, chunk: int, data: bytes | memoryview) -> bytes:
    """Return the checksum of an entry, which tells also an entry that was moved."""
    total = hashlib.blake2b(f"{kind} {number} {chunk} ".encode(), digest_size=16)
    total.update(data)
    return total.digest()


def _journal_path(path: Path) -> Path:
    """Return the file that SQLite undoes a commit from."""
    return path.with_name(f"{path.name}-journal")


def _connect_safely(path: Path, *, create: bool = False) -> sqlite3.Connection:
    """Open a file of SQLite with safe settings, made where `create` says so; it commits only where it is told to."""
    absolute = path.absolute().as_posix()
    mode = "rwc" if create else "rw"
    address = f"file://{quote(absolute if absolute.startswith('/') else f'/{absolute}')}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=_WAIT_SECONDS, isolation_level=None)
    try:
        for pragma in (
            "trusted_schema = OFF",
            "cell_size_check = ON",
            "secure_delete = OFF",
            f"synchronous = {_SYNCHRONOUS_MODE}",
        ):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _worded_disk(begun: Path, path: Path) -> Iterator[None]:
    """Word what keeps a file from being made, and remove what was begun of it."""
    try:
        yield
    except sqlite3.Error as error:
        with suppress(OSError):
            begun.unlink()
        raise _disk_error(error, path) from error


def _disk_error(error: Exception, path: Path) -> FileError:
    """Return the error of a folder that cannot be written."""
    fix = "make room, or allow to write, and run the same command again: it goes on where it was."
    found = (str(error).splitlines() or ["an error of the disk"])[0]
    return FileError("the folder must be one that can be written.", found, fix, file=str(path), where="corpus()")
