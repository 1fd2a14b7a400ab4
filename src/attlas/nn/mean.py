"""The mean of an attention matrix over its heads, lazy too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.errors import public
from attlas.foundation.indexing import Axes, parse
from attlas.matrix import AttentionMatrix
from attlas.matrix.protocol import LazyTensor, check_size, lazy_method
from attlas.matrix.reductions import Dim, axes_of, over_leading, reduced_shape


class HeadMean(LazyTensor):
    """The mean over heads of an attention matrix, lazy: what ``average_attn_weights=True`` stands for.

    It has the shape (..., m, n) of the tensor that `torch.nn.MultiheadAttention` returns. Reads compute the
    rows asked for in every head, and average; nothing is stored.

    Parameters
    ----------
    heads : AttentionMatrix, shape (..., heads, m, n)
        The matrix of each head.

    Attributes
    ----------
    heads : AttentionMatrix
        The same; statistics are asked of it.

    See Also
    --------
    MultiHeadAttention : returns one.

    Notes
    -----
    Sums and means over an axis are linear, so they are here; largest weights and entropies of a mean are not
    those of the heads: take ``attlas.stats`` of `heads`, or of `to_dense`.
    Functions of torch and numpy other than sums and means are applied to the dense mean, up to 1 GiB.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.nn import HeadMean
    >>> A = attlas.attend(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8))
    >>> mean = HeadMean(A)
    >>> mean.shape, mean[0, 3].shape
    (torch.Size([2, 5, 7]), torch.Size([7]))
    >>> torch.allclose(mean.to_dense(), A.to_dense().mean(1))
    True
    """

    label = "mean"

    def __init__(self, heads: AttentionMatrix) -> None:
        self.heads = heads
        self.dtype, self.device = heads.dtype, heads.device

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # computed here, stored elsewhere
        """Shape of the mean, (..., m, n)."""
        *leading, _, m, n = self.heads.shape
        return torch.Size((*leading, m, n))

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor that the matrix of the heads depends on records a graph."""
        return self.heads.requires_grad

    def detach(self) -> HeadMean:
        """Return the same mean without a graph."""
        return HeadMean(self.heads.detach())

    def __repr__(self) -> str:
        return f"HeadMean(shape={tuple(self.shape)}, heads={self.heads.shape[-3]}, {self.dtype})"

    def __getitem__(self, key: Any) -> Any:
        *lead, m, n = self.shape
        where = parse(key, Axes(tuple(lead), (True,) * len(lead)), m, n)
        if where is None:
            return self.on_dense("__getitem__", key)
        # One index for each axis of the mean: an ellipsis, or a short key, leaves out some.
        entries = key if isinstance(key, tuple) else (key,)
        split = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
        after = entries[split + 1 :]
        named = (*entries[:split], *(slice(None),) * (self.ndim - split - len(after)), *after)
        leading = named[: len(lead)]
        if where.rows is None:
            return HeadMean(self.heads[leading])
        cells: Tensor = self.heads[(*leading, slice(None), *named[len(lead) :])]
        return cells.mean(dim=len(lead) if where.leading is None else sum(where.leading[2].kept))

    def __matmul__(self, v: Tensor) -> Tensor:
        """Pool values of shape (..., n, e) with the mean weights."""
        return (self.heads @ (v.unsqueeze(-3) if v.ndim > 2 else v)).mean(dim=-3 if v.ndim > 1 else -2)

    @lazy_method(numpy=("sum",))
    def sum(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Sum over keys (dim -1), queries (dim -2), a leading axis, or several; the default is all."""
        return self._reduce_heads("sum", dim, keepdim)

    @lazy_method(numpy=("mean",))
    def mean(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Mean over keys (dim -1), queries (dim -2), a leading axis, or several; the default is all."""
        return self._reduce_heads("mean", dim, keepdim)

    def _reduce_heads(self, name: str, dim: Dim, keepdim: bool) -> Tensor:
        """Reduce every head by "sum" or "mean" over the axes, then average over heads; `keepdim` as in torch."""
        axes, of_heads = axes_of(self, name, dim), self.ndim - 2  # `of_heads`: the axis that `heads` has besides
        each_head: Tensor = getattr(self.heads, name)([axis + (axis >= of_heads) for axis in sorted(axes)], True)
        return each_head.mean(of_heads).reshape(reduced_shape(self.shape, axes, keepdim))

    @public("mean.to_dense()")
    def to_dense(self, limit: int | None = 2**30) -> Tensor:
        """Return the mean as a Tensor, by default up to 1 GiB.

        Raises
        ------
        TooLargeError
            If the tensor would take more than `limit` bytes; None for no limit.
        """
        fix = "read a part, mean[..., :64, :]; limit=None insists."
        check_size([self], self.numel() * self.dtype.itemsize, limit, fix)
        axis = self.ndim - 2  # of the heads
        return over_leading(self.heads, "sum", {axis}, limited=False).squeeze(axis) / self.heads.shape[axis]
