"""Scaled dot products on the processor's widest vectors: output, log-sum-exp, statistics and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.native import decode, library, request
from attlas.engine.problem import Problem, match_heads, sum_heads
from attlas.errors import BackendError
from attlas.scores.base import Dot

ONE_THREAD = 1 << 23  # products below which threads cost more than they save
# Where keys and values are packed, an output is faster from so many products on, and for float32 and float16 from so
# many queries and products on; by measurement against torch's kernel.
_LARGE = 1 << 30
_QUERIES, _PRODUCTS = 512, 1 << 24
_AVX2_QUERIES, _AVX2_PRODUCTS = 1024, 1 << 28  # the same with AVX2, for every dtype
_AVX2_GRADIENTS = 1 << 24  # products from which gradients of 16-bit tokens are faster with AVX2, by measurement
_FEW = 16  # queries below which keys and values are not packed


def is_faster(problem: Problem) -> bool:
    """Return whether the kernels are the faster way for an output of this size, by measurement."""
    if not library.fast():
        return False
    if problem.q.shape[2] < _FEW:
        return decode.is_faster(problem)
    products = problem.q.numel() * problem.k.shape[2]
    if not library.wide():
        return problem.q.shape[2] >= _AVX2_QUERIES and products >= _AVX2_PRODUCTS
    if problem.q.dtype in (torch.float32, torch.float16) and problem.q.shape[2] >= _QUERIES:
        return products >= _PRODUCTS
    return products >= _LARGE


@torch.no_grad()
def compute(
    problem: Problem, dot: Dot, wanted: Mapping[str, Any], *, v: Tensor | None = None, lse: Tensor | None = None
) -> dict[str, Tensor] | None:
    """Return what is wanted of the matrix, by the names of `request.compute`, in at most two passes.

    Parameters
    ----------
    problem : Problem
        The matrix.
    dot : Dot
        Its logits.
    wanted : mapping
        Names and what they need; also ``rounded`` (True) where the output will be rounded to the dtype of the tokens.
    v : Tensor, optional, shape (batch, value heads, n, e)
        Values; then ``out`` is found too.
    lse : Tensor, optional, shape (batch, heads, m)
        Log-sum-exp without the constant of each row, if it is known.

    Returns
    -------
    dict of str to Tensor, or None
        None where tokens hold NaN, infinity or numbers so large that products overflow.
    """
    dot, v = align_heads(dot, v)
    if lse is None and wanted.keys() & request.NEEDS_LSE:
        wanted = {**wanted, "lse": True}

    def run(rows: slice, fields: dict[str, Any]) -> bool:
        part = replace(dot, q=dot.q[:, :, rows])
        threads = _threads(part.q, part.k.shape[2])
        return succeeded(library.call("dot", **params(part, v), threads=threads, **fields), dot)

    rounded = int(wanted.get("rounded", False))
    return request.compute(problem, wanted, run, size=None if v is None else v.shape[-1], lse=lse, rounded=rounded)


def read(
    problem: Problem, dot: Dot, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
) -> dict[str, Tensor] | None:
    """Return what `compute` does, of the logits with the constant of each row: statistics speak of those."""
    if dot.row is None:
        return compute(problem, dot, wanted, v=v, lse=lse)
    found = compute(problem, dot, wanted, v=v, lse=None if lse is None else lse - dot.row)
    for name in ("lse", "max_logit", "mean"):
        if found is not None and name in found:
            found[name] = found[name] + dot.row
    return found


def align_heads(dot: Dot, v: Tensor | None) -> tuple[Dot, Tensor | None]:
    """Give keys and values as many heads as the other has, one dtype, and a last axis without gaps."""
    q, k = dot.q, dot.k.to(dot.q.dtype)
    if v is not None:
        k, v = match_heads(k, v.to(q.dtype), q.shape[1])
        v = contiguous_vectors(v)
    return replace(dot, q=contiguous_vectors(q), k=contiguous_vectors(k)), v


def contiguous_vectors(t: Tensor) -> Tensor:
    """Return a tensor whose last axis has no gaps."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def params(dot: Dot, v: Tensor | None) -> dict[str, Any]:
    """Return tokens and values in the fields of ``AttentionParams``; the caller keeps them alive."""
    batch, heads, m, d = dot.q.shape
    fields: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "key_heads": dot.k.shape[1],
        "m": m,
        "n": dot.k.shape[2],
        "d": d,
        "q": tensor4(dot.q),
        "k": tensor4(dot.k),
        "type": decode.type_of(dot.q.dtype),
        "scale": dot.scale,
        "cap": dot.cap,
    }
    return fields if v is None else fields | {"v": tensor4(v), "e": v.shape[-1]}


def succeeded(status: int, dot: Dot) -> bool:
    """Return True for a kernel that computed its results, False for one that found NaN, infinity or an overflow."""
    if status not in (library.code("DONE"), library.code("NOT_FINITE")):
        rule, fix = "a kernel must do what it was asked for.", "Plan(backend='tiled'), and please report it."
        raise BackendError(
            "attlas.engine.backends.native", rule, {"q": dot.q, "k": dot.k}, found=f"status {status}", fix=fix
        )
    return status == library.code("DONE")


def _threads(q: Tensor, n: int) -> int:
    """Return how many threads a call uses."""
    if q.shape[2] < _FEW:
        return decode.threads(q, n)
    return torch.get_num_threads() if q.numel() * n > ONE_THREAD else 1


def tensor4(t: Tensor) -> Any:
    """Return a tensor of four axes as the kernels see it; the caller keeps it alive."""
    return library.structure("Tensor4")(t.data_ptr(), *t.stride()[:3])


def backward_is_faster(problem: Problem) -> bool:
    """Return whether these kernels are a faster way back than torch's own, by measurement.

    Tokens of 16 bits are torch's where the kernels would multiply them with the vectors of AVX-512. With AVX2, torch
    has no instructions for them and takes five times as long.
    """
    if not library.fast():
        return False
    if problem.q.dtype.itemsize == 2 and library.instruction_set() != "amx":
        return not library.wide() and problem.q.numel() * problem.k.shape[2] >= _AVX2_GRADIENTS
    return is_faster(problem)


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
    aligned, values = align_heads(product, v)
    if values is None:
        return None
    q, k, values = (contiguous_vectors(t.detach().to(dtype)) for t in (aligned.q, aligned.k, values))
    grad, lse, delta = contiguous_vectors(grad.detach().to(dtype)), lse.contiguous(), delta.to(dtype, copy=True)
    column = None if column is None else column.to(dtype).contiguous()
    terms = {name: t.to(dtype) for name, t in (rows or {}).items()}
    d_q, d_k, d_v = (torch.zeros(t.shape, dtype=dtype, device="cpu") for t in (q, k, values))
    for block in request.row_blocks(problem):
        slices = block.slices
        part = d_q if len(block.rows) == problem.shape[2] else torch.empty_like(d_q[slices])
        known = [t[slices].contiguous() for t in (lse, delta, *terms.values())]
        sums = torch.zeros_like(known[1])
        # The tensors are in the dtype of the sums; the type of the tokens says how many of their digits count.
        fields = params(replace(product, q=q[slices], k=k), values) | block.mask
        threads = torch.get_num_threads() if q[slices].numel() * k.shape[2] > ONE_THREAD else 1
        fields |= {"type": kind, "threads": threads, "lse": known[0].data_ptr(), "lse_known": 1}
        status = library.call(
            "dot_backward",
            of=library.structure("AttentionParams")(**fields),
            grad=tensor4(grad[slices]),
            delta=known[1].data_ptr(),
            d_q=part.data_ptr(),
            d_k=d_k.data_ptr(),
            d_v=d_v.data_ptr(),
            column_sums=sums.data_ptr(),
            column=None if column is None else column.data_ptr(),
            **{name: t.data_ptr() for name, t in zip(terms, known[2:], strict=True)},
        )
        if not succeeded(status, product):
            return None
        delta[slices] += sums
        if part is not d_q:
            d_q[slices] = part
    return d_q, sum_heads(d_k, product.k.shape[1]), sum_heads(d_v, v.shape[1]), delta
