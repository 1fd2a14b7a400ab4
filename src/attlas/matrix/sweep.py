"""Statistics of weights that are no softmax: one pass over tiles of weights, which may be negative."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from attlas.engine import given, outputs
from attlas.engine.autodiff import graph
from attlas.engine.dropout import Dropout
from attlas.engine.gradient import CellGradient
from attlas.engine.online import empty_lse
from attlas.engine.outputs import MISSING
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, spread_heads, version_of
from attlas.engine.statistic import Part, Statistic, Workspace, lowest
from attlas.engine.tiling import ColumnBlock, clip, column_blocks, cut_heads, segments_of, sizes
from attlas.errors import BackendError, DtypeError, ShapeError, TooLargeError, public
from attlas.foundation.compat import cached_property, tracing
from attlas.foundation.tiles import Tile, cut
from attlas.foundation.trees import rebuilt, tensors_in
from attlas.masks.base import BlockState, Mask
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.totals import Totals
from attlas.matrix.weights import Weights
from attlas.scores.dot import ScaledDot
from attlas.stats.columns import ColumnMass
from attlas.stats.rows import Pooled, RowMass

_DEFAULT_PLAN = Plan()


class _OutlineProblem(Problem):
    """Shape, dtype, mask and ids of weights that are shares of a row, for statistics; its tokens are zeros."""


class _SignedOutline(_OutlineProblem):
    """The same of weights that may be negative, or sum to more than 1."""

    signed: ClassVar[bool] = True


class SweptWeights(Weights):
    """Weights that are no softmax. Statistics that no product gives see their tiles as they are.

    A subclass says what its products, its cells and its `inputs` are. Weights that are hidden by the mask are 0, and
    count as cells of weight 0: the largest weight of a row of negative ones is 0 where the mask hides a key.
    """

    counts_other_keys = False
    are_signed = True
    #: Size of the tiles that a kernel adds up.
    tile_plan = _DEFAULT_PLAN
    _whole: WeightGradient | None = None

    def row_tiles(self, at: Tile, blocks: Sequence[ColumnBlock]) -> Iterator[Tensor]:
        """Yield the weights of some rows and of one block of columns after the other, 0 where masked, without a graph.

        Parameters
        ----------
        at : Tile
            Batches, heads and rows, by their places in these weights.
        blocks : sequence of ColumnBlock
            The columns, from left to right.
        """
        some = self.part(_as_slice(at.batches), _as_slice(at.heads)).detach()
        for block in blocks:
            yield some.cells(at.rows, block.columns)

    def tile_factors(self, at: Tile, blocks: Sequence[ColumnBlock]) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield the tiles of `row_tiles`, or pairs ``(left, right)`` of which ``left @ right.mT`` is the tile."""
        return self.row_tiles(at, blocks)

    # ---------------------------------------------------------------------------------------------------------- facts

    @cached_property
    def outline(self) -> Problem:
        """What statistics may ask of a matrix: sizes, dtype, device, mask, ids."""
        batch, heads, m, n = self.shape
        zero = torch.zeros(1, dtype=self.dtype, device=self.device)
        q, k = (zero.expand(batch, heads, length, 1) for length in (m, n))
        of_kind = _OutlineProblem if self.are_shares else _SignedOutline
        ids = self.batch_ids, self.head_ids
        return of_kind(q, k, ScaledDot(1.0), self.mask, None, ids, versions=(version_of("q", zero),))

    @property
    def allowed_runs(self) -> tuple[Tensor, Tensor] | None:  # type: ignore[override]  # computed here
        return self.outline.allowed_runs

    @cached_property
    def gradient(self) -> WeightGradient:  # type: ignore[override]  # computed here
        return WeightGradient(self._whole)

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in self.inputs)

    @property
    def needs_graph(self) -> bool:
        return self.is_symbolic or (torch.is_grad_enabled() and self.requires_grad)

    @property
    def is_symbolic(self) -> bool:
        return tracing() or self.device.type == "meta"

    def check_numbers(self) -> None:
        # Raise a BackendError where the tensors have no numbers yet.
        if self.is_symbolic:
            rule = f"{self.description} is read outside of compiled programs, from tensors with numbers."
            found = f"a traced program, or tensors of {self.device}"
            raise BackendError(rule, found, "A @ v, which is traced; or read it outside of the program.")

    def tile(self, batches: range, heads: range, rows: range, columns: range, **index: Tensor | None) -> Tile:
        return self.outline.tile(batches, heads, rows, columns, **index)

    def rows_with_keys(self) -> Tensor | None:
        runs = self.allowed_runs
        return None if runs is None else runs[0] < runs[1]

    def check_no_logits(self, logits: bool) -> None:
        """Raise a DtypeError where log-weights are asked for."""
        if logits:
            self.of_softmax("A.logits")

    def check_shares(self) -> None:
        """Raise a ShapeError unless rows are shares of 1: no weight below 0, and a sum of at most 1."""
        if not self.are_shares:
            rule = "weights must be shares of a row: not negative, with a sum of at most 1."
            raise ShapeError(rule, self.description, "stats.RowMass(), stats.TopK(8)", A=f"shape {self.shape}")

    def check_statistics(self, statistics: Sequence[Statistic]) -> None:
        """Raise an error, by its name, for a statistic of logits, or for one that needs other weights."""
        for statistic in statistics:
            with public(f"{type(statistic).__name__}()"):
                if statistic.of_logits:
                    self.of_softmax("")
                if statistic.of_shares or (statistic.of_unsigned and self.are_signed):
                    self.check_shares()

    # ---------------------------------------------------------------------------------------------------------- verbs

    def with_product(
        self, out: Tensor, right: Tensor, dropout: Dropout | None = None, *, transposed: bool = False
    ) -> Tensor:
        """Return a product of the weights, noted for the gradient of the weights where it has a graph."""
        if out.requires_grad and not tracing():
            keep = None if dropout is None else lambda: dropout.keep(self.tile(*map(range, self.shape)))
            self.gradient.add_product(out, right, transposed=transposed, keep=keep)
        return out

    def with_cells(self, rows: range | Tensor, columns: range | Tensor, cells: Tensor) -> Tensor:
        """Return cells that were read, noted for the gradient of the weights where they have a graph."""
        if cells.requires_grad and not tracing():
            self.gradient.add_cells(rows, columns, cells)
        return cells

    @public("A.sum()")
    def sums(self, *, over_keys: bool) -> Tensor:
        # Sums of rows or columns are a product with ones.
        batch, heads, m, n = self.shape
        ones = torch.ones(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        whole = self.full_precision()
        if over_keys:
            return whole.product(ones.expand(batch, heads, n, 1))
        return whole.transposed_product(ones.expand(batch, heads, m, 1))

    # ----------------------------------------------------------------------------------------------------- statistics

    @public("A.collect()")
    def collect(self, statistics: Sequence[Statistic]) -> list[Any]:
        """Collect statistics: those that are products by a product, the others in one sweep over the tiles."""
        self.check_unchanged()
        self.check_numbers()
        self.check_statistics(statistics)
        # Where a kernel sees the tiles anyway, it adds up their weights too.
        swept = not self.needs_graph and not all(is_sum(s) or s.is_mean for s in statistics)
        swept = swept and given.cell_sums_unsupported(self.outline) is None
        asked = outputs.asked_outputs(self.outline, statistics, given.NAMES if swept else ())
        results = [
            self.without_sweep(statistic) if wanted is None else MISSING
            for statistic, wanted in zip(statistics, asked, strict=True)
        ]
        rest = [s for s, result in zip(statistics, results, strict=True) if result is MISSING]
        found = iter(_statistics_of_tiles(self, rest))
        return [next(found) if result is MISSING else result for result in results]

    def without_sweep(self, statistic: Statistic) -> Any:
        """Return the result of a statistic that a product gives; MISSING for all others."""
        if not is_sum(statistic):
            return MISSING
        if isinstance(statistic, RowMass):
            return self.sums(over_keys=True).squeeze(-1)
        if isinstance(statistic, ColumnMass) and statistic.rows is None:
            return self.sums(over_keys=False).squeeze(-1)
        if isinstance(statistic, Pooled):
            return self.full_precision().product(statistic.values_of(self.outline).to(self.dtype))
        return MISSING


def each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors in order, each of them once."""
    return list({id(t): t for t in tensors}.values())


def is_sum(statistic: Statistic) -> bool:
    """Return whether a statistic adds up weights, so that its result for a sum of matrices is the sum of theirs."""
    return statistic.is_sum and statistic.describes("is_sum")


def _as_slice(places: range) -> slice:
    """Return a range as a slice."""
    return slice(places.start, places.stop)


def _statistics_of_tiles(weights: SweptWeights, statistics: Sequence[Statistic]) -> list[Any]:
    """Return the results of statistics that need the tiles, with a graph where there is one."""
    if not statistics:
        return []
    if not weights.needs_graph:
        return _run_statistics(weights, statistics)
    weights.gradient.mark_incomplete("statistics were collected")
    forms: list[Any] = []
    found = list(_StatisticsWithGraph.apply(weights, statistics, forms, *weights.inputs))  # type: ignore[no-untyped-call]
    return [rebuilt(form, found) for form in forms]  # each takes its own from the list


@torch.no_grad()
def _run_statistics(weights: SweptWeights, statistics: Sequence[Statistic]) -> list[Any]:
    """Run statistics over the tiles in one pass, without a graph."""
    outline = weights.outline
    asked = outputs.asked_outputs(outline, statistics, given.NAMES)
    by_tiles = [number for number, wanted in enumerate(asked) if wanted is None]
    rest: list[Any] = []

    def read(wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None) -> dict[str, Tensor] | None:
        """Return what a kernel adds up over all tiles.

        In the same pass `rest` gets the results of statistics that need the tiles.
        """
        sums = given.cell_sums(outline, wanted)
        if sums is None:
            return None
        found = _feed_tiles(weights, [statistics[number] for number in by_tiles], sums)
        rest[:] = found or []
        return None if found is None else sums.results()

    # The numbers that a kernel adds up, and in the same pass what is left to the tiles. No log-sum-exp is asked for.
    found = outputs.collect(outline, read, statistics, empty_lse((0,), weights.device), given.NAMES)
    if found is None:
        return _feed_tiles(weights, statistics, None) or []
    results = found.results
    for number, result in zip(by_tiles, rest, strict=True):
        results[number] = result
    return results


def _feed_tiles(weights: SweptWeights, statistics: Sequence[Statistic], sums: Any) -> list[Any] | None:
    """Feed each tile to the statistics and to the kernel `sums`, in one pass.

    None where a weight is NaN or infinite.
    """
    outline = weights.outline
    carries = [statistic.start(outline) for statistic in statistics]
    whole_rows = any(statistic.whole_rows for statistic in statistics)
    # Hidden cells add nothing to a sum. Any other statistic counts them as weights of 0.
    sums_alone = all(is_sum(statistic) or statistic.is_mean for statistic in statistics)
    space = Workspace(weights.dtype, weights.device)
    alone = not statistics and sums is not None
    plan, tiles = (weights.tile_plan, weights.tile_factors) if alone else (_DEFAULT_PLAN, weights.row_tiles)
    for at, blocks in _row_blocks(weights, whole_rows=whole_rows, hidden=not sums_alone, plan=plan):
        for number, (block, cells) in enumerate(zip(blocks, tiles(at, blocks), strict=True)):
            tile = at.narrow(block.columns)
            if sums is not None and not sums.add(tile, cells):
                return None
            if statistics and isinstance(cells, Tensor):
                part = _part_of_tile(weights, tile, block, cells, space, number == 0, number == len(blocks) - 1)
                carries = [s.step(carry, part, tile) for s, carry in zip(statistics, carries, strict=True)]
        if sums is not None:
            sums.end_rows(at, [block.columns for block in blocks])
    return [statistic.finish(carry) for statistic, carry in zip(statistics, carries, strict=True)]


def _row_blocks(
    weights: SweptWeights, *, whole_rows: bool, hidden: bool, plan: Plan = _DEFAULT_PLAN
) -> Iterator[tuple[Tile, tuple[ColumnBlock, ...]]]:
    """Yield some rows after the others with their blocks of columns, with those that the mask hides if asked for."""
    outline, (batch, heads, m, n) = weights.outline, weights.shape  # sizes, dtype and mask of them
    size = sizes(outline, plan, whole_rows=whole_rows, wide=False)
    group = heads // max(weights.key_heads, 1)
    for batches, own, rows in product(
        cut(batch, size.batches), list(cut_heads(range(heads), size.heads, group)), cut(m, size.rows)
    ):
        at = weights.tile(batches, own, rows, range(n))
        if hidden:
            yield at, _every_column(at, outline.mask, size.columns)
        else:
            yield at, column_blocks(at, outline.mask, size.columns, whole_rows=whole_rows)


def _every_column(at: Tile, mask: Mask | None, width: int) -> tuple[ColumnBlock, ...]:
    """Return all columns in blocks of a width, with what the mask says of each."""
    segments = [(at.columns, BlockState.FULL)] if mask is None else segments_of(at, mask)
    return tuple(ColumnBlock(columns, clip(segments, columns)) for columns in cut(at.n, width))


def _part_of_tile(
    weights: SweptWeights,
    at: Tile,
    block: ColumnBlock,
    cells: Tensor,
    space: Workspace,
    first: bool = True,
    last: bool = True,
) -> Part:
    """Return the `Part` that statistics see of a tile whose weights are known."""
    if not weights.are_shares:
        return _SignedPart(weights.outline, at, block, lambda: cells, _no_lse, space, first, last)
    # Shares are the softmax of their own logarithms, and its log-sum-exp is 0.
    zero = empty_lse(at.shape[:3], at.device).zero_()
    part = Part(weights.outline, at, block, lambda: _finite_logarithms(cells), lambda: zero, space, first, last)
    vars(part)["weights"] = vars(part)["_exp_shifted"] = cells  # as they are, not the exponentials of their logarithms
    return part


def _finite_logarithms(weights: Tensor) -> Tensor:
    """Return the logarithms of weights that are not negative, a very low finite number for 0."""
    return weights.log().clamp_(min=lowest(weights.dtype))


def _no_lse() -> NoReturn:
    """Raise the error of a statistic that asks weights without a softmax for a log-sum-exp."""
    rule = "a log-sum-exp belongs to a softmax, and these weights are none."
    raise DtypeError(rule, "a statistic of log-weights", "part.weights, in the step of a statistic of yours")


@dataclass(eq=False)
class _SignedPart(Part):
    """A part of weights that may be negative: they order the keys, as the logits of a softmax do."""

    @cached_property
    def weights(self) -> Tensor:
        """The weights, as they were given."""
        return self.score()

    @cached_property
    def shifted(self) -> Tensor:
        """The weights, which order the keys in the place of logits."""
        return self.weights

    @cached_property
    def mass(self) -> Tensor:
        """Sum of each row's weights in this part."""
        return self.weights.sum(dim=-1)

    @property
    def hidden(self) -> Tensor:
        """True where the mask hides the key."""
        if self.allowed is None:
            return torch.zeros(self.shape, dtype=torch.bool, device=self.at.device)
        return ~self.allowed

    def as_weights(self, shifted: Tensor) -> Tensor:
        """Return what `shifted` holds as weights: the same numbers, 0 for -inf."""
        return shifted.masked_fill(shifted == -torch.inf, 0.0)


class _StatisticsWithGraph(torch.autograd.Function):
    """Statistics with their graph; the backward computes the tiles again, whole rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, weights: SweptWeights, statistics: Sequence[Statistic], forms: list[Any], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute the statistics without a graph, and return the tensors of all results as a flat tuple.

        `forms` gets the results themselves, whose nesting the flat tuple does not have.
        """
        results = _run_statistics(weights, statistics)
        forms += results
        found = tensors_in(results)
        # The results themselves would make a cycle that Python cannot free: they know this context.
        ctx.forms = [rebuilt(result, [t.new_empty(0) for t in tensors_in(result)]) for result in results]
        ctx.weights, ctx.statistics = weights, statistics
        ctx.save_for_backward(*found, *inputs)
        fixed = [t for s, r in zip(statistics, results, strict=True) for t in tensors_in(r) if not s.differentiable]
        ctx.mark_non_differentiable(*fixed, *(t for t in found if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @public("backward of A.collect()")
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        """Turn the gradients in the results into one in each cell; autograd goes from the cells to the inputs."""
        weights: SweptWeights = ctx.weights
        weights.check_unchanged()
        found, inputs = ctx.saved_tensors[: len(slopes)], ctx.saved_tensors[len(slopes) :]
        results = list(found)
        cells = _cell_gradient(weights, ctx.statistics, [rebuilt(form, results) for form in ctx.forms], slopes)
        totals = Totals(inputs)
        space = Workspace(weights.dtype, weights.device)
        for at, (block,) in reversed(list(_row_blocks(weights, whole_rows=True, hidden=True))):
            with torch.enable_grad():
                rows = weights.part(_as_slice(at.batches), _as_slice(at.heads)).cells(at.rows, at.columns)
            totals.add(rows, _weight_gradient_of_part(cells, _part_of_tile(weights, at, block, rows.detach(), space)))
        return None, None, None, *totals.of_each()


def _cell_gradient(
    weights: SweptWeights, statistics: Sequence[Statistic], results: Sequence[Any], slopes: Sequence[Tensor | None]
) -> CellGradient:
    """Return the gradient of a loss in each weight, from those in the results of the statistics."""
    total, rest = CellGradient(), list(slopes)
    for statistic, result in zip(statistics, results, strict=True):
        tensors = tensors_in(result)
        slopes_of_result, rest = rest[: len(tensors)], rest[len(tensors) :]
        if not statistic.differentiable or all(g is None for g in slopes_of_result):
            continue
        filled = [torch.zeros_like(t) if g is None else g for g, t in zip(slopes_of_result, tensors, strict=True)]
        found = statistic.gradient(weights.outline, rebuilt(result, list(filled)), result)
        if found is None or not statistic.describes("gradient") or _is_of_logits(found):
            found = _gradient_by_autograd(weights, statistic, filled)
        total = total + found
    return total


def _gradient_by_autograd(weights: SweptWeights, statistic: Statistic, grads: Sequence[Tensor]) -> CellGradient:
    """Return the gradient of a statistic without a formula, by autograd through its step on the written-out matrix.

    Raises
    ------
    TooLargeError
        If the matrix takes more than 1 GiB.
    """
    batch, heads, m, n = weights.shape
    size = batch * heads * m * n * weights.dtype.itemsize
    if size > graph.DENSE_LIMIT:
        rule = "without a formula its gradient takes the whole matrix, which is larger than the limit."
        fix = "a method `gradient` in its class, or A.detach()."
        found = f"{size:,} bytes, the limit is {graph.DENSE_LIMIT:,}"
        raise TooLargeError(rule, found, fix, A=f"shape {weights.shape}", where=f"{type(statistic).__name__}()")
    at = weights.tile(*map(range, weights.shape))
    (block,) = _every_column(at, weights.mask, max(n, 1)) or (ColumnBlock(at.columns, ()),)
    with torch.enable_grad():
        cells = weights.detach().cells(range(m), range(n)).requires_grad_()
        part = _part_of_tile(weights, at, block, cells, Workspace(weights.dtype, weights.device))
        result = statistic.finish(statistic.step(statistic.start(weights.outline), part, at))
    pairs = [(t, g) for t, g in zip(tensors_in(result), grads, strict=True) if t.requires_grad]
    (slope,) = torch.autograd.grad([t for t, _ in pairs], cells, [g for _, g in pairs])

    def of_tile(part: Part) -> Tensor:
        b, h, rows = part.at.place
        return slope[b, h, rows, _as_slice(part.at.columns)]

    return CellGradient(weights=(of_tile,))


def _is_of_logits(gradient: CellGradient) -> bool:
    """Return whether a part of a gradient is one in log-weights."""
    return bool(gradient.logits) or any(t is not None for t in (gradient.lse, gradient.mean, gradient.linear))


def _weight_gradient_of_part(gradient: CellGradient, part: Part) -> Tensor:
    """Evaluate the terms of a CellGradient on a part: the gradient of a loss in its weights."""
    at, weights = part.at, part.weights
    b, h, rows = at.place
    columns = _as_slice(at.columns)
    total = torch.zeros_like(weights)
    if gradient.left is not None and gradient.right is not None:
        right = spread_heads(gradient.right, part.problem.shape[1])[b, h, columns]
        total += torch.matmul(gradient.left[b, h, rows], right.to(gradient.left.dtype).mT)
    if gradient.row is not None:
        total += gradient.row[b, h, rows].unsqueeze(-1)
    if gradient.log is not None:
        seen = weights > 0
        total += gradient.log[b, h, rows].unsqueeze(-1) * torch.where(seen, weights, 1.0).log()
    if gradient.square is not None:
        total += gradient.square[b, h, rows].unsqueeze(-1) * weights
    if gradient.column is not None:
        total += gradient.column[b, h, columns].unsqueeze(-2)
    for of_tile in gradient.weights:
        total += of_tile(part)
    return total


def pooled(weights: SweptWeights, v: Tensor, dropout: Dropout | None = None, *, transposed: bool = False) -> Tensor:
    """Return ``A @ v``, or ``A.mT @ v``, of weights that are known by their cells alone, tile by tile.

    Parameters
    ----------
    weights : SweptWeights
        The weights.
    v : Tensor, shape (batch, value heads, n or m, e)
        What they are multiplied with.
    dropout : Dropout, optional
        Which weights are dropped.
    transposed : bool, default False
        Whether the transposed matrix is multiplied.

    Returns
    -------
    Tensor, shape (batch, heads, m or n, e), dtype of v
    """
    weights.check_unchanged()
    values = spread_heads(v, weights.shape[1]).to(weights.dtype)
    if weights.is_symbolic:
        size = math.prod(weights.shape) * weights.dtype.itemsize
        if dropout is not None or size > graph.DENSE_LIMIT:
            rule = f"in a traced program a product of {weights.description} writes the matrix out."
            raise BackendError(rule, "dropout" if dropout else f"{size:,} bytes", "the product outside of the program")
        every = weights.cells(range(weights.shape[2]), range(weights.shape[3]))
        return torch.matmul(every.mT if transposed else every, values).to(v.dtype)
    inputs = weights.inputs if torch.is_grad_enabled() else ()
    if any(t.requires_grad for t in (values, *inputs)):
        out: Tensor = _ProductWithGraph.apply(weights, dropout, transposed, values, *inputs)  # type: ignore[no-untyped-call]
    else:
        out = _product_by_tiles(weights, values, dropout, transposed)
    return out.to(v.dtype)


@torch.no_grad()
def _product_by_tiles(weights: SweptWeights, v: Tensor, dropout: Dropout | None, transposed: bool) -> Tensor:
    """Return a product tile by tile, without a graph."""
    batch, heads, m, n = weights.shape
    out = torch.zeros(batch, heads, n if transposed else m, v.shape[-1], dtype=weights.dtype, device=weights.device)
    for at, blocks in _row_blocks(weights, whole_rows=False, hidden=False):
        b, h, rows = at.place
        for block, cells in zip(blocks, weights.row_tiles(at, blocks), strict=True):
            columns = _as_slice(block.columns)
            kept = cells if dropout is None else cells * dropout.keep(at.narrow(block.columns))
            if transposed:
                out[b, h, columns] += torch.matmul(kept.mT, v[b, h, rows])
            else:
                out[b, h, rows] += torch.matmul(kept, v[b, h, columns])
    return out


class _ProductWithGraph(torch.autograd.Function):
    """A product tile by tile with its graph; the backward computes the tiles again, whole rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, weights: SweptWeights, dropout: Dropout | None, transposed: bool, v: Tensor, *inputs: Tensor
    ) -> Tensor:
        """Compute the product tile by tile, without a graph."""
        ctx.weights, ctx.dropout, ctx.transposed = weights, dropout, transposed
        ctx.save_for_backward(v, *inputs)
        return _product_by_tiles(weights, v, dropout, transposed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @public("backward of A @ v")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the tiles again with a graph; return the gradients in the values and in the inputs of the weights."""
        weights, dropout = ctx.weights, ctx.dropout
        weights.check_unchanged()
        v, *inputs = ctx.saved_tensors
        d_v = torch.zeros_like(v) if ctx.needs_input_grad[3] else None
        totals = Totals(inputs)
        for at, (block,) in reversed(list(_row_blocks(weights, whole_rows=True, hidden=True))):
            b, h, rows = at.place
            place = (b, h, rows)
            keep = 1.0 if dropout is None else dropout.keep(at)
            with torch.enable_grad():
                cells = weights.part(_as_slice(at.batches), _as_slice(at.heads)).cells(at.rows, block.columns)
            kept = cells.detach() * keep
            if ctx.transposed:
                slope = torch.matmul(v[place], grad[b, h].mT)
                if d_v is not None:
                    d_v[place] += torch.matmul(kept, grad[b, h])
            else:
                slope = torch.matmul(grad[place], v[b, h].mT)
                if d_v is not None:
                    d_v[b, h] += torch.matmul(kept.mT, grad[place])
            totals.add(cells, slope * keep)
        return None, None, None, d_v, *totals.of_each()
