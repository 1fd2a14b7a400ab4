"""What code does with attention tensors, on a matrix that is not stored.

`AttentionMatrix` inherits all of this. What can stay lazy does; what gives numbers of a linear amount is computed so;
everything else is done on the dense tensor, see `attlas.matrix.protocol`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.engine.problem import Problem
from attlas.errors import ModifiedError, ShapeError
from attlas.foundation.compat import parse_to, transforming
from attlas.matrix import products
from attlas.matrix.cellwise import Cellwise, cellwise
from attlas.matrix.protocol import like_tensors
from attlas.matrix.reductions import Dim, axes_of, axis_of, cells_reduced, max_along, reduced_shape
from attlas.matrix.weights import SoftmaxMatrix

_PRINTED = 6  # rows, columns and heads up to which print() shows the weights


class TensorLike(SoftmaxMatrix):
    """The side of `AttentionMatrix` that looks like a tensor.

    Notes
    -----
    Any method of `torch.Tensor` works, and so does any function of torch or numpy: ``torch.stack(attentions)``,
    ``A.permute(0, 2, 1, 3)``, ``A * mask``, ``numpy.asarray(A)``. Products stay products: `torch.einsum`, `torch.bmm`
    and their relatives that are ``A @ v`` in other words run on the fused kernel. Functions of each weight stay lazy,
    ``(A * t).clamp(min=0)``: their sums over queries or keys, and the gradients of these, take one pass and linear
    memory, unless the tensor has a gradient of its own. What is not written for the lazy matrix acts on
    ``A.to_dense()``, with its gradient where one is recorded, and raises `TooLargeError` where the matrices of a call
    take more than 1 GiB together. Methods that would change the tensor in place are refused.

    Examples
    --------
    >>> import torch, attlas
    >>> layers = [attlas.attend(torch.randn(1, 4, 9, 8), torch.randn(1, 4, 9, 8)) for _ in range(3)]
    >>> print(attlas.attend(torch.zeros(2, 4), torch.zeros(2, 4)))  # up to 6 × 6: the weights too
    AttentionMatrix(shape=(2, 2), torch.float32, score=ScaledDot)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    >>> torch.stack([A.squeeze(0) for A in layers]).shape
    torch.Size([3, 4, 9, 9])
    >>> layers[0].mean(1).shape, layers[0].cpu().numpy().shape
    (torch.Size([1, 9, 9]), (1, 4, 9, 9))
    >>> torch.einsum("bhij,bhjd->bihd", layers[0], torch.randn(1, 4, 9, 8)).shape
    torch.Size([1, 9, 4, 8])
    """

    def lazily(self, function: str) -> Callable[..., Any] | None:
        """Return what computes a function of torch without the dense tensor; see `LazyTensor.lazily`."""
        if function in products.PRODUCTS:
            return products.PRODUCTS[function]
        return getattr(type(self), function) if function in _METHODS else None

    def cellwise(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a function of each weight as a lazy tensor; see `LazyTensor.cellwise`."""
        return cellwise(function, args, kwargs)

    # ---------------------------------------------------------------------------------------------------- what it is

    def __str__(self) -> str:
        if max(self.shape[-2:]) > _PRINTED or math.prod(self.shape[:-2]) > _PRINTED or self.device.type == "meta":
            return repr(self)
        try:
            return f"{self!r}\n{self.detach().to_dense()}"
        except ModifiedError:  # reading is an error then, printing is not
            return repr(self)

    @property
    def is_cuda(self) -> bool:
        """Whether the tokens lie on an NVIDIA device."""
        return self.device.type == "cuda"

    @property
    def data(self) -> Self:
        """The same matrix without the graph of its tokens."""
        return self.detach()

    # -------------------------------------------------------------------------------------------------- what stays lazy

    @property
    def T(self) -> Any:  # noqa: N802 - torch's name
        """The transposed matrix, lazy; only of a matrix without leading axes, as of a tensor."""
        return self.mT if self.ndim == 2 else self._call("permute", *reversed(range(self.ndim)))

    @property
    def mH(self) -> Any:  # noqa: N802 - torch's name
        """The transposed matrix, lazy: weights are real numbers."""
        return self.mT

    H = T

    def contiguous(self, memory_format: Any = None) -> Self:
        """Return the matrix itself."""
        return self

    def clone(self, memory_format: Any = None) -> Self:
        """Return the matrix itself: nobody can write to it."""
        return self

    def matmul(self, v: Tensor) -> Tensor:
        """Return ``A @ v``."""
        return self @ v

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
        axes = range(self.ndim) if dim is None else [axis_of(self, "squeeze", dim)]
        key = tuple(0 if axis in axes and size == 1 else slice(None) for axis, size in enumerate(self.shape))
        rest = key[-2:] if 0 in key[-2:] else ()
        return self[(*key[:-2], *rest)] if rest or 0 in key else self

    def unsqueeze(self, dim: int) -> Any:
        """Add an axis of size 1: lazily in front of a batch, on the dense tensor elsewhere.

        Parameters
        ----------
        dim : int
            Position of the new axis.

        Returns
        -------
        AttentionMatrix or Tensor
        """
        axes = self._axes
        if dim in (0, -self.ndim - 1) and len(axes.layout) >= 2:
            more = replace(axes, layout=(1, *axes.layout), kept=(True, *axes.kept))
            return self._derived(self.problem, more, self._lse)
        return self._call("unsqueeze", dim)

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Exchange two axes: lazily the last two, on the dense tensor others."""
        if {axis_of(self, "transpose", dim0), axis_of(self, "transpose", dim1)} == {self.ndim - 2, self.ndim - 1}:
            return self.mT
        return self._call("transpose", dim0, dim1)

    swapaxes = swapdims = transpose

    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """Return the weights of a diagonal; of the last two axes in linear memory.

        Parameters
        ----------
        offset : int, default 0
            Which diagonal: key minus query.
        dim1, dim2 : int
            The axes, the first two by default, as of a tensor.

        Returns
        -------
        Tensor, shape (..., length of the diagonal)
        """
        m, n = self.shape[-2:]
        first, second = axis_of(self, "diagonal", dim1), axis_of(self, "diagonal", dim2)
        length = min(m, n - offset) - max(0, -offset)
        if (first, second) != (self.ndim - 2, self.ndim - 1) or length <= 0:
            return self._call("diagonal", offset, dim1, dim2)
        start = max(0, -offset)
        queries = torch.arange(start, start + length, device="cpu")
        cells: Tensor = self[..., queries, queries + offset]
        return cells

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
        device, dtype = parse_to(*args, **kwargs)
        device = self.device if device is None else torch.empty(0, device=device).device
        if device == self.device and dtype in (None, self.dtype):
            return self
        own = any(True for _ in self.problem.score.parameters())
        if dtype not in (None, self.dtype) and (own or dtype not in (torch.float32, torch.float64)):
            return self._call("to", *args, **kwargs)
        self.problem.check_unchanged("A.to()")
        # That of a part counts what the part does not have, so that it cannot be computed again.
        lse = self._exact_lse().to(device) if self.problem.partial else None
        return self._derived(_moved(self.problem, device, None if dtype == self.dtype else dtype), self._axes, lse)

    def cpu(self) -> Self:
        """Return the matrix on the CPU, lazy: its tokens are copied, m and n vectors per head."""
        return self.to("cpu")  # type: ignore[no-any-return]

    def cuda(self) -> Self:
        """Return the matrix on the present NVIDIA device, lazy."""
        return self.to("cuda")  # type: ignore[no-any-return]

    def float(self) -> Self:
        """Return the matrix in float32, lazy."""
        return self.to(torch.float32)  # type: ignore[no-any-return]

    def double(self) -> Any:
        """Return the matrix in float64, lazy; a Tensor where the score has parameters of its own."""
        return self.to(torch.float64)

    # ------------------------------------------------------------------------------------------------ numbers, if few

    @like_tensors
    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the largest weight, or with `dim` the largest along an axis and their positions.

        Parameters
        ----------
        dim : int, optional
            The axis; -1 and -2 take one pass and linear memory.
        keepdim : bool, default False
            Whether the axis is kept with size 1.

        Returns
        -------
        Tensor, or a named tuple of values and indices
        """
        if isinstance(dim, int) and axis_of(self, "max", dim) < self.ndim - 2:
            return self._call("max", dim, keepdim)
        return max_along(self, dim, keepdim)

    @like_tensors
    def var(self, dim: Dim = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
        """Return the variance of the weights over axes, masked cells counted as 0, as the dense tensor would.

        Parameters and errors are those of `sum`; `correction` is that of `torch.var`. Cost: two passes.
        """
        mean, count = self.mean(dim, keepdim=True), cells_reduced(self, "var", dim)
        centre = mean.detach()
        # The deviations from any centre; the second term is 0, and so is its gradient, but not that of its gradient.
        cells: Any = self
        squares = (cells - centre).square().sum(dim, keepdim=True) - count * (mean - centre).square()
        shape = reduced_shape(self.shape, axes_of(self, "var", dim), keepdim)
        return (squares / max(count - correction, 0)).reshape(shape)  # type: ignore[no-any-return]

    @like_tensors
    def std(self, dim: Dim = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
        """Return the standard deviation of the weights over axes; see `var`."""
        return _sqrt(self.var(dim, correction=correction, keepdim=keepdim))

    def count_nonzero(self, dim: Dim = None) -> Tensor:
        """Return how many weights over axes are not 0; parameters are those of `sum`."""
        if self.problem.is_symbolic or transforming():
            return self._call("count_nonzero", dim)
        return Cellwise(self, lambda cells: cells != 0, (), constant=True).sum(dim)

    def norm(self, p: Any = "fro", dim: Dim = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        """Return the Euclidean norm of the weights over axes; other norms are those of the dense tensor."""
        if p not in ("fro", None, 2) or dtype is not None:
            return self._call("norm", p, dim, keepdim, dtype)
        cells: Any = self
        return _sqrt(cells.square().sum(dim, keepdim))


def _sqrt(t: Tensor) -> Tensor:
    """Return the square root, whose slope at 0 counts as 0, as that of `torch.std` and `torch.norm`."""
    return torch.where(t == 0, 0.0, t.where(t != 0, 1.0).sqrt())


def _moved(problem: Problem, device: torch.device, dtype: torch.dtype | None) -> Problem:
    """Return a problem with its tensors on another device; masks and positions bring theirs along when asked."""
    score = problem.score
    if device != problem.device:
        score = copy.deepcopy(score).to(device)
    sink = None if problem.sink is None else problem.sink.to(device, dtype)
    q, k = problem.q.to(device, dtype), problem.k.to(device, dtype)
    return replace(problem, q=q, k=k, score=score, sink=sink, versions=())


# What is computed without the dense tensor when it is asked for as a function of torch.
_METHODS = ("amax", "argmax", "clone", "count_nonzero", "detach", "diagonal", "max", "mean", "norm", "numel", "squeeze",
            "std", "sum", "swapaxes", "swapdims", "topk", "transpose", "unsqueeze", "var")  # fmt: skip


def dropped_product(A: SoftmaxMatrix, v: Tensor, dropout_p: float) -> Tensor:
    """Return ``A @ v`` with some weights dropped, without the dense tensor."""
    return A._multiply(v, Dropout.draw(dropout_p) if dropout_p > 0.0 else None)


def check_probability(where: str, name: str, value: object) -> float:
    """Return a probability as a float, or raise a ShapeError where it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0:
        return float(value)
    rule = f"{name} must be a probability, from 0 to 1."
    raise ShapeError(where, rule, found=f"{name} = {value!r}", fix=f"{name}=0.1")
