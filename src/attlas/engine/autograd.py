"""The bridge to torch.autograd: one backward by recomputation serves every score and both products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attlas.autodiff import recorded_gradients
from attlas.engine import graph, reference, sdpa, tiled
from attlas.engine.dropout import Dropout
from attlas.engine.native import dot as native
from attlas.engine.native import dot_backward
from attlas.engine.native.family import Kernels
from attlas.engine.online import LARGEST, exact, larger
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, flatten, rebuild, spread_heads, sum_heads, tensors_of
from attlas.scores.base import Dot, Tokens

__all__ = ["Job", "pool", "pool_transposed", "record_lse"]

_ROUNDED = 64.0  # torch's kernel takes the log-sum-exp in float32, and its weights are then wrong by 4e-6 of themselves


@dataclass(frozen=True, eq=False)
class Job:
    """What one product needs besides the tensors that it is differentiated in.

    Parameters
    ----------
    problem : Problem
        The matrix; where `dot` is given, with a score that is that dot product.
    tokens : tuple of Tokens
        Projected queries and keys, with their graph.
    plan : Plan
        How to compute.
    dot : Dot, optional
        The score as a dot product, for torch's kernels; None runs the tiled backend.
    dropout : Dropout, optional
        Factors of the weights.
    form : Form, optional
        The logits as the native kernels compute them, where those give the output.
    kernels : Kernels, optional
        Native kernels of a score that is no dot product; where they have none for a step, the tiled backend takes it.
    """

    problem: Problem
    tokens: tuple[Tokens, Tokens]
    plan: Plan
    dot: Dot | None = None
    dropout: Dropout | None = None
    form: native.Form | None = None
    kernels: Kernels | None = None

    def inputs(self) -> list[Tensor]:
        """Return the tensors that want a gradient besides values and sink: tokens, then parameters."""
        return [*flatten(self.tokens[0]), *flatten(self.tokens[1]), *self.parameters()]

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the score that its forward may use."""
        return [t for t in tensors_of(self.problem.score) if t.requires_grad]

    def from_inputs(self, tensors: list[Tensor]) -> tuple[Tokens, Tokens]:
        """Put the tensors of `inputs` back into the form of the tokens."""
        rest = list(tensors)
        return rebuild(self.tokens[0], rest), rebuild(self.tokens[1], rest)


def pool(job: Job, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``A @ v`` and the log-sum-exp (without a graph)."""
    sink = job.problem.sink
    if not torch.is_grad_enabled():
        return _forward(job, job.tokens, v)[:2]
    found: tuple[Tensor, Tensor] = _Pool.apply(job, v, sink, *job.inputs())  # type: ignore[no-untyped-call]
    return found


def pool_transposed(job: Job, x: Tensor, lse: Tensor) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e)."""
    if not torch.is_grad_enabled():
        return _transposed(job, job.tokens, lse, x).to(x.dtype)
    out: Tensor = _PoolTransposed.apply(  # type: ignore[no-untyped-call]
        job, lse, x, job.problem.sink, *job.inputs()
    )
    return out


def record_lse(job: Job, lse: Tensor) -> Tensor:
    """Return the log-sum-exp, known already, with its graph."""
    found: Tensor = _LogSumExp.apply(job, lse, job.problem.sink, *job.inputs())  # type: ignore[no-untyped-call]
    return found


def _forward(job: Job, tokens: tuple[Tokens, Tokens], v: Tensor) -> tuple[Tensor, Tensor, Job]:
    """Return output, log-sum-exp, and the job as it was done."""
    if job.form is not None:
        by_kernel = native.forward(job.problem, job.form, v)
        if by_kernel is not None:
            return *by_kernel, job
    if job.dot is not None:
        found = sdpa.forward(job.problem, job.dot, v, job.plan)
        if found is not None:
            return *found, job
        job = replace(job, dot=None)
    if job.kernels is not None:
        found = job.kernels.forward(job.problem, tokens, v, job.plan)
        if found is not None:
            return *found, job
        job = replace(job, kernels=None)
    return *tiled.forward(job.problem, tokens, v, job.plan, job.dropout), job


def _transposed(job: Job, tokens: tuple[Tokens, Tokens], lse: Tensor, x: Tensor) -> Tensor:
    """Return ``A.mT @ x`` in the dtype of the sums."""
    found = None
    if job.kernels is not None:
        found = job.kernels.transposed(job.problem, tokens, lse, x, job.plan)
    return tiled.transposed(job.problem, tokens, lse, x, job.plan) if found is None else found


def _backward_by_kernel(
    job: Job, inputs: list[Tensor], v: Tensor, lse: Tensor, grad: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of q, k and v from the native kernels of dot products; None where those do not run."""
    if job.form is None or job.parameters() or (job.dot is not None and not dot_backward.pays(job.problem, job.plan)):
        return None
    form = replace(job.form, q=inputs[0], k=inputs[1])
    known = exact(lse)
    if known is None or larger(known, LARGEST):
        return None
    return dot_backward.backward(job.problem, form, v, known, grad, delta)


def _backward(
    job: Job, tokens: tuple[Tokens, Tokens], lse: Tensor, left: Tensor, right: Tensor, delta: Tensor
) -> tiled.Gradients:
    """Return the gradients of ``sum_ij A_ij (left_i · right_j)``."""
    given = job.problem, tokens, job.parameters(), lse, left, right, delta, job.plan
    found = None if job.kernels is None else job.kernels.backward(*given)
    return tiled.backward(*given, job.dropout) if found is None else tiled.Gradients(*found)


class _Pool(torch.autograd.Function):
    """Attention pooling: ``A @ v``."""

    @staticmethod
    def forward(ctx: Any, job: Job, v: Tensor, sink: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, ctx.job = _forward(job, job.from_inputs(list(inputs)), v)
        # A view could not be changed in place by who gets it. What shares its memory counts changes with it.
        out = out.data if out._is_view() else out
        ctx.save_for_backward(v, lse, sink, *inputs)
        ctx.out, ctx.version = out.detach(), out._version
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        v, lse, sink, *inputs = ctx.saved_tensors
        problem, dtype = job.problem, job.problem.dtype
        problem.check_unchanged("backward of A @ v")
        if torch.is_grad_enabled():
            weights = _definition(job, inputs).weights
            keep = 1.0 if job.dropout is None else job.dropout.keep(problem.tile(*map(range, problem.shape)))
            pooled = torch.matmul(weights * keep, spread_heads(v, problem.shape[1]).to(dtype)).to(v.dtype)
            return None, *recorded_gradients(pooled, (v, sink, *inputs), grad)
        out = ctx.out
        if out._version != ctx.version:  # the user has changed it in place
            out = _forward(job, job.from_inputs(inputs), v)[0]
        delta = (grad.to(dtype) * out.to(dtype)).sum(dim=-1)
        d_sink = _sink_gradient(sink, lse, delta) if ctx.needs_input_grad[2] else None
        by_kernel = _backward_by_kernel(job, inputs, v, lse, grad, delta)
        if by_kernel is None and job.dot is not None and not job.parameters() and not larger(lse, _ROUNDED):
            dot = replace(job.dot, q=inputs[0], k=inputs[1])
            by_kernel = sdpa.backward(problem, dot, v, out, lse, grad, job.plan)
        if by_kernel is not None:
            d_q, d_k, d_v = by_kernel
            return None, d_v.to(v.dtype), d_sink, d_q.to(inputs[0].dtype), d_k.to(inputs[1].dtype)
        tokens = job.from_inputs(inputs)
        if exact(lse) is None or larger(lse, LARGEST):
            lse = tiled.forward(problem, tokens, v[..., :0], job.plan)[1]
        found = _backward(job, tokens, lse, grad, v, delta)
        d_v = sum_heads(found.pooled, v.shape[1]).to(v.dtype)
        return None, d_v, d_sink, *_cast(found, inputs)


class _PoolTransposed(torch.autograd.Function):
    """The transposed product: ``A.mT @ x``."""

    @staticmethod
    def forward(ctx: Any, job: Job, lse: Tensor, x: Tensor, sink: Tensor | None, *inputs: Tensor) -> Tensor:
        out = _transposed(job, job.from_inputs(list(inputs)), lse, x)
        ctx.job = job
        ctx.save_for_backward(lse, x, sink, *inputs)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        lse, x, sink, *inputs = ctx.saved_tensors
        job.problem.check_unchanged("backward of A.mT @ x")
        if torch.is_grad_enabled():
            pooled = torch.matmul(_definition(job, inputs).weights.mT, x.to(lse.dtype)).to(x.dtype)
            return None, None, *recorded_gradients(pooled, (x, sink, *inputs), grad)
        tokens = job.from_inputs(inputs)
        d_x, _, job = _forward(job, tokens, grad.to(job.problem.dtype))
        delta = (x.to(d_x.dtype) * d_x).sum(dim=-1)
        found = _backward(job, tokens, lse, x, grad, delta)
        d_sink = _sink_gradient(sink, lse, delta) if ctx.needs_input_grad[3] else None
        return None, None, d_x.to(x.dtype), d_sink, *_cast(found, inputs)


class _LogSumExp(torch.autograd.Function):
    """The log-sum-exp of each row: its gradient in the logits is the row of weights."""

    @staticmethod
    def forward(ctx: Any, job: Job, lse: Tensor, sink: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(lse, sink, *inputs)
        return lse.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        lse, sink, *inputs = ctx.saved_tensors
        job.problem.check_unchanged("backward of A.lse")
        if torch.is_grad_enabled():
            return None, None, *recorded_gradients(_definition(job, inputs).lse, (sink, *inputs), grad)
        ones = grad.new_ones(*job.problem.k.shape[:3], 1)
        found = _backward(job, job.from_inputs(inputs), lse, grad.unsqueeze(-1), ones, torch.zeros_like(grad))
        d_sink = _sink_gradient(sink, lse, -grad) if ctx.needs_input_grad[2] else None
        return None, None, d_sink, *_cast(found, inputs)


def _definition(job: Job, inputs: list[Tensor]) -> reference.Dense:
    return graph.dense("backward with create_graph=True", job.problem, tokens=job.from_inputs(inputs))


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sink: it has a weight and no value, and what it takes the others lose."""
    share = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
    share = torch.where(lse == -torch.inf, torch.zeros_like(share), share)
    return -(share * delta).sum(dim=(0, 2)).to(sink.dtype)


def _cast(found: tiled.Gradients, inputs: list[Tensor]) -> list[Tensor | None]:
    grads: list[Tensor | None] = [*found.q, *found.k, *found.parameters]
    return [None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
