"""The tiled backend: any device, any score, any mask, in linear memory.

One tile of logits exists at a time. The backward recomputes each tile and asks autograd for the gradient of
the score alone; softmax is differentiated here, from the log-sum-exp that the forward kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice, product
from typing import Any, get_args

import torch
from torch import Tensor

from attlas.engine import online
from attlas.engine.backend import Backend, Form, Gradients, Request
from attlas.engine.costs import Operation
from attlas.engine.dropout import Dropout
from attlas.engine.gradient import CellGradient
from attlas.engine.held import check_leaves
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, full_precision, spread_heads, tree_flatten, tree_map
from attlas.engine.statistic import Part, Statistic, Workspace, lowest
from attlas.engine.tiling import ColumnBlock, RowBlock, column_blocks, cut_heads, row_blocks, sizes
from attlas.errors import ShapeError
from attlas.foundation.checks import surely_finite, waits_for
from attlas.foundation.devices import to_device
from attlas.foundation.indexing import as_range
from attlas.foundation.precision import products_in_float32, sums_in_float32
from attlas.foundation.tiles import Tile, cut
from attlas.foundation.trees import rebuilt
from attlas.masks.base import BlockState
from attlas.scores.base import Dot, Tokens


class Tiled(Backend):
    """Any device, any score, any mask, any numbers, in linear memory."""

    name = row = "tiled"
    computes = frozenset(get_args(Operation))
    reads = frozenset()

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        return None

    def forward(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the output by online softmax: row block by row block, one tile of logits at a time."""
        problem, tokens, dropout = request.problem, request.tokens, request.dropout
        batch, heads, m, _ = problem.shape
        out = v.new_empty(batch, heads, m, v.shape[-1])
        lse = online.empty_lse((batch, heads, m), problem.device)
        space, (v, codes) = _dot_workspace(problem, tokens), _finite_and_special(v, problem.dtype)
        for row_block in row_blocks(problem, request.plan, wide=False):
            state = _initial_state(problem, row_block.at, v.shape[-1])
            special = torch.zeros((), dtype=problem.dtype, device=problem.device)
            for block in row_block.column_blocks:
                at = row_block.at.narrow(block.columns)
                values = _tokens_of_columns(v, problem, at).to(problem.dtype)
                keep = None if dropout is None else dropout.keep(at)
                logits = _masked_logits(problem, tokens, at, block, space=space)
                if codes is not None:  # NaN and infinity reach the rows that see their key and do not drop it
                    seen = logits != -math.inf if keep is None else (logits != -math.inf) & (keep > 0)
                    special = special + online.special_part(seen, _tokens_of_columns(codes, problem, at))
                state = online.absorb(state, logits, values, keep)
            pooled, total = online.finish(state)
            out[row_block.at.place] = pooled + special  # cast back to the dtype of v
            lse[row_block.at.place] = total
        return out, lse

    def transposed(self, request: Request, lse: Tensor, x: Tensor) -> Tensor:
        """Compute ``A.mT @ x`` tile by tile: each adds its rows, weighted, to its columns."""
        problem, tokens = request.problem, request.tokens
        batch, heads, _, n = problem.shape
        out = torch.zeros(batch, heads, n, x.shape[-1], dtype=problem.dtype, device=problem.device)
        space, (x, codes) = _dot_workspace(problem, tokens), _finite_and_special(x, problem.dtype)
        for _, block, at in _each_tile(problem, request.plan):
            logits, rows = _masked_logits(problem, tokens, at, block, space=space), x[at.place].to(problem.dtype)
            seen = None if codes is None else logits.mT != -math.inf
            weights = _weights_in_place(logits, lse[at.place]).mT
            pooled = torch.matmul(weights, rows)
            if seen is not None and codes is not None:
                pooled = pooled + online.special_part(seen, codes[at.place])
            out[at.place[0], at.place[1], at.columns.start : at.columns.stop] += pooled
        return out

    def backward(self, request: Request, lse: Tensor, gradient: CellGradient, out: Tensor | None = None) -> Gradients:
        """Recompute each tile: softmax is differentiated here, the score by autograd."""
        problem, tokens, dropout, parameters = request.problem, request.tokens, request.dropout, request.parameters()
        whole_rows = not gradient.is_product  # tiles then hold whole rows, so that they have the sums over a row
        if not whole_rows and online.is_imprecise(lse):
            lse = self.forward(request, gradient.product[1][..., :0])[1]
        dtype, (batch, heads, m, n) = problem.dtype, problem.shape
        q_flat, k_flat = tree_flatten(tokens[0]), tree_flatten(tokens[1])
        grads_q, grads_k = ([torch.zeros_like(t, dtype=dtype) for t in flat] for flat in (q_flat, k_flat))
        grads_p: list[Tensor | None] = [None] * len(parameters)
        # Also of rows without keys, where a sink alone has a weight.
        delta = torch.zeros(batch, heads, m, dtype=dtype, device=problem.device)
        delta = delta if gradient.lse is None else delta - gradient.lse.to(dtype)
        left = gradient.left
        pooled = None if left is None else left.new_zeros((batch, heads, n, left.shape[-1]), dtype=dtype)
        space = Workspace(dtype, problem.device)
        finite = gradient.right is None or surely_finite(gradient.right)
        for row_block, block, at in _each_tile(problem, request.plan, whole_rows=whole_rows, wanted_rows=gradient.rows):
            b, h, rows = row_block.at.place
            columns = slice(at.columns.start, at.columns.stop)
            places = (b, h, rows), (b, _key_heads(problem, at, problem.k.shape[1]), columns)
            q_tile, k_tile = (
                [t[place].to(dtype).detach().requires_grad_() for t in flat]
                for place, flat in zip(places, (q_flat, k_flat), strict=True)
            )
            with torch.enable_grad():
                logits = _score_of_tile(problem, rebuilt(tokens, [*q_tile, *k_tile]), at)
            # A part of whole rows knows its log-sum-exp, but where keys outside of the matrix count too (`partial`).
            row_lse = None if whole_rows and not problem.partial else lse[row_block.at.place]
            part = _part_of_logits(problem, at, block, logits.detach(), space, row_lse)
            slope = _slope_of_product(problem, gradient, part, dropout, pooled)
            if not finite:  # what a row may not see has no part in its gradient
                slope.masked_fill_(part.hidden, 0.0)
            _turn_into_logit_gradient(gradient, part, slope, delta[b, h, rows])
            inputs = [*q_tile, *k_tile, *parameters]
            if not (inputs and logits.requires_grad):
                continue
            grads = _tile_gradients(problem, logits, inputs, slope)
            _add_gradients(grads_q, places[0], grads)
            _add_gradients(grads_k, places[1], grads)
            grads_p = [
                total if grad is None else grad if total is None else total + grad
                for total, grad in zip(grads_p, grads, strict=True)
            ]
        return Gradients(grads_q, grads_k, grads_p, pooled, delta if whole_rows else gradient.product[2])

    def statistics(
        self, request: Request, statistics: Sequence[Statistic], lse: Tensor | None
    ) -> tuple[list[Any], Tensor | None]:
        return collect(request.problem, statistics, request.plan, None if lse is None else online.exact(lse))

    def cells(self, request: Request, at: Tile, lse: Tensor | None, form: Form) -> Tensor:
        """Compute some cells; the log-sum-exp of their rows is computed where it is not known.

        It is computed again where it is too imprecise, if the tile has all keys of its rows.
        """
        problem, plan = request.problem, request.plan
        out = torch.empty(at.shape, dtype=problem.dtype, device=problem.device)
        # Is the log-sum-exp so large that the rounding of another kernel matters? On the CPU each tile is looked at,
        # elsewhere the whole matrix, once, since the program waits for the answer. For log-weights the caller looked.
        asks_tiles = not waits_for(problem.device)
        large = not asks_tiles and lse is not None and form == "weights" and online.exceeds(lse, online.LARGE)
        for tile, place in _tiles_of_cells(problem, at, plan):
            if form == "logits":
                out[place] = _logits_of_cells(problem, tile)
                continue
            b, h, rows = tile.place
            index: Any = rows if tile.row_index is None else to_device(tile.row_index, problem.device)
            known = None if lse is None else lse[b, h, index]
            # Another kernel rounds large logits in its own way.
            too_imprecise = known is not None and (large or (asks_tiles and online.exceeds(known, online.LARGE)))
            if known is None or (too_imprecise and _lse_is_cheap(problem, tile, form)):
                known = _lse_of_rows(problem, tile, plan)
            logits = _logits_of_cells(problem, tile)
            if form == "weights":
                out[place] = _weights_in_place(logits, known)
            else:
                shift = online.finite_shift(online.rounded(known))
                out[place] = logits - shift.to(logits.dtype).unsqueeze(-1)
        return out

    def log_sum_exp(self, request: Request) -> Tensor:
        problem = request.problem
        space = Workspace(problem.dtype, problem.device)
        lse = _lse_without_keys(problem)
        for row_block in row_blocks(problem, request.plan):
            for part in islice(parts(problem, row_block, None, space), 1):  # each part knows that of its whole rows
                lse[row_block.at.place] = part.exact_lse
        return lse


BACKENDS = (Tiled(),)


@torch.no_grad()
@full_precision
def collect(
    problem: Problem, statistics: Sequence[Statistic], plan: Plan, lse: Tensor | None = None
) -> tuple[list[Any], Tensor | None]:
    """Run statistics over the matrix in one pass; return their results, and the log-sum-exp, None if not computed.

    Where a row fits into one tile, its log-sum-exp and its weights come from one product of queries and
    keys; longer rows are computed twice, unless their log-sum-exp is known already. Nothing is computed
    that no statistic asks for.
    """
    if lse is not None and not problem.partial and online.exceeds(lse, online.LARGEST):
        lse = None  # it is too imprecise: tiles compute weights and the sum of their row together
    carries = [statistic.start(problem) for statistic in statistics]
    space = Workspace(problem.dtype, problem.device)
    new_lse, complete = _lse_without_keys(problem), True
    whole_rows = any(statistic.whole_rows for statistic in statistics)
    wide = lse is None or waits_for(problem.device)  # narrow tiles stay in the caches of a CPU
    for row_block in row_blocks(problem, plan, whole_rows=whole_rows, wide=wide):
        for part in parts(problem, row_block, lse, space):
            carries = [s.step(c, part, part.at) for s, c in zip(statistics, carries, strict=True)]
            if part.knows_lse:
                new_lse[row_block.at.place] = part.exact_lse
            else:
                complete = False
    return [s.finish(c) for s, c in zip(statistics, carries, strict=True)], new_lse if lse is None and complete else lse


def parts(problem: Problem, row_block: RowBlock, lse: Tensor | None, space: Workspace) -> Iterator[Part]:
    """Yield the parts of a row block from left to right; each is valid until the next is asked for.

    A `Part` is a tile with its numbers: what a step of a statistic gets.
    """
    tokens, fill = problem.tokens, lowest(problem.dtype)
    # The part has its rows whole, and finds their log-sum-exp.
    whole = lse is None and len(row_block.column_blocks) == 1
    row_lse: Callable[[], Tensor] | None = None
    if lse is not None:
        row_lse = partial(lse.__getitem__, row_block.at.place)
    elif not whole:
        row_lse = cache(partial(_row_lse, problem, tokens, row_block, space))
    for index, block in enumerate(row_block.column_blocks):
        at = row_block.at.narrow(block.columns)
        score = partial(_masked_logits, problem, tokens, at, block, fill, space)
        yield Part(problem, at, block, score, row_lse, space, index == 0, index == len(row_block.column_blocks) - 1)


def _tiles_of_cells(problem: Problem, at: Tile, plan: Plan) -> Iterator[tuple[Tile, tuple[slice, slice, slice]]]:
    """Cut a tile of any size into tiles that fit into memory; yield each, and its place in the cut one.

    Only these rows are computed: each costs n scores where its log-sum-exp is not known.
    """
    index = torch.arange(at.rows.start, at.rows.stop, device="cpu") if at.row_index is None else at.row_index.cpu()
    size = sizes(problem, plan, whole_rows=False, wide=True)
    heads = list(cut_heads(at.heads, size.heads, problem.group))
    for b, own_heads, r in product(cut(len(at.batches), size.batches), heads, cut(len(index), size.rows)):
        some = as_range(index[r.start : r.stop])
        rows, of_rows = (some, None) if isinstance(some, range) else (r, some)
        h = slice(own_heads.start - at.heads.start, own_heads.stop - at.heads.start)
        place = slice(b.start, b.stop), h, slice(r.start, r.stop)
        own = at.batches[b.start : b.stop]
        yield problem.tile(own, own_heads, rows, at.columns, row_index=of_rows, column_index=at.column_index), place


def _lse_is_cheap(problem: Problem, at: Tile, form: Form) -> bool:
    """Return whether the log-sum-exp of a tile's rows can be computed, at little cost beside reading its cells."""
    rows, columns, n = len(at.rows), len(at.columns), problem.shape[3]
    # Always for log-weights; else where the tile has whole rows, or where it takes a million scores at most.
    return not problem.partial and (form == "log weights" or columns == n or rows * n <= 1 << 20)


def _logits_of_cells(problem: Problem, at: Tile) -> Tensor:
    """Return the logits of a tile, -inf where masked, in memory that may be written to."""
    logits = _writable_logits(problem, _score_of_tile(problem, _tokens_of_tile(problem, problem.tokens, at), at))
    return logits if problem.mask is None else logits.masked_fill_(~problem.mask.allows(at), -math.inf)


def _lse_of_rows(problem: Problem, at: Tile, plan: Plan) -> Tensor:
    """Return the log-sum-exp of a tile's whole rows, from as many columns at a time as the plan's memory allows."""
    rows = replace(at, columns=range(problem.shape[3]), column_index=None)
    width = max(plan.budget(problem.device.type) // problem.score.scratch // max(math.prod(rows.shape[:3]), 1), 1)
    return _row_lse(problem, problem.tokens, RowBlock(rows, column_blocks(rows, problem.mask, width)))


def _row_lse(problem: Problem, tokens: tuple[Tokens, Tokens], rows: RowBlock, space: Workspace | None = None) -> Tensor:
    """Return the log-sum-exp of a row block."""
    state = _initial_state(problem, rows.at, 0)
    for block in rows.column_blocks:
        at = rows.at.narrow(block.columns)
        state = online.absorb(state, _masked_logits(problem, tokens, at, block, space=space), None)
    return online.finish(state)[1]


def _lse_without_keys(problem: Problem) -> Tensor:
    """Return the log-sum-exp of rows that see no key: -inf, or the sink."""
    return online.widened(_initial_state(problem, problem.tile(*map(range, problem.shape)), 0).largest)


def _finite_and_special(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return values without NaN and infinity, and the codes of these: None where there surely are none.

    Codes are those of `online.special_codes`: they say which value is infinite, and which NaN.
    """
    if surely_finite(values):
        return values, None
    return online.finite_part(values), online.special_codes(values.to(dtype))


def _dot_workspace(problem: Problem, tokens: tuple[Tokens, Tokens]) -> Workspace | None:
    """Return a workspace if the tokens are those of the problem, whose plain dot product then applies; else None."""
    same = all(a is b for a, b in zip(tree_flatten(tokens), tree_flatten(problem.tokens), strict=True))
    return Workspace(problem.dtype, problem.device) if same else None


def _initial_state(problem: Problem, at: Tile, e: int) -> online.Running:
    """Return the state of online softmax before any key: the sink alone."""
    sink = None if problem.sink is None else problem.sink[at.heads.start : at.heads.stop]
    return online.empty(at.shape[:3], e, like=torch.empty(0, dtype=problem.dtype, device=problem.device), sink=sink)


def _each_tile(
    problem: Problem, plan: Plan, *, whole_rows: bool = False, wanted_rows: Tensor | None = None
) -> Iterator[tuple[RowBlock, ColumnBlock, Tile]]:
    """Yield each tile and its blocks, except row blocks without a wanted row; whole rows come last rows first.

    The functions of a `CellGradient` are asked in this order. `wanted_rows`, shape (m,), is True where a row may have a
    gradient.
    """
    blocks = row_blocks(problem, plan, whole_rows=whole_rows, wide=False)
    for row_block in reversed(list(blocks)) if whole_rows else blocks:
        if wanted_rows is not None and not bool(wanted_rows[row_block.at.place[2]].any()):
            continue
        for block in row_block.column_blocks:
            yield row_block, block, row_block.at.narrow(block.columns)


def _tile_gradients(problem: Problem, logits: Tensor, inputs: list[Tensor], slope: Tensor) -> Iterator[Tensor | None]:
    """Return the gradients of a tile's tokens and of the parameters, from that of its logits."""
    if problem.runs_own_code and not problem.detached:
        check_leaves(type(problem.score).__name__, logits, inputs)
    return iter(torch.autograd.grad(logits, inputs, slope, allow_unused=True))


def _add_gradients(totals: list[Tensor], place: Any, grads: Iterator[Tensor | None]) -> None:
    """Add the next gradients, those of a tile's tokens, to those of all tokens; None counts as 0."""
    for total in totals:
        grad = next(grads)
        if grad is not None:
            total[place] += grad


def _part_of_logits(
    problem: Problem, at: Tile, block: ColumnBlock, logits: Tensor, space: Workspace, lse: Tensor | None
) -> Part:
    """Return the `Part` of a tile, made of a copy of given logits.

    The graph of autograd still needs these unchanged.
    """

    def score() -> Tensor:
        copy = space.take("logits", at.shape).copy_(logits)
        return _fill_masked(problem, copy.clamp_(min=lowest(copy.dtype)), at, block, lowest(copy.dtype))

    return Part(problem, at, block, score, None if lse is None else lambda: lse, space)


def _slope_of_product(
    problem: Problem, gradient: CellGradient, part: Part, dropout: Dropout | None, pooled: Tensor | None
) -> Tensor:
    """Return ``left @ right.mT``, the gradient of a product in a part's weights, as a buffer.

    ``weights.mT @ left``, the gradient in the values of the part's columns, is added to `pooled`.
    """
    at, slope = part.at, part.scratch("gradient")
    if gradient.left is None or gradient.right is None or pooled is None:
        return slope.zero_()
    x, y = gradient.left[at.place], _tokens_of_columns(gradient.right, problem, at)
    wide = x.to(slope.dtype)
    if sums_in_float32(x, y):
        products_in_float32(x, y, slope)
    else:
        torch.matmul(wide, y.to(slope.dtype).mT, out=slope)
    keep = None if dropout is None else dropout.keep(at)
    weights = part.weights if keep is None else part.weights * keep
    pooled[at.place[0], at.place[1], at.columns.start : at.columns.stop] += torch.matmul(weights.mT, wide)
    return slope if keep is None else slope.mul_(keep)


def _turn_into_logit_gradient(gradient: CellGradient, part: Part, slope: Tensor, delta: Tensor) -> None:
    """Turn the gradient with respect to a part's weights into that with respect to its logits, in place.

    `slope` comes with the term of the product and leaves with all terms of `gradient`; ``Σ_j P_ij dP_ij`` of each row
    is added to `delta`, which comes with the gradient of its log-sum-exp, subtracted.

    The terms are those of the equation in `CellGradient`.
    """
    b, h, rows = part.at.place
    columns = slice(part.at.columns.start, part.at.columns.stop)

    def of_rows(t: Tensor) -> Tensor:
        return t[b, h, rows].to(slope.dtype).unsqueeze(-1)

    if gradient.is_product:
        slope.sub_(of_rows(gradient.product[2])).mul_(part.weights)
        return
    if gradient.log is not None:
        slope.addcmul_(part.log_weights, of_rows(gradient.log))
    if gradient.square is not None:
        slope.addcmul_(part.weights, of_rows(gradient.square))
    if gradient.row is not None:
        slope.add_(of_rows(gradient.row))
    if gradient.column is not None:
        slope.add_(gradient.column[b, h, columns].to(slope.dtype).unsqueeze(-2))
    for of_tile in gradient.weights:
        slope.add_(of_tile(part))
    delta += part.row_products(part.weights, slope)
    slope.sub_(delta.unsqueeze(-1)).mul_(part.weights)
    if gradient.weights:  # a masked weight may have an infinite gradient, which its logit must not get
        slope.masked_fill_(part.hidden, 0.0)
    if gradient.mean is not None and gradient.linear is not None and gradient.centre is not None:
        direct = (part.logits - of_rows(gradient.centre)) * of_rows(gradient.linear) + of_rows(gradient.mean)
        slope.add_(direct.masked_fill_(part.hidden, 0.0))
    for of_tile in gradient.logits:
        slope.add_(of_tile(part))


def _key_heads(problem: Problem, at: Tile, heads: int) -> slice:
    """Return the key (or value) heads that serve the query heads of a tile."""
    group = max(problem.shape[1] // max(heads, 1), 1)
    return slice(at.heads.start // group, -(-at.heads.stop // group))


def _tokens_of_columns(t: Tensor, problem: Problem, at: Tile) -> Tensor:
    """Return keys or values at a tile's columns, one head for each query head of the tile."""
    index: Any = (
        slice(at.columns.start, at.columns.stop) if at.column_index is None else to_device(at.column_index, t.device)
    )
    part = t[at.batches.start : at.batches.stop, _key_heads(problem, at, t.shape[1]), index]
    return spread_heads(part, len(at.heads))


def _tokens_of_tile(problem: Problem, tokens: tuple[Tokens, Tokens], at: Tile) -> tuple[Tokens, Tokens]:
    """Return the queries and the keys of a tile."""
    b, h, rows = at.place
    row_index: Any = rows if at.row_index is None else to_device(at.row_index, problem.device)
    q = tree_map(lambda t: t[b, h, row_index].to(problem.dtype), tokens[0])
    k = tree_map(lambda t: _tokens_of_columns(t, problem, at).to(problem.dtype), tokens[1])
    return q, k


def _score_of_tile(problem: Problem, tokens: tuple[Tokens, Tokens], at: Tile) -> Tensor:
    """Return the score of a tile in full shape, from its queries and its keys, which may have fewer heads."""
    (q, k), heads = tokens, len(at.heads)
    logits = problem.score(q, tree_map(lambda t: spread_heads(t, heads), k), at).to(problem.dtype)
    if logits.shape == at.shape:
        return logits
    try:
        return logits.expand(at.shape)
    except RuntimeError:
        rule = "forward() must return log-weights that broadcast to (batches, heads, rows, columns)."
        found = f"shape {tuple(logits.shape)} for a tile of {at.shape}"
        fix = "attlas.testing.check_score(score) asks it for tiles of all kinds."
        raise ShapeError(rule, found, fix, returned=logits, where=f"{type(problem.score).__name__}()") from None


def _writable_logits(problem: Problem, logits: Tensor) -> Tensor:
    """Return logits that may be written to: a copy if they are expanded or share memory with another tensor."""
    storage = logits.untyped_storage()
    shared = storage.nbytes() != logits.nbytes or storage.data_ptr() in problem.protected_storages
    # Code of the user may return a tensor that it keeps.
    return logits.clone() if shared or problem.runs_own_code else logits


def _masked_logits(
    problem: Problem,
    tokens: tuple[Tokens, Tokens],
    at: Tile,
    block: ColumnBlock,
    fill: float = -math.inf,
    space: Workspace | None = None,
) -> Tensor:
    """Return the masked logits of a tile in new memory, or in that of the workspace; all at least `fill`."""
    if space is not None and not at.scattered and problem.plain_dot is not None:
        logits = _dot_logits(problem, problem.plain_dot, at, space)
    else:
        logits = _writable_logits(problem, _score_of_tile(problem, _tokens_of_tile(problem, tokens, at), at))
    if fill != -math.inf and not problem.has_surely_finite_logits:
        logits.clamp_(min=fill)
    return _fill_masked(problem, logits, at, block, fill)


def _dot_logits(problem: Problem, dot: Dot, at: Tile, space: Workspace) -> Tensor:
    """Return the logits of a dot product, written into the workspace."""
    q, k = dot.q[at.place], _tokens_of_columns(dot.k, problem, at)
    logits = space.take("logits", at.shape)
    if sums_in_float32(q, k):
        return products_in_float32(q, k, logits).mul_(dot.scale)
    q, k = q.to(problem.dtype) * dot.scale, k.to(problem.dtype)
    torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out=logits.flatten(0, 1))
    return logits


def _fill_masked(problem: Problem, logits: Tensor, at: Tile, block: ColumnBlock, fill: float = -math.inf) -> Tensor:
    """Write `fill` into the masked cells of a tile's logits, and return these."""
    if problem.mask is None or block.whole:
        return logits
    for columns, state in block.segments:
        span = logits[..., block.local(columns)]
        if state is BlockState.EMPTY:
            span.fill_(fill)
        elif state is BlockState.PARTIAL:
            span.masked_fill_(~problem.mask.allows(at.narrow(columns)), fill)
    return logits


def _weights_in_place(logits: Tensor, lse: Tensor) -> Tensor:
    """Return exp(logits - lse), written over the logits; a row without keys has weights 0."""
    high, low = online.split_lse(lse, logits.dtype)
    logits.sub_(high.unsqueeze(-1))
    if low is not None:
        logits.sub_(low.unsqueeze(-1))
    return online.exp(logits, out=logits)
