"""Follows a running model: passes of the whole model, calls of each module, the innermost running module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from attlas._compat import in_backward


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
        self._inside: list[nn.Module] = []
        self.number = 0
        self.calls: dict[str, int] = {}

    @property
    def inside(self) -> bool:
        """Whether a pass of the whole model runs."""
        return self._depth > 0

    @property
    def innermost(self) -> nn.Module | None:
        """The innermost watched module that runs."""
        return self._inside[-1] if self._inside else None

    def occurrence(self, path: str) -> int:
        """Return how often a module was called in this pass before the call that runs."""
        return max(self.calls.get(path, 1) - 1, 0) if self.inside else 0

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Put the hooks on, and take them off again."""
        with ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            yield

    def _hooks(self) -> Iterator[Any]:
        """Register the hooks of the model and of the watched modules; yield their handles."""
        model = self._model
        yield model.register_forward_pre_hook(self._enter_pass, with_kwargs=True, prepend=True)
        for path, module in self._watched.items():
            yield module.register_forward_pre_hook(self._entering(path))
            # Also where the forward raises: the next call must not find what this one left.
            yield module.register_forward_hook(self._leave, always_call=True)
        yield model.register_forward_hook(self._leave_pass, always_call=True)
        yield model.register_forward_hook(self._ended)

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
        if self._active() and not in_backward():
            self._depth = max(self._depth - 1, 0)

    def _ended(self, *_: Any) -> None:
        if self._active() and not in_backward() and self._depth == 0:
            self._end()

    def _entering(self, path: str) -> Callable[..., None]:
        """Return the hook that counts a call of a module and makes it the innermost."""

        def enter(module: nn.Module, *_: Any) -> None:
            if self._active():
                self._inside.append(module)
                if not in_backward():
                    self.calls[path] = self.calls.get(path, 0) + 1

        return enter

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._active() and self._inside and self._inside[-1] is module:
            self._inside.pop()
