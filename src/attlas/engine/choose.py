"""Which backend computes a product, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attlas.engine import reference, sdpa, tiled, traced
from attlas.engine.autograd import Job, pool, pool_transposed, record_lse
from attlas.engine.dropout import Dropout
from attlas.engine.fold import Statistic
from attlas.engine.native import dot as native
from attlas.engine.native import family, few
from attlas.engine.native import statistics as native_statistics
from attlas.engine.online import LARGEST, larger
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, full_precision, spread_heads
from attlas.errors import BackendError
from attlas.inputs import tracing
from attlas.scores.base import Dot, Score
from attlas.scores.dot import ScaledDot, SoftCap

__all__ = ["Choice", "choose", "fold", "log_sum_exp", "multiply", "multiply_transposed"]

# Cells from which a walk of the kernels is faster than a few tiles, by measurement. Of a dot product it always is from
# so many queries on; with fewer, packing the keys takes longer than a tile.
_WORTH = 1 << 14
_QUERIES = 4

_STORES = "it stores the whole matrix; ask for it with Plan(backend='reference')"


@dataclass(frozen=True)
class Choice:
    """The backend that computes ``A @ v``, and the reason why each other one does not."""

    backend: str
    because: str
    others: dict[str, str]

    def __repr__(self) -> str:
        lines = [f"backend: {self.backend}, since {self.because}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in sorted(self.others.items())])


def choose(
    problem: Problem,
    plan: Plan,
    dropout: Dropout | None = None,
    dot: Dot | None = None,
    form: native.Form | None = None,
) -> Choice:
    """Choose the backend of ``A @ v``.

    Raises
    ------
    BackendError
        If the plan names a backend that cannot run this problem.
    """
    if _by_differences(problem, plan, dropout):
        others = dict.fromkeys(("sdpa", "tiled"), "differences of few coordinates are faster, and as exact")
        others["reference"] = _STORES
        return Choice("native", family.find(problem)[1], others)
    if dot is None and form is None:
        with torch.no_grad():
            dot = _dot(problem, problem.tokens)
            form = native.form_of(problem, problem.tokens, dot)
    kernels, reason = (None, "") if form is not None else _kernels(problem, plan, dropout)
    by_dot = native.refusal(problem, form, dropout=dropout is not None)
    refused = {
        "native": None if kernels is not None else by_dot if by_dot is None or form is not None else reason,
        "sdpa": sdpa.refusal(problem, dot, dropout=dropout is not None),
    }
    if refused.get(plan.backend) is not None:
        rule = "the plan asks for a backend that cannot run this problem."
        found = f"{plan.backend} does not run: {refused[plan.backend]}"
        fix = "leave the plan out, or Plan(backend='tiled')."
        given = {"plan": repr(plan), "score": type(problem.score).__name__}
        raise BackendError("A @ v", rule, given, found=found, fix=fix)
    if plan.backend != "auto":
        others = dict.fromkeys(("native", "reference", "sdpa", "tiled"), f"the plan asks for {plan.backend}")
        others |= {name: reason for name, reason in refused.items() if reason is not None}
        others.pop(plan.backend)
        return Choice(plan.backend, "the plan asks for it", others)
    others = {name: reason for name, reason in refused.items() if reason is not None}
    others["reference"] = _STORES
    if kernels is not None and "sdpa" in others:
        others["tiled"] = "the kernels of attlas compute the same, faster"
        return Choice("native", reason, others)
    if "native" not in others and native.pays(problem):
        others |= dict.fromkeys(("sdpa", "tiled"), "the kernels of attlas compute the same, faster")
        return Choice("native", "the score is a dot product", others)
    others.setdefault("native", "it is slower at this size, or on this processor")
    if "sdpa" not in others:
        others["tiled"] = "torch's fused kernel computes the same, faster"
        return Choice("sdpa", "the score is a dot product", others)
    if refused["native"] is None:
        others["tiled"] = "the kernels of attlas compute the same, faster"
        others.pop("native")
        return Choice("native", "torch's fused kernel does not compute this score", others)
    return Choice("tiled", "it runs any score, mask and device in linear memory", others)


@full_precision
def multiply(problem: Problem, v: Tensor, plan: Plan, dropout: Dropout | None = None) -> tuple[Tensor, Tensor | None]:
    """Return ``A @ v``, shape (batch, heads, m, e), and the log-sum-exp where the backend gave it."""
    if problem.is_symbolic:
        return traced.multiply(problem, v, dropout), None
    graph = torch.is_grad_enabled()
    if not graph and dropout is None:
        at_once = _at_once(problem, v, plan)
        if at_once is not None:
            return at_once
    tokens = problem.project() if graph else problem.tokens
    dot = form = None
    if plan.backend not in ("tiled", "reference") and not _by_differences(problem, plan, dropout):
        dot = _dot(problem, tokens)
        form = native.form_of(problem, tokens, dot)
    choice = choose(problem, plan, dropout, dot, form)
    if choice.backend == "reference":
        return _multiply_reference(problem, v, dropout)
    if choice.backend == "native" and form is None:
        kernels = _kernels(problem, plan, dropout)[0]
        return pool(Job(problem, family.tokens(problem, tokens), plan, kernels=kernels), v)
    form = form if choice.backend == "native" else None
    if form is not None and (dot is None or sdpa.refusal(problem, dot, dropout=False) is not None):
        # The backward is ours too, and speaks of the tokens of the dot product.
        inner: Score = ScaledDot(form.scale)
        capped = SoftCap(inner, form.cap) if form.cap else inner
        return pool(Job(replace(problem, score=capped), (form.q, form.k), plan, form=form), v)
    if choice.backend == "tiled" or dot is None:
        return pool(Job(problem, tokens, plan, None, dropout), v)
    if problem.device.type != "cpu":
        return sdpa.fused(problem, dot, v), None
    # From here on the problem is that dot product: the kernel's backward and ours both speak of its tokens.
    score: Score = ScaledDot(dot.scale)
    if dot.bias is not None:
        job = Job(replace(problem, score=score + dot.bias), ((dot.q, ()), (dot.k, ())), plan, dot)
    else:
        job = Job(replace(problem, score=score), (dot.q, dot.k), plan, dot, form=form)
    out, lse = pool(job, v.to(dot.q.dtype))
    return out.to(v.dtype), lse if dot.row is None else lse + dot.row.detach()


def _at_once(problem: Problem, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor] | None:
    """Return output and log-sum-exp of a plain dot product by the shortest way to what `choose` chooses."""
    if plan.backend == "auto" and native.pays(problem):
        return few.at_once(problem, v)
    return sdpa.at_once(problem, v) if plan.backend in ("auto", "sdpa") else None


@full_precision
def multiply_transposed(problem: Problem, x: Tensor, lse: Callable[[], Tensor], plan: Plan) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e); `lse` gives the log-sum-exp where it is needed."""
    if problem.is_symbolic:
        return traced.multiply_transposed(problem, x)
    tokens = problem.project() if torch.is_grad_enabled() else problem.tokens
    kernels = _kernels(problem, plan, None)[0]
    if kernels is not None:
        tokens = family.tokens(problem, tokens)
    return pool_transposed(Job(problem, tokens, plan, kernels=kernels), x, lse())


def _by_differences(problem: Problem, plan: Plan, dropout: Dropout | None) -> bool:
    """Tell whether a Gaussian that could be a dot product is computed by differences, which are faster here."""
    return plan.backend == "auto" and dropout is None and not _small(problem) and family.prefers(problem)


def _kernels(problem: Problem, plan: Plan, dropout: Dropout | None) -> tuple[family.Kernels | None, str]:
    """Return the native kernels of a score that is no dot product, or None and the reason."""
    if plan.backend not in ("auto", "native"):
        return None, f"the plan asks for {plan.backend}"
    if dropout is not None:
        return None, "dropout has to be the same when it is recomputed"
    if plan.backend == "auto" and _small(problem):
        return None, "it is slower at this size, or on this processor"
    return family.find(problem)


def _small(problem: Problem) -> bool:
    """Tell whether each matrix is so small that one tile is as fast as a walk of the kernels."""
    return problem.shape[2] * problem.shape[3] < _WORTH


@torch.no_grad()
@full_precision
def fold(
    problem: Problem, statistics: Sequence[Statistic], plan: Plan, lse: Tensor | None = None
) -> tuple[list[Any], Tensor | None]:
    """Compute statistics, those that the kernels can with them and the others tile by tile; and the log-sum-exp."""
    read = _kernels_of_reads(problem, plan)
    if read is None:
        return tiled.fold(problem, statistics, plan, lse)
    asked = native_statistics.fused(problem, statistics)
    if all(wants is None for wants in asked):
        return tiled.fold(problem, statistics, plan, lse)
    found = native_statistics.fold(problem, read, statistics, asked, lse)
    if found is None or (larger(found[1], LARGEST) and not problem.partial):
        # Tokens that are not finite; or tiles, which make a weight and the sum of its row in one go.
        return tiled.fold(problem, statistics, plan, lse if found is None else None)
    results, lse = found
    rest = [i for i, wants in enumerate(asked) if wants is None]
    if rest:  # a walk over the tiles costs something even where no statistic looks at them
        for i, result in zip(rest, tiled.fold(problem, [statistics[i] for i in rest], plan, lse)[0], strict=True):
            results[i] = result
    return results, lse


@torch.no_grad()
@full_precision
def log_sum_exp(problem: Problem, plan: Plan) -> Tensor:
    """Return the log-sum-exp of each row, shape (batch, heads, m)."""
    read = _kernels_of_reads(problem, plan)
    found = None if read is None else read({"lse": True}, None, None)
    return tiled.log_sum_exp(problem, plan) if found is None else found["lse"]


@full_precision
def recorded_lse(problem: Problem, lse: Tensor, plan: Plan) -> Tensor:
    """Return a known log-sum-exp with its graph."""
    kernels = _kernels(problem, plan, None)[0]
    tokens = problem.project()
    tokens = tokens if kernels is None else family.tokens(problem, tokens)
    return record_lse(Job(problem, tokens, plan, kernels=kernels), lse)


def _kernels_of_reads(problem: Problem, plan: Plan) -> native_statistics.Read | None:
    """Return the native kernels of a score where those are to be asked for reads."""
    if tracing():
        return None
    form = _form_of_reads(problem, plan)
    if form is not None:
        return partial(native.read, problem, form)
    kernels = _kernels(problem, plan, None)[0]
    return None if kernels is None else partial(family.read, problem, kernels, plan)


def _form_of_reads(problem: Problem, plan: Plan) -> native.Form | None:
    """Return the logits for the kernels where those are to be asked for reads."""
    if plan.backend not in ("auto", "native") or problem.device.type != "cpu":
        return None
    if plan.backend == "auto" and problem.shape[2] < _QUERIES and _small(problem):
        return None
    if _by_differences(problem, plan, None):
        return None
    form = native.form_of(problem, problem.tokens)
    return form if native.refusal(problem, form) is None else None


def _dot(problem: Problem, tokens: object) -> Dot | None:
    return problem.score.as_dot(*tokens)  # type: ignore[misc]  # a pair of tokens, in the score's own form


def _multiply_reference(problem: Problem, v: Tensor, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    result = reference.dense(problem)
    weights = result.weights
    if dropout is not None:
        weights = weights * dropout.keep(problem.tile(*map(range, problem.shape)))
    v = spread_heads(v, problem.shape[1])
    return torch.matmul(weights, v.to(weights.dtype)).to(v.dtype), result.lse.detach()
