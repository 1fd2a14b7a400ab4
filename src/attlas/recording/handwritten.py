"""`lazily()`: attention that a model writes out by hand becomes lazy for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attlas.errors import public
from attlas.foundation.checks import instance_of
from attlas.matrix.handwritten import DenseUses, Scope, as_matrices, catching
from attlas.recording.attn_implementation import attending_with_attlas, masked_by_attlas


class Lazily:
    """What a block of `lazily` says of itself.

    Parameters
    ----------
    scope : Scope
        What is true for the time of the block.

    Examples
    --------
    >>> from torch import nn
    >>> import attlas
    >>> with attlas.lazily(nn.Linear(2, 2)) as block:
    ...     pass
    >>> block.dense_uses
    nothing was computed densely
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    @property
    def dense_uses(self) -> DenseUses:
        """What was computed densely so far: module, operation, and how often."""
        return self._scope.dense_uses


@public("lazily()")
def lazily(model: nn.Module) -> Any:
    """Let attention that a model writes out by hand be lazy, for the time of a ``with`` block.

    Parameters
    ----------
    model : nn.Module
        The model. Of transformers, one that can attend with attlas does so.

    Returns
    -------
    context manager
        Gives an object with `dense_uses`, which says what was computed densely; so does ``attlas.explain(block)``.

    Raises
    ------
    DtypeError
        If `model` is no module.

    See Also
    --------
    record : ``record(model, handwritten=True)`` does the same, and records the weights.

    Notes
    -----
    A product of queries with transposed keys is not computed. It is a lazy tensor of logits, which scaling, masks,
    biases, casts, views, soft caps and clamps are noted in. Its softmax is an `AttentionMatrix`, dropout included, and
    the product with values the fused one, in linear memory, with gradients. A model that returns its weights returns
    attention matrices. Any other operation is computed from all numbers, exactly as before, and counted. One query
    alone is computed as before, and so is what torch.compile has compiled.

    Outputs are those of the model up to rounding in the dtype of the sums, float32 or float64; dropout draws other
    weights. A row whose mask is made by transformers and that sees no key has output 0, as in `attlas.huggingface`;
    any other has what the model computes, from a slower pass over tiles. Run the backward in the same block where the
    model uses checkpointing.

    Cost: entering the block looks through all loaded modules, some ten milliseconds; each attention takes some ten
    microseconds more than its fused product.

    Examples
    --------
    >>> import torch, attlas
    >>> from torch import nn
    >>> class Attention(nn.Module):
    ...     def forward(self, q, k, v):
    ...         weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, dim=-1)
    ...         return weights @ v, weights
    >>> model, q = Attention(), torch.randn(1, 2, 100, 8)
    >>> with attlas.lazily(model) as block:
    ...     out, weights = model(q, q, q)
    >>> weights.shape, bool(torch.allclose(out, model(q, q, q)[0], atol=1e-5))
    (torch.Size([1, 2, 100, 100]), True)
    >>> attlas.explain(block)
    nothing was computed densely
    """
    fix = "attlas.lazily(model), the model itself: pipe.model of a pipeline."
    instance_of("model", model, nn.Module, "an nn.Module", fix)
    return _follow_one(model)


@contextmanager
def _follow_one(model: nn.Module) -> Iterator[Lazily]:
    """Follow one model, for the time of a ``with`` block."""
    scope = Scope(model)
    with attending_with_attlas(model), handwritten(scope):
        yield Lazily(scope)


@contextmanager
def handwritten(scope: Scope) -> Iterator[None]:
    """Let products of queries and keys be lazy while a model runs, and its outputs be matrices of attlas."""

    def give(module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() else as_matrices(output)

    handle = scope.model.register_forward_hook(give)
    try:
        with masked_by_attlas(scope.model), catching(scope):
            yield
    finally:
        handle.remove()
