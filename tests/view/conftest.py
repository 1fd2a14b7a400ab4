"""What the tests of the viewer hear of its server."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """All warnings and errors that anything logs during a test."""
    records: list[logging.LogRecord] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    listener = Listener(logging.WARNING)
    logging.getLogger().addHandler(listener)
    yield records
    logging.getLogger().removeHandler(listener)
