"""A file lock that one process can hold; it is released when the process ends, in any way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attlas.files import lock

__all__ = ["LockedError", "hold"]


class LockedError(Exception):
    """Another process holds the lock; the text says which one, and since when."""


@contextmanager
def hold(file: Path) -> Iterator[None]:
    """Hold the lock of a file, or raise `LockedError`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock(handle)
        except OSError:
            raise LockedError(file.read_text(encoding="utf-8") or "a process that has just begun") from None
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()}, since {time.strftime('%H:%M:%S')}".encode())
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)  # ends the lock too
