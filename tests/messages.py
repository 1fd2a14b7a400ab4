"""What tests compare of an error: the fields that callers read, and not the words between them."""

from collections.abc import Callable
from typing import Any

import pytest

from attlas.errors import AttlasError

__all__ = ["refusal", "said"]


def said(error: BaseException) -> str:
    """Return where an error was raised and what was found there."""
    assert isinstance(error, AttlasError)
    assert error.rule
    assert error.fix
    return f"{error.where}: {error.found}"


def refusal(kind: type[AttlasError], call: Callable[[], Any]) -> str:
    """Return what the error says that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return said(caught.value)
