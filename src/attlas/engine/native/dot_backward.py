"""Gradients of scaled dot products on the processor's widest vectors, by recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attlas.engine.native import decode, dot, library, request
from attlas.engine.problem import Problem, sum_heads
from attlas.scores.base import Dot

_AVX2_WORTH = 1 << 24  # products from which gradients of 16-bit tokens are faster with AVX2, by measurement


def is_faster(problem: Problem) -> bool:
    """Return whether these kernels are a faster way back than torch's own, by measurement.

    Tokens of 16 bits are torch's where the kernels would multiply them with the vectors of AVX-512. With AVX2, torch
    has no instructions for them and takes five times as long.
    """
    if not library.fast():
        return False
    if problem.q.dtype.itemsize == 2 and library.instruction_set() != "amx":
        return not library.wide() and problem.q.numel() * problem.k.shape[2] >= _AVX2_WORTH
    return dot.is_faster(problem)


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

    Returns
    -------
    tuple of Tensor, or None
        None where numbers are not finite or so large that products overflow.
    """
    dtype, kind = problem.dtype, decode.type_of(product.q.dtype)
    aligned, values = dot.align_heads(product, v)
    if values is None:
        return None
    q, k, values = (dot.contiguous_vectors(t.detach().to(dtype)) for t in (aligned.q, aligned.k, values))
    grad, lse, delta = dot.contiguous_vectors(grad.detach().to(dtype)), lse.contiguous(), delta.to(dtype, copy=True)
    column = None if column is None else column.to(dtype).contiguous()
    terms = {name: t.to(dtype) for name, t in (rows or {}).items()}
    d_q, d_k, d_v = (torch.zeros(t.shape, dtype=dtype, device="cpu") for t in (q, k, values))
    for block in request.row_blocks(problem):
        slices = block.slices
        part = d_q if len(block.rows) == problem.shape[2] else torch.empty_like(d_q[slices])
        known = [t[slices].contiguous() for t in (lse, delta, *terms.values())]
        sums = torch.zeros_like(known[1])
        # The tensors are in the dtype of the sums; the type of the tokens says how many of their digits count.
        fields = dot.params(replace(product, q=q[slices], k=k), values) | block.mask
        threads = torch.get_num_threads() if q[slices].numel() * k.shape[2] > dot.ONE_THREAD else 1
        fields |= {"type": kind, "threads": threads, "lse": known[0].data_ptr(), "lse_known": 1}
        status = library.call(
            "dot_backward",
            of=library.structure("AttentionParams")(**fields),
            grad=dot.tensor4(grad[slices]),
            delta=known[1].data_ptr(),
            d_q=part.data_ptr(),
            d_k=d_k.data_ptr(),
            d_v=d_v.data_ptr(),
            column_sums=sums.data_ptr(),
            column=None if column is None else column.data_ptr(),
            **{name: t.data_ptr() for name, t in zip(terms, known[2:], strict=True)},
        )
        if not dot.succeeded(status, product):
            return None
        delta[slices] += sums
        if part is not d_q:
            d_q[slices] = part
    return d_q, sum_heads(d_k, product.k.shape[1]), sum_heads(d_v, v.shape[1]), delta
