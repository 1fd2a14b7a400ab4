"""What holds for the time of ``with`` blocks that may end in any order: two recordings in cells of a notebook do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

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


class SharedBlocks:
    """Blocks that many users share, of all threads: the first user enters one, and the last one leaves it.

    Attributes
    ----------
    lock : RLock
        Held while a block is entered or left.

    Examples
    --------
    >>> from contextlib import contextmanager
    >>> from attlas.foundation.blocks import SharedBlocks
    >>> @contextmanager
    ... def patched():
    ...     print("patched")
    ...     yield
    ...     print("as before")
    >>> blocks = SharedBlocks()
    >>> first, second = blocks.shared("torch", patched), blocks.shared("torch", patched)
    >>> _ = first.__enter__(), second.__enter__()
    patched
    >>> _ = first.__exit__(None, None, None)
    >>> _ = second.__exit__(None, None, None)
    as before
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._open: dict[Hashable, tuple[list[object], ExitStack, Any]] = {}  # its users, what leaves it, its value

    @contextmanager
    def shared(self, key: Hashable, block: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
        """Use the block of a key, which is made where nobody else uses it, for a ``with`` block of one's own."""
        own = object()
        with self.lock:
            if key not in self._open:
                stack = ExitStack()
                self._open[key] = [], stack, stack.enter_context(block())
            users, stack, value = self._open[key]
            users.append(own)
        try:
            yield value
        finally:
            with self.lock:
                users.remove(own)
                if not users:
                    del self._open[key]
                    stack.close()
