"""What the tests of the engine share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from attlas.engine import dispatch
from attlas.engine.backend import Backend
from attlas.engine.plan import BACKENDS


@pytest.fixture
def add_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Add a backend for the time of a test, as a module whose name stands in the table of backends."""

    def forget() -> None:
        dispatch.backends_of.cache_clear()
        dispatch.allowed_backends.cache_clear()

    def add(name: str, *objects: Backend, devices: frozenset[str] | None = None) -> None:
        """Enter objects under a name; without an object, the module is left to be found on the path."""
        monkeypatch.setitem(BACKENDS, name, devices)  # type: ignore[arg-type]  # a dict, which only tests change
        if objects:
            module = ModuleType(f"attlas.engine.backends.{name}")
            module.BACKENDS = objects  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        forget()

    yield add
    monkeypatch.undo()
    forget()
