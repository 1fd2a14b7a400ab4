"""The bridge to torch.autograd: one backward by recomputation serves every score and both products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attlas.autodiff import recorded_gradients
from attlas.engine import graph, reference
from attlas.engine.backend import Backend, Gradients, Request
from attlas.engine.dispatch import candidates
from attlas.engine.online import share_of
from attlas.engine.problem import full_precision, spread_heads, sum_heads

__all__ = ["pool", "pool_transposed", "record_lse"]


def pool(request: Request, v: Tensor, backends: Iterable[Backend]) -> tuple[Tensor, Tensor]:
    """Return ``A @ v`` and the log-sum-exp (without a graph)."""
    if not torch.is_grad_enabled():
        return _forward(request, v, backends)
    pooled: tuple[Tensor, Tensor] = _Pool.apply(  # type: ignore[no-untyped-call]
        request, backends, v, request.problem.sink, *request.inputs()
    )
    return pooled


def pool_transposed(request: Request, x: Tensor, lse: Tensor) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e)."""
    if not torch.is_grad_enabled():
        return _transposed(request, lse, x).to(x.dtype)
    out: Tensor = _PoolTransposed.apply(  # type: ignore[no-untyped-call]
        request, lse, x, request.problem.sink, *request.inputs()
    )
    return out


def record_lse(request: Request, lse: Tensor) -> Tensor:
    """Return the log-sum-exp, known already, with its graph."""
    recorded: Tensor = _LogSumExp.apply(  # type: ignore[no-untyped-call]
        request, lse, request.problem.sink, *request.inputs()
    )
    return recorded


@full_precision
def _forward(request: Request, v: Tensor, backends: Iterable[Backend]) -> tuple[Tensor, Tensor]:
    return next(result for backend in backends if (result := backend.forward(request, v)) is not None)


@full_precision
def _transposed(request: Request, lse: Tensor, x: Tensor) -> Tensor:
    """Return ``A.mT @ x`` in the dtype of the sums."""
    backends = candidates(request, "transposed")
    return next(out for backend in backends if (out := backend.transposed(request, lse, x)) is not None)


@full_precision
def _backward(
    request: Request, lse: Tensor, left: Tensor, right: Tensor, delta: Tensor, out: Tensor | None = None
) -> Gradients:
    """Return the gradients of ``sum_ij A_ij (left_i · right_j)``."""
    given = request, lse, left, right, delta, out
    backends = candidates(request, "backward")
    return next(gradients for backend in backends if (gradients := backend.backward(*given)) is not None)


class _Pool(torch.autograd.Function):
    """Attention pooling: ``A @ v``."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, backends: Iterable[Backend], v: Tensor, sink: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(request.with_inputs(inputs), v, backends)
        # A view could not be changed in place by who gets it. What shares its memory counts changes with it.
        out = out.data if out._is_view() else out
        ctx.save_for_backward(v, lse, sink, *inputs)
        ctx.request = request
        ctx.out, ctx.version = out.detach(), out._version
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        v, lse, sink, *inputs = ctx.saved_tensors
        request: Request = ctx.request.with_inputs(inputs)
        problem, dtype = request.problem, request.problem.dtype
        problem.check_unchanged("backward of A @ v")
        if torch.is_grad_enabled():
            weights = _definition(request).weights
            keep = 1.0 if request.dropout is None else request.dropout.keep(problem.tile(*map(range, problem.shape)))
            pooled = torch.matmul(weights * keep, spread_heads(v, problem.shape[1]).to(dtype)).to(v.dtype)
            return None, None, *recorded_gradients(pooled, (v, sink, *inputs), grad)
        out = ctx.out
        if out._version != ctx.version:  # the user has changed it in place
            out, lse = _forward(request, v, candidates(request, "output"))
        delta = (grad.to(dtype) * out.to(dtype)).sum(dim=-1)
        d_sink = _sink_gradient(sink, lse, delta) if ctx.needs_input_grad[3] else None
        gradients = _backward(request, lse, grad, v, delta, out)
        d_v = sum_heads(gradients.pooled, v.shape[1]).to(v.dtype)
        return None, None, d_v, d_sink, *_cast(gradients, inputs)


class _PoolTransposed(torch.autograd.Function):
    """The transposed product: ``A.mT @ x``."""

    @staticmethod
    def forward(ctx: Any, request: Request, lse: Tensor, x: Tensor, sink: Tensor | None, *inputs: Tensor) -> Tensor:
        out = _transposed(request.with_inputs(inputs), lse, x)
        ctx.request = request
        ctx.save_for_backward(lse, x, sink, *inputs)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lse, x, sink, *inputs = ctx.saved_tensors
        request: Request = ctx.request.with_inputs(inputs)
        request.problem.check_unchanged("backward of A.mT @ x")
        if torch.is_grad_enabled():
            exact = _definition(request)
            rows = x.to(lse.dtype)
            rows = rows * share_of(exact.lse, lse).unsqueeze(-1) if request.problem.partial else rows
            pooled = torch.matmul(exact.weights.mT, rows.to(exact.weights.dtype)).to(x.dtype)
            return None, None, *recorded_gradients(pooled, (x, sink, *inputs), grad)
        d_x, own = _forward(request, grad.to(request.problem.dtype), candidates(request, "transposed"))
        if request.problem.partial:
            d_x = (d_x * share_of(own, lse).unsqueeze(-1)).to(d_x.dtype)
        delta = (x.to(d_x.dtype) * d_x).sum(dim=-1)
        gradients = _backward(request, lse, x, grad, delta)
        d_sink = _sink_gradient(sink, lse, delta) if ctx.needs_input_grad[3] else None
        return None, None, d_x.to(x.dtype), d_sink, *_cast(gradients, inputs)


class _LogSumExp(torch.autograd.Function):
    """The log-sum-exp of each row: its gradient in the logits is the row of weights."""

    @staticmethod
    def forward(ctx: Any, request: Request, lse: Tensor, sink: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.request = request
        ctx.save_for_backward(lse, sink, *inputs)
        return lse.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lse, sink, *inputs = ctx.saved_tensors
        request: Request = ctx.request.with_inputs(inputs)
        request.problem.check_unchanged("backward of A.lse")
        if torch.is_grad_enabled():
            return None, None, *recorded_gradients(_definition(request).lse, (sink, *inputs), grad)
        ones = grad.new_ones(*request.problem.k.shape[:3], 1)
        gradients = _backward(request, lse, grad.unsqueeze(-1), ones, torch.zeros_like(grad))
        d_sink = _sink_gradient(sink, lse, -grad) if ctx.needs_input_grad[2] else None
        return None, None, d_sink, *_cast(gradients, inputs)


def _definition(request: Request) -> reference.Dense:
    return graph.dense("backward with create_graph=True", request.problem, tokens=request.tokens)


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sink: it has a weight and no value, and what it takes the others lose."""
    share = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
    share = torch.where(lse == -torch.inf, torch.zeros_like(share), share)
    return -(share * delta).sum(dim=(0, 2)).to(sink.dtype)


def _cast(gradients: Gradients, inputs: list[Tensor]) -> list[Tensor | None]:
    grads: list[Tensor | None] = [*gradients.q, *gradients.k, *gradients.parameters]
    return [None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
