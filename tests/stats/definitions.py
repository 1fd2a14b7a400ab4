"""What a matrix and its statistics are by definition, in float64 and numpy: the oracle of all backends."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attlas
from attlas import Plan
from attlas.engine.backends import reference
from attlas.engine.problem import Problem
from attlas.matrix import softmax_matrix


@dataclass(frozen=True)
class Case:
    """A matrix and its definition; arrays have shape (batch, heads, m, n)."""

    A: attlas.AttentionMatrix
    weights: np.ndarray
    logits: np.ndarray
    allowed: np.ndarray
    tolerance: float

    def again(self) -> Case:
        """Return the case with a matrix that nothing has been read of."""
        A = self.A
        return replace(self, A=softmax_matrix(replace(A.problem), A.plan, A.axes))

    @property
    def m(self) -> int:
        return self.weights.shape[2]

    @property
    def n(self) -> int:
        return self.weights.shape[3]

    @functools.cached_property
    def seen(self) -> np.ndarray:
        """Which pairs the mask allows: a bounded kernel does not count as a mask."""
        return allowed_by_mask(self.A.problem).numpy()

    def close(self, found: Tensor, expected: np.ndarray, scale: float = 1.0) -> None:
        assert found.dtype == self.A.dtype
        assert tuple(found.shape) == expected.shape
        np.testing.assert_allclose(
            found.double().numpy(), expected, rtol=self.tolerance, atol=self.tolerance * scale, equal_nan=True
        )


def make_case(
    m: int,
    n: int,
    score: attlas.Score | None = None,
    mask: Any = None,
    dtype: torch.dtype = torch.float32,
    d: int = 8,
    heads: int = 4,
    key_heads: int = 2,
    batch: int = 2,
    sink: Tensor | None = None,
    plan: Plan | None = None,
    offset: float = 0.0,
    tolerance: float | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(m * 1009 + n)
    q = torch.randn(batch, heads, m, d, generator=generator, dtype=torch.float64) + offset
    k = torch.randn(batch, key_heads, n, d, generator=generator, dtype=torch.float64) + offset
    q, k = q.to(dtype), k.to(dtype)
    A = attlas.attend(q, k, score=score, mask=mask, sink=sink, plan=plan)
    return Case(A, *definition(A), tolerance or (1e-11 if dtype is torch.float64 else 2e-5))


def allowed_by_mask(problem: Problem) -> Tensor:
    """Return which pairs the mask of a problem allows, (batch, heads, m, n)."""
    if problem.mask is None:
        return torch.ones(problem.shape, dtype=torch.bool)
    return problem.mask.allows(problem.tile(*map(range, problem.shape))).expand(problem.shape)


def definition(A: attlas.AttentionMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, logits and allowed cells of a matrix from the reference; nobody may write to them."""
    exact = reference.dense(reference.in_float64(A.problem))
    allowed = allowed_by_mask(A.problem) & (exact.logits > -math.inf)
    found = exact.weights.detach().numpy(), exact.logits.detach().numpy(), allowed.numpy()
    for array in found:
        array.flags.writeable = False
    return found


def entropy(p: np.ndarray) -> np.ndarray:
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1)


def moments(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of the logits of each row."""
    count = np.maximum(case.allowed.sum(-1), 1)
    logits = np.where(case.allowed, case.logits, 0.0)
    mean = logits.sum(-1) / count
    deviation = np.where(case.allowed, logits - mean[..., None], 0.0)
    return mean, np.square(deviation).sum(-1) / count


def blocks(weights: np.ndarray, allowed: np.ndarray, height: int, width: int, pool: str) -> np.ndarray:
    """Pool blocks that begin at floor(i * size / count); NaN where nothing is allowed."""
    rows, columns = (
        [i * size // count for i in range(count)]
        for size, count in zip(weights.shape[-2:], (height, width), strict=True)
    )

    def over(join: np.ufunc, cells: np.ndarray) -> np.ndarray:
        return join.reduceat(join.reduceat(cells, rows, axis=-2), columns, axis=-1)

    counts = over(np.add, allowed.astype(int))
    if pool == "max":
        pooled = over(np.maximum, np.where(allowed, weights, -np.inf))
    else:
        pooled = over(np.add, np.where(allowed, weights, 0.0)) / np.maximum(counts, 1)
    return np.where(counts > 0, pooled, np.nan)


def diagonals(x: Any) -> Any:
    """Sum every diagonal of an array or a tensor, from the first key of the last query on."""
    m, n = x.shape[-2:]
    if m + n < 2:
        return x.reshape(*x.shape[:-2], 0)
    sums = [x.diagonal(offset, -2, -1).sum(-1) for offset in range(1 - m, n)]
    return torch.stack(sums, -1) if isinstance(x, Tensor) else np.stack(sums, -1)


def needed(weights: np.ndarray, level: float) -> np.ndarray:
    """Count the largest weights that are needed for a share of the row, from the definition."""
    ordered = np.sort(weights, axis=-1)[..., ::-1]
    total = weights.sum(-1, keepdims=True)
    short = np.cumsum(ordered, axis=-1) < level * total
    return np.where(total[..., 0] > 0, short.sum(-1) + 1, 0)
