"""Answers that are kept for the next time, the least recently used dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Cache(Generic[Value]):
    """A mapping of bounded size that many threads may use.

    Parameters
    ----------
    limit : int
        Bytes of all values together; a value that is larger alone is not kept.

    Examples
    --------
    >>> cache = Cache(10)
    >>> for key in "abc":
    ...     cache.put(key, key, 4)
    >>> cache.get("a"), cache.get("c"), cache.nbytes
    (None, 'c', 8)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        """Return a value and mark it as used, or None."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Value, nbytes: int) -> None:
        """Keep a value of so many bytes, and drop the oldest until all fit."""
        with self._lock:
            old = self._values.pop(key, None)
            self.nbytes -= 0 if old is None else old[1]
            if nbytes > self.limit:
                return
            self._values[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self.limit:
                self.nbytes -= self._values.popitem(last=False)[1][1]
