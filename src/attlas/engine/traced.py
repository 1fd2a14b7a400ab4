"""Attention in torch's own operations, for programs that torch records or transforms.

torch.compile, torch.export and the transforms of torch.func run a program on stand-ins without numbers, and can
take apart only torch's own operations. A dot product goes to torch's fused function;
every other score, and every transform, computes the definition: the whole matrix, m · n numbers per head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from attlas.engine.backends import reference
from attlas.engine.dropout import Dropout
from attlas.engine.fused import of_one_size
from attlas.engine.problem import Problem, spread_heads
from attlas.foundation.compat import transforming
from attlas.masks.local import Causal
from attlas.scores.base import Dot


def multiply(problem: Problem, v: Tensor, dropout: Dropout | None = None) -> Tensor:
    """Return ``A @ v``, shape (batch, heads, m, e); drops come from torch's generator."""
    p = 0.0 if dropout is None else dropout.p
    if problem.sink is None and not transforming():
        dot = problem.score.as_dot(*problem.project())  # type: ignore[arg-type]  # in the score's own form
        if dot is not None and not dot.cap:
            return _fused(problem, dot, v, p)
    weights = functional.dropout(reference.dense(problem).weights, p)
    v = spread_heads(v, problem.shape[1])
    return torch.matmul(weights, v.to(weights.dtype)).to(v.dtype)


def multiply_transposed(problem: Problem, x: Tensor) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e)."""
    weights = reference.dense(problem).weights
    return torch.matmul(weights.mT, x.to(weights.dtype)).to(x.dtype)


def _fused(problem: Problem, dot: Dot, v: Tensor, p: float) -> Tensor:
    """Return the output of torch's fused kernel for a dot product."""
    mask = problem.mask
    causal = isinstance(mask, Causal) and not mask.offset and problem.shape[2] == problem.shape[3] and dot.bias is None
    added = None if causal or (mask is None and dot.bias is None) else _added(problem, dot)
    dtype = dot.q.dtype
    q, k, values = of_one_size(dot.q, dot.k.to(dtype), v.to(dtype))
    k, values = (spread_heads(t, problem.shape[1]) for t in (k, values))
    out = functional.scaled_dot_product_attention(
        q, k, values, attn_mask=added, dropout_p=p, is_causal=causal, scale=dot.scale
    )
    return out[..., : v.shape[-1]].to(v.dtype)


def _added(problem: Problem, dot: Dot) -> Tensor:
    """Return what the fused function adds to the logits, or the pairs that are allowed, with two axes or four."""
    at = problem.tile(*map(range, problem.shape))
    allowed = None
    if problem.mask is not None:
        allowed = problem.mask.allows(at)
        allowed = allowed.expand(*allowed.shape[:-2], *at.shape[2:])
    if dot.bias is None:
        added = torch.ones(at.shape[2:], dtype=torch.bool) if allowed is None else allowed
    else:
        none = torch.empty(0, dtype=problem.dtype)
        added = dot.bias(none, none, at).to(dot.q.dtype)
        added = added if allowed is None else torch.where(allowed, added, -math.inf)
    return added.unsqueeze(0) if added.ndim == 3 else added
