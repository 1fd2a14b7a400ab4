"""Weights of stick-breaking attention: each key takes its share of what the keys after it have left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attlas.engine import operations
from attlas.engine.tiling import ColumnBlock
from attlas.errors import public
from attlas.foundation.compat import cached_property
from attlas.foundation.tiles import Tile, cut
from attlas.masks.base import BlockState, Mask
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.kinds.of_logits import WeightsOfLogits
from attlas.matrix.softmax import SoftmaxWeights, cut_out
from attlas.matrix.weights import check_kind

_MOST_KEPT_LOGITS = 1 << 22  # logits of some rows that are kept between two looks at them
_KEYS_AT_ONCE = 2048  # keys that are looked at together


class StickBreakingWeights(WeightsOfLogits):
    """``A_ij = sigmoid(s_ij) Π_{l > j} (1 - sigmoid(s_il))`` over the keys l that the mask allows.

    Parameters
    ----------
    of_logits : SoftmaxWeights
        Gives the logits, with all keys; its softmax is not computed.
    columns : range
        The keys of this matrix among those.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part of.

    Notes
    -----
    A weight depends on all keys after its own. The keys of some rows are looked at from the last to the first, for the
    sums of ``log(1 - sigmoid)``, and then once more where their logits take more than 4 Mi numbers. The weights of a
    row sum to ``1 - Π (1 - sigmoid)``: they are shares, and have an entropy.
    """

    are_shares, are_signed = True, False

    def __init__(
        self, of_logits: SoftmaxWeights, columns: range | None = None, whole: WeightGradient | None = None
    ) -> None:
        inner = of_logits
        self.of_logits = inner
        self.columns = range(inner.shape[3]) if columns is None else columns
        self.shape = *inner.shape[:3], len(self.columns)
        self.dtype, self.device = inner.dtype, inner.device
        self.queries, self.key_heads = inner.queries, inner.key_heads
        self.keys = inner.keys[:, :, self.columns.start : self.columns.stop]
        self._whole = whole

    def to_dict(self) -> dict[str, Any]:
        return {"of_logits": self.of_logits, "first": self.columns.start, "stop": self.columns.stop}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> StickBreakingWeights:
        inner, first, stop = settings["of_logits"], settings["first"], settings["stop"]
        check_kind("of_logits", inner, SoftmaxWeights)
        for name, place in (("first", first), ("stop", stop)):
            check_kind(name, place, int)
        if not 0 <= first <= stop <= inner.shape[3]:
            raise ValueError(f"keys {first} to {stop} of {inner.shape[3]}")
        return cls(inner, range(first, stop))

    # ---------------------------------------------------------------------------------------------------------- facts

    @cached_property
    def mask(self) -> Mask | None:  # type: ignore[override]  # computed here
        """Which pairs may have a weight."""
        inner = self.of_logits
        if len(self.columns) == inner.shape[3]:
            return inner.mask
        return cut_out(inner.problem, range(inner.shape[2]), self.columns).mask

    @property
    def description(self) -> str:
        return f"stick-breaking, {self.of_logits.description}"

    # ---------------------------------------------------------------------------------------------------------- verbs

    @public("A[...]")
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        shift, n = self.columns.start, self.of_logits.shape[3]
        places = columns + shift if isinstance(columns, Tensor) else range(columns.start + shift, columns.stop + shift)
        if logits or not len(columns) or not len(rows):
            found = self.of_logits.cells(rows, places, logits=True)
            return found if logits else found.clone()
        first = places.start if isinstance(places, range) else int(places.min())
        chosen = places - first if isinstance(places, Tensor) else range(len(places))

        def some(rows: range | Tensor) -> Tensor:
            weights = _weights_after_keys(self.of_logits.cells(rows, range(first, n), logits=True))
            if isinstance(chosen, range):
                return weights[..., : len(chosen)]
            return weights.index_select(-1, chosen.to(weights.device))

        # All keys after the first are looked at, of some rows at a time.
        most = max(1, _MOST_KEPT_LOGITS // max(self.shape[0] * self.shape[1] * (n - first), 1))
        groups = [rows[span.start : span.stop] for span in cut(len(rows), most)]
        again = self.needs_graph and not self.is_symbolic and len(groups) > 1
        parts = [checkpoint(some, group, use_reentrant=False) if again else some(group) for group in groups]
        return self.with_cells(rows, columns, parts[0] if len(parts) == 1 else torch.cat(parts, 2))

    def row_tiles(self, at: Tile, blocks: Sequence[ColumnBlock]) -> Iterator[Tensor]:
        problem, shift = self.of_logits.problem, self.columns.start
        spans = [range(block.columns.start + shift, block.columns.stop + shift) for block in blocks]

        def logits(columns: range) -> Tensor | None:
            """Return the logits of some keys; None where the mask hides all."""
            tile = problem.tile(at.batches, at.heads, at.rows, columns)
            if problem.mask is not None and problem.mask.coverage(tile) is BlockState.EMPTY:
                return None
            return operations.cells(problem, tile, self.of_logits.plan, None, "logits")

        stop = problem.shape[3]
        size = len(at.batches) * len(at.heads) * len(at.rows)
        keeps = size * (stop - (spans[0].start if spans else stop)) <= _MOST_KEPT_LOGITS
        left = torch.zeros(len(at.batches), len(at.heads), len(at.rows), 1, dtype=self.dtype, device=self.device)
        known: list[tuple[Tensor, Tensor | None]] = []  # of each block, the last first
        for span in reversed(spans):
            for part in cut(stop - span.stop, _KEYS_AT_ONCE):  # keys after the block that are in none
                found = logits(range(span.stop + part.start, span.stop + part.stop))
                left = left if found is None else left + _log_remaining(found).sum(-1, keepdim=True)
            found = logits(span)
            known.append((left, found if keeps else None))
            left = left if found is None else left + _log_remaining(found).sum(-1, keepdim=True)
            stop = span.start
        for span in spans:
            after, found = known.pop()
            found = found if keeps else logits(span)
            yield after.new_zeros(*after.shape[:3], len(span)) if found is None else _weights_after_keys(found, after)

    def defined_cells(self, rows: Tensor) -> Tensor:
        weights = _weights_after_keys(operations.defined(self.of_logits.problem, rows)[0])
        return weights[..., self.columns.start : self.columns.stop]

    # ----------------------------------------------------------------------------------------------- parts and copies

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> StickBreakingWeights:
        if batches is None and heads is None and rows is None and columns is None:
            return self
        start = self.columns.start
        own = self.columns if columns is None else range(start + columns.start, start + columns.stop)
        return self._with_logits(self.of_logits.part(batches, heads, rows), own)

    def _with_logits(self, inner: SoftmaxWeights, columns: range | None = None) -> StickBreakingWeights:
        """Return the weights of other logits, at other columns if they are given."""
        own = self.columns if columns is None else columns
        return StickBreakingWeights(inner, own, self.gradient if self.requires_grad else None)

    def detach(self) -> StickBreakingWeights:
        return StickBreakingWeights(self.of_logits.detach(), self.columns)


def _log_remaining(logits: Tensor) -> Tensor:
    """Return the logarithm of the part that each key leaves, 0 for one that the mask hides."""
    hidden = logits == -math.inf
    return functional.logsigmoid(-logits.masked_fill(hidden, 0.0)).masked_fill(hidden, 0.0)


def _weights_after_keys(logits: Tensor, after: Tensor | float = 0.0) -> Tensor:
    """Return the weights of some keys of whole rows, given the logarithm of what the keys after these have left."""
    hidden = logits == -math.inf
    later = functional.pad(_log_remaining(logits)[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    weights = (functional.logsigmoid(logits.masked_fill(hidden, 0.0)) + later + after).exp()
    return weights.masked_fill(hidden, 0.0)
