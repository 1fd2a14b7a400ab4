"""These tests need scikit-learn, which is an extra."""

import importlib.util
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("sklearn") else ["test_*.py"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let Dask compute in the thread that asks."""
    dask = pytest.importorskip("dask", reason="Dask, of the extra attlas[dask], is not installed")
    with dask.config.set(scheduler="synchronous"):
        yield
