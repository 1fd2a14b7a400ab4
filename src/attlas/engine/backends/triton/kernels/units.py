"""Gradients of hidden units and coordinates: of each token, sums over all pairs that it is in.

A warp has some units, and for each a few tokens: the gradients of these stay in its registers, and a sum over the other
tokens needs no other warp. The slopes of the pairs, of which all units take the same, are read from memory. Queries and
keys take turns: once each token is a query, and once a key. Nothing is added atomically.
"""

import triton
import triton.language as tl

from attlas.engine.backends.triton.kernels.tiles import ADDITIVE, FAR, LAPLACE, reciprocal


@triton.jit(do_not_specialize=["strips", "heads", "own_group", "other_group", "own", "other"])
def units(
    OWN, OTHER, WEIGHTS, OWN_FAR, OTHER_FAR, SLOPES, GRADIENT, SHARES,
    own_batch, own_head, other_batch, other_head, far_batch, far_head, beyond_batch, beyond_head,
    slope_pair, slope_own, slope_other, own, other, strips, heads, own_group, other_group,
    KIND: tl.constexpr, SIZE: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Grid (strips * batches * heads, blocks of UNITS).

    OWN and OTHER, (batch, heads, tokens, numbers), hold what `pairs` of `tiles` reads, with the numbers of a token side
    by side: SIZE of them, and with ADDITIVE as many exponentials. OWN_FAR and OTHER_FAR, (batch, heads, tokens), are
    then the largest units. SLOPES are those of the loss in each score, or in each distance. GRADIENT, (batch * heads,
    own, SIZE), sums a slope times ``1 / (1 + e) - 1 / (1 + e)^2``, where e is ``exp(2 (x + y))``; of distances it sums
    a slope times the scaled gap, or with LAPLACE its sign. SHARES, of the same shape or None, sums a slope times
    ``1 / (1 + e)``; of distances times the square of the gap, or with LAPLACE its size.
    """
    place = tl.program_id(0)
    pair = (place // strips).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = (place % strips) * ROWS + tl.arange(0, ROWS)
    inside = rows < own
    u = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    known = (u < SIZE)[None, :]
    width: tl.constexpr = 2 * SIZE if KIND == ADDITIVE else SIZE
    OWN += batch * own_batch + head // own_group * own_head
    OTHER += batch * other_batch + head // other_group * other_head
    SLOPES += pair * slope_pair
    of_rows = OWN + rows.to(tl.int64)[:, None] * width + u[None, :]
    there = inside[:, None] & known
    e = tl.load(of_rows + (SIZE if KIND == ADDITIVE else 0), mask=there, other=0.0)
    if KIND == ADDITIVE:
        far = tl.max(
            tl.load(OWN_FAR + batch * far_batch + head // own_group * far_head + rows, mask=inside, other=0.0), 0
        )
        OTHER_FAR += batch * beyond_batch + head // other_group * beyond_head
    else:
        scale = tl.load(WEIGHTS + u, mask=u < SIZE, other=0.0)[None, None, :]
    gradient = tl.zeros((ROWS, UNITS), tl.float32)
    shares = tl.zeros((ROWS, UNITS), tl.float32)
    for j in range(0, other, COLS):
        columns = j + tl.arange(0, COLS)
        seen = columns < other
        of_columns = OTHER + columns.to(tl.int64)[:, None] * width + u[None, :]
        at = columns.to(tl.int64)[:, None] * slope_other + rows.to(tl.int64)[None, :] * slope_own
        slopes = tl.load(SLOPES + at, mask=seen[:, None] & inside[None, :], other=0.0)[:, :, None]
        mask = seen[:, None] & known
        if KIND == ADDITIVE:
            # Of one reciprocal the product itself has to be a normal number, and not its fourth power.
            if far + tl.max(tl.load(OTHER_FAR + columns, mask=seen, other=0.0), 0) <= 4.0 * FAR:
                f = tl.load(of_columns + SIZE, mask=mask, other=0.0)
                x = tl.fma(e[None, :, :], f[:, None, :], 1.0)
            else:
                f = tl.load(of_columns, mask=mask, other=0.0)
                x = tl.load(of_rows, mask=there, other=0.0)[None, :, :] + f[:, None, :]
                x = 1.0 + tl.exp2(tl.minimum(x, 120.0))
            r = reciprocal(x, PTX)
            gradient += tl.sum(slopes * (r - r * r), 0)
            if SHARES is not None:
                shares += tl.sum(slopes * r, 0)
        else:
            f = tl.load(of_columns, mask=mask, other=0.0)
            gap = (e[None, :, :] - f[:, None, :]) * scale
            size = tl.abs(gap) if KIND == LAPLACE else gap * gap
            if KIND == LAPLACE:
                gap = tl.where(gap > 0.0, 1.0, tl.where(gap < 0.0, -1.0, 0.0))
            gradient += tl.sum(slopes * gap, 0)
            if SHARES is not None:
                shares += tl.sum(slopes * size, 0)
    to = (pair * own + rows)[:, None] * SIZE + u[None, :]
    tl.store(GRADIENT + to, gradient, mask=there)
    if SHARES is not None:
        tl.store(SHARES + to, shares, mask=there)
