"""What all kernels share: which tiles of keys a strip of queries reads, the logits of a tile, and their mask.

A program owns a strip of up to ROWS queries of one head, and reads its keys COLS at a time. Everything is in base 2: a
logit is ``q . k * scale2`` with ``scale2 = scale * log2(e)``, and a weight is ``exp2(logit - lse2)``.

Each query sees one run of keys, from `first` up to `stop`. Tiles that no query of the strip sees are not read. The
tiles that every query sees whole come first, without a mask; those at the ends of the runs come last, with one.
"""

import triton
import triton.language as tl

#: Logarithm of a weight that is 0; finite, so that 0 times it is 0 and not NaN, and so is its square.
NOTHING = tl.constexpr(-1e18)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def strip_of(STRIPS, m, strips, ROWS: tl.constexpr):
    """Return the strip, and the batch and head, of a program; the rows of the strip, and which of them there are."""
    place = tl.program_id(0)
    strip = strips - 1 - place % strips  # of a causal mask the longest come first
    start = strip * ROWS
    stop = m
    if STRIPS is not None:
        start = tl.load(STRIPS + strip)
        stop = tl.load(STRIPS + strip + 1)
    rows = start + tl.arange(0, ROWS)
    return strip, (place // strips).to(tl.int64), rows, rows < stop


@triton.jit
def runs_of(FIRST, STOP, run_batch, run_head, batch, head, rows, inside, n):
    """Return the run of keys of each row; it is empty for a row that there is not."""
    if FIRST is None:
        return tl.where(inside, 0, 1), tl.where(inside, n, 0)
    at = batch * run_batch + head * run_head + rows
    return tl.load(FIRST + at, mask=inside, other=1), tl.load(STOP + at, mask=inside, other=0)


@triton.jit
def reach_of(first, stop, n, COLS: tl.constexpr):
    """Return which tiles a strip reads, as (low, start, whole, before, tiles).

    `low` is the first key of the first tile, `start` that of the first tile which every row sees whole. The rest are
    numbers of tiles: those seen whole, those before them, and all.
    """
    sees = first < stop
    low = tl.min(tl.where(sees, first, n), 0) // COLS * COLS
    end = (tl.max(tl.where(sees, stop, 0), 0) + COLS - 1) // COLS * COLS
    end = tl.maximum(end, low)
    start = (tl.max(tl.where(sees, first, 0), 0) + COLS - 1) // COLS * COLS
    start = tl.minimum(tl.maximum(start, low), end)
    whole = tl.maximum(tl.min(tl.where(sees, stop, n), 0) // COLS * COLS - start, 0) // COLS
    return low, start, whole, (start - low) // COLS, (end - low) // COLS


@triton.jit
def share_of(tiles, splits):
    """Return the first tile of this program and the one after its last, where several share a strip."""
    part = tl.program_id(1)
    return tiles * part // splits, tiles * (part + 1) // splits


@triton.jit
def place_of(t, low, start, whole, before, COLS: tl.constexpr):
    """Return the first key of the t-th tile: whole ones first, then those before and those after."""
    beyond = tl.where(t < whole + before, low + (t - whole) * COLS, start + (t - before) * COLS)
    return tl.where(t < whole, start + t * COLS, beyond)


@triton.jit
def queries_of(Q, q_batch, q_head, q_row, batch, head, rows, inside, D: tl.constexpr, SIZE: tl.constexpr):
    """Return the queries of a strip, filled up with zeros to D numbers."""
    at = tl.arange(0, D)
    there = inside[:, None] if D == SIZE else inside[:, None] & (at < SIZE)[None, :]
    start = Q + batch * q_batch + head * q_head
    return tl.load(start + rows.to(tl.int64)[:, None] * q_row + at[None, :], mask=there, other=0.0)


@triton.jit
def product(q, K, k_row, j, n, D: tl.constexpr, SIZE: tl.constexpr, COLS: tl.constexpr):
    """Return q . k of the COLS keys from j on; of keys from n on 0."""
    at = tl.arange(0, D)
    columns = tl.arange(0, COLS)
    there = (columns < n - j)[None, :] if D == SIZE else (columns < n - j)[None, :] & (at < SIZE)[:, None]
    k = tl.load(K + j.to(tl.int64) * k_row + columns[None, :] * k_row + at[:, None], mask=there, other=0.0)
    return tl.dot(q, k, input_precision="ieee")  # of float32; without it a GPU takes 10 bits of them


@triton.jit
def allowed(first, stop, columns):
    """Return which pairs may attend."""
    return (columns[None, :] >= first[:, None]) & (columns[None, :] < stop[:, None])


@triton.jit
def logits_of(s, scale2, rate, KEYS, DISTANCES, key_at, distance_at, rows, columns, m, n, CAP: tl.constexpr):
    """Return base-2 logits from dot products.

    With CAP, `scale2` is the cap and ``exp2(s rate)`` the square of the exponential of which tanh is made.
    KEYS and DISTANCES, where given, hold what is added for each key and for each distance, from ``j - i = 1 - m`` on.

    Without CAP that is ``s scale2``, with it ``scale2 tanh(s rate ln 2 / 2)``, written as ``1 - 2 / (1 + exp(2 x))``.
    """
    x = scale2 - 2.0 * scale2 / (1.0 + tl.exp2(s * rate)) if CAP else s * scale2
    if KEYS is not None:
        x += tl.load(KEYS + key_at + columns, mask=columns < n, other=0.0)[None, :]
    if DISTANCES is not None:
        places = columns[None, :] - rows[:, None] + (m - 1)
        x += tl.load(DISTANCES + distance_at + places, mask=(places >= 0) & (places < m + n - 1), other=0.0)
    return x
