"""`offer`, by which an attention module passes its matrix to the recordings that are open; free where none is."""

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

__all__ = ["Listener", "is_recording", "is_recording_anywhere", "offer", "subscribed", "uncompiled"]


class Listener(Protocol):
    """Interface of a recording: `offer` calls it with each matrix.

    Examples
    --------
    >>> from attlas.recording.hooks import Listener
    >>> class Count:
    ...     def on_attention(self, module, matrix, first_query, first_key):
    ...         print(matrix.shape)
    >>> listener: Listener = Count()
    """

    def on_attention(
        self, module: nn.Module, matrix: AttentionMatrix, first_query: int | None, first_key: int | None
    ) -> None:
        """Take one matrix; called inside the forward pass."""


# Number of listeners in all threads. A plain number of the module is the cheapest check, and torch.compile guards it
# without a graph break.
_active_recordings = 0
_lock = threading.Lock()
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("attlas_listeners", default=())


def offer(
    module: nn.Module, matrix: AttentionMatrix, *, first_query: int | None = None, first_key: int | None = None
) -> None:
    """Pass the matrix of one attention to every recording in this thread.

    Parameters
    ----------
    module : nn.Module
        The attention layer that computed it.
    matrix : AttentionMatrix, shape (batch, heads, m, n)
        The weights.
    first_query, first_key : int, optional
        Positions in the text of query 0 and of key 0, where they are known.

    Notes
    -----
    Cost without a recording: one comparison. `torch.compile` leaves nothing of it in the graph.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.recording import offer
    >>> offer(torch.nn.Identity(), attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)))
    """
    if _active_recordings:
        _emit(module, matrix, first_query, first_key)


def _call_listeners(module: nn.Module, matrix: AttentionMatrix, first_query: int | None, first_key: int | None) -> None:
    for listener in _listeners.get():
        listener.on_attention(module, matrix, first_query, first_key)


# `subscribed` replaces it by a function that torch.compile leaves alone.
_emit: Callable[..., None] = _call_listeners


@cache
def uncompiled(function: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that torch.compile leaves alone; the same one each time.

    It is not a decorator, because torch then loads its whole compiler, which takes as long as torch itself. A
    recording calls it when it begins, and `import attlas` does not.

    Parameters
    ----------
    function : callable
        The function.

    Examples
    --------
    >>> from attlas.recording.hooks import uncompiled
    >>> uncompiled(print)("not compiled")
    not compiled
    """
    return torch.compiler.disable(function)  # type: ignore[no-any-return]  # torch has no types there


def is_recording_anywhere() -> bool:
    """Return whether there is a recording in any thread; torch.compile guards it without a graph break."""
    return _active_recordings > 0


def is_recording(listener: Listener | None = None) -> bool:
    """Return whether a listener (by default, any listener) records in this thread."""
    listeners = _listeners.get()
    return bool(listeners) if listener is None else any(one is listener for one in listeners)


@contextmanager
def subscribed(listener: Listener) -> Iterator[None]:
    """Call a listener with every matrix that this thread offers, for the time of a ``with`` block."""
    global _active_recordings, _emit  # noqa: PLW0603 - the one number that `offer` looks at, and what it calls
    with _lock:
        _emit = uncompiled(_call_listeners)
        _active_recordings += 1
    before = _listeners.get()
    _listeners.set((*before, listener))
    try:
        yield
    finally:
        # Not by a token: a recording may be left in another context than it was entered in (a generator, a notebook).
        _listeners.set(tuple(one for one in _listeners.get() if one is not listener))
        with _lock:
            _active_recordings -= 1
