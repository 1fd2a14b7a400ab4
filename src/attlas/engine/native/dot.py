"""Scaled dot products on the processor's widest vectors: output, log-sum-exp and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.cover import strips
from attlas.engine.native import few, library, seen
from attlas.engine.problem import Problem
from attlas.errors import BackendError, explain
from attlas.masks.base import Coverage, Mask
from attlas.scores.base import Dot, Score, Tokens
from attlas.scores.dot import SoftCap
from attlas.tiles import Tile, cut

__all__ = [
    "SMALL",
    "Form",
    "Picture",
    "aligned",
    "dense",
    "find",
    "form_of",
    "forward",
    "panels",
    "pays",
    "refusal",
    "tensor4",
]

_PANEL = 1 << 25  # bytes of a mask that are written out at a time
_ROWS = 512  # rows of such a part: more, and fewer stretches of keys are hidden from all of them
SMALL = 1 << 23  # products below which threads cost more than they save
# Where keys and values are packed, an output is faster from so many products on, and for float32 and float16 from so
# many queries and products on; by measurement against torch's kernel.
_LARGE = 1 << 30
_QUERIES, _PRODUCTS = 512, 1 << 24
_FEW = 16  # queries below which keys and values are not packed
_PER_ROW = ("lse", "entropy", "squares", "mass", "max_logit", "mean", "variance")


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


class Picture(NamedTuple):
    """Blocks of a picture: the first row and column of each, and one more at the end."""

    rows: Tensor
    columns: Tensor


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
    """Return what is wanted of the matrix, in one walk along its rows and at most one along its columns.

    Parameters
    ----------
    problem : Problem
        The matrix.
    form : Form
        Its logits.
    wanted : mapping
        Names and what they need: ``lse``, ``entropy``, ``squares``, ``mass``, ``max_logit``, ``mean``,
        ``variance`` (True), ``largest`` (how many), ``column_mass``, ``column_max``, ``offsets`` (True),
        ``picture_sum``, ``picture_max`` (a `Picture`, the same for both), ``coverage`` (levels); ``rounded`` (True)
        where the output will be rounded to the dtype of the tokens.
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
    whole = lse is not None
    if not whole and wanted.keys() & {"column_mass", "column_max", "offsets", "picture_sum", "picture_max", "coverage"}:
        wanted = {**wanted, "lse": True}
    results = _empty(problem, form, wanted, v, problem.shape[2])
    for panel in panels(problem):
        m = len(panel.rows)
        part = results if m == problem.shape[2] else _empty(problem, form, wanted, v, m)
        rows = slice(panel.rows.start, panel.rows.stop)
        here = replace(form, q=form.q[:, :, rows])
        if not _call(problem, here, panel, wanted, part, v, None if lse is None else lse[:, :, rows].contiguous()):
            return None
        if part is not results:
            _join(results, part, rows)
    return results


class _Panel(NamedTuple):
    """Some rows, and what the mask says of them: one run of keys for each row, or cells."""

    rows: range
    interval: tuple[Tensor, Tensor] | None
    cells: Tensor | None


def panels(problem: Problem) -> Iterator[_Panel]:
    """Yield the rows of each call, and what the mask says of them."""
    batch, heads, m, n = problem.shape
    at = problem.tile(range(batch), range(heads), range(m), range(n))
    if problem.mask is None:
        yield _Panel(range(m), None, None)
        return
    if problem.interval is not None:
        yield _Panel(range(m), problem.interval, None)
        return
    # Cells are asked for as many rows as stay small even if each batch and head has its own, and only where the
    # mask does not say of a whole stretch of keys that all or none of them may be seen.
    for rows in cut(m, max(min(_PANEL // (batch * heads * n), _ROWS), 1)):
        yield _Panel(rows, None, _cells(problem.mask, replace(at, rows=rows)))


def _cells(mask: Mask, at: Tile) -> Tensor:
    """Return True where the mask lets rows see keys, shape (batches or 1, heads or 1, rows, n)."""
    segments = strips(at, mask, len(at.columns), whole_rows=True)[0].segments
    asked = {columns: mask.allows(at.narrow(columns)) for columns, coverage in segments if coverage is Coverage.SOME}
    shape = torch.broadcast_shapes((1, 1), *(cells.shape[:-2] for cells in asked.values()))
    cells = torch.zeros(*shape, len(at.rows), len(at.columns), dtype=torch.bool)
    for columns, coverage in segments:
        if coverage is not Coverage.NONE:
            cells[..., columns.start : columns.stop] = asked.get(columns, True)
    return cells


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


def _empty(problem: Problem, form: Form, wanted: Mapping[str, Any], v: Tensor | None, m: int) -> dict[str, Tensor]:
    """Return room for the results of `m` rows."""
    batch, heads, _, n = problem.shape
    shapes: dict[str, tuple[int, ...]] = {name: (m,) for name in _PER_ROW if name in wanted}
    shapes.update({name: (n,) for name in ("column_mass", "column_max") if name in wanted})
    if "largest" in wanted:
        shapes["top_values"] = shapes["top_keys"] = (m, wanted["largest"])
    if "offsets" in wanted:
        shapes["offsets"] = (m + n - 1,)
    for name in ("picture_sum", "picture_max"):
        if name in wanted:
            shapes[name] = (len(wanted[name].rows) - 1, len(wanted[name].columns) - 1)
    if "coverage" in wanted:
        shapes["coverage"] = (m, len(wanted["coverage"]))
    if v is not None:
        shapes["out"] = (m, v.shape[-1])
    return {
        name: torch.zeros(
            batch, heads, *shape, dtype=torch.int64 if name in ("top_keys", "coverage") else problem.dtype
        )
        for name, shape in shapes.items()
    }


def _join(results: dict[str, Tensor], part: dict[str, Tensor], rows: slice) -> None:
    """Put what was found of some rows in its place, or add it where it speaks of columns."""
    for name, found in part.items():
        into = results[name]
        if name in ("column_mass", "picture_sum"):
            into += found
        elif name in ("column_max", "picture_max"):
            torch.maximum(into, found, out=into)
        elif name == "offsets":
            # Diagonal 0 of a part is that of its last row, which stands so much higher in the whole matrix.
            shift = (into.shape[-1] - found.shape[-1]) - rows.start
            into[..., shift : shift + found.shape[-1]] += found
        else:
            into[:, :, rows] = found


def _call(
    problem: Problem,
    form: Form,
    panel: _Panel,
    wanted: Mapping[str, Any],
    results: dict[str, Tensor],
    v: Tensor | None,
    lse: Tensor | None,
) -> bool:
    """Fill results by one call; return whether the tokens allowed it."""
    batch, heads, m, d = form.q.shape
    n = problem.shape[3]
    fields, held = mask_of(panel, m, n)
    fields |= {name: t.data_ptr() for name, t in results.items() if t.numel()}
    if lse is not None:
        fields |= {"lse": lse.data_ptr(), "lse_known": 1}
    if problem.sink is not None:
        held.append(problem.sink.detach().to(problem.dtype).contiguous())
        fields["sink"] = held[-1].data_ptr()
    if v is not None:
        fields |= {"v": tensor4(v), "e": v.shape[-1], "value_heads": v.shape[1]}
    fields["rounded"] = int(wanted.get("rounded", False))
    if "largest" in wanted:
        fields["k_largest"] = wanted["largest"]
    picture = wanted.get("picture_sum") or wanted.get("picture_max")
    if picture is not None:
        edges = picture.rows.clamp(panel.rows.start, panel.rows.stop) - panel.rows.start
        held += [edges.contiguous(), picture.columns.contiguous()]
        fields |= {"row_edges": held[-2].data_ptr(), "column_edges": held[-1].data_ptr()}
        fields |= {"picture_rows": len(picture.rows) - 1, "picture_columns": len(picture.columns) - 1}
    if "coverage" in wanted:
        held.append(torch.tensor(wanted["coverage"], dtype=torch.float64))
        fields |= {"levels": held[-1].data_ptr(), "level_count": len(wanted["coverage"])}
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


def mask_of(panel: _Panel, m: int, n: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the mask of some rows in the fields of the kernels, and the tensors that they point to."""
    fields: dict[str, Any] = {}
    held: list[Tensor] = []
    if panel.interval is not None:
        mask, tensors = seen.of_interval(*panel.interval)
        fields, held = fields | mask, [*held, *tensors]
    if panel.cells is not None:
        mask, tensors = seen.of_cells(panel.cells, m, n)
        fields, held = fields | mask, [*held, *tensors]
    return fields, held


def done(status: int, form: Form) -> bool:
    """Return whether a kernel did what it was asked for; False where the tokens do not allow it."""
    if status not in (library.code("DONE"), library.code("NOT_FINITE")):
        raise BackendError(
            explain(
                "attlas.engine.native",
                "a kernel must do what it was asked for.",
                {"q": form.q, "k": form.k},
                found=f"status {status}",
                fix="Plan(backend='tiled'), and please report it.",
            )
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
