"""Values for the time of ``with`` blocks that may end in any order: two recordings in cells of a notebook do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class BlockValue(Generic[T]):
    """A value of this thread that blocks set: that of the block which was entered last, of those that are open.

    Parameters
    ----------
    name : str
        Its name.
    default : T
        What it is outside of all blocks.

    Attributes
    ----------
    get : callable
        Returns the value.

    Examples
    --------
    >>> from attlas.foundation.blocks import BlockValue
    >>> depth = BlockValue("depth", 0)
    >>> first, second = depth.held(1), depth.held(2)
    >>> _ = first.__enter__(), second.__enter__()
    >>> _ = first.__exit__(None, None, None)
    >>> depth.get()
    2
    >>> _ = second.__exit__(None, None, None)
    >>> depth.get()
    0
    """

    def __init__(self, name: str, default: T) -> None:
        self._default = default
        self._innermost: ContextVar[T] = ContextVar(f"attlas_{name}", default=default)
        self._open: ContextVar[tuple[list[T], ...]] = ContextVar(f"attlas_{name}_blocks", default=())
        self.get: Callable[[], T] = self._innermost.get

    @contextmanager
    def held(self, value: T) -> Iterator[None]:
        """Set the value for a ``with`` block."""
        own = [value]  # an object of this block alone
        self._open.set((*self._open.get(), own))
        self._innermost.set(value)
        try:
            yield
        finally:
            rest = tuple(one for one in self._open.get() if one is not own)
            self._open.set(rest)
            self._innermost.set(rest[-1][0] if rest else self._default)
