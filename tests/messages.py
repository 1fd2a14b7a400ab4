"""What tests compare of an error: the fields that callers read, and not the words between them."""

from collections.abc import Callable

import pytest

from attlas.errors import AttlasError

__all__ = ["refusal", "said"]


def said(error: BaseException) -> str:
    """Return where an error was raised and what was found there."""
    assert isinstance(error, AttlasError)
    return f"{error.where}: {error.found}"


def refusal(kind: type[Exception], call: Callable[[], object]) -> str:
    """Return what `said` gives of the error that a call raises, which is of this class and of none below it."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return said(caught.value)
