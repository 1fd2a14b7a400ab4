"""The doors: attend() makes the lazy matrix, attention() pools values at once, explain() says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attlas.engine import choose
from attlas.engine.dropout import Dropout
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.errors import DtypeError, ShapeError, explain, kind
from attlas.indexing import Axes
from attlas.inputs import check_inputs, check_sink
from attlas.masks.base import Mask
from attlas.masks.custom import from_function, from_tensor
from attlas.matrix import AttentionMatrix
from attlas.scores.base import Score
from attlas.scores.dot import ScaledDot

__all__ = ["attend", "attention", "explain_choice"]


def attend(
    q: Tensor,
    k: Tensor,
    score: Score | None = None,
    mask: Mask | Tensor | Callable[..., Any] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    plan: Plan | None = None,
) -> AttentionMatrix:
    """Return the attention matrix softmax(score(q, k)) without computing it.

    Parameters
    ----------
    q : Tensor, shape (..., m, d)
        Queries. Leading axes are ``()``, ``(batch,)`` or ``(..., heads)``.
    k : Tensor, shape (..., n, d)
        Keys. The heads of k divide those of q (grouped heads); batch axes broadcast.
    score : Score, optional
        How alike query and key are; the default is ``ScaledDot(scale)``.
    mask : Mask, Tensor or callable, optional
        Which pairs may attend: a mask, a bool tensor (True = may attend), an additive float tensor, or a
        FlexAttention ``mask_mod(b, h, i, j)``.
    scale : float, optional
        Factor of the dot product; only without `score`.
    sink : Tensor, optional, shape (heads,)
        One more logit a head in the denominator that has no value: rows then sum to less than 1.
    plan : Plan, optional
        How to compute; the default suits the device.

    Returns
    -------
    AttentionMatrix, shape (..., m, n)

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.

    See Also
    --------
    attention : ``attend(...) @ v`` in one call, with dropout.

    Notes
    -----
    Cost: some ten microseconds, no memory. The tensors are kept, not copied; projected tokens and the
    log-sum-exp are kept from the first read on, so make a new matrix after changing tensors in place.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k, v = (torch.randn(2, 12, 1024, 64) for _ in range(3))
    >>> A = attlas.attend(q, k, mask=attlas.Causal())
    >>> A.shape
    torch.Size([2, 12, 1024, 1024])
    >>> (A @ v).shape
    torch.Size([2, 12, 1024, 64])
    >>> A[0, 3, 17, :3].shape
    torch.Size([3])
    """
    inputs = check_inputs("attend()", q, k)
    if score is None:
        score = _PLAIN if scale is None else ScaledDot(scale)
    elif not isinstance(score, Score):
        raise DtypeError(
            explain(
                "attend()",
                "score must be an attlas.Score.",
                {"score": score.__name__ if isinstance(score, type) else type(score).__name__},
                found=kind(score),
                fix=f"score={score.__name__}(), an object and not its class."
                if isinstance(score, type)
                else "make it a class: class MyScore(attlas.Score) with forward(self, q, k, at).",
            )
        )
    elif scale is not None:
        raise ShapeError(
            explain(
                "attend()",
                "scale belongs to the default score; a score of your own has its own.",
                {"score": type(score).__name__, "scale": scale},
                found="both score and scale",
                fix=f"score={scale!r} * score, or ScaledDot({scale!r}).",
            )
        )
    score.check(q, k, inputs.q.shape[1])
    lead = inputs.leading
    batch, heads = inputs.q.shape[:2]
    if mask is not None:
        mask = _as_mask(mask)
        mask.check(lead[:-1] if len(lead) >= 2 else lead, heads, q.shape[-2], k.shape[-2])
        for extra in mask.log_weights():
            score = score + extra
    if sink is not None:
        sink = check_sink("attend()", sink, inputs.q)
    if plan is not None and not isinstance(plan, Plan):
        raise DtypeError(
            explain(
                "attend()",
                "plan must be an attlas.Plan.",
                {"plan": type(plan).__name__},
                found=kind(plan),
                fix="plan=attlas.Plan(backend='tiled')",
            )
        )
    ids = torch.arange(batch, device="cpu"), torch.arange(heads, device="cpu")
    problem = Problem(inputs.q, inputs.k, score, mask, sink, *ids)
    return AttentionMatrix(problem, plan or _DEFAULT_PLAN, Axes(lead, (True,) * len(lead)))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score | None = None,
    mask: Mask | Tensor | Callable[..., Any] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    plan: Plan | None = None,
) -> Tensor:
    """Pool values by attention, ``softmax(score(q, k)) v``.

    Parameters
    ----------
    q, k, score, mask, scale, sink, plan
        As in `attend`.
    v : Tensor, shape (..., n, e)
        Values, of a size of their own.
    dropout_p : float, default 0.0
        Probability that a weight is dropped after softmax. The drops come from torch's default generator
        and are computed again in the backward, never stored.

    Returns
    -------
    Tensor, shape (..., m, e), dtype of v

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.

    See Also
    --------
    attend : the matrix itself.

    Notes
    -----
    Differentiable in q, k, v, the sink and the parameters of the score. A row with no allowed key gives 0.
    Cost: ``O(m n d)`` time; memory of the output and a few tiles, forward and backward.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    >>> attlas.attention(q, k, v, score=attlas.Gaussian(0.5)).shape
    torch.Size([5, 3])
    """
    if not (isinstance(dropout_p, int | float) and 0.0 <= dropout_p <= 1.0):
        raise ShapeError(
            explain(
                "attention()",
                "dropout_p must be a probability, from 0 to 1.",
                found=f"dropout_p = {dropout_p!r}",
                fix="dropout_p=0.1",
            )
        )
    matrix = attend(q, k, score, mask, scale, sink, plan)
    return matrix._multiply(v, Dropout.draw(dropout_p) if dropout_p > 0 else None)


_DEFAULT_PLAN = Plan()
_PLAIN = ScaledDot()


def _as_mask(mask: Mask | Tensor | Callable[..., Any]) -> Mask:
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return from_tensor(mask)
    if callable(mask) and not isinstance(mask, type):
        return from_function(mask)
    raise DtypeError(
        explain(
            "attend()",
            "mask must be a Mask, a bool or float tensor, or a function mask_mod(b, h, i, j).",
            {"mask": mask.__name__ if isinstance(mask, type) else type(mask).__name__},
            found=kind(mask),
            fix="mask=attlas.Causal()",
        )
    )


def explain_choice(matrix: AttentionMatrix) -> choose.Choice:
    """Say which backend computes ``A @ v``, and why the others do not; at top level `attlas.explain`.

    Parameters
    ----------
    matrix : AttentionMatrix
        The matrix.

    Returns
    -------
    Choice
        With `backend`, `because` and `others`; printed as text.

    Raises
    ------
    BackendError
        If the plan names a backend that cannot run.

    Examples
    --------
    >>> import torch, attlas
    >>> attlas.explain(attlas.attend(torch.randn(5, 8), torch.randn(7, 8)))
    backend: sdpa, since the score is a dot product
      not native: ...
      not reference: it stores the whole matrix; ask for it with Plan(backend='reference')
      not tiled: torch's fused kernel computes the same, faster
    """
    return choose.choose(matrix.problem, matrix.plan)
