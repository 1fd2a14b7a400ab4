"""What the tests of the viewer share: the model that reads texts, and what its server logs."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from attlas import models


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The shipped model and its tokenizer."""
    transformers = pytest.importorskip("transformers", reason="needs attlas[hf]")
    folder = models.path()
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


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
