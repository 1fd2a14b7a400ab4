"""How much weight the keys that an indexer left out would have had."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, kind, public
from attlas.masks import Mask, Selected
from attlas.masks.base import And
from attlas.matrix import AttentionMatrix


@public("missed()")
def missed(A: AttentionMatrix) -> Tensor:
    """Return how much weight each query would have put on the keys that were not chosen for it, with all keys.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        Attention to chosen keys, as layers with an indexer have it: its mask is `attlas.masks.Selected`, alone or with
        others, ``Causal() & Selected(indices)``.

    Returns
    -------
    Tensor, shape (..., m)
        Between 0, where the choice has all the weight of full attention, and 1. 0 for a query that sees no key.

    Raises
    ------
    ShapeError
        If the mask of `A` has no choice, or `A` is a window of some keys.
    DtypeError
        If `A` is no AttentionMatrix of a softmax.

    See Also
    --------
    attlas.masks.Selected : the mask of chosen keys.
    attlas.divergence : compares two matrices key by key.

    Notes
    -----
    ``1 - exp(lse_chosen - lse_all)``, exact: the log-sum-exp of the same scores over the chosen keys, and over all keys
    that the other masks allow. Cost: one pass over the whole matrix, and one over the chosen keys; two numbers a row.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> chosen = attlas.masks.Selected([[0, -1], [0, 1], [1, 2], [0, 3]])
    >>> q = torch.zeros(4, 8)
    >>> heads.missed(
    ...     attlas.attend(q, q, mask=attlas.Causal() & chosen)
    ... )  # 1 of 3 keys left out, then 2 of 4
    tensor([0.0000, 0.0000, 0.3333, 0.5000])
    """
    if not isinstance(A, AttentionMatrix):
        fix = "an entry of a recording, atlas[3], or attlas.attend(q, k, mask=attlas.masks.Selected(indices))"
        raise DtypeError("it is a number of an attention matrix.", kind(A), fix, A=type(A).__name__)
    weights = A.softmax_weights.detach()
    problem = weights.problem
    others, found = _without_choice(problem.mask)
    if not found:
        rule = "the mask must say which keys were chosen for each query."
        name = "no mask" if problem.mask is None else problem.mask.name()
        raise ShapeError(
            rule, name, "mask=attlas.Causal() & attlas.masks.Selected(indices)", A=f"shape {tuple(A.shape)}"
        )
    if problem.partial:
        rule = "it must have all of its keys."
        raise ShapeError(rule, "a window of some keys", "the whole matrix", A=f"shape {tuple(A.shape)}")
    everything = weights.replaced(replace(problem, mask=others, versions=()))
    chosen, whole = weights.lse_on_cpu(), everything.lse_on_cpu()  # float64, which keeps small differences
    lost = torch.expm1((chosen - whole).clamp(max=0.0)).abs()
    left_out = torch.where(whole == -math.inf, 0.0, lost)
    return A.axes.restore(left_out.to(A.device, A.dtype))


def _without_choice(mask: Mask | None) -> tuple[Mask | None, bool]:
    """Return a mask without the choices of keys in it, and whether there was one."""
    if isinstance(mask, Selected):
        return None, True
    if not isinstance(mask, And):
        return mask, False
    (left, in_left), (right, in_right) = _without_choice(mask.left), _without_choice(mask.right)
    rest = left if right is None else right if left is None else left & right
    return (rest, True) if in_left or in_right else (mask, False)
