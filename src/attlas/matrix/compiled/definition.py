"""A matrix in torch's own operations, where no operator may stand in a program.

torch.export writes programs that run without attlas, the transforms of torch.func take apart only torch's own
operations, and code of the user is no part of a text. A dot product goes to torch's fused function; all else computes
the definition: the whole matrix, m · n numbers per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attlas.engine import operations
from attlas.engine.autodiff import graph
from attlas.engine.dropout import Dropout
from attlas.engine.fused import is_square_causal, of_one_size
from attlas.engine.online import share_of
from attlas.engine.problem import Problem, spread_heads
from attlas.engine.statistic import Statistic
from attlas.errors import BackendError, TooLargeError
from attlas.foundation.compat import tracing, transforming
from attlas.scores.base import Dot


def product(problem: Problem, v: Tensor, dropout: Dropout | None, lse: Callable[[], Tensor]) -> Tensor:
    """Return ``A @ v``, shape (batch, heads, m, e); drops come from torch's generator."""
    p = 0.0 if dropout is None else dropout.p
    if problem.sink is None and not problem.partial and not transforming():
        dot = problem.score.as_dot(*problem.project())  # type: ignore[arg-type]  # in the score's own form
        if dot is not None and not dot.cap:
            return _fused_output(problem, dot, v, p)
    weights = functional.dropout(_weights_of_rows(problem, lse), p)
    v = spread_heads(v, problem.shape[1])
    return torch.matmul(weights, v.to(weights.dtype)).to(v.dtype)


def transposed_product(problem: Problem, x: Tensor, lse: Callable[[], Tensor]) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e)."""
    weights = _weights_of_rows(problem, lse)
    return torch.matmul(weights.mT, x.to(weights.dtype)).to(x.dtype)


def statistics(problem: Problem, asked: Sequence[Statistic]) -> list[Any]:
    """Return the results of statistics."""
    _check_size(problem)
    return graph.collect(problem, asked)


def log_sum_exp(problem: Problem) -> Tensor:
    """Return the log-sum-exp of each row, shape (batch, heads, m)."""
    _check_size(problem)
    return operations.dense(problem).lse


def cells(
    problem: Problem, rows: range | Tensor, columns: range | Tensor, lse: Callable[[], Tensor], *, logits: bool
) -> Tensor:
    """Return weights, or log-weights, shape (batch, heads, len(rows), len(columns))."""
    _check_size(problem, len(rows))
    whole = operations.dense(problem, rows).logits if logits else _weights_of_rows(problem, lse, rows)
    return whole[..., columns.start : columns.stop] if isinstance(columns, range) else whole[..., columns]


def _weights_of_rows(problem: Problem, lse: Callable[[], Tensor], rows: range | Tensor | None = None) -> Tensor:
    """Return the weights of some rows, or of all; `lse` is asked where it counts keys that the matrix does not have."""
    _check_size(problem, None if rows is None else len(rows))
    _, own, weights = operations.dense(problem, rows)
    if not problem.partial:
        return weights
    total = lse()
    if rows is not None:
        total = total[:, :, rows.start : rows.stop] if isinstance(rows, range) else total[:, :, rows]
    return (weights * share_of(own, total).unsqueeze(-1)).to(weights.dtype)


def _check_size(problem: Problem, rows: int | None = None, heads: int | None = None) -> None:
    """Raise a TooLargeError where a program that torch traces would hold more than 1 GiB of a matrix.

    Tensors without numbers, as those of the meta device, hold nothing.
    """
    batch, own, m, n = problem.shape
    size = (batch * own if heads is None else heads) * (m if rows is None else rows) * n * problem.dtype.itemsize
    if size <= graph.DENSE_LIMIT or not tracing():
        return
    rule = "torch traces this program, which here needs the whole matrix, and that would be larger than the limit."
    given = {
        "A (batch, heads, m, n)": f"{tuple(problem.shape)} {str(problem.dtype).removeprefix('torch.')}",
        "score": type(problem.score).__name__,
    }
    found = f"{size:,} bytes, the limit is {graph.DENSE_LIMIT:,}"
    # The compiler can make no MemoryError; its own error has the texts of this one.
    kind = BackendError if torch.compiler.is_dynamo_compiling() else TooLargeError
    raise kind(rule, found, _too_large_fix(), arguments=given)


def _too_large_fix() -> str:
    """Return the fix for a matrix that is too large for the program that is being traced."""
    if transforming():
        return "a loop in place of the transform of torch.func; or take parts, A[..., :64, :]."
    if torch.compiler.is_exporting():
        return "with attlas.export_operators(): torch.export.export(...), for a program that will load attlas."
    return "scores, masks and statistics that attlas exports; or call it outside of torch.compile."


def _fused_output(problem: Problem, dot: Dot, v: Tensor, p: float) -> Tensor:
    """Return the output of torch's fused kernel for a dot product."""
    mask = problem.mask
    causal = dot.bias is None and is_square_causal(problem)
    added = None if causal or (mask is None and dot.bias is None) else _added_to_logits(problem, dot)
    dtype = dot.q.dtype
    q, k, values = of_one_size(dot.q, dot.k.to(dtype), v.to(dtype))
    k, values = (spread_heads(t, problem.shape[1]) for t in (k, values))
    out = functional.scaled_dot_product_attention(
        q, k, values, attn_mask=added, dropout_p=p, is_causal=causal, scale=dot.scale
    )
    return out[..., : v.shape[-1]].to(v.dtype)


def _added_to_logits(problem: Problem, dot: Dot) -> Tensor:
    """Return what the fused function adds to the logits, or the pairs that are allowed, with two axes or four."""
    _check_size(problem, heads=1)
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
