"""The gradient of a loss in the logits of a tile: what both passes of the gradients of dot products share."""

import triton
import triton.language as tl

from attlas.engine.backends.triton.kernels.tiles import LN2, NOTHING, allowed, logits_of


@triton.jit
def slopes_of(
    s, dp, rows, columns, inside, first, stop, lse, low, at, m, n, scale2, rate, scale,
    KEYS, DISTANCES, key_at, distance_at, DELTA, LOGS, SQUARE, COLUMN, MEAN, LINEAR, CENTRE, CAP: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile, and the gradient of the loss in its dot products, of which s is the tile.

    `dp` is ``left . right``; numbers of rows are from `at` on, and COLUMN holds one for each key. With CAP the slope of
    the tangent is ``1 - t^2``.
    """
    x = logits_of(s, scale2, rate, KEYS, DISTANCES, key_at, distance_at, rows, columns, m, n, CAP)
    seen = allowed(first, stop, columns)
    y = tl.where(seen, tl.maximum(x - lse[:, None] - low[:, None], NOTHING), NOTHING)
    p = tl.exp2(y)
    if LOGS is not None:
        dp += tl.load(LOGS + at + rows, mask=inside, other=0.0)[:, None] * y * LN2
    if SQUARE is not None:
        dp += tl.load(SQUARE + at + rows, mask=inside, other=0.0)[:, None] * p
    if COLUMN is not None:
        dp += tl.load(COLUMN + columns, mask=columns < n, other=0.0)[None, :]
    ds = tl.where(seen, p * (dp - tl.load(DELTA + at + rows, mask=inside, other=0.0)[:, None]), 0.0)
    if MEAN is not None:
        gap = x * LN2 - tl.load(CENTRE + at + rows, mask=inside, other=0.0)[:, None]
        direct = gap * tl.load(LINEAR + at + rows, mask=inside, other=0.0)[:, None]
        direct += tl.load(MEAN + at + rows, mask=inside, other=0.0)[:, None]
        ds += tl.where(seen, direct, 0.0)
    if CAP:
        t = 1.0 - 2.0 / (1.0 + tl.exp2(s * rate))
        ds *= 1.0 - t * t
    return p, ds * scale


@triton.jit
def vectors_of(V, row, at, count, E: tl.constexpr, VALUES: tl.constexpr):
    """Return the vectors of the tokens at `at`, filled up with zeros to E numbers."""
    e = tl.arange(0, E)
    there = (at < count)[:, None] if E == VALUES else (at < count)[:, None] & (e < VALUES)[None, :]
    return tl.load(V + at.to(tl.int64)[:, None] * row + e[None, :], mask=there, other=0.0)
