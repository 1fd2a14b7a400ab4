"""The door: kernel_sums checks its arguments, scales them, and passes them on to the way that suits them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attlas.estimators.sums.choose import SumsPlan, chosen, run
from attlas.estimators.sums.result import Moments, Sums
from attlas.estimators.sums.task import Task, checked

__all__ = ["kernel_sums", "plan_sums"]


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

    See Also
    --------
    plan_sums : says which way runs.

    Notes
    -----
    Rows far from every key are as exact as others: sums are kept on a logarithmic scale of their own, whose last digit
    alone, in float64, limits them. The dtype of the results is that of x.

    On a CPU the cost for one coordinate is that of sorting, for all kernels (with moments, of the pairs that matter);
    in up to 8 coordinates boxes of keys that are too far from a group of queries to matter are left out where that is
    faster; else, and on other devices, every pair is computed. Memory is linear.

    For bounded kernels a key at exactly one bandwidth is outside; a key that is within a few units of rounding of one
    may count either way.

    Examples
    --------
    >>> import torch
    >>> from attlas.estimators import kernel_sums
    >>> x = torch.linspace(0.0, 3.0, 4).unsqueeze(-1)
    >>> kernel_sums("gaussian", x, x, x**2, 0.5).mean().squeeze(-1)
    tensor([0.1206, 1.1944, 4.0004, 8.3976])
    """
    task = checked(kernel, x, keys, values, bandwidth, weights, tolerance, leave_one_out, moments, progress)
    near, unit, top = _near_one(task)
    return _restored(run(near), unit, top, x.dtype)


@torch.no_grad()
def plan_sums(
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
) -> SumsPlan:
    """Say which way `kernel_sums` would take with these arguments, and why not the others.

    Parameters
    ----------
    kernel, x, keys, values, bandwidth, weights, tolerance, leave_one_out, moments
        As in `kernel_sums`.

    Returns
    -------
    SumsPlan
        With `way`, `because` and `others`; printed as text.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.

    Examples
    --------
    >>> import torch
    >>> from attlas.estimators import plan_sums
    >>> x = torch.zeros(3, 2)
    >>> plan_sums("gaussian", x, x, x, 1.0)
    way: direct, since every pair is computed by the kernels of attlas
      not boxes: 9 pairs are too few for it to pay
      not line: there are 2 coordinates
    """
    task = checked(kernel, x, keys, values, bandwidth, weights, tolerance, leave_one_out, moments, None)
    return chosen(_near_one(task)[0])


def _near_one(task: Task) -> tuple[Task, Tensor, float]:
    """Return a task with bandwidths in [1, 2) and weights up to 2, the units (d,), and the logarithm of the weights'.

    Powers of two change no digit, and with them no square of a difference overflows that need not.
    """
    unit = _power_of_two(task.bandwidth)
    near, weights, top = task, task.weights, 0.0
    x, keys = task.x / unit.to(task.x), task.keys / unit.to(task.x)
    if not bool(x.isfinite().all() and keys.isfinite().all()):
        near = replace(task, values=task.values.double())
        x, keys = task.x.double() / unit.to(task.x.device), task.keys.double() / unit.to(task.x.device)
    if weights is not None and len(weights):
        most = weights.double().max().cpu()
        biggest = float(_power_of_two(most)) if most > 0 else 1.0
        top = math.log(biggest)
        weights = weights.double() / biggest
    return replace(near, x=x, keys=keys, bandwidth=task.bandwidth / unit, weights=weights), unit, top


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
