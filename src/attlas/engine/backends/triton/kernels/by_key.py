"""Gradients of keys and of the vectors of the columns, given the log-sum-exp: one pass over the queries."""

import triton
import triton.language as tl

from attlas.engine.backends.triton.kernels.slopes import slopes_of, vectors_of
from attlas.engine.backends.triton.kernels.tiles import NOTHING, runs_of


@triton.jit(do_not_specialize=["strips", "heads", "group", "values_group"])
def by_key(
    Q, K, LSE, LOWS, FIRST, STOP, KEYS, DISTANCES,
    LEFT, RIGHT, DELTA, LOGS, SQUARE, COLUMN, MEAN, LINEAR, CENTRE, GRADIENT, POOLED,
    q_batch, q_head, q_row, k_batch, k_head, k_row, left_batch, left_head, left_row, right_batch, right_head, right_row,
    run_batch, run_head, key_batch, key_head, distance_batch, distance_head,
    m, n, strips, heads, group, values_group, scale2, rate, scale,
    D: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Grid (strips of keys * batches * heads,); arguments are those of `by_query`.

    GRADIENT is (batch * heads, n, SIZE), and POOLED, ``A' left``, (batch * heads, n, VALUES). Tiles of queries of which
    none sees a key of the strip are not computed.
    """
    place = tl.program_id(0)
    pair = (place // strips).to(tl.int64)
    batch, head = pair // heads, pair % heads
    j = (place % strips) * COLS
    columns = j + tl.arange(0, COLS)
    Q += batch * q_batch + head * q_head
    k = vectors_of(K + batch * k_batch + head // group * k_head, k_row, columns, n, D, SIZE)
    if LEFT is not None:
        LEFT += batch * left_batch + head * left_head
        right = vectors_of(
            RIGHT + batch * right_batch + head // values_group * right_head, right_row, columns, n, E, VALUES
        )
    if COLUMN is not None:
        COLUMN += pair * n
    key_at, distance_at = batch * key_batch + head * key_head, batch * distance_batch + head * distance_head
    found = tl.zeros((COLS, D), tl.float32)
    pooled = tl.zeros((COLS, E), tl.float32)
    for i in range(0, m, ROWS):
        rows = i + tl.arange(0, ROWS)
        inside = rows < m
        first, stop = runs_of(FIRST, STOP, run_batch, run_head, batch, head, rows, inside, n)
        reached = (first < stop) & (first < j + COLS) & (stop > j)
        if tl.max(reached.to(tl.int32), 0) > 0:
            lse = tl.load(LSE + pair * m + rows, mask=inside, other=0.0)
            lse = tl.where((first < stop) & (lse > -float("inf")), lse, -NOTHING)
            low_lse = tl.load(LOWS + pair * m + rows, mask=inside, other=0.0)
            q = vectors_of(Q, q_row, rows, m, D, SIZE)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if LEFT is not None:
                left = vectors_of(LEFT, left_row, rows, m, E, VALUES)
                dp = tl.dot(left, tl.trans(right), input_precision="ieee")
            else:
                dp = tl.zeros((ROWS, COLS), tl.float32)
            p, ds = slopes_of(
                s, dp, rows, columns, inside, first, stop, lse, low_lse, pair * m, m, n, scale2, rate, scale,
                KEYS, DISTANCES, key_at, distance_at, DELTA, LOGS, SQUARE, COLUMN, MEAN, LINEAR, CENTRE, CAP,
            )  # fmt: skip
            found = tl.dot(tl.trans(ds.to(q.dtype)), q, found, input_precision="ieee")
            if LEFT is not None:
                pooled = tl.dot(tl.trans(p.to(left.dtype)), left, pooled, input_precision="ieee")
    known = (columns < n)[:, None]
    at = (pair * n + columns)[:, None]
    places = tl.arange(0, D)
    there = known if D == SIZE else known & (places < SIZE)[None, :]
    tl.store(GRADIENT + at * SIZE + places[None, :], found, mask=there)
    if LEFT is not None:
        values = tl.arange(0, E)
        there = known if E == VALUES else known & (values < VALUES)[None, :]
        tl.store(POOLED + at * VALUES + values[None, :], pooled, mask=there)
