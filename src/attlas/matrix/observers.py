"""Lets recordings and interventions take part in ``A @ v``: the matrix cannot import them, and finds them here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from torch import Tensor

from attlas.engine.dropout import Dropout

# From a matrix, values of shape (batch, value heads, n, e) and a dropout or None to the pooled values, (batch, heads,
# m, e).
Product: TypeAlias = "Callable[[Any, Tensor, Any], Tensor]"


def unobserved_product(matrix: Any, values: Tensor, dropout: Any) -> Tensor:
    """Return a product that no recording hears and no intervention changes."""
    pooled: Tensor = matrix.weights.product(values, dropout)
    return pooled


def untold_product(matrix: Any, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Return `unobserved_product` with dropout of probability `dropout_p`; values are (batch, value heads, n, e)."""
    return unobserved_product(matrix, values, Dropout.draw(dropout_p) if dropout_p > 0.0 else None)


# Whether there is a recording or an intervention in any thread, and what computes products then: both are set by
# `attlas.recording.hooks`. A plain value of a module is the cheapest check, and torch.compile guards it without a graph
# break.
active = False
# Whether there is an intervention in any thread, and whether torch's scaled_dot_product_attention is replaced: then a
# program that torch traces calls Python at each attention, and else an operator tells the recordings.
changing = False
patched = False
product: Product = unobserved_product
_is_unobserved: ContextVar[bool] = ContextVar("attlas_unheard", default=False)


@contextmanager
def unheard() -> Iterator[None]:
    """Compute products of this thread without recordings and interventions, for the time of a ``with`` block.

    To hear a product is to record it. Inside of an attention that was heard, more products with its matrix may be made.
    """
    before = _is_unobserved.get()
    _is_unobserved.set(True)
    try:
        yield
    finally:
        _is_unobserved.set(before)


def is_unheard() -> bool:
    """Return whether this thread is in a block of `unheard`, so that recordings and interventions skip its products."""
    return _is_unobserved.get()
