"""What is computed of a matrix in a program that torch traces: by an operator, or by torch's own operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.autodiff.graph import traced_log_sum_exp, traced_product
from attlas.engine.dropout import Dropout
from attlas.engine.fused import is_square_causal
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.engine.statistic import Statistic
from attlas.foundation.compat import transforming
from attlas.matrix.compiled import definition, operators
from attlas.matrix.compiled.exporting import keeps_operators
from attlas.matrix.compiled.text import NoTextError, problem_text
from attlas.matrix.reads import LogSumExp
from attlas.scores.base import Derived, ScaledByTensor, Score, Sum
from attlas.scores.dot import ScaledDot, SoftCap


def product(problem: Problem, v: Tensor, plan: Plan, dropout: Dropout | None, lse: Callable[[], Tensor]) -> Tensor:
    """Return ``A @ v``, shape (batch, heads, m, e); `lse` gives the log-sum-exp of a part of a matrix.

    Inside torch.compile it is one operator, which gets the problem as a text and tensors. A problem without a text goes
    to FlexAttention, or to torch's own operations.
    """
    if _is_plain_product(problem, dropout) or not _operators_are_traced():
        return definition.product(problem, v, dropout, lse)
    seed = None if dropout is None else (dropout.p, torch.randint(2**31 - 1, (), device="cpu"))
    prepared = _operator_arguments(problem, plan, dropout=seed)
    if prepared is None:
        fused = None if dropout is not None else traced_product(problem, v, plan)
        return definition.product(problem, v, dropout, lse) if fused is None else fused
    problem, tensors, text = prepared
    # Whether the operator keeps the log-sum-exp, for its backward.
    keep = _needs_gradient(problem.q, problem.k, v, *tensors)
    out: Tensor = operators.pool(problem.q, problem.k, v, tensors, text, keep)[0]
    return out


def transposed_product(problem: Problem, x: Tensor, plan: Plan, lse: Callable[[], Tensor]) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e)."""
    prepared = _operator_arguments(problem, plan) if _operators_are_traced() else None
    if prepared is None:
        return definition.transposed_product(problem, x, lse)
    problem, tensors, text = prepared
    out: Tensor = operators.pool_transposed(problem.q, problem.k, x, tensors, text)[0]
    return out


def statistics(problem: Problem, asked: Sequence[Statistic], plan: Plan) -> list[Any]:
    """Return the results of statistics."""
    found = _statistics_by_operator(problem, asked, plan)
    return definition.statistics(problem, asked) if found is None else found


def log_sum_exp(problem: Problem, plan: Plan) -> Tensor:
    """Return the log-sum-exp of each row, shape (batch, heads, m)."""
    found = _statistics_by_operator(problem, [LogSumExp()], plan)
    if found is not None:
        return found[0]  # type: ignore[no-any-return]
    fused = traced_log_sum_exp(problem, plan) if _operators_are_traced() else None
    return definition.log_sum_exp(problem) if fused is None else fused


def _statistics_by_operator(problem: Problem, asked: Sequence[Statistic], plan: Plan) -> list[Any] | None:
    """Return the results of statistics by an operator of torch.library; None where none may stand in the program."""
    # The score is kept as it is: its log-weights may count a constant of each row.
    prepared = _operator_arguments(problem, plan, asked=asked, keep_score=True) if _operators_are_traced() else None
    if prepared is None:
        return None
    forms = [statistic.forms(problem) for statistic in asked]
    problem, tensors, text = prepared
    # Whether the operator keeps the log-sum-exp, for its backward.
    keep = _needs_gradient(problem.q, problem.k, *tensors)
    found = operators.statistics(problem.q, problem.k, tensors, text, keep)
    results: list[Any] = operators.results_of(forms, list(found[:-1]))
    return results


def cells(
    problem: Problem,
    rows: range | Tensor,
    columns: range | Tensor,
    plan: Plan,
    lse: Callable[[], Tensor],
    *,
    logits: bool,
) -> Tensor:
    """Return weights, or log-weights, shape (batch, heads, len(rows), len(columns))."""
    prepared = _operator_arguments(problem, plan, keep_score=logits) if _operators_are_traced() else None
    if prepared is None:
        return definition.cells(problem, rows, columns, lse, logits=logits)
    problem, tensors, text = prepared
    # Whether the operator keeps the log-sum-exp, for its backward.
    keep = _needs_gradient(problem.q, problem.k, *tensors)
    i, j = (_as_int64_places(some) for some in (rows, columns))
    found: Tensor = operators.cells(problem.q, problem.k, i, j, tensors, text, logits, keep)[0]
    return found


# ----------------------------------------------------------------------------------------------------- what is traced


def _operators_are_traced() -> bool:
    """Return whether operators may stand in the program that is being traced."""
    if not torch.compiler.is_compiling() or transforming():
        return False
    # An exported program must run where there is no attlas, but for one that is to load it.
    return keeps_operators() or not torch.compiler.is_exporting()


def _is_plain_product(problem: Problem, dropout: Dropout | None) -> bool:
    """Return whether torch's own function computes a product as it is, without a tensor for the mask."""
    whole = problem.mask is None or is_square_causal(problem)
    if problem.sink is not None or not whole or (dropout is not None and problem.device.type == "cpu"):
        return False
    return isinstance(problem.score, ScaledDot)


def _needs_gradient(*tensors: Tensor) -> bool:
    """Return whether a gradient of one of them is recorded."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _as_int64_places(some: range | Tensor) -> Tensor:
    """Return rows or columns as int64 on the CPU."""
    return torch.arange(some.start, some.stop, device="cpu") if isinstance(some, range) else some


def _operator_arguments(
    problem: Problem, plan: Plan, *, keep_score: bool = False, **options: Any
) -> tuple[Problem, list[Tensor], str] | None:
    """Return what an operator of torch.library takes: the problem, its tensors, and the text that describes it.

    None where no text can. What a dot product makes of its tokens is traced, so that autograd and the compiler see it;
    other scores make their tokens inside of the operator.
    """
    tensors: list[Tensor] = []
    try:
        text = problem_text(problem, plan, tensors, **options)
        if keep_score or not _makes_tokens(problem.score):
            return problem, tensors, text
        fused = _problem_of_dot(problem)
        if fused is None:
            return problem, tensors, text
        learned = _needs_gradient(*tensors)
        tensors = []
        return fused, tensors, problem_text(fused, plan, tensors, learned=learned, **options)
    except NoTextError:
        return None


def _makes_tokens(score: Score) -> bool:
    """Return whether a score may be a dot product of tokens that it makes of queries and keys."""
    if isinstance(score, Sum):
        of_tokens = [part for part in (score.left, score.right) if not part.positional]
        return len(of_tokens) == 1 and _makes_tokens(of_tokens[0])
    if isinstance(score, ScaledByTensor):
        return score.factor.numel() == 1
    if isinstance(score, Derived):
        return _makes_tokens(score.inner)
    return type(score).project is not Score.project and type(score).as_dot is not Score.as_dot


def _problem_of_dot(problem: Problem) -> Problem | None:
    """Return the problem of the tokens of the dot product that a score is; None where it is none."""
    dot = problem.score.as_dot(*problem.project())  # type: ignore[arg-type]  # tokens in the score's own form
    if dot is None:
        return None
    plain = type(dot.scale) is float
    # Its text is a constant also where torch.compile lets numbers vary.
    score: Score = ScaledDot(float.fromhex(dot.scale.hex()) if plain else 1.0)
    if dot.cap:
        score = SoftCap(score, dot.cap)
    if dot.bias is not None:
        score = score + dot.bias
    return replace(problem, q=dot.q if plain else dot.q * dot.scale, k=dot.k, score=score)
