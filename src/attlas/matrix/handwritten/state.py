"""What lazy logits hold: a product of queries and keys, and the steps that were done with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.errors import ModifiedError
from attlas.foundation.compat import changes
from attlas.matrix.handwritten.steps import Step


@dataclass(eq=False)
class Product:
    """The product of queries and keys that logits begin with.

    Parameters
    ----------
    q : Tensor, shape (..., m, d)
        Queries.
    k : Tensor, shape (..., n, d)
        Keys; the leading axes broadcast to those of the logits.
    compute : callable
        Computes it as the model wrote it, in the shape that the model sees.
    lead : tuple of int
        Leading axes that the model sees.
    dtype : torch.dtype
        Of the result.
    included : int
        How many of the first steps `compute` does, too.
    is_certain : bool
        Whether the keys were transposed for it, as only products of queries and keys are.
    """

    q: Tensor
    k: Tensor
    compute: Callable[[], Tensor]
    lead: tuple[int, ...]
    dtype: torch.dtype
    included: int = 0
    is_certain: bool = True

    def __post_init__(self) -> None:
        self.has_graph = torch.is_grad_enabled()
        self._changes = [(t, None if t.is_inference() else changes(t)) for t in (self.q, self.k)]

    def check_unchanged(self) -> None:
        """Raise a ModifiedError if queries or keys were changed in place since."""
        for t, count in self._changes:
            if count is not None and changes(t) != count:
                rule = "queries and keys must stay as they are until the softmax of their product."
                fix = "q = q * factor in place of q.mul_(factor), or leave attlas.lazily() out."
                raise ModifiedError(
                    rule, "a tensor that was changed in place after q @ k.mT", fix, t=t, where="lazily()"
                )


@dataclass(eq=False)
class State:
    """What all views of the same logits share.

    Parameters
    ----------
    product : Product
        The product.
    batch, heads : int
        The axes in which steps are written: a matrix has (batch, heads, m, n).
    steps : tuple of Step
        What was done with the product, in order.
    dtype : torch.dtype
        Of the result.
    is_split : bool
        Whether heads are known; if not, all leading cells count as the batch.
    computed : Tensor, optional
        The numbers.
    """

    product: Product
    batch: int
    heads: int
    steps: tuple[Step, ...]
    dtype: torch.dtype
    is_split: bool
    computed: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the matrix: batch, heads, m, n."""
        return self.batch, self.heads, self.product.q.shape[-2], self.product.k.shape[-2]

    def check_unchanged(self) -> None:
        """Raise a ModifiedError if a tensor was changed in place since it was multiplied or added."""
        self.product.check_unchanged()
        for step in self.steps:
            step.check_unchanged()

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Return queries (batch, heads, m, d) and keys (batch, heads or 1, n, d), with the graph that they had."""
        product = self.product
        self.check_unchanged()
        found = []
        for t in (product.q, product.k):
            t = t if product.has_graph else t.detach()
            own = (1,) * (len(product.lead) + 2 - t.ndim) + tuple(t.shape)
            # Keys that all heads share keep their one head.
            shared = t is product.k and own[-3] == 1 and len(product.lead) > 1 and self.heads == product.lead[-1]
            lead = (*product.lead[:-1], 1) if shared else product.lead
            t = t.reshape(own).expand(*lead, *own[-2:])
            found.append(t.reshape(self.batch, 1 if shared else self.heads, *own[-2:]))
        return found[0], found[1]

    def split(self, batch: int, heads: int) -> None:
        """Give the axis that holds batch and heads together two axes, now that the number of heads is known."""
        self.steps = tuple(
            replace(step, tensors=tuple(_with_head_axis(t, batch, heads) for t in step.tensors)) for step in self.steps
        )
        self.batch, self.heads, self.is_split = batch, heads, True


def _with_head_axis(t: Tensor, batch: int, heads: int) -> Tensor:
    """Return a tensor (batch * heads or 1, 1, ...) with axes of its own for batch and heads."""
    return t if t.shape[0] == 1 else t.reshape(batch, heads, *t.shape[2:])
