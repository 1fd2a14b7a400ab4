"""What stands for a tensor that is not stored: what torch and numpy can do with tensors is done on the dense one."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.overrides import resolve_name

from attlas import stats
from attlas.engine.autodiff import graph
from attlas.errors import (
    AttlasError,
    BackendError,
    DtypeError,
    GradientError,
    StoredOnlyError,
    TooLargeError,
    kind,
    public,
)
from attlas.foundation.compat import EinopsBackend, tree_leaves, tree_map_only
from attlas.foundation.indexing import Axes, Where
from attlas.matrix.weights import Weights


class Matrix(Protocol):
    """What functions and views of a matrix know of it: it is an `AttentionMatrix`, which imports them."""

    weights: Weights
    axes: Axes
    label: str

    @property
    def shape(self) -> torch.Size: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def requires_grad(self) -> bool: ...
    def __matmul__(self, v: Any) -> Tensor: ...
    def collect(self, *statistics: Any) -> tuple[Any, ...]: ...
    def detach(self) -> Self: ...
    def full_precision(self) -> Self: ...
    def numel(self) -> int: ...
    def on_dense(self, name: str, *args: Any, **kwargs: Any) -> Tensor: ...
    def read(self, where: Where, *, logits: bool = False) -> Tensor: ...
    def selected(self, where: Where) -> Self: ...
    def to_dense(self, limit: int | None = graph.DENSE_LIMIT) -> Tensor: ...
    def transposed_product(self, x: Tensor) -> Tensor: ...
    def written_out(self, limit: int | None, *, logits: bool) -> Tensor: ...


F = TypeVar("F", bound=Callable[..., Any])

# Computes a function of torch from the function itself, its arguments and its keywords, without the dense tensor;
# NotImplemented where these arguments need it.
Operation: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# What is computed without the dense tensor, by the name of the function of torch, or of numpy: "numpy.sum".
# `operation` and `lazy_method` fill it.
OPERATIONS: dict[str, Operation] = {}
# The functions of torch that have each of these names.
FUNCTIONS: dict[str, tuple[Any, ...]] = {}


def _functions_called(name: str) -> tuple[Any, ...]:
    """Return the functions that are called so: a method of tensors, one of torch, one of its layers, an operator.

    torch.export hands on ``A @ v`` as `operator.matmul`, with its sides in order.
    """
    owners = (torch.Tensor, torch, torch.nn.functional, operator)
    return tuple(getattr(owner, name) for owner in owners if hasattr(owner, name))


def operation(*names: str) -> Callable[[Operation], Operation]:
    """Enter a function into the table of what is computed without the dense tensor, under names of torch."""

    def enter(compute: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, compute))
        FUNCTIONS.update({name: _functions_called(name) for name in names})
        return compute

    return enter


class _AcceptedArguments(NamedTuple):
    """Which arguments a function takes: how many by position, and which by name."""

    most: int
    names: frozenset[str]


def _accepted_arguments(f: Callable[..., Any]) -> _AcceptedArguments:
    """Return which arguments a function takes."""
    kinds = [parameter.kind for parameter in inspect.signature(f).parameters.values()]
    any_number = inspect.Parameter.VAR_POSITIONAL in kinds
    by_position = [kind for kind in kinds if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return _AcceptedArguments(
        sys.maxsize if any_number else len(by_position), frozenset(inspect.signature(f).parameters)
    )


def with_arguments(compute: Callable[..., Any]) -> Operation:
    """Return the operation of a function that takes the arguments of torch's function, or numpy's names of them.

    It gives NotImplemented for arguments that the function does not take.
    """
    taken = _accepted_arguments(compute)

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `compute` if it takes these arguments."""
        named = {_TORCH_ARGUMENT_NAMES.get(name, name): value for name, value in kwargs.items() if value is not None}
        if len(args) > taken.most or any(name not in taken.names for name in named):
            return NotImplemented
        return compute(*args, **named)

    return run


@overload
def lazy_method(f: F) -> F: ...
@overload
def lazy_method(*, numpy: tuple[str, ...]) -> Callable[[F], F]: ...
def lazy_method(f: Any = None, *, numpy: tuple[str, ...] = ()) -> Any:
    """Let a method of a lazy tensor also compute the function of torch that is called so, and those of numpy.

    It then takes what the method of tensors takes: numpy's names, too. Where it does not take the arguments, or returns
    NotImplemented, the function is computed from the dense tensor.
    """
    if f is None:
        return lambda method: lazy_method(_enter_numpy_names(method, numpy))
    name, compute = f.__name__, with_arguments(f)

    @wraps(f)
    def run(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        """Call the method; where it returns NotImplemented, call that of the dense tensor."""
        found = compute(None, (self, *args), kwargs)
        return self.on_dense(name, *args, **kwargs) if found is NotImplemented else found

    run.without_dense = compute  # type: ignore[attr-defined]  # for `_call_own_method`
    operation(name)(_call_own_method(name))
    return run


def _enter_numpy_names(method: F, names: tuple[str, ...]) -> F:
    """Enter a method under names of numpy, and return it."""
    OPERATIONS.update({f"numpy.{name}": _call_own_method(method.__name__) for name in names})
    return method


def _call_own_method(name: str) -> Operation:
    """Return the operation of the method that a lazy tensor has; NotImplemented for one that has none."""

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute by the method, if it is a lazy one."""
        method = getattr(type(args[0]), name, None) if args and isinstance(args[0], LazyTensor) else None
        compute = getattr(method, "without_dense", None)
        return NotImplemented if compute is None else compute(function, args, kwargs)

    return run


# Methods that hang something on a tensor, or change it: a copy would keep that to itself.
_OF_GRADIENT = {"backward", "register_hook", "requires_grad_", "retain_grad"}
_OF_STORED = {"backward", "register_hook", "register_post_accumulate_grad_hook", "share_memory", "retain_grad", "set_"}


class LazyTensor:
    """An object that stands for a tensor which is not stored.

    Any method of `torch.Tensor` and any function of torch and numpy works on ``to_dense()``, which carries a gradient
    where one is recorded, and raises `TooLargeError` where the tensors of a call take more than 1 GiB together. Methods
    that would change the tensor in place are refused. A subclass says what it is (`shape`, `dtype`, `device`,
    `to_dense`). What it does without the dense tensor are methods with `lazy_method`, and functions with `operation`.

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

    @property
    def source(self) -> Any:
        """The matrix whose weights the cells of this tensor are, or are functions of; None where there is none."""
        return None

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

    @lazy_method
    def numel(self) -> int:
        """Return the number of cells."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        return self.on_dense("__getitem__", key)

    def __setitem__(self, key: Any, value: object) -> None:
        raise _stored_only(self, "__setitem__")

    # ------------------------------------------------------------------------------------------------ torch, numpy

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the whole tensor as an array; refused above 1 GiB, and, without `force`, where a gradient is lost."""
        return (self.detach() if force else self).__array__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # numpy calls this to get an array: the matrix is written out.
        if self.requires_grad and torch.is_grad_enabled():
            A, rule = self.label, "an array carries no gradient, and one is being recorded."
            found, fix = f"{A}.requires_grad is True", f"{A}.detach().numpy(), or read under torch.no_grad()."
            raise GradientError(rule, found, fix, arguments={A: f"shape {tuple(self.shape)}"}, where=f"{A}.numpy()")
        return np.asarray(self.to_dense().cpu().numpy(), dtype=dtype)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # numpy calls this: some of its functions have a lazy form, for others the matrix is written out.
        compute = OPERATIONS.get(f"numpy.{func.__name__}")
        found = NotImplemented if compute is None else compute(func, args, kwargs)
        if found is not NotImplemented:
            return np.asarray(found.cpu())[()]
        with public(f"numpy.{func.__name__}()"):
            args, kwargs = _with_dense_arguments((args, kwargs), np.asarray)
        return func(*args, **kwargs)

    def __dlpack__(self, **options: Any) -> Any:
        return self.on_dense("__dlpack__", **options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def __getattr__(self, name: str) -> Any:
        # A method of torch.Tensor that the class does not define: refused where it changes the tensor, else dispatched.
        found = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if found is None:
            hint = f"; attlas.stats.{name}(A) computes it" if name.islower() and name in stats.__all__ else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self)
        if name in _OF_GRADIENT and not self.dtype.is_floating_point:
            raise _no_gradient(self, name)
        if name.endswith("_") or name in _OF_STORED:
            raise _stored_only(self, name)
        if not callable(found):
            of_form = getattr(self._meta_stand_in(), name)
            return getattr(self.to_dense(), name) if isinstance(of_form, Tensor) else of_form
        asked = public(f"{self.label}.{name}()")
        return asked(lambda *args, **kwargs: _result_of_function(found, name, (self, *args), kwargs))

    def _meta_stand_in(self) -> Tensor:
        """Return a tensor of the same form without numbers."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def on_dense(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the method of the dense tensor gives: a tensor, of some methods several or another type."""
        sign = _OPERATOR_SIGNS.get(name.strip("_").removeprefix("r")) if name.startswith("__") else None
        with public(f"{self.label} {sign} ..." if sign else f"{self.label}.{name}()"):
            args, kwargs = written_out(((self, *args), kwargs), _sum_fix(name, args))
        return getattr(torch.Tensor, name)(*args, **kwargs)  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch calls this for each of its functions: computed lazily where the table has it, else on the dense tensor.
        if func in (torch.autograd.grad, torch.autograd.backward):
            asked = next((part for part in tree_leaves(args[:1]) if isinstance(part, LazyTensor)), None)
            if asked is not None and not asked.dtype.is_floating_point:
                raise _no_gradient(asked, func.__name__)
        try:
            return _result_of_function(func, str(getattr(func, "__name__", "")), args, kwargs or {})
        except AttlasError as error:
            if error.where or torch.compiler.is_dynamo_compiling():
                raise
            # The name is looked for where it is needed alone: that takes long.
            where = (resolve_name(func) or "torch").replace("special_", "special.").replace("linalg_", "linalg.")
            with public(f"{where}()"):
                raise


def _result_of_function(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of torch gives: without the dense tensor where that can be, else on it."""
    compute = OPERATIONS.get(name)
    if compute is not None and func in FUNCTIONS[name]:
        found = compute(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], LazyTensor):  # as torch.relu_
        return getattr(args[0], name)(*args[1:], **kwargs)
    args, kwargs = written_out((args, kwargs), _sum_fix(name, args[1:]))
    return func(*args, **kwargs)


# numpy's names of arguments, which tensors take as well.
_TORCH_ARGUMENT_NAMES = {"axis": "dim", "keepdims": "keepdim"}


@operation("element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_signed", "ndimension",
           "nelement", "storage_offset", "stride")  # fmt: skip
def _call_on_meta(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute what depends on shape and dtype alone, such as `stride`, on a meta tensor of the same form."""
    if not args or not isinstance(args[0], LazyTensor):
        return NotImplemented
    return getattr(args[0]._meta_stand_in(), function.__name__)(*args[1:], **kwargs)


_OPERATOR_SIGNS = {"add": "+", "and": "&", "eq": "==", "floordiv": "//", "ge": ">=", "gt": ">", "le": "<=", "lt": "<",
          "matmul": "@", "mod": "%", "mul": "*", "ne": "!=", "or": "|", "pow": "**", "sub": "-", "truediv": "/",
          "xor": "^"}  # fmt: skip
# Operators whose names mean something else among the functions: a number, and what asks for the operator in its turn.
_NOT_CELLWISE = {"float", "matmul"}
_UNARY_OPERATORS = ("abs", "bool", "complex", "contains", "float", "index", "int", "invert", "neg", "pos")


def _operator_method(name: str) -> Callable[..., Any]:
    """Return the method of an operator, ``__add__``: lazy where the table has it, else that of the dense tensor."""
    plain = name.strip("_")

    def run(self: LazyTensor, *args: Any) -> Any:
        """Compute the operator from the table, else on the dense tensor."""
        compute = None if plain in _NOT_CELLWISE else OPERATIONS.get(plain)
        found = NotImplemented if compute is None else compute(getattr(torch.Tensor, name), (self, *args), {})
        return self.on_dense(name, *args) if found is NotImplemented else found

    run.__name__ = name
    return run


for _name in (*_OPERATOR_SIGNS, *(f"r{name}" for name in _OPERATOR_SIGNS), *_UNARY_OPERATORS):
    if hasattr(torch.Tensor, f"__{_name}__"):
        setattr(LazyTensor, f"__{_name}__", _operator_method(f"__{_name}__"))
LazyTensor.__hash__ = object.__hash__  # type: ignore[method-assign]  # equality is that of cells, as of tensors


def _no_gradient(owner: LazyTensor, name: str) -> GradientError:
    """Return the error of a gradient that is asked of truths or counts."""
    rule = "truths and counts have no gradient."
    given = {owner.label: f"shape {tuple(owner.shape)} {str(owner.dtype).removeprefix('torch.')}"}
    fix = "a smooth function of the weights: (20 * (A - 0.1)).sigmoid() in place of A > 0.1."
    return GradientError(
        rule, f"{owner.label}.dtype = {owner.dtype}", fix, arguments=given, where=f"{owner.label}.{name}()"
    )


def _stored_only(owner: LazyTensor, name: str) -> StoredOnlyError:
    """Return the error of a method that needs a stored tensor."""
    rule = "a lazy matrix holds no numbers that could be changed, or that a gradient could be kept for."
    given = {owner.label: f"shape {tuple(owner.shape)}"}
    fix = f"take a Tensor first, {owner.label}.to_dense() or a part, {owner.label}[..., :64, :]."
    return StoredOnlyError(rule, f"{owner.label}.{name}", fix, arguments=given, where=f"{owner.label}.{name}()")


def _sum_fix(name: str, others: Iterable[object]) -> str:
    """Return the fix of a sum or difference of two matrices that would be too large; empty for all else."""
    sign = {"add": "+", "sub": "-", "subtract": "-"}.get(name.strip("_").removeprefix("r"))
    if sign is None or not any(isinstance(part, LazyTensor) for part in others):
        return ""
    return f"multiply each with the values: A1 @ v {sign} factor * (A2 @ v); or take parts, A[..., :64, :]."


def written_out(given: Any, fix: str = "") -> Any:
    """Replace each lazy tensor in a structure by its dense one, where all together are small."""
    return _with_dense_arguments(given, lambda part: part.to_dense(), fix)


def _with_dense_arguments(given: Any, write_out: Callable[[LazyTensor], Any], fix: str = "") -> Any:
    """Return nested arguments with `write_out` of each lazy tensor in its place.

    Refused where together they are too large.
    """
    found = [part for part in tree_leaves(given) if isinstance(part, LazyTensor)]
    check_size(found, sum(part.numel() * part.dtype.itemsize for part in found), graph.DENSE_LIMIT, fix)
    return tree_map_only(LazyTensor, write_out, given)


def check_size(found: Sequence[LazyTensor | Matrix], size: int, limit: int | None, fix: str = "") -> None:
    """Raise a TooLargeError if what a call writes out takes more bytes than the limit; None for no limit."""
    if limit is None or size <= limit:
        return
    some, rule = found[0], "it needs whole matrices, and they would be larger than the limit."
    shape = f"shape {tuple(some.shape)} {str(some.dtype).removeprefix('torch.')}"
    given = {some.label: shape} | ({"matrices": len(found)} if len(found) > 1 else {})
    fix = fix or "take parts, A[..., :64, :], numbers, A.sum(-2), or A.to_dense(limit=None) to insist."
    # torch.compile can make no MemoryError; its own error has the texts of this one.
    error = BackendError if torch.compiler.is_dynamo_compiling() else TooLargeError
    raise error(rule, f"{size:,} bytes, the limit is {limit:,}", fix, arguments=given)


def check_are_statistics(given: Iterable[object]) -> None:
    """Raise a DtypeError unless each is a Statistic, an object and not its class."""
    for statistic in given:
        if not isinstance(statistic, stats.Statistic):
            name = statistic.__name__ if isinstance(statistic, type) else repr(statistic)
            fix = f"{name}()" if isinstance(statistic, type) else "stats.Entropy(), stats.TopK(8)"
            rule = "every argument must be a Statistic, an object and not its class."
            raise DtypeError(rule, kind(statistic), fix, statistic=name, where="collect()")


if EinopsBackend is not None:

    class _EinopsBackend(EinopsBackend):
        """What einops does with a lazy matrix; einops finds the subclasses of its backends by itself."""

        framework_name = "attlas"

        def is_appropriate_type(self, tensor: object) -> bool:
            return isinstance(tensor, LazyTensor)
