"""Hears layers of linear attention: what they hand to the functions that compute them, in files of transformers."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.foundation.blocks import SharedBlocks
from attlas.foundation.compat import add_hooks, in_backward, remove_hooks
from attlas.recording.hooks import uncompiled
from attlas.recording.linear_calls import OF_CHANNELS, OF_HEADS, LinearCall, Reader

# Hears of each call.
Tell: TypeAlias = Callable[[LinearCall], None]
# Changes what the heads of a call computed, shape (batch, heads, n, e): given the layer, where it is known; the output;
# and a function that says what the call was.
ChangeOutput: TypeAlias = "Callable[[nn.Module | None, Tensor, Callable[[], LinearCall]], Tensor]"
# A file with one of the functions, or a class with one of the methods; and its name there.
Place: TypeAlias = "tuple[ModuleType | type, str]"


_replacements = SharedBlocks()


def linear_functions(modules: Iterable[tuple[str, nn.Module]]) -> tuple[dict[Place, Reader], dict[Place, Reader]]:
    """Return the functions of linear attention that the files of the classes of some modules have.

    First come those of layers with one matrix for each head, then those with one for each channel.

    Parameters
    ----------
    modules : iterable of (str, nn.Module)
        The modules of a model.
    """
    files = dict.fromkeys([sys.modules.get(type(module).__module__) for _, module in modules])
    of_heads: dict[Place, Reader] = {}
    of_channels: dict[Place, Reader] = {}
    for readers, found in ((OF_HEADS, of_heads), (OF_CHANNELS, of_channels)):
        for file in files:
            for name, reader in readers.items():
                owner, _, method = name.rpartition(".")
                place = vars(file).get(owner) if owner and file is not None else file
                if place is not None and method in vars(place):
                    found[place, method] = reader
    return of_heads, of_channels


@contextmanager
def telling_of_linear_calls(
    functions: dict[Place, Reader], tell: Tell | None = None, change: ChangeOutput | None = None
) -> Iterator[None]:
    """Let the linear attention layers of a model tell of their calls, for the time of a ``with`` block.

    Parameters
    ----------
    functions : dict
        What `linear_functions` found in the files of the model.
    tell : callable, optional
        Called by each call in any thread; it must know which thread it listens to.
    change : callable, optional
        Changes the output of each call of a layer with one matrix for each head, in the same way.
    """
    with ExitStack() as stack:
        for place, reader in functions.items():
            stack.enter_context(_replacements.shared(place, partial(_calls_reported, place, reader)))
        with _replacements.lock:
            _call_tellers.extend([] if tell is None else [tell])
            _output_changers.extend([] if change is None else [change])
        try:
            yield
        finally:
            with _replacements.lock:
                if tell is not None:
                    _call_tellers.remove(tell)
                if change is not None:
                    _output_changers.remove(change)


@contextmanager
def _calls_reported(place: Place, reader: Reader) -> Iterator[None]:
    """Replace a function of a file by one that reports each call, for the time of a ``with`` block."""
    original = vars(place[0])[place[1]]
    setattr(*place, _reporting_function(original, reader))
    try:
        yield
    finally:
        setattr(*place, original)


_call_tellers: list[Tell] = []
_output_changers: list[ChangeOutput] = []


def _reporting_function(original: Any, reader: Reader) -> Any:
    """Return a function that does what the original does, reports each call, and lets interventions change it."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        """Call the original, report the call to `_call_tellers`, and let `_output_changers` change the output."""
        # A block that is computed again for its gradient: it was told of in the forward.
        if in_backward() and not _output_changers:
            return original(*args, **kwargs)
        given = _arguments_by_name(original, args, kwargs)
        with torch.no_grad():
            before = reader.before(given)
        # "z" is the gate of the output, silu(z): left out of the call, and multiplied with what was changed.
        gate = given.get("z") if _output_changers else None
        with _hooks_on_layer(given, reader, before):
            result = original(*args, **kwargs) if gate is None else original(**given | {"z": None})

        def read() -> LinearCall:  # with a graph, for interventions
            return reader.read(given, result, before)

        if _call_tellers and not in_backward():
            with torch.no_grad():
                call = read()
                for tell in tuple(_call_tellers):
                    tell(call)
        # Where the output goes through a norm first, `_hooks_on_layer` has changed the norm's input.
        result = result if reader.norm else _changed_result(result, reader, read)
        # The output gate of a step of Falcon-H1 comes after what is changed.
        return result if gate is None else (result * functional.silu(gate)).to(result.dtype)

    outside = uncompiled(compute)

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a program does not tell of it, and breaks where it is changed
            return outside(*args, **kwargs) if _output_changers else original(*args, **kwargs)
        return compute(*args, **kwargs)

    return run


def _changed_result(result: Any, reader: Reader, read: Callable[[], LinearCall]) -> Any:
    """Return the result of a call with interventions applied to its output."""
    if not _output_changers:
        return result
    out, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
    own = out.unsqueeze(2) if reader.one_token else out.transpose(1, 2)
    for change in tuple(_output_changers):
        own = change(None, own, read)
    own = own.squeeze(2) if reader.one_token else own.transpose(1, 2).contiguous()
    return own if rest is None else (own, *rest)


@contextmanager
def _hooks_on_layer(given: dict[str, Any], reader: Reader, before: Tensor | None) -> Iterator[None]:
    """Add hooks to modules of a layer, for one call: keep the projection's output, and change the norm's input."""
    if not reader.projection:
        yield
        return
    layer = given["self"]
    thread, key = threading.get_ident(), f"attlas linear {threading.get_ident()}"

    def hear(module: nn.Module, args: Any, output: Any) -> None:
        """Keep the projection's output as ``"heard"``, where `reader` looks for it; a forward hook."""
        if threading.get_ident() == thread:
            given["heard"] = output

    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pass the heads' output, the norm's input, through the interventions that run; a forward pre-hook."""
        if threading.get_ident() != thread or not _output_changers:
            return None

        def read() -> LinearCall:
            return reader.read(given, (None, None), before)

        heads = read().values.shape[1]
        out = args[0].unflatten(-1, (heads, -1)).transpose(1, 2)
        for one in tuple(_output_changers):
            out = one(layer, out, read)
        return (out.transpose(1, 2).flatten(-2), *args[1:]), kwargs

    projection, norm = getattr(layer, reader.projection), getattr(layer, reader.norm)
    add_hooks([projection], key, hear, before=False)
    add_hooks([norm], key, change, before=True)
    try:
        yield
    finally:
        remove_hooks([projection, norm], key)


def _arguments_by_name(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, those that the function takes by any name among them."""
    bound = _cached_signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    return {**found.pop("kwargs", {}), **found}


@cache
def _cached_signature(function: Any) -> inspect.Signature:
    """Return the signature of a function; cached, since it is asked for at each call."""
    return inspect.signature(inspect.unwrap(function))
