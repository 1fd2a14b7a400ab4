"""Terms of places in the fields of the kernels of dot products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.native import library
from attlas.engine.backends.native.decode import TYPES
from attlas.engine.held import check_leaves
from attlas.engine.problem import Problem
from attlas.errors import ShapeError
from attlas.scores.base import Scaled, Score, Sum, Tokens
from attlas.scores.bias import Bias


def of(problem: Problem) -> Bias | None:
    """Return the positional terms that the score adds to its dot product, without a graph.

    None where there are none, or where they have no such form.
    """
    # Computed once for each problem, which keeps it.
    kept = vars(problem)
    if "bias" not in kept:
        dot = problem.dot
        with torch.no_grad():
            kept["bias"] = (
                None if dot is None or dot.bias is None else dot.bias.bias(problem.tile(*map(range, problem.shape)))
            )
    found: Bias | None = kept["bias"]
    return found


def without_places(problem: Problem) -> Problem:
    """Return the problem without the positional part of its score; `of` gives that part for the returned problem."""
    kept, (score, places) = vars(problem), _without_positional_part(problem.score)
    if places is None:
        return problem
    if "without places" not in kept:
        inner = replace(problem, score=score)
        with torch.no_grad():
            vars(inner)["bias"] = places.bias(problem.tile(*map(range, problem.shape)))
        kept["without places"] = inner
    found: Problem = kept["without places"]
    return found


def tokens_of(score: Score, tokens: Tokens) -> Tokens:
    """Return the tokens of the part of a sum of scores that is not positional, from those of the sum."""
    while (inner := _score_inside(score)) is not None:
        if isinstance(score, Sum):
            tokens = tokens[int(score.left.positional)]
        score = inner
    return tokens


def unscaled(score: Score) -> tuple[Score, float]:
    """Return a score without the numbers that it is multiplied by, and their product."""
    factor = 1.0
    while isinstance(score, Scaled):
        factor *= score.factor
        score = score.inner
    return score, factor


def _score_inside(score: Score) -> Score | None:
    """Return the score inside a multiple, or the summand that is not positional; None for another score."""
    if type(score) is Scaled:
        return score.inner
    if type(score) is Sum and score.left.positional != score.right.positional:
        return score.right if score.left.positional else score.left
    return None


def _without_positional_part(score: Score) -> tuple[Score, Score | None]:
    """Return the part of a score that is not positional, and the sum of its positional parts; None without these.

    A multiple of a sum is the sum of the multiples.
    """
    places, factor = None, 1.0
    while (inner := _score_inside(score)) is not None:
        if isinstance(score, Scaled):
            factor *= score.factor
        elif isinstance(score, Sum):
            other = score.left if score.left.positional else score.right
            other = other if factor == 1.0 else Scaled(other, factor)
            places = other if places is None else other + places
        score = inner
    return score if factor == 1.0 else Scaled(score, factor), places


def unsupported(problem: Problem) -> str | None:
    """Return why the kernels cannot add the positional terms of the score; None where they can."""
    bias = of(problem)
    if bias is None:
        return "the kernels know no form of the score of places"
    batch, heads, m, n = problem.shape
    terms = {"distance": (m + n - 1,), "key": (n,), "query": (m,), "cell": (m, n)}
    for name, sizes in terms.items():
        t: Tensor | None = getattr(bias, name)
        if t is None:
            continue
        whole = (batch, heads, *sizes)
        # The first axes may have size 1: batch and heads, and of `cell` all.
        may_be_one = whole[:2] if name != "cell" else whole
        fits = t.ndim == len(whole) and all(
            size == full or (size == 1 and place < len(may_be_one))
            for place, (size, full) in enumerate(zip(t.shape, whole, strict=True))
        )
        if not fits:
            rule = f"`{name}` of a Bias must have a size for each batch, head and place."
            found, fix = f"{tuple(t.shape)} for {whole}", "return bias(at) for the rows and columns of the tile."
            raise ShapeError(rule, found, fix, where="Score.bias()")
        if t.device.type != "cpu" or t.dtype not in TYPES:
            return f"there is no kernel for {str(t.dtype).removeprefix('torch.')} numbers of places"
    return None


def fields(kernels: library.Kernels, problem: Problem, rows: slice) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the positional terms of some rows in the fields of ``AttentionParams`` (C), and what these point to."""
    bias = of(problem)
    if bias is None:
        return {}, []
    found: dict[str, Any] = {}
    buffers: list[Tensor] = []
    if bias.distance is not None:
        table = bias.distance.to(problem.dtype).contiguous()
        # Number x belongs to j - i = x - (m - 1).
        start = problem.shape[2] - 1 - rows.start
        found["by_distance"] = _bias_struct(kernels, table, start, row=-1, column=1)
        buffers.append(table)
    if bias.cell is not None:
        row, column = (0 if bias.cell.shape[axis] == 1 else bias.cell.stride(axis) for axis in (2, 3))
        start = rows.start * row
        found["by_cell"] = _bias_struct(kernels, bias.cell, start, row=row, column=column, factor=bias.factor)
        buffers.append(bias.cell)
    for name, t, start in (("by_query", bias.query, rows.start), ("by_key", bias.key, 0)):
        if t is not None:
            t = t.to(torch.float64).contiguous()
            found[name] = kernels.structures["TokenBias"](
                t.data_ptr() + 8 * start, *_batch_and_head_strides(t)
            )  # 8 bytes each
            buffers.append(t)
    return found, buffers


class PlaceGradients:
    """The gradients of what a score of places adds: what a kernel sums up, and the way from there to its tensors.

    Parameters
    ----------
    problem : Problem
        The matrix.
    score : Score
        The score of places. Its terms are computed once more, with a graph.

    Notes
    -----
    Distances, queries and keys take a float64 number for each batch and head, and a tensor of pairs as much memory as
    it has, in the dtype of the sums.
    """

    def __init__(self, problem: Problem, score: Score) -> None:
        batch, heads, m, n = problem.shape
        # In float64: sums over many places nearly cancel, as a gradient in the logits of a row sums to 0.
        at = replace(problem.tile(*map(range, problem.shape)), dtype=torch.float64)
        with torch.enable_grad():
            terms = score.bias(at) or Bias()
        every = {name: getattr(terms, name) for name in ("distance", "query", "key", "cell")}
        self._problem, self._factor = problem, terms.factor
        self._terms = {name: t for name, t in every.items() if t is not None and t.requires_grad}
        sizes = {"distance": (batch, heads, m + n - 1), "query": (batch, heads, m), "key": (batch, heads, n)}
        self._sums = {
            name: torch.zeros(sizes.get(name, t.shape), dtype=torch.float64 if name in sizes else problem.dtype)
            for name, t in ((_form_of_bias_gradient(name, t), t) for name, t in self._terms.items())
        }

    def fields(self, kernels: library.Kernels, rows: slice) -> Any:
        """Return the addresses of the sums for a call with some rows, each moved to where that call's first row is."""
        starts = {"distance": self._problem.shape[2] - 1 - rows.start, "query": rows.start}
        starts["cell"] = rows.start * self._problem.shape[3]
        found: dict[str, Any] = {
            name: t.data_ptr() + starts.get(name, 0) * t.element_size() for name, t in self._sums.items()
        }
        found |= {f"{name}_head": self._sums[name].shape[2] for name in ("distance", "query") if name in self._sums}
        if "cell" in self._sums:
            found["cell_batch"], found["cell_head"] = _batch_and_head_strides(self._sums["cell"])
        return kernels.structures["PlaceGradients"](**found)

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor | None] | None:
        """Return the gradients of tensors of the score, from the sums.

        None where code of the user hides the graph of one.
        """
        grads, own_code = [], self._problem.runs_own_code
        for name, t in self._terms.items():
            form = _form_of_bias_gradient(name, t)
            found = self._sums[form]
            if name == "cell":
                found = found.unsqueeze({"query": -1, "key": -2}[form]) if form != name else found
                found = found * self._factor
            grads.append(found.sum_to_size(t.shape).to(t.dtype))
            if own_code:
                check_leaves(type(self._problem.score).__name__, t, parameters)
        if not grads:
            return None if own_code else [None] * len(parameters)
        result = torch.autograd.grad(list(self._terms.values()), parameters, grads, allow_unused=True)
        return None if own_code and any(grad is None for grad in result) else list(result)


def _form_of_bias_gradient(name: str, t: Tensor) -> str:
    """Return which sum gives the gradient of a term.

    Its own; for a `cell` tensor that repeats its numbers along one axis, that of queries or of keys.
    """
    if name != "cell" or (t.shape[2] != 1 and t.shape[3] != 1):
        return name
    return "query" if t.shape[3] == 1 and t.shape[2] != 1 else "key"


def pairwise_fields(
    kernels: library.Kernels, problem: Problem, rows: slice, *, by_column: bool
) -> tuple[dict[str, Any], list[Any]]:
    """Return the positional terms of some rows in the fields of ``PairwiseParams``, and what these point to."""
    if vars(problem).get("bias") is None:
        return {}, []
    (batch, heads, m, n), (found, buffers) = problem.shape, fields(kernels, problem, rows)
    m = len(range(m)[rows])
    if by_column:  # the columns of the call are queries
        for term in (found[name] for name in ("by_distance", "by_cell") if name in found):
            term.row, term.column = term.column, term.row
        swapped = {"by_query": "by_key", "by_key": "by_query"}
        found, m, n = {swapped.get(name, name): term for name, term in found.items()}, n, m
    sizes = {"batch": batch, "heads": heads, "m": m, "n": n, "threads": torch.get_num_threads()}
    params = kernels.structures["AttentionParams"](**sizes, **found)
    # The kernels of pairs read the terms in this structure.
    return {"places": ctypes.addressof(params)}, [params, *buffers]


def _bias_struct(kernels: library.Kernels, t: Tensor, start: int, *, row: int, column: int, factor: float = 1.0) -> Any:
    """Return a tensor as the C structure ``Bias``, whose first row and column have number `start` of the tensor."""
    address = t.data_ptr() + start * t.element_size()
    return kernels.structures["Bias"](
        address, *_batch_and_head_strides(t), row, column, factor, kernels.codes[TYPES[t.dtype]]
    )


def _batch_and_head_strides(t: Tensor) -> tuple[int, int]:
    """Return the strides of the axes batch and heads; 0 for an axis of size 1, which stands for all."""
    return (0 if t.shape[0] == 1 else t.stride(0)), (0 if t.shape[1] == 1 else t.stride(1))
