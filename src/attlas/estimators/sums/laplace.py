"""Laplace sums on a line by two recursions, one from each side; exact but for rounding.

With keys z_1 <= z_2 <= ... the sum over the keys up to z_i, seen from z_i, is ``L_i = w_i + exp(-(z_i - z_{i-1}) / h)
L_{i-1}``, and a query beyond z_i sees ``exp(-(x - z_i) / h) L_i``. All terms are positive, and the scale of each sum is
its nearest key, so that nothing cancels and nothing that matters underflows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attlas.estimators.sums.direct import Run
from attlas.estimators.sums.line import Line, neighbours, sums_in_windows
from attlas.estimators.sums.result import Sums
from attlas.estimators.sums.scan import running

__all__ = ["laplace_sums"]


def laplace_sums(line: Line) -> Sums:
    """Return the sums of a Laplace line; its tolerance is not needed."""
    keys, x, n = line.keys, line.x, len(line.keys)
    if line.task.moments and n:
        return sums_in_windows(line, _window(line))
    if line.own is None:
        after = torch.searchsorted(keys, x)
        before = after
    else:
        before, after = line.own[0].stop, line.own[1].first
    weights = line.weights().unsqueeze(-1)
    terms = torch.cat([weights * line.task.values, weights], -1)
    fade = (-(keys.diff() / line.h)).exp()
    start = fade.new_zeros(min(n, 1))
    left = _seen(line, running(torch.cat([start, fade]), terms), before - 1, x)
    line.task.tell(len(x) // 2)
    mirrored = running(torch.cat([start, fade.flip(0)]), terms.flip(0)).flip(0)
    return left.merge(_seen(line, mirrored, after, x))


def _window(line: Line) -> Run:
    """Return the keys that are more than the tolerance of each row, with their offsets: only those weigh then."""
    weights = line.weights()
    near = neighbours(line, line.x, line.own).clamp(min=0)
    beyond = (weights.sum() / weights[near]).log().clamp(min=0) - math.log(line.task.tolerance)
    reach = (line.x - line.keys[near]).abs() + (beyond + 1e-6) * line.h * (1 + 1e-12)
    return Run(torch.searchsorted(line.keys, line.x - reach), torch.searchsorted(line.keys, line.x + reach, right=True))


def _seen(line: Line, sums: Tensor, place: Tensor, x: Tensor) -> Sums:
    """Return the sums of one side as queries see them past the key at `place`; none where that is no key."""
    n = len(line.keys)
    there = (place >= 0) & (place < n)
    if not n:
        return Sums(x.new_zeros(len(x), sums.shape[1] - 1), x.new_zeros(len(x)), x.new_full((len(x),), -torch.inf))
    place = place.clamp(0, n - 1)
    scale = (-(x - line.keys[place]).abs() / line.h).clamp(min=-torch.finfo(torch.float64).max)
    found = sums[place].masked_fill_(~there.unsqueeze(-1), 0.0)
    return Sums(found[:, :-1], found[:, -1], scale.masked_fill(~there, -torch.inf))
