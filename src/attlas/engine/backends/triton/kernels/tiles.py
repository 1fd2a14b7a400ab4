"""What all kernels share: which tiles of keys a strip of queries reads, the logits of a tile, and their mask.

A program owns a strip of up to ROWS queries of one head, and reads its keys COLS at a time. Everything is in base 2: a
logit is ``q . k * scale2`` with ``scale2 = scale * log2(e)``, and a weight is ``exp2(logit - lse2)``.

A product of two tokens is their dot product, or with a KIND another score of the two, which `pairs` makes from vectors.

Each query sees one run of keys, from `first` up to `stop`. Tiles that no query of the strip sees are not read. The
tiles that every query sees whole come first, without a mask; those at the ends of the runs come last, with one.
"""

import triton
import triton.language as tl

#: Logarithm of a weight that is 0; finite, so that 0 times it is 0 and not NaN, and so is its square.
NOTHING = tl.constexpr(-1e18)
LN2 = tl.constexpr(0.6931471805599453)

#: What a product is made of; `attlas.engine.backends.triton.pairs` has the same numbers.
DOT, ADDITIVE, GAUSSIAN, LAPLACE, BOXCAR, EPANECHNIKOV, TRIANGULAR = (tl.constexpr(kind) for kind in range(7))
#: Up to here the fourth power of ``1 + exp(2 x)`` and its reciprocal are normal numbers.
FAR = tl.constexpr(10.5)


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
def queries_of(Q, q_batch, q_head, q_row, batch, head, rows, inside, KIND: tl.constexpr, D: tl.constexpr,
               SIZE: tl.constexpr):  # fmt: skip
    """Return the queries of a strip, filled up with zeros to D numbers; of pairs where those of the head begin."""
    q = Q + batch * q_batch + head * q_head
    if KIND == DOT:
        at = tl.arange(0, D)
        there = inside[:, None] if D == SIZE else inside[:, None] & (at < SIZE)[None, :]
        q = tl.load(q + rows.to(tl.int64)[:, None] * q_row + at[None, :], mask=there, other=0.0)
    return q


@triton.jit
def product(q, K, k_row, j, n, D: tl.constexpr, SIZE: tl.constexpr, COLS: tl.constexpr):
    """Return q . k of the COLS keys from j on; of keys from n on 0."""
    at = tl.arange(0, D)
    columns = tl.arange(0, COLS)
    there = (columns < n - j)[None, :] if D == SIZE else (columns < n - j)[None, :] & (at < SIZE)[:, None]
    k = tl.load(K + j.to(tl.int64) * k_row + columns[None, :] * k_row + at[:, None], mask=there, other=0.0)
    return tl.dot(q, k, input_precision="ieee")  # of float32; without it a GPU takes 10 bits of them


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    """Return ``1 / x`` of numbers from 1 to 2^126; in PTX by one instruction, where a division takes six."""
    if PTX:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def pairs(
    q, K, WEIGHTS, q_row, k_row, rows, columns,
    KIND: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the score of each pair of some rows and columns; one that KIND forbids is -inf.

    Of a token, number u stands at ``u q_row`` from its place. It is a coordinate, whose scale is WEIGHTS[u]. With
    ADDITIVE it is ``2 log2(e)`` times a hidden unit x; SIZE numbers later stands ``exp(2 x)``, and after these the
    largest ``|x|`` of the token; WEIGHTS are those of the units times -2, and at last their sum. A unit is then
    ``tanh(x + y) = 1 - 2 / (1 + exp(2 x) exp(2 y))``, and four of them share one reciprocal. There are numbers for more
    tokens than a tile can reach, and SIZE is a multiple of 4.
    """
    if KIND == ADDITIVE:
        far = tl.max(tl.load(q + 2 * SIZE * q_row + rows), 0) + tl.max(tl.load(K + 2 * SIZE * k_row + columns), 0)
        s = tl.zeros((ROWS, COLS), tl.float32) + tl.load(WEIGHTS + SIZE)
        if far <= FAR:  # not of NaN
            for u in range(0, SIZE, 4):
                e = q + (SIZE + u) * q_row
                f = K + (SIZE + u) * k_row
                x0 = tl.fma(tl.load(e + rows)[:, None], tl.load(f + columns)[None, :], 1.0)
                x1 = tl.fma(tl.load(e + q_row + rows)[:, None], tl.load(f + k_row + columns)[None, :], 1.0)
                x2 = tl.fma(tl.load(e + 2 * q_row + rows)[:, None], tl.load(f + 2 * k_row + columns)[None, :], 1.0)
                x3 = tl.fma(tl.load(e + 3 * q_row + rows)[:, None], tl.load(f + 3 * k_row + columns)[None, :], 1.0)
                w = WEIGHTS + u
                low = tl.load(w) * x1 + tl.load(w + 1) * x0
                high = tl.load(w + 2) * x3 + tl.load(w + 3) * x2
                x0 *= x1
                x2 *= x3
                s += (low * x2 + high * x0) * reciprocal(x0 * x2, PTX)
        else:
            for u in range(SIZE):
                x = tl.load(q + u * q_row + rows)[:, None] + tl.load(K + u * k_row + columns)[None, :]
                x = tl.where(x > 120.0, 120.0, x)  # NaN stays NaN
                s += tl.load(WEIGHTS + u) * reciprocal(1.0 + tl.exp2(x), PTX)
    else:
        s = tl.zeros((ROWS, COLS), tl.float32)
        for u in range(SIZE):
            gap = tl.load(q + u * q_row + rows)[:, None] - tl.load(K + u * k_row + columns)[None, :]
            gap *= tl.load(WEIGHTS + u)
            s += tl.abs(gap) if KIND == LAPLACE else gap * gap
        if KIND == LAPLACE:
            s = -s
        elif KIND == GAUSSIAN:
            s *= -0.5
        else:
            outside = s >= 1.0  # False for NaN
            if KIND == BOXCAR:
                s *= 0.0
            elif KIND == EPANECHNIKOV:
                s = tl.log(1.0 - tl.where(outside, 0.0, s))
            else:
                s = tl.log(1.0 - tl.sqrt(tl.where(outside, 0.0, s)))
            s = tl.where(outside, -float("inf"), s)
    return s


@triton.jit
def first_product(q, K, k_row, j, n, AHEAD: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
                  COLS: tl.constexpr):  # fmt: skip
    """Return the product of the first tile, before the loop over tiles, if products are asked for AHEAD."""
    if AHEAD:
        s = product(q, K, k_row, j, n, D, SIZE, COLS)
    else:
        s = tl.zeros((ROWS, COLS), tl.float32)
    return s


@triton.jit
def products(
    q, s, K, WEIGHTS, q_row, k_row, rows, j, later, n, KIND: tl.constexpr, AHEAD: tl.constexpr, D: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the products of the tile at j and, if they are asked for AHEAD, of the one at `later`.

    Those of the first are then s. Nothing waits for pairs, so that theirs are not asked for ahead.
    """
    if AHEAD:
        beyond = product(q, K, k_row, later, n, D, SIZE, COLS)
    elif KIND == DOT:
        s = product(q, K, k_row, j, n, D, SIZE, COLS)
        beyond = s
    else:
        s = pairs(q, K, WEIGHTS, q_row, k_row, rows, j + tl.arange(0, COLS), KIND, SIZE, ROWS, COLS, PTX)
        beyond = s
    return s, beyond


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
