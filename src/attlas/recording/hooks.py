"""`offer`, by which an attention module passes its matrix to the recordings that are open; free where none is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from operator import matmul
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from attlas.matrix import AttentionMatrix

# From the weights of an attention and its values to the pooled values, shape (batch, heads, m, e).
Pool: TypeAlias = "Callable[[AttentionMatrix, Tensor], Tensor]"


class Change(NamedTuple):
    """How one attention computes: the weights, how values are pooled with them, the weights that are recorded."""

    matrix: AttentionMatrix
    pool: Pool
    shown: Callable[[AttentionMatrix], AttentionMatrix]


class AttentionCall(NamedTuple):
    """What a listener gets of one call of an attention layer.

    Parameters
    ----------
    module : nn.Module
        The attention layer.
    matrix : AttentionMatrix, shape (batch, heads, m, n)
        Its weights.
    first_query, first_key : int, optional
        Positions in the text of query 0 and of key 0, where they are known.
    values : Tensor, optional, shape (batch, value heads, n, e)
        What the weights pool, where it is known.
    """

    module: nn.Module
    matrix: AttentionMatrix
    first_query: int | None
    first_key: int | None
    values: Tensor | None


class Listener(Protocol):
    """Interface of a recording: `offer` calls it with each matrix.

    Examples
    --------
    >>> from attlas.recording.hooks import Listener
    >>> class Count:
    ...     def on_attention(self, call):
    ...         print(call.matrix.shape)
    >>> listener: Listener = Count()
    """

    def on_attention(self, call: AttentionCall) -> None:
        """Take one call of an attention; called inside the forward pass."""


@runtime_checkable
class Changer(Protocol):
    """Interface of interventions: `pooled` asks it before the values of an attention are pooled."""

    def change(self, module: nn.Module, change: Change, first_query: int | None, first_key: int | None) -> Change:
        """Return how an attention computes, given how it does without these interventions."""


# Number of listeners in all threads. A plain number of the module is the cheapest check, and torch.compile guards it
# without a graph break.
_active_recordings = 0
_active_changers = 0  # those among them that change what an attention computes
_lock = threading.Lock()
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("attlas_listeners", default=())


def offer(
    module: nn.Module,
    matrix: AttentionMatrix,
    *,
    first_query: int | None = None,
    first_key: int | None = None,
    values: Tensor | None = None,
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
    values : Tensor, optional, shape (batch, value heads, n, e)
        What the weights pool, for ``record(values=True)``.

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
        _emit(module, matrix, first_query, first_key, values)


def pooled(
    module: nn.Module,
    matrix: AttentionMatrix,
    values: Tensor,
    pool: Pool = matmul,
    *,
    first_query: int | None = None,
    first_key: int | None = None,
) -> tuple[Tensor, AttentionMatrix]:
    """Pool values with the weights of one attention, as interventions change it, and offer the weights.

    Parameters
    ----------
    module : nn.Module
        The attention layer.
    matrix : AttentionMatrix, shape (batch, heads, m, n)
        Its weights.
    values : Tensor, shape (batch, value heads, n, e)
        Its values.
    pool : callable, optional
        From weights and values to the pooled values, shape (batch, heads, m, e); ``A @ v`` by default.
    first_query, first_key : int, optional
        Positions in the text of query 0 and of key 0, where they are known.

    Returns
    -------
    out : Tensor, shape (batch, heads, m, e)
        The pooled values.
    weights : AttentionMatrix, shape (batch, heads, m, n)
        The weights, as they were changed.

    See Also
    --------
    offer : for a module that pools by itself; it can be recorded, and not be changed.

    Notes
    -----
    Cost without a recording and without an intervention: one comparison.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.recording import pooled
    >>> A, v = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)), torch.randn(1, 2, 5, 8)
    >>> out, weights = pooled(torch.nn.Identity(), A, v)
    >>> out.shape, weights is A
    (torch.Size([1, 2, 5, 8]), True)
    """
    if _active_changers:
        return _pool([module], matrix, values, pool, first_query, first_key)
    out = pool(matrix, values)
    if _active_recordings:
        _emit(module, matrix, first_query, first_key, values)
    return out, matrix


def pooled_in(
    modules: Sequence[nn.Module],
    matrix: AttentionMatrix,
    values: Tensor,
    pool: Pool,
    first_query: int | None = None,
    first_key: int | None = None,
) -> tuple[Tensor, AttentionMatrix]:
    """Pool values as `pooled` does, for an attention that is a part of several modules."""
    change = Change(matrix, pool, lambda A: A)
    changers = [listener for listener in _listeners.get() if isinstance(listener, Changer)]
    for module in modules:
        for changer in changers:
            change = changer.change(module, change, first_query, first_key)
    out, shown = change.pool(change.matrix, values), change.shown(change.matrix)
    for module in modules:
        for listener in _listeners.get():
            if not isinstance(listener, Changer):
                listener.on_attention(AttentionCall(module, shown, first_query, first_key, values))
    return out, shown


# `subscribed` replaces it by a function that torch.compile leaves alone.
_pool: Callable[..., tuple[Tensor, AttentionMatrix]] = pooled_in


def _call_listeners(*call: Any) -> None:
    for listener in _listeners.get():
        listener.on_attention(AttentionCall(*call))


# `subscribed` replaces it by a function that torch.compile leaves alone.
_emit: Callable[..., None] = _call_listeners


@cache
def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
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


def is_changing() -> bool:
    """Return whether an intervention is applied in this thread."""
    return _active_changers > 0 and any(isinstance(listener, Changer) for listener in _listeners.get())


def is_recording(listener: Listener | None = None) -> bool:
    """Return whether a listener (by default, any listener) records in this thread."""
    listeners = _listeners.get()
    return bool(listeners) if listener is None else any(one is listener for one in listeners)


@contextmanager
def subscribed(listener: Listener) -> Iterator[None]:
    """Call a listener with every matrix that this thread offers, for the time of a ``with`` block."""
    global _active_recordings, _active_changers, _emit, _pool  # noqa: PLW0603 - what `offer` looks at, and calls
    changes = isinstance(listener, Changer)
    with _lock:
        _emit, _pool = uncompiled(_call_listeners), uncompiled(pooled_in)
        _active_recordings += 1
        _active_changers += changes
    before = _listeners.get()
    _listeners.set((*before, listener))
    try:
        yield
    finally:
        # Not by a token: a recording may be left in another context than it was entered in (a generator, a notebook).
        _listeners.set(tuple(one for one in _listeners.get() if one is not listener))
        with _lock:
            _active_recordings -= 1
            _active_changers -= changes
