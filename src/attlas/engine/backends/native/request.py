"""One call of the kernels: memory for the results, the mask, and the rows of each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine import outputs
from attlas.engine.problem import Problem
from attlas.engine.tiling import ColumnBlock, allowed_cells, segments_of
from attlas.foundation.tiles import Tile, cut
from attlas.masks.base import Mask

_MASK_BYTES = 1 << 25  # bytes of a mask that are written out at a time
_MASK_ROWS = 512  # rows written out at a time: of more rows, fewer segments of keys are hidden from all


def compute(
    problem: Problem,
    wanted: Mapping[str, Any],
    run: Callable[[slice, dict[str, Any]], bool],
    *,
    v: Tensor | None = None,
    lse: Tensor | None = None,
    **further: Any,
) -> dict[str, Tensor] | None:
    """Return the wanted results, from as many calls of a kernel as the mask needs.

    Parameters
    ----------
    problem : Problem
        The matrix.
    wanted : mapping
        Names and what they need, as `attlas.engine.outputs` lists them; the blocks of both pictures are the same.
    run : callable
        Calls the kernel for some rows, with these fields of the structure ``AttentionParams`` beside its own; False
        where the tokens do not allow it.
    v : Tensor, optional, shape (batch, value heads, n, e)
        Values, where the output is found too.
    lse : Tensor, optional, shape (batch, heads, m)
        Log-sum-exp, if it is known.
    **further
        Fields of each call.

    Returns
    -------
    dict of str to Tensor, or None
        None where a call was refused.
    """
    forms = wanted if v is None else {**wanted, "out": v}
    results = outputs.zeros(problem, forms)
    for block in row_blocks(problem):
        m = len(block.rows)
        part = results if m == problem.shape[2] else outputs.zeros(problem, forms, m)
        rows = slice(block.rows.start, block.rows.stop)
        fields, buffers = _mask_and_result_fields(
            problem, block, wanted, part, None if lse is None else lse[:, :, rows].contiguous()
        )
        if not run(rows, fields | further):
            return None
        del buffers  # the tensors behind the addresses in `fields`, alive until here
        if part is not results:
            _put_rows(results, part, rows)
    return results


class RowBlock(NamedTuple):
    """Some rows, and their mask in the fields of the kernels."""

    rows: range
    mask: dict[str, Any]
    buffers: tuple[Tensor, ...]  # what the addresses in `mask` point to

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """The slices of these rows in a tensor of shape (batch, heads, m)."""
        return slice(None), slice(None), slice(self.rows.start, self.rows.stop)


def row_blocks(problem: Problem) -> Iterable[RowBlock]:
    """Return the rows of each call with their mask: a run of allowed keys per row, or a byte per cell."""
    m = problem.shape[2]
    if problem.mask is None:
        return [RowBlock(range(m), {}, ())]
    if problem.allowed_runs is not None:
        return [RowBlock(range(m), *_fields_of_runs(*problem.allowed_runs))]
    return _blocks_of_cells(problem, problem.mask)


def _blocks_of_cells(problem: Problem, mask: Mask) -> Iterator[RowBlock]:
    """Yield the rows of each call with their mask as a byte per cell."""
    batch, heads, m, n = problem.shape
    at = problem.tile(range(batch), range(heads), range(m), range(n))
    # As many rows as stay small even if each batch and head has cells of its own.
    for rows in cut(m, max(min(_MASK_BYTES // (batch * heads * n), _MASK_ROWS), 1)):
        yield RowBlock(rows, *_mask_fields(mask, replace(at, rows=rows)))


def _mask_fields(mask: Mask, at: Tile) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return the mask of some rows in the fields of the kernels, cell by cell; none where all keys are allowed.

    The mask is asked for cells only in segments of keys of which it allows some.
    """
    cells = allowed_cells(at, mask, ColumnBlock(at.columns, tuple(segments_of(at, mask))))
    return ({}, ()) if cells is None else _fields_of_cells(cells, len(at.rows), len(at.columns))


def _put_rows(results: dict[str, Tensor], part: dict[str, Tensor], rows: slice) -> None:
    """Put the results of some rows into those of all.

    Written into their rows, or added up where they are per column.
    """
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


def _mask_and_result_fields(
    problem: Problem, block: RowBlock, wanted: Mapping[str, Any], results: Mapping[str, Tensor], lse: Tensor | None
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return mask, sink and results in the fields of the kernels, and the tensors that they point to."""
    buffers = list(block.buffers)
    fields = block.mask | {name: t.data_ptr() for name, t in results.items() if t.numel()}
    if lse is not None:
        buffers.append(lse)
        fields |= {"lse": lse.data_ptr(), "lse_known": 1, "partial": int(problem.partial)}
    if problem.sink is not None:
        buffers.append(problem.sink.detach().to(problem.dtype).contiguous())
        fields["sink"] = buffers[-1].data_ptr()
    if "largest" in wanted:
        fields["k_largest"] = wanted["largest"]
    picture = wanted.get("picture_sum") or wanted.get("picture_max")
    if picture is not None:
        rows, columns = torch.tensor(picture[0], device="cpu"), torch.tensor(picture[1], device="cpu")
        # The edges that lie within the rows of this call, counted from the first of them.
        buffers += [rows.clamp_(block.rows.start, block.rows.stop).sub_(block.rows.start), columns]
        fields |= {"row_edges": buffers[-2].data_ptr(), "column_edges": buffers[-1].data_ptr()}
        fields |= {"picture_rows": len(rows) - 1, "picture_columns": len(columns) - 1}
    if "coverage" in wanted:
        buffers.append(torch.tensor(wanted["coverage"], dtype=torch.float64, device="cpu"))
        fields |= {"levels": buffers[-1].data_ptr(), "level_count": len(wanted["coverage"])}
    return fields, buffers


def _fields_of_runs(first: Tensor, stop: Tensor) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return the fields for a mask of one run of keys per row, and the tensors that they point to.

    Parameters
    ----------
    first, stop : Tensor of int64, shape (batch or 1, heads or 1, m)
        The first key of each row and the one after its last.
    """
    low, high = first.to(torch.int32).contiguous(), stop.to(torch.int32).contiguous()
    fields = {"low": low.data_ptr(), "high": high.data_ptr()}
    return fields | _stride_fields("span", low), (low, high)


def _fields_of_cells(cells: Tensor, rows: int, n: int) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return the fields for a mask of one byte per cell, and the tensor that they point to.

    Parameters
    ----------
    cells : Tensor of bool, broadcastable to (batch, heads, rows, n)
        True where a row may see a key.
    rows, n : int
        Number of rows and of keys.
    """
    whole = cells[(None,) * (4 - cells.ndim)].expand(-1, -1, rows, n).contiguous()
    fields = {"allowed": whole.data_ptr(), "allowed_row": n}
    return fields | _stride_fields("allowed", whole), (whole,)


def _stride_fields(name: str, t: Tensor) -> dict[str, int]:
    """Return the fields with the strides of batch and heads, 0 where one mask stands for all of them."""
    batch, head = (0 if t.shape[0] == 1 else t.stride(0)), (0 if t.shape[1] == 1 else t.stride(1))
    return {f"{name}_batch": batch, f"{name}_head": head}
