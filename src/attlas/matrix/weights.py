"""A softmax matrix that is not stored: its log-sum-exp, cells, products and statistics, by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from attlas.engine import operations
from attlas.engine.autodiff import graph
from attlas.engine.backends import tiled
from attlas.engine.dropout import Dropout
from attlas.engine.online import exact, share_of
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.engine.statistic import Statistic
from attlas.errors import BackendError
from attlas.foundation.autocast import cast_values
from attlas.foundation.checks import check_values, tracing
from attlas.foundation.compat import cached_property, transforming
from attlas.foundation.indexing import Axes, Where
from attlas.matrix import observers, reads
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.protocol import LazyTensor, check_are_statistics, check_size


class SoftmaxMatrix(LazyTensor):
    """The core of `AttentionMatrix`: its log-sum-exp, products, cells and statistics, computed by the engine.

    Modules that compute from a matrix and that `AttentionMatrix` itself imports, such as reductions, know this class.

    Parameters
    ----------
    problem : Problem
        What is computed: tokens, score, mask, sink.
    plan : Plan
        How it is computed.
    axes : Axes, optional
        The leading axes that users see; by default those of the problem, batch and heads.
    lse : Tensor, shape (batch, heads, m), optional
        Log-sum-exp of each row, where it is known.

    Attributes
    ----------
    layer : int or None
        Number of the layer of transformers that computed it; None where there is none, or it has no number.
    """

    layer: int | None = None
    _parent_gradient: WeightGradient | None = None

    def __init__(self, problem: Problem, plan: Plan, axes: Axes | None = None, lse: Tensor | None = None) -> None:
        self.problem = problem
        self.plan = plan
        self._axes = Axes(problem.shape[:2], (True, True)) if axes is None else axes
        self._stored_lse = lse

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # computed here, stored elsewhere
        """Shape of the matrix, (..., m, n)."""
        return torch.Size((*self._axes.shape, *self.problem.shape[2:]))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # computed here, stored elsewhere
        """Dtype of the numbers that reads give: float32, or float64 for float64 tokens."""
        return self.problem.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # computed here, stored elsewhere
        """Device of the tokens, where everything is computed."""
        return self.problem.device

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not collect the gradients of products of the original.
        return {name: value for name, value in vars(self).items() if name not in ("_gradient", "_parent_gradient")}

    @cached_property
    def _gradient(self) -> WeightGradient:
        return WeightGradient(self._parent_gradient)

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor that the matrix depends on records a graph: q, k, the sink, or one of the score."""
        return any(t.requires_grad for t in self.problem.leaves)

    @property
    def needs_graph(self) -> bool:
        """Whether reads of this matrix must record a graph for a gradient."""
        return self.problem.needs_graph

    def checked_problem(self, where: str) -> Problem:
        """Return the problem of this matrix; raise a ModifiedError if its tensors were changed in place."""
        self.problem.check_unchanged(where)
        return self.problem

    def _concrete_problem(self, where: str) -> Problem:
        """Return the problem; raise a BackendError where its tensors hold no numbers, as on the meta device."""
        problem = self.checked_problem(where)
        if problem.has_numbers:
            return problem
        found = f"tensors of {problem.device}, {type(problem.q).__name__}"
        rule = "it needs tensors with numbers."
        fix = "move the tokens to a device with memory for numbers; A @ v works there."
        if problem.device.type != "meta":  # those of a program that is being written
            rule = "it needs tensors with numbers, and torch.export runs a program on tensors without."
            fix = "compute it from A.to_dense() inside of the program, or outside of it; A @ v is exported as it is."
        raise BackendError(where, rule, found=found, fix=fix)

    def detach(self) -> Self:
        """Return the same matrix without a graph."""
        if not self.requires_grad:
            return self
        problem = self.problem
        sink = None if problem.sink is None else problem.sink.detach()
        problem = replace(problem, q=problem.q.detach(), k=problem.k.detach(), sink=sink, detached=True)
        return self._of_same_layer(self._with_problem(problem, self._axes, self._lse))

    def _exact_lse(self) -> Tensor:
        """Return the log-sum-exp in float64, shape (batch, heads, m); where `_lse` is None, compute and store it."""
        lse = self._lse
        if lse is None:
            lse = self._stored_lse = operations.log_sum_exp(self.checked_problem("A.lse"), self.plan)
        return lse

    @property
    def _lse(self) -> Tensor | None:
        """The stored log-sum-exp in float64, shape (batch, heads, m); None without one precise enough for weights."""
        lse = self._stored_lse
        if lse is None or lse.dtype is torch.float64:
            return lse
        if self.problem.partial:  # it counts keys outside of this window, so that it cannot be computed again
            self._stored_lse = lse.double()
        elif self.problem.q.dtype.itemsize < 4:  # torch's kernel returns only 16 bits of it
            self._stored_lse = None
        else:
            self._stored_lse = exact(lse)
        return self._stored_lse

    def __matmul__(self, v: Tensor | LazyTensor) -> Tensor:
        if isinstance(v, LazyTensor):
            return self.full_precision()._multiply(v.to_dense(), None)
        return self._multiply(v, None)

    def full_precision(self) -> Self:
        """Return the same matrix of tokens in the dtype of the weights, so that it is multiplied with weights."""
        problem = self.problem
        if problem.q.dtype is problem.dtype:
            return self
        problem = replace(problem, q=problem.q.to(problem.dtype), k=problem.k.to(problem.dtype))
        return self._derived(problem, self._axes, self._lse)

    def _multiply(self, v: Tensor, dropout: Dropout | None) -> Tensor:
        """Return the product with values, of any axes that fit, as recordings hear and interventions change it."""
        vector = isinstance(v, Tensor) and v.ndim == 1
        problem = self.checked_problem("A @ v")
        v, dtype = cast_values(v, problem.k)
        values = check_values("A @ v", v.unsqueeze(-1) if vector else v, problem.k, self._axes, problem.shape[1])
        if observers.active:
            out = observers.product(self, values, dropout)
        else:
            out = self._pooled_values(values, dropout)
        out = self._axes.restore(out if dtype is None else out.to(dtype))
        return out.squeeze(-1) if vector else out

    def _pooled_values(self, values: Tensor, dropout: Dropout | None) -> Tensor:
        """Return the product with values; the log-sum-exp that it gives is stored for later reads.

        Parameters
        ----------
        values : Tensor, shape (batch, value heads, n, e)
            The values.
        dropout : Dropout, optional
            Which weights are dropped.

        Returns
        -------
        Tensor, shape (batch, heads, m, e)
        """
        problem = self.problem
        out, lse = operations.multiply(problem, values, self.plan, dropout)
        if problem.partial:  # backends normalize rows over the keys of the window alone
            window_lse = None if lse is None else exact(lse)
            window_lse = operations.log_sum_exp(problem, self.plan) if window_lse is None else window_lse
            out = (out * share_of(window_lse, self._exact_lse()).unsqueeze(-1)).to(out.dtype)
        if self._stored_lse is None:
            self._stored_lse = lse
        if out.requires_grad and not tracing():
            keep = None if dropout is None else partial(dropout.keep, problem.tile(*map(range, problem.shape)))
            self._gradient.add_product(out, values, keep=keep)
        return out

    def _select(self, where: Where) -> Self:
        """Return the lazy matrix of the batches and heads of an index."""
        if where.leading is None:
            return self
        batches, heads, axes = where.leading
        lse = None if self._lse is None else self._lse[batches][:, heads]
        return self._derived(self.problem.select(batches, heads), axes, lse)

    def _with_problem(self, problem: Problem, axes: Axes, lse: Tensor | None) -> Self:
        """Return the matrix of another problem, computed by the same plan."""
        raise NotImplementedError

    def _derived(self, problem: Problem, axes: Axes, lse: Tensor | None = None) -> Self:
        """Return a matrix of a part or copy of this problem; its reads with a graph make `grad` of this incomplete."""
        derived = self._with_problem(problem, axes, lse)
        if self.requires_grad:
            derived._parent_gradient = self._gradient
        return self._of_same_layer(derived)

    def _of_same_layer(self, derived: Self) -> Self:
        """Return a part or copy of this matrix with the number of its layer."""
        derived.layer = self.layer
        return derived

    def _read(self, where: Where, *, before_softmax: bool = False) -> Tensor:
        """Return cells of the matrix as a Tensor; an int for rows or columns drops that axis."""
        row, column = where.rows, where.columns
        row_index = range(row, row + 1) if isinstance(row, int) else row
        column_index = range(column, column + 1) if isinstance(column, int) else column
        if where.pairs and isinstance(row, Tensor) and isinstance(column, Tensor):
            chunks = [
                torch.diagonal(self._cells(r, c, before_softmax), dim1=-2, dim2=-1)
                for r, c in zip(row.split(64), column.split(64), strict=True)
            ]
            return self._axes.restore(torch.cat(chunks, dim=-1))
        return where.squeezed(self._axes.restore(self._cells(row_index, column_index, before_softmax)))

    def _cells(self, rows: range | Tensor, columns: range | Tensor, before_softmax: bool = False) -> Tensor:
        """Return cells, shape (batch, heads, len(rows), len(columns)), with a graph where one is needed."""
        problem = self.checked_problem("A[...]")
        if not problem.needs_graph:
            return tiled.read(problem, self.plan, rows, columns, lse=self._lse, before_softmax=before_softmax)
        if problem.is_symbolic:
            dense = graph.dense("A[...]", problem, rows)
            whole = dense.logits if before_softmax else dense.weights
            return whole[..., columns.start : columns.stop] if isinstance(columns, range) else whole[..., columns]

        def compute() -> tuple[list[Any], Tensor]:
            lse = self._exact_lse()
            return [tiled.read(problem, self.plan, rows, columns, lse=lse, before_softmax=before_softmax)], lse

        statistic = reads.Cells(rows, columns, before_softmax)
        cells: Tensor = operations.record(problem, [statistic], self.plan, compute)[0][0]
        if before_softmax:
            self._gradient.mark_incomplete("log-weights were read")
        else:
            self._gradient.add_cells(rows, columns, cells)
        return cells

    def to_dense(self, limit: int | None = graph.DENSE_LIMIT) -> Tensor:
        """Return the whole matrix as a Tensor.

        Parameters
        ----------
        limit : int, optional
            Bytes above which it is refused, by default 1 GiB; None for no limit.

        Returns
        -------
        Tensor, shape (..., m, n)

        Raises
        ------
        TooLargeError
            If the tensor would take more than `limit` bytes.
        """
        return self._dense(limit, before_softmax=False)

    def _dense(self, limit: int | None, *, before_softmax: bool) -> Tensor:
        name = "A.logits" if before_softmax else "A"
        fix = f"read a part, {name}[..., :64, :], A.topk(8) or stats.picture(A, 512, 512), or pass limit=None."
        check_size(f"{name}.to_dense()", [self], self.numel() * self.dtype.itemsize, limit, fix)
        m, n = self.problem.shape[2:]
        return self._read(Where(None, range(m), range(n), False), before_softmax=before_softmax)

    def collect(self, *statistics: Statistic) -> tuple[Any, ...]:
        """Compute several statistics in one pass over the matrix.

        Parameters
        ----------
        *statistics : Statistic
            Statistics of `attlas.stats`, or your own.

        Returns
        -------
        tuple
            One result for each, in order; a tuple of one for a single statistic.

        Raises
        ------
        DtypeError
            If an argument is no Statistic.
        ShapeError
            If a statistic does not fit the sizes of the matrix.

        Notes
        -----
        Cost: one product of queries and keys, and what each statistic adds. Memory: a few tiles.

        Examples
        --------
        >>> import torch, attlas
        >>> from attlas import stats
        >>> A = attlas.attend(torch.randn(100, 8), torch.randn(100, 8), mask=attlas.Causal())
        >>> (entropy,) = A.collect(stats.Entropy())  # always a tuple; stats.entropy(A) is short for this
        >>> entropy, mass = A.collect(stats.Entropy(), stats.ColumnMass())  # one pass for both
        >>> entropy.shape, mass.shape
        (torch.Size([100]), torch.Size([100]))
        """
        check_are_statistics("collect()", statistics)
        problem = self._concrete_problem("A.collect()")
        values_need_graph = torch.is_grad_enabled() and any(s.v is not None and s.v.requires_grad for s in statistics)
        recorded = [s for s in statistics if s.differentiable] if problem.needs_graph or values_need_graph else []
        others = [s for s in statistics if s not in recorded]
        results: dict[Statistic, Any] = {}
        if recorded:
            self._gradient.mark_incomplete("statistics were collected")
            results |= zip(recorded, self._record(problem, recorded), strict=True)
        if others:
            computed, self._stored_lse = operations.collect(problem, others, self.plan, self._lse)
            results |= zip(others, computed, strict=True)
        return tuple(self._axes.restore_all(results[s]) for s in statistics)

    def _record(self, problem: Problem, statistics: Sequence[Statistic]) -> list[Any]:
        """Return the results of statistics, with a graph for their gradients."""
        if problem.is_symbolic or transforming():
            return graph.collect("A.collect()", problem, statistics)

        def compute() -> tuple[list[Any], Tensor]:
            results, lse = operations.collect(problem, statistics, self.plan, self._lse)
            return results, operations.log_sum_exp(problem, self.plan) if lse is None else lse

        results, self._stored_lse = operations.record(problem, statistics, self.plan, compute)
        return results
