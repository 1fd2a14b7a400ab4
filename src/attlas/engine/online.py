"""Softmax that is fed tile by tile: empty, absorb, finish; and the merge of what was fed apart.

Of each row it keeps the largest logit so far, the sum of ``exp(logit - largest)`` and the sum of
``exp(logit - largest) * value``. `merge` is associative, so that parts of a row computed anywhere can be
joined in any order.

The log-sum-exp of rows is one tensor in one of three forms:

- exact: float64, shape (batch, heads, r).
- exact on a device without float64: two numbers of float32, shape (batch, heads, r, 2), of which it is the sum. The
  first is a large logit of the row, as it is, and the second the logarithm of a sum, which is small.
- rounded: float32, shape (batch, heads, r), as kernels of torch give it.

Any of them may be indexed by its first axes. Functions here tell them apart, so that nothing else has to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.foundation.checks import (
    WITHOUT_FLOAT64,
    accumulation_dtype,
    has_float64,
    sum_dtype,
    surely_finite,
    waits_for,
)
from attlas.foundation.compat import tracing

SMALL = 4.0  # a log-sum-exp up to which rounding it to float32 changes weights by no more than rounding them
OF_16_BITS = 32.0  # the same for tokens of 16 bits, whose products are exact: weights are wrong by 1e-6 of themselves
LARGE = 16.0  # a log-sum-exp from which on a read computes that of its rows again, where that costs little
LARGEST = 2.0**14  # from here on the roundings of two kernels may lie a whole weight apart

CODE = 1 << 12  # counts of fewer than this many keys fit twice into the 24 bits of a float32

CACHED = 1 << 17  # numbers that a core keeps at hand between one step over them and the next


class Running(NamedTuple):
    """State of the rows: `largest` and `total` (..., r), `pooled` (..., r, e), e = 0 without values."""

    largest: Tensor
    total: Tensor
    pooled: Tensor


def exp(x: Tensor, out: Tensor) -> Tensor:
    """Write exp(x) to `out` (x itself will do): exactly 0 where it falls below the normal numbers of its dtype.

    On CPUs torch takes 30 to 100 times as long for a number whose exp underflows, and masked cells all do.
    """
    if x.device.type != "cpu":
        return torch.exp(x, out=out)
    low = math.log(torch.finfo(x.dtype).tiny) + 0.3  # a little above the smallest normal number
    pieces = [(x, out)]
    some = torch.get_num_threads() * CACHED
    if x.numel() > some and x.is_contiguous() and out.is_contiguous():  # three steps for what a cache holds
        pieces = list(zip(x.view(-1).split(some), out.view(-1).split(some), strict=True))
    for source, target in pieces:
        torch.clamp(source, min=low, out=target).exp_()
        # What was clamped to `low` becomes 0; 1.01 covers the rounding of exp.
        torch.threshold_(target, math.exp(low) * 1.01, 0.0)
    return out


def finite_shift(largest: Tensor) -> Tensor:
    """Return the number to subtract before exp: the largest logit, or 0 for a row that has seen no key."""
    return largest.masked_fill(largest == -math.inf, 0.0)


def empty_lse(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an exact log-sum-exp of rows, shape (batch, heads, r), that is to be written into."""
    whole = shape if has_float64(device) else (*shape, 2)
    return torch.empty(whole, dtype=sum_dtype(device), device=device)


def lse_of(shift: Tensor, total: Tensor) -> Tensor:
    """Return the exact log-sum-exp of rows from their sums of ``exp(logit - shift)``; -inf where a sum is 0."""
    nothing = total == 0
    if total.device.type in WITHOUT_FLOAT64:
        return torch.stack([torch.where(nothing, -math.inf, shift), torch.where(nothing, 1.0, total).log()], dim=-1)
    return torch.where(nothing, -math.inf, shift + torch.log(torch.where(nothing, 1.0, total.double())))


def is_exact(lse: Tensor) -> bool:
    """Return whether a log-sum-exp was not rounded to one float32."""
    return lse.dtype is torch.float64 or lse.ndim == 4


def widened(lse: Tensor) -> Tensor:
    """Return a log-sum-exp in the exact form of its device, as if it had not been rounded."""
    if lse.ndim == 4 or has_float64(lse.device):
        return lse if lse.ndim == 4 else lse.double()
    return torch.stack([lse, torch.zeros_like(lse)], dim=-1)


def rounded(lse: Tensor) -> Tensor:
    """Return a log-sum-exp as one number a row, shape (batch, heads, r): float64 where it is that, else float32."""
    return lse.sum(dim=-1) if lse.ndim == 4 else lse


def moved_lse(lse: Tensor, device: torch.device) -> Tensor:
    """Return a log-sum-exp on a device.

    An exact one is float64 where the device has that, else two numbers of float32 on a fourth axis, whose sum it is.
    """
    if lse.ndim == 4 and has_float64(device):
        return lse.to(device).double().sum(dim=-1)
    if lse.dtype is torch.float64 and not has_float64(device):
        high = lse.float()
        lse = torch.stack([high, (lse - high).nan_to_num(0.0, 0.0, 0.0).float()], dim=-1)
    return lse.to(device)


def high_part(lse: Tensor) -> Tensor:
    """Return one finite number a row that is close to its log-sum-exp: 0 where it sees nothing."""
    return finite_shift(lse[..., 0] if lse.ndim == 4 else lse)


def sees_keys(lse: Tensor) -> Tensor:
    """Return True for each row with a log-sum-exp above -inf, shape (batch, heads, r): it sees a key or a sink."""
    return (lse[..., 0] if lse.ndim == 4 else lse) > -math.inf


def above(lse: Tensor, shift: Tensor) -> Tensor:
    """Return how far a log-sum-exp lies above a number of each row; it counts as 0 where a row sees nothing."""
    if lse.ndim == 4:
        return high_part(lse) - shift + lse[..., 1]
    return finite_shift(lse) - shift


def exact(lse: Tensor, bound: float = 2 * SMALL) -> Tensor | None:
    """Return a log-sum-exp in its exact form, or None where it is too large for the float32 that a kernel gave."""
    if lse.dtype is torch.float64 or lse.ndim == 4:
        return lse
    if exceeds(lse, bound):
        return None
    return widened(lse) if lse.device.type in WITHOUT_FLOAT64 else lse.double()


def is_imprecise(lse: Tensor) -> bool:
    """Return whether a log-sum-exp may be too coarse for the logits of tiles, which round them in another way."""
    return exceeds(lse, LARGEST if is_exact(lse) else 2 * SMALL)


def exceeds(lse: Tensor, bound: float) -> bool:
    """Return whether the log-sum-exp of any row is larger than a bound.

    Two kernels round the logits of one cell differently. What a log-sum-exp of one makes of the logits of another is
    wrong by that rounding, which grows with the logits.
    """
    one = lse.sum(dim=-1) if lse.ndim == 4 else lse
    # The usual answer on a CPU, in one operation.
    if one.device.type == "cpu" and one.numel() and max(map(abs, map(float, torch.aminmax(one.detach())))) <= bound:
        return False
    return bool((finite_shift(one).abs() > bound).any())


def share_of(own: Tensor, lse: Tensor) -> Tensor:
    """Return the part of each row's weight that some of its keys have, from their log-sum-exp and that of all."""
    # exp(own - lse), without NaN where both are -inf.
    if own.ndim == 4 or lse.ndim == 4:
        (high, low), (of_all, rest) = (t.unbind(dim=-1) if t.ndim == 4 else (t, 0.0) for t in (own, lse))
        return torch.where(high == -math.inf, 0.0, torch.exp(high - finite_shift(of_all) + (low - rest)))
    return torch.where(own == -math.inf, 0.0, torch.exp(own - finite_shift(lse)))


def split_lse(lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return a log-sum-exp as a number of `dtype` and what that lacks; None for that where it is known not to matter.

    Where the host would have to wait to know it, the second number is always given.
    """
    if lse.ndim == 4:
        return high_part(lse), lse[..., 1]
    shift = finite_shift(lse)
    high = shift.to(dtype)
    if dtype is torch.float64 or not (waits_for(lse.device) or exceeds(lse, SMALL)):
        return high, None
    return high, (shift - high).nan_to_num(0.0, 0.0, 0.0).to(dtype)


def empty(shape: tuple[int, ...], e: int, *, like: Tensor, sink: Tensor | None = None) -> Running:
    """Return rows that have seen no key yet; a sink is a key without a value, seen first."""
    if sink is None:
        largest = like.new_full(shape, -math.inf)
        total = like.new_zeros(shape)
    else:
        # A copy also where the shapes agree: rows are written into it.
        largest = sink.to(like.dtype).view(1, -1, 1).expand(shape).clone(memory_format=torch.contiguous_format)
        total = torch.exp(largest - finite_shift(largest))
    return Running(largest, total, like.new_zeros(*shape, e))


def absorb(state: Running, logits: Tensor, values: Tensor | None, keep: Tensor | None = None) -> Running:
    """Feed one tile of logits, shape (..., r, c); `logits` is overwritten.

    Parameters
    ----------
    state : Running
        What the rows have seen so far.
    logits : Tensor, shape (..., r, c)
        Log-weights of the tile, -inf where masked.
    values : Tensor, optional, shape (..., c, e)
        Values to be pooled.
    keep : Tensor, optional, shape (..., r, c)
        Factor of each weight in the pooled sum alone: dropout.
    """
    largest = torch.maximum(state.largest, logits.amax(dim=-1))
    shift = finite_shift(largest)
    logits.sub_(shift.unsqueeze(-1))
    weights = exp(logits, out=logits)
    before = torch.exp(state.largest - shift)
    total = state.total * before + weights.sum(dim=-1)
    pooled = state.pooled
    if values is not None:
        kept = weights if keep is None else weights.mul_(keep)
        pooled = pooled * before.unsqueeze(-1) + torch.matmul(kept, values)
    return Running(largest, total, pooled)


def product(weights: Tensor, values: Tensor, seen: Callable[[], Tensor]) -> Tensor:
    """Return ``weights @ values``, in which NaN and infinity reach the rows that see their key, and no others.

    In a matrix product a weight of 0 times NaN is NaN, so that a value reaches rows whose mask hides it. On the CPU
    `seen` is asked only where there are such values.
    """
    if tracing() or surely_finite(values):
        return torch.matmul(weights, values)
    return torch.matmul(weights, finite_part(values)) + special_part(seen(), special_codes(values))


def finite_part(values: Tensor) -> Tensor:
    """Return values with 0 in the place of NaN and infinity."""
    return torch.where(values.isfinite(), values, 0.0)


def special_codes(values: Tensor) -> Tensor:
    """Return 1 for infinity, CODE for minus infinity, more than all of those together for NaN, and 0 for the rest.

    One product of them with the cells that a row sees then counts each; fewer than CODE keys are counted at a time.
    """
    dtype = accumulation_dtype(values.dtype)
    return (values == math.inf).to(dtype) + CODE * (values == -math.inf) + 64 * CODE**2 * values.isnan()


def special_part(seen: Tensor, codes: Tensor) -> Tensor:
    """Return the sum of NaN and infinite values over the keys that each row sees; 0 where it sees none.

    Parameters
    ----------
    seen : Tensor of bool, shape (..., r, c)
        True where a row sees a key, however small its weight is.
    codes : Tensor, shape (..., c, e)
        What `special_codes` makes of the values.
    """
    most = CODE - 1  # keys that one product may count
    if seen.shape[-1] > most:
        pairs = zip(seen.split(most, dim=-1), codes.split(most, dim=-2), strict=True)
        return sum((special_part(*pair) for pair in pairs), torch.zeros((), dtype=codes.dtype, device=codes.device))
    count = torch.matmul(seen.to(codes.dtype), codes)
    infinite = torch.where(count % CODE > 0, math.inf, 0.0) - torch.where(count >= CODE, math.inf, 0.0)
    return torch.where(count >= 64 * CODE**2, math.nan, infinite)


def merge(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Join the log-sum-exps that two disjoint sets of keys gave to the same rows.

    Returns
    -------
    lse, left_share, right_share : Tensor
        Log-sum-exp of both sets, and the factors that make weights (and outputs) of one set those of both.
    """
    total = torch.logaddexp(left, right)
    shift = finite_shift(total)
    return total, torch.exp(left - shift), torch.exp(right - shift)


def finish(state: Running) -> tuple[Tensor, Tensor]:
    """Return the output, shape (..., r, e), and the exact log-sum-exp.

    A large log-sum-exp rounded to float32 would leave each weight of its row wrong by as much.
    """
    # A row that has seen no key has total 0 and pooled 0: its output is 0.
    total = torch.where(state.total == 0, torch.ones_like(state.total), state.total)
    return state.pooled / total.unsqueeze(-1), lse_of(state.largest, state.total)
