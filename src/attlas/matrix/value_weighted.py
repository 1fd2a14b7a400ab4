"""Weights times the norms of their values, as a lazy matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.errors import ShapeError, public
from attlas.foundation.tiles import Tile
from attlas.matrix.kinds.combination import Combination, Term
from attlas.matrix.matrix import AttentionMatrix
from attlas.matrix.softmax import SoftmaxWeights
from attlas.scores import Score
from attlas.scores.base import Dot, Tokens


def norms_of(values: Tensor) -> Tensor:
    """Return the Euclidean norm of each value, float32, shape (..., n) of values of shape (..., n, e)."""
    norms: Tensor = torch.linalg.vector_norm(values.detach().float(), dim=-1)
    return norms


@public("value_weighted()")
def value_weighted(A: AttentionMatrix, norms: Tensor) -> AttentionMatrix:
    """Return the weights of a matrix, each times the norm of its key's value, as a lazy matrix.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The weights.
    norms : Tensor, shape (batch, value heads, n) or (batch, heads, n)
        The norm of the value of each key.

    Returns
    -------
    AttentionMatrix, shape (..., m, n)
        ``A[..., i, j] * norms[..., j]``, without a gradient. Its rows do not sum to 1, so that statistics of shares,
        entropy and effective keys, raise a ShapeError.

    Raises
    ------
    ShapeError
        If there is not one norm of each key and head.

    Notes
    -----
    The logarithm of a norm is one more coordinate of its key, so that every read costs what it costs of `A`. Weights
    that are no softmax, such as those of linear attention, keep their signs.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.matrix.value_weighted import norms_of, value_weighted
    >>> A = attlas.attend(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
    >>> value_weighted(A, norms_of(torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]])))[0, 0]
    AttentionMatrix(shape=(2, 2), torch.float32, score=KeyWeighted)
    >>> value_weighted(A, norms_of(torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]])))[0, 0, 1].tolist()
    [2.5, 0.0]
    """
    A = A.detach()
    batch, heads, m, n = A.weights.shape
    if norms.ndim != 3 or (norms.shape[0], norms.shape[2]) != (batch, n) or heads % max(norms.shape[1], 1):
        rule = "norms must have one number per key and head, shape (batch, heads or value heads, n)."
        found = f"norms of shape {tuple(norms.shape)}, a matrix of shape {(batch, heads, m, n)}"
        raise ShapeError(rule, found, "norms_of(v)", norms=norms)
    if A.weights.softmax is None:
        own = norms.detach().to(A.device, A.dtype).repeat_interleave(heads // norms.shape[1], dim=1)
        return AttentionMatrix(Combination([Term(own.unsqueeze(2), A.weights)]), A.axes)
    weights = A.weights.of_softmax("value_weighted()")
    weights.check_unchanged()
    problem = weights.problem
    dtype = problem.dtype
    q, k, logs = problem.q.to(dtype), problem.k.to(dtype), norms.detach().to(problem.device, dtype).log()
    # Keys and norms get as many heads as the larger of the two has; all heads where they do not divide each other.
    most = max(k.shape[1], logs.shape[1])
    if heads % most or any(most % t.shape[1] for t in (k, logs)):
        most = heads
    k, logs = (t.repeat_interleave(most // t.shape[1], dim=1) for t in (k, logs))
    problem = replace(
        problem,
        q=torch.cat([q, torch.ones_like(q[..., :1])], dim=-1),
        k=torch.cat([k, logs.unsqueeze(-1)], dim=-1),
        score=KeyWeighted(problem.score, finite=bool((norms > 0).all())),
        sink=None,  # it is part of the log-sum-exp
        partial=True,
        versions=(),
    )
    weighted = SoftmaxWeights(problem, weights.plan, weights.lse(), are_shares=False)
    return AttentionMatrix(weighted, A.axes)


class KeyWeighted(Score):
    """A score of keys whose last coordinate is added to it: the logarithm of a factor of their weights."""

    stored = ("inner", "finite")

    def __init__(self, inner: Score, *, finite: bool) -> None:
        super().__init__()
        self.inner = inner
        self.finite = inner.finite and finite
        self.scratch = inner.scratch
        self.position_free = inner.position_free

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        """Let the inner score project the tokens; the last coordinate, the logarithm of the factor, is kept apart."""
        # The last coordinate is kept apart.
        queries, keys = self.inner.project(q[..., :-1], k[..., :-1])
        return (queries, q[..., -1:]), (keys, k[..., -1:])

    def forward(self, q: Any, k: Any, at: Tile) -> Tensor:
        # The inner score's logits plus the logarithm of each key's factor.
        logits: Tensor = self.inner(q[0], k[0], at) + k[1].mT
        return logits

    def translate(self, rows: range, columns: range, m: int, n: int) -> Score | None:
        inner = self.inner.translate(rows, columns, m, n)
        return None if inner is None else KeyWeighted(inner, finite=self.finite)

    def as_dot(self, q: Any, k: Any) -> Dot | None:
        # The logarithm is one more coordinate of the keys; the scale of the dot product is divided out again.
        dot = self.inner.as_dot(q[0], k[0])
        if dot is None or dot.cap or not dot.scale or not self.finite:
            return None
        queries = torch.cat([dot.q, q[1] / dot.scale], dim=-1)
        return replace(dot, q=queries, k=torch.cat([dot.k, k[1]], dim=-1))
