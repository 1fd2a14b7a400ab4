"""Follows a running model: passes of the whole model, calls of each module, the innermost running module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from attlas.foundation.compat import graph_task, in_backward
from attlas.recording.module_call import ModuleCall
from attlas.recording.traced import Handler, Hooks, numbered


class Passes:
    """Follows a model through hooks, for the time of a ``with`` block.

    Parameters
    ----------
    model : nn.Module
        Its calls are the passes.
    watched : iterable of (str, nn.Module)
        Modules whose calls are counted, and one of which is the innermost.
    active : callable
        Whether a call is one that is recorded, and not that of another thread.
    begin : callable
        Called with the arguments of each pass.
    end : callable
        Called when a pass has ended well.
    handlers : dict of str to callable, optional
        Handlers of further hooks, which `followed` lets one add.
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Iterable[tuple[str, nn.Module]],
        active: Callable[[], bool],
        begin: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda args, kwargs: None,
        end: Callable[[], None] = lambda: None,
        handlers: dict[str, Handler] | None = None,
    ) -> None:
        self._model = model
        self._watched = dict(watched)
        self._active = active
        self._begin = begin
        self._end = end
        self._depth = 0
        self._inside: list[ModuleCall] = []
        self._in_program = False  # whether a pass runs that is a part of a program of torch.compile
        self._outside = 0  # modules that ran when the pass began
        self._paths = {id(module): path for path, module in self._watched.items()}
        self.number = 0
        self.calls: dict[str, int] = {}
        self._hooks = Hooks(
            {
                "begin": self._enter_pass,
                "begin in program": self._enter_pass_in_program,
                "enter": self._enter_module,
                "leave": self._leave_module,
                "leave pass": self._leave_pass,
                "end": self._end_pass_if_outermost,
            }
            | (handlers or {})
        )

    @property
    def inside(self) -> bool:
        """Whether a pass of the whole model runs."""
        return self._depth > 0

    @property
    def innermost(self) -> nn.Module | None:
        """The innermost watched module that runs."""
        return self._inside[-1].module if self._inside else None

    def running(self, module: nn.Module | None = None) -> ModuleCall | None:
        """Return the innermost call of a module that runs; by default, of any watched module."""
        if module is None:
            return self._inside[-1] if self._inside else None
        return next((call for call in reversed(self._inside) if call.module is module), None)

    def occurrence(self, path: str) -> int:
        """Return how often a module was called in this pass before the call that runs."""
        return max(self.calls.get(path, 1) - 1, 0) if self.inside else 0

    @contextmanager
    def followed(self) -> Iterator[Hooks]:
        """Put the hooks on, and take them off again."""
        model = self._model
        with numbered([model, *self._watched.values()]), self._hooks as hooks:
            hooks.add([model], "begin", "before", first=True)
            watched = self._watched.values()
            hooks.add(watched, "enter", "before", direct=(_enter_hook, self))
            # Also where the forward raises: the next call must not find what this one left.
            hooks.add(watched, "leave", "after", always=True, direct=(_leave_hook, self))
            hooks.add([model], "leave pass", "after", always=True)
            hooks.add([model], "end", "after")
            yield hooks

    def _enter_pass_in_program(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass that is a part of a program of torch.compile."""
        self._enter_pass(module, args, kwargs)
        self._in_program = self._depth == 1

    def _enter_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass, unless the model runs within its own pass."""
        if not self._active() or in_backward():
            return
        if self._in_program:  # it has raised an error, and nothing in it was called after that
            self._leave_pass()
        # Above 1 where the model calls itself: only the outermost call is a pass.
        self._depth += 1
        if self._depth == 1:
            self.number += 1
            self.calls.clear()
            self._outside = len(self._inside)
            # Tells the recording of a new pass, with the arguments of the model.
            self._begin(args, kwargs)

    def _leave_pass(self, *_: Any) -> None:
        """Leave a call of the model, also after an error."""
        if self._active() and not in_backward():
            self._depth = max(self._depth - 1, 0)
            if self._depth == 0:
                self._in_program = False
                del self._inside[self._outside :]  # modules of a program that raised an error

    def _end_pass_if_outermost(self, *_: Any) -> None:
        """End the pass where the outermost call of the model raised no error."""
        if self._active() and not in_backward() and self._depth == 0:
            self._end()

    def _enter_module(self, module: nn.Module, *_: Any) -> None:
        """Count a call of a module, and make it the innermost."""
        _enter_hook("enter", 0, self, module, ())

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        """Make the module that called this one the innermost again."""
        _leave_hook("leave", 0, self, module, ())


# The hooks of every module, called as `attlas.recording.traced.call` is.


def _enter_hook(name: str, slot: int, handler: Any, module: nn.Module, args: Any, rest: Any = None) -> None:
    """Count a call of a module, and make it the innermost; a hook with the arguments of `traced.call`.

    `handler` is the `Passes`. Calls in a backward, where `graph_task` is not -1, compute again and are not counted.
    """
    passes: Passes = handler
    if passes._active():
        passes._inside.append(ModuleCall(module))
        path = passes._paths.get(id(module))
        if path is not None and graph_task() == -1:
            passes.calls[path] = passes.calls.get(path, 0) + 1


def _leave_hook(name: str, slot: int, handler: Any, module: nn.Module, args: Any, rest: Any = None) -> None:
    """Make the module that called this one the innermost again."""
    passes: Passes = handler
    if passes._active() and passes._inside and passes._inside[-1].module is module:
        passes._inside.pop()
