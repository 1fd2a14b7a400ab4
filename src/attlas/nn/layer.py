"""What the pooling layers share: lengths or a mask, dropout, and the weights of the last call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, RecordingError, ShapeError, public
from attlas.foundation.checks import check_probability
from attlas.foundation.compat import cached_property, changes, tracing, transforming
from attlas.foundation.tiles import Tile
from attlas.masks import BlockState, Mask
from attlas.masks.argument import as_mask
from attlas.masks.runs import RunPerRow
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.nn.cache import KVCache
from attlas.recording import pooled
from attlas.scores import Score


class ValidLengths(RunPerRow):
    """Each query sees the first keys of its sequence: key j where ``j < length``.

    Parameters
    ----------
    where : str
        The layer, for error texts.
    lengths : Tensor of int, shape (batch,) or (batch, m)
        Number of real keys of each sequence, or of each query. A length above n means all keys.
    """

    def __init__(self, where: str, lengths: Tensor) -> None:
        if not isinstance(lengths, Tensor):
            lengths = torch.as_tensor(lengths)
        if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
            rule, given = "valid_lens must be whole numbers.", {"valid_lens": lengths}
            fix = "count the real keys: valid_lens = real.sum(-1); or pass mask=real[:, None, None, :]."
            raise DtypeError(rule, str(lengths.dtype).removeprefix("torch."), fix, arguments=given, where=f"{where}()")
        if lengths.ndim not in (1, 2):
            rule = "valid_lens must have the shape (batch,) or (batch, m)."
            fix = "give one length for each sequence: torch.tensor([7, 5])."
            raise ShapeError(rule, f"{lengths.ndim} axes", fix, valid_lens=lengths, where=f"{where}()")
        self.where = where
        self.lengths = lengths if lengths.ndim == 2 else lengths.unsqueeze(1)
        stop = self.lengths.long().unsqueeze(1)
        super().__init__(torch.zeros_like(stop), stop)

    def coverage(self, at: Tile) -> BlockState:
        # Compares the columns with the shortest and the longest length.
        if at.column_index is not None or not len(at.columns):
            return BlockState.PARTIAL
        least, most = self._least_and_largest
        if at.columns.start >= most:
            return BlockState.EMPTY
        return BlockState.FULL if at.columns.stop <= least else BlockState.PARTIAL

    @cached_property
    def _least_and_largest(self) -> tuple[int, int]:
        """Least and largest length; read once, since a GPU has to be waited for."""
        if not self.lengths.numel():
            return 0, 0
        least, most = torch.aminmax(self.lengths)
        return int(least), int(most)

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        # Overrides `Mask.check`: raises where the lengths fit neither the sequences nor the queries.
        size = math.prod(batch)
        if self.lengths.shape[0] == size and self.lengths.shape[1] in (1, m):
            return
        rule = "valid_lens must hold one length for each sequence, or one for each query."
        given = {"valid_lens": self.lengths, "matrix (batch, heads, m, n)": f"{(size, heads, m, n)}"}
        found = f"shape {tuple(self.lengths.shape)}, batch = {size}, m = {m}"
        fix = f"give {size} lengths, or a tensor of shape ({size}, {m})."
        raise ShapeError(rule, found, fix, arguments=given, where=f"{self.where}()")

    def size(self) -> tuple[int | None, int | None]:
        return None, self._least_and_largest[1]

    def name(self) -> str:
        return f"valid_lens {tuple(self.lengths.shape)}"


class PoolingLayer(nn.Module):
    """A layer that pools values with weights from queries and keys; the base of the others.

    Parameters
    ----------
    score : Score
        Log-weight of a query and a key.
    dropout : float
        Probability that a weight is dropped in training.
    """

    @public()
    def __init__(self, score: Score, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = check_probability("dropout", dropout)
        self.score = score
        self._last_call: tuple[AttentionMatrix, tuple[int, ...]] | None = None

    @property
    def weights(self) -> AttentionMatrix:
        """Weights of the last call, a lazy matrix without a graph; before dropout.

        The layer holds the queries and keys of that call, not their graph, until the next call or
        ``forget()``. A copy of the layer, and its `state_dict`, leave them out.

        Raises
        ------
        RecordingError
            If there was no call, or the parameters of the layer have changed since.
        """
        if self._last_call is None:
            rule = "the layer must have been called, outside of torch.compile, torch.export and torch.func."
            fix = "out = layer(queries, keys, values); layer.weights[..., :64, :]"
            raise RecordingError(rule, "no call that can be read", fix, where=f"{type(self).__name__}.weights")
        matrix, versions = self._last_call
        if versions != _parameter_versions(self):
            rule = "weights are computed when they are read, with the parameters that made them."
            found = "parameters that have changed since the call"
            fix = "read layer.weights before optimizer.step(), or call the layer again."
            raise RecordingError(rule, found, fix, where=f"{type(self).__name__}.weights")
        return matrix

    def forget(self) -> None:
        """Let go of the queries and keys of the last call."""
        self._last_call = None

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None = None,
        mask: Mask | Tensor | Callable[..., Any] | None = None,
    ) -> Tensor:
        """Pool the values with the weights of each query."""
        if valid_lens is not None:
            lengths = ValidLengths(type(self).__name__, valid_lens)
            mask = lengths if mask is None else lengths & as_mask(mask)
        weights = attend(queries, keys, self.score, mask)
        out, matrix = pooled(self, weights, values, dropout_p=self.dropout if self.training else 0.0)
        # What torch records or transforms are stand-ins, which mean nothing after the call.
        self._last_call = None if tracing() else (matrix.detach(), _parameter_versions(self))
        return out

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a pickle, of the layer is its parameters, not the tokens of a call.
        return {**self.__dict__, "_last_call": None}

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" if self.dropout else ""


def positions(cache: KVCache | Any, layer: int, m: int, n: int) -> dict[str, Any]:
    """Return the positions in the text of query 0 and of key 0, as `attlas.recording.pooled` takes them.

    Parameters
    ----------
    cache : KVCache, optional
        The cache that the keys come from. Of another cache nothing is known.
    layer : int
        Number of the layer in the cache.
    m, n : int
        Number of queries and of keys, without keys that the layer appends.
    """
    if not isinstance(cache, KVCache):
        return {}
    seen = cache.get_seq_length(layer)
    return {"first_query": seen - m, "first_key": seen - n}


def returned_weights(matrix: AttentionMatrix) -> AttentionMatrix | None:
    """Return the weights without a graph; None inside torch.export and torch.func, whose results hold tensors only."""
    return None if transforming() or torch.compiler.is_exporting() else matrix.detach()


def _parameter_versions(layer: nn.Module) -> tuple[int, ...]:
    """Return how often each parameter was changed in place: equal only if none has changed since.

    Nothing is compared in a compiled program.
    """
    if torch.compiler.is_compiling():
        return ()
    return tuple(changes(p) for p in layer.parameters())
