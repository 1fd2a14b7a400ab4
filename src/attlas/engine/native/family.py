"""Which family of kernels computes a score that is no dot product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attlas.engine.native import additive, distance
from attlas.engine.native.pairs import Kernels
from attlas.engine.online import finite_shift
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.scores.additive import Additive
from attlas.scores.base import Tokens
from attlas.scores.kernel import Gaussian

__all__ = ["Kernels", "find", "log_sum_exp", "numbers", "prefers", "provides", "tokens"]


def find(problem: Problem) -> tuple[Kernels | None, str]:
    """Return the kernels for a problem, or None and the reason.

    Examples
    --------
    >>> import torch, attlas
    >>> find(attlas.attend(torch.zeros(2, 3), torch.zeros(4, 3)).problem)
    (None, 'the score is no kernel of a distance')
    """
    if type(problem.score) is Additive:
        reason = additive.supports(problem)
        return (additive.KERNELS if reason is None else None), reason or "the score is additive"
    reason = distance.supports(problem)
    return (distance.KERNELS if reason is None else None), reason or "the score is a kernel of few coordinates"


def prefers(problem: Problem) -> bool:
    """Tell whether these kernels are faster for a score that could be a dot product as well."""
    return distance.prefers(problem)


def tokens(problem: Problem, projected: tuple[Tokens, Tokens]) -> tuple[Tokens, Tokens]:
    """Return the tokens that the kernels take: those that the score projects, or as they are for differences."""
    return (problem.q, problem.k) if type(problem.score) is Gaussian else projected


def log_sum_exp(problem: Problem, kernels: Kernels, plan: Plan) -> Tensor | None:
    """Return the log-sum-exp of each row, shape (batch, heads, m); None where a number is NaN or infinite."""
    nothing = problem.k[..., :0]  # values of size 0
    found = kernels.forward(problem, tokens(problem, problem.tokens), nothing, plan)
    return None if found is None else found[1]


def provides(wants: Mapping[str, Any] | None) -> bool:
    """Tell whether `numbers` has all that a statistic wants."""
    return wants is not None and wants.keys() <= {"entropy", "mass", "max_logit", "column_mass"}


def numbers(
    problem: Problem, kernels: Kernels, names: set[str], plan: Plan, lse: Tensor | None
) -> dict[str, Tensor] | None:
    """Return numbers of the whole matrix by the names that statistics want, and the log-sum-exp as ``lse``.

    Two walks at most: one over the rows, one over the columns. None where a number is NaN or infinite.
    """
    given, found = tokens(problem, problem.tokens), {}
    if names & {"entropy", "max_logit"}:
        rows = kernels.rows(problem, given, plan)
        if rows is None:
            return None
        lse = rows.lse if lse is None else lse
        found = {"entropy": rows.entropy, "max_logit": rows.max_logit}
    if lse is None:
        lse = log_sum_exp(problem, kernels, plan)
        if lse is None:
            return None
    if "column_mass" in names:
        ones = lse.new_ones(*lse.shape, 1)
        mass = kernels.transposed(problem, given, lse, ones, plan)
        if mass is None:
            return None
        found["column_mass"] = mass.squeeze(-1)
    found["mass"] = (lse != -torch.inf).to(lse.dtype)
    if problem.sink is not None:
        found["mass"] = found["mass"] - torch.exp(problem.sink.to(lse.dtype).view(1, -1, 1) - finite_shift(lse))
    return found | {"lse": lse}
