"""The public function `explain()`: which backend computes a product, and how much work it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from attlas.engine import operations
from attlas.engine.dispatch import Choice
from attlas.engine.work import count
from attlas.matrix.handwritten.scope import DenseUses
from attlas.matrix.matrix import AttentionMatrix


class HasDenseUses(Protocol):
    """A recording, or a block of `lazily`."""

    @property
    def dense_uses(self) -> DenseUses:
        """What was computed densely."""


@overload
def explain(matrix: AttentionMatrix, *, measure: bool = False) -> Choice: ...
@overload
def explain(matrix: HasDenseUses, *, measure: bool = False) -> DenseUses: ...
def explain(matrix: Any, *, measure: bool = False) -> Any:
    """Say which backend computes ``A @ v``, why the others do not, and how much work it is; at top level `explain`.

    Of a recording, and of a block of `lazily`, it says which attention was written out by hand and computed densely.

    Parameters
    ----------
    matrix : AttentionMatrix, Atlas or block of lazily
        The matrix, or what holds `dense_uses`.
    measure : bool, default False
        Whether to run ``A @ v`` six times, with random values of the size of the queries, and compare its time with
        the limit of this processor.

    Returns
    -------
    Choice
        With `backend`, `because`, `others`, the `costs` that were compared, and the `work`: products, exponentials,
        bytes, and the least time that they take, once ``attlas bench`` has measured this processor. Printed as text.
        Of a recording or a block a tuple of `attlas.recording.DenseUse`: module, its class, operation, times.

    Raises
    ------
    BackendError
        If the plan names a backend that cannot run.

    Notes
    -----
    Cost without `measure`: O(m) for masks that allow one run of keys per query, otherwise one question to the mask
    per tile.

    Examples
    --------
    >>> import torch, attlas
    >>> attlas.explain(attlas.attend(torch.randn(5, 8), torch.randn(7, 8)))
    backend: sdpa, since it is the fastest here: about 1 × the time of torch's fused kernel
      not flex: it runs on cuda and xpu only
      not native: ...
      not reference: it stores the whole matrix; ask for it with Plan(backend='reference')
      not tiled: it takes about 2.5 × the time of torch's fused kernel
      not triton: ...
    work, with values of 8 numbers: 560 products, 35 exponentials, 768 bytes
      limit...
    """
    if not isinstance(matrix, AttentionMatrix) and hasattr(matrix, "dense_uses"):
        return matrix.dense_uses
    choice = operations.explain(matrix.problem, matrix.plan)

    @torch.no_grad()
    def run(values: Tensor) -> None:
        operations.multiply(matrix.problem, values, matrix.plan)

    return replace(choice, work=count(matrix.problem, run if measure else None))
