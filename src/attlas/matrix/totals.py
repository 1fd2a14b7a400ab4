"""Gradients of the tensors that weights depend on, added up over parts of the matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Totals:
    """One gradient for each of some tensors.

    Parameters
    ----------
    inputs : sequence of Tensor
        The tensors; those that want no gradient get None.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs = inputs
        self.wanted = [t for t in inputs if t.requires_grad]
        self.grads: list[Tensor | None] = [None] * len(self.wanted)

    def add(self, cells: Tensor, slope: Tensor) -> None:
        """Add the gradients that flow back from some cells, recorded with a graph."""
        if cells.requires_grad:
            found = torch.autograd.grad(cells, self.wanted, slope, allow_unused=True)
            self.grads = [t if g is None else g if t is None else t + g for t, g in zip(self.grads, found, strict=True)]

    def of_each(self) -> list[Tensor | None]:
        """Return the gradient of each input; None for those that want none."""
        own = iter(self.grads)
        return [next(own) if t.requires_grad else None for t in self.inputs]
