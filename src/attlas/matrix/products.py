"""Functions of torch that are ``A @ v``, or ``A.mT @ x``, in other words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.errors import ShapeError
from attlas.matrix.kinds import algebra
from attlas.matrix.protocol import LazyTensor, operation, with_arguments


@operation("bmm", "matmul", "mm", "mv")
def _matmul(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``left @ right`` where one of the two is a matrix and the other a tensor, or both are matrices.

    Two matrices are chained: their product is a lazy matrix too.
    """
    if kwargs or len(args) != 2:
        return NotImplemented
    left, right = args
    # The methods by their names: torch.compile turns the operator into this function, with the sides exchanged.
    if isinstance(left, LazyTensor):
        if isinstance(right, LazyTensor):
            return algebra.chained(left, right)
        return NotImplemented if right.ndim == 0 else left.__matmul__(right)
    if function is torch.Tensor.matmul and torch.compiler.is_dynamo_compiling() and not _is_left_factor(left, right):
        return right.__matmul__(left)
    return right.__rmatmul__(left)


def _is_left_factor(t: Tensor, A: LazyTensor) -> bool:
    """Return whether the operator ``@`` of a tensor and a matrix meant ``t @ A``, by their sizes.

    torch.compile hands on ``A @ t`` as ``Tensor.matmul(t, A)``, as it does ``t @ A``.
    """
    left, right = t.shape[-1] == A.shape[-2], t.shape[-2 if t.ndim > 1 else -1] == A.shape[-1]
    if not (left and right):
        return left
    rule = "inside torch.compile the two sides of @ must fit in one order alone: torch exchanges them."
    fix = f"{A.label}.matmul(v) for {A.label} @ v, torch.matmul(v, {A.label}) for v @ {A.label}."
    found = "sizes that fit in both orders"
    raise ShapeError(rule, found, fix, arguments={A.label: f"shape {tuple(A.shape)}", "v": t}, where=f"{A.label} @ v")


@operation("stack")
def _stack_matrices(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stack matrices along a new first axis, lazily if they are large."""
    return (
        NotImplemented if "out" in kwargs or len(args) > 2 else with_arguments(algebra.stacked)(function, args, kwargs)
    )


def _linear_layer(v: Any, weight: Any, bias: Tensor | None = None) -> Any:
    """Return ``v @ weight.T + bias``, a product of the matrix where it stands on the left."""
    if not isinstance(v, LazyTensor) or isinstance(weight, LazyTensor):
        return NotImplemented
    out = v.__matmul__(weight.mT if weight.ndim == 2 else weight)
    return out if bias is None else out + bias


def _dropout_of_matrix(A: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Return the matrix itself where nothing is dropped; NotImplemented leaves the rest to the dense tensor."""
    return A if p == 0 or not training else NotImplemented


def _tensordot_with_matrix(left: Any, right: Any, dims: Any = 2) -> Any:
    """Return the product over the last axis of the matrix and the first of a tensor."""
    if not isinstance(left, LazyTensor) or isinstance(right, LazyTensor) or dims not in (1, ([-1], [0])):
        return NotImplemented
    return left.__matmul__(right.flatten(1)).reshape(*left.shape[:-1], *right.shape[1:])


def _einsum_with_matrix(equation: Any, *operands: Any) -> Any:
    """Return an einsum of one matrix and one tensor that sums over keys, or over queries."""
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or len(operands) != 2:
        return NotImplemented
    terms = _einsum_letters(equation, operands)
    matrices = [isinstance(operand, LazyTensor) for operand in operands]
    if terms is None or sum(matrices) != 1:
        return NotImplemented
    (first, second), out = terms
    (A, own), (v, other) = ((operands[0], first), (operands[1], second))[:: 1 if matrices[0] else -1]
    if len(set(own)) < len(own) or len(set(other)) < len(other):
        return NotImplemented
    *lead, i, j = list(own)  # letters of the matrix: leading axes, queries, keys
    if i not in other and i in out and j in other and j not in out:
        product, summed, kept = A, j, i
    elif j not in other and j in out and i in other and i not in out:
        product, summed, kept = A.mT, i, j
    else:
        return NotImplemented
    # Axes of the tensor that the result has beside those of the matrix.
    values = [letter for letter in other if letter not in lead and letter != summed]
    sizes = dict(zip(own, A.shape, strict=True))
    fits = all(size in (1, sizes[letter]) for letter, size in zip(other, v.shape, strict=True) if letter in sizes)
    if not (fits and v.shape[other.index(summed)] == sizes[summed] and set(values) <= set(out)):
        return NotImplemented
    # The tensor as (leading axes of the matrix, tokens, all other axes in one).
    order = [*(letter for letter in lead if letter in other), summed, *values]
    v = v.permute([other.index(letter) for letter in order])
    v = v[tuple(slice(None) if letter in other else None for letter in lead)]
    pooled = product.__matmul__(v.flatten(len(lead) + 1) if values else v.unsqueeze(-1))
    pooled = pooled.reshape(*pooled.shape[:-1], *v.shape[len(lead) + 1 :])
    letters = [*lead, kept, *values]
    # Leading axes that the result does not have are summed, the others put in order.
    gone = [axis for axis, letter in enumerate(letters) if letter not in out]
    pooled = pooled.sum(gone) if gone else pooled
    letters = [letter for letter in letters if letter in out]
    return pooled.permute([letters.index(letter) for letter in out])


def _einsum_letters(equation: str, operands: tuple[Any, ...]) -> tuple[list[str], str] | None:
    """Return the letters of each operand and of the result, an ellipsis written out; None where it is not plain."""
    given, arrow, out = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or len(terms) != len(operands):
        return None
    # Greek letters stand for the axes of an ellipsis, counted from the last.
    spare = [chr(code) for code in range(ord("α"), ord("α") + 20)]
    written = []
    dots = ""
    for term, operand in zip(terms, operands, strict=True):
        hidden = operand.ndim - len(term.replace("...", ""))
        if hidden < 0 or (hidden and "..." not in term):
            return None
        letters = "".join(spare[len(spare) - hidden :])
        dots = max(dots, letters, key=len)
        written.append(term.replace("...", letters))
    out = out.replace("...", dots)
    return (written, out) if len(set(out)) == len(out) and set(out) <= set("".join(written)) else None


for _compute, _names in (
    (_linear_layer, ("linear",)),
    (_dropout_of_matrix, ("dropout",)),
    (_tensordot_with_matrix, ("tensordot",)),
    (_einsum_with_matrix, ("einsum",)),
):
    operation(*_names)(with_arguments(_compute))
