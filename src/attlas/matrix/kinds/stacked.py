"""Several matrices along a new first axis, lazy: ``torch.stack([A, B])``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.engine.outputs import MISSING
from attlas.engine.statistic import Statistic
from attlas.errors import BackendError, public
from attlas.foundation.compat import cached_property
from attlas.foundation.trees import rebuilt, tensors_in
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.sweep import SweptWeights, each_once
from attlas.matrix.weights import Weights, check_kind


class StackedWeights(SweptWeights):
    """The weights of several matrices, one after the other along the axis of batches.

    Parameters
    ----------
    parts : sequence of Weights
        The matrices; all have the same number of heads, queries and keys.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part of.

    Notes
    -----
    Everything is computed of each matrix by itself, and put together.
    """

    def __init__(self, parts: Sequence[Weights], whole: WeightGradient | None = None) -> None:
        self.parts = tuple(parts)
        first = self.parts[0]
        self._edges = [0, *accumulate(part.shape[0] for part in self.parts)]
        self.shape = (self._edges[-1], *first.shape[1:])
        self.dtype, self.device = first.dtype, first.device
        self.key_heads = first.key_heads
        # As in `Weights`: whether rows are shares of 1, signs, and whether rows are parts of longer ones.
        self.are_shares = all(part.are_shares for part in self.parts)
        self.are_signed = any(part.are_signed for part in self.parts)
        self.counts_other_keys = any(part.counts_other_keys for part in self.parts)
        self.mask = None
        self.head_ids = first.head_ids
        self._whole = whole

    def to_dict(self) -> dict[str, Any]:
        return {"parts": list(self.parts)}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> StackedWeights:
        # The weights of settings that a file has; a ValueError where they do not fit together.
        parts = settings["parts"]
        for part in parts:
            check_kind("a part", part, Weights)
            if part.shape[1:] != parts[0].shape[1:]:
                raise ValueError(f"matrices of shapes {parts[0].shape} and {part.shape}")
        return cls(parts)

    # ---------------------------------------------------------------------------------------------------------- facts

    @property
    def inputs(self) -> list[Tensor]:
        return each_once(t for part in self.parts for t in part.inputs)

    @cached_property
    def queries(self) -> Tensor:  # type: ignore[override]  # computed here
        """Queries of the shape of all; they hold no numbers, since those of each matrix stay where they are."""
        return self._expanded_to_batches(self.parts[0].queries)

    @cached_property
    def keys(self) -> Tensor:  # type: ignore[override]  # computed here
        """Keys of the shape of all; see `queries`."""
        return self._expanded_to_batches(self.parts[0].keys)

    def _expanded_to_batches(self, tokens: Tensor) -> Tensor:
        """Return the tokens of one batch, expanded to the number of all batches."""
        return tokens.detach()[:1].expand(self.shape[0], *tokens.shape[1:]) if tokens.shape[0] else tokens

    @cached_property
    def batch_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        """Batches of all matrices, counted on."""
        return torch.arange(self.shape[0], device="cpu")

    @property
    def is_symbolic(self) -> bool:
        return any(part.is_symbolic for part in self.parts)

    def check_unchanged(self) -> None:
        for part in self.parts:
            part.check_unchanged()

    @property
    def description(self) -> str:
        return f"{len(self.parts)} stacked: {self.parts[0].description}" + ", ..." * (len(self.parts) > 1)

    def rows_with_keys(self) -> Tensor | None:
        found = [part.rows_with_keys() for part in self.parts]
        known = [rows.expand(part.shape[:3]) for rows, part in zip(found, self.parts, strict=True) if rows is not None]
        return torch.cat(known) if len(known) == len(found) else None

    # ---------------------------------------------------------------------------------------------------------- verbs

    def _part_of_each_matrix(self, t: Tensor) -> list[Tensor]:
        """Return the part of a tensor, axes (batch, ...), that belongs to each matrix."""
        return [t[start:stop] for start, stop in pairwise(self._edges)]

    @staticmethod
    def _concatenated_batches(results: Sequence[Any]) -> Any:
        """Return results of the matrices, tensors or tuples of them, along the axis of batches."""
        columns = zip(*map(tensors_in, results), strict=True)
        return rebuilt(results[0], [torch.cat(column) for column in columns])

    @public("A @ v")
    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        # Each stacked matrix times its own values, joined.
        if dropout is not None:
            rule = "dropout draws by batch and head, and stacked matrices have batches of their own."
            raise BackendError(rule, "stacked matrices", "dropout on the product of each matrix")
        pairs = zip(self.parts, self._part_of_each_matrix(v), strict=True)
        out: Tensor = self._concatenated_batches([part.product(own) for part, own in pairs])
        return self.with_product(out, v)

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        pairs = zip(self.parts, self._part_of_each_matrix(x), strict=True)
        out: Tensor = self._concatenated_batches([part.transposed_product(own) for part, own in pairs])
        return self.with_product(out, x, transposed=True)

    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        found: Tensor = self._concatenated_batches([part.cells(rows, columns, logits=logits) for part in self.parts])
        return self.with_cells(rows, columns, found)

    def defined_cells(self, rows: Tensor) -> Tensor:
        found: Tensor = self._concatenated_batches([part.defined_cells(rows) for part in self.parts])
        return found

    def without_sweep(self, statistic: Statistic) -> Any:
        """Collect a statistic of each matrix on its own; MISSING for one that joins heads."""
        found = super().without_sweep(statistic)
        if found is not MISSING or statistic.joins_heads:
            return found
        return self._concatenated_batches([part.collect([statistic])[0] for part in self.parts])

    def sums(self, *, over_keys: bool) -> Tensor:
        found: Tensor = self._concatenated_batches([part.sums(over_keys=over_keys) for part in self.parts])
        return found

    # ----------------------------------------------------------------------------------------------- parts and copies

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Any:  # a single matrix is one of its own kind
        # The weights of some batches, heads, queries and keys; None stands for all of an axis.
        if batches is None:
            return self._map_matrices(lambda part: part.part(None, heads, rows, columns))
        numbers = torch.arange(self.shape[0], device="cpu")[batches].tolist()
        found: list[Weights] = []
        for start, stop, part in zip(self._edges, self._edges[1:], self.parts, strict=False):
            own = [number - start for number in numbers if start <= number < stop]
            if own:
                every = own == list(range(stop - start))
                found.append(part.part(None if every else torch.tensor(own), heads, rows, columns))
        if numbers != sorted(numbers):  # each matrix has kept its own order: one by one
            found = [self.part(slice(number, number + 1), heads, rows, columns) for number in numbers]
        if not found:
            found = [self.parts[0].part(slice(0, 0), heads, rows, columns)]
        return found[0] if len(found) == 1 else StackedWeights(found, self.gradient if self.requires_grad else None)

    def _map_matrices(self, f: Callable[[Weights], Weights]) -> StackedWeights:
        """Return a stack of `f` of each matrix."""
        return StackedWeights([f(part) for part in self.parts], self.gradient if self.requires_grad else None)

    def detach(self) -> StackedWeights:
        return StackedWeights([part.detach() for part in self.parts]) if self.requires_grad else self

    def full_precision(self) -> StackedWeights:
        return self._map_matrices(lambda part: part.full_precision())

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> StackedWeights | None:
        found = [part.moved(device, dtype) for part in self.parts]
        some = [part for part in found if part is not None]
        return StackedWeights(some) if len(some) == len(found) else None
