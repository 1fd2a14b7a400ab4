"""The weights of an attention matrix as a value: all that anything above the engine computes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.engine.statistic import Statistic
from attlas.errors import AttlasError, DtypeError, ShapeError, kind, public
from attlas.foundation.tiles import Tile
from attlas.masks.base import Mask
from attlas.matrix.gradient import WeightGradient
from attlas.stats import columns, rows


class Weights(ABC):
    """The weights of an attention matrix, which are not stored: one kind for each way to compute them.

    `AttentionMatrix` gives a kind the axes and the methods that users see. Statistics, recordings, tables and the
    viewer compute from these verbs and facts, whichever kind it is.

    Attributes
    ----------
    shape : tuple of int
        Sizes of the axes: batch, heads, queries (m), keys (n).
    dtype : torch.dtype
        Dtype of the numbers that reads give.
    device : torch.device
        Where everything is computed.
    mask : Mask or None
        Which pairs may have a weight; None for all.
    are_shares : bool
        Whether the weights of a row are shares of one: then they are not negative, and have an entropy.
    are_signed : bool
        Whether a weight may be negative.
    counts_other_keys : bool
        Whether the rows are parts of longer ones, so that their weights sum to less than 1.
    queries, keys : Tensor, shapes (batch, heads, m, d) and (batch, key heads, n, dk)
        What the rows and the columns are made of. Values of a product have the dtype and the device of the keys.
    key_heads : int
        Heads of the keys; each serves as many heads of queries.
    batch_ids, head_ids : Tensor of int64, shapes (batch,) and (heads,)
        Batches and heads as the user counts them, on the CPU.
    allowed_runs : tuple of Tensor or None
        The first key that each query may see and the one after its last, int64, shape (batch or 1, heads or 1, m); None
        where a query may see more than one run of keys, or where there is no mask.
    gradient : WeightGradient
        The gradient of the weights themselves, for ``A.retain_grad()``.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    mask: Mask | None
    are_shares: bool
    are_signed: bool = False
    counts_other_keys: bool
    queries: Tensor
    keys: Tensor
    key_heads: int
    batch_ids: Tensor
    head_ids: Tensor
    allowed_runs: tuple[Tensor, Tensor] | None
    gradient: WeightGradient
    #: The statistics that are known to be collected after the next product: one call of a kernel may give them with it.
    announced: tuple[Statistic, ...] = ()

    def check_shares(self) -> None:
        """Raise a ShapeError unless rows are shares of 1: weights times the norms of values are not."""
        if not self.are_shares:
            found = "value-weighted weights, whose rows do not sum to 1"
            fix = "ask the matrix without norms, Entry.matrix; or stats.RowMass(), stats.Coverage() of this one."
            raise ShapeError("weights must be shares of a row.", found, fix, A=f"shape {self.shape}")

    def check_statistics(self, statistics: Sequence[Statistic]) -> None:
        """Raise a ShapeError, by its name, for a statistic that these weights do not have."""
        for statistic in statistics:
            if statistic.of_shares and not self.are_shares:
                with public(f"{type(statistic).__name__}()"):
                    self.check_shares()

    def has(self, statistic: Statistic) -> bool:
        """Return whether these weights have a statistic: an entropy, for example, needs rows that are shares of 1."""
        try:
            self.check_statistics([statistic])
        except AttlasError:
            return False
        return True

    @property
    def softmax(self) -> Any:
        """These weights where they are a softmax, which has logits and a log-sum-exp; None for another kind."""
        return None

    def of_softmax(self, where: str) -> Any:
        """Return these weights where they are a softmax; raise a DtypeError by name where they are of another kind."""
        rule = "it is a property of a softmax, and these weights are none."
        fix = "A[...], A @ v, or attlas.stats."
        raise DtypeError(rule, kind(self), fix, A=type(self).__name__, where=where)

    def to_dict(self) -> dict[str, Any] | None:
        """Return the settings from which `from_dict` makes these weights again, or None where they are not stored.

        The values are numbers, texts, tensors, other weights, and lists of these.
        """
        return None

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Weights:
        """Return the weights of which `to_dict` gave these settings; a ValueError where they fit no weights."""
        raise ValueError(f"{cls.__name__} is not stored")

    # ---------------------------------------------------------------------------------------------------------- facts

    @property
    @abstractmethod
    def inputs(self) -> list[Tensor]:
        """The tensors that the weights depend on and that a gradient may reach."""

    @property
    @abstractmethod
    def requires_grad(self) -> bool:
        """Whether a tensor that the weights depend on records a graph."""

    @property
    @abstractmethod
    def needs_graph(self) -> bool:
        """Whether what is computed now must record a graph for a gradient."""

    @property
    @abstractmethod
    def is_symbolic(self) -> bool:
        """Whether everything must be computed by torch's own operations: in a traced program, or without numbers."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise a ModifiedError if a tensor that the weights depend on was changed in place."""

    @abstractmethod
    def check_numbers(self) -> None:
        """Raise a BackendError where the tensors hold no numbers, as on the meta device."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What `repr` says of the kind and its parts, after shape and dtype."""

    @abstractmethod
    def rows_with_keys(self) -> Tensor | None:
        """Return which queries may see a key, broadcastable to (batch, heads, m); None where that is not known."""

    @abstractmethod
    def tile(self, batches: range, heads: range, rows: range, columns: range, **index: Tensor | None) -> Tile:
        """Return the position of some batches, heads, rows and columns, with the numbers that users count them by.

        `row_index` and `column_index`, where given, name the rows and columns, in any order.
        """

    # ---------------------------------------------------------------------------------------------------------- verbs

    @abstractmethod
    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Return ``A @ v``, shape (batch, heads, m, e), of values of shape (batch, value heads, n, e)."""

    @abstractmethod
    def transposed_product(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x``, shape (batch, heads, n, e), of vectors of shape (batch, their heads, m, e)."""

    @abstractmethod
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        """Return weights, or log-weights, shape (batch, heads, len(rows), len(columns))."""

    @abstractmethod
    def defined_cells(self, rows: Tensor) -> Tensor:
        """Return the weights of some rows and all keys by the definition in float64, for `AttentionMatrix.check`."""

    @abstractmethod
    def collect(self, statistics: Sequence[Statistic]) -> list[Any]:
        """Return the result of each statistic, with the axes (batch, heads, ...)."""

    def sums(self, *, over_keys: bool) -> Tensor:
        """Return the sum of each row, shape (batch, heads, m, 1), or of each column, shape (batch, heads, n, 1)."""
        total: Tensor = self.collect([rows.RowMass() if over_keys else columns.ColumnMass()])[0].unsqueeze(-1)
        return total

    @abstractmethod
    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Self:
        """Return the weights of some batches, heads, queries and keys; None stands for all of an axis."""

    @abstractmethod
    def detach(self) -> Self:
        """Return the same weights without a graph."""

    @abstractmethod
    def full_precision(self) -> Self:
        """Return the same weights of tokens in the dtype of the weights, so that they are multiplied with weights."""

    @abstractmethod
    def moved(self, device: torch.device, dtype: torch.dtype | None) -> Self | None:
        """Return the same weights on another device, or in another dtype, lazy; None where only a Tensor can be."""


def check_kind(name: str, value: object, wanted: Any) -> None:
    """Raise a ValueError where a stored setting is of another type; for `Weights.from_dict`."""
    if not isinstance(value, wanted):
        raise ValueError(f"{name} is a {type(value).__name__}")
