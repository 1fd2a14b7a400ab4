"""The bridge to torch.autograd: one backward by recomputation serves every score and both products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.engine.autodiff import graph
from attlas.engine.backend import Backend, Gradients, Request
from attlas.engine.backends import reference
from attlas.engine.dispatch import candidates
from attlas.engine.gradient import CellGradient
from attlas.engine.online import product, share_of
from attlas.engine.problem import full_precision, spread_heads, sum_heads, tree_flatten
from attlas.engine.statistic import Statistic
from attlas.errors import public
from attlas.foundation.trees import rebuilt, recorded_gradients, tensors_in

_CREATE_GRAPH = "backward with create_graph=True"

# Gives results of statistics and the log-sum-exp.
Collect: TypeAlias = Callable[[], tuple[list[Any], Tensor]]


def pool(request: Request, v: Tensor, backends: Iterable[Backend]) -> tuple[Tensor, Tensor]:
    """Return ``A @ v`` with its graph, and the log-sum-exp without."""
    pooled: tuple[Tensor, Tensor] = _PooledValues.apply(  # type: ignore[no-untyped-call]
        request, backends, v, request.problem.sink, *request.inputs()
    )
    return pooled


def pool_transposed(request: Request, x: Tensor, lse: Tensor) -> Tensor:
    """Return ``A.mT @ x`` with its graph, shape (batch, heads, n, e)."""
    out: Tensor = _PoolTransposed.apply(  # type: ignore[no-untyped-call]
        request, lse, x, request.problem.sink, *request.inputs()
    )
    return out


def collect(request: Request, statistics: Sequence[Statistic], compute: Collect) -> tuple[list[Any], Tensor]:
    """Return statistics with their graph, and the log-sum-exp without; `compute` gives both, without a graph."""
    values = [statistic.v for statistic in statistics]
    # The forward fills it with the results, whose nesting the flat list of tensors does not have.
    forms: list[Any] = []
    *found, lse = _CollectedStatistics.apply(  # type: ignore[no-untyped-call]
        request, statistics, compute, forms, *values, request.problem.sink, *request.inputs()
    )
    return [rebuilt(form, found) for form in forms], lse


@full_precision
def forward(request: Request, v: Tensor, backends: Iterable[Backend]) -> tuple[Tensor, Tensor]:
    """Return ``A @ v`` and the log-sum-exp by the first backend that gives them, without a graph."""
    return next(result for backend in backends if (result := backend.forward(request, v)) is not None)


@full_precision
def transposed(request: Request, lse: Tensor, x: Tensor) -> Tensor:
    """Return ``A.mT @ x`` in the dtype of the sums, without a graph."""
    backends = candidates(request, "transposed")
    return next(out for backend in backends if (out := backend.transposed(request, lse, x)) is not None)


@full_precision
def _token_gradients(request: Request, lse: Tensor, gradient: CellGradient, out: Tensor | None = None) -> Gradients:
    """Return the gradients of a loss from its gradient in each cell."""
    backends = candidates(request, "backward")
    return next(found for one in backends if (found := one.backward(request, lse, gradient, out)) is not None)


class _PooledValues(torch.autograd.Function):
    """Attention pooling: ``A @ v``."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, backends: Iterable[Backend], v: Tensor, sink: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute ``A @ v`` and the log-sum-exp without a graph; keep what the backward recomputes the weights from."""
        out, lse = forward(request.with_inputs(inputs), v, backends)
        # The caller may change the output in place, which autograd forbids for a view. `data` has the same memory.
        out = out.data if out._is_view() else out
        ctx.save_for_backward(v, lse, sink, *inputs)
        ctx.request = request
        # The backward needs the output. Its version counter tells whether the caller has changed it in place, which is
        # allowed: then the backward computes it again.
        ctx.out, ctx.version = out.detach(), out._version
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @public("backward of A @ v")
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True autograd records the gradients of the dense definition; without, a backend computes
        # them.
        v, lse, sink, *inputs = ctx.saved_tensors
        request: Request = ctx.request.with_inputs(inputs)
        problem = request.problem
        problem.check_unchanged()
        if torch.is_grad_enabled():
            logits, _, weights = _dense_with_graph(request)
            keep = 1.0 if request.dropout is None else request.dropout.keep(problem.tile(*map(range, problem.shape)))
            values = spread_heads(v, problem.shape[1]).to(problem.dtype)
            pooled = product(weights * keep, values, lambda: logits != -torch.inf).to(v.dtype)
            return None, None, *recorded_gradients(pooled, (v, sink, *inputs), grad)
        out = ctx.out
        if out._version != ctx.version:  # the user has changed it in place
            out, lse = forward(request, v, candidates(request, "output"))
        d_v, d_sink, found = product_gradients(
            request, inputs, v, sink if ctx.needs_input_grad[3] else None, lse, out, grad
        )
        return None, None, d_v, d_sink, *found


def product_gradients(
    request: Request,
    inputs: Sequence[Tensor],
    v: Tensor,
    sink: Tensor | None,
    lse: Tensor,
    out: Tensor,
    grad: Tensor,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Return the gradients in the values, in a sink where one is given, and in the inputs of a request.

    Parameters
    ----------
    request : Request
        The matrix, whose product ``A @ v`` this is.
    inputs : sequence of Tensor
        The inputs of the request, in whose dtypes their gradients are.
    v : Tensor, shape (batch, value heads, n, e)
        The values.
    sink : Tensor, shape (heads,), optional
        The sink, where its gradient is wanted.
    lse : Tensor, shape (batch, heads, m)
        Log-sum-exp of each row.
    out : Tensor, shape (batch, heads, m, e)
        The product.
    grad : Tensor, shape (batch, heads, m, e)
        Gradient of a loss in it.
    """
    dtype = request.problem.dtype
    # delta_i = grad_i · out_i, which is the sum over the row of weight times gradient in the weight.
    # `delta` of a row enters the gradient of each of its cells. The gradient of a parameter sums all cells, so that an
    # error of `delta` adds up: for parameters the output is computed again without its rounding to 16 bits.
    unrounded = out
    if request.learned and out.dtype.itemsize < dtype.itemsize:
        unrounded = forward(request, v.to(dtype), candidates(request, "output"))[0]
    delta = (grad.to(dtype) * unrounded.to(dtype)).sum(dim=-1)
    d_sink = None if sink is None else _sink_gradient(sink, lse, delta)
    gradients = _token_gradients(request, lse, CellGradient(grad, v, delta=delta), out)
    d_v = None if gradients.pooled is None else sum_heads(gradients.pooled, v.shape[1]).to(v.dtype)
    grads = [*gradients.q, *gradients.k, *gradients.parameters]
    return d_v, d_sink, [None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]


class _PoolTransposed(torch.autograd.Function):
    """The transposed product: ``A.mT @ x``."""

    @staticmethod
    def forward(ctx: Any, request: Request, lse: Tensor, x: Tensor, sink: Tensor | None, *inputs: Tensor) -> Tensor:
        """Compute ``A.mT @ x`` without a graph, from the log-sum-exp that is known."""
        out = transposed(request.with_inputs(inputs), lse, x)
        ctx.request = request
        ctx.save_for_backward(lse, x, sink, *inputs)
        return out.to(x.dtype)

    @staticmethod
    @public("backward of A.mT @ x")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True autograd records the gradients of the dense definition; without, a backend computes
        # them.
        lse, x, sink, *inputs = ctx.saved_tensors
        request: Request = ctx.request.with_inputs(inputs)
        request.problem.check_unchanged()
        if torch.is_grad_enabled():
            exact = _dense_with_graph(request)
            # Where the matrix has only a part of the keys (`partial`): its rows, normalized alone, times their share of
            # all keys.
            rows = x.to(lse.dtype)
            rows = rows * share_of(exact.lse, lse).unsqueeze(-1) if request.problem.partial else rows
            pooled = torch.matmul(exact.weights.mT, rows.to(exact.weights.dtype)).to(x.dtype)
            return None, None, *recorded_gradients(pooled, (x, sink, *inputs), grad)
        sink = sink if ctx.needs_input_grad[3] else None
        d_x, d_sink, found = transposed_gradients(request, inputs, x, sink, lse, grad)
        return None, None, d_x, d_sink, *found


def transposed_gradients(
    request: Request, inputs: Sequence[Tensor], x: Tensor, sink: Tensor | None, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Return the gradients of ``A.mT @ x``: in x, in a sink where one is given, and in the inputs of a request.

    Parameters are those of `product_gradients`; `grad` has the shape (batch, heads, n, e).
    """
    # The gradient in x is A @ grad. Where the matrix has a part of the keys alone (`partial`), backends normalize rows
    # over these alone, with log-sum-exp `own`: `share_of` rescales them to all keys.
    d_x, own = forward(request, grad.to(request.problem.dtype), candidates(request, "transposed"))
    if request.problem.partial:
        d_x = (d_x * share_of(own, lse).unsqueeze(-1)).to(d_x.dtype)
    delta = (x.to(d_x.dtype) * d_x).sum(dim=-1)
    gradients = _token_gradients(request, lse, CellGradient(x, grad, delta=delta))
    d_sink = None if sink is None else _sink_gradient(sink, lse, delta)
    return d_x.to(x.dtype), d_sink, _in_input_dtypes(gradients, inputs)


class _CollectedStatistics(torch.autograd.Function):
    """Statistics: one pass back over the tiles serves them all."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, statistics: Sequence[Statistic], compute: Collect, forms: list[Any], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute the statistics without a graph; return the tensors of all results, and the log-sum-exp."""
        results, lse = compute()
        found: list[Tensor] = []
        for result in results:
            # One tensor of a kernel may be the result of several statistics.
            found += [t.clone() if any(t is other for other in found) else t for t in tree_flatten(result)]
        forms += results
        # The results themselves would make a cycle that Python cannot free: they know this context.
        ctx.forms = [rebuilt(result, [lse.new_empty(0) for _ in tensors_in(result)]) for result in results]
        ctx.request, ctx.statistics = request, statistics
        ctx.save_for_backward(lse, *found, *given)
        ctx.mark_non_differentiable(lse, *(t for t in found if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return *found, lse

    @staticmethod
    @public("backward of A.collect()")
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        # `slopes` are the gradients of a loss in each tensor of the results, in order, and None for the log-sum-exp.
        # What was saved are these tensors, then the values of each statistic, the sink, and the inputs of the request.
        statistics: Sequence[Statistic] = ctx.statistics
        lse, *saved = ctx.saved_tensors
        found, given = saved[: len(slopes) - 1], saved[len(slopes) - 1 :]
        values, sink, inputs = given[: len(statistics)], given[len(statistics)], given[len(statistics) + 1 :]
        request: Request = ctx.request.with_inputs(inputs)
        request.problem.check_unchanged()
        if torch.is_grad_enabled():
            with public(_CREATE_GRAPH):
                exact = graph.collect(request.problem, statistics, request.tokens)
            pairs = [(t, g) for t, g in zip(tree_flatten(tuple(exact)), slopes, strict=False) if g is not None]
            results, grads = (list(some) for some in zip(*pairs, strict=True))
            return None, None, None, None, *recorded_gradients(results, given, grads)
        cells, replays = _cell_gradients(request, statistics, ctx.forms, found, list(slopes))
        gradients = _token_gradients(request, lse, cells)
        d_sink = None
        if ctx.needs_input_grad[4 + len(statistics)]:  # the sink, after four arguments and the values
            d_sink = _sink_gradient(sink, lse, gradients.delta)
            d_sink += sum(replay.sink for replay in replays if replay.sink is not None)
        d_values: list[Tensor | None] = [None] * len(values)
        if cells.left is not None and gradients.pooled is not None:
            # The values of several statistics stand side by side in `pooled`, along the last axis.
            with_values = [i for i, statistic in enumerate(statistics) if statistic.v is not None]
            sizes = [values[i].shape[-1] for i in with_values]
            for i, pooled in zip(with_values, gradients.pooled.split(sizes, dim=-1), strict=True):
                v = values[i]
                own = v.shape[:-2].numel() // request.problem.shape[0]
                d_values[i] = sum_heads(pooled, own).reshape(v.shape).to(v.dtype)
        return None, None, None, None, *d_values, d_sink, *_in_input_dtypes(gradients, inputs)


@full_precision
def _cell_gradients(
    request: Request, statistics: Sequence[Statistic], forms: list[Any], found: list[Tensor], slopes: list[Any]
) -> tuple[CellGradient, list[graph.Replay]]:
    """Return the gradient of a loss in each cell, from its gradients `slopes` in the results `found` of statistics.

    `forms` say how the flat list of tensors is nested in results. Statistics without a formula are returned as well:
    each replays its steps.
    """
    slopes = [
        torch.zeros_like(t) if slope is None and t.is_floating_point() else slope
        for t, slope in zip(found, slopes, strict=False)
    ]
    every, replays = [], []
    for statistic, form in zip(statistics, forms, strict=True):
        result, grad = rebuilt(form, found), rebuilt(form, slopes)
        cells = statistic.gradient(request.problem, grad, result) if statistic.describes("gradient") else None
        if cells is None:  # no formula: autograd goes through its steps, one tile at a time
            replays.append(graph.Replay(statistic, request.problem, request.plan, grad))
            cells = CellGradient(logits=(replays[-1],))
        every.append(cells)
    return reduce(CellGradient.__add__, every), replays


@public(_CREATE_GRAPH)
def _dense_with_graph(request: Request) -> reference.Dense:
    """Return the dense matrix with its graph, for a second derivative; refused above the limit of `graph.dense`."""
    return graph.dense(request.problem, tokens=request.tokens)


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sink: it has a weight and no value, and what it takes the others lose.

    ``-Σ_i exp(sink - lse_i) delta_i`` for each head, with ``delta_i = Σ_j A_ij dA_ij`` (see `CellGradient`).
    """
    share = share_of(sink.to(lse.dtype).view(1, -1, 1), lse)
    return -(share * delta).sum(dim=(0, 2)).to(sink.dtype)


def _in_input_dtypes(gradients: Gradients, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of tokens and parameters in the dtypes of the inputs."""
    grads: list[Tensor | None] = [*gradients.q, *gradients.k, *gradients.parameters]
    return [None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
