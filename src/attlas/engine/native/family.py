"""Which family of kernels computes a score that is no dot product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attlas.engine.native import additive, distance
from attlas.engine.native.pairs import Kernels
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.scores.additive import Additive
from attlas.scores.base import Tokens
from attlas.scores.kernel import Gaussian

__all__ = ["Kernels", "find", "prefers", "read", "tokens"]


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


def read(
    problem: Problem, kernels: Kernels, plan: Plan, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
) -> dict[str, Tensor] | None:
    """Return what is wanted of the matrix, as `walks.find` names it, and the log-sum-exp as ``lse``.

    One walk for the output and the log-sum-exp where that is not known, one for all else. None where a number is NaN
    or infinite.
    """
    work = kernels.work(problem, tokens(problem, problem.tokens), plan)
    if work is None:
        return None
    found: dict[str, Tensor] = {}
    rest = {name: value for name, value in wanted.items() if name not in ("lse", "rounded")}
    # Then weights sum to 1, and no walk is needed to know it.
    whole = "mass" in wanted and problem.sink is None and not problem.partial
    if whole:
        del rest["mass"]
    if lse is None and v is None and rest and rest.keys() <= {"entropy", "max_logit"}:
        rows = work.rows()
        if rows is None:
            return None
        found, lse, rest = rows._asdict(), rows.lse, {}
    if v is not None or lse is None:
        product = work.forward(problem.k[..., :0] if v is None else v.to(problem.dtype))
        if product is None:
            return None
        found["out"], lse = product[0], product[1] if lse is None else lse
    if rest:
        others = work.found(rest, lse)
        if others is None:
            return None
        found |= others
    if whole:
        found["mass"] = (lse != -torch.inf).to(problem.dtype)
    return found | {"lse": lse}
