"""Follows a running model: passes of the whole model, calls of each module, the innermost running module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from attlas.foundation.compat import in_backward
from attlas.recording.hooks import uncompiled
from attlas.recording.module_call import ModuleCall


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
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Iterable[tuple[str, nn.Module]],
        active: Callable[[], bool],
        begin: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda args, kwargs: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._watched = dict(watched)
        self._active = active
        self._begin = begin
        self._end = end
        self._depth = 0
        self._inside: list[ModuleCall] = []
        self.number = 0
        self.calls: dict[str, int] = {}

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
    def followed(self) -> Iterator[None]:
        """Put the hooks on, and take them off again."""
        with ExitStack() as stack:
            self._register_hooks(stack)
            yield

    def _register_hooks(self, stack: ExitStack) -> None:
        """Register the hooks of the model and of the watched modules until the stack is closed."""
        # A compiled model calls these functions as they are: compiled, they would be compiled again for each module.
        enter_pass, leave_pass, ended, enter, leave = (
            uncompiled(function)
            for function in (Passes._enter_pass, Passes._leave_pass, Passes._ended, Passes._enter, Passes._leave)
        )
        model = self._model
        begin = model.register_forward_pre_hook(partial(enter_pass, self), with_kwargs=True, prepend=True)
        stack.callback(begin.remove)
        for path, module in self._watched.items():
            stack.callback(module.register_forward_pre_hook(partial(enter, self, path)).remove)
            # Also where the forward raises: the next call must not find what this one left.
            stack.callback(module.register_forward_hook(partial(leave, self), always_call=True).remove)
        stack.callback(model.register_forward_hook(partial(leave_pass, self), always_call=True).remove)
        stack.callback(model.register_forward_hook(partial(ended, self)).remove)

    def _enter_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass, unless the model runs within its own pass."""
        if not self._active() or in_backward():
            return
        self._depth += 1
        if self._depth == 1:
            self.number += 1
            self.calls.clear()
            self._begin(args, kwargs)

    def _leave_pass(self, *_: Any) -> None:
        """Leave a call of the model, also after an error."""
        if self._active() and not in_backward():
            self._depth = max(self._depth - 1, 0)

    def _ended(self, *_: Any) -> None:
        """End the pass where the outermost call of the model raised no error."""
        if self._active() and not in_backward() and self._depth == 0:
            self._end()

    def _enter(self, path: str, module: nn.Module, *_: Any) -> None:
        """Count a call of a module, and make it the innermost."""
        if self._active():
            self._inside.append(ModuleCall(module))
            if not in_backward():
                self.calls[path] = self.calls.get(path, 0) + 1

    def _leave(self, module: nn.Module, *_: Any) -> None:
        """Make the module that called this one the innermost again."""
        if self._active() and self._inside and self._inside[-1].module is module:
            self._inside.pop()
