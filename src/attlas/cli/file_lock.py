"""A file lock that one process can hold; it is released when the process ends, in any way."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LockedError", "hold"]

_FAR = 1 << 20  # Windows forbids to read what is locked: the lock is behind the text


class LockedError(Exception):
    """Another process holds the lock; the text says which one, and since when."""


@contextmanager
def hold(file: Path) -> Iterator[None]:
    """Hold the lock of a file, or raise `LockedError`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock(handle)
        except OSError:
            raise LockedError(file.read_text(encoding="utf-8") or "a process that has just begun") from None
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()}, since {time.strftime('%H:%M:%S')}".encode())
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)  # ends the lock too


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        os.lseek(handle, _FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
