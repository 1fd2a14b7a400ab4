"""The leave-one-out error of local means from sums of the kernel, which compiled kernels and sorted lines compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.estimators.kernels import product_error
from attlas.estimators.loo import LeaveOneOut, LooTask, Objective, factors_with_own
from attlas.estimators.row_blocks import map_blocks, one_thread
from attlas.estimators.sums import Sums, kernel_sums
from attlas.estimators.sums.direct import Run, sum_run
from attlas.estimators.sums.laplace import leave_one_out_sums
from attlas.estimators.sums.task import KERNELS, Task
from attlas.foundation.compat import cached_property
from attlas.matrix.attend import attend
from attlas.matrix.explain import explain

# Coordinates and columns of values up to which the compiled kernels are ahead of blocks of matrix products.
_MOST_COORDINATES, _MOST_COLUMNS = 16, 128
# Part of a row that skipping may leave out, or the rounding of a long line, in parts of its length in bandwidths.
_SKIPPED_SHARE, _ROUNDING_PER_LENGTH = 1e-10, 1e-12
# Rounding error of a squared distance made of sums of squares that a slope may have, in squared bandwidths. Weights
# are made of differences, and never have it.
_MOST_ROUNDING = {torch.float32: 1e-2, torch.float64: 1e-8}

# Pairs that one thread looks at at a time, and rows at least: the compiled kernels begin at 16.
_PAIRS_AT_ONCE, _FEWEST_ROWS = 1 << 24, 32
_LONG_LINE = 1 << 18  # keys of a line from which on threads share its operations


class _LeftOut(NamedTuple):
    """Predictions of rows that were left out, one over the mass of their neighbours, and the slopes of both sums.

    `mass_slopes` (r, d) is ``Σ_j w_j F_ij |u_ijc|^p``, `value_slopes` (r, e, d) the same times the values; both are to
    be multiplied by `inverse`.
    """

    predicted: Tensor
    inverse: Tensor
    mass_slopes: Tensor
    value_slopes: Tensor


def objective(task: LooTask, rows: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Objective:
    """Return the leave-one-out error of a task the fastest way that computes it."""
    d, e = task.keys.shape[1], task.values.shape[1]
    slopes = task.kernel in ("gaussian", "epanechnikov", "boxcar") or d == 1
    few = d <= _MOST_COORDINATES and e + 2 * d * (e + 1) <= _MOST_COLUMNS
    if task.degree or task.keys.device.type != "cpu" or not (slopes and few):
        return LeaveOneOut(task, rows, dtype)
    if not (d == 1 and rows is None):
        n = len(task.keys)
        count = min(n if rows is None else len(rows), max(_FEWEST_ROWS, _PAIRS_AT_ONCE // n))
        some, every = (torch.zeros(size, d, dtype=dtype) for size in (count, n))
        # Without compiled kernels each sum is a pass of its own: blocks share their distances with the slopes.
        if explain(attend(some, every, score=KERNELS[task.kernel]())).backend != "native":
            return LeaveOneOut(task, rows, dtype)
    return SummedLeaveOneOut(task, rows, dtype)


class SummedLeaveOneOut(Objective):
    """Leave-one-out error of local means over some rows, all keys, with the gradient of `LeaveOneOut`.

    Notes
    -----
    With ``u_ijc² = x_ic² - 2 x_ic k_jc + k_jc²`` the gradient of a Gaussian needs sums of the same weights as the
    loss, with keys and their squares as further values. The slope of Epanechnikov's kernel is a boxcar. On a line
    ``|u|`` within one bandwidth is what a triangle lacks of a boxcar, and the slope of a Laplace kernel is a second
    recursion. Weights are made of differences; where the squares would lose digits the slopes are those of
    `LeaveOneOut`. Time: one pass over the pairs with ``e + 2 d (e + 1)`` columns, on a line that of sorting.
    Memory: linear.
    """

    def __init__(self, task: LooTask, rows: Tensor | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(task.to(dtype), rows)
        self._arguments = task, rows
        self.line = rows is None and task.keys.shape[1] == 1  # where all pairs cost no more than sorting does
        weights = self.task.weights
        self._weights = None if bool((weights == 1).all()) else weights
        self._row_weights = weights[self.rows].double() / weights[self.rows].double().sum()

    def grid(self, scales: Tensor) -> Tensor:
        """Return the loss for every multiple of the starting bandwidth."""
        several, every = scales.tolist(), slice(0, len(self.rows))

        def loss(part: slice) -> Tensor:
            """Return the loss at one multiple; `part` has its number alone."""
            left = self._left_out(self.task.keys / several[part.start], every, gradient=False)
            return self._summed_loss(left, every)[0]

        with one_thread(self.task.keys.device) as threads:
            return torch.stack(map_blocks(loss, (slice(i, i + 1) for i in range(len(several))), threads))

    def value(self, log_bandwidth: Tensor, *, gradient: bool = True) -> tuple[float, Tensor]:
        """Return the loss at the logarithm of the multiple of each starting bandwidth, and its gradient."""
        with self._thread_limit() as threads:
            keys = self._keys_in_bandwidths(log_bandwidth)
            gradient = gradient and self.task.kernel != "boxcar"
            if not (gradient and self._loses_digits(keys)):
                parts = map_blocks(
                    lambda part: self._loss_and_slopes(keys, part, gradient), self._slices_of_rows(), threads
                )
                total = torch.stack(parts).sum(0)
                return float(total[0]), total[1:]
        return self._exact_objective.value(log_bandwidth)

    def predictions(self, log_bandwidth: Tensor) -> Tensor:
        """Return the leave-one-out prediction of each row, shape (rows, e)."""
        with self._thread_limit() as threads:
            keys = self._keys_in_bandwidths(log_bandwidth)
            return torch.cat(
                map_blocks(
                    lambda part: self._left_out(keys, part, gradient=False).predicted, self._slices_of_rows(), threads
                )
            )

    def _thread_limit(self) -> AbstractContextManager[int]:
        """Let one thread do each operation, but for those of a line long enough to be shared."""
        if self.line and len(self.rows) > _LONG_LINE:
            return nullcontext(1)
        return one_thread(self.task.keys.device)

    def _loss_and_slopes(self, keys: Tensor, part: slice, gradient: bool) -> Tensor:
        """Return the loss summed over some rows, followed by its derivative for each feature, shape (1 + d,)."""
        left = self._left_out(keys, part, gradient=gradient)
        loss, loss_slope = self._summed_loss(left, part)
        if not gradient:
            return torch.cat([loss.reshape(1), loss.new_zeros(keys.shape[1])])
        # With ŷ = N / D of a row and its weight w: ∂L/∂θ = Σ_i w_i / D_i Σ_e ∂ℓ/∂ŷ_ie (∂N_ie/∂θ - ŷ_ie ∂D_i/∂θ).
        loss_slope = loss_slope.double() * (self._row_weights[part] * left.inverse.double()).unsqueeze(-1)
        level = (loss_slope * left.predicted.double()).sum(-1, keepdim=True)
        slopes = torch.einsum("re,red->d", loss_slope, left.value_slopes.double())
        slopes -= (level * left.mass_slopes.double()).sum(0)
        return torch.cat([loss.reshape(1), slopes])

    @cached_property
    def _exact_objective(self) -> Objective:
        """The same loss where squares of single precision, or of double, lose digits."""
        exact = SummedLeaveOneOut if self.task.keys.dtype is torch.float32 else LeaveOneOut
        return exact(*self._arguments)

    def _slices_of_rows(self) -> Iterator[slice]:
        """Return slices of rows of some million pairs each; a line is one slice."""
        count = len(self.rows)
        step = count if self.line else max(_FEWEST_ROWS, _PAIRS_AT_ONCE // len(self.task.keys))
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _summed_loss(self, left: _LeftOut, part: slice) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of some rows in float64, and the slope of each."""
        loss, loss_slope = self.task.loss(left.predicted, self.task.values[self.rows[part]])
        return (loss.double() * self._row_weights[part]).sum(), loss_slope

    def _loses_digits(self, keys: Tensor) -> bool:
        """Tell whether squares of the keys are too large for slopes that are made of them."""
        squared = keys.shape[1] > 1 or self.task.kernel == "gaussian"
        return squared and product_error(keys) > _MOST_ROUNDING[keys.dtype]

    def _left_out(self, keys: Tensor, part: slice, *, gradient: bool) -> _LeftOut:
        """Return the predictions of the rows of a slice, and with `gradient` what slopes are made of.

        `keys` are in bandwidths, shape (n, d).
        """
        kernel, values, rows = self.task.kernel, self.task.values, self.rows[part]
        d, e = keys.shape[1], values.shape[1]
        mass_slopes, value_slopes = keys.new_zeros(len(rows), d), keys.new_zeros(len(rows), e, d)
        if kernel == "laplace":
            sums, slopes = leave_one_out_sums(keys[:, 0], values, self._weights)
            sums, slopes = sums.rows(rows), slopes[rows]
            mass_slopes, value_slopes = slopes[:, -1:], slopes[:, :-1].unsqueeze(-1)
        elif not gradient:
            sums = self._sums_of_other_keys(kernel, keys, values, rows)
        elif kernel == "gaussian":
            sums = self._sums_of_other_keys(kernel, keys, _powers_of_keys(keys, values), rows)
            mass_slopes, value_slopes = _weighted_squares(keys[rows], sums, e)
            sums = Sums(sums.numerator[:, :e], sums.denominator, sums.log_scale)
        else:
            sums = self._sums_of_other_keys(kernel, keys, values, rows)
            inside = self._sums_of_other_keys("boxcar", keys, values if d == 1 else _powers_of_keys(keys, values), rows)
            # Both kernels count from 1 at distance 0; their sums have scales of their own.
            times = torch.where(sums.denominator > 0, (inside.log_scale - sums.log_scale).exp().to(keys), 0.0)
            if d > 1:
                mass_slopes, value_slopes = _weighted_squares(keys[rows], inside, e)
                mass_slopes, value_slopes = mass_slopes * times.unsqueeze(-1), value_slopes * times.view(-1, 1, 1)
            else:  # the boxcar less the kernel is |u| of a triangle, u² of Epanechnikov
                mass_slopes = (inside.denominator * times - sums.denominator).unsqueeze(-1)
                value_slopes = (inside.numerator * times.unsqueeze(-1) - sums.numerator).unsqueeze(-1)
            if kernel == "epanechnikov":
                mass_slopes, value_slopes = 2.0 * mass_slopes, 2.0 * value_slopes
        return self._add_kept_and_divide(sums, mass_slopes, value_slopes, part)

    def _sums_of_other_keys(self, kernel: str, keys: Tensor, values: Tensor, rows: Tensor) -> Sums:
        """Return the sums that rows see of all other keys."""
        if self.line:
            # Rounding grows with the spread of the keys: a tolerance below it cannot be kept.
            tolerance = min(max(_SKIPPED_SHARE, _ROUNDING_PER_LENGTH * float(keys.amax() - keys.amin())), 1e-7)
            return kernel_sums(
                kernel, keys, keys, values, 1.0, weights=self._weights, tolerance=tolerance, leave_one_out=True
            )
        # The bandwidth: keys are in units of it.
        unit = torch.ones(keys.shape[1], dtype=torch.float64)
        summed = Task(kernel, keys[rows], keys, values, unit, self._weights)
        last = torch.full_like(rows, len(keys))  # the keys before a row's own, and those after it
        return sum_run(summed, Run(torch.zeros_like(rows), rows)).merge(sum_run(summed, Run(rows + 1, last)))

    def _add_kept_and_divide(self, sums: Sums, mass_slopes: Tensor, value_slopes: Tensor, part: slice) -> _LeftOut:
        """Give an observation that stands for several the others back, and divide."""
        rows = self.rows[part]
        kept, values = self.task.kept[rows], self.task.values[rows]
        others, own = factors_with_own(sums.log_scale, kept)
        mass = sums.denominator * others + own
        known = mass > 0
        inverse = torch.where(known, 1.0 / torch.where(known, mass, 1.0), 0.0)
        predicted = (sums.numerator * others.unsqueeze(-1) + own.unsqueeze(-1) * values) * inverse.unsqueeze(-1)
        predicted = torch.where(known.unsqueeze(-1), predicted, self._without_neighbours[part])
        return _LeftOut(predicted, inverse * others, mass_slopes, value_slopes)


def _weighted_squares(x: Tensor, sums: Sums, e: int) -> tuple[Tensor, Tensor]:
    """Return ``Σ_j w_j K_ij u_ijc²`` (r, d), and it times the values (r, e, d), from sums of `_powers_of_keys`."""
    d, centre = x.shape[1], x.unsqueeze(1)
    y, k, square, yk, y_square = sums.numerator.split([e, d, d, e * d, e * d], -1)
    mass_slopes = x.square() * sums.denominator.unsqueeze(-1) - 2.0 * x * k + square
    value_slopes = (
        centre.square() * y.unsqueeze(-1) - 2.0 * centre * yk.unflatten(-1, (e, d)) + y_square.unflatten(-1, (e, d))
    )
    return mass_slopes, value_slopes


def _powers_of_keys(keys: Tensor, values: Tensor) -> Tensor:
    """Return values, keys, their squares, and the products of these with the values, shape (n, e + 2 d (e + 1))."""
    square = keys.square()
    columns = [values, keys, square, *((values.unsqueeze(-1) * t.unsqueeze(1)).flatten(1) for t in (keys, square))]
    return torch.cat(columns, -1)
