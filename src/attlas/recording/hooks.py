"""How recordings and interventions hear of each product of a matrix with values; free where there are none."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from attlas.errors import RecordingError, ShapeError, public
from attlas.foundation.autocast import without_autocast
from attlas.foundation.checks import check_probability, check_values
from attlas.foundation.compat import in_backward, transforming
from attlas.matrix import AttentionMatrix, observers
from attlas.recording.module_call import ModuleCall, Place
from attlas.stats import Statistic

# From the weights of an attention and its values to the pooled values, shape (batch, heads, m, e).
Pool: TypeAlias = "Callable[[AttentionMatrix, Tensor], Tensor]"


class Change(NamedTuple):
    """How one attention computes: the weights, how values are pooled with them, the weights that are recorded.

    `number` is its number among the attentions of one call of its module, and `repeated` says whether the same weights
    were multiplied with other values before in this call.
    """

    matrix: AttentionMatrix
    pool: Pool
    shown: Callable[[AttentionMatrix], AttentionMatrix]
    number: int = 0
    repeated: bool = False


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
    number : int
        Its number among the attentions of one call of the module.
    """

    module: nn.Module
    matrix: AttentionMatrix
    first_query: int | None
    first_key: int | None
    values: Tensor | None
    number: int = 0


class Listener(Protocol):
    """Interface of a recording: it is called with each matrix that is multiplied with values, or offered.

    An attribute `announced`, if it has one, is a tuple of the statistics that it collects of each matrix: the call of a
    kernel that multiplies then gives them too. An attribute `takes_values` that is False says that it keeps no values.

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
    """Interface of interventions: they are asked before the values of an attention are pooled."""

    def change(self, module: nn.Module, change: Change, first_query: int | None, first_key: int | None) -> Change:
        """Return how an attention computes, given how it does without these interventions."""


@runtime_checkable
class Follower(Protocol):
    """Interface of what follows a model: it knows which module computes a product."""

    def running(self, module: nn.Module | None = None) -> ModuleCall | None:
        """Return the innermost call of a module that runs; by default, of any module of the model."""


_active_recordings = 0  # number of listeners in all threads,
_active_changers = 0  # and of those among them that change what an attention computes
_followed_lock = threading.Lock()
_current_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("attlas_listeners", default=())
# Interventions that were asked about products with a gradient: their model may be computed again in the backward.
_changers_of_products: weakref.WeakSet[Listener] = weakref.WeakSet()


def offer(
    module: nn.Module,
    matrix: AttentionMatrix,
    *,
    first_query: int | None = None,
    first_key: int | None = None,
    values: Tensor | None = None,
) -> None:
    """Pass the matrix of one attention to every recording in this thread, for a module that multiplies by other means.

    `attlas.attention` and ``A @ v`` in the forward of a module are recorded without it.

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
    if observers.active:
        _emit_or_operator(module, matrix, first_query, first_key, values)


@public("pooled()")
def pooled(
    module: nn.Module,
    matrix: AttentionMatrix,
    values: Tensor,
    pool: Pool | None = None,
    *,
    dropout_p: float = 0.0,
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
    dropout_p : float, default 0.0
        Probability that a weight is dropped after softmax, as in `attlas.attention`. The weights that are recorded and
        returned are those before dropout.
    first_query, first_key : int, optional
        Positions in the text of query 0 and of key 0, where they are known.

    Returns
    -------
    out : Tensor, shape (batch, heads, m, e)
        The pooled values.
    weights : AttentionMatrix, shape (batch, heads, m, n)
        The weights, as they were changed.

    Raises
    ------
    ShapeError
        If `dropout_p` is no probability, or comes with a `pool` of one's own.

    See Also
    --------
    attlas.attention : recorded and changed without this function; it returns no weights, and guesses positions.

    Notes
    -----
    The matrix may be one of `attlas.transport`, or its rows times a factor: the module is then recorded as a layer of
    linear attention. ``A @ v`` of such a matrix is recorded only so.

    Cost without a recording and without an intervention: one comparison.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.recording import pooled
    >>> A, v = attlas.attend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)), torch.randn(1, 2, 5, 8)
    >>> out, weights = pooled(torch.nn.Identity(), A, v, dropout_p=0.1)
    >>> out.shape, weights is A
    (torch.Size([1, 2, 5, 8]), True)
    """
    check_probability("dropout_p", dropout_p)
    if pool is not None and dropout_p:
        rule = "a pool of one's own drops weights by itself."
        raise ShapeError(rule, f"pool and dropout_p = {dropout_p!r}", "leave pool out, or dropout_p.")
    if observers.active:
        given = pool or (lambda A, v: A.pooled(v, dropout_p))
        return _pool_or_operator([module], matrix, values, given, first_query, first_key)
    return matrix.pooled(values, dropout_p) if pool is None else pool(matrix, values), matrix


@public("pooled()")
def pooled_in(
    modules: Sequence[nn.Module],
    matrix: AttentionMatrix,
    values: Tensor,
    pool: Pool,
    first_query: int | None = None,
    first_key: int | None = None,
) -> tuple[Tensor, AttentionMatrix]:
    """Pool values as `pooled` does, for an attention that is a part of several modules."""
    places = [_place_of_matrix(module, matrix) for module in modules]
    if has_four_axes(matrix):
        return _pool_and_tell(places, matrix, values, pool, first_query, first_key)
    axes = matrix.axes
    values = check_values(values, matrix.weights.keys, axes, matrix.weights.shape[1])
    out, shown = _pool_and_tell(places, four_axes(matrix), values, pool, first_query, first_key)
    return axes.restore(out), shown.with_weights(shown.weights, axes)


def _pool_and_tell(
    places: Sequence[Place],
    matrix: AttentionMatrix,
    values: Tensor,
    pool: Pool,
    first_query: int | None = None,
    first_key: int | None = None,
) -> tuple[Tensor, AttentionMatrix]:
    """Pool values with one attention: ask the interventions, multiply, and tell the recordings.

    The matrix has four axes, and values the shape (batch, value heads, n, e); `places` says which attention of which
    modules it is. `Place.heard` says that the same weights were multiplied before in this call: a second product with
    other values is computed, and not told again. Returns the output, and the weights that recordings see.
    """
    change = Change(matrix, pool, lambda A: A)
    changers: list[Any] = [
        listener for listener in _current_listeners.get() if _is_listener_class(type(listener), Changer)
    ]
    for place in places:
        change = change._replace(number=place.number, repeated=place.heard)
        for changer in changers:
            change = changer.change(place.module, change, first_query, first_key)
    if not changers and not places[0].heard:
        # Statistics that recordings will ask for: the kernel that multiplies computes them in the same call.
        announced: tuple[Statistic, ...] = ()
        for listener in _current_listeners.get():
            announced += getattr(listener, "announced", ())
        matrix.weights.announced = announced
    # Products inside are this attention's own: nobody is told of them.
    with observers.unheard():
        out, shown = change.pool(change.matrix, values), change.shown(change.matrix)
    for place in places:
        if not place.heard:
            call = AttentionCall(place.module, shown, first_query, first_key, values, place.number)
            _tell_listeners(call, changers=False)
    return out, shown


def _product_in_module(matrix: AttentionMatrix, values: Tensor, dropout: Any) -> Tensor:
    """Compute ``A @ v`` as an attention of the running module, with its interventions, and tell the recordings.

    It stands in for `observers.product` while there is a recording.
    """
    calls = [] if observers.is_unheard() or not matrix.weights.are_shares else _running_calls()
    if not calls:
        if _active_changers and not observers.is_unheard():
            _refuse_recomputation()
        return observers.unobserved_product(matrix, values, dropout)
    if _active_changers and torch.is_grad_enabled():
        # `_refuse_recomputation` refuses a backward that computes this again where no module is known to run.
        _changers_of_products.update(listener for listener in _current_listeners.get() if isinstance(listener, Changer))
    own = four_axes(matrix)

    def pool(A: AttentionMatrix, v: Tensor) -> Tensor:
        """Return ``A @ v``, by way of the product that the module called where no intervention made another matrix."""
        if A is not own:
            return A.pooled(v, 0.0 if dropout is None else dropout.p)
        with public("A @ v"):
            return matrix.weights.product(v, dropout)

    return _pool_and_tell([call.place(matrix) for call in calls], own, values, pool)[0]


def four_axes(matrix: AttentionMatrix) -> AttentionMatrix:
    """Return a matrix with the axes (batch, heads, m, n), whichever it has; itself where it has these."""
    return matrix if has_four_axes(matrix) else AttentionMatrix(matrix.weights)


def has_four_axes(matrix: AttentionMatrix) -> bool:
    """Return whether the axes that users see are those of the weights: (batch, heads, m, n)."""
    shape = matrix.shape
    return len(shape) == 4 and shape[:2] == matrix.weights.shape[:2]


@cache
def _is_listener_class(listener: type, protocol: type) -> bool:
    """Return whether listeners of a class have the methods of a protocol; isinstance() looks for each at every call."""
    return issubclass(listener, protocol)


def _running_calls(module: nn.Module | None = None) -> list[ModuleCall]:
    """Return the running calls of the innermost modules of all followed models, or those of one module; each once."""
    calls: dict[int, ModuleCall] = {}
    for listener in _current_listeners.get():
        if not _is_listener_class(type(listener), Follower):
            continue
        call: ModuleCall | None = listener.running(module)  # type: ignore[attr-defined]  # a Follower
        if call is not None:
            calls.setdefault(id(call.module), call)
    return list(calls.values())


def _place_of_matrix(module: nn.Module, matrix: AttentionMatrix) -> Place:
    """Return which attention a matrix is: that of a module which called `offer` or `pooled` with it."""
    calls = _running_calls(module)
    place = calls[0].place(matrix, offered=True) if calls else Place(module)
    # Modules around this one run too. One of them may be asked for this matrix later, and finds it by what is kept.
    for call in _running_calls():
        if call.module is not module:
            # Called for the memory alone: `call.place` finds the matrix from now on.
            call.remember(matrix, place)
    return place


def _refuse_recomputation() -> None:
    """Raise an error where a backward computes an attention again and no module runs that tells which one it is."""
    if in_backward() and any(listener in _changers_of_products for listener in _current_listeners.get()):
        rule = "an attention that is computed again in the backward must be known again by its module."
        fix = "checkpoint(module, x), the module and not a function of it, or attlas.recording.pooled(self, A, v)."
        raise RecordingError(rule, "gradient checkpointing of a function", fix, where="intervene()")


@without_autocast
def _tell_listeners(call: AttentionCall, *, changers: bool = True) -> None:
    """Call every listener in this thread with an attention; without `changers`, all but interventions."""
    with observers.unheard():
        for listener in _current_listeners.get():
            if changers or not _is_listener_class(type(listener), Changer):
                listener.on_attention(call)


@public("offer()")
def _call_listeners(
    module: nn.Module, matrix: AttentionMatrix, first_query: int | None, first_key: int | None, values: Tensor | None
) -> None:
    """Call the listeners with the matrix of one attention, for `offer`; not again where they heard its ``A @ v``."""
    place = _place_of_matrix(module, matrix)
    if place.heard and (first_query, first_key) != (None, None):
        rule = "positions must be known before the values of an attention are pooled."
        fix = "offer(self, A, first_query=...) before A @ v, or out, A = pooled(self, A, v, first_query=...)."
        raise RecordingError(rule, "A @ v, and then offer(self, A) with positions", fix)
    if not place.heard:
        own = four_axes(matrix)
        if values is not None and own is not matrix:
            values = check_values(values, matrix.weights.keys, matrix.axes, matrix.weights.shape[1])
        _tell_listeners(AttentionCall(place.module, own, first_query, first_key, values, place.number))


# `subscribed` replaces both by functions that torch.compile leaves alone.
_pool_or_operator: Callable[..., tuple[Tensor, AttentionMatrix]] = pooled_in
_emit_or_operator: Callable[..., None] = _call_listeners


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
    return observers.active


def is_told_by_operators() -> bool:
    """Return whether a program that is traced now tells recordings by operators, and has no graph break there.

    Interventions change what an attention computes, and a patched function hears of every call: Python does both.
    """
    if torch.compiler.is_exporting() or transforming():
        return False
    return observers.active and not observers.changing and not observers.patched


def takes_values() -> bool:
    """Return whether a listener in this thread may keep the values of an attention."""
    return any(getattr(listener, "takes_values", True) for listener in _current_listeners.get())


def are_values_kept() -> bool:
    """Return whether a recording in this thread keeps the values of attentions, or their norms."""
    return any(getattr(listener, "takes_values", False) for listener in _current_listeners.get())


def is_changing() -> bool:
    """Return whether an intervention is applied in this thread."""
    return _active_changers > 0 and any(isinstance(listener, Changer) for listener in _current_listeners.get())


def is_recording(listener: Listener | None = None) -> bool:
    """Return whether a listener (by default, any listener) records in this thread."""
    listeners = _current_listeners.get()
    return bool(listeners) if listener is None else id(listener) in map(id, listeners)


@contextmanager
def subscribed(listener: Listener) -> Iterator[None]:
    """Call a listener with every matrix that this thread multiplies or offers, for the time of a ``with`` block."""
    global _active_recordings, _active_changers, _emit_or_operator, _pool_or_operator  # noqa: PLW0603 - what `offer` and `pooled` call
    changes = isinstance(listener, Changer)
    with _followed_lock:
        _emit_or_operator, _pool_or_operator = uncompiled(_call_listeners), uncompiled(pooled_in)
        _active_recordings += 1
        _active_changers += changes
        observers.active, observers.product = True, uncompiled(_product_in_module)
        observers.changing = _active_changers > 0
    before = _current_listeners.get()
    _current_listeners.set((*before, listener))
    try:
        yield
    finally:
        # Not by a token: a recording may be left in another context than it was entered in (a generator, a notebook).
        _current_listeners.set(tuple(one for one in _current_listeners.get() if one is not listener))
        with _followed_lock:
            _active_recordings -= 1
            _active_changers -= changes
            observers.active, observers.changing = _active_recordings > 0, _active_changers > 0
