"""The factors of chunks of tokens, from which every cell, row, tile and product follows.

The cells inside of a chunk are `inner`. Those between two chunks are ``U_I T_{I-1} ... T_{J+1} W_Jᵀ``: the rows of U
are carried back to the chunk's start, those of W forward to its end, and T is what the tokens of a chunk do to the
state. Logarithms of decays are summed away from one place inside of a block, and never subtracted from each other: no
exponent is positive, no digits cancel, and a decay of minus infinity is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attlas.matrix.transport.tokens import GatedTokens


class Factors(NamedTuple):
    """Factors of some chunks; the axes in front are (batch, heads, chunks).

    Parameters
    ----------
    inner : Tensor, shape (..., C, C)
        Cells inside of each chunk; empty where no row of theirs was asked for.
    reads : Tensor, shape (..., C, d)
        The rows of a chunk carried back to its start; empty where no row of theirs was asked for.
    writes : Tensor, shape (..., C, d)
        The columns of a chunk carried forward to its end.
    total : Tensor, shape (..., 1, d or 1), optional
        Decay over the chunk; its other axes may be 1. None where nothing decays.
    turn : tuple of Tensor, shape (..., C, d), optional
        The rest of the chunk's transition, ``T = diag(total) + aᵀ b``; None where there is none.
    """

    inner: Tensor
    reads: Tensor
    writes: Tensor
    total: Tensor | None
    turn: tuple[Tensor, Tensor] | None

    def transitions(self) -> Tensor:
        """Return T of each chunk, shape (..., d, d)."""
        d = self.writes.shape[-1]
        kept = self.writes.new_ones(1, d) if self.total is None else self.total
        kept = torch.diag_embed(kept.expand(*kept.shape[:-1], d).squeeze(-2))
        return kept if self.turn is None else kept + self.turn[0].mT @ self.turn[1]


def since_start(g: Tensor) -> Tensor:
    """Return the log decay from before a block to after each of its tokens, shape (..., tokens, size)."""
    return g.cumsum(-2)


def until_end(g: Tensor) -> Tensor:
    """Return the log decay from after each token to the end of its block, shape (..., tokens, size)."""
    return functional.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def decayed(x: Tensor, y: Tensor, g: Tensor | None) -> Tensor:
    """Return ``Σ_c x_tc y_sc exp(g_{s+1,c} + ... + g_tc)`` for s ≤ t, else 0.

    Parameters
    ----------
    x, y : Tensor, shape (..., C, d)
        C is a power of 2.
    g : Tensor, shape (..., C, d or 1), optional
        Log decays.

    Returns
    -------
    Tensor, shape (..., C, C)
    """
    size = x.shape[-2]
    if g is None:
        return (x @ y.mT).tril()
    if g.shape[-1] == 1:  # a factor for each cell
        spans = g.expand(*g.shape[:-1], size).tril(-1).cumsum(-2)
        return (x @ y.mT) * spans.exp().tril()
    # Halves: the cells of the later one with the earlier one have a place between them, from which both decays count.
    cells = (x * y).sum(-1)[..., None, None]  # blocks of one token
    while cells.shape[-1] < size:
        half = cells.shape[-1]
        later, earlier, logs = (t.unflatten(-2, (-1, 2, half)) for t in (x, y, g))
        later = later[..., 1, :, :] * since_start(logs[..., 1, :, :]).exp()
        earlier = earlier[..., 0, :, :] * until_end(logs[..., 0, :, :]).exp()
        first, second = cells[..., 0::2, :, :], cells[..., 1::2, :, :]
        upper = functional.pad(first, (0, half))
        cells = torch.cat([upper, torch.cat([later @ earlier.mT, second], -1)], -2)
    return cells.squeeze(-3)


def factors(tokens: GatedTokens, chunks: range, *, reads: bool = True) -> Factors:
    """Return the factors of a run of chunks.

    `inner` are the cells inside of a chunk, `reads` its queries carried back to its start, `writes` its keys carried to
    its end, and ``T = diag(total) + intoᵀ out_of`` what its tokens do to the state. Token t does ``M_t = (I + p_t r_tᵀ)
    diag(exp(g_t))``: it adds ``r_tᵀ`` times the decayed state along p_t.

    Parameters
    ----------
    tokens : GatedTokens
        Queries, keys and gates.
    chunks : range
        Which chunks.
    reads : bool, default True
        Whether the factors of queries are wanted, `inner` and `reads`.
    """
    k = tokens.cut_whole(tokens.k, chunks)
    q = tokens.cut_whole(tokens.q, chunks) if reads else None
    if q is not None and tokens.scale != 1.0:
        q = q * tokens.scale
    g, write, erase = (None if t is None else tokens.cut(t, chunks) for t in (tokens.decay, tokens.write, tokens.erase))
    # Decays from the chunk's start to after each token, and from after each token to the chunk's end.
    left, right = (None, None) if g is None else (since_start(g).exp(), until_end(g).exp())
    total = None if left is None else left[..., -1:, :]
    writes = _times_factor(k, _product_of_factors(write, right))
    empty = k.new_empty(0)
    if not tokens.turns:
        inner, back = (empty, empty) if q is None else (decayed(q, _times_factor(k, write), g), _times_factor(q, left))
        return Factors(inner, back, writes, total, None)
    if erase is not None:
        p, r, turned_by = k, k, -erase
    else:
        p, r = (tokens.cut(t, chunks).expand_as(k) for t in (tokens.p, tokens.r) if t is not None)
        turned_by = None
    rows = (r.unsqueeze(-3) if q is None else torch.stack([r, q], -3)).unsqueeze(-3)
    columns = (k.unsqueeze(-3) if erase is not None else torch.stack([k, p], -3)).unsqueeze(-4)
    cells = decayed(rows, columns, None if g is None else g[..., None, None, :, :])
    # Row t, r_t or q_t, with column s, k_s or p_s, decayed from s to t.
    of_writes, of_turns = cells[..., 0, :, :], cells[..., -1, :, :]  # (..., r and q, C, C)
    if write is not None:
        of_writes = of_writes * write.mT.unsqueeze(-3)
    if turned_by is not None:
        of_turns = of_turns * turned_by.mT.unsqueeze(-3)
    # What each token turns depends on what the tokens before it turned: a triangular system, solved once.
    one = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    system = of_turns[..., 0, :, :].neg()  # its diagonal counts as 1, and what lies above it is not read
    solved = torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True)
    turn_write = of_writes[..., 0, :, :].tril(-1)
    into, out_of = solved.mT @ _times_factor(p, _product_of_factors(turned_by, right)), _times_factor(r, left)
    writes = writes + turn_write.mT @ into
    if q is None:
        return Factors(empty, empty, writes, total, (into, out_of))
    from_turns = of_turns[..., 1, :, :] @ solved
    inner = of_writes[..., 1, :, :] + from_turns @ turn_write
    return Factors(inner, _times_factor(q, left) + from_turns @ out_of, writes, total, (into, out_of))


def writes_of_run(tokens: GatedTokens, chunks: range) -> tuple[Tensor, Tensor | None]:
    """Return the columns of a run of chunks carried to its end, and the decay over it, of tokens that do not turn.

    Returns
    -------
    writes : Tensor, shape (batch, heads, tokens, d)
        The columns.
    total : Tensor, shape (batch or 1, heads or 1, 1, d or 1), or None
        The decay; None where nothing decays.
    """

    def flat(t: Tensor) -> Tensor:
        return tokens.cut(t, chunks).expand(-1, -1, len(chunks), -1, -1).flatten(2, 3)

    k = flat(tokens.k).expand(tokens.batch, tokens.heads, -1, -1)
    write = None if tokens.write is None else flat(tokens.write)
    if tokens.decay is None:
        return _times_factor(k, write), None
    g = flat(tokens.decay)
    return _times_factor(k, _product_of_factors(write, until_end(g).exp())), g.sum(-2, keepdim=True).exp()


def _times_factor(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return ``x * factor``; x where there is no factor."""
    return x if factor is None else x * factor


def _product_of_factors(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the product of two factors, either of which may be None."""
    return b if a is None else _times_factor(a, b)


def each(t: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    """Return a factor of each chunk, of shape (batch, heads, chunks or 1, ...)."""
    return (None,) * count if t is None else t.expand(-1, -1, count, -1, -1).unbind(2)


def each_flat(t: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    """Return a factor of each chunk with one axis for batches and heads, of a tensor that has all of them."""
    return (None,) * count if t is None else t.flatten(0, 1).unbind(1)
