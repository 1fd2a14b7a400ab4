"""Calls of the modules of a running model, and which tensor went from one to the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

_NORM = re.compile(r"norm|^ln_|layer_?norm", re.IGNORECASE)


@dataclass(eq=False)
class Call:
    """One call of a module: what it was given, and what it returned.

    Parameters
    ----------
    module : nn.Module
        The module.
    path : str
        Its path in the model.
    inputs : list of Tensor
        The tensors of numbers among its arguments.
    around : Call, optional
        The call of a watched module that it is a part of.

    Examples
    --------
    >>> from torch import nn
    >>> from attlas.recording.parts.calls import Call
    >>> Call(nn.Linear(2, 2), "layers.0.mlp", [], None).output is None
    True
    """

    module: nn.Module
    path: str
    inputs: list[Tensor]
    around: Call | None
    output: Tensor | None = None
    inner: list[Call] = field(default_factory=list)
    taken: int = 0

    def rest(self) -> list[Call]:
        """Return the calls within it that have ended since it was last asked."""
        found, self.taken = self.inner[self.taken :], len(self.inner)
        return found


def is_norm(module: nn.Module) -> bool:
    """Return whether a module may be a norm by its class; numbers decide."""
    return bool(_NORM.search(type(module).__name__)) and not any(True for _ in module.children())


def same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are the same numbers in memory, in the same order."""
    if a is None or b is None:
        return False
    return a is b or (a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.numel() > 0)


def numbers_in(values: Any) -> list[Tensor]:
    """Return the tensors of floating point numbers within the arguments of a call, or its output."""
    if isinstance(values, Tensor):
        return [values.detach()] if values.is_floating_point() else []
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return [t for value in inner for t in numbers_in(value)]


def watched_in(block: nn.Module, path: str, sites: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a block whose calls are looked at, with their paths.

    Those are its parts; within an attention, linear maps and norms; the parts of what holds an attention or a norm.

    Parameters
    ----------
    block : nn.Module
        The block.
    path : str
        Its path.
    sites : collection of str
        Paths of the attentions of the model.
    """
    for name, child in block.named_children():
        own = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from watched_in(child, own, sites)
            continue
        yield own, child
        if own in sites:
            yield from ((f"{own}.{inner}", part) for inner, part in child.named_modules() if inner and _is_leaf(part))
        elif any(site.startswith(f"{own}.") for site in sites) or any(map(is_norm, child.children())):
            yield from watched_in(child, own, sites)


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module has no modules within it."""
    return not any(True for _ in module.children())


class Calls:
    """The calls of watched modules that run or have run, each with those within it.

    Parameters
    ----------
    paths : mapping of int to str
        Path of each watched module by its id.
    ended : callable
        Called with each call that has ended.
    """

    def __init__(self, paths: Mapping[int, str], ended: Callable[[Call], None]) -> None:
        self._paths, self._ended = paths, ended
        self._running: list[Call] = []

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Call:
        """Note that a call begins."""
        call = Call(module, self._paths[id(module)], numbers_in((args, kwargs)), self.innermost)
        self._running.append(call)
        return call

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a call has ended; `output` is None after an error."""
        while self._running and self._running[-1].module is not module:
            self._running.pop()  # calls that raised an error
        if not self._running:
            return
        call = self._running.pop()
        found = numbers_in(output)
        call.output = found[0] if found else None
        if call.around is not None:
            call.around.inner.append(call)
        self._ended(call)

    @property
    def innermost(self) -> Call | None:
        """The innermost call that runs."""
        return self._running[-1] if self._running else None

    def running(self, modules: Container[int]) -> Call | None:
        """Return the innermost running call of one of some modules, by their ids."""
        return next((call for call in reversed(self._running) if id(call.module) in modules), None)

    def within(self, call: Call) -> list[Call]:
        """Return a running call and those that run within it, the outermost first."""
        return self._running[self._running.index(call) :]

    def clear(self) -> None:
        """Forget all calls."""
        self._running.clear()
