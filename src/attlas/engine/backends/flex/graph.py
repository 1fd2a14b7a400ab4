"""The gradients of FlexAttention: a graph of its own, which one backward uses up and a second one makes again.

A compiled program may overwrite what it saved as it goes back, and torch then refuses ``retain_graph=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.engine.backend import Request
from attlas.engine.backends.flex.programs import Run, defined
from attlas.engine.problem import tree_flatten
from attlas.errors import public
from attlas.foundation.trees import recorded_gradients

#: An output with its graph, and the tensors to whose gradients it leads.
_OutputWithGraph: TypeAlias = tuple[Tensor, list[Tensor | None]]


def recorded(request: Request, v: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    """Return the output of a program with its graph, and the log-sum-exp without."""
    apply: Callable[..., tuple[Tensor, Tensor]] = _FlexOutput.apply
    return apply(request, run, v, request.problem.sink, *request.inputs())


def _output_with_graph(
    request: Request, run: Run, v: Tensor, sink: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[_OutputWithGraph, Tensor]:
    """Return the output with a graph that begins at the tokens and values, and the log-sum-exp.

    The sink and the tensors of the score are read where they are held: the graph begins at them as well.
    """
    count = len(tree_flatten(request.tokens))
    v, *tokens = (t.detach().requires_grad_(t.requires_grad) for t in (v, *inputs[:count]))
    with torch.enable_grad():
        out, lse = run(request.with_inputs([*tokens, *inputs[count:]]), v)
    return (out, [v, sink, *tokens, *inputs[count:]]), lse


class _FlexOutput(torch.autograd.Function):
    """``A @ v`` by FlexAttention."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, run: Run, v: Tensor, sink: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The program runs with a graph of its own, which is kept for the first backward (`ctx.kept`).
        ctx.request, ctx.run = request, run
        ctx.save_for_backward(v, sink, *inputs)
        ctx.kept, lse = _output_with_graph(request, run, v, sink, inputs)
        out = ctx.kept[0].detach()
        out = out.data if out._is_view() else out  # so that who gets it can change it in place
        ctx.out, ctx.version = out.detach(), out._version
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @public("backward of A @ v")
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # The kept graph is used up. A second backward, or an output that was changed, runs the program again; with
        # create_graph=True autograd records the dense definition.
        v, sink, *inputs = ctx.saved_tensors
        request: Request = ctx.request.with_inputs(inputs)
        problem = request.problem
        problem.check_unchanged()
        if torch.is_grad_enabled():
            pooled = defined(request, v, range(problem.shape[2]))[0].to(v.dtype)
            return None, None, *recorded_gradients(pooled, (v, sink, *inputs), grad)
        kept, ctx.kept = ctx.kept, None
        if kept is None or ctx.out._version != ctx.version:  # the user has changed it in place
            kept, _lse = _output_with_graph(request, ctx.run, v, sink, inputs)
        out, leaves = kept
        wanted = [t for t, asked in zip(leaves, ctx.needs_input_grad[2:], strict=True) if asked]
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return None, None, *(next(found) if asked else None for asked in ctx.needs_input_grad[2:])
