"""Runs that end anywhere, and what they leave."""

import os
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Killed", "contents", "stop_at"]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Killed(BaseException):
    """A process that ends where it stands."""


def stop_at(monkeypatch: pytest.MonkeyPatch, random_one: random.Random) -> None:
    """Let one of the next calls that change a file end the run, before or after it."""
    left, before = random_one.randrange(400), random_one.random() < 0.5
    dead = False

    def wrapped(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left, dead
            if dead:
                raise Killed
            left -= 1
            if left < 0 and before:
                dead = True
                raise Killed
            found = real(*args, **kwargs)
            if left < 0:
                dead = True
                raise Killed
            return found

        return call

    class Dying(sqlite3.Connection):
        execute = wrapped(sqlite3.Connection.execute)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, factory=Dying, **kwargs))
    monkeypatch.setattr(os, "replace", wrapped(os.replace))
    monkeypatch.setattr(os, "fsync", wrapped(os.fsync))
    monkeypatch.setattr(Path, "replace", wrapped(Path.replace))
    monkeypatch.setattr(Path, "unlink", wrapped(Path.unlink))
