"""Cells of the matrix: weights, logits or logarithms of weights of some rows and some columns, and of nothing else."""

import triton
import triton.language as tl

from attlas.engine.backends.triton.kernels.tiles import DOT, LN2, logits_of, pairs, queries_of, runs_of, strip_of


@triton.jit(do_not_specialize=["strips", "heads", "group", "rows_first", "columns_first", "chosen", "width"])
def cells(
    Q, K, WEIGHTS, LSE, LOWS, FIRST, STOP, ROWS_AT, COLUMNS_AT, KEYS, DISTANCES, OUT,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    run_batch, run_head, key_batch, key_head, distance_batch, distance_head,
    m, n, rows_first, columns_first, chosen, width, strips, heads, group, scale2, rate,
    KIND: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAP: tl.constexpr,
    PTX: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Grid (strips * batches * heads, blocks of columns); OUT is (batch * heads, chosen, width).

    ROWS_AT and COLUMNS_AT hold the numbers of rows and columns, or are None for those from `rows_first` and
    `columns_first` on. LSE and LOWS, (batch * heads, m) of base 2, are None where logits are asked for; LOG asks for
    the logarithm of a weight.

    A program has ROWS of the chosen rows (a strip) and COLS columns. `group` query heads share a key head; tokens have
    SIZE numbers, filled up with zeros to D; `logits_of` makes logits of dot products by `scale2`, `rate` and CAP. Row i
    sees the keys from FIRST[i] up to STOP[i].
    """
    _strip, pair, own, inside = strip_of(None, chosen, strips, ROWS)
    batch, head = pair // heads, pair % heads
    rows = tl.load(ROWS_AT + own, mask=inside, other=0) if ROWS_AT is not None else rows_first + own
    there = tl.program_id(1) * COLS + tl.arange(0, COLS)
    known = there < width
    columns = tl.load(COLUMNS_AT + there, mask=known, other=0) if COLUMNS_AT is not None else columns_first + there
    first, stop = runs_of(FIRST, STOP, run_batch, run_head, batch, head, rows, inside, n)
    q = queries_of(Q, q_batch, q_head, q_row, batch, head, rows, inside, KIND, D, SIZE)
    K += batch * k_batch + head // group * k_head
    if KIND == DOT:
        at = tl.arange(0, D)
        some = known[None, :] if D == SIZE else known[None, :] & (at < SIZE)[:, None]
        k = tl.load(K + columns.to(tl.int64)[None, :] * k_row + at[:, None], mask=some, other=0.0)
        s = tl.dot(q, k, input_precision="ieee")
    else:
        s = pairs(q, K, WEIGHTS, q_row, k_row, rows, columns, KIND, SIZE, ROWS, COLS, PTX)
    key_at, distance_at = batch * key_batch + head * key_head, batch * distance_batch + head * distance_head
    x = logits_of(s, scale2, rate, KEYS, DISTANCES, key_at, distance_at, rows, columns, m, n, CAP)
    hidden = (columns[None, :] < first[:, None]) | (columns[None, :] >= stop[:, None])
    if LSE is not None:
        lse = tl.load(LSE + pair * m + rows, mask=inside, other=0.0)
        nothing = lse == -float("inf")
        x -= tl.where(nothing, 0.0, lse)[:, None]
        x -= tl.load(LOWS + pair * m + rows, mask=inside, other=0.0)[:, None]
        hidden |= nothing[:, None]
    if LSE is None or LOG:
        found = tl.where(hidden, -float("inf"), x * LN2)
    else:
        found = tl.where(hidden, 0.0, tl.exp2(x))
    place = (pair * chosen + own)[:, None] * width + there[None, :]
    tl.store(OUT + place, found, mask=inside[:, None] & known[None, :])
