"""Tells recordings of a program of torch.compile which modules run: hooks that are operators in its graph.

A hook is a Python function, and one that torch.compile may not trace breaks the graph. So inside a program each hook is
an operator of torch.library. It names the recording by a number and the module by a tensor, which is an input of the
graph: layers of one class share their program. When the program runs, the operator calls what the hook calls outside of
a program. All operators write to one small tensor, so that torch keeps them and their order.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attlas.foundation.compat import add_hooks, remove_hooks, transforming
from attlas.recording.hooks import uncompiled

# What a hook calls: the module, its positional arguments, and its keywords or its output.
Handler: TypeAlias = "Callable[[nn.Module, tuple[Any, ...], Any], None]"

# Of a graph that is captured for a GPU and played again without Python, an operator with this tag is no part.
TAGS = tuple(tag for name in ("cudagraph_unsafe",) if (tag := getattr(torch.Tag, name, None)) is not None)

_NUMBER_ATTRIBUTE = "_attlas_number"  # of a module that is followed: the tensor that stands for it in a program
_followed_lock = threading.Lock()
_modules_by_number: dict[int, weakref.ref[nn.Module]] = {}  # by the address of the tensor
_follower_counts: dict[int, int] = {}  # how many blocks follow the module, in the same way
_handlers_by_number: dict[
    int, dict[str, Handler]
] = {}  # what follows a model, by its number: the handlers of its hooks

with torch.inference_mode(False):
    # What every operator writes to.
    LOG = torch.zeros((), dtype=torch.int64, device="cpu")


# ------------------------------------------------------------------------------------------------------------ modules


@contextmanager
def numbered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules the tensors that stand for them in a program, for the time of a ``with`` block."""
    held: list[tuple[nn.Module, Tensor]] = []
    with _followed_lock:
        for module in modules:
            number = vars(module).get(_NUMBER_ATTRIBUTE)
            if number is None or module_of(number) is not module:  # a copy of a module has a copy of its tensor
                with torch.inference_mode(False):
                    number = torch.zeros((), dtype=torch.int64, device="cpu")
                object.__setattr__(module, _NUMBER_ATTRIBUTE, number)
                _modules_by_number[number.data_ptr()] = weakref.ref(module)
            _follower_counts[number.data_ptr()] = _follower_counts.get(number.data_ptr(), 0) + 1
            held.append((module, number))
    try:
        yield
    finally:
        with _followed_lock:
            for module, number in held:
                _follower_counts[number.data_ptr()] -= 1
                if not _follower_counts[number.data_ptr()]:
                    del _follower_counts[number.data_ptr()], _modules_by_number[number.data_ptr()]
                    object.__delattr__(module, _NUMBER_ATTRIBUTE)


def number_of(module: nn.Module) -> Tensor | None:
    """Return the tensor that stands for a module in a program; None for one that nobody follows."""
    number: Tensor | None = getattr(module, _NUMBER_ATTRIBUTE, None)
    return number


def module_of(number: Tensor) -> nn.Module | None:
    """Return the module that a tensor stands for; None where it is followed no more, or is a copy of one that is."""
    found = _modules_by_number.get(number.data_ptr())
    return None if found is None else found()


# -------------------------------------------------------------------------------------------------------------- hooks


class Hooks:
    """Hooks of modules that break no graph, for the time of a ``with`` block.

    Parameters
    ----------
    handlers : dict of str to callable
        What is called, by name.
    """

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._own = handlers
        self._added: list[tuple[list[nn.Module], str]] = []
        self._slot = 0

    def __enter__(self) -> Hooks:
        with _followed_lock:  # the lowest number that is free: the program of the recording before is used again
            self._slot = next(slot for slot in range(len(_handlers_by_number) + 1) if slot not in _handlers_by_number)
            _handlers_by_number[self._slot] = self._own
        return self

    def __exit__(self, *_: Any) -> None:
        # Remove all hooks, the last one first.
        for modules, key in reversed(self._added):
            remove_hooks(modules, key)
        self._added.clear()
        with _followed_lock:
            del _handlers_by_number[self._slot]

    def add(
        self,
        modules: Iterable[nn.Module],
        name: str,
        when: str,
        *,
        first: bool = False,
        always: bool = False,
        direct: tuple[Callable[..., None], Any] | None = None,
    ) -> None:
        """Register a hook of some modules.

        Parameters
        ----------
        modules : iterable of nn.Module
            The modules.
        name : str
            The name of the handler.
        when : {"before", "after"}
            Whether it is called before the forward, with the keywords, or after it, with the output.
        first : bool
            Whether it is called before all other hooks.
        always : bool
            Whether it is called also where the forward raises an error.
        direct : tuple of callable and Any, optional
            What is called outside of programs in place of `call`, with the same arguments, and what it gets as its
            handler: hooks of many modules save a call each.
        """
        function, handler = (call, self._own[name]) if direct is None else direct
        hook = _Hook(_hook_function(function), name, self._slot, handler)
        key, own = f"attlas {self._slot} {name}", list(modules)
        self._added.append((own, key))
        add_hooks(own, key, hook, before=when == "before", first=first, always=always)


class _Hook(partial):  # type: ignore[type-arg]  # of what a hook returns
    """A hook, which a copy of its module does not have: nobody records the copy, or takes its hooks off."""

    def __reduce__(self) -> Any:
        return _hook_of_copy, ()


def _hook_of_copy() -> Callable[..., None]:
    """Return what stands in a copy for the hook of a module."""
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """Do nothing, as a hook."""


def call(name: str, slot: int, handler: Handler, module: nn.Module, args: Any, rest: Any = None) -> None:
    """Call a handler, outside of programs and around them."""
    handler(module, args, rest)


def _call_in_program(name: str, slot: int, handler: Any, module: nn.Module, args: Any, rest: Any = None) -> None:
    """Put the operator `event` into the program that torch.compile traces, in the place of a hook.

    None goes into a program of torch.export.
    """
    number = number_of(module)
    if number is None or torch.compiler.is_exporting():
        return
    tensors: list[Tensor] = []
    text = ""
    if not transforming() and name.startswith("begin"):
        places = ", ".join([_place_in_tensors(value, tensors) for value in args])
        named = ", ".join([f'"{key}": {_place_in_tensors(value, tensors)}' for key, value in rest.items()])
        text = f"[[{places}], {{{named}}}]"
    elif not transforming() and name == "end encoder":
        text = f"[[], {_place_in_tensors(rest, tensors)}]"
    event(LOG, name, slot, number, tensors, text)


@cache
def _hook_function(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function of a hook: torch.compile leaves it alone, and takes the operator where it inlines it.

    It is not made before a recording begins, because torch then loads its whole compiler.
    """
    hook = uncompiled(function)
    torch.compiler.substitute_in_graph(hook)(_call_in_program)
    return hook


# ---------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("attlas::event", mutates_args=("log",), tags=TAGS)
def event(log: Tensor, name: str, slot: int, module: Tensor, tensors: list[Tensor], text: str) -> None:
    """Call the handler of a hook, for the module that the tensor `module` stands for, when the program runs."""
    # `log` is changed, on paper, so that no compiler drops or reorders the call.
    handlers, running = _handlers_by_number.get(slot), module_of(module)
    if handlers is not None and running is not None:
        handler = handlers.get(f"{name} in program", handlers[name])
        handler(running, *_handler_arguments(text, tensors))


@event.register_fake
def _(log: Tensor, name: str, slot: int, module: Tensor, tensors: list[Tensor], text: str) -> None:
    return None


def _place_in_tensors(value: Any, tensors: list[Tensor]) -> str:
    """Return the place of a tensor in the list, to which it is appended, as JSON; null for what is no tensor.

    Of what an encoder has returned, the first tensor counts. It runs while torch.compile traces, so it is plain code.
    """
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return str(len(tensors) - 1)
    hidden = value[0] if isinstance(value, tuple) and value else getattr(value, "last_hidden_state", None)
    return f"[{_place_in_tensors(hidden, tensors)}]" if isinstance(hidden, Tensor) else "null"


def _handler_arguments(text: str, tensors: list[Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a handler; the memory of a tensor may be used again, so each is a copy."""
    if not text:
        return (), {}

    def given(place: Any) -> Any:
        """Return the tensors of one place, or of a list of places; an index of `tensors` each, None for no tensor."""
        if isinstance(place, list):
            return tuple(map(given, place))
        return None if place is None else tensors[place].clone()

    args, rest = json.loads(text)
    return given(args), {name: given(place) for name, place in rest.items()} if isinstance(rest, dict) else given(rest)
