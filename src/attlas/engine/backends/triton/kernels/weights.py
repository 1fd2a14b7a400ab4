"""Given the log-sum-exp: numbers of rows, columns, diagonals and pictures, in one pass over ``Q K'``.

- Rows: entropy, sum of squares, mass, largest logit, mean and variance of the logits, and a floor for the largest
  weights. For the floor the keys are dealt to CLASSES classes, like cards; TOP different keys reach the TOP-th largest
  of the classes' maxima. `select` then finds them.
- Columns: the sum and the maximum over the rows of each strip are stored once per strip and column. Column mass,
  column maximum and pictures are made from these. The strips of a picture end where its blocks end.
- Diagonals: the sum over a strip, once per strip and diagonal.

Nothing is added atomically: results do not depend on the order of programs. A pointer that is None costs nothing.

The product of the next tile is asked for before the vectors of this one are done. The two do not depend on each other,
so the compiler can put the vectors between the start of the product and the wait for it.
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


@triton.jit
def moments_with(x, count, mean, spread, first, stop, columns, MASKED: tl.constexpr):
    """Join number, mean and squared deviations of the logits of a tile with those of the tiles before it."""
    if MASKED:
        pairs = allowed(first, stop, columns)
        own = tl.sum(pairs.to(tl.float32), 1)
        own_mean = tl.sum(tl.where(pairs, x, 0.0), 1) / tl.maximum(own, 1.0)
        gap = tl.where(pairs, x - own_mean[:, None], 0.0)
    else:
        own = tl.zeros_like(mean) + x.shape[1]
        own_mean = tl.sum(x, 1) / x.shape[1]
        gap = x - own_mean[:, None]
    total = count + own
    share = own / tl.maximum(total, 1.0)
    step = own_mean - mean
    spread += tl.sum(gap * gap, 1) + step * step * count * share
    return total, mean + step * share, spread


@triton.jit
def diagonals_with(p, carry, OFFSETS, at, columns, m, n, rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store the finished half of a tile's diagonals, and return the half that the next tile adds to; ROWS is COLS.

    Diagonal u of a tile holds the cells with ``column - row = u - COLS``, counted within the tile.
    """
    wide = tl.arange(0, 2 * COLS)
    source = wide[None, :] - COLS + tl.arange(0, ROWS)[:, None]
    there = (source >= 0) & (source < COLS)
    padded = tl.gather(p, tl.where(there, source, 0), 1)
    sums = tl.sum(tl.where(there, padded, 0.0), 0)
    halves = tl.reshape(sums, (2, COLS))
    low = tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, halves, 0.0), 0) + carry
    high = tl.sum(tl.where(tl.arange(0, 2)[:, None] == 1, halves, 0.0), 0)
    # The first of these diagonals runs through the strip's first row COLS keys before the tile.
    place = columns - COLS - tl.min(rows, 0) + (m - 1)
    tl.store(OFFSETS + at + place, low, mask=(place >= 0) & (place < m + n - 1))
    return high


@triton.jit
def walk(
    q, s, K, WEIGHTS, q_row, k_row, lse, low_lse, rows, first, stop, a, b, low, start, whole, before, m, n, scale2,
    rate, KEYS, DISTANCES, key_at, distance_at, ENTROPY, SQUARES, MASS, LARGEST, MEAN, FLOOR, SUMS, MAXIMA,
    OFFSETS, offsets_at, entropy, squares, mass, largest, count, mean, spread, best, carry,
    KIND: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CLASSES: tl.constexpr, CAP: tl.constexpr, PTX: tl.constexpr, LOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the tiles from a up to b to what was found so far; s holds the products of tile a.

    `low`, `start`, `whole` and `before` come from `reach_of`; `best` has the largest logit of each class of keys,
    `carry`
    the diagonals that the next tile adds to.

    With ``x = logit - lse`` in base 2 and the weight ``p = exp2(x)``, entropy is ``-Σ p x``.
    """
    for t in range(a, b):
        j = place_of(t, low, start, whole, before, COLS)
        beyond = place_of(t + 1, low, start, whole, before, COLS)
        s, later = products(
            q, s, K, WEIGHTS, q_row, k_row, rows, j, beyond, n, KIND, KIND == DOT, D, SIZE, ROWS, COLS, PTX
        )  # fmt: skip
        columns = j + tl.arange(0, COLS)
        if CAP or KEYS is not None or DISTANCES is not None or KIND >= BOXCAR:
            x = logits_of(s, scale2, rate, KEYS, DISTANCES, key_at, distance_at, rows, columns, m, n, CAP)
            x = tl.maximum(x - lse[:, None], NOTHING)  # a key may add -inf, and a pair be it
        else:
            x = tl.fma(s, scale2, -lse[:, None])
        if LOW:
            x -= low_lse[:, None]
        if MASKED:
            x = tl.where(allowed(first, stop, columns), x, NOTHING)
        p = tl.exp2(x)
        if ENTROPY is not None:
            entropy -= tl.sum(p * x, 1)
        if SQUARES is not None:
            squares += tl.sum(p * p, 1)
        if MASS is not None:
            mass += tl.sum(p, 1)
        if LARGEST is not None and FLOOR is None:
            largest = tl.maximum(largest, tl.max(x, 1))
        if FLOOR is not None:
            best = tl.maximum(best, tl.max(tl.reshape(x, (ROWS, CLASSES, COLS // CLASSES)), 2))
        if MEAN is not None:
            count, mean, spread = moments_with(x, count, mean, spread, first, stop, columns, MASKED)
        if SUMS is not None:
            tl.store(SUMS + columns, tl.sum(p, 0), mask=columns < n)
        if MAXIMA is not None:
            tl.store(MAXIMA + columns, tl.exp2(tl.max(x, 0)), mask=columns < n)
        if OFFSETS is not None:
            carry = diagonals_with(p, carry, OFFSETS, offsets_at, columns, m, n, rows, ROWS, COLS)
        s = later
    return s, entropy, squares, mass, largest, count, mean, spread, best, carry


@triton.jit(do_not_specialize=["strips", "heads", "group", "splits", "pairs", "first_pair"])
def weights(
    Q, K, WEIGHTS, LSE, LOWS, FIRST, STOP, STRIPS, KEYS, DISTANCES,
    ENTROPY, SQUARES, MASS, LARGEST, COUNT, MEAN, SPREAD, FLOOR, SUMS, MAXIMA, OFFSETS,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    run_batch, run_head, key_batch, key_head, distance_batch, distance_head,
    m, n, strips, heads, group, splits, pairs, first_pair, scale2, rate,
    KIND: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CLASSES: tl.constexpr, TOP: tl.constexpr, CAP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (strips * some of the batches and heads, splits): those from `first_pair` on.

    LSE and LOWS, (batch * heads, m), are the base-2 log-sum-exp as two numbers. Numbers of rows are
    (splits, batch * heads, m). SUMS and MAXIMA, (some, strips, n), and OFFSETS, (some, strips, m + n - 1), are of
    zeros. With OFFSETS there is one split, ROWS is COLS, and tiles are read from left to right.

    A program has ROWS queries (a strip) of one head, and one of `splits` shares of its keys, COLS at a time. `group`
    query heads share a key head; tokens have SIZE numbers, filled up with zeros to D; `logits_of` makes logits of dot
    products by `scale2`, `rate` and CAP. FLOOR is the TOP-th largest of the maxima of CLASSES classes of keys: TOP
    different keys reach it.
    """
    strip, own, rows, inside = strip_of(STRIPS, m, strips, ROWS)
    pair = own + first_pair
    batch, head = pair // heads, pair % heads
    first, stop = runs_of(FIRST, STOP, run_batch, run_head, batch, head, rows, inside, n)
    lse = tl.load(LSE + pair * m + rows, mask=inside, other=0.0)
    sees = (first < stop) & (lse > -float("inf"))
    low_lse = tl.load(LOWS + pair * m + rows, mask=inside, other=0.0) if LOWS is not None else lse
    lse = tl.where(sees, lse, -NOTHING)  # then each weight of such a row is 0, in tiles without a mask as well
    q = queries_of(Q, q_batch, q_head, q_row, batch, head, rows, inside, KIND, D, SIZE)
    K += batch * k_batch + head // group * k_head
    if SUMS is not None:
        SUMS += (own * strips + strip) * n
    if MAXIMA is not None:
        MAXIMA += (own * strips + strip) * n
    key_at, distance_at = batch * key_batch + head * key_head, batch * distance_batch + head * distance_head
    offsets_at = (own * strips + strip) * (m + n - 1)

    entropy = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), NOTHING, tl.float32)
    count = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    spread = tl.zeros((ROWS,), tl.float32)
    best = tl.full((ROWS, CLASSES), NOTHING, tl.float32)
    carry = tl.zeros((COLS,), tl.float32)
    low, start, whole, before, tiles = reach_of(first, stop, n, COLS)
    if OFFSETS is not None:  # from left to right, all with a mask
        whole, before, start = 0, 0, low
    a, b = share_of(tiles, splits)
    # Beside making a product of pairs its mask costs nothing.
    edge = tl.minimum(tl.maximum(whole, a), b) if KIND == DOT else a
    at = place_of(a, low, start, whole, before, COLS)
    s = first_product(q, K, k_row, at, n, KIND == DOT, D, SIZE, ROWS, COLS)
    if OFFSETS is None and KIND == DOT:
        s, entropy, squares, mass, largest, count, mean, spread, best, carry = walk(
            q, s, K, WEIGHTS, q_row, k_row, lse, low_lse, rows, first, stop, a, edge, low, start, whole, before, m, n,
            scale2, rate, KEYS, DISTANCES, key_at, distance_at,
            ENTROPY, SQUARES, MASS, LARGEST, MEAN, FLOOR, SUMS, MAXIMA, OFFSETS, offsets_at,
            entropy, squares, mass, largest, count, mean, spread, best, carry,
            KIND, D, SIZE, ROWS, COLS, CLASSES, CAP, PTX, LOWS is not None, False,
        )  # fmt: skip
    s, entropy, squares, mass, largest, count, mean, spread, best, carry = walk(
        q, s, K, WEIGHTS, q_row, k_row, lse, low_lse, rows, first, stop, edge, b, low, start, whole, before, m, n,
        scale2, rate, KEYS, DISTANCES, key_at, distance_at,
        ENTROPY, SQUARES, MASS, LARGEST, MEAN, FLOOR, SUMS, MAXIMA, OFFSETS, offsets_at,
        entropy, squares, mass, largest, count, mean, spread, best, carry,
        KIND, D, SIZE, ROWS, COLS, CLASSES, CAP, PTX, LOWS is not None, True,
    )  # fmt: skip

    at = (tl.program_id(1).to(tl.int64) * pairs + pair) * m + rows
    shift = tl.where(sees, lse, 0.0)
    if ENTROPY is not None:
        tl.store(ENTROPY + at, entropy * LN2, mask=inside)
    if SQUARES is not None:
        tl.store(SQUARES + at, squares, mask=inside)
    if MASS is not None:
        tl.store(MASS + at, mass, mask=inside)
    if MEAN is not None:
        tl.store(COUNT + at, tl.where(sees, count, 0.0), mask=inside)
        tl.store(MEAN + at, tl.where(sees, mean + shift, 0.0) * LN2, mask=inside)
        tl.store(SPREAD + at, tl.where(sees, spread, 0.0) * (LN2 * LN2), mask=inside)
    if FLOOR is not None:
        largest = tl.max(best, 1)
        floor = largest
        for _ in tl.static_range(TOP - 1):
            best = tl.where(best == floor[:, None], NOTHING, best)
            floor = tl.max(best, 1)
        tl.store(FLOOR + at, tl.where(floor > NOTHING, floor + shift, NOTHING), mask=inside)
    if LARGEST is not None:
        some = sees & (largest > NOTHING)
        tl.store(LARGEST + at, tl.where(some, (largest + shift) * LN2, -float("inf")), mask=inside)
    if OFFSETS is not None:
        place = low + tiles * COLS + tl.arange(0, COLS) - COLS - tl.min(rows, 0) + (m - 1)
        tl.store(OFFSETS + offsets_at + place, carry, mask=(place >= 0) & (place < m + n - 1))
