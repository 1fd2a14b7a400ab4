"""What stands for a tensor that is not stored: what torch and numpy can do with tensors is done on the dense one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import resolve_name

from attlas import stats
from attlas.engine.autodiff import graph
from attlas.errors import DtypeError, GradientError, StoredOnlyError, TooLargeError, kind
from attlas.foundation.compat import EinopsBackend, tree_leaves, tree_map_only

F = TypeVar("F", bound=Callable[..., Any])

# Methods that hang something on a tensor, or change it: a copy would keep that to itself.
_OF_GRADIENT = {"backward", "register_hook", "requires_grad_", "retain_grad"}
_OF_STORED = {"backward", "register_hook", "register_post_accumulate_grad_hook", "share_memory", "retain_grad", "set_"}


class LazyTensor:
    """An object that stands for a tensor which is not stored.

    Any method of `torch.Tensor` and any function of torch and numpy works on ``to_dense()``, which carries a gradient
    where one is recorded, and raises `TooLargeError` where the tensors of a call take more than 1 GiB together. Methods
    that would change the tensor in place are refused. A subclass says what it is (`shape`, `dtype`, `device`,
    `to_dense`), and in `lazily` what it can do without the dense tensor.

    Attributes
    ----------
    label : str
        What an error calls it: ``"A"``.
    """

    label = "A"
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def to_dense(self, limit: int | None = graph.DENSE_LIMIT) -> Tensor:
        """Return the whole tensor; refused above `limit` bytes."""
        raise NotImplementedError

    def lazily(self, function: str) -> Callable[..., Any] | None:
        """Return what computes a function of torch, by its name, without the dense tensor; None where nothing does.

        It takes the arguments of the function, and returns NotImplemented for those that need the dense tensor.
        """
        return None

    def cellwise(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a function of each cell gives, lazily; NotImplemented where it needs the dense tensor."""
        return NotImplemented

    def detach(self) -> Any:
        """Return the same numbers without a graph."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of axes."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of cells."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        return self._call("__getitem__", key)

    def __setitem__(self, key: Any, value: object) -> None:
        raise _stored_only(self, "__setitem__")

    # ------------------------------------------------------------------------------------------------ torch, numpy

    def numpy(self) -> np.ndarray:
        """Return the whole tensor as an array; refused above 1 GiB, and where a gradient would be lost."""
        return self.__array__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.requires_grad and torch.is_grad_enabled():
            A, rule = self.label, "an array carries no gradient, and one is being recorded."
            found, fix = f"{A}.requires_grad is True", f"{A}.detach().numpy(), or read under torch.no_grad()."
            raise GradientError(f"{A}.numpy()", rule, {A: f"shape {tuple(self.shape)}"}, found=found, fix=fix)
        return np.asarray(self.to_dense().cpu().numpy(), dtype=dtype)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        found = lazy_result(self.lazily(_OF_NUMPY.get(func.__name__, "")), args, kwargs)
        if found is not NotImplemented:
            return np.asarray(found.cpu())[()]
        args, kwargs = _replaced(f"numpy.{func.__name__}()", (args, kwargs), np.asarray)
        return func(*args, **kwargs)

    def __dlpack__(self, **options: Any) -> Any:
        return self._call("__dlpack__", **options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if found is None:
            hint = f"; attlas.stats.{name}(A) computes it" if name.islower() and name in stats.__all__ else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self)
        if name in _OF_GRADIENT and not self.dtype.is_floating_point:
            raise _no_gradient(self, name)
        if name.endswith("_") or name in _OF_STORED:
            raise _stored_only(self, name)
        if name in _OF_FORM or not callable(found):
            of_form = getattr(torch.empty(self.shape, dtype=self.dtype, device="meta"), name)
            return getattr(self.to_dense(), name) if isinstance(of_form, Tensor) else of_form
        return lambda *args, **kwargs: _dispatched(f"{self.label}.{name}()", found, name, (self, *args), kwargs)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the method of the dense tensor gives: a tensor, of some methods several or another type."""
        sign = _SIGNS.get(name.strip("_").removeprefix("r")) if name.startswith("__") else None
        where = f"{self.label} {sign} ..." if sign else f"{self.label}.{name}()"
        args, kwargs = written_out(where, ((self, *args), kwargs), _sum_fix(name, args))
        return getattr(torch.Tensor, name)(*args, **kwargs)  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        asked = next((part for part in tree_leaves(args[:1]) if isinstance(part, LazyTensor)), None)
        of_gradient = func in (torch.autograd.grad, torch.autograd.backward)
        if of_gradient and asked is not None and not asked.dtype.is_floating_point:
            raise _no_gradient(asked, func.__name__)
        where = (resolve_name(func) or "torch").replace("special_", "special.").replace("linalg_", "linalg.")
        return _dispatched(f"{where}()", func, getattr(func, "__name__", ""), args, kwargs or {})


def _dispatched(where: str, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of torch gives: without the dense tensor where that can be, else on it."""
    if func in _functions(name):
        for owner in (part for part in args if isinstance(part, LazyTensor)):
            found = lazy_result(owner.lazily(name), args, kwargs)
            if found is NotImplemented and name in _CELLWISE:
                found = owner.cellwise(func, args, kwargs)
            if found is not NotImplemented:
                return found
    if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], LazyTensor):  # as torch.relu_
        return getattr(args[0], name)(*args[1:], **kwargs)
    args, kwargs = written_out(where, (args, kwargs), _sum_fix(name, args[1:]))
    return func(*args, **kwargs)


def lazy_result(compute: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `compute` gives, or NotImplemented where it does not take these arguments."""
    if compute is None:
        return NotImplemented
    named = {_NAMES.get(name, name): value for name, value in kwargs.items() if value is not None}
    try:
        inspect.signature(compute).bind(*args, **named)
    except TypeError:
        return NotImplemented
    return compute(*args, **named)


# numpy's names of arguments, which tensors take as well.
_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def like_tensors(f: F) -> F:
    """Let a method take what the method of tensors takes: numpy's names, and what only the dense tensor knows."""

    @wraps(f)
    def run(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        found = lazy_result(f, (self, *args), kwargs)
        return self._call(f.__name__, *args, **kwargs) if found is NotImplemented else found

    return run  # type: ignore[return-value]  # the same method with more arguments


@cache
def _functions(name: str) -> tuple[Any, ...]:
    """Return the functions that are called so: a method of tensors, one of torch, one of its layers."""
    owners = (torch.Tensor, torch, torch.nn.functional)
    return tuple(getattr(owner, name) for owner in owners if hasattr(owner, name))


# Functions of numpy that are called otherwise than those of torch, or return one array where those return two.
_OF_NUMPY = {"sum": "sum", "mean": "mean", "max": "amax", "amax": "amax", "argmax": "argmax"}

# Methods whose answer needs no number of the tensor.
_OF_FORM = {"element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_signed", "ndimension",
            "nelement", "storage_offset", "stride"}  # fmt: skip

# What computes each cell of its result from the same cell of its arguments; operators without their underscores.
_CELLWISE = {"abs", "absolute", "add", "and", "clamp", "clamp_max", "clamp_min", "clip", "div", "divide", "double",
             "eq", "exp", "expm1", "float", "floordiv", "ge", "gt", "invert", "le", "log", "log10", "log1p", "log2",
             "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mod", "mul",
             "multiply", "nan_to_num", "ne", "neg", "negative", "or", "pow", "radd", "rand", "rdiv", "reciprocal",
             "relu", "rmul", "ror", "rpow", "rsqrt", "rsub", "rtruediv", "rxor", "sigmoid", "sign", "sqrt", "square",
             "sub", "subtract", "tanh", "true_divide", "truediv", "where", "xlogy", "xor"}  # fmt: skip

_SIGNS = {"add": "+", "and": "&", "eq": "==", "floordiv": "//", "ge": ">=", "gt": ">", "le": "<=", "lt": "<",
          "matmul": "@", "mod": "%", "mul": "*", "ne": "!=", "or": "|", "pow": "**", "sub": "-", "truediv": "/",
          "xor": "^"}  # fmt: skip
_UNARY = ("abs", "bool", "complex", "contains", "float", "index", "int", "invert", "neg", "pos")


def _operator(name: str) -> Callable[..., Any]:
    def run(self: LazyTensor, *args: Any) -> Any:
        found = NotImplemented
        if name.strip("_") in _CELLWISE and name != "__float__":
            found = self.cellwise(getattr(torch.Tensor, name), (self, *args), {})
        return self._call(name, *args) if found is NotImplemented else found

    run.__name__ = name
    return run


for _name in (*_SIGNS, *(f"r{name}" for name in _SIGNS), *_UNARY):
    if hasattr(torch.Tensor, f"__{_name}__"):
        setattr(LazyTensor, f"__{_name}__", _operator(f"__{_name}__"))
LazyTensor.__hash__ = object.__hash__  # type: ignore[method-assign]  # equality is that of cells, as of tensors


def _no_gradient(owner: LazyTensor, name: str) -> GradientError:
    rule = "truths and counts have no gradient."
    given = {owner.label: f"shape {tuple(owner.shape)} {str(owner.dtype).removeprefix('torch.')}"}
    fix = "a smooth function of the weights: (20 * (A - 0.1)).sigmoid() in place of A > 0.1."
    return GradientError(f"{owner.label}.{name}()", rule, given, found=f"{owner.label}.dtype = {owner.dtype}", fix=fix)


def _stored_only(owner: LazyTensor, name: str) -> StoredOnlyError:
    rule = "a lazy matrix holds no numbers that could be changed, or that a gradient could be kept for."
    given = {owner.label: f"shape {tuple(owner.shape)}"}
    fix = f"take a Tensor first, {owner.label}.to_dense() or a part, {owner.label}[..., :64, :]."
    return StoredOnlyError(f"{owner.label}.{name}()", rule, given, found=f"{owner.label}.{name}", fix=fix)


def _sum_fix(name: str, others: Iterable[object]) -> str:
    """Return the fix of a sum or difference of two matrices that would be too large; empty for all else."""
    sign = {"add": "+", "sub": "-", "subtract": "-"}.get(name.strip("_").removeprefix("r"))
    if sign is None or not any(isinstance(part, LazyTensor) for part in others):
        return ""
    return f"multiply each with the values: A1 @ v {sign} factor * (A2 @ v); or take parts, A[..., :64, :]."


def written_out(where: str, given: Any, fix: str = "") -> Any:
    """Replace each lazy tensor in a structure by its dense one, where all together are small."""
    return _replaced(where, given, lambda part: part.to_dense(), fix)


def _replaced(where: str, given: Any, write_out: Callable[[LazyTensor], Any], fix: str = "") -> Any:
    found = [part for part in tree_leaves(given) if isinstance(part, LazyTensor)]
    check_size(where, found, sum(part.numel() * part.dtype.itemsize for part in found), graph.DENSE_LIMIT, fix)
    return tree_map_only(LazyTensor, write_out, given)


def check_size(where: str, found: list[LazyTensor], size: int, limit: int | None, fix: str = "") -> None:
    """Raise a TooLargeError if what a call writes out takes more bytes than the limit; None for no limit."""
    if limit is None or size <= limit:
        return
    some, rule = found[0], "it needs whole matrices, and they would be larger than the limit."
    shape = f"shape {tuple(some.shape)} {str(some.dtype).removeprefix('torch.')}"
    given = {some.label: shape} | ({"matrices": len(found)} if len(found) > 1 else {})
    fix = fix or "take parts, A[..., :64, :], numbers, A.sum(-2), or A.to_dense(limit=None) to insist."
    bytes_found = f"{size:,} bytes, the limit is {limit:,}"
    raise TooLargeError(where, rule, given, found=bytes_found, fix=fix)


def check_are_statistics(where: str, given: Iterable[object]) -> None:
    """Raise a DtypeError unless each is a Statistic, an object and not its class."""
    for statistic in given:
        if not isinstance(statistic, stats.Statistic):
            name = statistic.__name__ if isinstance(statistic, type) else repr(statistic)
            fix = f"{name}()" if isinstance(statistic, type) else "stats.Entropy(), stats.TopK(8)"
            rule = "every argument must be a Statistic, an object and not its class."
            raise DtypeError(where, rule, {"statistic": name}, found=kind(statistic), fix=fix)


if EinopsBackend is not None:

    class _EinopsBackend(EinopsBackend):
        """What einops does with a lazy matrix; einops finds the subclasses of its backends by itself."""

        framework_name = "attlas"

        def is_appropriate_type(self, tensor: object) -> bool:
            return isinstance(tensor, LazyTensor)
