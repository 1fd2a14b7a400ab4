"""Products of a transport matrix and of its transpose: chunk by chunk, with the state carried from one to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from attlas.engine.problem import spread_heads
from attlas.matrix.transport.factors import Factors, each, factors
from attlas.matrix.transport.tokens import GatedTokens


def product(tokens: GatedTokens, v: Tensor, *, transposed: bool = False) -> Tensor:
    """Return ``A @ v``, or ``A.mT @ v``, without the diagonal that is added to A.

    Parameters
    ----------
    tokens : GatedTokens
        Queries, keys and gates.
    v : Tensor, shape (batch or 1, heads of its own, n, e)
        One vector for each key, or for each query where the matrix is transposed.
    transposed : bool, default False
        Whether the transpose is multiplied.

    Returns
    -------
    Tensor, shape (batch, heads, n, e)
        In the dtype of cells.

    Notes
    -----
    Time ``O(n d (C + e))`` for chunks of C tokens. Memory: the result, and the factors of a few chunks where no graph
    is recorded, else those of all.
    """
    v = spread_heads(v, tokens.heads).expand(tokens.batch, -1, -1, -1)
    state = torch.zeros(tokens.batch, tokens.heads, tokens.size, v.shape[-1], dtype=tokens.dtype, device=tokens.device)
    found = []
    runs = list(tokens.slices())
    for chunks in reversed(runs) if transposed else runs:
        out, state = _of_chunks(factors(tokens, chunks), tokens.cut(v, chunks), state, transposed)
        found.append(out.flatten(2, 3))
    return torch.cat(found[::-1] if transposed else found, 2)[:, :, : tokens.n]


def _of_chunks(f: Factors, v: Tensor, state: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the product of a run of chunks, shape (batch, heads, chunks, C, e), and the state after it."""
    inner, reads, writes, turn = f.inner, f.reads, f.writes, f.turn
    if transposed:
        inner, reads, writes, turn = inner.mT, writes, reads, None if turn is None else turn[::-1]
    count = v.shape[2]
    totals = each(None if f.total is None else f.total.mT, count)
    into, out_of = (None, None) if turn is None else (turn[0].mT, turn[1])
    steps = list(zip(totals, each(into, count), each(out_of, count), (writes.mT @ v).unbind(2), strict=True))
    states = []
    for total, a, b, new in reversed(steps) if transposed else steps:
        states.append(state)
        kept = state if total is None else state * total
        state = (
            kept + new
            if a is None or b is None
            else torch.baddbmm((kept + new).flatten(0, 1), a.flatten(0, 1), (b @ state).flatten(0, 1)).view_as(state)
        )
    before = torch.stack(states[::-1] if transposed else states, 2)
    return inner @ v + reads @ before, state
