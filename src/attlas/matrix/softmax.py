"""Weights that are a softmax of scores, computed by the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attlas.engine import operations
from attlas.engine.backend import Form
from attlas.engine.dropout import Dropout
from attlas.engine.online import OF_16_BITS, exact, is_exact, moved_lse, rounded, sees_keys, share_of, widened
from attlas.engine.outputs import MISSING
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, spread_heads
from attlas.engine.statistic import Statistic
from attlas.engine.tiling import sizes
from attlas.errors import BackendError, public
from attlas.foundation.checks import has_float64
from attlas.foundation.compat import cached_property, tracing
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile
from attlas.masks.base import Mask
from attlas.masks.placed import translated_mask
from attlas.matrix import compiled, reads
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.weights import Weights
from attlas.scores.placed import translated_score
from attlas.stats import columns, rows
from attlas.stats.counts import interval_of


class SoftmaxWeights(Weights):
    """softmax(score(Q, K)), computed by the engine.

    Parameters
    ----------
    problem : Problem
        What is computed: tokens, score, mask, sink.
    plan : Plan
        How it is computed.
    lse : Tensor, shape (batch, heads, m), optional
        Log-sum-exp of each row, where it is known.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part or a copy of.
    are_shares : bool, default True
        False where the weights are times the norms of their values.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        lse: Tensor | None = None,
        whole: WeightGradient | None = None,
        *,
        are_shares: bool = True,
    ) -> None:
        self.problem = problem
        self.plan = plan
        self.shape, self.dtype, self.device = problem.shape, problem.dtype, problem.device
        self.queries, self.keys, self.key_heads = problem.q, problem.k, problem.k.shape[1]
        self.mask = problem.mask
        self.are_shares, self.counts_other_keys = are_shares, problem.partial  # see `Weights`
        if lse is not None and (lse.device != self.device or lse.ndim == 4):
            lse = moved_lse(lse, self.device)  # it may come from a device that has no float64, or go to one
        self._announced_results: dict[Statistic, Any] = {}  # of statistics, from the call of a product
        self._lse = lse  # as it was computed; `known_lse` has the precision for weights
        self._whole = whole

    @property
    def softmax(self) -> SoftmaxWeights:
        return self

    def of_softmax(self, where: str) -> SoftmaxWeights:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not collect the gradients of products of the original.
        return {name: value for name, value in vars(self).items() if name != "gradient"} | {"_whole": None}

    # ---------------------------------------------------------------------------------------------------------- facts

    @property
    def batch_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        return self.problem.batch_ids

    @property
    def head_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        return self.problem.head_ids

    @property
    def allowed_runs(self) -> tuple[Tensor, Tensor] | None:  # type: ignore[override]  # computed here
        return self.problem.allowed_runs

    @cached_property
    def gradient(self) -> WeightGradient:  # type: ignore[override]  # computed here
        return WeightGradient(self._whole)

    @property
    def inputs(self) -> list[Tensor]:
        return self.problem.leaves

    @property
    def requires_grad(self) -> bool:
        return self.problem.requires_grad

    @property
    def needs_graph(self) -> bool:
        return self.problem.needs_graph

    @property
    def is_symbolic(self) -> bool:
        return self.problem.is_symbolic

    def check_unchanged(self) -> None:
        self.problem.check_unchanged()

    def rows_with_keys(self) -> Tensor | None:
        # Which queries may see a key, (batch, heads, m); None where that is not known.
        if self.problem.sink is not None:  # the log-sum-exp of a row without a key is that of the sink
            return None
        runs = interval_of(self.problem)
        if runs is not None and self.problem.has_finite_logits:  # no pass over the matrix
            return runs[0] < runs[1]
        return sees_keys(self.lse())

    def tile(self, batches: range, heads: range, rows: range, columns: range, **index: Tensor | None) -> Tile:
        return self.problem.tile(batches, heads, rows, columns, **index)

    @property
    def description(self) -> str:
        mask = "" if self.problem.mask is None else f", mask={self.problem.mask.name()}"
        sink = "" if self.problem.sink is None else ", sink"
        return f"score={type(self.problem.score).__name__}{mask}{sink}"

    def check_numbers(self) -> None:
        # Raise a BackendError where the tensors hold no numbers, as on the meta device.
        problem = self.problem
        if problem.has_numbers or torch.compiler.is_exporting():  # there torch's operations need no number
            return
        found = f"tensors of {problem.device}, {type(problem.q).__name__}"
        rule = "it needs tensors with numbers."
        fix = "move the tokens to a device with memory for numbers; A @ v works there."
        if problem.device.type != "meta":  # those of a program that is being written
            rule = "it needs tensors with numbers, and torch.export runs a program on tensors without."
            fix = "compute it from A.to_dense() inside of the program, or outside of it; A @ v is exported as it is."
        raise BackendError(rule, found, fix)

    # ---------------------------------------------------------------------------------------------------- log-sum-exp

    @public("A.lse")
    def lse(self) -> Tensor:
        """Return the exact log-sum-exp of each row without a graph; it is kept.

        It has a form of `attlas.engine.online`: float64 and shape (batch, heads, m) where the device has float64.
        """
        lse = self.known_lse
        if lse is None:
            self.problem.check_unchanged()
            lse = self._lse = operations.log_sum_exp(self.problem, self.plan)
        return lse

    def lse_on_cpu(self) -> Tensor:
        """Return the exact log-sum-exp of each row on the CPU, float64 of shape (batch, heads, m)."""
        return moved_lse(self.lse(), torch.device("cpu"))

    @property
    def known_lse(self) -> Tensor | None:
        """The log-sum-exp in its exact form, as `lse` gives it, if one is known that is precise enough for weights."""
        lse = self._lse
        if lse is None or lse.dtype is torch.float64:
            return lse
        if self.problem.partial:  # it counts keys outside of this window, so that it cannot be computed again
            self._lse = widened(lse)
        elif self.problem.q.dtype.itemsize == 4:
            self._lse = exact(lse)
        else:  # on a CPU, torch's kernel sums the weights after it has rounded them to 16 bits
            self._lse = None if self.device.type == "cpu" else exact(lse, OF_16_BITS)
        return self._lse

    @public("A.lse")
    def recorded_lse(self) -> Tensor:
        """Return the log-sum-exp of each row, shape (batch, heads, m), with a graph where one is needed."""
        self.problem.check_unchanged()
        if self.is_symbolic:
            known = self.known_lse
            return compiled.log_sum_exp(self.problem, self.plan) if known is None else known
        if not self.needs_graph:
            return rounded(self.lse())
        self.gradient.mark_incomplete("the log-sum-exp was read")
        lse = self.lse()
        found = [rounded(lse).clone()], lse
        results, _ = operations.record(self.problem, [reads.LogSumExp()], self.plan, lambda: found)
        recorded: Tensor = results[0]
        return recorded

    @property
    def lse_is_rounded(self) -> bool:
        """Whether a log-sum-exp is stored that a kernel has rounded."""
        return self._lse is not None and not is_exact(self._lse)

    def forget_lse(self) -> None:
        """Forget the log-sum-exp, so that the next read computes a more precise one."""
        self._lse = None

    # ------------------------------------------------------------------------------------------------------- products

    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        # ``A @ v``, shape (batch, heads, m, e), as in `Weights`.
        problem = self.problem
        problem.check_unchanged()
        if problem.is_symbolic:
            return compiled.product(problem, v, self.plan, dropout, self.lse)
        # Statistics that are to be collected next may come from the same call of a kernel.
        if self.announced and dropout is None and (both := self._product_and_statistics(v)) is not None:
            return both
        out, lse = operations.multiply(problem, v, self.plan, dropout)
        if problem.partial:  # backends normalize rows over the keys of the window alone
            window_lse = None if lse is None else exact(lse)
            window_lse = operations.log_sum_exp(problem, self.plan) if window_lse is None else window_lse
            out = (out * share_of(window_lse, self.lse()).unsqueeze(-1)).to(out.dtype)
        if self._lse is None:
            self._lse = lse
        if out.requires_grad:
            # For `A.retain_grad()`: what flows back into the weights comes from this product.
            keep = None if dropout is None else partial(dropout.keep, problem.tile(*map(range, problem.shape)))
            self.gradient.add_product(out, v, keep=keep)
        return out

    def _product_and_statistics(self, v: Tensor) -> Tensor | None:
        """Return ``A @ v``, and keep the announced statistics that come from the same call of a kernel.

        None where no announced statistic can come from the kernel.
        """
        announced, self.announced = self.announced, ()
        problem, n = self.problem, self.shape[3]
        graph = torch.is_grad_enabled() and (v.requires_grad or problem.requires_grad)
        if graph or problem.partial or problem.is_symbolic or not self.are_shares or v.dtype is not problem.q.dtype:
            return None
        # Kernels skip tiles that the mask hides: `collect` computes a statistic that has to see them, and refuses one
        # of more keys than there are.
        statistics = [s for s in announced if s.k <= n and s.may_skip_tiles(problem)]
        found = operations.multiply_and_collect(problem, v, self.plan, statistics) if statistics else None
        if found is None:
            return None
        out, self._lse, results = found
        self._announced_results = {
            s: result for s, result in zip(statistics, results, strict=True) if result is not MISSING
        }
        return out

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        # ``A.mT @ x``, in a traced program as an operator of it.
        self.problem.check_unchanged()
        x = spread_heads(x, self.problem.shape[1])
        if self.is_symbolic:
            return compiled.transposed_product(self.problem, x, self.plan, self.lse)
        out = operations.multiply_transposed(self.problem, x, self.lse, self.plan)
        if out.requires_grad:
            # For `A.retain_grad()`, as in `product`.
            self.gradient.add_product(out, x, transposed=True)
        return out

    # ---------------------------------------------------------------------------------------------------------- cells

    @public("A[...]")
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        # Numbers alone where no graph is needed; else the cells are recorded with a graph.
        self.problem.check_unchanged()
        problem = self.problem
        form: Form = "logits" if logits else "weights"
        if not problem.needs_graph:
            return operations.cells(problem, reads.place_of(problem, rows, columns), self.plan, self.known_lse, form)
        if problem.is_symbolic:
            return compiled.cells(problem, rows, columns, self.plan, self.lse, logits=logits)

        def compute() -> tuple[list[Any], Tensor]:
            lse = self.lse()
            return [operations.cells(problem, reads.place_of(problem, rows, columns), self.plan, lse, form)], lse

        statistic = reads.Cells(rows, columns, logits)
        cells: Tensor = operations.record(problem, [statistic], self.plan, compute)[0][0]
        if logits:
            self.gradient.mark_incomplete("log-weights were read")
        else:
            self.gradient.add_cells(rows, columns, cells)
        return cells

    def defined_cells(self, rows: Tensor) -> Tensor:
        # Some whole rows by the definition in float64, for `AttentionMatrix.check`.
        there = self if has_float64(self.device) else self.moved(torch.device("cpu"), None) or self
        _, own_lse, weights = operations.defined(there.problem, rows)
        if self.problem.partial:  # the definition normalizes rows over the keys of the part alone
            weights = weights * share_of(own_lse, there.lse()[:, :, rows]).unsqueeze(-1)
        return weights

    # ----------------------------------------------------------------------------------------------------- statistics

    @public("A.collect()")
    def collect(self, statistics: Sequence[Statistic]) -> list[Any]:
        # Tiles that a mask hides are skipped, unless a statistic has to see them.
        self.problem.check_unchanged()
        self.check_numbers()
        self.check_statistics(statistics)
        for statistic in statistics:
            if self.mask is not None and not statistic.may_skip_tiles(self.problem):
                problem = replace(self.problem, mask=_NoTileSkipped(self.mask))
                return self.derived(problem, self.lse())._results_of_statistics(statistics)
        return self._results_of_statistics(statistics)

    def _results_of_statistics(self, statistics: Sequence[Statistic]) -> list[Any]:
        """Return the results of statistics: those kept with the last product, others recorded or computed as needed."""
        announced = (
            self._announced_results.keys() & set(statistics) if self._announced_results and not self.needs_graph else ()
        )
        if announced:  # their results came with the product: the others are collected alone
            kept = {s: self._announced_results.pop(s) for s in announced}
            others = [s for s in statistics if s not in kept]
            kept |= zip(others, self._results_of_statistics(others) if others else (), strict=True)
            return [kept[s] for s in statistics]
        problem = self.problem
        values = [s.v for s in statistics if s.v is not None]
        values_need_graph = bool(values) and torch.is_grad_enabled() and any(v.requires_grad for v in values)
        if not (values_need_graph or problem.needs_graph):
            # Off the CPU, to know whether the log-sum-exp is precise the program waits: only where it is of use.
            asks = self.device.type == "cpu" or _needs_known_lse(problem, self.plan)
            lse = self._lse
            # On a CPU one that torch's kernel has rounded stays so where the kernels of statistics need none.
            if lse is None or lse.device.type != "cpu" or problem.partial or problem.q.dtype.itemsize != 4:
                lse = self.known_lse if asks else None
            found, self._lse = operations.collect(problem, statistics, self.plan, lse)
            return found
        if problem.is_symbolic:
            return compiled.statistics(problem, statistics, self.plan)
        recorded = [s for s in statistics if s.differentiable]
        others = [s for s in statistics if not s.differentiable]
        results: dict[Statistic, Any] = {}
        if recorded:
            self.gradient.mark_incomplete("statistics were collected")
            results |= zip(recorded, self._statistics_with_graph(recorded), strict=True)
        if others:
            computed, self._lse = operations.collect(problem, others, self.plan, self.known_lse)
            results |= zip(others, computed, strict=True)
        return [results[s] for s in statistics]

    @public("A.sum()")
    def sums(self, *, over_keys: bool) -> Tensor:
        """Return the sum of each row, or of each column, with a graph that ``A.grad`` counts as that of a product."""
        self.problem.check_unchanged()
        out: Tensor = self._statistics_with_graph([rows.RowMass() if over_keys else columns.ColumnMass()])[0].unsqueeze(
            -1
        )
        if out.requires_grad and not tracing():
            ones = out.new_ones(1, 1, self.shape[3 if over_keys else 2], 1)
            self.gradient.add_product(out, ones, transposed=not over_keys)
        return out

    @public("A.collect()")
    def _statistics_with_graph(self, statistics: Sequence[Statistic]) -> list[Any]:
        """Return the results of statistics, with a graph for their gradients."""
        if self.is_symbolic:
            return compiled.statistics(self.problem, statistics, self.plan)

        def compute() -> tuple[list[Any], Tensor]:
            """Return the results, and the log-sum-exp, in a pass of its own if the statistics did not need it."""
            results, lse = operations.collect(self.problem, statistics, self.plan, self.known_lse)
            return results, operations.log_sum_exp(self.problem, self.plan) if lse is None else lse

        results, self._lse = operations.record(self.problem, statistics, self.plan, compute)
        return results

    # ---------------------------------------------------------------------------------------------- parts and copies

    def derived(self, problem: Problem, lse: Tensor | None = None) -> SoftmaxWeights:
        """Return the weights of a part or copy of this problem; reads of it with a graph make `gradient` incomplete."""
        return self.replaced(problem, lse, self.gradient if self.requires_grad else None)

    def replaced(
        self, problem: Problem, lse: Tensor | None = None, whole: WeightGradient | None = None
    ) -> SoftmaxWeights:
        """Return the weights of another problem by the same plan.

        `whole` is the gradient of a matrix of which it is a part.
        """
        return SoftmaxWeights(problem, self.plan, lse, whole, are_shares=self.are_shares)

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> SoftmaxWeights:
        # A known log-sum-exp goes with the batches and heads that are chosen.
        some = self
        if batches is not None or heads is not None:
            batches, heads = (slice(None) if index is None else index for index in (batches, heads))
            lse = self.known_lse
            if lse is not None:
                here = heads if isinstance(heads, slice) else to_device(heads, lse.device)
                lse = lse[batches][:, here]
            some = self.derived(self.problem.select(batches, heads), lse)
        if rows is None and columns is None:
            return some
        m, n = self.shape[2:]
        return some.window(range(m) if rows is None else rows, range(n) if columns is None else columns)

    @public("A.window()")
    def window(self, rows: range, columns: range, lse: Tensor | None = None) -> SoftmaxWeights:
        """Return some rows and columns; `lse` is that of these rows, shape (batch, heads, len(rows)), if known."""
        self.problem.check_unchanged()
        m, n = self.shape[2:]
        if len(rows) == m and len(columns) == n:
            return self
        if lse is None and self.known_lse is not None:
            lse = self.known_lse[:, :, rows.start : rows.stop]
        problem = self.problem
        if len(columns) < n:
            # The log-sum-exp counts keys that the window does not have: a gradient could not reach those.
            if lse is None:
                whole_rows = self.window(rows, range(n))
                lse = whole_rows.recorded_lse().detach() if self.is_symbolic else whole_rows.lse()
            problem = self.detach().problem
        elif problem.needs_graph:
            self.gradient.mark_incomplete("a window was taken")
        return self.replaced(cut_out(problem, rows, columns), lse)

    def detach(self) -> SoftmaxWeights:
        # The same weights without a graph; a known log-sum-exp stays known.
        problem = self.problem
        if not problem.requires_grad:
            return self
        sink = None if problem.sink is None else problem.sink.detach()
        problem = replace(problem, q=problem.q.detach(), k=problem.k.detach(), sink=sink, detached=True)
        return self.replaced(problem, self.known_lse)

    def full_precision(self) -> SoftmaxWeights:
        # The same weights of tokens that are cast to the dtype of the computation; itself where they have it.
        problem = self.problem
        if problem.q.dtype is problem.dtype:
            return self
        problem = replace(problem, q=problem.q.to(problem.dtype), k=problem.k.to(problem.dtype))
        return self.derived(problem, self.known_lse)

    @public("A.to()")
    def moved(self, device: torch.device, dtype: torch.dtype | None) -> SoftmaxWeights | None:
        # The same weights on another device or in another dtype; None where they would not be lazy.
        problem = self.problem
        learned = any(True for _ in problem.score.parameters())  # parameters have a dtype of their own
        if dtype is not None and (learned or dtype not in (torch.float32, torch.float64)):
            return None
        self.problem.check_unchanged()
        # The log-sum-exp of a part counts keys outside of the part, so that it cannot be computed again.
        lse = self.lse() if problem.partial else None
        score = problem.score if device == self.device else copy.deepcopy(problem.score).to(device)
        sink = None if problem.sink is None else problem.sink.to(device, dtype)
        q, k = problem.q.to(device, dtype), problem.k.to(device, dtype)
        # Masks and positions bring their tensors along when they are asked.
        return self.derived(replace(problem, q=q, k=k, score=score, sink=sink, versions=()), lse)


def _needs_known_lse(problem: Problem, plan: Plan) -> bool:
    """Return whether statistics on a device other than the CPU are faster with a log-sum-exp that is known.

    They are not where a tile holds whole rows, whose log-sum-exp comes with their weights. Then nobody has to ask the
    device whether a known one is precise enough.
    """
    return problem.partial or sizes(problem, plan, whole_rows=False, wide=True).columns < problem.shape[3]


class _NoTileSkipped(Mask):
    """The same mask without `coverage`, so that a pass also visits tiles in which it hides every cell."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def allows(self, at: Tile) -> Tensor:
        """Return what the wrapped mask allows."""
        return self.mask.allows(at)


def cut_out(problem: Problem, rows: range, columns: range) -> Problem:
    """Return some queries and keys of a problem; if keys are left out, the result needs the whole rows' log-sum-exp."""
    m, n = problem.shape[2:]
    old = rows, columns, m, n
    mask = None if problem.mask is None else translated_mask(problem.mask, *old)
    whole = len(columns) == n
    return replace(
        problem,
        q=problem.q[:, :, rows.start : rows.stop],
        k=problem.k[:, :, columns.start : columns.stop],
        mask=mask,
        score=translated_score(problem.score, *old),
        sink=problem.sink if whole else None,  # it is part of the log-sum-exp
        partial=problem.partial or not whole,
    )
