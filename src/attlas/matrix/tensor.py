"""A lazy matrix as a `torch.Tensor`, for code that asks ``isinstance(x, torch.Tensor)``; it holds no numbers either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attlas.errors import TooLargeError
from attlas.foundation.compat import tree_map_only, wrapper
from attlas.matrix.protocol import LazyTensor

# What the wrapper itself says of its form; all else is asked of the matrix.
_FORM_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "is_cpu", "is_cuda", "is_mps",
                    "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_xla",
                    "is_xpu", "is_ipu", "names", "_backward_hooks", "__class__"}  # fmt: skip
# A list has a Python object for each number, and what draws or writes lists is slow long before memory ends.
MOST_IN_A_LIST = 2**20


class MatrixTensor(Tensor):
    """A lazy matrix that is a `torch.Tensor` by its class: `AttentionMatrix.as_tensor` makes it.

    Functions of torch give what they give for the lazy matrix. Results that are lazy are tensors of this class, too.
    Whatever passes torch's functions by (C++ code, an autograd function) gets the whole tensor, up to 1 GiB.

    Parameters
    ----------
    matrix : LazyTensor
        The matrix.
    """

    matrix: LazyTensor

    @staticmethod
    def __new__(cls, matrix: LazyTensor) -> MatrixTensor:
        tensor: MatrixTensor = wrapper(cls, tuple(matrix.shape), matrix.dtype, matrix.device)
        tensor.matrix = matrix
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Tensor has one that takes nothing
        super().__init__()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # torch passes the contents, and there are none
        return f"MatrixTensor({self.matrix!r})"

    def tolist(self) -> Any:
        """Return the numbers as nested lists; refused above `MOST_IN_A_LIST` numbers."""
        check_list_size(self.matrix)
        return self.matrix.tolist()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, own = str(getattr(func, "__name__", "")), args[0] if args else None
        if name == "__get__":
            name = func.__self__.__name__
            if name in _FORM_ATTRIBUTES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args)
            return _as_tensors(getattr(own.matrix, name))  # type: ignore[union-attr]  # the getter of this class
        given, named = tree_map_only(MatrixTensor, lambda part: part.matrix, (args, dict(kwargs or {})))
        if func in (torch.cat, torch.concat) and len(given[0]) == 1 and isinstance(given[0][0], LazyTensor):
            return args[0][0]
        if name == "__getitem__" and isinstance(own, MatrixTensor) and _is_whole_index(args[1]):
            return own
        if (
            isinstance(own, MatrixTensor)
            and getattr(Tensor, name, None) is func
            and _has_tensor_method(own.matrix, name)
        ):
            return _as_tensors(getattr(own.matrix, name)(*given[1:], **named))
        return _as_tensors(func(*given, **named))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it loosely
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Write the matrix out for what comes from below torch's functions."""
        if func is torch.ops.aten.detach.default:  # nn.Module and autograd make such a view of what they hold
            return MatrixTensor(args[0].matrix.detach())
        args, kwargs = tree_map_only(MatrixTensor, lambda part: part.matrix.to_dense(), (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def check_list_size(matrix: LazyTensor) -> None:
    """Raise a TooLargeError where a list would have too many numbers."""
    count = matrix.numel()
    if count > MOST_IN_A_LIST:
        rule = f"a list, and a page made of it, has at most {MOST_IN_A_LIST:,} numbers."
        fix = "take a part, A[..., -256:, -256:], a picture, stats.picture(A, 256, 256), or A.view() in the viewer."
        given, where = {matrix.label: f"shape {tuple(matrix.shape)}"}, f"{matrix.label}.tolist()"
        raise TooLargeError(rule, f"{count:,} numbers", fix, arguments=given, where=where)


def _is_whole_index(key: Any) -> bool:
    """Whether an index takes everything, as ``t[:, :, :]`` does; a lazy matrix itself is read by that."""
    entries = key if isinstance(key, tuple) else (key,)
    return all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in entries)


def _has_tensor_method(matrix: LazyTensor, name: str) -> bool:
    """Whether a matrix has a method of tensors; special ones that it lacks are those of the dense tensor."""
    return not name.startswith("_") or hasattr(type(matrix), name)


def _as_tensors(found: Any) -> Any:
    """Return lazy results as tensors of this class."""
    if isinstance(found, Tensor):
        return found
    return tree_map_only(LazyTensor, MatrixTensor, found)
