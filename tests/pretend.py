"""A device that is not there: CPU tensors say that they are on a GPU, and the waits of the host are counted.

``with PretendDevice("cuda") as device: A = attlas.attend(device.put(q), device.put(k))`` lets every tensor that was put
there, or was made of one that was, say ``device=cuda:0``, so that code takes its branches for a GPU. Noted, with the
line of the package:

- `waits`: where torch would stop until the device has done its work. It is asked for a number (``item``, ``bool``,
  ``tolist``, ``nonzero``, ``torch.equal``, an index by bool), or copies between host and device without
  ``non_blocking``.
- `mixed`: where an operation gets tensors of both, which a real device refuses.
- `float64`: where a device without float64, ``"mps"``, would have to make one.

Waits inside one operation of torch cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

import attlas

PACKAGE = str(Path(attlas.__file__).parent) + os.sep

T = TypeVar("T", Tensor, nn.Module)

#: Values that hold no others.
_SINGLE = (Tensor, int, float, str, slice, torch.dtype, torch.device, type(None), type(...))

#: Functions whose result is a number on the host, or a tensor whose size depends on numbers.
READS = {
    *("item", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "tolist", "numpy"),
    *("__array__", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select", "unique"),
    *("unique_consecutive", "bincount", "histc", "histogram"),
}
#: Functions that copy numbers of the host into a new tensor.
MAKES = {"tensor", "as_tensor", "new_tensor", "asarray", "from_numpy"}
#: Functions that read or write a place, by an index that may be a tensor.
INDEXES = {"__getitem__", "__setitem__", "index", "index_put", "index_put_", "index_select", "gather", "take_along_dim"}
#: Functions that may get tensors of both kinds.
BOTH = {*INDEXES, "to", "copy_", "type_as", "set_", "__set__", "__get__", "put", "data_ptr", "is_set_to"}


class PretendDevice(TorchFunctionMode):
    """Lets CPU tensors pretend that they are on a device; see the module.

    Parameters
    ----------
    kind : str
        ``"cuda"`` or ``"mps"``.

    Attributes
    ----------
    waits, mixed, float64 : Counter of (str, str)
        What was done, and the line of the package that did it.
    calls : int
        Calls of torch with a tensor of the device.
    """

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__()
        self.device = torch.device(kind, 0)
        self.kind = kind
        self._storages: dict[int, Any] = {}  # held, so that their addresses are not given to other tensors
        self._others: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # empty, or lazy
        self._of_host: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._backward = False
        self.forget()

    def forget(self) -> None:
        """Set all counts to 0."""
        self.waits: Counter[tuple[str, str]] = Counter()
        self.mixed: Counter[tuple[str, str]] = Counter()
        self.float64: Counter[tuple[str, str]] = Counter()
        self.calls = 0

    def put(self, t: T) -> T:
        """Move a tensor, or the tensors of a module, to the device; no numbers are copied."""
        if isinstance(t, nn.Module):
            for part in (*t.parameters(), *t.buffers()):
                self.put(part)
            return t
        with torch._C.DisableTorchFunction():
            inner = _unwrapped(t)
            if inner is not t:  # what a transform returns has the storage of the tensor inside
                self._others[id(t)] = t
                self.put(inner)
            elif _is_plain(t) and t.untyped_storage().nbytes():
                storage = t.untyped_storage()
                self._storages[storage.data_ptr()] = storage
            else:
                self._others[id(t)] = t
        return t

    def holds(self, t: object) -> bool:
        """Return whether a tensor is on the device."""
        if not isinstance(t, Tensor):
            return False
        if self._others and self._others.get(id(t)) is t:
            return True
        with torch._C.DisableTorchFunction():
            t = _unwrapped(t)
            return _is_plain(t) and t.untyped_storage().data_ptr() in self._storages

    def report(self) -> str:
        """Return what was noted, one line for each place."""
        kinds = (("waits", self.waits), ("mixed", self.mixed), ("float64", self.float64))
        lines = [f"{sum(counts.values())} {name}" for name, counts in kinds if counts]
        lines += [
            f"  {count:5d}  {what:20s} {where}"
            for _, counts in kinds
            for (what, where), count in counts.most_common()
        ]  # fmt: skip
        return "\n".join([*lines, f"{self.calls} calls"])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "__get__":
            return self._attribute(func, args)
        if func is torch.device:
            return self.device if args and self._is_own(args[0]) else func(*args, **kwargs)
        if name == "_parse_to":  # what the arguments of `to` say
            return func(*args, **kwargs)
        if name in ("grad", "backward"):  # functions of Python, whose inner operations are to be seen too
            on = any(map(self.holds, _leaves((args, kwargs))))
            with self._in_backward():
                out = func(*args, **kwargs)
            for t in _leaves(out) if on else ():
                if isinstance(t, Tensor):
                    self._arrived(name, t)
            return out
        leaves = _leaves((args, kwargs))
        inputs = [t for t in leaves if isinstance(t, Tensor)]
        for t in inputs if self._backward else ():
            if self._of_host.get(id(t)) is not t:  # a gradient, which autograd made without a call from Python
                self.put(t)
        here = [t for t in inputs if self.holds(t)]
        self.calls += bool(here)
        target = next((str(d).partition(":")[0] for d in leaves if _names_device(d)), None)
        if name in ("to", "type_as") and len(inputs) > 1:
            target = self.kind if self.holds(inputs[1]) else "cpu"
            if name == "to":
                args = (args[0], inputs[1].dtype, *args[2:])
        if name == "cpu":
            target = "cpu"
        on = bool(here) if target is None else target == self.kind
        self._note(name, args, kwargs, inputs, here, target)
        if target == self.kind:
            args, kwargs = _pytree.tree_map(lambda d: torch.device("cpu") if self._is_own(d) else d, (args, kwargs))
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and name in ("to", "cpu", "type_as") and inputs and on != self.holds(inputs[0]):
            with torch._C.DisableTorchFunction():  # a real device would make a copy
                out = out.clone() if out.data_ptr() == inputs[0].data_ptr() else out
        for t in _leaves(out):
            if isinstance(t, Tensor) and not any(t is given for given in inputs):
                if on:
                    self._arrived(name, t)
                else:
                    self._of_host[id(t)] = t
        return out

    def _attribute(self, func: Any, args: Any) -> Any:
        """Return an attribute of a tensor."""
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        here = self.holds(args[0])
        if here and name in ("device", "is_cuda", "is_mps", "is_cpu"):
            return self.device if name == "device" else name == f"is_{self.kind}"
        out = func(*args)
        if here and isinstance(out, Tensor):
            self.put(out)
        return out

    def _arrived(self, name: str, t: Tensor) -> None:
        """Note a result of an operation as a tensor of the device."""
        if self.kind == "mps" and t.dtype in (torch.float64, torch.complex128):
            self.float64[name, _place()] += 1
        self.put(t)

    def _note(self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], here: list[Tensor], target: Any) -> None:
        """Note what an operation waits for, and tensors of two devices."""
        if not here and target != self.kind:
            return
        found = None
        blocking = not kwargs.get("non_blocking", False)
        host = [t for t in inputs if t.ndim and not any(t is other for other in here) and not _has_no_device(t)]
        if name in MAKES and target == self.kind and not here:
            found = "copy to the device"
        elif name in ("to", "type_as", "cpu") and inputs:
            own = bool(here) and inputs[0] is here[0]
            goes = own if target is None else target == self.kind
            if own != goes and blocking and inputs[0].numel():
                found = "copy to the device" if goes else "copy to the host"
        elif name == "copy_" and len(inputs) == 2 and len(here) == 1 and blocking and inputs[1].ndim:
            found = "copy to the device" if inputs[0] is here[0] else "copy to the host"
        elif here and name in READS:
            found = name
        elif here and (name == "where" and len(args) + len(kwargs) == 1):
            found = "nonzero"
        elif here and name == "repeat_interleave" and len(inputs) > 1 and kwargs.get("output_size") is None:
            found = name
        elif here and name in INDEXES and self.holds(inputs[0]):
            found = _waiting_index(name, args, inputs[1:], host)
        if found is not None:
            self.waits[found, _place()] += 1
        if here and host and name not in BOTH:
            self.mixed[name, _place()] += 1

    def _is_own(self, d: object) -> bool:
        """Return whether an argument names this device."""
        return _names_device(d) and str(d).partition(":")[0] == self.kind

    @contextlib.contextmanager
    def _in_backward(self) -> Iterator[None]:
        """See the operations that autograd runs, too."""
        run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        @functools.wraps(run)
        def seen(*args: Any, **kwargs: Any) -> Any:
            before, self._backward = self._backward, True
            try:
                with self:
                    return run(*args, **kwargs)
            finally:
                self._backward = before

        users: list[Any] = [torch.autograd, torch.autograd.graph]
        users = [module for module in users if hasattr(module, "_engine_run_backward")]
        for module in users:
            module._engine_run_backward = seen
        try:
            yield
        finally:
            for module in users:
                module._engine_run_backward = run


def _unwrapped(t: Tensor) -> Tensor:
    """Return the tensor inside of those that the transforms of torch.func wrap around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def _leaves(value: Any) -> list[Any]:
    """Return what tuples, lists and dictionaries hold, at any depth; several times as fast as `tree_leaves`."""
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return [value] if isinstance(value, _SINGLE) else _pytree.tree_leaves(value)
    found: list[Any] = []
    for part in value:
        if isinstance(part, _SINGLE):
            found.append(part)
        else:
            found += _leaves(part)
    return found


def _is_plain(t: Tensor) -> bool:
    """Return whether a tensor has numbers in a storage of its own."""
    if type(t) is not Tensor and type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return t.layout is torch.strided and t.is_cpu and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def _has_no_device(t: Tensor) -> bool:
    """Return whether a tensor has no numbers: those of the meta device."""
    with torch._C.DisableTorchFunction():
        return t.device.type != "cpu" or not t.numel()


def _names_device(d: object) -> bool:
    """Return whether an argument names a device."""
    return isinstance(d, (torch.device, str)) and str(d).partition(":")[0] in ("cuda", "mps", "cpu", "meta")


def _waiting_index(name: str, args: Any, index: list[Tensor], host: list[Tensor]) -> str | None:
    """Return what an index by a tensor waits for; None where it does not."""
    if name in ("gather", "take_along_dim"):
        return None
    value = args[2] if name == "__setitem__" and len(args) > 2 else None
    places = [t for t in index if t is not value]
    filled = name == "__setitem__" and not (isinstance(value, Tensor) and value.ndim)
    if any(t.dtype in (torch.bool, torch.uint8) for t in places):
        return None if filled else "index by bool"
    several = isinstance(args[1], tuple) or name in ("index", "index_put", "index_put_")
    parts = args[1] if several else (args[1],)
    if any(t.ndim and any(t is other for other in host) for t in places) or any(isinstance(p, list) for p in parts):
        return "copy of an index"
    return None


def _place() -> str:
    """Return file and line of the innermost frame that is code of the package."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return "outside" if frame is None else f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
