"""The mean of an attention matrix over its heads, lazy too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.errors import ShapeError, TooLargeError
from attlas.matrix import AttentionMatrix

__all__ = ["HeadMean"]

_DENSE_LIMIT = 2**30  # bytes that to_dense() gives without being asked twice


class HeadMean:
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

    def __init__(self, heads: AttentionMatrix) -> None:
        self.heads = heads

    @property
    def shape(self) -> torch.Size:
        """Shape of the mean, (..., m, n)."""
        *leading, _, m, n = self.heads.shape
        return torch.Size((*leading, m, n))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.heads.ndim - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers that reads give."""
        return self.heads.dtype

    @property
    def device(self) -> torch.device:
        """Device where everything is computed."""
        return self.heads.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one axis, as the tensor would."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"HeadMean(shape={tuple(self.shape)}, heads={self.heads.shape[-3]}, {self.dtype})"

    def __getitem__(self, key: Any) -> Any:
        entries = key if isinstance(key, tuple) else (key,)
        dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
        split = dots[0] if dots else len(entries)
        missing = (slice(None),) * (self.ndim - len(entries) + len(dots))
        named = (*entries[:split], *missing, *entries[split + 1 :])
        if len(named) > self.ndim or len(dots) > 1:
            raise ShapeError(
                "mean[...]",
                "there are more indices than axes.",
                {"mean": f"shape {tuple(self.shape)}"},
                found=f"{len(entries) - len(dots)} indices, {self.ndim} axes",
                fix="mean[0, 17, :] for one row of one sequence.",
            )
        leading = named[:-2]
        if not dots and len(entries) <= len(leading):
            return HeadMean(self.heads[leading])
        part: Tensor = self.heads[(*leading, slice(None), *named[-2:])]
        return part.mean(dim=sum(not isinstance(entry, int) for entry in leading))

    def __matmul__(self, v: Tensor) -> Tensor:
        """Pool values of shape (..., n, e) with the mean weights."""
        return (self.heads @ (v.unsqueeze(-3) if v.ndim > 2 else v)).mean(dim=-3 if v.ndim > 1 else -2)

    def sum(self, dim: int, keepdim: bool = False) -> Tensor:
        """Sum over the keys of a row (dim -1) or the queries of a column (dim -2)."""
        return self._linear("sum", dim, keepdim)

    def mean(self, dim: int, keepdim: bool = False) -> Tensor:
        """Mean over the keys of a row (dim -1) or the queries of a column (dim -2)."""
        return self._linear("mean", dim, keepdim)

    def _linear(self, name: str, dim: int, keepdim: bool) -> Tensor:
        axis = dim - self.ndim if dim >= 0 else dim
        total: Tensor = getattr(self.heads, name)(axis)
        total = total.mean(dim=-2)
        return total.unsqueeze(axis) if keepdim else total

    def to_dense(self, limit: int | None = _DENSE_LIMIT) -> Tensor:
        """Return the mean as a Tensor, made head after head.

        Raises
        ------
        TooLargeError
            If the tensor would take more than `limit` bytes; None for no limit.
        """
        size = self.shape.numel() * self.dtype.itemsize
        if limit is not None and size > limit:
            raise TooLargeError(
                "mean.to_dense()",
                "the whole matrix would be larger than the limit.",
                {"mean": f"shape {tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"},
                found=f"{size:,} bytes, the limit is {limit:,}",
                fix="read a part, mean[..., :64, :]; limit=None insists.",
            )
        count = self.heads.shape[-3]
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for head in range(count):
            one = (slice(None),) * (self.ndim - 2) + (head,)
            total += self.heads[one].to_dense(limit=None)
        return total / count
