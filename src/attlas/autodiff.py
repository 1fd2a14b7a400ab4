"""Gradients that carry a graph of their own, for gradients of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["recorded_gradients"]


def recorded_gradients(
    result: Tensor | Sequence[Tensor], wanted: Sequence[Tensor | None], grad: Tensor | Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a result that autograd has recorded, with their graph.

    A backward of our own computes numbers only. Where the gradient is to be differentiated in its turn
    (``create_graph=True``), grad mode is on while the backward runs; it then computes its definition and asks autograd.

    Parameters
    ----------
    result : Tensor, or sequence of them
        The definition of what the forward returned.
    wanted : sequence of Tensor or None
        The inputs of the forward.
    grad : Tensor, or sequence of them
        Gradient of the result.
    """
    leaves = [t for t in wanted if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(result, leaves, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in wanted)
