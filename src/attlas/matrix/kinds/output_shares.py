"""How near what a token brings comes to the output of a layer, as shares of a row: ALTI, with Euclidean norms."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.engine.problem import spread_heads
from attlas.errors import public
from attlas.foundation.compat import cached_property
from attlas.masks.base import Mask
from attlas.matrix.kinds.joint import JointNorms, by_group, heads_of_groups, in_parts, norms_of_sums, of_keys
from attlas.matrix.sweep import SweptWeights, pooled
from attlas.matrix.weights import check_kind


class Outputs(NamedTuple):
    """What the shares need of the output y and the residual stream x of each query.

    Attributes
    ----------
    toward : Tensor, shape (batch, groups * heads, m, e)
        y behind the transposed linear map of each head, so that ``toward_i · v_j`` is the product of y and ``v_j W``.
    squares : Tensor, shape (batch, groups, m)
        ``‖y‖²``.
    crossed : Tensor, shape (batch, groups * heads, m)
        The product of x and what each head writes of the query's own value.
    offsets : Tensor, shape (batch, groups, m)
        ``2 y · x - ‖x‖²``.
    """

    toward: Tensor
    squares: Tensor
    crossed: Tensor
    offsets: Tensor

    def part(self, batches: Any, groups: Any, heads: Any, rows: range | None) -> Outputs:
        """Return those of some batches, groups with their heads, and queries; None stands for all of an axis."""
        found = []
        for t, own in zip(self, (heads, groups, heads, groups), strict=True):
            some = t if batches is None else t[batches]
            some = some if own is None else some[:, own]
            found.append(some if rows is None else some[:, :, rows.start : rows.stop])
        return Outputs(*found)

    def of_rows(self, rows: range | Tensor) -> Outputs:
        """Return those of some queries."""
        return Outputs(*(of_keys(t, rows) for t in self))


class OutputShares(SweptWeights):
    """``max(0, ‖y_i‖ - ‖y_i - T_ij‖)``, divided by the sum of the row, where T_ij is what key j brings to output y_i.

    Parameters
    ----------
    norms : JointNorms, shape (batch, groups, m, all keys)
        The heads, and the norms of what they bring.
    values : Tensor, shape (batch, groups * heads, all keys, e)
        The values of each head.
    outputs : Outputs
        What is needed of each query.
    own : int
        The key of query 0 itself, which brings the residual stream as well.
    columns : range, optional
        The keys of this matrix among all.
    totals : Tensor, optional, shape (batch, groups, m)
        Sums of the rows that are known; NaN for the others. They are filled in when they are needed.

    Notes
    -----
    ``‖y‖ - ‖y - T‖ = d / (‖y‖ + √(‖y‖² - d))`` with ``d = 2 y · T - ‖T‖²``, which small T leave exact. Both
    terms of d are products of vectors as long as a value, or as there are heads. There is no gradient.
    """

    are_shares, are_signed = True, False
    requires_grad = False

    def __init__(
        self,
        norms: JointNorms,
        values: Tensor,
        outputs: Outputs,
        own: int,
        columns: range | None = None,
        totals: Tensor | None = None,
    ) -> None:
        self.norms, self.values, self.outputs, self.own = norms, values, outputs, own
        self.columns = range(norms.shape[3]) if columns is None else columns
        self.totals = torch.full_like(outputs.squares, math.nan) if totals is None else totals
        self.shape = (*norms.shape[:3], len(self.columns))
        self.dtype, self.device, self.key_heads = norms.dtype, norms.device, norms.key_heads
        self.queries, self.keys = norms.queries, norms.keys[:, :, self.columns.start : self.columns.stop]
        self.batch_ids, self.head_ids = norms.batch_ids, norms.head_ids
        self.counts_other_keys = len(self.columns) < norms.shape[3]

    def to_dict(self) -> dict[str, Any]:
        columns = [self.columns.start, self.columns.stop]
        tensors = {"values": self.values, "outputs": list(self.outputs), "totals": self.totals}
        return {"norms": self.norms, "own": self.own, "columns": columns, **tensors}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> OutputShares:
        # The weights of settings that a file has; a ValueError where they do not fit together.
        norms, values, own, totals = (settings[name] for name in ("norms", "values", "own", "totals"))
        outputs, columns = Outputs(*settings["outputs"]), range(*settings["columns"])
        check_kind("norms", norms, JointNorms)
        check_kind("own", own, int)
        for t in (values, totals, *outputs):
            check_kind("a tensor of the shares", t, Tensor)
        (batch, groups, m, n), heads, e = norms.shape, norms.of_heads.shape[1], values.shape[-1]
        of_groups = (batch, groups, m)
        wanted = [(batch, heads, n, e), of_groups, (batch, heads, m, e), of_groups, (batch, heads, m), of_groups]
        found = [tuple(t.shape) for t in (values, totals, *outputs)]
        if found != wanted or not 0 <= columns.start <= columns.stop <= n:
            raise ValueError(f"tensors of shapes {found}, keys {columns}, of norms of shape {norms.shape}")
        return cls(norms, values, outputs, own, columns, totals)

    # ---------------------------------------------------------------------------------------------------------- facts

    @property
    def inputs(self) -> list[Tensor]:
        return [*self.norms.inputs, self.values, *self.outputs]

    @cached_property
    def mask(self) -> Mask | None:  # type: ignore[override]  # computed here
        """The mask of the heads; None where it hides a query's own token, which brings the residual stream."""
        runs = self.norms.allowed_runs
        at = torch.arange(self.own, self.own + self.shape[2], device=self.device)
        if runs is None or bool(((at < runs[0]) | (at >= runs[1])).any()):
            return None
        return self.norms.part(columns=self.columns).mask

    @property
    def is_symbolic(self) -> bool:
        return self.norms.is_symbolic

    def check_unchanged(self) -> None:
        self.norms.check_unchanged()

    @property
    def description(self) -> str:
        return f"shares of the output, {self.norms.description}"

    # ---------------------------------------------------------------------------------------------------------- verbs

    @public("A @ v")
    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        return pooled(self, v, dropout)

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        return pooled(self, x, transposed=True)

    @public("A[...]")
    @torch.no_grad()
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        self.check_no_logits(logits)
        self.check_unchanged()
        shift = self.columns.start
        places = columns + shift if isinstance(columns, Tensor) else range(columns.start + shift, columns.stop + shift)

        def some(rows: range | Tensor) -> Tensor:
            totals = self._totals_of(rows).unsqueeze(-1)
            return torch.where(totals > 0, self._near(rows, places) / totals, 0.0)

        return in_parts(some, rows, self.norms.of_heads.shape[:2], len(columns))

    def _totals_of(self, rows: range | Tensor) -> Tensor:
        """Return the sums of some rows over all keys, and remember them."""
        found = of_keys(self.totals, rows)
        if bool(found.isnan().any()):
            every, leading = range(self.norms.shape[3]), self.norms.of_heads.shape[:2]
            found = in_parts(lambda some: self._near(some, every).sum(-1), rows, leading, len(every))
            at = slice(rows.start, rows.stop) if isinstance(rows, range) else rows.to(self.device)
            self.totals[:, :, at] = found
        return found

    def _near(self, rows: range | Tensor, places: range | Tensor) -> Tensor:
        """Return how near each key brings its queries, before the division, shape (batch, groups, m, n)."""
        return self._nearness(self.norms.of_heads.cells(rows, places), rows, places, self.dtype)

    def _nearness(self, weights: Tensor, rows: range | Tensor, places: range | Tensor, dtype: torch.dtype) -> Tensor:
        """Return what `_near` does of weights of the heads that were read."""
        own, factors, values = (
            t.to(dtype) for t in (weights, of_keys(self.norms.factors, places), of_keys(self.values, places))
        )
        outputs = Outputs(*(t.to(dtype) for t in self.outputs.of_rows(rows)))
        groups = self.norms.shape[1]
        along = (own * (outputs.toward @ values.mT)).unflatten(1, (groups, -1)).sum(2)
        change = 2 * along - norms_of_sums(by_group(own, factors), factors).square()
        i, j = (torch.arange(t.start, t.stop) if isinstance(t, range) else t for t in (rows, places))
        at_own = (i.unsqueeze(-1) + self.own == j).to(own.device)
        crossed = (own * outputs.crossed.unsqueeze(-1)).unflatten(1, (groups, -1)).sum(2)
        change = change + torch.where(at_own, outputs.offsets.unsqueeze(-1) - 2 * crossed, 0.0)
        squares = outputs.squares.unsqueeze(-1)
        near: Tensor = change / (squares.sqrt() + (squares - change).clamp_min(0).sqrt())
        return near.clamp_min(0).nan_to_num(0.0)

    def defined_cells(self, rows: Tensor) -> Tensor:
        every = range(self.norms.shape[3])
        weights = self.norms.of_heads.defined_cells(rows).to(self.device)
        near = self._nearness(weights, rows, every, torch.float64)
        return (near / near.sum(-1, keepdim=True)).nan_to_num(0.0)[..., self.columns.start : self.columns.stop]

    # ----------------------------------------------------------------------------------------------- parts and copies

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> OutputShares:
        # All keys stay, since the sum of a row counts them. Slices share the sums that are known.
        inner = heads_of_groups(heads, self.norms.factors)
        totals, values = self.totals, self.values
        for axis, some, of_heads in ((0, batches, batches), (1, heads, inner)):
            if some is not None:
                totals, values = totals[(slice(None),) * axis + (some,)], values[(slice(None),) * axis + (of_heads,)]
        totals = totals if rows is None else totals[:, :, rows.start : rows.stop]
        start = self.columns.start
        own = self.columns if columns is None else range(start + columns.start, start + columns.stop)
        norms = self.norms.part(batches, heads, rows)
        outputs = self.outputs.part(batches, heads, inner, rows)
        return OutputShares(norms, values, outputs, self.own + (0 if rows is None else rows.start), own, totals)

    def detach(self) -> OutputShares:
        return self

    def full_precision(self) -> OutputShares:
        norms = self.norms.full_precision()
        return self if norms is self.norms else self._of(norms, self.device, None)

    def _of(self, norms: JointNorms, device: torch.device, dtype: torch.dtype | None) -> OutputShares:
        """Return the same shares of other norms, on a device and in a dtype."""
        values, totals, *outputs = (t.to(device, dtype) for t in (self.values, self.totals, *self.outputs))
        return OutputShares(norms, values, Outputs(*outputs), self.own, self.columns, totals)

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> OutputShares | None:
        norms = self.norms.moved(device, dtype)
        return None if norms is None else self._of(norms, device, dtype)


def output_shares(
    norms: JointNorms, values: Tensor, outward: Tensor, stream: Tensor, bias: Tensor | None
) -> OutputShares:
    """Return the shares of outputs ``y = x + Σ A v W + bias`` of one layer.

    Parameters
    ----------
    norms : JointNorms, shape (batch, 1, m, n)
        Norms of what its heads bring together.
    values : Tensor, shape (batch, value heads, n, e)
        The values; each head of them serves as many heads of the layer.
    outward : Tensor, shape (heads, e, width)
        The linear map behind each head.
    stream : Tensor, shape (batch, m, width)
        The residual stream x that the layer reads, and adds to. The last query is at the last key.
    bias : Tensor, optional, shape (width,)
        The bias of the linear map.
    """
    of_heads, (heads, size, _) = norms.of_heads, outward.shape
    m, n = of_heads.shape[2:]
    values, together = spread_heads(values, heads), outward.flatten(0, 1)
    y = of_heads.product(values).transpose(1, 2).flatten(2) @ together + stream
    y = y if bias is None else y + bias
    # The output, and the stream, behind the transposed map of each head.
    toward, of_stream = ((t @ together.mT).unflatten(-1, (heads, size)).transpose(1, 2) for t in (y, stream))
    crossed = (of_stream * values[:, :, n - m :]).sum(-1)
    offsets = 2 * (y * stream).sum(-1) - stream.square().sum(-1)
    outputs = Outputs(toward, y.square().sum(-1).unsqueeze(1), crossed, offsets.unsqueeze(1))
    return OutputShares(norms, values, outputs, n - m)
