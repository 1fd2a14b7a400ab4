"""The gradient of the weights themselves, for ``A.retain_grad()`` and ``A.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.engine.problem import spread_heads
from attlas.errors import GradientError

Keep: TypeAlias = "Callable[[], Tensor] | None"


class WeightGradient:
    """What flows back into the weights of a matrix: from its products, and from cells that were read with a graph.

    A product ``A @ v`` contributes ``grad vᵀ``, the transposed one ``x gradᵀ``. Both factors are kept, and the matrix
    is written out only when it is asked for. Where the product dropped weights, the contribution is multiplied by the
    factors of the dropout, 0 or ``1 / (1 - p)``, which are computed again: the gradient is that of the weights before
    dropout, which the matrix is.

    Parameters
    ----------
    whole : WeightGradient, optional
        The gradient of the matrix that this one is a part of; it lacks what flows back into the part.
    """

    def __init__(self, whole: WeightGradient | None = None) -> None:
        self.whole = whole
        self.retained = False
        self.missing: str | None = None
        self._products: list[tuple[Any, int, Tensor, bool, Keep]] = []
        self._factors: list[tuple[Tensor, Tensor, Keep]] = []
        self._cells: list[tuple[Tensor, Tensor, Tensor]] = []

    def add_product(self, out: Tensor, right: Tensor, *, transposed: bool = False, keep: Keep = None) -> None:
        """Note a product with a graph, shape (batch, heads, tokens, e), and what the matrix was multiplied with.

        `keep` returns the factor of each weight where some were dropped.
        """
        product = out.grad_fn, out.output_nr, right.detach(), transposed, keep
        self._mark_whole_incomplete()
        self._products.append(product)
        if self.retained:
            self._keep_factors_in_backward(*product)

    def add_cells(self, rows: Tensor | range, columns: Tensor | range, weights: Tensor) -> None:
        """Note weights that were read with a graph, shape (batch, heads, len(rows), len(columns))."""
        self._mark_whole_incomplete()
        if self.retained:
            i, j = (torch.tensor(t) if isinstance(t, range) else t for t in (rows, columns))
            weights.register_hook(lambda grad: self._cells.append((i.unsqueeze(-1), j, grad)))
        else:
            self.mark_incomplete("cells were read before")

    def mark_incomplete(self, reason: str) -> None:
        """Note that something was read whose gradient does not pass through the weights, so that `grad` lacks it."""
        self._mark_whole_incomplete()
        self.missing = self.missing or reason
        if self.retained:
            self._raise_if_incomplete()

    def _mark_whole_incomplete(self) -> None:
        """Note in the gradient of the whole matrix that it lacks what is read of this part."""
        if self.whole is not None:
            self.whole.mark_incomplete("a part of it was read")

    def retain(self) -> None:
        """Keep what flows back from now on."""
        if self.missing:
            self._raise_if_incomplete()
        if not self.retained:
            self.retained = True
            for product in self._products:
                self._keep_factors_in_backward(*product)

    @property
    def is_known(self) -> bool:
        """Whether anything has flowed back."""
        return bool(self._factors or self._cells)

    def total(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the gradient of the weights, shape (batch, heads, m, n)."""
        out = torch.zeros(shape, dtype=dtype, device=device)
        for left, right, keep in self._factors:
            left, right = (spread_heads(t, shape[1]).to(dtype) for t in (left, right))
            out += left @ right.mT if keep is None else (left @ right.mT) * keep()
        for rows, columns, grad in self._cells:
            out.permute(2, 3, 0, 1).index_put_((rows, columns), grad.permute(2, 3, 0, 1), accumulate=True)
        return out

    def _keep_factors_in_backward(self, node: Any, output: int, right: Tensor, transposed: bool, keep: Keep) -> None:
        """Keep both factors of the gradient of a product when it flows back: `left` comes from the backward."""

        def store(grads: tuple[Tensor, ...]) -> None:
            left = grads[output]
            self._factors.append((right, left, keep) if transposed else (left, right, keep))

        # When the backward comes to this operation, `store` gets the gradients in its outputs.
        node.register_prehook(store)

    def _raise_if_incomplete(self) -> None:
        """Raise a GradientError that names what was read and is missing in the gradient."""
        rule = "A.grad would lack what did not pass through the weights."
        fix = "call A.retain_grad() first, and read A.to_dense() for statistics: stats.entropy(A.to_dense())."
        raise GradientError(rule, str(self.missing), fix, where="A.retain_grad()")
