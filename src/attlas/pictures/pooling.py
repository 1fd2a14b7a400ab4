"""What stands for a block of a picture: its largest weight, or the mean where the largest would be dark everywhere."""

from __future__ import annotations

import math

from torch import Tensor

from attlas.matrix import AttentionMatrix
from attlas.pictures.maps import blocks
from attlas.stats.pooled import Pool

__all__ = ["POOLING_SIDE", "is_dark", "suited_pool"]

POOLING_SIDE = 256  # blocks along a side of the picture by which the pooling is chosen
_DARK_FROM = 0.45  # a picture counts as dark where its colours lie above this on the colour bar (0 to 1) on average


def is_dark(weights: Tensor, n: int) -> bool:
    """Return whether a picture of weights is dark everywhere, so that no pattern shows.

    Parameters
    ----------
    weights : Tensor
        The largest weight of each block; NaN where nothing may attend.
    n : int
        The number of keys: the colour bar begins at about 1 / (16 n).

    Examples
    --------
    >>> import torch
    >>> from attlas.pictures.pooling import is_dark
    >>> is_dark(torch.full((8, 8), 0.5), 64), is_dark(torch.full((8, 8), 0.001), 64)
    (True, False)
    """
    shown = weights[weights > 0].double()
    lowest = -math.ceil(math.log2(max(n, 2))) - 4
    return bool(len(shown)) and float((1 - shown.log2() / lowest).clamp(0, 1).mean()) > _DARK_FROM


def suited_pool(A: AttentionMatrix, rows: range | None = None, columns: range | None = None) -> Pool:
    """Return what suits the blocks of a head: "max", or "mean" where the largest weights would be dark everywhere.

    Parameters
    ----------
    A : AttentionMatrix, shape (m, n) or of one head
        The head.
    rows, columns : range, optional
        Queries and keys that are drawn; the default is all of them.

    Notes
    -----
    The viewer, its offline pages and ``attlas picture`` choose by this rule. Cost: one pass over the matrix.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.pictures.pooling import suited_pool
    >>> suited_pool(attlas.attend(torch.zeros(600, 4), torch.zeros(600, 4)))
    'max'
    """
    if not A.weights.are_shares:  # means of weights of both signs are near 0
        return "max"
    m, n = int(A.shape[-2]), int(A.shape[-1])
    sides = len(range(m) if rows is None else rows), len(range(n) if columns is None else columns)
    if max(sides) <= POOLING_SIDE:
        return "max"  # every cell is drawn
    return "mean" if is_dark(blocks(A, POOLING_SIDE, "max", rows, columns), n) else "max"
