"""Scaled dot products on the processor's widest vectors: output, log-sum-exp and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.native import few, library, walks
from attlas.engine.problem import Problem
from attlas.errors import BackendError
from attlas.scores.base import Dot, Score, Tokens
from attlas.scores.dot import SoftCap

__all__ = [
    "SMALL",
    "Form",
    "aligned",
    "dense",
    "find",
    "form_of",
    "forward",
    "pays",
    "read",
    "refusal",
    "tensor4",
]

SMALL = 1 << 23  # products below which threads cost more than they save
# Where keys and values are packed, an output is faster from so many products on, and for float32 and float16 from so
# many queries and products on; by measurement against torch's kernel.
_LARGE = 1 << 30
_QUERIES, _PRODUCTS = 512, 1 << 24
_FEW = 16  # queries below which keys and values are not packed


@dataclass(frozen=True, eq=False)
class Form:
    """Logits as the kernels compute them: ``cap · tanh(scale · q · k / cap) + row``; without a cap plain products.

    Parameters
    ----------
    q, k : Tensor, shape (batch, heads, m, d) and (batch, key heads, n, d)
        Tokens of the dot product.
    scale : float
        Factor of the dot product.
    cap : float
        Bound of the logits, 0 for none.
    row : Tensor, optional, shape (batch, heads, m)
        A constant of each query, which softmax does not see.
    """

    q: Tensor
    k: Tensor
    scale: float
    cap: float = 0.0
    row: Tensor | None = None


def form_of(problem: Problem, tokens: tuple[Tokens, Tokens], dot: Dot | None = None) -> Form | None:
    """Return the logits of a problem as the kernels compute them; None where they do not.

    `dot` is the score as a dot product, for callers that have it already.
    """
    score: Score = problem.score
    cap = 0.0
    if isinstance(score, SoftCap):
        cap, score = float(score.cap), score.score
    if dot is None:
        dot = score.as_dot(*tokens)  # type: ignore[arg-type]  # in the score's own form
    if dot is None or dot.bias is not None or (cap and dot.row is not None):
        return None
    return Form(dot.q, dot.k, dot.scale, cap, dot.row)


def refusal(problem: Problem, form: Form | None, *, dropout: bool = False) -> str | None:
    """Say in one sentence why the kernels do not compute this problem; None where they do."""
    reason = library.why_not()
    if reason is None and not library.has("dot"):
        reason = "the library of kernels has none for dot products"
    if reason is not None:
        return reason
    if problem.device.type != "cpu":
        return "it runs on the processor only"
    if form is None:
        return "the score is not a dot product"
    if dropout:
        return "dropout has to be the same when it is recomputed"
    if 0 in (*problem.shape, form.q.shape[-1]):
        return "there is nothing to compute"
    if form.q.dtype not in few.TYPES or (form.cap and form.q.dtype is torch.float64):
        return f"there is no kernel for {str(form.q.dtype).removeprefix('torch.')} with this score"
    if problem.sink is not None and form.row is not None:
        return "the sink needs the constant of each row"
    return None


def pays(problem: Problem) -> bool:
    """Return whether the kernels are the faster way for an output of this size, by measurement."""
    if not library.wide():
        return False
    if problem.q.shape[2] < _FEW:
        return few.pays(problem)
    products = problem.q.numel() * problem.k.shape[2]
    if problem.q.dtype in (torch.float32, torch.float16) and problem.q.shape[2] >= _QUERIES:
        return products >= _PRODUCTS
    return products >= _LARGE


def forward(problem: Problem, form: Form, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the output, shape (batch, heads, m, e), and the log-sum-exp without the constant of each row.

    None where tokens hold NaN, infinity or numbers so large that products overflow.
    """
    found = find(problem, form, {"lse": True, "rounded": v.dtype is form.q.dtype}, v=v)
    return None if found is None else (found["out"].to(v.dtype), found["lse"])


@torch.no_grad()
def find(
    problem: Problem, form: Form, wanted: Mapping[str, Any], *, v: Tensor | None = None, lse: Tensor | None = None
) -> dict[str, Tensor] | None:
    """Return what is wanted of the matrix, as `walks.find` names it, in one walk along its rows and at most one more.

    Parameters
    ----------
    problem : Problem
        The matrix.
    form : Form
        Its logits.
    wanted : mapping
        Names and what they need; also ``rounded`` (True) where the output will be rounded to the dtype of the tokens.
    v : Tensor, optional, shape (batch, value heads, n, e)
        Values; then ``out`` is found too.
    lse : Tensor, optional, shape (batch, heads, m)
        Log-sum-exp without the constant of each row, if it is known.

    Returns
    -------
    dict of str to Tensor, or None
        None where tokens hold NaN, infinity or numbers so large that products overflow.
    """
    form, v = aligned(form, v)
    if lse is None and wanted.keys() & walks.GIVEN:
        wanted = {**wanted, "lse": True}

    def run(rows: slice, fields: dict[str, Any]) -> bool:
        return _call(replace(form, q=form.q[:, :, rows]), problem.shape[3], fields, v)

    rounded = int(wanted.get("rounded", False))
    return walks.find(problem, wanted, run, size=None if v is None else v.shape[-1], lse=lse, rounded=rounded)


def read(
    problem: Problem, form: Form, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
) -> dict[str, Tensor] | None:
    """Return what `find` does, of the logits with the constant of each row: statistics speak of those."""
    if form.row is None:
        return find(problem, form, wanted, v=v, lse=lse)
    found = find(problem, form, wanted, v=v, lse=None if lse is None else lse - form.row)
    for name in ("lse", "max_logit", "mean"):
        if found is not None and name in found:
            found[name] = found[name] + form.row
    return found


def aligned(form: Form, v: Tensor | None) -> tuple[Form, Tensor | None]:
    """Give keys and values as many heads as the other has, one dtype, and a last axis without gaps."""
    q, k = form.q, form.k.to(form.q.dtype)
    if v is not None:
        v = v.to(q.dtype)
        if v.shape[1] != k.shape[1]:
            heads = max(v.shape[1], k.shape[1])
            heads = heads if heads % v.shape[1] == 0 and heads % k.shape[1] == 0 else q.shape[1]
            k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
        v = dense(v)
    return replace(form, q=dense(q), k=dense(k)), v


def dense(t: Tensor) -> Tensor:
    """Return a tensor whose last axis has no gaps."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _call(form: Form, n: int, fields: dict[str, Any], v: Tensor | None) -> bool:
    """Fill results by one call; return whether the tokens allowed it."""
    batch, heads, m, d = form.q.shape
    if v is not None:
        fields |= {"v": tensor4(v), "e": v.shape[-1], "value_heads": v.shape[1]}
    status = library.call(
        "dot",
        batch=batch,
        heads=heads,
        key_heads=form.k.shape[1],
        m=m,
        n=n,
        d=d,
        q=tensor4(form.q),
        k=tensor4(form.k),
        type=few.type_of(form.q.dtype),
        threads=_threads(form.q, n),
        scale=form.scale,
        cap=form.cap,
        **fields,
    )
    return done(status, form)


def done(status: int, form: Form) -> bool:
    """Return whether a kernel did what it was asked for; False where the tokens do not allow it."""
    if status not in (library.code("DONE"), library.code("NOT_FINITE")):
        raise BackendError(
            "attlas.engine.native",
            "a kernel must do what it was asked for.",
            {"q": form.q, "k": form.k},
            found=f"status {status}",
            fix="Plan(backend='tiled'), and please report it.",
        )
    return status == library.code("DONE")


def _threads(q: Tensor, n: int) -> int:
    """Return how many threads a call uses."""
    if q.shape[2] < _FEW:
        return few.threads(q, n)
    return library.threads() if q.numel() * n > SMALL else 1


def tensor4(t: Tensor) -> Any:
    """Return a tensor of four axes as the kernels see it; the caller keeps it alive."""
    return library.structure("Tensor4")(t.data_ptr(), *t.stride()[:3])
