"""What torch's operators make of lazy matrices: sums and multiples, stacks, products of two, means over heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from attlas.engine.autodiff import graph
from attlas.foundation.compat import transforming
from attlas.foundation.indexing import Axes
from attlas.matrix.kinds.chained import ChainedWeights
from attlas.matrix.kinds.combination import Combination, Factor, Term
from attlas.matrix.kinds.diagonal import DiagonalWeights
from attlas.matrix.kinds.stacked import StackedWeights
from attlas.matrix.protocol import LazyTensor
from attlas.matrix.weights import Weights

_SUM_SIGNS = {"add": 1.0, "radd": 1.0, "sub": -1.0, "subtract": -1.0, "rsub": -1.0}
_MULTIPLE_FUNCTIONS = {"mul", "multiply", "rmul", "div", "divide", "true_divide", "truediv", "neg", "negative"}
#: The functions of torch, and operators without their underscores, that `combined` may compute.
NAMES = (*_SUM_SIGNS, *sorted(_MULTIPLE_FUNCTIONS))
_QUOTIENT_FUNCTIONS = {"div", "divide", "true_divide", "truediv"}


def combined(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a sum, difference or multiple of matrices as a lazy matrix; NotImplemented where it is something else.

    Parameters
    ----------
    name : str
        One of `NAMES`: the function of torch, or the operator without its underscores, ``"sub"``, ``"rmul"``.
    args, kwargs : sequence and dict
        Its arguments.
    """
    if transforming():
        return NotImplemented
    if name in _MULTIPLE_FUNCTIONS:
        return NotImplemented if kwargs else _multiple_of_matrix(name, args)
    if len(args) != 2 or kwargs.keys() - {"alpha"}:
        return NotImplemented
    alpha = kwargs.get("alpha", 1)
    left, right = args[::-1] if name == "rsub" else args
    if not all(isinstance(side, LazyTensor) for side in (left, right)) or not isinstance(alpha, int | float):
        return NotImplemented
    if left.source is not None and left.source is right.source:  # a function of each weight of one matrix
        return NotImplemented
    first, second = _as_term(left), _as_term(right)
    if first is None or second is None:
        return NotImplemented
    return _sum_of_terms([(left, first), (right, second.scaled(_SUM_SIGNS[name] * alpha))])


def _as_term(x: Any) -> Term | None:
    """Return a lazy matrix as a term of a sum: its weights, or those of the matrix that it is the transpose of."""
    if hasattr(x, "weights"):
        return Term(1.0, x.weights)
    if x.label == "A.mT" and hasattr(x.matrix, "weights"):
        return Term(1.0, x.matrix.weights, True)
    return None


def _untransposed(x: Any) -> Any:
    """Return the matrix itself, or that of which something is the transpose."""
    return x if hasattr(x, "weights") else x.matrix


def _sum_of_terms(terms: Sequence[tuple[Any, Term]]) -> Any:
    """Return the sum of terms, each with the lazy matrix that it comes from; NotImplemented where they do not fit."""
    base, first = max(terms, key=lambda pair: pair[0].ndim)
    axes, shape, device = _untransposed(base).axes, base.shape, base.device
    fitted = []
    for matrix, term in terms:
        if matrix.device != device:
            return NotImplemented
        if matrix.shape == shape and term.shape == first.shape:
            fitted.append(term)
        elif matrix.ndim == 2 and matrix.shape == shape[-2:]:
            fitted.append(term._replace(weights=_repeated_for_heads(term.weights, *first.shape[:2])))
        else:
            return NotImplemented
    return type(_untransposed(base))(Combination(fitted), axes)


def _repeated_for_heads(weights: Weights, batch: int, heads: int) -> Weights:
    """Return the weights of one matrix without leading axes for each of many batches and heads."""
    if isinstance(weights, DiagonalWeights):
        return weights.expanded(batch, heads)
    if isinstance(weights, Combination):
        return Combination(
            [term._replace(weights=_repeated_for_heads(term.weights, batch, heads)) for term in weights.terms]
        )
    first = torch.zeros(max(batch, heads), dtype=torch.int64)
    return weights.part(first[:batch], first[:heads])


def _multiple_of_matrix(name: str, args: Sequence[Any]) -> Any:
    """Return a matrix times a number, or times a number for each head, row or key."""
    if name in ("neg", "negative"):
        x, factor = args[0], -1.0
    elif len(args) != 2:
        return NotImplemented
    else:
        x, factor = args if isinstance(args[0], LazyTensor) else args[::-1]
        if name in _QUOTIENT_FUNCTIONS:
            if x is not args[0]:
                return NotImplemented
            factor = _reciprocal(factor, x.dtype)
    term = _as_term(x) if isinstance(x, LazyTensor) else None
    own = None if term is None else _as_factor(factor, x, term)
    # A factor for each row and one for each key cannot be joined to one factor.
    if term is None or own is None or not (term.is_of_heads or isinstance(own, float)):
        return NotImplemented
    matrix = _untransposed(x)
    return type(matrix)(Combination([term.scaled(own)]), matrix.axes)


def _reciprocal(t: Any, dtype: torch.dtype) -> Any:
    """Return 1 / t of a number other than 0 or a tensor of floating point; None of all else."""
    if isinstance(t, Tensor):
        return (
            t.to(torch.promote_types(t.dtype, dtype) if t.ndim else dtype).reciprocal()
            if t.is_floating_point()
            else None
        )
    return 1.0 / t if _is_number(t) and t else None


def _is_number(t: Any) -> bool:
    """Return whether something is a number of Python, and no bool."""
    return isinstance(t, int | float) and not isinstance(t, bool)


def _as_factor(t: Any, x: LazyTensor, term: Term) -> Factor | None:
    """Return a factor of all weights, or of each head, row or column; None where it is another for each cell."""
    if _is_number(t):
        return float(t) if math.isfinite(t) else None
    if type(t) not in (Tensor, nn.Parameter) or not t.is_floating_point() or t.layout is not torch.strided:
        return None
    if t.ndim == 0:
        one: Tensor = t.reshape(1, 1, 1, 1)
        return one.to(x.device, x.dtype) if t.device.type in ("cpu", x.device.type) else None
    if t.ndim > x.ndim or t.device != x.device or torch.promote_types(t.dtype, x.dtype) != x.dtype:
        return None
    own = t.reshape(*(1,) * (x.ndim - t.ndim), *t.shape)
    *lead, m, n = own.shape
    fits = all(size in (1, whole) for size, whole in zip(own.shape, x.shape, strict=True))
    if not fits or (m > 1 and n > 1):
        return None
    if all(size == 1 for size in lead):
        found: Tensor = own.reshape(1, 1, m, n)
    else:
        found = own.expand(*x.shape[:-2], m, n).reshape(*term.shape[:2], m, n)
    return found


def stacked(matrices: Any, dim: int = 0) -> Any:
    """Return matrices of one shape along a new first axis, lazy where they are too large to be written out.

    NotImplemented for small ones, which programs take for tensors, and where they do not fit.
    """
    if dim != 0 or transforming() or not isinstance(matrices, list | tuple) or not matrices:
        return NotImplemented
    first = matrices[0]
    if not all(hasattr(A, "weights") and hasattr(A, "axes") for A in matrices):
        return NotImplemented
    if sum(A.numel() * A.dtype.itemsize for A in matrices) <= graph.DENSE_LIMIT:
        return NotImplemented
    same = all(
        (A.shape, A.weights.shape, A.dtype, A.device, A.weights.key_heads)
        == (first.shape, first.weights.shape, first.dtype, first.device, first.weights.key_heads)
        for A in matrices
    )
    if not same or any(A.weights.is_symbolic for A in matrices) or first.weights.keys.shape[-1] == 0:
        return NotImplemented
    axes = first.axes
    # The last of several leading axes is that of the heads: with one leading axis there is one head, which nobody sees.
    heads = (1,) if len(axes.layout) == 1 else ()
    whole = Axes((len(matrices), *axes.layout, *heads), (True, *axes.kept, *(False for _ in heads)))
    return type(first)(StackedWeights([A.weights for A in matrices]), whole)


def chained(A: Any, B: Any) -> Any:
    """Return the product of two matrices as a lazy matrix where one of the three is too large to be written out.

    NotImplemented for small ones, each cell of whose product costs less when it is stored, and where axes do not fit.
    """
    terms = [_as_term(side) for side in (A, B)]
    if transforming() or terms[0] is None or terms[1] is None or A.device != B.device:
        return NotImplemented
    sizes = (
        A.numel() * A.dtype.itemsize,
        B.numel() * B.dtype.itemsize,
        A.shape[:-1].numel() * B.shape[-1] * A.dtype.itemsize,
    )
    if max(sizes) <= graph.DENSE_LIMIT:
        return NotImplemented
    first, second = (_untransposed(side) for side in (A, B))
    left, right = (term.weights if not term.transposed else Combination([term]) for term in terms if term is not None)
    if A.ndim == 2 < B.ndim:
        left, first = _repeated_for_heads(left, *right.shape[:2]), second
    elif B.ndim == 2 < A.ndim:
        right = _repeated_for_heads(right, *left.shape[:2])
    elif A.shape[:-2] != B.shape[:-2] or left.shape[:2] != right.shape[:2]:
        return NotImplemented
    if left.shape[3] != right.shape[2]:
        return NotImplemented
    return type(first)(ChainedWeights(left, right), first.axes)


def mean_over(A: Any, dims: set[int], keepdim: bool, divisor: int) -> Any:
    """Return the sum of a matrix over leading axes, divided by a number, as a lazy matrix.

    Parameters
    ----------
    A : AttentionMatrix
        The matrix.
    dims : set of int
        Leading axes.
    keepdim : bool
        Whether the axes are kept with size 1.
    divisor : int
        What the sum is divided by.
    """
    lead = A.shape[:-2]
    places = product(*(range(size) if axis in dims else (slice(None),) for axis, size in enumerate(lead)))
    parts = [A[place] for place in places]
    total = Combination([Term(1.0 / divisor, part.weights) for part in parts])
    axes = parts[0].axes
    if keepdim:
        seen = [place for place, kept in enumerate(A.axes.kept) if kept]
        gone = {seen[axis] for axis in dims}
        axes = replace(axes, kept=tuple(kept or place in gone for place, kept in enumerate(axes.kept)))
    return type(A)(total, axes)
