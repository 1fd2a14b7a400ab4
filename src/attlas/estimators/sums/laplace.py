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
from attlas.estimators.sums.scan import decayed_cumsum


def laplace_sums(line: Line) -> Sums:
    """Return the sums of a Laplace line; its tolerance is not needed."""
    keys, x = line.keys, line.x
    if line.task.moments:
        return sums_in_windows(line, _run_of_keys(line))
    # Keys below `before` lie on the left of a query, those from `after` on on its right; between is its own, left out.
    if line.own is None:
        after = torch.searchsorted(keys, x)
        before = after
    else:
        before, after = line.own[0].stop, line.own[1].first
    weights = line.weights().unsqueeze(-1)
    terms = torch.cat([weights * line.task.values, weights], -1)
    # What a sum loses from one key to the next: S_i = exp(-(k_i - k_{i-1}) / h) S_{i-1} + term_i.
    decay = (-(keys.diff() / line.h)).exp()
    start = decay.new_zeros(1)
    left = _sums_past_index(line, decayed_cumsum(torch.cat([start, decay]), terms), before - 1, x)
    # Progress: one side of all queries is half of the work.
    line.task.report(len(x) // 2)
    mirrored = decayed_cumsum(torch.cat([start, decay.flip(0)]), terms.flip(0)).flip(0)
    return left.merge(_sums_past_index(line, mirrored, after, x))


def _run_of_keys(line: Line) -> Run:
    """Return the keys that can matter to each query where moments are summed; all others are below the tolerance."""
    weights = line.weights()
    near = neighbours(line, line.x, line.own).clamp(min=0)
    beyond = (weights.sum() / weights[near]).log().clamp(min=0) - math.log(line.task.tolerance)
    reach = (line.x - line.keys[near]).abs() + (beyond + 1e-6) * line.h * (1 + 1e-12)
    return Run(torch.searchsorted(line.keys, line.x - reach), torch.searchsorted(line.keys, line.x + reach, right=True))


def _sums_past_index(line: Line, sums: Tensor, index: Tensor, x: Tensor) -> Sums:
    """Return the sums of one side as queries see them past the key at `index`; none where that is no key."""
    n = len(line.keys)
    is_key = (index >= 0) & (index < n)
    index = index.clamp(0, n - 1)
    scale = (-(x - line.keys[index]).abs() / line.h).clamp(min=-torch.finfo(torch.float64).max)
    seen = sums[index].masked_fill_(~is_key.unsqueeze(-1), 0.0)
    return Sums(seen[:, :-1], seen[:, -1], scale.masked_fill(~is_key, -torch.inf))


def leave_one_out_sums(keys: Tensor, values: Tensor, weights: Tensor | None) -> tuple[Sums, Tensor]:
    """Return the sums that each key sees of all others, and the slopes that its bandwidth has.

    Parameters
    ----------
    keys : Tensor, shape (n,)
        Keys in bandwidths, in any order.
    values : Tensor, shape (n, e)
        Values.
    weights : Tensor, shape (n,), optional
        Weights above 0.

    Returns
    -------
    sums : Sums
        ``Σ_{j≠i} w_j exp(-|u_ij|) y_j`` and ``Σ_{j≠i} w_j exp(-|u_ij|)``.
    slopes : Tensor, shape (n, e + 1)
        The same with ``|u_ij|`` as a factor, on the same scale.

    Notes
    -----
    ``D_i = exp(-δ_i) (D_{i-1} + δ_i L_{i-1})`` carries the distances along with the sums. Time: that of sorting.
    """
    z, order = keys.double().sort(stable=True)
    weight = z.new_ones(len(z), 1) if weights is None else weights.double()[order].unsqueeze(-1)
    terms = torch.cat([weight * values.double()[order], weight], -1)
    gap = z.diff()
    left = _from_one_side(gap, terms)
    right = [t.flip(0) for t in _from_one_side(gap.flip(0), terms.flip(0))]
    # `near`: distances to the neighbours on both sides; the scale of a row is exp(-the smaller one).
    far = z.new_full((1,), torch.inf)
    near = torch.cat([far, gap]), torch.cat([gap, far])
    scale = -torch.minimum(*near)
    total, slopes = torch.zeros_like(terms), torch.zeros_like(terms)
    for (sums, along), distance in zip((left, right), near, strict=True):
        # Sums stand at the neighbour: seen from key i they are smaller by exp(-distance), here relative to the scale.
        factor = torch.where(distance == torch.inf, 0.0, (-distance - scale).exp()).unsqueeze(-1)
        total += factor * sums
        slopes += factor * along
    # From sorted to given order.
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    total, slopes, scale = total[rank].to(values), slopes[rank].to(values), scale[rank]
    return Sums(total[:, :-1], total[:, -1], scale), slopes


def _from_one_side(gap: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return, as each key sees them past the key before it, on the scale of that one, sums and their slopes.

    `gap` (n - 1,) are the distances of neighbours in bandwidths, `terms` (n, c) what each key adds. In a slope each
    term is multiplied by its distance.
    """
    n = len(terms)
    none = terms.new_zeros(min(n, 1), terms.shape[1])
    decay = (-gap).exp()
    start = decay.new_zeros(min(n, 1))
    sums = decayed_cumsum(torch.cat([start, decay]), terms)[:-1]
    step = gap.unsqueeze(-1)
    carried = decayed_cumsum(torch.cat([start, decay]), torch.cat([none, decay.unsqueeze(-1) * step * sums]))[:-1]
    return torch.cat([none, sums]), torch.cat([none, carried + step * sums])
