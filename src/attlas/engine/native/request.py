"""One call of the kernels: memory for the results, the mask, and the rows of each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.native import library, masking
from attlas.engine.problem import Problem
from attlas.engine.tiling import column_blocks
from attlas.masks.base import BlockState, Mask
from attlas.tiles import Tile, cut

__all__ = ["GIVEN", "Picture", "compute", "mask_of", "panels"]

_PANEL = 1 << 25  # bytes of a mask that are written out at a time
_ROWS = 512  # rows of such a part: more, and fewer stretches of keys are hidden from all of them
# Results that are not in the dtype of the sums.
_DTYPES = {"top_keys": torch.int64, "coverage": torch.int64, "lse": torch.float64}

#: What can be found only where the log-sum-exp of each row is known.
GIVEN = frozenset({"column_mass", "column_max", "offsets", "picture_sum", "picture_max", "coverage"})


class Picture(NamedTuple):
    """Blocks of a picture: the first row and column of each, and one more at the end."""

    rows: Tensor
    columns: Tensor


def compute(
    problem: Problem,
    wanted: Mapping[str, Any],
    run: Callable[[slice, dict[str, Any]], bool],
    *,
    size: int | None = None,
    lse: Tensor | None = None,
    **further: Any,
) -> dict[str, Tensor] | None:
    """Return what is wanted of the matrix, from as many calls of a kernel as its mask needs.

    Parameters
    ----------
    problem : Problem
        The matrix.
    wanted : mapping
        Names and what they need: ``lse``, ``entropy``, ``squares``, ``mass``, ``max_logit``, ``mean``,
        ``variance`` (True), ``largest`` (how many), ``column_mass``, ``column_max``, ``offsets`` (True),
        ``picture_sum``, ``picture_max`` (a `Picture`, the same for both), ``coverage`` (levels).
    run : callable
        Calls the kernel for some rows, with these fields of the structure ``Dot`` beside its own; False where the
        tokens do not allow it.
    size : int, optional
        Size of the values, where the output is found too.
    lse : Tensor, optional, shape (batch, heads, m)
        Log-sum-exp, if it is known.
    **further
        Fields of each call.

    Returns
    -------
    dict of str to Tensor, or None
        None where a call was refused.
    """
    results = _empty(problem, wanted, size, problem.shape[2])
    for panel in panels(problem):
        m = len(panel.rows)
        part = results if m == problem.shape[2] else _empty(problem, wanted, size, m)
        rows = slice(panel.rows.start, panel.rows.stop)
        fields, held = _fields(problem, panel, wanted, part, None if lse is None else lse[:, :, rows].contiguous())
        if not run(rows, fields | further):
            return None
        del held
        if part is not results:
            _join(results, part, rows)
    return results


class _Panel(NamedTuple):
    """Some rows, and what the mask says of them: one run of keys for each row, or cells."""

    rows: range
    allowed_runs: tuple[Tensor, Tensor] | None
    cells: Tensor | None


def panels(problem: Problem) -> Iterator[_Panel]:
    """Yield the rows of each call, and what the mask says of them."""
    batch, heads, m, n = problem.shape
    at = problem.tile(range(batch), range(heads), range(m), range(n))
    if problem.mask is None:
        yield _Panel(range(m), None, None)
        return
    if problem.allowed_runs is not None:
        yield _Panel(range(m), problem.allowed_runs, None)
        return
    # Cells are asked for as many rows as stay small even if each batch and head has its own, and only where the
    # mask does not say of a whole stretch of keys that all or none of them may be seen.
    for rows in cut(m, max(min(_PANEL // (batch * heads * n), _ROWS), 1)):
        yield _Panel(rows, None, _cells(problem.mask, replace(at, rows=rows)))


def _cells(mask: Mask, at: Tile) -> Tensor:
    """Return True where the mask lets rows see keys, shape (batches or 1, heads or 1, rows, n)."""
    segments = column_blocks(at, mask, len(at.columns), whole_rows=True)[0].segments
    asked = {
        columns: mask.allows(at.narrow(columns)) for columns, coverage in segments if coverage is BlockState.PARTIAL
    }
    shape = torch.broadcast_shapes((1, 1), *(cells.shape[:-2] for cells in asked.values()))
    cells = torch.zeros(*shape, len(at.rows), len(at.columns), dtype=torch.bool, device="cpu")
    for columns, coverage in segments:
        if coverage is not BlockState.EMPTY:
            cells[..., columns.start : columns.stop] = asked.get(columns, True)
    return cells


def _empty(problem: Problem, wanted: Mapping[str, Any], size: int | None, m: int) -> dict[str, Tensor]:
    """Return memory for the results of `m` rows."""
    batch, heads, _, n = problem.shape
    shapes: dict[str, tuple[int, ...]] = {name: (m,) for name in ("lse", *library.row_statistics()) if name in wanted}
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
    if size is not None:
        shapes["out"] = (m, size)
    return {
        name: torch.zeros(
            batch,
            heads,
            *shape,
            dtype=_DTYPES.get(name, problem.dtype),
            device="cpu",  # whatever torch makes by default
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


def _fields(
    problem: Problem, panel: _Panel, wanted: Mapping[str, Any], results: Mapping[str, Tensor], lse: Tensor | None
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return mask, sink and results in the fields of the kernels, and the tensors that they point to."""
    fields, held = mask_of(panel, len(panel.rows), problem.shape[3])
    fields |= {name: t.data_ptr() for name, t in results.items() if t.numel()}
    if lse is not None:
        held.append(lse)
        fields |= {"lse": lse.data_ptr(), "lse_known": 1, "partial": int(problem.partial)}
    if problem.sink is not None:
        held.append(problem.sink.detach().to(problem.dtype).contiguous())
        fields["sink"] = held[-1].data_ptr()
    if "largest" in wanted:
        fields["k_largest"] = wanted["largest"]
    picture = wanted.get("picture_sum") or wanted.get("picture_max")
    if picture is not None:
        edges = picture.rows.clamp(panel.rows.start, panel.rows.stop) - panel.rows.start
        held += [edges.contiguous(), picture.columns.contiguous()]
        fields |= {"row_edges": held[-2].data_ptr(), "column_edges": held[-1].data_ptr()}
        fields |= {"picture_rows": len(picture.rows) - 1, "picture_columns": len(picture.columns) - 1}
    if "coverage" in wanted:
        held.append(torch.tensor(wanted["coverage"], dtype=torch.float64, device="cpu"))
        fields |= {"levels": held[-1].data_ptr(), "level_count": len(wanted["coverage"])}
    return fields, held


def mask_of(panel: _Panel, m: int, n: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the mask of some rows in the fields of the kernels, and the tensors that they point to."""
    fields: dict[str, Any] = {}
    held: list[Tensor] = []
    if panel.allowed_runs is not None:
        mask, tensors = masking.of_runs(*panel.allowed_runs)
        fields, held = fields | mask, [*held, *tensors]
    if panel.cells is not None:
        mask, tensors = masking.of_cells(panel.cells, m, n)
        fields, held = fields | mask, [*held, *tensors]
    return fields, held
