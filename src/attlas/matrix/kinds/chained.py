"""The product of two matrices, lazy: ``A @ B``, one layer after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.engine.problem import spread_heads
from attlas.errors import BackendError, public
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.sweep import SweptWeights, each_once
from attlas.matrix.weights import Weights, check_kind


class ChainedWeights(SweptWeights):
    """The product of two matrices, ``left @ right``: vectors pass through one after the other.

    Parameters
    ----------
    left, right : Weights, shapes (batch, heads, m, l) and (batch, heads, l, n)
        The factors.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part of.

    Notes
    -----
    ``(A @ B) @ v`` costs two products and no memory. Cells cost a product with `right` for each row: a whole pass of
    it for each block of rows, so that statistics which need every cell cost as much as the dense product.
    """

    def __init__(self, left: Weights, right: Weights, whole: WeightGradient | None = None) -> None:
        self.left, self.right = left, right
        self.shape = (*left.shape[:3], right.shape[3])
        self.dtype, self.device = torch.promote_types(left.dtype, right.dtype), left.device
        self.mask = None
        # As in `Weights`: whether rows are shares of 1, signs, and whether rows are parts of longer ones.
        self.are_shares = left.are_shares and right.are_shares
        self.are_signed = any(side.are_signed for side in (left, right))
        self.counts_other_keys = left.counts_other_keys or right.counts_other_keys
        self.queries, self.keys, self.key_heads = left.queries, right.keys, right.key_heads
        self.batch_ids, self.head_ids = left.batch_ids, left.head_ids
        self._whole = whole

    def to_dict(self) -> dict[str, Any]:
        return {"left": self.left, "right": self.right}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> ChainedWeights:
        # The weights of settings that a file has; a ValueError where they do not fit together.
        left, right = settings["left"], settings["right"]
        for side in (left, right):
            check_kind("a factor", side, Weights)
        if left.shape[:2] != right.shape[:2] or left.shape[3] != right.shape[2]:
            raise ValueError(f"factors of shapes {left.shape} and {right.shape}")
        return cls(left, right)

    @property
    def inputs(self) -> list[Tensor]:
        return each_once([*self.left.inputs, *self.right.inputs])

    @property
    def is_symbolic(self) -> bool:
        return self.left.is_symbolic or self.right.is_symbolic

    def check_unchanged(self) -> None:
        self.left.check_unchanged()
        self.right.check_unchanged()

    @property
    def description(self) -> str:
        return f"({self.left.description}) @ ({self.right.description})"

    def rows_with_keys(self) -> Tensor | None:
        return None

    @public("A @ v")
    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        # ``(A @ B) @ v`` is computed as ``A @ (B @ v)``.
        if dropout is not None:
            rule = "dropout drops weights of one matrix, and this is a product of two."
            raise BackendError(rule, "A @ B", "dropout on each of the two products")
        out = self.left.product(self.right.product(v).to(self.left.keys.dtype)).to(v.dtype)
        return self.with_product(out, v)

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        through = self.left.transposed_product(spread_heads(x, self.shape[1]))
        out = self.right.transposed_product(through.to(self.right.queries.dtype)).to(x.dtype)
        return self.with_product(out, x, transposed=True)

    @public("A[...]")
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        """Return some cells: the shorter side is written out, and the other factor multiplied with it."""
        self.check_no_logits(logits)
        width = self.left.shape[3]
        left, right = self.left.full_precision(), self.right.full_precision()
        if len(columns) < len(rows):  # the shorter side is written out
            found = left.product(right.cells(range(width), columns).to(left.keys.dtype))
            found = found[:, :, rows.start : rows.stop] if isinstance(rows, range) else found[:, :, rows]
        else:
            found = right.transposed_product(left.cells(rows, range(width)).mT.to(right.queries.dtype)).mT
            found = found[..., columns.start : columns.stop] if isinstance(columns, range) else found[..., columns]
        found = found.to(self.dtype)
        return self.with_cells(rows, columns, found)

    def defined_cells(self, rows: Tensor) -> Tensor:
        width = self.left.shape[3]
        right = torch.cat([self.right.defined_cells(some) for some in torch.arange(width).split(64)], dim=2)
        return self.left.defined_cells(rows) @ right

    @public("A.sum()")
    def sums(self, *, over_keys: bool) -> Tensor:
        if over_keys:
            return self.left.full_precision().product(self.right.sums(over_keys=True))
        return self.right.full_precision().transposed_product(self.left.sums(over_keys=False))

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> ChainedWeights:
        # Rows are cut from the left factor, columns from the right one.
        if batches is None and heads is None and rows is None and columns is None:
            return self
        left, right = self.left.part(batches, heads, rows, None), self.right.part(batches, heads, None, columns)
        return ChainedWeights(left, right, self.gradient if self.requires_grad else None)

    def detach(self) -> ChainedWeights:
        return ChainedWeights(self.left.detach(), self.right.detach()) if self.requires_grad else self

    def full_precision(self) -> ChainedWeights:
        whole = self.gradient if self.requires_grad else None
        return ChainedWeights(self.left.full_precision(), self.right.full_precision(), whole)

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> ChainedWeights | None:
        left, right = (side.moved(device, dtype) for side in (self.left, self.right))
        return None if left is None or right is None else ChainedWeights(left, right)
