"""Gradients of queries, from the gradient of a loss in each cell, given the log-sum-exp: one pass over the keys."""

import triton
import triton.language as tl

from attlas.engine.backends.triton.kernels.slopes import slopes_of, vectors_of
from attlas.engine.backends.triton.kernels.tiles import NOTHING, place_of, reach_of, runs_of, strip_of


@triton.jit(do_not_specialize=["strips", "heads", "group", "values_group"])
def by_query(
    Q, K, LSE, LOWS, FIRST, STOP, KEYS, DISTANCES,
    LEFT, RIGHT, DELTA, LOGS, SQUARE, COLUMN, MEAN, LINEAR, CENTRE, GRADIENT,
    q_batch, q_head, q_row, k_batch, k_head, k_row, left_batch, left_head, left_row, right_batch, right_head, right_row,
    run_batch, run_head, key_batch, key_head, distance_batch, distance_head,
    m, n, strips, heads, group, values_group, scale2, rate, scale,
    D: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Grid (strips * batches * heads,); numbers of rows are (batch * heads, m), COLUMN (batch * heads, n).

    GRADIENT is (batch * heads, m, SIZE). `scale` is the derivative of a logit by the dot product, but for a CAP's.
    """
    _strip, pair, rows, inside = strip_of(None, m, strips, ROWS)
    batch, head = pair // heads, pair % heads
    first, stop = runs_of(FIRST, STOP, run_batch, run_head, batch, head, rows, inside, n)
    lse = tl.load(LSE + pair * m + rows, mask=inside, other=0.0)
    lse = tl.where((first < stop) & (lse > -float("inf")), lse, -NOTHING)
    low_lse = tl.load(LOWS + pair * m + rows, mask=inside, other=0.0)
    q = vectors_of(Q + batch * q_batch + head * q_head, q_row, rows, m, D, SIZE)
    K += batch * k_batch + head // group * k_head
    if LEFT is not None:
        left = vectors_of(LEFT + batch * left_batch + head * left_head, left_row, rows, m, E, VALUES)
        RIGHT += batch * right_batch + head // values_group * right_head
    if COLUMN is not None:
        COLUMN += pair * n
    key_at, distance_at = batch * key_batch + head * key_head, batch * distance_batch + head * distance_head
    found = tl.zeros((ROWS, D), tl.float32)
    low, start, whole, before, tiles = reach_of(first, stop, n, COLS)
    for t in range(tiles):
        columns = place_of(t, low, start, whole, before, COLS) + tl.arange(0, COLS)
        k = vectors_of(K, k_row, columns, n, D, SIZE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LEFT is not None:
            right = vectors_of(RIGHT, right_row, columns, n, E, VALUES)
            dp = tl.dot(left, tl.trans(right), input_precision="ieee")
        else:
            dp = tl.zeros((ROWS, COLS), tl.float32)
        _p, ds = slopes_of(
            s, dp, rows, columns, inside, first, stop, lse, low_lse, pair * m, m, n, scale2, rate, scale,
            KEYS, DISTANCES, key_at, distance_at, DELTA, LOGS, SQUARE, COLUMN, MEAN, LINEAR, CENTRE, CAP,
        )  # fmt: skip
        found = tl.dot(ds.to(k.dtype), k, found, input_precision="ieee")
    places = tl.arange(0, D)
    there = inside[:, None] if D == SIZE else inside[:, None] & (places < SIZE)[None, :]
    tl.store(GRADIENT + (pair * m + rows)[:, None] * SIZE + places[None, :], found, mask=there)
