"""Operators of torch.library around the engine: what torch.compile and torch.export put into a graph.

Each takes tokens, a text and the tensors that the text names (see `attlas.matrix.compiled.text`), and chooses its
backend when it runs. Each has a form for tensors without numbers, and an operator for its gradient, which goes back
from the log-sum-exp of the forward. Results are contiguous and share no memory with anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.engine import online, operations
from attlas.engine.autodiff import autograd
from attlas.engine.backend import Request
from attlas.engine.dispatch import candidates
from attlas.engine.problem import Problem
from attlas.engine.statistic import TensorForm
from attlas.errors import public
from attlas.foundation.checks import accumulation_dtype, sum_dtype
from attlas.foundation.compat import autograd_in_operator
from attlas.foundation.indexing import as_range
from attlas.foundation.trees import tensors_in
from attlas.matrix.compiled.text import Described, statistics_in
from attlas.matrix.reads import Cells, LogSumExp, place_of
from attlas.scores.dot import ScaledDot

# ------------------------------------------------------------------------------------------------------------ helpers


def _exact_lse(of: Described, known: Tensor | None) -> Tensor:
    """Return the exact log-sum-exp: the known one, unless a kernel has rounded it too far."""
    lse = None if known is None else online.exact(known)
    return operations.log_sum_exp(of.problem, of.plan) if lse is None else lse


def _without_shared_memory(results: Sequence[Tensor]) -> list[Tensor]:
    """Return results as contiguous tensors of which no two share memory."""
    own: list[Tensor] = []
    for t in results:
        shared = any(t.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in own)
        own.append(t.clone(memory_format=torch.contiguous_format) if shared else t.contiguous())
    return own


def _graph_leaves(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors as leaves of a new graph; those of integers and truths have no gradient."""
    return [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]


def _pulled_back(results: Sequence[Any], grads: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient in each leaf, zeros where there is none, from the gradients of what was made of them."""
    pairs = [(t, g) for t, g in zip(results, grads, strict=False) if g is not None and t.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    outputs, slopes = zip(*pairs, strict=True) if pairs else ((), ())
    found = iter(torch.autograd.grad(outputs, wanted, slopes, allow_unused=True) if pairs else [None] * len(wanted))
    every = [next(found) if t.requires_grad else None for t in leaves]
    return _without_shared_memory([_zeros_like(t) if g is None else g for t, g in zip(leaves, every, strict=True)])


def _zeros_like(like: Tensor) -> Tensor:
    """Return contiguous zeros in the shape and dtype of a tensor."""
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def _sink_as_list(problem: Problem) -> list[Tensor]:
    """Return the sink of a problem, if it has one."""
    return [] if problem.sink is None else [problem.sink]


def _empty_tensors(*tensors: Tensor) -> list[Tensor]:
    """Return contiguous tensors of these shapes and dtypes, for a trace."""
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _lse_form(q: Tensor, keep: bool) -> Tensor:
    """Return the log-sum-exp of a trace: empty where none is kept for a gradient."""
    return online.empty_lse(tuple(q.shape[:3]), q.device) if keep else q.new_empty(0, dtype=sum_dtype(q.device))


def _floating_point_gradients(grads: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of tensors of floating point, None for the others."""
    return [g if t.is_floating_point() else None for g, t in zip(grads, tensors, strict=True)]


# ------------------------------------------------------------------------------------------------------------ product


@torch.library.custom_op("attlas::pool", mutates_args=())
def pool(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], text: str, keep: bool) -> tuple[Tensor, Tensor]:
    """Return ``A @ v``, and the log-sum-exp, empty unless it is kept for the gradient.

    `text` and `tensors` describe the problem beside its tokens, see `Described`.
    """
    with torch.no_grad():
        of = Described(text, q, k, tensors)
        out, known = operations.multiply(of.problem, v, of.plan, of.dropout)
        lse = _exact_lse(of, known) if keep else _lse_form(q, keep)
        out, lse = _without_shared_memory([out, lse])
    return out, lse


@pool.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], text: str, keep: bool) -> tuple[Tensor, Tensor]:
    # Shapes and dtypes of the results, for a trace without numbers.
    return v.new_empty(*q.shape[:3], v.shape[-1]), _lse_form(q, keep)


@torch.library.custom_op("attlas::pool_backward", mutates_args=())
def pool_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], text: str
) -> list[Tensor]:
    """Return the gradients in q, k, v and the tensors.

    `text` and `tensors` describe the problem beside its tokens, see `Described`; `grad` is the gradient in `out`.
    """
    leaves = _graph_leaves(q, k, *tensors)
    with autograd_in_operator(), torch.enable_grad():
        of = Described(text, leaves[0], leaves[1], leaves[2:])
        problem = of.problem
        learned = of.learned or bool(problem.parameters)
        request = Request(problem, problem.project(), of.plan, of.dropout, learned=learned)
        backend = next(candidates(request, "output"))
        dtype = v.dtype if request.dot is None or not backend.takes_fused else request.dot.q.dtype
        request = backend.prepare(request)
        inputs = request.inputs()
        with torch.no_grad(), public("backward of A @ v"):
            values = v.to(dtype)
            if learned and dtype is not v.dtype:  # see `product_gradients`: the rounding of the output would add up
                out = autograd.forward(request, values, candidates(request, "output"))[0]
            d_v, d_sink, found = autograd.product_gradients(
                request, inputs, values, problem.sink, lse, out.to(dtype), grad.to(dtype)
            )
        d_q, d_k, *rest = _pulled_back([*inputs, *_sink_as_list(problem)], [*found, d_sink], leaves)
    d_v = _zeros_like(v) if d_v is None else d_v.to(v.dtype)
    return _without_shared_memory([d_q, d_k, d_v, *rest])


@pool_backward.register_fake
def _(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], text: str
) -> list[Tensor]:
    # Shapes and dtypes of the results, for a trace without numbers.
    return _empty_tensors(q, k, v, *tensors)


def _pool_setup(ctx: Any, inputs: Any, output: Any) -> None:
    """Save what `pool_backward` needs."""
    q, k, v, tensors, ctx.text, _ = inputs
    ctx.save_for_backward(*output, q, k, v, *tensors)
    ctx.mark_non_differentiable(output[1])


def _pool_gradient(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    """Return the gradients in the arguments of `pool`; None for text and flag."""
    out, lse, q, k, v, *tensors = ctx.saved_tensors
    d_q, d_k, d_v, *rest = pool_backward(grad, out, lse, q, k, v, tensors, ctx.text)
    return d_q, d_k, d_v, _floating_point_gradients(rest, tensors), None, None


pool.register_autograd(_pool_gradient, setup_context=_pool_setup)


# ------------------------------------------------------------------------------------------------- transposed product


@torch.library.custom_op("attlas::pool_transposed", mutates_args=())
def pool_transposed(q: Tensor, k: Tensor, x: Tensor, tensors: list[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """Return ``A.mT @ x``, and the log-sum-exp.

    `text` and `tensors` describe the problem beside its tokens, see `Described`.
    """
    with torch.no_grad():
        of = Described(text, q, k, tensors)
        lse = online.widened(operations.log_sum_exp(of.problem, of.plan))
        out, lse = _without_shared_memory([operations.multiply_transposed(of.problem, x, lambda: lse, of.plan), lse])
    return out, lse


@pool_transposed.register_fake
def _(q: Tensor, k: Tensor, x: Tensor, tensors: list[Tensor], text: str) -> tuple[Tensor, Tensor]:
    # Shapes and dtypes of the results, for a trace without numbers.
    return x.new_empty(*q.shape[:2], k.shape[2], x.shape[-1]), _lse_form(q, keep=True)


@torch.library.custom_op("attlas::pool_transposed_backward", mutates_args=())
def pool_transposed_backward(
    grad: Tensor, lse: Tensor, q: Tensor, k: Tensor, x: Tensor, tensors: list[Tensor], text: str
) -> list[Tensor]:
    """Return the gradients in q, k, x and the tensors.

    `text` and `tensors` describe the problem beside its tokens, see `Described`; `grad` is the gradient in the product.
    """
    leaves = _graph_leaves(q, k, *tensors)
    with autograd_in_operator(), torch.enable_grad():
        of = Described(text, leaves[0], leaves[1], leaves[2:])
        problem = of.problem
        request = Request(problem, problem.project(), of.plan)
        request = next(candidates(request, "transposed")).prepare(request)
        inputs = request.inputs()
        with torch.no_grad(), public("backward of A.mT @ x"):
            d_x, d_sink, found = autograd.transposed_gradients(request, inputs, x, problem.sink, lse, grad)
        d_q, d_k, *rest = _pulled_back([*inputs, *_sink_as_list(problem)], [*found, d_sink], leaves)
    return _without_shared_memory([d_q, d_k, d_x, *rest])


@pool_transposed_backward.register_fake
def _(grad: Tensor, lse: Tensor, q: Tensor, k: Tensor, x: Tensor, tensors: list[Tensor], text: str) -> list[Tensor]:
    # Shapes and dtypes of the results, for a trace without numbers.
    return _empty_tensors(q, k, x, *tensors)


def _transposed_setup(ctx: Any, inputs: Any, output: Any) -> None:
    """Save what `pool_transposed_backward` needs."""
    q, k, x, tensors, ctx.text = inputs
    ctx.save_for_backward(output[1], q, k, x, *tensors)
    ctx.mark_non_differentiable(output[1])


def _transposed_gradient(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    """Return the gradients in the arguments of `pool_transposed`; None for the text."""
    lse, q, k, x, *tensors = ctx.saved_tensors
    d_q, d_k, d_x, *rest = pool_transposed_backward(grad, lse, q, k, x, tensors, ctx.text)
    return d_q, d_k, d_x, _floating_point_gradients(rest, tensors), None


pool_transposed.register_autograd(_transposed_gradient, setup_context=_transposed_setup)


# --------------------------------------------------------------------------------------------------------- statistics


@torch.library.custom_op("attlas::statistics", mutates_args=())
def statistics(q: Tensor, k: Tensor, tensors: list[Tensor], text: str, keep: bool) -> list[Tensor]:
    """Return the tensors of the results in order, and the log-sum-exp, empty unless it is kept for the gradient.

    `text` and `tensors` describe the problem beside its tokens, and the statistics, see `Described`.
    """
    with torch.no_grad():
        of = Described(text, q, k, tensors)
        are_lse = [isinstance(statistic, LogSumExp) for statistic in of.asked]
        # What asks for the log-sum-exp itself gets the one that is kept; the others are collected.
        others = [statistic for statistic, of_lse in zip(of.asked, are_lse, strict=True) if not of_lse]
        found, known = operations.collect(of.problem, others, of.plan) if others else ([], None)
        lse = _exact_lse(of, known) if keep or any(are_lse) else _lse_form(q, keep)
        given = iter(found)
        results = [online.rounded(lse) if of_lse else next(given) for of_lse in are_lse]
        return _without_shared_memory([*tensors_in(results), lse if keep else _lse_form(q, keep)])


def _result_forms(q: Tensor, k: Tensor, tensors: list[Tensor], text: str) -> list[Any]:
    """Return shape and dtype (`TensorForm`) of each result of the statistics that a text asks for."""
    problem = Problem(q, k, ScaledDot(), None, None)  # forms depend on sizes and dtypes alone
    return [statistic.forms(problem) for statistic in statistics_in(text, tensors)]


def flat_forms(forms: Any) -> list[TensorForm]:
    """Return the forms of all tensors of results, in order."""
    if isinstance(forms, TensorForm):
        return [forms]
    return [form for part in forms for form in flat_forms(part)]


@statistics.register_fake
def _(q: Tensor, k: Tensor, tensors: list[Tensor], text: str, keep: bool) -> list[Tensor]:
    # Shapes and dtypes of the results, for a trace without numbers.
    forms = flat_forms(_result_forms(q, k, tensors, text))
    return [*(q.new_empty(shape, dtype=dtype) for shape, dtype in forms), _lse_form(q, keep)]


@torch.library.custom_op("attlas::statistics_backward", mutates_args=())
def statistics_backward(
    grads: list[Tensor], results: list[Tensor], lse: Tensor, q: Tensor, k: Tensor, tensors: list[Tensor], text: str
) -> list[Tensor]:
    """Return the gradients in q, k and the tensors, from those of the results of floating point.

    `text` and `tensors` describe the problem beside its tokens, and the statistics, see `Described`.
    """
    leaves = _graph_leaves(q, k, *tensors)
    with autograd_in_operator(), torch.enable_grad():
        of = Described(text, leaves[0], leaves[1], leaves[2:])
        every = results_of([statistic.forms(of.problem) for statistic in of.asked], list(results))
        # Places and counts have no gradient.
        asked = [statistic for statistic in of.asked if statistic.differentiable]
        known = [result for statistic, result in zip(of.asked, every, strict=True) if statistic.differentiable]
        # The statistics are recorded without computing them: results and log-sum-exp are known.
        found, _ = operations.record(of.problem, asked, of.plan, lambda: (known, lse))
        outputs = [t for t in tensors_in(found) if t.is_floating_point()]
        return _pulled_back(outputs, grads, leaves)


@statistics_backward.register_fake
def _(
    grads: list[Tensor], results: list[Tensor], lse: Tensor, q: Tensor, k: Tensor, tensors: list[Tensor], text: str
) -> list[Tensor]:
    # Shapes and dtypes of the results, for a trace without numbers.
    return _empty_tensors(q, k, *tensors)


def results_of(forms: Any, tensors: list[Tensor]) -> Any:
    """Return results of these forms from their tensors in order, which are taken off the list."""
    if isinstance(forms, TensorForm):
        return tensors.pop(0)
    parts = [results_of(part, tensors) for part in forms]
    return type(forms)(*parts) if hasattr(forms, "_fields") else parts


def _statistics_setup(ctx: Any, inputs: Any, output: Any) -> None:
    """Save what `statistics_backward` needs; positions, counts and the log-sum-exp have no gradient."""
    q, k, tensors, ctx.text, _ = inputs
    ctx.count = len(output)
    ctx.save_for_backward(*output, q, k, *tensors)
    ctx.mark_non_differentiable(output[-1], *(t for t in output[:-1] if not t.is_floating_point()))


def _statistics_gradient(ctx: Any, grads: Any) -> Any:
    """Return the gradients in the arguments of `statistics`; None for text and flag."""
    *results, lse = ctx.saved_tensors[: ctx.count]
    q, k, *tensors = ctx.saved_tensors[ctx.count :]
    given = [
        torch.zeros_like(t) if g is None else g for t, g in zip(results, grads, strict=False) if t.is_floating_point()
    ]
    d_q, d_k, *rest = statistics_backward(given, results, lse, q, k, tensors, ctx.text)
    return d_q, d_k, _floating_point_gradients(rest, tensors), None, None


statistics.register_autograd(_statistics_gradient, setup_context=_statistics_setup)


# -------------------------------------------------------------------------------------------------------------- cells


@torch.library.custom_op("attlas::cells", mutates_args=())
def cells(
    q: Tensor, k: Tensor, rows: Tensor, columns: Tensor, tensors: list[Tensor], text: str, logits: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return weights or log-weights of some rows and columns, and the log-sum-exp, empty unless it is kept.

    Rows and columns are int64 on the CPU, shapes (rows,) and (columns,).

    `text` and `tensors` describe the problem beside its tokens, see `Described`.
    """
    with torch.no_grad():
        of = Described(text, q, k, tensors)
        lse = online.widened(operations.log_sum_exp(of.problem, of.plan)) if keep else None
        at = place_of(of.problem, as_range(rows), as_range(columns))  # tiles of a range can be skipped
        found = operations.cells(of.problem, at, of.plan, lse, "logits" if logits else "weights")
        found, lse = _without_shared_memory([found, _lse_form(q, keep) if lse is None else lse])
    return found, lse


@cells.register_fake
def _(
    q: Tensor, k: Tensor, rows: Tensor, columns: Tensor, tensors: list[Tensor], text: str, logits: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    # Shapes and dtypes of the results, for a trace without numbers.
    dtype = accumulation_dtype(q.dtype)
    return q.new_empty(*q.shape[:2], rows.shape[0], columns.shape[0], dtype=dtype), _lse_form(q, keep)


@torch.library.custom_op("attlas::cells_backward", mutates_args=())
def cells_backward(
    grad: Tensor,
    found: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    columns: Tensor,
    tensors: list[Tensor],
    text: str,
    logits: bool,
) -> list[Tensor]:
    """Return the gradients in q, k and the tensors.

    `text` and `tensors` describe the problem beside its tokens, see `Described`; `found` are the cells, and `grad` is
    the gradient in them.
    """
    leaves = _graph_leaves(q, k, *tensors)
    with autograd_in_operator(), torch.enable_grad():
        of = Described(text, leaves[0], leaves[1], leaves[2:])
        # The read is recorded without computing it: its result and log-sum-exp are known.
        statistic = Cells(rows, columns, logits)
        recorded, _ = operations.record(of.problem, [statistic], of.plan, lambda: ([found], lse))
        return _pulled_back(recorded, [grad], leaves)


@cells_backward.register_fake
def _(
    grad: Tensor,
    found: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    columns: Tensor,
    tensors: list[Tensor],
    text: str,
    logits: bool,
) -> list[Tensor]:
    # Shapes and dtypes of the results, for a trace without numbers.
    return _empty_tensors(q, k, *tensors)


def _cells_setup(ctx: Any, inputs: Any, output: Any) -> None:
    """Save what `cells_backward` needs."""
    q, k, rows, columns, tensors, ctx.text, ctx.logits, _ = inputs
    ctx.save_for_backward(*output, q, k, rows, columns, *tensors)
    ctx.mark_non_differentiable(output[1])


def _cells_gradient(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    """Return the gradients in the arguments of `cells`; None for places, text and flags."""
    found, lse, q, k, rows, columns, *tensors = ctx.saved_tensors
    d_q, d_k, *rest = cells_backward(grad, found, lse, q, k, rows, columns, tensors, ctx.text, ctx.logits)
    return d_q, d_k, None, None, _floating_point_gradients(rest, tensors), None, None, None


cells.register_autograd(_cells_gradient, setup_context=_cells_setup)
