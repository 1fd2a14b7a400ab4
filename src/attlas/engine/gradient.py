"""The gradient of a loss in each cell of a matrix, as the statistics of one backward give it together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.engine.problem import spread_heads

#: Takes a `Part` and gives a tensor that broadcasts to its shape.
OfTile: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True, eq=False)
class CellGradient:
    """The gradient of a loss in the weights P and the logits S of a matrix.

    In a weight it is ``dP_ij = left_i · right_j + row_i + log_i ln P_ij + square_i P_ij + column_j``, and what the
    functions `weights` give of a tile. In the logit of a key that the query may see it is
    ``P_ij (dP_ij - Σ_j P_ij dP_ij + lse_i) + mean_i + linear_i (S_ij - centre_i)``, and what the functions `logits`
    give. A tensor that is None counts as 0.

    Parameters
    ----------
    left : Tensor, shape (batch, heads, m, e)
        Vectors of the rows.
    right : Tensor, shape (batch, value heads, n, e)
        Vectors of the columns.
    column : Tensor, shape (batch, heads, n)
        A number of each column.
    row, log, square, lse, mean, linear, centre : Tensor, shape (batch, heads, m)
        Numbers of each row.
    delta : Tensor, shape (batch, heads, m)
        ``Σ_j P_ij dP_ij`` of the terms left, log and square, known from the results.
    rows : Tensor of bool, shape (m,)
        Rows outside of which everything is 0; None where that is not known.
    weights, logits : tuple of callable
        Functions of a `Part` that holds whole rows. They are asked for one part after the other, the last rows first.

    Examples
    --------
    >>> import torch
    >>> both = CellGradient(column=torch.ones(1, 1, 3)) + CellGradient(column=torch.ones(1, 1, 3))
    >>> both.column, both.is_closed, both.is_product
    (tensor([[[2., 2., 2.]]]), True, False)
    """

    left: Tensor | None = None
    right: Tensor | None = None
    column: Tensor | None = None
    row: Tensor | None = None
    log: Tensor | None = None
    square: Tensor | None = None
    lse: Tensor | None = None
    mean: Tensor | None = None
    linear: Tensor | None = None
    centre: Tensor | None = None
    delta: Tensor | None = None
    rows: Tensor | None = None
    weights: tuple[OfTile, ...] = ()
    logits: tuple[OfTile, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether there are no functions of tiles."""
        return not (self.weights or self.logits)

    @property
    def is_product(self) -> bool:
        """Whether it is ``left_i · right_j`` alone, the gradient of a product with the matrix."""
        no_other_weights = self.column is None and self.row is None and self.log is None and self.square is None
        nothing_in_logits = self.lse is None and self.mean is None and self.linear is None
        return no_other_weights and nothing_in_logits and self.left is not None and self.is_closed

    @property
    def product(self) -> tuple[Tensor, Tensor, Tensor]:
        """Left, right and delta of a product."""
        if self.left is None or self.right is None or self.delta is None:
            raise TypeError("is_product comes first")
        return self.left, self.right, self.delta

    def __add__(self, other: CellGradient) -> CellGradient:
        """Return the gradient of the sum of two losses, term by term."""
        a, b = self, other
        # `right` may have fewer heads than `left`: to be put side by side, both need as many.
        if a.right is not None and b.right is not None and a.right.shape[1] != b.right.shape[1] and a.left is not None:
            a, b = (replace(x, right=spread_heads(x.right, a.left.shape[1])) for x in (a, b) if x.right is not None)
        return CellGradient(**{f.name: _term_of_sum(f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(a)})


def _term_of_sum(name: str, a: Any, b: Any) -> Any:
    """Return one term of the sum of two gradients; None counts as 0."""
    if a is None or b is None:
        return None if name == "rows" else b if a is None else a  # None in `rows` means that all may count
    if name in ("rows", "centre"):  # the centre is that of a row's logits, the same for all
        return a | b if name == "rows" else a
    # The sum of two products is the product of their vectors side by side.
    return torch.cat([a, b], dim=-1) if name in ("left", "right") else a + b
