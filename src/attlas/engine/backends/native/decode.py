"""Few queries, as when a model writes one token at a time: the short way to the kernels.

These read keys and values once, as they lie. At this size each microsecond of preparation counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attlas.engine.backends.native import library
from attlas.engine.costs import FEW_QUERIES, threads_for
from attlas.engine.problem import Problem
from attlas.scores.dot import ScaledDot

# Names of the dtypes that tokens may have, in all kernels of dot products.
TYPES = {
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
}
# Log-sum-exp from which on no two logits are less than some nats apart, in the dtype of the sums.
LARGEST_LSE = {dtype: 1e15 if dtype is torch.float64 else 1e8 for dtype in TYPES}


def fast_path(problem: Problem, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return output and log-sum-exp of a plain scaled dot product of few queries; None for all else.

    None too where tokens hold NaN, infinity or numbers so large that products overflow.
    """
    q, k, score = problem.q, problem.k, problem.score
    if type(score) is not ScaledDot or problem.mask is not None or problem.sink is not None or q.device.type != "cpu":
        return None
    batch, heads, m, d = q.shape
    key_heads, n, e = k.shape[1], k.shape[2], v.shape[3]
    if m > FEW_QUERIES or key_heads != v.shape[1] or q.dtype is not v.dtype or 0 in (q.numel(), k.numel(), e):
        return None
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    kernels = library.current()
    dtype = problem.dtype
    out = torch.empty(batch, heads, m, e, dtype=dtype, device="cpu")
    lse = torch.empty(batch, heads, m, dtype=torch.float64, device="cpu")
    status = kernels.call(
        "dot",
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        m=m,
        n=n,
        d=d,
        e=e,
        **kernels.tensors4(q=q, k=k, v=v),
        type=kernels.codes[TYPES[q.dtype]],
        rounded=1,  # the output is rounded to the dtype of the tokens
        threads=threads_for(q, n),
        scale=score.factor(d),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
    )
    if status != kernels.codes["DONE"] or float(lse.abs().amax()) > LARGEST_LSE[q.dtype]:
        return None
    return out.to(v.dtype), lse
