"""Few queries, as when a model writes one token at a time: the short way to the kernels.

These read keys and values once, as they lie. At this size each microsecond of preparation counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.native import library
from attlas.engine.problem import Problem
from attlas.scores.dot import ScaledDot

_MOST = 4  # queries up to which the kernels are faster than torch's, by measurement
_WORTH = 1 << 18  # products from which they are, where no heads share their keys
_AVX2_WORTH = 1 << 21  # the same with AVX2, also where heads share their keys
_ALONE = 1 << 18  # products up to which one thread is as fast as more
# Names of the dtypes that tokens may have, in all kernels of dot products.
TYPES = {
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
}


def is_faster(problem: Problem) -> bool:
    """Return whether there are so few queries that these kernels are the faster way, where vectors are fast."""
    q, k = problem.q, problem.k
    if not library.wide():
        return q.shape[2] <= _MOST and q.numel() * k.shape[2] >= _AVX2_WORTH
    return q.shape[2] <= _MOST and (q.shape[1] != k.shape[1] or q.numel() * k.shape[2] >= _WORTH)


def threads(q: Tensor, n: int) -> int:
    """Return how many threads a call uses: reading is worth more than one earlier than multiplying is."""
    return torch.get_num_threads() if q.numel() * n > _ALONE else 1


def type_of(dtype: torch.dtype) -> int:
    """Return the code of a dtype of tokens."""
    return library.code(TYPES[dtype])


def fast_path(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return output and log-sum-exp of a plain scaled dot product of few queries; None for all else.

    None too where tokens hold NaN, infinity or numbers so large that products overflow.
    """
    q, k, score = problem.q, problem.k, problem.score
    if type(score) is not ScaledDot or problem.mask is not None or problem.sink is not None or q.device.type != "cpu":
        return None
    batch, heads, m, d = q.shape
    key_heads, n, e = k.shape[1], k.shape[2], v.shape[3]
    if m > _MOST or key_heads != v.shape[1] or q.dtype is not v.dtype or 0 in (q.numel(), k.numel(), e):
        return None
    strides = q.stride(), k.stride(), v.stride()
    if not strides[0][3] == strides[1][3] == strides[2][3] == 1:
        return None
    dtype = problem.dtype
    out = torch.empty(batch, heads, m, e, dtype=dtype, device="cpu")
    lse = torch.empty(batch, heads, m, dtype=torch.float64, device="cpu")
    tensor4 = library.structure("Tensor4")
    fields: dict[str, Any] = {
        name: tensor4(t.data_ptr(), *stride[:3]) for name, t, stride in zip("qkv", (q, k, v), strides, strict=True)
    }
    status = library.call(
        "dot",
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        m=m,
        n=n,
        d=d,
        e=e,
        type=type_of(q.dtype),
        threads=threads(q, n),
        scale=score.factor(d),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        **fields,
    )
    return (out.to(v.dtype), lse) if status == library.code("DONE") else None
