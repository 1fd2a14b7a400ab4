"""A file lock that one process can hold; it is released when the process ends, in any way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attlas.cli.terminal import UsageError
from attlas.files import lock


@contextmanager
def hold(file: Path, rule: str) -> Iterator[None]:
    """Hold the lock of a file, or raise a UsageError with this rule, which names the process that holds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock(handle)
        except OSError:
            holder = file.read_text(encoding="utf-8") or "a process that has just begun"
            raise UsageError(rule, holder, "wait until it has ended.", {"lock": file}) from None
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()}, since {time.strftime('%H:%M:%S')}".encode())
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)  # ends the lock too
