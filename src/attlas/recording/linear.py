"""Hears layers of linear attention: what they hand to the functions that compute them, in files of transformers."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from attlas.foundation.compat import add_hooks, in_backward, remove_hooks
from attlas.recording.linear_calls import OF_CHANNELS, OF_HEADS, LinearCall, Reader

# Hears of each call.
Tell: TypeAlias = Callable[[LinearCall], None]
# A file with one of the functions, or a class with one of the methods; and its name there.
Place: TypeAlias = "tuple[ModuleType | type, str]"


class _Replaced:
    """A function of a file in which calls are told of, for as long as anybody listens."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.users = 0


_lock = threading.Lock()
_replaced: dict[Place, _Replaced] = {}


def linear_functions(modules: Iterable[tuple[str, nn.Module]], *, channels: bool) -> dict[Place, Reader]:
    """Return the functions of linear attention that the files of the classes of some modules have.

    Parameters
    ----------
    modules : iterable of (str, nn.Module)
        The modules of a model.
    channels : bool
        Whether those of layers with one matrix for each channel are meant, or those with one for each head.
    """
    files = dict.fromkeys(sys.modules.get(type(module).__module__) for _, module in modules)
    found: dict[Place, Reader] = {}
    for file in files:
        for name, reader in (OF_CHANNELS if channels else OF_HEADS).items():
            owner, _, method = name.rpartition(".")
            place = vars(file).get(owner) if owner and file is not None else file
            if place is not None and method in vars(place):
                found[place, method] = reader
    return found


@contextmanager
def telling_of_linear_calls(functions: dict[Place, Reader], tell: Tell) -> Iterator[None]:
    """Let the linear attention layers of a model tell of their calls, for the time of a ``with`` block.

    Parameters
    ----------
    functions : dict
        What `linear_functions` found in the files of the model.
    tell : callable
        Called by each call in any thread; it must know which thread it listens to.
    """
    with _lock:
        for place, reader in functions.items():
            if place not in _replaced:
                original = vars(place[0])[place[1]]
                _replaced[place] = _Replaced(original)
                setattr(*place, _told(original, reader))
            _replaced[place].users += 1
        _tellers.append(tell)
    try:
        yield
    finally:
        with _lock:
            _tellers.remove(tell)
            for place in functions:
                entry = _replaced[place]
                entry.users -= 1
                if not entry.users:
                    setattr(*place, entry.original)
                    del _replaced[place]


_tellers: list[Tell] = []


def _told(original: Any, reader: Reader) -> Any:
    """Return a function that computes what the original does, and tells of it."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or in_backward():
            return original(*args, **kwargs)
        given = _bound(original, args, kwargs)
        with torch.no_grad():
            before = reader.before(given)
        with _heard(given, reader.projection):
            result = original(*args, **kwargs)
        with torch.no_grad():
            call = reader.read(given, result, before)
            for tell in tuple(_tellers):
                tell(call)
        return result

    return run


@contextmanager
def _heard(given: dict[str, Any], projection: str) -> Iterator[None]:
    """Add the output of a module of the layer to the arguments of its call, for the time of a ``with`` block."""
    if not projection:
        yield
        return
    module = getattr(given["self"], projection)
    thread, key = threading.get_ident(), f"attlas linear {threading.get_ident()}"

    def hear(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            given["heard"] = output

    add_hooks([module], key, hear, before=False)
    try:
        yield
    finally:
        remove_hooks([module], key)


def _bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, those that the function takes by any name among them."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    return {**found.pop("kwargs", {}), **found}


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(inspect.unwrap(function))
