"""Without the log-sum-exp: it, the output, and numbers of rows, in one pass.

Sums are kept relative to the running maximum ``peak``, as in any online softmax: with ``y = logit - peak`` and
``e = exp2(y)`` they are ``total = sum e``, ``moment = sum e y`` and ``squares = sum e e``. Where the peak rises by
``-log2 a`` they become ``total a``, ``(moment + total log2 a) a`` and ``squares a a``. What is stored are these sums,
so that the parts of a row that several programs have summed can be joined.

As in `weights`, the product of the next tile is asked for before the vectors of this one, and what is None costs
nothing.
"""

import triton
import triton.language as tl

from attlas.engine.backends.triton.kernels.tiles import (
    BOXCAR,
    DOT,
    LN2,
    NOTHING,
    allowed,
    first_product,
    logits_of,
    place_of,
    products,
    queries_of,
    reach_of,
    runs_of,
    share_of,
    strip_of,
)
from attlas.engine.backends.triton.kernels.weights import moments_with


@triton.jit
def absorb(
    q, s, K, WEIGHTS, q_row, k_row, V, v_row, rows, first, stop, a, b, low, start, whole, before, m, n, scale2, rate,
    KEYS, DISTANCES, key_at, distance_at, MOMENT, SQUARES, MEAN, FLOOR,
    peak, total, moment, squares, count, mean, spread, best, out,
    KIND: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, CLASSES: tl.constexpr, CAP: tl.constexpr, PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Feed the tiles from a up to b to the running sums; s holds the products of tile a.

    Sums are per row, as in the text of the module; `best` has the largest logit of each class of keys, and `low`,
    `start`,
    `whole` and `before` come from `reach_of`.

    With ``y = logit - peak`` and ``e = exp2(y)`` the sums are ``total = Σ e``, ``moment = Σ e y``, ``squares = Σ e²``.
    A rise of `peak` rescales them.
    """
    for t in range(a, b):
        j = place_of(t, low, start, whole, before, COLS)
        beyond = place_of(t + 1, low, start, whole, before, COLS)
        # Of wide values no register is free for it.
        s, later = products(
            q, s, K, WEIGHTS, q_row, k_row, rows, j, beyond, n, KIND, KIND == DOT and E <= 128, D, SIZE, ROWS, COLS, PTX
        )  # fmt: skip
        columns = j + tl.arange(0, COLS)
        if V is not None:
            at = tl.arange(0, E)
            there = (columns < n)[:, None] if E == VALUES else (columns < n)[:, None] & (at < VALUES)[None, :]
            from_j = V + j.to(tl.int64) * v_row + tl.arange(0, COLS)[:, None] * v_row
            v = tl.load(from_j + at[None, :], mask=there, other=0.0)
        plain: tl.constexpr = not CAP and KEYS is None and DISTANCES is None and KIND < BOXCAR
        if plain:
            x = s
        else:
            x = logits_of(s, scale2, rate, KEYS, DISTANCES, key_at, distance_at, rows, columns, m, n, CAP)
        if MASKED:
            x = tl.where(allowed(first, stop, columns), x, -float("inf"))
        own = tl.max(x, 1)
        risen = tl.maximum(peak, own * scale2 if plain else own)
        down = peak - risen
        scaling = tl.exp2(down)
        y = tl.fma(x, scale2, -risen[:, None]) if plain else x - risen[:, None]
        e = tl.exp2(y)
        if MASKED or not plain:
            y = tl.maximum(y, NOTHING)  # 0 times it is 0, and 0 times -inf is NaN
        if MOMENT is not None:
            moment = (moment + total * down) * scaling + tl.sum(e * y, 1)
        if SQUARES is not None:
            squares = squares * scaling * scaling + tl.sum(e * e, 1)
        total = total * scaling + tl.sum(e, 1)
        if FLOOR is not None:
            best = tl.maximum(best, tl.max(tl.reshape(x, (ROWS, CLASSES, COLS // CLASSES)), 2))
        if MEAN is not None:
            logits = x * scale2 if plain else x
            count, mean, spread = moments_with(logits, count, mean, spread, first, stop, columns, MASKED)
        if V is not None:
            out = tl.dot(e.to(v.dtype), v, out * scaling[:, None], input_precision="ieee")
        peak = risen
        s = later
    return s, peak, total, moment, squares, count, mean, spread, best, out


@triton.jit(do_not_specialize=["strips", "heads", "group", "splits", "values_group"])
def online(
    Q, K, WEIGHTS, V, FIRST, STOP, KEYS, DISTANCES,
    OUT, PEAK, TOTAL, MOMENT, SQUARES, COUNT, MEAN, SPREAD, FLOOR,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    run_batch, run_head, key_batch, key_head, distance_batch, distance_head,
    m, n, strips, heads, group, values_group, splits, scale2, rate,
    KIND: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, CLASSES: tl.constexpr, TOP: tl.constexpr, CAP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (strips * batches * heads, splits).

    V is (batch, value heads, n, VALUES) or None; scale2 is above 0 or there is a CAP. OUT is
    (splits, batch * heads, m, VALUES), the weighted sum of the values divided by TOTAL; numbers of rows are
    (splits, batch * heads, m). FLOOR is a base-2 logit. Of a row that sees no key PEAK is -inf and the rest 0.

    A program has ROWS queries (a strip) of one head, and one of `splits` shares of its keys, COLS at a time. `group`
    query heads share a key head; tokens have SIZE numbers, filled up with zeros to D; `logits_of` makes logits of dot
    products by `scale2`, `rate` and CAP. FLOOR is the TOP-th largest of the maxima of CLASSES classes of keys: TOP
    different keys reach it.
    """
    _strip, pair, rows, inside = strip_of(None, m, strips, ROWS)
    batch, head = pair // heads, pair % heads
    first, stop = runs_of(FIRST, STOP, run_batch, run_head, batch, head, rows, inside, n)
    q = queries_of(Q, q_batch, q_head, q_row, batch, head, rows, inside, KIND, D, SIZE)
    K += batch * k_batch + head // group * k_head
    if V is not None:
        V += batch * v_batch + head // values_group * v_head
    key_at, distance_at = batch * key_batch + head * key_head, batch * distance_batch + head * distance_head

    peak = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    count = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    spread = tl.zeros((ROWS,), tl.float32)
    best = tl.full((ROWS, CLASSES), NOTHING, tl.float32)
    out = tl.zeros((ROWS, E), tl.float32)
    low, start, whole, before, tiles = reach_of(first, stop, n, COLS)
    a, b = share_of(tiles, splits)
    # Beside making a product of pairs its mask costs nothing.
    edge = tl.minimum(tl.maximum(whole, a), b) if KIND == DOT else a
    at = place_of(a, low, start, whole, before, COLS)
    s = first_product(q, K, k_row, at, n, KIND == DOT and E <= 128, D, SIZE, ROWS, COLS)
    if KIND == DOT:
        s, peak, total, moment, squares, count, mean, spread, best, out = absorb(
            q, s, K, WEIGHTS, q_row, k_row, V, v_row, rows, first, stop, a, edge, low, start, whole, before, m, n,
            scale2, rate, KEYS, DISTANCES, key_at, distance_at, MOMENT, SQUARES, MEAN, FLOOR,
            peak, total, moment, squares, count, mean, spread, best, out,
            KIND, D, SIZE, E, VALUES, ROWS, COLS, CLASSES, CAP, PTX, False,
        )  # fmt: skip
    s, peak, total, moment, squares, count, mean, spread, best, out = absorb(
        q, s, K, WEIGHTS, q_row, k_row, V, v_row, rows, first, stop, edge, b, low, start, whole, before, m, n, scale2,
        rate, KEYS, DISTANCES, key_at, distance_at, MOMENT, SQUARES, MEAN, FLOOR,
        peak, total, moment, squares, count, mean, spread, best, out,
        KIND, D, SIZE, E, VALUES, ROWS, COLS, CLASSES, CAP, PTX, True,
    )  # fmt: skip

    at = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) // strips + pair) * m + rows
    sees = (first < stop) & (total > 0)
    tl.store(PEAK + at, tl.where(sees, peak, -float("inf")), mask=inside)
    tl.store(TOTAL + at, tl.where(sees, total, 0.0), mask=inside)
    if MOMENT is not None:
        tl.store(MOMENT + at, tl.where(sees, moment, 0.0), mask=inside)
    if SQUARES is not None:
        tl.store(SQUARES + at, tl.where(sees, squares, 0.0), mask=inside)
    if MEAN is not None:
        tl.store(COUNT + at, tl.where(sees, count, 0.0), mask=inside)
        tl.store(MEAN + at, tl.where(sees, mean, 0.0) * LN2, mask=inside)
        tl.store(SPREAD + at, tl.where(sees, spread, 0.0) * (LN2 * LN2), mask=inside)
    if FLOOR is not None:
        floor = tl.max(best, 1)
        for _ in tl.static_range(TOP - 1):
            best = tl.where(best == floor[:, None], NOTHING, best)
            floor = tl.max(best, 1)
        if not CAP and KEYS is None and DISTANCES is None and KIND < BOXCAR:
            floor *= scale2
        tl.store(FLOOR + at, tl.where(sees, tl.maximum(floor, NOTHING), NOTHING), mask=inside)
    if V is not None:
        places = tl.arange(0, E)
        there = inside[:, None] if E == VALUES else inside[:, None] & (places < VALUES)[None, :]
        shares = tl.where(sees[:, None], out / tl.where(sees, total, 1.0)[:, None], 0.0)
        tl.store(OUT + at[:, None] * VALUES + places[None, :], shares.to(OUT.dtype.element_ty), mask=there)
