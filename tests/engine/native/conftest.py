"""What the tests of the kernels share: an instruction set is forced, and a test skips where it cannot run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attlas.engine.native import library


@pytest.fixture(autouse=True)
def whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests see the kernels also in a run that turns them off for all others."""
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Force an instruction set; skip where this processor cannot run it, or nothing was compiled."""

    def force(name: str) -> None:
        monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
        if name not in library.runnable():
            pytest.skip(f"this processor cannot run {name}, or the kernels are not compiled here")
        monkeypatch.setenv("ATTLAS_NATIVE", name)

    return force
