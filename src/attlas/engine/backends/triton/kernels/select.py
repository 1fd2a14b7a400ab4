"""The exact TOP largest weights of every row, with their keys.

Each row keeps its TOP largest logits so far, and a bar: the smallest of them, or the floor that another kernel found,
whichever is higher. A tile whose largest entry is under the bar of every row costs one comparison an entry. Where some
row has more, the largest of each row is taken out of the tile and put into its list, until no row has any. Nothing is
added atomically: the result does not depend on the order of programs.
"""

import triton
import triton.language as tl

from attlas.engine.backends.triton.kernels.tiles import (
    DOT,
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


@triton.jit
def pick(
    q, s, K, WEIGHTS, q_row, k_row, rows, first, stop, a, b, low, start, whole, before, m, n, scale2, rate,
    KEYS, DISTANCES, key_at, distance_at, bar, best, keys,
    KIND: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SLOTS: tl.constexpr, CAP: tl.constexpr, PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Put the largest logits of the tiles from a up to b into the lists; s holds the products of tile a.

    `best` and `keys` are the lists of each row, in SLOTS slots; `bar` is the logit that a key must exceed to get into
    them.
    """
    for t in range(a, b):
        j = place_of(t, low, start, whole, before, COLS)
        beyond = place_of(t + 1, low, start, whole, before, COLS)
        s, later = products(
            q, s, K, WEIGHTS, q_row, k_row, rows, j, beyond, n, KIND, KIND == DOT, D, SIZE, ROWS, COLS, PTX
        )  # fmt: skip
        columns = j + tl.arange(0, COLS)
        x = logits_of(s, scale2, rate, KEYS, DISTANCES, key_at, distance_at, rows, columns, m, n, CAP)
        if MASKED:
            x = tl.where(allowed(first, stop, columns), x, NOTHING)
        largest = tl.max(x, 1)
        while tl.max((largest > bar).to(tl.int32), 0) > 0:
            # The largest logit of each row takes the place of the smallest in its list, and leaves the tile.
            key = tl.min(tl.where(x == largest[:, None], columns[None, :], n), 1)
            slot = tl.argmin(best, 1)
            here = (tl.arange(0, SLOTS)[None, :] == slot[:, None]) & (largest > bar)[:, None]
            best = tl.where(here, largest[:, None], best)
            keys = tl.where(here, key[:, None], keys)
            bar = tl.maximum(bar, tl.min(best, 1))
            x = tl.where(columns[None, :] == key[:, None], NOTHING, x)
            largest = tl.max(x, 1)
        s = later
    return s, bar, best, keys


@triton.jit(do_not_specialize=["strips", "heads", "group", "splits"])
def select(
    Q, K, WEIGHTS, FIRST, STOP, KEYS, DISTANCES, FLOOR, LOGITS, PLACES,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    run_batch, run_head, key_batch, key_head, distance_batch, distance_head,
    m, n, strips, heads, group, splits, scale2, rate,
    KIND: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    SLOTS: tl.constexpr, TOP: tl.constexpr, CAP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (strips * batches * heads, splits).

    FLOOR, (batch * heads, m), is a base-2 logit that the TOP-th largest of a row reaches, or None. LOGITS (of base 2)
    and PLACES are (splits, batch * heads, m, TOP), in no order; a place is -1 where a row has fewer keys. SLOTS is a
    power of 2.

    A program has ROWS queries (a strip) of one head, and one of `splits` shares of its keys, COLS at a time. `group`
    query heads share a key head; tokens have SIZE numbers, filled up with zeros to D; `logits_of` makes logits of dot
    products by `scale2`, `rate` and CAP.
    """
    _strip, pair, rows, inside = strip_of(None, m, strips, ROWS)
    batch, head = pair // heads, pair % heads
    first, stop = runs_of(FIRST, STOP, run_batch, run_head, batch, head, rows, inside, n)
    sees = first < stop
    q = queries_of(Q, q_batch, q_head, q_row, batch, head, rows, inside, KIND, D, SIZE)
    K += batch * k_batch + head // group * k_head
    key_at, distance_at = batch * key_batch + head * key_head, batch * distance_batch + head * distance_head
    bar = tl.full((ROWS,), NOTHING, tl.float32)
    if FLOOR is not None:
        floor = tl.load(FLOOR + pair * m + rows, mask=inside, other=0.0)
        # Two kernels may round the same logit differently.
        bar = tl.maximum(bar, floor - 1e-4 - 1e-5 * tl.abs(floor))
    bar = tl.where(sees, bar, -NOTHING)  # no logit of such a row is taken, in tiles without a mask as well
    slots = tl.zeros((ROWS, SLOTS), tl.int32) + tl.arange(0, SLOTS)[None, :]
    best = tl.where(slots < TOP, NOTHING, -NOTHING)  # places beyond TOP are never the smallest
    keys = tl.full((ROWS, SLOTS), -1, tl.int32)
    low, start, whole, before, tiles = reach_of(first, stop, n, COLS)
    a, b = share_of(tiles, splits)
    # Beside making a product of pairs its mask costs nothing.
    edge = tl.minimum(tl.maximum(whole, a), b) if KIND == DOT else a
    at = place_of(a, low, start, whole, before, COLS)
    s = first_product(q, K, k_row, at, n, KIND == DOT, D, SIZE, ROWS, COLS)
    if KIND == DOT:
        s, bar, best, keys = pick(
            q, s, K, WEIGHTS, q_row, k_row, rows, first, stop, a, edge, low, start, whole, before, m, n, scale2, rate,
            KEYS, DISTANCES, key_at, distance_at, bar, best, keys,
            KIND, D, SIZE, ROWS, COLS, SLOTS, CAP, PTX, False,
        )  # fmt: skip
    s, bar, best, keys = pick(
        q, s, K, WEIGHTS, q_row, k_row, rows, first, stop, edge, b, low, start, whole, before, m, n, scale2, rate,
        KEYS, DISTANCES, key_at, distance_at, bar, best, keys,
        KIND, D, SIZE, ROWS, COLS, SLOTS, CAP, PTX, True,
    )  # fmt: skip
    at = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) // strips + pair) * m + rows
    there = inside[:, None] & (slots < TOP)
    tl.store(LOGITS + at[:, None] * TOP + slots, best, mask=there)
    tl.store(PLACES + at[:, None] * TOP + slots, keys, mask=there)
