"""Scaled dot products on the processor's widest vectors: output, log-sum-exp, statistics and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.native import bias, library, request
from attlas.engine.backends.native.decode import TYPES
from attlas.engine.costs import ONE_THREAD, threads_for
from attlas.engine.outputs import NEEDS_LSE
from attlas.engine.problem import Problem, match_heads, sum_heads
from attlas.errors import BackendError
from attlas.scores.base import Dot


@torch.no_grad()
def compute(
    problem: Problem,
    dot: Dot,
    wanted: Mapping[str, Any],
    *,
    v: Tensor | None = None,
    lse: Tensor | None = None,
    rounded: bool = False,
) -> dict[str, Tensor] | None:
    """Return the wanted results, by the names of `attlas.engine.outputs`, in at most two passes.

    Parameters
    ----------
    problem : Problem
        The matrix.
    dot : Dot
        Its logits.
    wanted : mapping
        Names and what they need.
    v : Tensor, optional, shape (batch, value heads, n, e)
        Values; then ``out`` is found too.
    lse : Tensor, optional, shape (batch, heads, m)
        Log-sum-exp without the constant of each row, if it is known.
    rounded : bool, default False
        Whether the output will be rounded to the dtype of the tokens.

    Returns
    -------
    dict of str to Tensor, or None
        None where tokens hold NaN, infinity or numbers so large that products overflow.
    """
    kernels = library.current()
    q, k, v = _aligned_tokens(dot, v)
    if lse is None and wanted.keys() & NEEDS_LSE:
        wanted = {**wanted, "lse": True}

    def run(rows: slice, fields: dict[str, Any]) -> bool:
        """Compute some rows, with results in `fields`; return False if the numbers need another backend."""
        part = q[:, :, rows]
        threads = threads_for(part, k.shape[2])
        # What the fields point to is kept in `_buffers` until the call returns.
        places, _buffers = ({}, []) if dot.bias is None else bias.fields(kernels, problem, rows)
        status = kernels.call("dot", **params(kernels, dot, part, k, v), threads=threads, **places, **fields)
        return succeeded(kernels, status, dot)

    return request.compute(problem, wanted, run, v=v, lse=lse, rounded=int(rounded))


def read(
    problem: Problem, dot: Dot, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
) -> dict[str, Tensor] | None:
    """Return the results of `compute` for the logits with the constant of each row, which statistics are about.

    A logit is ``scale q_i · k_j + row_i``. The kernels leave `row` out, since softmax does not see it; log-sum-exp,
    largest logit and mean get it back here.
    """
    if dot.row is None:
        return compute(problem, dot, wanted, v=v, lse=lse)
    found = compute(problem, dot, wanted, v=v, lse=None if lse is None else lse - dot.row)
    for name in ("lse", "max_logit", "mean"):
        if found is not None and name in found:
            found[name] = found[name] + dot.row
    return found


def _aligned_tokens(dot: Dot, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return queries, keys and values of one dtype, whose last axis has no gaps; keys and values have as many heads."""
    q, k = dot.q, dot.k.to(dot.q.dtype)
    if v is None:
        q, k = contiguous_vectors(q, k)
        return q, k, None
    k, v = match_heads(k, v.to(q.dtype), q.shape[1])
    q, k, v = contiguous_vectors(q, k, v)
    return q, k, v


def contiguous_vectors(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose last axes have no gaps."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def params(kernels: library.Kernels, dot: Dot, q: Tensor, k: Tensor, v: Tensor | None) -> dict[str, Any]:
    """Return tokens and values in the fields of ``AttentionParams``; the caller keeps them alive."""
    batch, heads, m, d = q.shape
    fields: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "key_heads": k.shape[1],
        "m": m,
        "n": k.shape[2],
        "d": d,
        "type": kernels.codes[TYPES[dot.q.dtype]],
        "scale": dot.scale,
        "cap": dot.cap,
    }
    if v is None:
        return fields | kernels.tensors4(q=q, k=k)
    return fields | kernels.tensors4(q=q, k=k, v=v) | {"e": v.shape[-1]}


def succeeded(kernels: library.Kernels, status: int, dot: Dot) -> bool:
    """Return True for a kernel that computed its results, False for one that found NaN, infinity or an overflow."""
    if status == kernels.codes["DONE"]:
        return True
    if status != kernels.codes["NOT_FINITE"]:
        rule, fix = "a kernel must do what it was asked for.", "Plan(backend='tiled'), and please report it."
        raise BackendError(rule, f"status {status}", fix, q=dot.q, k=dot.k, where="attlas.engine.backends.native")
    return False


@torch.no_grad()
def backward(
    problem: Problem,
    product: Dot,
    v: Tensor,
    lse: Tensor,
    grad: Tensor,
    delta: Tensor,
    column: Tensor | None = None,
    rows: Mapping[str, Tensor] | None = None,
    places: bias.PlaceGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return the gradients of the dot product's q and k and of v, in the dtype of the sums, and the rows' delta.

    Parameters
    ----------
    problem : Problem
        The matrix.
    product : Dot
        Its logits.
    v : Tensor, shape (batch, value heads, n, e)
        Values.
    lse : Tensor, shape (batch, heads, m)
        Log-sum-exp without the constant of each row.
    grad : Tensor, shape (batch, heads, m, e)
        Gradient of the output.
    delta : Tensor, shape (batch, heads, m)
        Sum over each row of the weights times the gradient in them, without that of `column`, which is added.
    column : Tensor, optional, shape (batch, heads, n)
        A further term of the gradient in the weights of each column.
    rows : mapping of str to Tensor, optional, shape (batch, heads, m)
        Further terms, by the names of the structure ``DotBackward``.
    places : PlaceGradients, optional
        What the gradients in the logits are summed up to, for those of the score of places.

    Returns
    -------
    tuple of Tensor, or None
        None where numbers are not finite or so large that products overflow.
    """
    kernels, dtype = library.current(), problem.dtype
    q, k, values = _aligned_tokens(product, v)
    if values is None:
        return None
    # The tensors are in the dtype of the sums; the type of the tokens says how many of their digits count.
    q, k, values, grad = contiguous_vectors(*[t.detach().to(dtype) for t in (q, k, values, grad)])
    lse, delta = lse.contiguous(), delta.to(dtype, copy=True)
    column = None if column is None else column.to(dtype).contiguous()
    terms = {name: t.to(dtype) for name, t in (rows or {}).items()}
    d_q, d_k, d_v = [torch.zeros(t.shape, dtype=dtype, device="cpu") for t in (q, k, values)]
    for block in request.row_blocks(problem):
        slices = block.slices
        part = d_q if len(block.rows) == problem.shape[2] else torch.empty_like(d_q[slices])
        known = [t[slices].contiguous() for t in (lse, delta, *terms.values())]
        sums = torch.zeros_like(known[1])
        queries = q[slices]
        # What the fields point to is kept in `_buffers` until the call returns.
        terms_of_places, _buffers = ({}, []) if product.bias is None else bias.fields(kernels, problem, slices[2])
        fields = params(kernels, product, queries, k, values) | terms_of_places | block.mask
        fields["threads"] = torch.get_num_threads() if queries.numel() * k.shape[2] > ONE_THREAD else 1
        fields |= {"lse": known[0].data_ptr(), "lse_known": 1}
        status = kernels.call(
            "dot_backward",
            of=kernels.structures["AttentionParams"](**fields),
            **kernels.tensors4(grad=grad[slices]),
            delta=known[1].data_ptr(),
            d_q=part.data_ptr(),
            d_k=d_k.data_ptr(),
            d_v=d_v.data_ptr(),
            column_sums=sums.data_ptr(),
            column=None if column is None else column.data_ptr(),
            **{name: t.data_ptr() for name, t in zip(terms, known[2:], strict=True)},
            **({} if places is None else {"places": places.fields(kernels, slices[2])}),
        )
        if not succeeded(kernels, status, product):
            return None
        delta[slices] += sums
        if part is not d_q:
            d_q[slices] = part
    return d_q, sum_heads(d_k, product.k.shape[1]), sum_heads(d_v, v.shape[1]), delta
