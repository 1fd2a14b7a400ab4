"""What a score of places adds to the logits, in the forms that fused kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.foundation.tiles import Tile


@dataclass(frozen=True, eq=False)
class Bias:
    """Log-weights of places as a sum of up to four terms, none of which repeats what is the same in many cells.

    `Score.bias` returns it for the rows and columns of a tile. Sizes of 1 stand for every batch and every head.

    Parameters
    ----------
    distance : Tensor, optional, shape (batches or 1, heads or 1, rows + columns - 1)
        A number of each distance ``j - i``, the smallest first: that of the last row and the first column.
    key : Tensor, optional, shape (batches or 1, heads or 1, columns)
        A number of each key. It may hold -inf, which forbids the key.
    query : Tensor, optional, shape (batches or 1, heads or 1, rows)
        A number of each query. Softmax sees it beside a sink only; the log-sum-exp always does.
    cell : Tensor, optional, shape (batches or 1, heads or 1, rows or 1, columns or 1)
        A number of each pair, as a tensor that exists already. It may hold -inf, which forbids a pair.
    factor : float
        Factor of `cell`.

    Notes
    -----
    Numbers of queries and keys are added in float64: those of one query and one key may be large where their sum is
    small.

    Examples
    --------
    >>> import torch, attlas
    >>> class Recent(attlas.Score):
    ...     positional = True
    ...
    ...     def forward(self, q, k, at):
    ...         return 0.1 * (at.j - at.i).to(at.dtype)
    ...
    ...     def bias(self, at):
    ...         first = at.columns.start - (at.rows.stop - 1)
    ...         steps = torch.arange(first, at.columns.stop - at.rows.start, dtype=at.dtype)
    ...         return attlas.scores.Bias(distance=0.1 * steps.view(1, 1, -1))
    >>> q, k, v = torch.randn(50, 4), torch.randn(70, 4), torch.randn(70, 3)
    >>> A = attlas.attend(q, k, score=attlas.ScaledDot() + Recent())
    >>> (A @ v).shape, A.check() < 1e-5
    (torch.Size([50, 3]), True)
    """

    distance: Tensor | None = None
    key: Tensor | None = None
    query: Tensor | None = None
    cell: Tensor | None = None
    factor: float = 1.0

    @property
    def linear(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The terms whose memory is linear: `distance`, `key` and `query`."""
        return self.distance, self.key, self.query

    def cells(self, at: Tile) -> Tensor:
        """Return the sum of all terms for a tile of neighbouring rows and columns, broadcastable to its shape."""
        total = torch.zeros(1, 1, 1, 1, dtype=at.dtype, device=at.device)
        if self.cell is not None:
            total = total + self.cell.to(at.dtype) * self.factor
        if self.distance is not None:
            # Each row of the tile reads a window of the distances that begins one place before that of the row above.
            total = total + self.distance.unfold(-1, len(at.columns), 1).flip(-2)
        tokens = _sum_of_terms(
            None if self.query is None else self.query.to(torch.float64).unsqueeze(-1),
            None if self.key is None else self.key.to(torch.float64).unsqueeze(-2),
        )
        return total if tokens is None else total + tokens.to(at.dtype)


def added(a: Bias | None, b: Bias | None) -> Bias | None:
    """Return the sum of two biases; None where one is None, or where both have `cell`, of which a Bias has only one."""
    if a is None or b is None or (a.cell is not None and b.cell is not None):
        return None
    distance, key, query = (_sum_of_terms(x, y) for x, y in zip(a.linear, b.linear, strict=True))
    # The one with `cell` keeps it, and its factor.
    return replace(b if a.cell is None else a, distance=distance, key=key, query=query)


def scaled(bias: Bias | None, factor: float | Tensor) -> Bias | None:
    """Return a bias times one number, or times one number for each head of the tile; None where that is impossible.

    A factor per head cannot scale `cell`, which may be the same for all heads and is multiplied by one number.
    """
    if bias is None or (isinstance(factor, Tensor) and bias.cell is not None):
        return None
    of_heads = factor.reshape(1, -1, 1) if isinstance(factor, Tensor) else factor
    distance, key, query = (None if t is None else t * of_heads for t in bias.linear)
    of_cell = bias.factor if isinstance(factor, Tensor) else bias.factor * factor
    return Bias(distance, key, query, bias.cell, of_cell)


def _sum_of_terms(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two terms; None counts as 0."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
