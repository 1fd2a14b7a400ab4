"""The public functions: attend() makes the lazy matrix, attention() pools values without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import attlas
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.errors import BackendError, DtypeError, ShapeError, counted, kind, public
from attlas.foundation.autocast import cast
from attlas.foundation.checks import (
    check_inputs,
    check_probability,
    check_sink,
    heads_of_three_axes,
    is_one_or,
    refuse_context_parallel,
)
from attlas.foundation.indexing import Axes
from attlas.masks.argument import as_mask
from attlas.masks.base import Mask
from attlas.matrix.kinds.normalised import Normalise, normalised
from attlas.matrix.matrix import AttentionMatrix, softmax_matrix
from attlas.scores.base import Score
from attlas.scores.dot import ScaledDot
from attlas.scores.function import ScoreMod


@public("attend()")
def attend(
    q: Tensor,
    k: Tensor,
    score: Score | Callable[..., Any] | None = None,
    mask: Mask | Tensor | Callable[..., Any] | None = None,
    scale: float | Tensor | None = None,
    sink: Tensor | None = None,
    plan: Plan | None = None,
    normalise: Normalise = "softmax",
) -> AttentionMatrix:
    """Return the attention matrix softmax(score(q, k)) without computing it.

    Parameters
    ----------
    q : Tensor, shape (..., m, d)
        Queries. Leading axes are ``()``, ``(batch,)`` or ``(..., heads)``.
    k : Tensor, shape (..., n, d)
        Keys. The heads of k divide those of q (grouped heads); batch axes broadcast.
    score : Score or callable, optional
        How alike query and key are; the default is ``ScaledDot(scale)``. A FlexAttention
        ``score_mod(score, b, h, i, j)`` changes the scaled dot product, see `ScoreMod`.
    mask : Mask, Tensor or callable, optional
        Which pairs may attend: a mask, a bool tensor (True = may attend), an additive float tensor, or a
        FlexAttention ``mask_mod(b, h, i, j)``.
    scale : float or Tensor, optional
        Factor of the dot product; only without `score`. A tensor has one number, or one for each head, and is
        differentiable: a temperature that is learned.
    sink : Tensor, optional, shape (heads,)
        One more logit a head in the denominator that has no value: rows then sum to less than 1.
    plan : Plan, optional
        How to compute; the default suits the device.
    normalise : {"softmax", "sigmoid", "relu", "silu", "stick-breaking"} or Pointwise, default "softmax"
        What makes weights of logits. Three functions take each logit by itself: ``sigmoid(s - ln n)``, ``relu(s) / n``
        and ``silu(s) / n`` of n keys; `Pointwise` has other biases and divisors. Such rows do not sum to 1, and have no
        log-sum-exp and no entropy. Stick-breaking is ``sigmoid(s_ij) Π_{l > j} (1 - sigmoid(s_il))`` over the keys l
        that the mask allows; that of the paper has ``mask=Causal(-1)``, the keys before the query [1]_. Its rows sum to
        at most 1, and have an entropy and no log-sum-exp.

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
    attlas.distributed.attend : the same for DTensors, of which each rank has a part; called for them.

    Notes
    -----
    Under ``torch.autocast`` queries and keys are cast as those of torch's ``scaled_dot_product_attention``, and so are
    values; tokens of scores that are no product (`Score.rounds_tokens`) are float32. Gradients arrive in the dtype
    that the tensors had.

    Cost: some ten microseconds, no memory. The tensors are kept, not copied: once one of them was changed in place,
    every read raises a ModifiedError. Tensors of inference mode do not count their changes, so do not change those.

    References
    ----------
    .. [1] Tan et al., "Stick-breaking attention", 2024.

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
    q, k = cast(q, rounds=(rounds := getattr(score, "rounds_tokens", True))), cast(k, rounds=rounds)
    if "DTensor" in (type(q).__name__, type(k).__name__):
        if normalise != "softmax":
            rule, fix = "DTensors have the weights of a softmax.", "normalise='softmax', or each rank's own tensors"
            raise BackendError(rule, f"normalise = {normalise!r}", fix)
        return attlas.distributed.attend(q, k, score, mask, scale, sink, plan)  # type: ignore[arg-type, return-value]
    refuse_context_parallel()
    q4, k4, lead = check_inputs(q, k)
    heads = q4.shape[1]
    if score is None and isinstance(scale, Tensor):  # multiplied into the queries, so that it gets a gradient
        q4, score = q4 * _per_head(scale, q4, lead), _UNSCALED_SCORE
    elif score is None:
        score = _PLAIN_SCORE if scale is None else ScaledDot(scale)  # type: ignore[arg-type]
    elif scale is not None:
        rule = "scale belongs to the default score; a score of your own has its own."
        fix = "score=scale * score, or leave score out."
        raise ShapeError(rule, "both score and scale", fix, score=type(score).__name__, scale=scale)
    elif callable(score) and not isinstance(score, (Score, Mask, type)):
        score = ScoreMod(score)
    elif not isinstance(score, Score):
        raise _no_score(score)
    score.check(q, k, heads)
    if mask is not None:
        mask = as_mask(mask)
        mask.check(lead[:-1] if len(lead) >= 2 else lead, heads, q.shape[-2], k.shape[-2])
        for extra in mask.log_weights():  # of an additive mask
            score = score + extra
    sink = None if sink is None else check_sink(sink, q4, lead)
    if plan is not None and not isinstance(plan, Plan):
        fix = "plan=attlas.Plan(backend='tiled')"
        raise DtypeError("plan must be an attlas.Plan.", kind(plan), fix, plan=type(plan).__name__)
    given = [(name, t) for name, t in (("q", q), ("k", k), ("scale", scale)) if isinstance(t, Tensor)]
    problem = Problem(q4, k4, score, mask, sink, given=given)
    A = softmax_matrix(problem, plan or _DEFAULT_PLAN, Axes(lead, (True,) * len(lead)))
    return A if normalise == "softmax" else A.with_weights(normalised(A, normalise))


@public("attention()")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score | Callable[..., Any] | None = None,
    mask: Mask | Tensor | Callable[..., Any] | None = None,
    scale: float | Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    plan: Plan | None = None,
    normalise: Normalise = "softmax",
) -> Tensor:
    """Pool values by attention, ``softmax(score(q, k)) v``.

    Parameters
    ----------
    q, k, score, mask, scale, sink, plan, normalise
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
    check_probability("dropout_p", dropout_p)
    return attend(q, k, score, mask, scale, sink, plan, normalise).pooled(v, dropout_p)


_DEFAULT_PLAN = Plan()
_PLAIN_SCORE, _UNSCALED_SCORE = ScaledDot(), ScaledDot(1.0)


def _no_score(score: object) -> DtypeError:
    """Return the error for an argument `score` that is not a score."""
    fix = "a class with one method: class MyScore(attlas.Score) with forward(self, q, k, at)."
    if isinstance(score, Tensor):
        fix = "attend() takes no values: attlas.attention(q, k, v), or attend(q, k) @ v."
    elif isinstance(score, Mask) or (isinstance(score, type) and issubclass(score, Mask)):
        fix = f"did you mean mask={score.name() if isinstance(score, Mask) else score.__name__ + '()'}?"
    elif isinstance(score, type):
        fix = f"score={score.__name__}(), an object and not its class."
    elif isinstance(score, int | float):
        fix = f"did you mean scale={score!r}?"
    named = {"score": score if isinstance(score, Tensor) else kind(score)}
    return DtypeError("score must be an attlas.Score.", kind(score), fix, arguments=named)


def _per_head(scale: Tensor, q: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Return a scale that is a tensor, one number or one for each head, so that queries can be multiplied with it.

    `leading` are the leading axes of the user's queries, for the error.
    """
    if is_one_or(scale.numel(), q.shape[1]) and scale.is_floating_point():
        return scale.to(q).reshape(1, -1, 1, 1)
    rule = "a scale that is a tensor has one number, or one for each head."
    heads = q.shape[1]
    found = f"{counted(scale.numel(), 'number')}, {counted(heads, 'head')}"
    fix = f"a floating-point tensor of shape () or ({heads},)."
    fix = heads_of_three_axes(scale.numel(), leading) or fix
    raise ShapeError(rule, found, fix, arguments={"scale": scale, "q (batch, heads, m, d)": q})
