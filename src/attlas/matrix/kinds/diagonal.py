"""A diagonal matrix, lazy: the identity of ``0.5 * A + 0.5 * attlas.eye(n)``, or one number for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.engine.problem import spread_heads, version_of
from attlas.errors import BackendError, ModifiedError, public
from attlas.foundation.compat import cached_property, tracing
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.sweep import SweptWeights
from attlas.matrix.weights import check_kind


class DiagonalWeights(SweptWeights):
    """Weights that are 0 outside of the diagonal.

    Parameters
    ----------
    diagonal : Tensor, shape (batch, heads, n)
        The numbers of the diagonal, in the dtype of the weights.
    rows, columns : range, optional
        Which queries and keys of the n there are; the default is all.
    is_identity : bool
        Whether all of the diagonal is 1.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part of.
    """

    def __init__(
        self,
        diagonal: Tensor,
        rows: range | None = None,
        columns: range | None = None,
        *,
        is_identity: bool = False,
        whole: WeightGradient | None = None,
    ) -> None:
        n = diagonal.shape[-1]
        self.diagonal, self.is_identity = diagonal, is_identity
        self.rows, self.columns = range(n) if rows is None else rows, range(n) if columns is None else columns
        self.shape = (*diagonal.shape[:2], len(self.rows), len(self.columns))
        self.dtype, self.device, self.mask = diagonal.dtype, diagonal.device, None
        self.are_shares, self.are_signed = is_identity, not is_identity
        # A row of an identity whose 1 lies outside of these columns is still a row of shares, of which none is here.
        self.counts_other_keys = is_identity and self.rows != self.columns
        self.key_heads = diagonal.shape[1]
        self._whole = whole
        # Notices when the numbers are changed in place later.
        self._made_of = None if tracing() else version_of("diagonal", diagonal)

    def to_dict(self) -> dict[str, Any]:
        rows, columns = ([span.start, span.stop] for span in (self.rows, self.columns))
        return {"diagonal": self.diagonal, "rows": rows, "columns": columns, "is_identity": self.is_identity}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> DiagonalWeights:
        # The weights of settings that a file has; a ValueError where they do not fit together.
        diagonal = settings["diagonal"]
        check_kind("diagonal", diagonal, Tensor)
        rows, columns = (range(*settings[name]) for name in ("rows", "columns"))
        n = diagonal.shape[-1]
        if diagonal.ndim != 3 or not all(0 <= span.start <= span.stop <= n for span in (rows, columns)):
            raise ValueError(f"a diagonal of shape {tuple(diagonal.shape)}, rows {rows}, columns {columns}")
        return cls(diagonal, rows, columns, is_identity=settings["is_identity"] is True)

    # ---------------------------------------------------------------------------------------------------------- facts

    @property
    def inputs(self) -> list[Tensor]:
        return [self.diagonal]

    @cached_property
    def queries(self) -> Tensor:  # type: ignore[override]  # computed here
        """Numbers of the diagonal at the rows, shape (batch, heads, m, 1)."""
        return self.diagonal[..., self.rows.start : self.rows.stop, None]

    @cached_property
    def keys(self) -> Tensor:  # type: ignore[override]  # computed here
        """Numbers of the diagonal at the columns, shape (batch, heads, n, 1)."""
        return self.diagonal[..., self.columns.start : self.columns.stop, None]

    @cached_property
    def batch_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        """Batches, counted from 0."""
        return torch.arange(self.shape[0], device="cpu")

    @cached_property
    def head_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        """Heads, counted from 0."""
        return torch.arange(self.shape[1], device="cpu")

    def check_unchanged(self) -> None:
        if self._made_of is not None and not tracing() and self._made_of.is_outdated:
            rule = "the diagonal must not change after the matrix was made."
            raise ModifiedError(rule, "it was changed in place", "diagonal.clone()", diagonal=self.diagonal)

    @property
    def description(self) -> str:
        return "identity" if self.is_identity else "diagonal"

    # ---------------------------------------------------------------------------------------------------------- verbs

    @cached_property
    def _tokens_on_diagonal(self) -> range:
        """The tokens that are among the rows and among the columns."""
        start = max(self.rows.start, self.columns.start)
        return range(start, max(start, min(self.rows.stop, self.columns.stop)))

    @public("A @ v")
    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        # Each row of values times its number on the diagonal.
        if dropout is not None:
            raise BackendError("dropout acts on the weights of a softmax.", self.description, "A @ v without dropout")
        self.check_unchanged()
        return self._values_times_diagonal(v, self.columns, self.rows)

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        self.check_unchanged()
        return self._values_times_diagonal(x, self.rows, self.columns)

    def _values_times_diagonal(self, v: Tensor, given: range, wanted: range) -> Tensor:
        """Return values at the tokens `given`, times the diagonal, placed at the tokens `wanted`.

        0 where there are none.
        """
        v, both = spread_heads(v, self.shape[1]), self._tokens_on_diagonal
        own = v[:, :, both.start - given.start : both.stop - given.start] if len(both) else v[:, :, :0]
        scaled = own * self.diagonal[..., both.start : both.stop, None].to(v.dtype)
        before = both.start - wanted.start if len(both) else 0
        return torch.nn.functional.pad(scaled, (0, 0, before, len(wanted) - before - len(both)))

    @public("A[...]")
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        # i and j are positions in the whole matrix, of which this may be a window.
        self.check_no_logits(logits)
        self.check_unchanged()
        i, j = (
            (
                torch.arange(some.start, some.stop, device=self.device)
                if isinstance(some, range)
                else some.to(self.device)
            )
            + offset.start
            for some, offset in ((rows, self.rows), (columns, self.columns))
        )
        return torch.where(i.unsqueeze(-1) == j, self.diagonal[..., i, None], 0.0)

    def defined_cells(self, rows: Tensor) -> Tensor:
        return self.cells(rows, range(self.shape[3])).double()

    def sums(self, *, over_keys: bool) -> Tensor:
        given, wanted = (self.columns, self.rows) if over_keys else (self.rows, self.columns)
        ones = self.diagonal.new_ones(1, 1, len(given), 1).expand(*self.shape[:2], -1, -1)
        return self._values_times_diagonal(ones, given, wanted)

    # ----------------------------------------------------------------------------------------------- parts and copies

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> DiagonalWeights:
        # `rows` and `columns` are the window of the whole matrix that this part has.
        diagonal = self.diagonal if batches is None else self.diagonal[batches]
        diagonal = diagonal if heads is None else diagonal[:, heads]
        rows, columns = (
            own if some is None else range(own.start + some.start, own.start + some.stop)
            for own, some in ((self.rows, rows), (self.columns, columns))
        )
        whole = self.gradient if self.requires_grad else None
        return DiagonalWeights(diagonal, rows, columns, is_identity=self.is_identity, whole=whole)

    def expanded(self, batch: int, heads: int) -> DiagonalWeights:
        """Return the same diagonal for more batches and heads, without a copy."""
        diagonal = self.diagonal.expand(batch, heads, -1)
        return DiagonalWeights(diagonal, self.rows, self.columns, is_identity=self.is_identity)

    def _with_diagonal(self, diagonal: Tensor) -> DiagonalWeights:
        """Return the weights of another diagonal at the same rows and columns."""
        return DiagonalWeights(diagonal, self.rows, self.columns, is_identity=self.is_identity)

    def detach(self) -> DiagonalWeights:
        return self._with_diagonal(self.diagonal.detach()) if self.requires_grad else self

    def full_precision(self) -> DiagonalWeights:
        return self

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> DiagonalWeights:
        return self._with_diagonal(self.diagonal.to(device, dtype))
