"""The identity as a lazy matrix."""

from __future__ import annotations

import torch

from attlas.errors import public
from attlas.foundation.checks import whole_number
from attlas.foundation.indexing import Axes
from attlas.matrix.kinds.diagonal import DiagonalWeights
from attlas.matrix.matrix import AttentionMatrix


@public("eye()")
def eye(n: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> AttentionMatrix:
    """Return the identity as a lazy matrix: each query attends to itself alone.

    Parameters
    ----------
    n : int
        Number of tokens.
    dtype : torch.dtype, optional
        float32, the default, or float64.
    device : torch.device or str, optional
        Where products are computed; the default is that of new tensors.

    Returns
    -------
    AttentionMatrix, shape (n, n)

    Raises
    ------
    ShapeError
        If `n` is no whole number above 0.

    See Also
    --------
    torch.eye : the same as a stored tensor of n² numbers.

    Notes
    -----
    In a sum it stands for the identity of every head: ``0.5 * A + 0.5 * attlas.eye(n)`` is a layer with its residual
    connection. Memory: n numbers.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), mask=attlas.Causal())
    >>> layer = 0.5 * A + 0.5 * attlas.eye(3)
    >>> layer[0, 1]
    tensor([0.2500, 0.7500, 0.0000])
    >>> (layer @ torch.ones(2, 3, 1)).shape
    torch.Size([2, 3, 1])
    """
    whole_number("n", n, "eye(8)")
    diagonal = torch.ones(1, 1, 1, dtype=dtype, device=device).expand(1, 1, n)
    return AttentionMatrix(DiagonalWeights(diagonal, is_identity=True), Axes((), ()))
