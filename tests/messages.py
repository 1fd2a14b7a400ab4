"""What tests compare of an error: the fields that callers read, and not the words between them."""

from attlas.errors import AttlasError

__all__ = ["said"]


def said(error: BaseException) -> str:
    """Return where an error was raised and what was found there."""
    assert isinstance(error, AttlasError)
    assert error.rule
    assert error.fix
    return f"{error.where}: {error.found}"
