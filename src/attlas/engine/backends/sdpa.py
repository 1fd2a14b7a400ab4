"""torch's own fused kernels, for every score that is a dot product.

On a CPU the flash kernel also returns the log-sum-exp, so the matrix keeps it and nothing is computed
twice. A causal mask of any alignment is cut into rectangles and one square; other masks, and scores of
positions, go to the kernel one block of rows at a time, and of heads where those are many, so memory stays
linear. Off the CPU, `attlas.engine.fused` finds the kernel, and autograd records it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice, product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from attlas.engine import fused
from attlas.engine.backend import Backend, Gradients, Request
from attlas.engine.costs import Operation
from attlas.engine.gradient import CellGradient
from attlas.engine.online import exceeds, finite_shift, merge
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, match_heads, sum_heads
from attlas.engine.tiling import ColumnBlock, allowed_cells, column_blocks, cut_heads
from attlas.foundation.checks import all_finite
from attlas.foundation.tiles import Tile, cut
from attlas.masks.base import BlockState
from attlas.masks.local import Causal
from attlas.scores.base import Dot
from attlas.scores.dot import ScaledDot

_LARGEST_ROUNDED_LSE = 64.0  # the kernel's log-sum-exp is float32: weights are then wrong by 4e-6 of themselves


# Queries, keys and values of one size, and how many query heads share a key head.
_QKV: TypeAlias = tuple[Tensor, Tensor, Tensor, int]


class Piece(NamedTuple):
    """A rectangle of some heads that one call of the kernel computes.

    It has all heads, or heads of one sequence: whole groups of those that share a key head, or a part of one group.
    `causal` asks for the kernel's own causal mask; `added` is added to the logits, -inf where masked; `unseen` is True
    for a row that sees none of the rectangle's keys.

    It has all heads, or heads of one sequence: whole groups of those that share a key head, or a part of one group.
    """

    batches: range
    heads: range
    rows: range
    columns: range
    causal: bool
    added: Tensor | None
    unseen: Tensor | None

    @property
    def place(self) -> tuple[slice, slice, slice, slice]:
        """The slices of its batches, heads, rows and columns."""
        b, h, i, j = self[:4]
        return slice(b.start, b.stop), slice(h.start, h.stop), slice(i.start, i.stop), slice(j.start, j.stop)

    def groups(self, fold: int) -> slice:
        """Return the key heads that it reads, where each serves `fold` query heads."""
        return slice(self.heads.start // fold, (self.heads.stop - 1) // fold + 1)

    def folded(self, t: Tensor, fold: int) -> Tensor:
        """Return a tensor (batches, heads, ...) of the piece with its groups of heads folded into the batch."""
        return _fold_groups(t, min(fold, len(self.heads)))

    def tokens(self, aligned: _QKV, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of the piece; `heads` counts all heads of the matrix."""
        q, k, v, fold = aligned
        b, h, rows, columns = self.place
        if fold > 1:  # a group stands in the batch: group g of batch b is number b * groups + g
            groups, first = heads // fold, self.heads.start % fold
            start = self.batches.start * groups + self.heads.start // fold
            b = slice(start, (self.batches.stop - 1) * groups + (self.heads.stop - 1) // fold + 1)
            h = slice(first, first + min(fold, len(self.heads)))
        return q[b, h, rows], k[b, h, columns], v[b, h, columns]


class Sdpa(Backend):
    """torch's fused kernels: outputs of dot products, and their gradients."""

    name = row = "sdpa"
    computes = frozenset({"output", "backward"})
    takes_fused = True

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        # The reason why torch's scaled_dot_product_attention does not compute this request; None where it does.
        dot, problem = request.dot, request.problem
        if dot is None or dot.cap:
            return "the score is not a dot product, or not accurate as one here"
        if request.dropout is not None:
            return "dropout has to be the same when it is recomputed"
        if 0 in (*problem.shape, problem.q.shape[-1]):
            return "there is nothing to compute"
        if problem.sink is not None and dot.row is not None:
            return "the sink needs the constant of each row"
        if problem.device.type != "cpu":
            return fused.unsupported(problem, dot, operation)
        if operation == "backward" and (request.fused is None or request.parameters()):
            return "its gradients are those of the tokens of a dot product"
        return None

    def prepare(self, request: Request) -> Request:
        return request.as_fused()

    def recorded(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor | None] | None:
        # Off the CPU, autograd records the kernel of torch.
        if request.device.type == "cpu":
            return None
        dot, causal = request.product, request.problem.mask is not None
        call = fused.find_call(dot.q, dot.k.to(dot.q.dtype), v, causal)
        return None if call is None else fused.run(call, v.shape[-1], causal, dot.scale)

    def has_fast_path(self, problem: Problem) -> bool:
        return True

    def fast_path(self, problem: Problem, v: Tensor) -> tuple[Tensor, Tensor] | None:
        # A plain scaled dot product is one call of the kernel.
        q, k, score = problem.q, problem.k, problem.score
        if type(score) is not ScaledDot or problem.mask is not None or problem.sink is not None:
            return None
        if k.shape != v.shape or q.shape[1] != k.shape[1] or q.dtype is not v.dtype or 0 in (q.numel(), k.numel()):
            return None
        if q.device.type != "cpu" or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
            return None
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=score.factor(q.shape[3]))
        # 0 / 0 and infinity / infinity are NaN: one number tells of a row that the kernel could not sum.
        return (out, lse) if math.isfinite((lse / lse).sum().item()) else None

    def forward(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the output and log-sum-exp, by one call of torch's flash kernel a piece (`Piece`)."""
        # The kernel gives 0 for some rows that are NaN, and NaN for rows whose mask hides the key that is NaN.
        problem, dot = request.problem, request.product
        if problem.device.type != "cpu":  # `recorded` found no kernel for these values
            return None
        if v.dtype.itemsize > dot.q.dtype.itemsize:  # its output has the digits of the tokens
            return None
        aligned, e = _aligned_tokens(dot, v), v.shape[-1]
        fold = aligned[3]
        pieces = _pieces_of_mask(problem, dot, request.plan, fold)
        first = list(islice(pieces, 2))
        if len(first) == 1 and tuple(map(len, first[0][:3])) == problem.shape[:3]:
            out, lse = _piece_output(problem, dot, aligned, first[0], e)
        else:
            out, lse = _join_pieces(problem, dot, aligned, chain(first, pieces), e)
            out = out.to(v.dtype)
        # A row that the kernel could not sum has 0 here, or a number that is not finite; the mask's own are -inf.
        if bool(((lse == 0) | ~(lse < math.inf)).any()):
            return None
        # A value that is NaN reaches rows whose mask hides it.
        if problem.mask is not None and not all_finite(out):
            return None
        if problem.sink is not None:
            lse, share, _ = merge(lse, problem.sink.to(lse.dtype).view(1, -1, 1))
            out = (out * share.unsqueeze(-1)).to(v.dtype)
        return out, lse

    def backward(
        self, request: Request, lse: Tensor, gradient: CellGradient, out: Tensor | None = None
    ) -> Gradients | None:
        """Return the gradients by torch's flash backward for CPUs, piece by piece; None where it would be inexact."""
        if out is None or exceeds(lse, _LARGEST_ROUNDED_LSE) or not gradient.is_product:
            return None
        left, right, delta = gradient.product
        problem, dot = request.problem, request.product
        if problem.mask is not None and not all_finite(right):
            return None
        aligned = q, k, _, fold = _aligned_tokens(dot, right)
        width = q.shape[-1]
        batch, heads, m, n = problem.shape
        shape_q, shape_k = (batch, heads, m, width), (batch, k.shape[0] * k.shape[1] // (batch * fold), n, width)
        out, left = _zero_padded(out, width), _zero_padded(left, width)
        safe = finite_shift(lse).to(problem.dtype)
        d_q = torch.zeros(shape_q, dtype=problem.dtype, device=q.device)
        d_k, d_v = (torch.zeros(shape_k, dtype=problem.dtype, device=q.device) for _ in range(2))
        for piece in _pieces_of_mask(problem, dot, request.plan, fold):
            b, h, rows, columns = piece.place
            tokens = piece.tokens(aligned, heads)
            added = None if piece.added is None else _added_to_piece(piece.added, piece, fold)
            d_out, own, total = (piece.folded(t[b, h, rows], fold) for t in (left, out, safe))
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out, *tokens, own, total, 0.0, piece.causal, attn_mask=added, scale=dot.scale
            )
            d_q[b, h, rows] += grads[0].reshape(*map(len, piece[:3]), width)
            for into, part in ((d_k, grads[1]), (d_v, grads[2])):
                # The query heads of a group share a key head: its gradient is their sum.
                part = part.unflatten(0, (len(piece.batches), -1)).sum(dim=2) if fold > 1 else part
                into[b, piece.groups(fold), columns] += part
        d_k, d_v = sum_heads(d_k, dot.k.shape[1]), sum_heads(d_v, right.shape[1])
        d_q, d_k = d_q[..., : dot.q.shape[-1]], d_k[..., : dot.k.shape[-1]]
        return Gradients([d_q], [d_k], [], d_v[..., : right.shape[-1]], delta)


BACKENDS = (Sdpa(),)


def _aligned_tokens(dot: Dot, v: Tensor) -> _QKV:
    """Return q, k and v as the kernel wants them: one size, grouped heads folded into the batch."""
    width = max(dot.q.shape[-1], v.shape[-1])
    dtype = dot.q.dtype
    q, k, values = _zero_padded(dot.q, width), _zero_padded(dot.k.to(dtype), width), _zero_padded(v.to(dtype), width)
    k, values = match_heads(k, values, q.shape[1])
    fold = q.shape[1] // k.shape[1]
    if fold > 1:
        k, values = (t.flatten(0, 1).unsqueeze(1).expand(-1, fold, -1, -1) for t in (k, values))
    return _fold_groups(q, fold), k, values, fold


def _zero_padded(t: Tensor, width: int) -> Tensor:
    """Return vectors filled up with zeros to a size, their last axis without gaps."""
    t = t if t.shape[-1] == width else functional.pad(t, (0, width - t.shape[-1]))
    return t if t.stride(-1) == 1 else t.contiguous()


def _fold_groups(t: Tensor, fold: int) -> Tensor:
    """Fold groups of query heads into the batch: (b, g·fold, ...) to (b·g, fold, ...)."""
    return t if fold == 1 else t.unflatten(1, (-1, fold)).flatten(0, 1)


def _pieces_of_mask(problem: Problem, dot: Dot, plan: Plan, fold: int) -> Iterator[Piece]:
    """Yield the rectangles that the kernel is called on; together they cover what the mask allows."""
    batch, heads, m, n = problem.shape
    if dot.bias is None and problem.mask is None:
        yield Piece(range(batch), range(heads), range(m), range(n), False, None, None)
        return
    if dot.bias is None and isinstance(problem.mask, Causal):
        offset = n - m if problem.mask.offset is None else problem.mask.offset
        for rows, columns, causal in _causal_rectangles(m, n, offset):
            yield Piece(range(batch), range(heads), rows, columns, causal, None, None)
        return
    b, h, i, j = _piece_sizes(problem, dot, plan)
    for span, batches, own in product(cut(m, i), cut(batch, b), cut_heads(range(heads), h, fold)):
        at = problem.tile(batches, own, span, range(n))
        for block in column_blocks(at, problem.mask, j):
            for part in _runs_by_need_of_mask(block):
                yield Piece(batches, own, span, part.columns, False, *_added_to_cells(problem, dot, at, part))


def _piece_sizes(problem: Problem, dot: Dot, plan: Plan) -> tuple[int, int, int, int]:
    """Return how many batches, heads, rows and columns a piece may have.

    What is added then takes little memory: for a bias at most 64 MiB, and so does what it is computed from.
    """
    batch, heads, m, n = problem.shape
    # Few rows at a time follow the edge of a mask closely; a score of positions costs the same for any number.
    most = 2048 if problem.mask is None else 512
    # A cell takes 8 bytes while it is computed. The kernel is slower with few rows than with few heads.
    numbers, least = (4 * plan.budget("cpu"), 16) if dot.bias is None else (plan.budget("cpu") // 2, 256)
    rows = min(plan.rows or max(min(numbers // (batch * heads * n), most), least), m)
    columns = plan.columns or min(max(numbers // rows, 1), n)
    together = max(numbers // (rows * columns), 1)
    return max(together // heads, 1), min(together, heads), rows, columns


def _added_to_cells(problem: Problem, dot: Dot, at: Tile, part: ColumnBlock) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the logits of a block of columns, and which of its rows see none of its keys."""
    added = _bias_of_tile(problem, dot, at.narrow(part.columns))
    allowed = allowed_cells(at, problem.mask, part)
    if allowed is None:
        return added, None
    added = allowed.new_zeros((), dtype=problem.dtype) if added is None else added
    return torch.where(allowed, added, -math.inf), ~allowed.any(dim=-1)


def _runs_by_need_of_mask(block: ColumnBlock) -> Iterator[ColumnBlock]:
    """Divide a block into runs that need the mask and runs that do not: a kernel without a mask is faster."""
    for _, group in groupby(block.segments, lambda segment: segment[1] is BlockState.FULL):
        segments = tuple(group)
        seen = [place for place, (_, state) in enumerate(segments) if state is not BlockState.EMPTY]
        if seen:
            segments = segments[seen[0] : seen[-1] + 1]
            yield ColumnBlock(range(segments[0][0].start, segments[-1][0].stop), segments)


def _bias_of_tile(problem: Problem, dot: Dot, at: Tile) -> Tensor | None:
    """Return the positional bias of the logits of a tile; None where there is none."""
    if dot.bias is None:
        return None
    with torch.no_grad():
        none = torch.empty(0, dtype=problem.dtype)
        return dot.bias(none, none, at).to(problem.dtype)


def _causal_rectangles(m: int, n: int, offset: int) -> Iterator[tuple[range, range, bool]]:
    """Cut a causal mask (key j <= query i + offset) into rectangles.

    Yields rows, columns, and True for the one square that needs the kernel's own causal mask.
    """
    first = max(-offset, 0)  # rows above see nothing
    seen = min(max(offset, 0), n)  # columns that all remaining rows see
    if first >= m:
        return
    side = min(m - first, n - seen)
    if side == 0:
        yield range(first, m), range(n), False
        return
    if seen:
        yield range(first, first + side), range(seen), False
    yield range(first, first + side), range(seen, seen + side), True
    if first + side < m:  # rows below the square see every key
        yield range(first + side, m), range(n), False


def _added_to_piece(added: Tensor, piece: Piece, fold: int) -> Tensor:
    """Return the tensor that is added to the logits of a piece, with four axes, in the layout of its queries.

    `fold` counts the query heads that share a key head: above 1 each such group stands in the batch, as its queries do.
    """
    added = added[(None,) * (4 - added.ndim)]
    if fold == 1 or added.shape[:2] == (1, 1):
        return added
    return piece.folded(added.expand(len(piece.batches), len(piece.heads), -1, -1), fold)


def _piece_output(problem: Problem, dot: Dot, aligned: _QKV, piece: Piece, e: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of one piece, a rectangle of the matrix.

    e is the size of a value.
    """
    tokens = piece.tokens(aligned, problem.shape[1])
    added = None if piece.added is None else _added_to_piece(piece.added, piece, aligned[3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *tokens, 0.0, piece.causal, attn_mask=added, scale=dot.scale
    )
    shape = tuple(map(len, piece[:3]))
    out, lse = out.reshape(*shape, -1)[..., :e], lse.reshape(shape)
    if piece.unseen is not None:  # the kernel says 0 for the log-sum-exp of a row without keys
        out, lse = out.masked_fill(piece.unseen.unsqueeze(-1), 0.0), lse.masked_fill(piece.unseen, -math.inf)
    return out, lse


def _join_pieces(problem: Problem, dot: Dot, aligned: _QKV, pieces: Iterable[Piece], e: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of all pieces, those of one row merged by their log-sum-exp.

    Of a row, ``lse = ln Σ_p exp(lse_p)`` and ``out = Σ_p exp(lse_p - lse) out_p`` over its pieces p.
    """
    out = torch.zeros(*problem.shape[:3], e, dtype=problem.dtype, device=problem.device)
    lse = torch.full(problem.shape[:3], -math.inf, dtype=problem.dtype, device=problem.device)
    for piece in pieces:
        part, part_lse = _piece_output(problem, dot, aligned, piece, e)
        place = piece.place[:3]
        lse[place], old, new = merge(lse[place], part_lse)
        out[place] = out[place] * old.unsqueeze(-1) + part * new.unsqueeze(-1)
    return out, lse
