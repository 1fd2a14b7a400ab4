"""Functions of each weight, lazy: their sums, and the gradients of these, take one pass over the matrix."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from attlas.engine.autodiff import graph
from attlas.errors import ModifiedError
from attlas.foundation.compat import changes, transforming, tree_leaves, tree_map_only
from attlas.matrix import reads
from attlas.matrix.kinds import algebra
from attlas.matrix.protocol import LazyTensor, Matrix, Operation, lazy_method, operation
from attlas.matrix.reductions import Dim, axes_of, cells_reduced, over_leading, reduced_shape

_ConstantArgument = int | float | str | torch.dtype | None


# What computes each cell of its result from the same cell of its arguments; operators without their underscores.
@operation("abs", "absolute", "add", "and", "clamp", "clamp_max", "clamp_min", "clip", "div", "divide", "double", "eq",
           "exp", "expm1", "float", "floordiv", "ge", "gt", "invert", "le", "log", "log10", "log1p", "log2",
           "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mod", "mul",
           "multiply", "nan_to_num", "ne", "neg", "negative", "or", "pow", "radd", "rand", "rdiv", "reciprocal", "relu",
           "rmul", "ror", "rpow", "rsqrt", "rsub", "rtruediv", "rxor", "sigmoid", "sign", "sqrt", "square", "sub",
           "subtract", "tanh", "true_divide", "truediv", "where", "xlogy", "xor")  # fmt: skip
def cellwise(function: Callable[..., Tensor], args: Any, kwargs: Any) -> Any:
    """Return a function of each weight as a lazy tensor; NotImplemented where it needs the dense matrix.

    Parameters
    ----------
    function : callable
        A function of torch that computes each cell of its result from the same cell of its arguments.
    args, kwargs : tuple and dict
        Its arguments. The tensors among them must broadcast to the matrix, and have no gradient of their own.
    """
    leaves = tree_leaves((args, kwargs))
    matrices = {id(matrix): matrix for matrix in (x.source for x in leaves if isinstance(x, LazyTensor))}
    matrix = next(iter(matrices.values()), None)
    supported = all(isinstance(x, LazyTensor | Tensor | _ConstantArgument) for x in leaves)
    if matrix is None or len(matrices) > 1 or not supported or "out" in kwargs:
        return NotImplemented
    plain_tensors = [x for x in leaves if isinstance(x, Tensor)]
    if matrix.weights.is_symbolic or transforming() or not all(_can_broadcast(t, matrix) for t in plain_tensors):
        return NotImplemented
    recorded = torch.is_grad_enabled() and matrix.requires_grad
    # Whether the gradient of each argument that is made of the weights is cut off: all must agree.
    constants = {x.constant for x in leaves if isinstance(x, Cellwise) and x.has_gradient}
    constants |= {False for x in leaves if isinstance(x, LazyTensor) and not isinstance(x, Cellwise)}
    if recorded and len(constants) > 1:  # the gradient is that of some of the cells
        return NotImplemented
    tensors: list[Tensor] = []
    for x in leaves:
        if isinstance(x, Cellwise):
            x.check_unchanged()
        tensors += x.tensors if isinstance(x, Cellwise) else [x.detach()] if isinstance(x, Tensor) else []

    def f(cells: Tensor, *values: Tensor) -> Tensor:
        """Return the function of some weights; `values` are `tensors` in the same order."""
        remaining = iter(values)

        def value_of(x: LazyTensor | Tensor) -> Tensor:
            """Return the weights, or the function of them, or the next tensor, which stands for an argument."""
            if isinstance(x, Cellwise):
                return x.f(cells, *islice(remaining, len(x.tensors)))
            return next(remaining) if isinstance(x, Tensor) else cells

        new_args, new_kwargs = tree_map_only((LazyTensor, Tensor), value_of, (args, kwargs))
        return function(*new_args, **new_kwargs)

    example = _apply_to_one_cell(matrix, f, tuple(tensors))
    if not isinstance(example, Tensor) or example.is_complex():  # a comparison with another type, as in A == None
        return NotImplemented
    small = matrix.numel() * matrix.dtype.itemsize <= graph.DENSE_LIMIT
    if example.dtype is torch.bool and small:  # torch takes indices as tensors only, as in t[A > 0.1] = 0
        return NotImplemented
    return Cellwise(matrix, f, tuple(tensors), constant=not recorded or True in constants)


def _sum_or_cellwise(name: str) -> Operation:
    """Return the operation of a function that may make a sum or a multiple of matrices, and else acts on each cell."""

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = algebra.combined(name, args, kwargs)
        return cellwise(function, args, kwargs) if found is NotImplemented else found

    return run


for _name in algebra.NAMES:
    operation(_name)(_sum_or_cellwise(_name))


def _apply_to_one_cell(matrix: Matrix, f: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    """Return the function of a single cell, which shows the dtype and whether there is a gradient."""
    with torch.enable_grad():
        cell = torch.ones((1,) * matrix.ndim, dtype=matrix.dtype, device=matrix.device, requires_grad=True)
        return f(cell, *(t.new_ones((1,) * t.ndim) for t in tensors))


def _can_broadcast(t: Tensor, A: Matrix) -> bool:
    """Return whether a tensor is a plain one, without a gradient, that broadcasts to a matrix on its device."""
    if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or t.requires_grad:
        return False
    sizes = zip(reversed(t.shape), reversed(A.shape), strict=False)
    broadcasts = t.ndim <= A.ndim and all(size in (1, size_of_A) for size, size_of_A in sizes)
    return broadcasts and (t.ndim == 0 or t.device == A.device)


class Cellwise(LazyTensor):
    """A function of each weight, ``f(A)``, as a lazy tensor: sums over queries or keys take one pass over the matrix.

    It cannot be changed in place, as the matrix cannot.

    Parameters
    ----------
    matrix : AttentionMatrix, shape (..., m, n)
        The weights.
    f : callable
        ``f(cells, *tensors)``, the function of a tensor of weights.
    tensors : tuple of Tensor
        The further arguments of `f`; each broadcasts to the matrix.
    constant : bool
        Whether no gradient is recorded: it was made without a graph, or detached.
    """

    label = "f(A)"

    def __init__(self, matrix: Matrix, f: Callable[..., Tensor], tensors: tuple[Tensor, ...], constant: bool) -> None:
        self.matrix, self.f, self.tensors, self.constant = matrix, f, tensors, constant
        self.shape, self.device = matrix.shape, matrix.device
        self._versions = [None if t.is_inference() else changes(t) for t in tensors]
        example = _apply_to_one_cell(matrix, f, tensors)
        self.dtype, self.has_gradient = example.dtype, example.requires_grad

    def __repr__(self) -> str:
        return f"Cellwise({self.matrix!r}, {self.dtype})"

    @property
    def source(self) -> Matrix:
        """The matrix whose weights it is a function of."""
        return self.matrix

    @property
    def requires_grad(self) -> bool:
        """Whether the weights record a graph, and the function has a gradient."""
        return self.matrix.requires_grad and self.has_gradient and not self.constant

    def detach(self) -> Any:
        """Return the same numbers without a graph."""
        return self._with_function(self.f, constant=True)

    def _with_function(self, f: Callable[..., Tensor], constant: bool) -> Cellwise:
        """Return another function of the same cells and tensors."""
        self.check_unchanged()
        return Cellwise(self.matrix, f, self.tensors, constant)

    def to_dense(self, limit: int | None = graph.DENSE_LIMIT) -> Tensor:
        """Return the function of all weights as a Tensor; refused above `limit` bytes."""
        self.check_unchanged()
        with self._grad_mode():
            return self.f(self.matrix.to_dense(limit), *self.tensors)

    def _grad_mode(self) -> Any:
        """Return the context in which the function is computed: without a graph where it is a constant."""
        return torch.no_grad() if self.constant else nullcontext()

    def __reduce__(self) -> Any:
        return torch.clone, (self.to_dense(),)  # no function can be pickled

    def check_unchanged(self) -> None:
        """Raise a ModifiedError if a tensor was changed in place since the function was made."""
        for t, version in zip(self.tensors, self._versions, strict=True):
            if version is not None and changes(t) != version:
                rule = "the tensors of a function of a matrix must not change before it is computed."
                fix = "take the sum before they change, or (A * t).to_dense()."
                raise ModifiedError(rule, "t was changed in place", fix, t=t, where=self.label)

    def in_problem_axes(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...], torch.dtype, bool]:
        """Return the function, its tensors with axes (batch, heads, m, n), its dtype, and whether it has a gradient.

        That is the form in which `reads.CellSums`, a statistic of the engine, takes them.
        """
        A = self.matrix

        def f(*cells: Tensor) -> Tensor:
            self.check_unchanged()  # a backward computes the function again
            return self.f(*cells)

        def with_leading_axes(t: Tensor) -> Tensor:
            t = t.reshape((1,) * (A.ndim - t.ndim) + t.shape)
            return t.expand(*A.shape[:-2], *t.shape[-2:]).reshape(*A.weights.shape[:2], *t.shape[-2:])

        tensors = tuple(with_leading_axes(t) if t.ndim else t for t in self.tensors)
        return f, tensors, self.dtype, self.has_gradient

    @lazy_method(numpy=("sum",))
    def sum(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Sum over axes; over rows or columns in one pass and linear memory. Each True counts as 1."""
        A, dims = self.matrix, axes_of(self, "sum", dim)
        keys, queries = A.ndim - 1, A.ndim - 2
        if A.weights.is_symbolic or transforming():
            return self.to_dense().sum(sorted(dims), keepdim)
        with self._grad_mode():
            if dims & {keys, queries}:
                first = keys if keys in dims else queries
                statistic = reads.CellSums(*self.in_problem_axes(), over_keys=first == keys)
                sums: Tensor = A.collect(statistic)[0].unsqueeze(first)
                sums = sums.sum(sorted(dims), keepdim=True)
            else:
                sums = over_leading(A, "sum", dims, self)
        return sums.reshape(reduced_shape(A.shape, dims, keepdim))

    @lazy_method(numpy=("mean",))
    def mean(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Mean over axes; see `sum`."""
        return self.sum(dim, keepdim) / cells_reduced(self, "mean", dim)

    @lazy_method
    def any(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Whether any cell along the axes is true."""
        # A sum of True counts them.
        return self._with_function(lambda *cells: self.f(*cells).bool(), constant=True).sum(dim, keepdim) > 0

    @lazy_method
    def all(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Whether all cells along the axes are true."""
        return ~self._with_function(lambda *cells: ~self.f(*cells).bool(), constant=True).any(dim, keepdim)
