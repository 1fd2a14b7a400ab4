"""Which processes write into a folder: several of one run, and no other."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attlas.errors import FileError, RecordingError
from attlas.foundation.files import lock

_MOST_ATTEMPTS = 100
_LOCK_NAME = re.compile(r"lock-(\d+)-(\d+)")


@contextmanager
def hold(folder: Path, rank: int, world: int) -> Iterator[None]:
    """Keep other runs out of a folder, for as long as this process lives.

    Raises
    ------
    RecordingError
        If another run writes into it.
    """
    with ExitStack() as stack:
        with mutex(folder):
            # `_runs_with_lock` gives world and rank of each process at work: refused are another world, and this rank
            # twice.
            if any(processes != world or number == rank for processes, number in _runs_with_lock(folder)):
                rule = "one run at a time may write into a folder."
                given, fix = {"folder": str(folder.parent)}, "wait for it, or give -o another folder."
                raise RecordingError(rule, "another run that writes into it", fix, arguments=given, where="corpus()")
            handle = _open_lock_file(folder / f"lock-{world}-{rank}")
            # Closed when the block ends, which gives the lock back.
            stack.callback(os.close, handle)
            lock(handle)
        yield


def remove_unless_held(folder: Path) -> None:
    """Remove a folder with its locks, unless a process holds one of them; the caller has the mutex."""
    if not _runs_with_lock(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _runs_with_lock(folder: Path) -> list[tuple[int, int]]:
    """Return how many processes, and which number, the runs have that hold a lock."""
    found = []
    for path in folder.glob("lock-*"):
        match = _LOCK_NAME.fullmatch(path.name)
        if match is not None and not _is_lock_free(path):
            found.append((int(match[1]), int(match[2])))
    return found


def _is_lock_free(path: Path) -> bool:
    """Return whether no process holds the lock in a file."""
    handle = _open_lock_file(path)
    try:
        lock(handle)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def mutex(folder: Path) -> Iterator[None]:
    """Let one process at a time enter or leave a run; the folder is there then."""
    path = folder / "mutex"
    while True:
        handle = _open_lock_file(path)
        try:
            lock(handle, wait=True)
            # Who had the mutex may have removed the folder, and another process has made it anew.
            if _is_file_at_path(handle, path):
                yield
                return
        finally:
            os.close(handle)


def _is_file_at_path(handle: int, path: Path) -> bool:
    """Return whether an open file is the one that is at a path now."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _open_lock_file(path: Path) -> int:
    """Open a file of locks, and make it where it is not."""
    left = _MOST_ATTEMPTS
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            left -= 1
            if left and isinstance(error, FileNotFoundError):  # the folder was removed since
                continue
            given, found = {"file": str(path)}, error.strerror or str(error)
            if path.is_dir() or not path.parent.is_dir():
                rule = "each file of an unfinished corpus must be as attlas wrote it."
                raise RecordingError(rule, found, "remove it.", arguments=given, where="corpus()") from error
            rule, fix = "the folder must be one that can be written.", "allow to write, or give another folder."
            raise FileError(rule, found, fix, arguments=given, where="corpus()") from error
