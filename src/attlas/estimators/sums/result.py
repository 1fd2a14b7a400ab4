"""What kernel sums give: numerator and denominator on a scale of their own, and the moments of local lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums of the offsets ``z = k_j - x_i``, as a local line needs them, on the scale of their `Sums`.

    Parameters
    ----------
    offset : Tensor, shape (m, d)
        ``sum_j w_j K z``.
    outer : Tensor, shape (m, d, d)
        ``sum_j w_j K z zᵀ``.
    cross : Tensor, shape (m, d, e)
        ``sum_j w_j K z v_jᵀ``.

    Examples
    --------
    >>> import torch
    >>> from attlas.estimators import kernel_sums
    >>> x, keys, values = torch.zeros(1, 1), torch.tensor([[-1.0], [0.5]]), torch.tensor([[2.0], [4.0]])
    >>> kernel_sums("boxcar", x, keys, values, 2.0, moments=1).first.scaled(torch.ones(1)).offset
    tensor([[-0.2500]])
    """

    offset: Tensor
    outer: Tensor
    cross: Tensor

    def scaled(self, factor: Tensor) -> Moments:
        """Return the moments times one factor a row, shape (m,)."""
        one = factor.unsqueeze(-1)
        return Moments(self.offset * one, self.outer * one.unsqueeze(-1), self.cross * one.unsqueeze(-1))


@dataclass(frozen=True, eq=False)
class Sums:
    """Numerator and denominator of kernel regression at each query.

    Parameters
    ----------
    numerator : Tensor, shape (m, e)
        ``exp(-log_scale_i) sum_j w_j K(x_i, k_j) v_j``.
    denominator : Tensor, shape (m,)
        ``exp(-log_scale_i) sum_j w_j K(x_i, k_j)``; 0 where no key has weight.
    log_scale : Tensor of float64, shape (m,)
        What the sums were divided by, as a logarithm; -inf where no key has weight.
    first : Moments, optional
        Sums of the offsets, where they were asked for.
    kernel : str, optional
        Name of the kernel.
    bandwidth : Tensor of float64, optional, shape (d,)
        Bandwidth of each coordinate.

    Raises
    ------
    ShapeError
        If sums that are merged belong to different queries, kernels or bandwidths.

    See Also
    --------
    kernel_sums : makes them.

    Notes
    -----
    The scale keeps a Gaussian exact far from all keys, where the kernel itself would be 0. Which scale a row has is
    free: two objects with different scales may mean the same sums.

    Examples
    --------
    >>> import torch
    >>> from attlas.estimators import kernel_sums
    >>> x, keys, values = (
    ...     torch.tensor([[1000.0]]),
    ...     torch.tensor([[0.0], [1.0]]),
    ...     torch.tensor([[3.0], [5.0]]),
    ... )
    >>> kernel_sums("gaussian", x, keys, values, 1.0).mean()
    tensor([[5.]])
    """

    numerator: Tensor
    denominator: Tensor
    log_scale: Tensor
    first: Moments | None = None
    kernel: str = ""
    bandwidth: Tensor | None = None

    def mean(self) -> Tensor:
        """Return numerator / denominator, shape (m, e): the estimate; NaN where no key has weight."""
        mean = self.numerator / self.denominator.unsqueeze(-1)
        return mean.masked_fill((self.denominator == 0).unsqueeze(-1), torch.nan)

    def log_denominator(self) -> Tensor:
        """Return ``log sum_j w_j K(x_i, k_j)`` in float64, shape (m,); -inf where no key has weight."""
        return self.denominator.to(self.log_scale.dtype).log() + self.log_scale

    def merge(self, other: Sums) -> Sums:
        """Return the sums over the keys of both, for the same queries; the order of merges does not matter.

        Parameters
        ----------
        other : Sums
            Sums over further keys.

        Returns
        -------
        Sums

        Raises
        ------
        ShapeError
            If the two belong to different numbers of queries or values, to different kernels or bandwidths, or only one
            has moments.
        """
        self._check_kernel(other)
        if (self.numerator.shape, self.first is None) != (other.numerator.shape, other.first is None):
            rule = "both sums must belong to the same queries and have the same parts."
            given = {"numerator": self.numerator, "other numerator": other.numerator}
            found = f"moments: {self.first is not None} and {other.first is not None}"
            fix = "call kernel_sums with the same x, number of values and moments."
            raise ShapeError(rule, found, fix, arguments=given, where="Sums.merge()")
        scale = torch.maximum(self.log_scale, other.log_scale)
        return replace(_map_tensors(torch.add, self._on_log_scale(scale), other._on_log_scale(scale)), log_scale=scale)

    def _check_kernel(self, other: Sums) -> None:
        """Raise an error where other sums have another kernel or bandwidth."""
        mine, theirs = (
            (s.kernel, None if s.bandwidth is None else s.bandwidth.flatten().tolist()) for s in (self, other)
        )
        if mine != theirs:
            rule = "both sums must be of one kernel and one bandwidth."
            found = f"{mine[0]} of bandwidth {mine[1]}, {theirs[0]} of bandwidth {theirs[1]}"
            raise ShapeError(rule, found, "give all parts the same bandwidth=0.3.", where="Sums.merge()")

    def rows(self, index: Tensor | slice) -> Sums:
        """Return the sums of some queries."""
        return _map_tensors(lambda t: t[index], self)

    def _on_log_scale(self, scale: Tensor) -> Sums:
        """Return the same sums on another logarithmic scale, which is not below their own."""
        below = torch.where(scale == -torch.inf, torch.zeros_like(scale), self.log_scale - scale)
        factor = below.exp().to(self.denominator.dtype)
        first = None if self.first is None else self.first.scaled(factor)
        numerator, denominator = self.numerator * factor.unsqueeze(-1), self.denominator * factor
        return replace(self, numerator=numerator, denominator=denominator, log_scale=scale, first=first)


def concatenate(parts: list[Sums]) -> Sums:
    """Return the sums of all queries from those of consecutive ones."""
    return _map_tensors(lambda *t: torch.cat(t), *parts)


def _map_tensors(f: Callable[..., Tensor], *parts: Sums) -> Sums:
    """Return sums whose every tensor is ``f`` of this tensor of all parts."""
    moments = [vars(part.first).values() for part in parts if part.first is not None]
    first = Moments(*map(f, *moments)) if moments else None
    numerator, denominator, scale = (
        f(*(getattr(part, name) for part in parts)) for name in ("numerator", "denominator", "log_scale")
    )
    return replace(parts[0], numerator=numerator, denominator=denominator, log_scale=scale, first=first)


def put_rows(sums: Sums, index: Tensor, rows: Sums) -> None:
    """Overwrite the sums of some queries, but not their moments."""
    sums.numerator[index] = rows.numerator.to(sums.numerator)
    sums.denominator[index] = rows.denominator.to(sums.denominator)
    sums.log_scale[index] = rows.log_scale


def unsort(sums: Sums, order: Tensor) -> Sums:
    """Return sums in the order of the input; ``order[i]`` is the place in the input of query i."""
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    return sums.rows(position)
