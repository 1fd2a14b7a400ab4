"""Gradients that carry a graph of their own, and the tensors that they are of."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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


def tensors_in(carry: Any) -> list[Tensor]:
    """Return the tensors of a carry, which is what a statistic keeps from one tile to the next.

    A carry may be a tensor, nested tuples, lists and dicts of them, or an object that has them as attributes.
    """
    if isinstance(carry, Tensor):
        return [carry]
    if isinstance(carry, list | tuple):
        return [t for part in carry for t in tensors_in(part)]
    if isinstance(carry, dict):
        return tensors_in(list(carry.values()))
    return [t for t in vars(carry).values() if isinstance(t, Tensor)] if hasattr(carry, "__dict__") else []


def rebuilt(carry: Any, tensors: list[Tensor]) -> Any:
    """Return a carry of the same form with other tensors, in the order of `tensors_in`; consumes their list."""
    if isinstance(carry, Tensor):
        return tensors.pop(0)
    if isinstance(carry, list | tuple):
        parts = [rebuilt(part, tensors) for part in carry]
        return type(carry)(*parts) if hasattr(carry, "_fields") else type(carry)(parts)
    if isinstance(carry, dict):
        return {name: rebuilt(part, tensors) for name, part in carry.items()}
    if not hasattr(carry, "__dict__"):
        return carry
    other = copy.copy(carry)
    for name, value in vars(carry).items():
        if isinstance(value, Tensor):
            setattr(other, name, tensors.pop(0))
    return other
