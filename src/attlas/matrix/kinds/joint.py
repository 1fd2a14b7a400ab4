"""What the heads of a layer bring together from one token to another: norms of sums over heads, and shares of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.engine.problem import spread_heads
from attlas.errors import public
from attlas.foundation.checks import has_float64
from attlas.foundation.compat import cached_property
from attlas.foundation.tiles import cut
from attlas.masks.base import Mask
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.sweep import SweptWeights, each_once, pooled
from attlas.matrix.weights import Weights, check_kind

_CELLS = 1 << 21  # weights of all heads that are read at once


class JointNorms(SweptWeights):
    """``‖Σ_h A^h_ij t^h_j‖``: the norm of what some heads bring together from key j to query i.

    Parameters
    ----------
    of_heads : Weights, shape (batch, groups * heads, m, n)
        The weights of the heads; the heads of a group stand beside each other.
    factors : Tensor, shape (batch, groups, n, heads, heads)
        For each key the factor L of the products ``L Lᵀ`` of its vectors t, as `factors_of` gives it.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part of.

    Notes
    -----
    The sum itself has the width of the model; its norm is that of ``a L``, as many numbers as there are heads. A cell
    costs ``heads`` weights and ``heads²`` products. Products, sums and statistics see tiles.
    """

    are_shares, are_signed = False, False

    def __init__(self, of_heads: Weights, factors: Tensor, whole: WeightGradient | None = None) -> None:
        self.of_heads, self.factors = of_heads, factors
        groups, own = factors.shape[1], factors.shape[3]
        self.shape = (of_heads.shape[0], groups, *of_heads.shape[2:])
        self.dtype, self.device = of_heads.dtype, of_heads.device
        # Rows and columns are made of the tokens of the first head of each group.
        self.queries = of_heads.queries[:, ::own]
        self.keys, self.key_heads = spread_heads(of_heads.keys, groups * own)[:, ::own], groups
        self.batch_ids, self.head_ids = of_heads.batch_ids, of_heads.head_ids[::own]
        self._whole = whole

    def to_dict(self) -> dict[str, Any]:
        return {"of_heads": self.of_heads, "factors": self.factors}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> JointNorms:
        # The weights of settings that a file has; a ValueError where they do not fit together.
        of_heads, factors = settings["of_heads"], settings["factors"]
        check_kind("of_heads", of_heads, Weights)
        check_kind("factors", factors, Tensor)
        batch, heads, _, n = of_heads.shape
        if factors.ndim != 5 or factors.shape[1] * factors.shape[3] != heads:
            raise ValueError(f"factors of shape {tuple(factors.shape)} of {heads} heads")
        if factors.shape != (batch, factors.shape[1], n, factors.shape[3], factors.shape[3]):
            raise ValueError(f"factors of shape {tuple(factors.shape)} of weights of shape {of_heads.shape}")
        return cls(of_heads, factors)

    # ---------------------------------------------------------------------------------------------------------- facts

    @property
    def inputs(self) -> list[Tensor]:
        return each_once([*self.of_heads.inputs, self.factors])

    @cached_property
    def mask(self) -> Mask | None:  # type: ignore[override]  # computed here
        """The mask of the heads; None where it may differ between them, or may allow several runs of keys."""
        runs = self.of_heads.allowed_runs
        same = runs is not None and all(run.shape[1] == 1 or bool((run == run[:, :1]).all()) for run in runs)
        return self.of_heads.mask if same else None

    @property
    def is_symbolic(self) -> bool:
        return self.of_heads.is_symbolic

    def check_unchanged(self) -> None:
        self.of_heads.check_unchanged()

    @property
    def description(self) -> str:
        return f"norms of {self.factors.shape[3]} heads together, {self.of_heads.description}"

    # ---------------------------------------------------------------------------------------------------------- verbs

    @public("A @ v")
    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        return self.with_product(pooled(self, v, dropout), v, dropout)

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        return self.with_product(pooled(self, x, transposed=True), x, transposed=True)

    @public("A[...]")
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        self.check_no_logits(logits)
        self.check_unchanged()
        factors = of_keys(self.factors, columns)

        def some(rows: range | Tensor) -> Tensor:
            return norms_of_sums(by_group(self.of_heads.cells(rows, columns), factors), factors).to(self.dtype)

        return self.with_cells(rows, columns, in_parts(some, rows, self.of_heads.shape[:2], len(columns)))

    def defined_cells(self, rows: Tensor) -> Tensor:
        factors = self.factors.double().cpu()
        return norms_of_sums(by_group(self.of_heads.defined_cells(rows).cpu(), factors), factors)

    # ----------------------------------------------------------------------------------------------- parts and copies

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> JointNorms:
        # Heads are groups of those of the inner weights.
        if batches is None and heads is None and rows is None and columns is None:
            return self
        inner = self.of_heads.part(batches, heads_of_groups(heads, self.factors), rows, columns)
        factors = self.factors if batches is None else self.factors[batches]
        factors = factors if heads is None else factors[:, heads]
        factors = factors if columns is None else factors[:, :, columns.start : columns.stop]
        return self._replaced(inner, factors)

    def _replaced(self, of_heads: Weights, factors: Tensor) -> JointNorms:
        """Return the norms of other weights and factors, as a part of these."""
        return JointNorms(of_heads, factors, self.gradient if self.requires_grad else None)

    def detach(self) -> JointNorms:
        return JointNorms(self.of_heads.detach(), self.factors.detach()) if self.requires_grad else self

    def full_precision(self) -> JointNorms:
        inner = self.of_heads.full_precision()
        return self if inner is self.of_heads else self._replaced(inner, self.factors)

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> JointNorms | None:
        inner = self.of_heads.moved(device, dtype)
        return None if inner is None else self._replaced(inner, self.factors.to(device, dtype or self.factors.dtype))


def factors_of(values: Tensor, outward: Tensor) -> Tensor:
    """Return for each key the factor L of the products of what its heads write, shape (batch, 1, n, heads, heads).

    Parameters
    ----------
    values : Tensor, shape (batch, value heads, n, e)
        The values; each head of them serves as many heads of the layer.
    outward : Tensor, shape (heads, e, width)
        The linear map behind each head.

    Notes
    -----
    ``L Lᵀ`` is the matrix of the products of the vectors ``v_h W_h`` of a key. A factor, and not the products, since
    its rounding is that of the vectors, while products square how much heads cancel. It is made in float64, of some
    keys at a time. A vector of 0 has a row of 0, and vectors that depend on each other do not stop it: to products of
    vectors of length 1 a few roundings are added.
    """
    heads, _, width = outward.shape
    there = values.device if has_float64(values.device) else torch.device("cpu")
    found = []
    for keys in cut(values.shape[2], max(_CELLS // (heads * width), 1)):
        own = spread_heads(values[:, :, keys.start : keys.stop], heads).to(outward.dtype)
        written = torch.empty(len(own), len(keys), heads, width, dtype=torch.float64, device=there)
        for head in range(heads):
            written[:, :, head] = (own[:, head] @ outward[head]).to(there)
        products = written @ written.mT
        sizes = products.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
        divisors = torch.where(sizes > 0, sizes, 1.0)
        products = products / (divisors * divisors.mT)
        products.diagonal(dim1=-2, dim2=-1).fill_(1.0 + 8 * heads * torch.finfo(torch.float64).eps)
        factors, _ = torch.linalg.cholesky_ex(products)
        found.append((factors * sizes).to(outward.device, outward.dtype))
    return torch.cat(found, dim=1).unsqueeze(1)


def heads_of_groups(groups: Tensor | slice | None, factors: Tensor) -> Tensor | slice | None:
    """Return the inner heads of some groups of factors of shape (batch, groups, n, heads, heads)."""
    if groups is None:
        return None
    count, own = factors.shape[1], factors.shape[3]
    return torch.arange(count * own, device="cpu").view(count, own)[groups].flatten()


def in_parts(
    some: Callable[[range | Tensor], Tensor], rows: range | Tensor, leading: tuple[int, int], columns: int
) -> Tensor:
    """Return `some` of all rows, called for as many at a time as need little memory for the weights of all heads."""
    most = max(_CELLS // max(leading[0] * leading[1] * columns, 1), 1)
    if len(rows) <= most:
        return some(rows)
    return torch.cat([some(rows[span.start : span.stop]) for span in cut(len(rows), most)], dim=2)


def of_keys(t: Tensor, columns: range | Tensor) -> Tensor:
    """Return what belongs to some keys of a tensor of shape (batch, groups, n, ...)."""
    if isinstance(columns, range):
        return t[:, :, columns.start : columns.stop]
    return torch.index_select(t, 2, columns.to(t.device))


def by_group(cells: Tensor, factors: Tensor) -> Tensor:
    """Return weights of heads, (batch, groups * heads, m, n), as (batch, groups, n, m, heads)."""
    found: Tensor = cells.unflatten(1, (factors.shape[1], factors.shape[3])).permute(0, 1, 4, 3, 2)
    return found.contiguous()


def norms_of_sums(weights: Tensor, factors: Tensor) -> Tensor:
    """Return the norms of weights ``a`` times factors, shape (batch, groups, m, n)."""
    found: Tensor = torch.linalg.vector_norm(weights.to(factors.dtype) @ factors, dim=-1)
    return found.mT
