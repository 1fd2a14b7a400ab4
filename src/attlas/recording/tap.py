"""Where an attention hands over its matrix, for whoever records; nothing where nobody does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from attlas.matrix import AttentionMatrix

__all__ = ["Listener", "heard", "listening", "offer", "subscribed", "uncompiled"]


class Listener(Protocol):
    """What `offer` hands a matrix to.

    Examples
    --------
    >>> from attlas.recording.tap import Listener
    >>> class Count:
    ...     def receive(self, module, matrix, first_query, first_key):
    ...         print(matrix.shape)
    >>> listener: Listener = Count()
    """

    def receive(
        self, module: nn.Module, matrix: AttentionMatrix, first_query: int | None, first_key: int | None
    ) -> None:
        """Take one matrix; called inside the forward pass."""


# How many listeners there are in all threads. A plain number of the module is the cheapest thing that can be asked,
# and torch.compile guards it without a graph break.
_open = 0
_lock = threading.Lock()
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("attlas_listeners", default=())


def offer(
    module: nn.Module, matrix: AttentionMatrix, *, first_query: int | None = None, first_key: int | None = None
) -> None:
    """Hand the matrix of one attention to everyone who records in this thread.

    Parameters
    ----------
    module : nn.Module
        The attention layer that computed it.
    matrix : AttentionMatrix, shape (batch, heads, m, n)
        The weights.
    first_query, first_key : int, optional
        Place in the text of query 0 and of key 0, where they are known.

    Notes
    -----
    Cost where nobody records: the look at one number. `torch.compile` leaves nothing of it in the graph.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.recording import offer
    >>> offer(torch.nn.Identity(), attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)))
    """
    if _open:
        _deliver(module, matrix, first_query, first_key)


def _hand_over(module: nn.Module, matrix: AttentionMatrix, first_query: int | None, first_key: int | None) -> None:
    for listener in _listeners.get():
        listener.receive(module, matrix, first_query, first_key)


# What `subscribed` makes of it before anybody listens.
_deliver: Callable[..., None] = _hand_over


@cache
def uncompiled(function: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that torch.compile leaves alone; the same one each time.

    No decorator: torch loads its whole compiler for it, as much again as torch itself. So whoever begins to record
    asks for it, and `import attlas` does not.

    Parameters
    ----------
    function : callable
        What hands matrices over.

    Examples
    --------
    >>> from attlas.recording.tap import uncompiled
    >>> uncompiled(print)("not compiled")
    not compiled
    """
    return torch.compiler.disable(function)  # type: ignore[no-any-return]  # torch has no types there


def heard() -> bool:
    """Return whether anyone records in any thread; torch.compile guards it without a graph break."""
    return _open > 0


def listening(listener: Listener | None = None) -> bool:
    """Return whether a listener, or anyone, records in this thread."""
    listeners = _listeners.get()
    return bool(listeners) if listener is None else any(one is listener for one in listeners)


@contextmanager
def subscribed(listener: Listener) -> Iterator[None]:
    """Let a listener have what is offered in this thread, for the time of a ``with`` block."""
    global _open, _deliver  # noqa: PLW0603 - the one number that `offer` looks at, and what it calls
    with _lock:
        _deliver = uncompiled(_hand_over)
        _open += 1
    before = _listeners.get()
    _listeners.set((*before, listener))
    try:
        yield
    finally:
        # Not by a token: a recording may be left in another context than it was entered in (a generator, a notebook).
        _listeners.set(tuple(one for one in _listeners.get() if one is not listener))
        with _lock:
            _open -= 1
