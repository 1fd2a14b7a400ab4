"""The door: kernel_sums checks its arguments, scales them, and passes them on to the way that suits them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attlas.estimators.sums.direct import direct_sums
from attlas.estimators.sums.result import Moments, Sums
from attlas.estimators.sums.task import Task, checked

__all__ = ["kernel_sums"]


@torch.no_grad()
def kernel_sums(
    kernel: str,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    bandwidth: float | Tensor,
    *,
    weights: Tensor | None = None,
    tolerance: float = 1e-7,
    leave_one_out: bool = False,
    moments: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Sums:
    """Sum a kernel, and values times the kernel, over all keys, for each query.

    Parameters
    ----------
    kernel : {"gaussian", "laplace", "epanechnikov", "boxcar", "triangular"}
        As the score of attlas of that name defines it.
    x : Tensor, shape (m, d)
        Queries, finite, float32 or float64.
    keys : Tensor, shape (n, d)
        Keys, finite.
    values : Tensor, shape (n, e)
        Values of the keys, finite; e may be 0.
    bandwidth : float or Tensor of shape () or (d,)
        h, for all coordinates or for each, in the units of the coordinates.
    weights : Tensor, optional, shape (n,)
        Weight of each key, 0 or more, finite; the default is 1.
    tolerance : float, default 1e-7
        Error allowed in the denominator of a row, relative to it, and in the numerator, relative to the largest
        ``|v|`` times the denominator. 0 sums every pair. Rounding in the dtype of x comes on top.
    leave_one_out : bool, default False
        Leave out the pair (i, i); x must then be the keys.
    moments : {0, 1}, default 0
        1 adds the sums of the offsets that a local line needs.
    progress : callable, optional
        Told ``progress(queries done, queries)`` now and then.

    Returns
    -------
    Sums

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.

    Notes
    -----
    Rows far from every key are as exact as others: sums are kept on a logarithmic scale of their own. The dtype of
    the results is that of x.

    Examples
    --------
    >>> import torch
    >>> from attlas.estimators import kernel_sums
    >>> x = torch.linspace(0.0, 3.0, 4).unsqueeze(-1)
    >>> kernel_sums("gaussian", x, x, x**2, 0.5).mean().squeeze(-1)
    tensor([0.1206, 1.1944, 4.0004, 8.3976])
    """
    task = checked(kernel, x, keys, values, bandwidth, weights, tolerance, leave_one_out, moments, progress)
    return _run(task)


def _run(task: Task) -> Sums:
    # Powers of two change no digit; with bandwidths near 1 and weights near 1 no square of a difference overflows.
    unit = _power_of_two(task.bandwidth)
    near = task
    x, keys = task.x / unit.to(task.x), task.keys / unit.to(task.x)
    if not bool(x.isfinite().all() and keys.isfinite().all()):
        near = replace(task, values=task.values.double())
        x, keys = task.x.double() / unit.to(task.x.device), task.keys.double() / unit.to(task.x.device)
    weights, kept, top = task.weights, None, 0.0
    if weights is not None:
        kept = weights > 0
        biggest = _power_of_two(weights.double().max().cpu()) if bool(kept.any()) else torch.ones(())
        top = float(biggest.log())
        weights = (weights.double() / float(biggest)).to(near.values.dtype)
    scaled = replace(near, x=x, keys=keys, bandwidth=task.bandwidth / unit, weights=weights)
    return _restored(direct_sums(scaled), unit, top, task.x.dtype)


def _power_of_two(t: Tensor) -> Tensor:
    """Return the power of two at or below each number."""
    return torch.ldexp(torch.ones_like(t), torch.frexp(t)[1] - 1)


def _restored(sums: Sums, unit: Tensor, top: float, dtype: torch.dtype) -> Sums:
    """Return sums of scaled coordinates and weights in the units and the dtype of the user."""
    first = sums.first
    if first is not None:
        unit = unit.to(first.offset)
        outer = first.outer * unit * unit.unsqueeze(-1)
        first = Moments((first.offset * unit).to(dtype), outer.to(dtype), (first.cross * unit.unsqueeze(-1)).to(dtype))
    return Sums(sums.numerator.to(dtype), sums.denominator.to(dtype), sums.log_scale + top, first)
