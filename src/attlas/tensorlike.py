"""What existing code does with attention tensors, on a matrix that is not stored.

`AttentionMatrix` inherits all of this. What can stay lazy does; what gives numbers of a linear amount is computed so;
everything else that a tensor can do is done on the dense tensor where that is small, and refused where it is not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attlas.engine import tiled
from attlas.engine.fold import Part, Statistic
from attlas.engine.problem import Problem
from attlas.errors import ShapeError, TooLargeError, explain
from attlas.stats import columns, largest, rows
from attlas.tiles import Tile
from attlas.views import DENSE_LIMIT

if TYPE_CHECKING:
    from attlas.matrix import AttentionMatrix

__all__ = ["Dim", "TensorLike", "reduced"]

Dim: TypeAlias = "int | tuple[int, ...] | list[int] | None"
Reduction: TypeAlias = Literal["sum", "mean", "amax", "argmax"]

# Methods of a tensor that hang something on it which its users read later: a copy would keep that to itself.
_OF_STORED = {"backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "share_memory"}


def _on_dense(name: str) -> Callable[..., Any]:
    """Return a method that does what the dense tensor does."""

    def run(self: TensorLike, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch.Tensor, name)(*_written_out(f"A.{name}()", (self, *args)), **kwargs)

    run.__name__ = name
    return run


class TensorLike:
    """The side of `AttentionMatrix` that looks like a tensor.

    Notes
    -----
    Any method of `torch.Tensor` works, and so does any function of torch: ``torch.stack(attentions)``,
    ``A.permute(0, 2, 1, 3)``, ``A * mask``, ``numpy.asarray(A)``. Those that are not written for the lazy matrix act
    on ``A.to_dense()`` and raise `TooLargeError` where the matrices of a call take more than 1 GiB together. Methods
    that would change the tensor in place are refused.

    Examples
    --------
    >>> import torch, attlas
    >>> layers = [attlas.attend(torch.randn(1, 4, 9, 8), torch.randn(1, 4, 9, 8)) for _ in range(3)]
    >>> torch.stack([A.squeeze(0) for A in layers]).shape
    torch.Size([3, 4, 9, 9])
    >>> layers[0].mean(1).shape, layers[0].cpu().numpy().shape
    (torch.Size([1, 9, 9]), (1, 4, 9, 9))
    """

    # ---------------------------------------------------------------------------------------------------- what it is

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one axis."""
        return _me(self).shape if dim is None else _me(self).shape[dim]

    def dim(self) -> int:
        """Return the number of axes."""
        return _me(self).ndim

    def numel(self) -> int:
        """Return the number of weights."""
        return _me(self).shape.numel()

    @property
    def requires_grad(self) -> bool:
        """Whether the tokens record a graph; reads do not."""
        problem = _me(self).problem
        return problem.q.requires_grad or problem.k.requires_grad

    @property
    def is_cuda(self) -> bool:
        """Whether the tokens lie on an NVIDIA device."""
        return _me(self).device.type == "cuda"

    @property
    def data(self) -> AttentionMatrix:
        """The same matrix without the graph of its tokens."""
        return _me(self).detach()

    # -------------------------------------------------------------------------------------------------- what stays lazy

    def contiguous(self) -> AttentionMatrix:
        """Return the matrix itself."""
        return _me(self)

    def clone(self) -> AttentionMatrix:
        """Return the matrix itself: nobody can write to it."""
        return _me(self)

    def matmul(self, v: Tensor) -> Tensor:
        """Return ``A @ v``."""
        return _me(self) @ v

    def squeeze(self, dim: int | None = None) -> Any:
        """Leave out a leading axis of size 1, lazily; without `dim`, every axis of size 1, as of a tensor.

        Parameters
        ----------
        dim : int, optional
            The axis; the default is all of size 1.

        Returns
        -------
        AttentionMatrix or Tensor
            A Tensor where the axis of one query or of one key is left out.
        """
        A = _me(self)
        axes = range(A.ndim) if dim is None else [_axis(A, "squeeze", dim)]
        key = tuple(0 if axis in axes and size == 1 else slice(None) for axis, size in enumerate(A.shape))
        rest = key[-2:] if 0 in key[-2:] else ()
        return A[(*key[:-2], *rest)] if rest or 0 in key else A

    def unsqueeze(self, dim: int) -> Any:
        """Add an axis of size 1: lazily in front of a batch, on the dense tensor elsewhere.

        Parameters
        ----------
        dim : int
            Place of the new axis.

        Returns
        -------
        AttentionMatrix or Tensor
        """
        A = _me(self)
        axes = A._axes
        if dim in (0, -A.ndim - 1) and len(axes.layout) >= 2:
            more = replace(axes, layout=(1, *axes.layout), kept=(True, *axes.kept))
            return type(A)(A.problem, A.plan, more, A._lse)
        return _on_dense("unsqueeze")(self, dim)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the matrix on another device or with another dtype.

        Parameters
        ----------
        *args, **kwargs
            As of `torch.Tensor.to`.

        Returns
        -------
        AttentionMatrix or Tensor
            Lazy for another device and for float32 and float64, where the tokens move; a Tensor for other dtypes.
        """
        A = _me(self)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        device = A.device if device is None else torch.empty(0, device=device).device
        if device == A.device and dtype in (None, A.dtype):
            return A
        own = any(True for _ in A.problem.score.parameters())
        if dtype not in (None, A.dtype) and (own or dtype not in (torch.float32, torch.float64)):
            return _on_dense("to")(self, *args, **kwargs)
        return type(A)(_moved(A.problem, device, None if dtype == A.dtype else dtype), A.plan, A._axes)

    def cpu(self) -> AttentionMatrix:
        """Return the matrix on the CPU, lazy: its tokens are copied, m and n vectors a head."""
        found: AttentionMatrix = self.to("cpu")
        return found

    def cuda(self) -> AttentionMatrix:
        """Return the matrix on the present NVIDIA device, lazy."""
        found: AttentionMatrix = self.to("cuda")
        return found

    def float(self) -> AttentionMatrix:
        """Return the matrix in float32, lazy."""
        found: AttentionMatrix = self.to(torch.float32)
        return found

    # ------------------------------------------------------------------------------------------------ numbers, if few

    def numpy(self) -> np.ndarray:
        """Return the whole matrix as an array; refused above 1 GiB like `to_dense`."""
        found: np.ndarray = _me(self).to_dense().numpy()
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(_me(self).to_dense().cpu().numpy(), dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        method = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if not callable(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        if name.endswith("_") or name in _OF_STORED:
            raise AttributeError(
                explain(
                    f"A.{name}()",
                    "a lazy matrix holds no numbers that could be changed, or that a gradient could be kept for.",
                    {"A": f"shape {tuple(_me(self).shape)}"},
                    found=f"A.{name}",
                    fix="take a Tensor first, A.to_dense() or a part, A[..., :64, :].",
                )
            )
        return _on_dense(name).__get__(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], TensorLike) and name in _KEPT and func is getattr(torch, name, None):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        args, kwargs = _written_out(f"torch.{name}()", (args, kwargs or {}))
        return func(*args, **kwargs)

    __add__ = __radd__ = _on_dense("__add__")
    __mul__ = __rmul__ = _on_dense("__mul__")
    __sub__ = _on_dense("__sub__")
    __rsub__ = _on_dense("__rsub__")
    __truediv__ = _on_dense("__truediv__")
    __rtruediv__ = _on_dense("__rtruediv__")
    __pow__ = _on_dense("__pow__")
    __neg__ = _on_dense("__neg__")
    __lt__ = _on_dense("__lt__")
    __le__ = _on_dense("__le__")
    __gt__ = _on_dense("__gt__")
    __ge__ = _on_dense("__ge__")


# Functions of torch that the lazy matrix has as methods.
_KEPT = {"sum", "mean", "amax", "argmax", "topk", "matmul", "squeeze", "unsqueeze", "detach", "clone", "numel"}


def _me(matrix: TensorLike) -> AttentionMatrix:
    return matrix  # type: ignore[return-value]  # nothing else inherits this class


def _axis(A: AttentionMatrix, name: str, dim: Any) -> int:
    """Return an axis counted from 0."""
    if isinstance(dim, int) and not isinstance(dim, bool) and -A.ndim <= dim < A.ndim:
        return dim % A.ndim
    raise ShapeError(
        explain(
            f"A.{name}()",
            "dim must be an axis of the matrix, or several.",
            {"A": f"shape {tuple(A.shape)}"},
            found=f"dim = {dim!r}",
            fix=f"A.{name}(-1) over keys, A.{name}(-2) over queries, A.{name}({A.ndim - 3}) over heads."
            if A.ndim > 2
            else f"A.{name}(-1) over keys, A.{name}(-2) over queries.",
        )
    )


def _written_out(where: str, given: Any) -> Any:
    """Replace each lazy matrix in a structure by its dense tensor, where all together are small."""
    found = [part for part in pytree.tree_leaves(given) if isinstance(part, TensorLike)]
    size = sum(A.numel() * _me(A).dtype.itemsize for A in found)
    if size > DENSE_LIMIT:
        some = _me(found[0])
        raise TooLargeError(
            explain(
                where,
                "it needs whole matrices, and they would be larger than the limit.",
                {"A": f"shape {tuple(some.shape)} {str(some.dtype).removeprefix('torch.')}", "matrices": len(found)},
                found=f"{size:,} bytes, the limit is {DENSE_LIMIT:,}",
                fix="take parts, A[..., :64, :], numbers, A.sum(-2), or A.to_dense(limit=None) to insist.",
            )
        )
    return pytree.tree_map_only(TensorLike, lambda A: _me(A).to_dense(), given)


def _moved(problem: Problem, device: torch.device, dtype: torch.dtype | None) -> Problem:
    """Return a problem with its tensors on another device; masks and positions bring theirs along when asked."""
    score = problem.score
    if device != problem.device:
        score = copy.deepcopy(score).to(device)
    sink = None if problem.sink is None else problem.sink.to(device, dtype)
    return replace(problem, q=problem.q.to(device, dtype), k=problem.k.to(device, dtype), score=score, sink=sink)


# ---------------------------------------------------------------------------------------------------- reductions


class _Gathered(Statistic):
    """Sum or maximum of the matrices of some heads, a whole matrix for each group of them."""

    def __init__(self, group: Tensor, take_max: bool) -> None:
        self.group = group.tolist()
        self.groups = int(group.max()) + 1 if group.numel() else 0
        self.take_max = take_max

    def start(self, problem: Problem) -> Tensor:
        return torch.zeros(self.groups, *problem.shape[2:], dtype=problem.dtype, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        for b, batch in enumerate(at.batches):
            for h, head in enumerate(at.heads):
                group = self.group[batch][head]
                into = carry[group, at.rows.start : at.rows.stop, at.columns.start : at.columns.stop]
                if self.take_max:
                    torch.maximum(into, part.weights[b, h], out=into)
                else:
                    into += part.weights[b, h]
        return carry

    def finish(self, carry: Tensor) -> Tensor:
        return carry


def reduced(A: AttentionMatrix, name: Reduction, dim: Dim, keepdim: bool) -> Tensor:
    """Reduce a matrix over any of its axes, tile by tile.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The matrix.
    name : {"sum", "mean", "amax", "argmax"}
        What is taken.
    dim : int, tuple of int, or None
        The axes; None is all of them.
    keepdim : bool
        Whether the axes are kept with size 1.

    Returns
    -------
    Tensor, shape of A without the axes

    Raises
    ------
    ShapeError
        If `dim` is no axis.
    TooLargeError
        If the result still is a whole matrix, of more than 1 GiB.

    Notes
    -----
    Cost: one pass over the matrix, and the memory of the result and a few tiles.
    """
    named = range(A.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    dims = {_axis(A, name, one) for one in named}
    keys, queries = A.ndim - 1, A.ndim - 2
    if name == "argmax" and (len(dims) > 1 or not dims & {keys, queries}):
        found: Tensor = _on_dense("argmax")(A, dim, keepdim)
        return found
    if not dims & {keys, queries}:
        out = _over_leading(A, name, dims)
    else:
        first = keys if keys in dims else queries
        out = A.collect(_STATISTICS[name][first == keys]())[0].unsqueeze(first)
        rest = sorted(dims - {first})
        if rest:
            out = out.amax(rest, keepdim=True) if name == "amax" else out.sum(rest, keepdim=True)
    if name == "mean":
        out = out / math.prod(A.shape[axis] for axis in dims)
    return out.reshape(
        [1 if axis in dims else size for axis, size in enumerate(A.shape) if keepdim or axis not in dims]
    )


_STATISTICS: dict[str, tuple[type[Statistic], type[Statistic]]] = {
    "sum": (columns.ColumnMass, rows.RowMass),
    "mean": (columns.ColumnMass, rows.RowMass),
    "amax": (columns.ColumnMax, rows.MaxWeight),
    "argmax": (columns.ColumnArgMax, largest.ArgMax),
}


def _over_leading(A: AttentionMatrix, name: str, dims: set[int]) -> Tensor:
    """Return the sum or the maximum over leading axes, kept with size 1."""
    lead, (m, n) = A.shape[:-2], A.shape[-2:]
    kept = [1 if axis in dims else size for axis, size in enumerate(lead)]
    size = math.prod(kept) * m * n * A.dtype.itemsize
    if size > DENSE_LIMIT:
        raise TooLargeError(
            explain(
                f"A.{name}()",
                "over leading axes it is a whole matrix, and that would be larger than the limit.",
                {"A": f"shape {tuple(A.shape)} {str(A.dtype).removeprefix('torch.')}", "dim": f"{tuple(sorted(dims))}"},
                found=f"{size:,} bytes, the limit is {DENSE_LIMIT:,}",
                fix=f"stats.picture(A, 512, 512).{name}({min(dims)}), or a window of queries, "
                f"A[..., :64, :].{name}({min(dims)}).",
            )
        )
    group = torch.arange(math.prod(kept), device="cpu").reshape(kept).expand(lead).reshape(A.problem.shape[:2])
    (found,), _ = tiled.fold(A.problem, [_Gathered(group, name == "amax")], A.plan, A._lse)
    total: Tensor = found.reshape(*kept, m, n)
    return total
