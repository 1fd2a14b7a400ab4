"""Products of a transport matrix and of its transpose: chunk by chunk, with the state carried from one to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.problem import full_precision, spread_heads
from attlas.foundation.compat import tracing
from attlas.foundation.tiles import cut
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
    Time ``O(n d (C + e))`` for chunks of C tokens. Memory: the result and the factors of a few chunks, also in the
    backward, which computes them again. The gradient of a gradient keeps those of all chunks.
    """
    v = spread_heads(v, tokens.heads).expand(tokens.batch, -1, -1, -1)
    recorded = torch.is_grad_enabled() and (v.requires_grad or any(t.requires_grad for t in tokens.tensors.values()))
    if recorded and not tracing():
        out: Tensor = _GatedProduct.apply(tokens, transposed, v, *tokens.tensors.values())  # type: ignore[no-untyped-call]
        return out
    return _product_from_state(tokens, v, _no_state(tokens, v), transposed)[0]


class _GatedProduct(torch.autograd.Function):
    """A product with a graph; its backward computes the factors again, some chunks at a time."""

    @staticmethod
    def forward(ctx: Any, tokens: GatedTokens, transposed: bool, v: Tensor, *tensors: Tensor) -> Tensor:
        """Compute the product in runs of chunks; keep the state before each run for the backward."""
        ctx.save_for_backward(v, *tensors)
        ctx.tokens, ctx.transposed = tokens.mapped(Tensor.detach), transposed
        state, found, ctx.states = _no_state(tokens, v), [], []
        for span in _runs_of_chunks(tokens, transposed):
            ctx.states.append(state)
            own = v[:, :, span.start : span.stop]
            out, state = _product_from_state(tokens.narrow(span.start, span.stop), own, state, transposed)
            found.append(out)
        return torch.cat(found[::-1] if transposed else found, 2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients: the factors of each run of chunks are computed again from the state before it."""
        v, *tensors = ctx.saved_tensors
        own: dict[str, Any] = dict(zip(ctx.tokens.tensors, tensors, strict=True))
        tokens = replace(ctx.tokens, **own)
        if torch.is_grad_enabled():
            return None, None, *_recorded_gradients(tokens, v, slope, ctx.transposed)
        return None, None, *_product_gradients(tokens, v, slope, ctx.transposed, ctx.states)


@full_precision
def _recorded_gradients(tokens: GatedTokens, v: Tensor, slope: Tensor, transposed: bool) -> list[Tensor | None]:
    """Return the gradients in the vectors and in each tensor of the tokens, with a graph of their own."""
    leaves = [v, *tokens.tensors.values()]
    out = _product_from_state(tokens, v, _no_state(tokens, v), transposed)[0]
    wanted = [t for t in leaves if t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, slope, create_graph=True, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in leaves]


@full_precision
def _product_gradients(
    tokens: GatedTokens, v: Tensor, slope: Tensor, transposed: bool, states: list[Tensor]
) -> list[Tensor | None]:
    """Return the gradients in the vectors and in each tensor of the tokens, from the last chunks to the first."""
    given = {"v": v, **tokens.tensors}
    parts: dict[str, list[Tensor]] = {name: [] for name, t in given.items() if t.requires_grad}
    of_state = torch.zeros_like(states[0])
    spans = list(_runs_of_chunks(tokens, transposed))
    for span, state in zip(reversed(spans), reversed(states), strict=True):
        some = tokens.narrow(span.start, span.stop)
        own = {"v": v[:, :, span.start : span.stop], **some.tensors}
        own = {name: t.detach().requires_grad_(name in parts) for name, t in own.items()}
        start = state.detach().requires_grad_()
        with torch.enable_grad():
            gates: dict[str, Any] = {name: t for name, t in own.items() if name != "v"}
            out, end = _product_from_state(replace(some, **gates), own["v"], start, transposed)
        wanted = [own[name] for name in parts]
        slopes = slope[:, :, span.start : span.stop], of_state
        *found, of_state = torch.autograd.grad((out, end), [*wanted, start], slopes, materialize_grads=True)
        for name, grad in zip(parts, found, strict=True):
            parts[name].append(grad)
    totals: dict[str, Tensor] = {}
    for name, some_parts in parts.items():
        if name != "v" and tokens.is_constant(given[name]):
            totals[name] = torch.stack(some_parts).sum(0)
        else:
            totals[name] = torch.cat(some_parts if transposed else some_parts[::-1], 2)
    return [totals.get(name) for name in given]


def _runs_of_chunks(tokens: GatedTokens, transposed: bool) -> list[range]:
    """Return runs of tokens whose factors are computed at once, in the order in which the state passes them."""
    spans = list(cut(tokens.n, tokens.chunks_at_once * tokens.chunk))
    return spans[::-1] if transposed else spans


def _no_state(tokens: GatedTokens, v: Tensor) -> Tensor:
    """Return the state before anything was written."""
    return torch.zeros(tokens.batch, tokens.heads, tokens.size, v.shape[-1], dtype=tokens.dtype, device=tokens.device)


def _product_from_state(tokens: GatedTokens, v: Tensor, state: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return a product that begins with a state, and the state after all tokens.

    Each chunk gets the state that the one before it has left; transposed, they come from the last to the first.
    """
    found = []
    runs = list(tokens.slices())
    for chunks in reversed(runs) if transposed else runs:
        out, state = _product_of_chunks(factors(tokens, chunks), tokens.cut(v, chunks), state, transposed)
        found.append(out.flatten(2, 3))
    return torch.cat(found[::-1] if transposed else found, 2)[:, :, : tokens.n], state


def _product_of_chunks(f: Factors, v: Tensor, state: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the product of a run of chunks, shape (batch, heads, chunks, C, e), and the state after it.

    Of chunk c, with ``T = diag(total) + turn[0]ᵀ turn[1]``, ``out_c = inner_c v_c + reads_c state_c`` and ``state_{c+1}
    = T_c state_c + writes_cᵀ v_c``.

    Transposed, `reads` and `writes` change places, and so do the two factors of `turn`.
    """
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
        kept = (state if total is None else state * total) + new
        if a is not None and b is not None:
            turned = (b @ state).flatten(0, 1)
            kept = torch.baddbmm(kept.flatten(0, 1), a.flatten(0, 1), turned).view_as(state)
        state = kept
    before = torch.stack(states[::-1] if transposed else states, 2)
    return inner @ v + reads @ before, state
