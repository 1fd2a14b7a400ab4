"""What lazy logits and weights share: they stand for tensors, know some operations, and are computed for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attlas.foundation.arguments import arguments_of, with_arguments
from attlas.foundation.autocast import without_autocast
from attlas.foundation.compat import parse_to
from attlas.matrix.handwritten.scope import current, left
from attlas.matrix.protocol import LazyTensor

# Operators by their methods: `__radd__` has its sides exchanged, `__iadd__` changes its left side.
_BINARY_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHER_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "bool", "float", "int", "index",
                    "contains", "complex")  # fmt: skip
_PLAIN_NAMES = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
                "clip": "clamp", "negative": "neg"}  # fmt: skip
_VIEW_FUNCTIONS = {"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand",
                   "expand_as"}  # fmt: skip
_COPY_FUNCTIONS = {"contiguous", "clone"}
_CAST_FUNCTIONS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_NEW_TENSOR_METHODS = {"new_zeros", "new_ones", "new_full", "new_tensor", "new_empty"}
_LIKE_FUNCTIONS = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}


class Call(NamedTuple):
    """One call of a function of torch.

    Parameters
    ----------
    name : str
        Its name, without underscores and sides: "add" for ``Tensor.__iadd__``.
    args, kwargs : tuple and dict
        Its arguments; those of an operator with its sides exchanged are put in order.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Uncomputed(LazyTensor):
    """A tensor that code may go on with as if it were computed.

    What a subclass knows is in `known`, by the names of torch. Everything else is computed from all numbers, once, and
    counted; from then on the tensor is as any other, and so are its views.

    Parameters
    ----------
    state : Any
        What all views share, with `dtype` and the numbers as `computed` where there are some.
    shape : tuple of int
        The shape that the model sees.
    device : torch.device
        Where the numbers would be.
    """

    #: From a call to what it gives; NotImplemented where these arguments need the numbers.
    known: ClassVar[dict[str, Callable[[Any, Call], Any]]] = {}
    #: What an operation is said to be applied to.
    what = ""

    def __init__(self, state: Any, shape: tuple[int, ...], device: torch.device) -> None:
        self.state = state
        self.shape = torch.Size(shape)
        self.device = device

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # computed here, stored elsewhere
        """Dtype that the model sees."""
        return self.state.dtype  # type: ignore[no-any-return]

    @property
    def computed(self) -> Tensor | None:
        """The numbers, where they were computed."""
        found: Tensor | None = self.state.computed
        return found if found is None or found.shape == self.shape else found.view(self.shape)

    def become(self, other: Any) -> None:
        """Turn into another lazy tensor of the same shape in place, as a change in place does; all views follow."""
        vars(self.state).update(vars(other.state))

    # ------------------------------------------------------------------------------------------------ for subclasses

    def compute(self) -> Tensor:
        """Compute the numbers, with the graph that they would have, and keep them."""
        raise NotImplementedError

    def viewed(self, shape: tuple[int, ...]) -> Uncomputed:
        """Return a view with another shape."""
        raise NotImplementedError

    def copied(self) -> Uncomputed:
        """Return a copy, which later changes in place leave as it is."""
        raise NotImplementedError

    def cast(self, dtype: torch.dtype) -> Uncomputed:
        """Return the same numbers in another dtype."""
        raise NotImplementedError

    def returned(self) -> Any:
        """Return what stands for it in the output of a model."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------- calls

    def to_dense(self, limit: int | None = None) -> Tensor:
        """Return the numbers as a Tensor; there is no limit, as there is none without attlas."""
        found = self.computed
        if found is None:
            with left():
                found = without_autocast(self.compute)()
        return found

    def written_out(self, operation: str) -> Tensor:
        """Return the numbers for an operation that needs them, and count it."""
        if self.computed is None and (scope := current()) is not None and self.is_counted:
            scope.count(f"{operation} of {self.what}")
        return self.to_dense()

    @property
    def is_counted(self) -> bool:
        """Whether it is counted where this is computed."""
        return True

    def detach(self) -> Any:
        """Return the numbers without a graph."""
        return self.written_out("detach").detach()

    @property
    def requires_grad(self) -> bool:
        """Whether a graph is recorded."""
        raise NotImplementedError

    def on_dense(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return called(getattr(Tensor, name), name, (self, *args), kwargs)

    def __setitem__(self, key: Any, value: object) -> None:
        called(Tensor.__setitem__, "__setitem__", (self, key, value), {})

    def __getattr__(self, name: str) -> Any:
        # A method of Tensor runs through `called`; another attribute is that of a tensor of this dtype, or of the
        # numbers.
        found = None if name.startswith("_") else getattr(Tensor, name, None)
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        if callable(found):
            return lambda *args, **kwargs: called(found, name, (self, *args), kwargs)
        if name.startswith("is_") or name == "layout":
            return getattr(torch.empty(0, dtype=self.dtype, device=self.device), name)
        return getattr(self.written_out(name), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return called(func, str(getattr(func, "__name__", func)), args, kwargs or {})


def called(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of torch gives: lazily where that is known, else from all numbers."""
    # The class of the first lazy tensor without numbers says what can be done lazily.
    owner = next((part for part in arguments_of(Uncomputed, args, kwargs) if part.computed is None), None)
    if owner is not None:
        plain, in_place = _plain_name(name)
        call = Call(plain, args, kwargs)
        found = _result_without_numbers(owner, call)
        if found is not NotImplemented:
            if not in_place:
                return found
            if isinstance(found, type(owner)) and args[0] is owner and found.shape == owner.shape:
                owner.become(found if found.dtype is owner.dtype else found.cast(owner.dtype))
                return owner
    operation = name.strip("_")
    args, kwargs = with_arguments(Uncomputed, lambda part: part.written_out(operation), args, kwargs)
    return function(*args, **kwargs)


def _result_without_numbers(owner: Uncomputed, call: Call) -> Any:
    """Return what a lazy tensor gives without its numbers; NotImplemented where it needs them."""
    name = call.name
    if "out" in call.kwargs:
        return NotImplemented
    if name in type(owner).known:
        return type(owner).known[name](owner, call)
    if not call.args or call.args[0] is not owner:
        return _call_by_form(owner, call)
    if name in _VIEW_FUNCTIONS:
        return _view_of(owner, call)
    if name in _COPY_FUNCTIONS:
        return owner if name == "contiguous" else owner.copied()
    if name in _CAST_FUNCTIONS or name in ("to", "type", "type_as"):
        dtype = _dtype_of_cast(owner, call)
        return NotImplemented if dtype is None else owner if dtype is owner.dtype else owner.cast(dtype)
    if name in _NEW_TENSOR_METHODS:
        return getattr(torch.empty(0, dtype=owner.dtype, device=owner.device), name)(*call.args[1:], **call.kwargs)
    if name in _LIKE_FUNCTIONS:
        form = torch.empty((), dtype=owner.dtype, device=owner.device).expand(owner.shape)
        return getattr(torch, name)(form, *call.args[1:], **call.kwargs)
    return NotImplemented


def _call_by_form(owner: Uncomputed, call: Call) -> Any:
    """Compute ``t.view_as(lazy)`` and the like, for which only shape and dtype of the lazy tensor count."""
    t, *rest = call.args
    if not isinstance(t, Tensor) or len(rest) != 1 or rest[0] is not owner or call.kwargs:
        return NotImplemented
    if call.name in ("expand_as", "view_as", "reshape_as"):
        return getattr(t, call.name.removesuffix("_as"))(owner.shape)
    return t.to(owner.device, owner.dtype) if call.name in ("type_as", "to") else NotImplemented


def _plain_name(name: str) -> tuple[str, bool]:
    """Return the name of an operation without underscores, and whether it changes its first argument."""
    if name.startswith("__"):
        plain = name.strip("_")
        in_place = plain.startswith("i") and plain[1:] in _BINARY_OPERATORS
        if plain[:1] in ("i", "r") and plain[1:] in _BINARY_OPERATORS:
            # "rsub" is a function of its own; sums and products have no sides.
            plain = plain if plain in ("rsub", "rtruediv", "rmatmul", "rpow") else plain[1:]
        return _PLAIN_NAMES.get(plain, plain), in_place
    return _PLAIN_NAMES.get(name.rstrip("_"), name.strip("_")), name.endswith("_")


def _view_of(owner: Uncomputed, call: Call) -> Any:
    """Return the lazy tensor with another shape, which torch computes on a meta tensor."""
    if any(isinstance(part, torch.dtype) for part in call.args[1:]) or "dtype" in call.kwargs:
        return NotImplemented
    rest = call.args[1:]
    if call.name in ("view_as", "reshape_as", "expand_as"):
        shape: tuple[int, ...] = tuple(rest[0].shape)
    else:
        form = torch.empty(owner.shape, device="meta")
        shape = tuple(getattr(form, call.name)(*rest, **call.kwargs).shape)
    if torch.Size(shape).numel() != owner.shape.numel():
        return NotImplemented
    return owner if shape == tuple(owner.shape) else owner.viewed(shape)


def _dtype_of_cast(owner: Uncomputed, call: Call) -> torch.dtype | None:
    """Return the dtype of a cast to floating point; None for anything else."""
    rest = call.args[1:]
    if call.name in _CAST_FUNCTIONS:
        return _CAST_FUNCTIONS[call.name]
    if call.name == "type_as":
        given: Any = rest[0]
        dtype, device = given.dtype, given.device
    elif call.name == "type":
        wanted = rest[0] if rest else call.kwargs.get("dtype")
        if not isinstance(wanted, torch.dtype):
            return None
        dtype, device = wanted, owner.device
    elif rest and isinstance(rest[0], Tensor | LazyTensor):
        dtype, device = rest[0].dtype, rest[0].device
    else:
        options = {name: value for name, value in call.kwargs.items() if name != "copy"}
        if isinstance(call.kwargs.get("other"), Tensor) or call.kwargs.get("copy"):
            return None
        found, wanted_dtype = parse_to(*rest, **options)
        dtype, device = wanted_dtype or owner.dtype, found or owner.device
    same_device = torch.empty(0, device=device).device == owner.device if device != owner.device else True
    return dtype if same_device and dtype.is_floating_point else None


def _operator_method(name: str) -> Callable[..., Any]:
    """Return the method of an operator such as ``__add__``, which `called` computes."""
    function = getattr(Tensor, name, None)

    def run(self: Uncomputed, *args: Any) -> Any:
        return called(function, name, (self, *args), {})

    run.__name__ = name
    return run


for _name in (
    *_BINARY_OPERATORS,
    *(f"r{name}" for name in _BINARY_OPERATORS),
    *(f"i{name}" for name in _BINARY_OPERATORS),
    *_OTHER_OPERATORS,
):
    if hasattr(Tensor, f"__{_name}__"):
        setattr(Uncomputed, f"__{_name}__", _operator_method(f"__{_name}__"))
Uncomputed.__hash__ = object.__hash__  # type: ignore[method-assign]  # equality is that of cells, as of tensors


def as_matrices(output: Any) -> Any:
    """Return what a model returns with matrices of attlas for lazy weights, and tensors for everything else lazy."""
    if isinstance(output, Uncomputed):
        return output.returned()
    if isinstance(output, dict):
        for name, part in list(output.items()):
            made = as_matrices(part)
            if made is not part:
                output[name] = made
        return output
    if isinstance(output, tuple | list):
        parts = [as_matrices(part) for part in output]
        if all(made is part for made, part in zip(parts, output, strict=True)):
            return output
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output
