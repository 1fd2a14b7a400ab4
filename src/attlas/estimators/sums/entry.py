"""`kernel_sums` checks and scales its arguments, and passes them to the fastest method for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.estimators.sums.choose import SumsPlan, choose_plan, run_plan
from attlas.estimators.sums.result import Moments, Sums
from attlas.estimators.sums.task import Task, checked_task
from attlas.foundation.autocast import without_autocast


@torch.no_grad()
@without_autocast
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
        ``|v|`` times the denominator. With 0 no pair that has a weight is left out. Rounding in the dtype of x is an
        error besides.
    leave_one_out : bool, default False
        Leave out the pair (i, i); x must then be the keys.
    moments : {0, 1}, default 0
        1 adds the sums of the offsets that a local line needs.
    progress : callable, optional
        Called from time to time as ``progress(queries done, queries)``.

    Returns
    -------
    Sums

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.

    See Also
    --------
    plan_sums : says which method runs.

    Notes
    -----
    Rows far from every key are as exact as others: each row has its own logarithmic scale, and only the rounding of
    that in float64 limits them. The dtype of the results is that of x.

    On a CPU, one coordinate costs as much as sorting, for all kernels (with moments, as much as the pairs that
    matter); in up to 8 coordinates, boxes of keys that are too far from a group of queries to matter are left out
    where that is faster; else, and on other devices, every pair is computed. Memory is linear.

    For bounded kernels a key at a distance of exactly one bandwidth is outside; a key within a few units of rounding of
    that distance may be inside or outside.

    Examples
    --------
    >>> import torch
    >>> from attlas.estimators import kernel_sums
    >>> x = torch.linspace(0.0, 3.0, 4).unsqueeze(-1)
    >>> kernel_sums("gaussian", x, x, x**2, 0.5).mean().squeeze(-1)
    tensor([0.1203, 1.2151, 4.2119, 8.4018])
    """
    h = torch.as_tensor(bandwidth, dtype=torch.float64)
    task = checked_task(Task(kernel, x, keys, values, h, weights, tolerance, leave_one_out, moments, progress))
    scaled, units = _scaled_task(task)
    return replace(_in_units_of_user(run_plan(scaled), units, x.dtype), kernel=kernel, bandwidth=task.bandwidth.cpu())


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
    """Say which method `kernel_sums` would use with these arguments, and why not the others.

    Parameters
    ----------
    kernel, x, keys, values, bandwidth, weights, tolerance, leave_one_out, moments
        As in `kernel_sums`.

    Returns
    -------
    SumsPlan
        With `method`, `because` and `others`; printed as text.

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
    method: direct, since every pair is computed by the kernels of attlas
      not boxes: 9 pairs are too few for it to pay
      not line: there are 2 coordinates
    """
    h = torch.as_tensor(bandwidth, dtype=torch.float64)
    task = checked_task(Task(kernel, x, keys, values, h, weights, tolerance, leave_one_out, moments))
    return choose_plan(_scaled_task(task)[0])


class _TaskUnits(NamedTuple):
    """Units of a scaled task: of coordinates `x`, shape (d,), of weights exp(log_weight), of values `value`."""

    x: Tensor
    log_weight: float
    value: float


def _scaled_task(task: Task) -> tuple[Task, _TaskUnits]:
    """Return the task divided by powers of two, so that bandwidths are in [1, 2) and weights and values at most 2.

    Also return what it was divided by. Powers of two change no digit; the scaling avoids overflow and underflow.
    """
    unit = _power_of_two(task.bandwidth)
    values, weights = task.values, task.weights
    x, keys = task.x / unit.to(task.x), task.keys / unit.to(task.x)
    if not bool(x.isfinite().all() and keys.isfinite().all()):
        values = values.double()
        x, keys = task.x.double() / unit.to(task.x.device), task.keys.double() / unit.to(task.x.device)
    value_unit, weight_unit = _power_of_two_below_largest(values.abs()), 1.0
    if weights is not None:
        weight_unit = _power_of_two_below_largest(weights)
        weights = weights.double() / weight_unit
    units = _TaskUnits(unit, math.log(weight_unit), value_unit)
    values, bandwidth = values / value_unit, task.bandwidth / unit
    return replace(task, x=x, keys=keys, values=values, bandwidth=bandwidth, weights=weights), units


def _power_of_two_below_largest(t: Tensor) -> float:
    """Return the power of two at or below the largest number, 1 where that is 0."""
    largest = t.amax().double().cpu() if t.numel() else torch.zeros((), dtype=torch.float64)
    return float(_power_of_two(largest)) if largest > 0 else 1.0


def _power_of_two(t: Tensor) -> Tensor:
    """Return the power of two at or below each number."""
    return torch.ldexp(torch.ones_like(t), torch.frexp(t)[1] - 1)


def _in_units_of_user(sums: Sums, units: _TaskUnits, dtype: torch.dtype) -> Sums:
    """Return the sums of a scaled task in the units and the dtype of the user."""
    first = sums.first
    if first is not None:
        unit = units.x.to(first.offset)
        outer = first.outer * unit * unit.unsqueeze(-1)
        cross = first.cross * unit.unsqueeze(-1) * units.value
        first = Moments((first.offset * unit).to(dtype), outer.to(dtype), cross.to(dtype))
    numerator = sums.numerator * units.value
    return Sums(numerator.to(dtype), sums.denominator.to(dtype), sums.log_scale + units.log_weight, first)
