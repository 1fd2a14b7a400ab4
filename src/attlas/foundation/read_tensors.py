"""The tensors that a piece of code reads and neither was given nor made itself, found while it runs.

A function may hold a tensor in its closure, in an object, in a default argument, in a list, or in a function that it
calls: in each case an operation of torch gets the tensor. So the operations are watched, not the ways to hold a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attlas.foundation.compat import TorchDispatchMode

_watchers = threading.local()

# What reads numbers of a tensor and calls no operation of torch's dispatcher.
_LEAVES_TORCH = {"tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage"}
_DATA_GETTER = Tensor.data.__get__  # type: ignore[attr-defined]
# torch.tensor(numbers) passes the tensor that it has made to this one.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class ReadTensors:
    """Watches the operations of a block of code, and lists the tensors that it reads from elsewhere.

    Parameters
    ----------
    given : iterable of Tensor
        Tensors that the code is given: these do not count.

    Attributes
    ----------
    found : list of Tensor
        The tensors in the order in which they were first read, each once.

    Notes
    -----
    It keeps all that the code makes until the block ends: run the code on a few cells.

    Examples
    --------
    >>> import torch
    >>> table = {"bias": torch.ones(3)}
    >>> x = torch.zeros(3)
    >>> with ReadTensors([x]) as read:
    ...     y = (x + 1) * table["bias"]
    >>> read.found
    [tensor([1., 1., 1.])]
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.found: list[Tensor] = []
        self._check: Callable[[Tensor], None] | None = None
        # By address, which is that of one tensor as long as the tensor is kept.
        self._known = {id(t): t for t in given}

    def __enter__(self) -> Self:
        # From here on torch tells both modes of each function and operation.
        self._modes = ExitStack()
        self._modes.callback(setattr, _watchers, "current", watched())
        self._modes.enter_context(_WatchFunctions(self))
        self._modes.enter_context(_WatchOperations(self))
        _watchers.current = self
        return self

    def __exit__(self, *exception: object) -> None:
        self._modes.close()
        self._known.clear()

    @contextmanager
    def checking(self, check: Callable[[Tensor], None]) -> Iterator[None]:
        """Call `check` with each tensor from elsewhere, before an operation gets it, while a block runs.

        It may raise.
        """
        before, self._check = self._check, check
        try:
            yield
        finally:
            self._check = before

    def read(self, arguments: object) -> None:
        """Record the tensors among an operation's arguments that come from elsewhere."""
        for t in _nested_tensors(arguments):
            if id(t) not in self._known:
                if self._check is not None:
                    self._check(t)
                self._known[id(t)] = t
                self.found.append(t)

    def made(self, results: object) -> None:
        """Remember an operation's results as made here, so that reading them is not recorded."""
        for t in _nested_tensors(results):
            self._known[id(t)] = t


def watched() -> ReadTensors | None:
    """Return the innermost `ReadTensors` block that runs in this thread; None where none does."""
    found: ReadTensors | None = getattr(_watchers, "current", None)
    return found


def _nested_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, which torch nests in tuples, lists and dicts only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _nested_tensors(part)
    elif isinstance(value, dict):
        yield from _nested_tensors(tuple(value.values()))


class _WatchOperations(TorchDispatchMode):
    """Watches every operation that torch runs, also inside its own functions, autograd functions and vmap."""

    def __init__(self, reads: ReadTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this in the place of each operation.
        kwargs = kwargs or {}
        (self._reads.made if func is _LIFT_FRESH else self._reads.read)((args, kwargs))
        result = func(*args, **kwargs)
        self._reads.made(result)
        return result


class _WatchFunctions(TorchFunctionMode):
    """Watches functions that read numbers out of a tensor without an operation, such as ``tolist``."""

    def __init__(self, reads: ReadTensors) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this in the place of each function.
        kwargs = kwargs or {}
        if func == _DATA_GETTER or getattr(func, "__name__", "") in _LEAVES_TORCH:
            self._reads.read((args, kwargs))
        result = func(*args, **kwargs)
        self._reads.made(result)
        return result
