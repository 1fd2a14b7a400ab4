"""The lazy attention matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine import choose, reference, tiled
from attlas.engine.dropout import Dropout
from attlas.engine.fold import Statistic
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.errors import DtypeError, ShapeError, TooLargeError, explain, kind
from attlas.indexing import Axes, Where, parse
from attlas.inputs import check_values
from attlas.stats import largest
from attlas.tensorlike import Dim, TensorLike, reduced
from attlas.views import DENSE_LIMIT, LogitMatrix, TransposedMatrix

__all__ = ["AttentionMatrix"]


class AttentionMatrix(TensorLike):
    """softmax(score(Q, K)) as a lazy matrix: exact, never stored. Made by `attend`.

    It behaves like the tensor of shape (..., m, n) that it stands for. The last two axes indexed give a
    Tensor; leading axes indexed alone give a smaller lazy matrix; ``A @ v`` pools values at the speed of a
    fused kernel and is differentiable. Everything else is a read: exact, in linear memory, and without an
    autograd graph.

    Attributes
    ----------
    problem : Problem
        What is computed: tokens, score, mask, sink.
    plan : Plan
        How it is computed.

    See Also
    --------
    attend : makes one.
    attlas.stats : numbers from a matrix.

    Notes
    -----
    Numbers are float32 for float16, bfloat16 and float32 tokens, float64 for float64 tokens. The
    log-sum-exp is kept once it is known, m numbers a head.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.randn(4, 100, 8), torch.randn(4, 300, 8))
    >>> A.shape, A[0].shape, A[0, 5:9, :10].shape
    (torch.Size([4, 100, 300]), torch.Size([100, 300]), torch.Size([4, 10]))
    >>> bool(torch.allclose(A.sum(-1), torch.ones(4, 100)))
    True
    """

    def __init__(self, problem: Problem, plan: Plan, axes: Axes, lse: Tensor | None = None) -> None:
        self.problem = problem
        self.plan = plan
        self._axes = axes
        self._lse = lse

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, (..., m, n)."""
        return torch.Size((*self._axes.shape, *self.problem.shape[2:]))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._axes.shape) + 2

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers that reads give: float32, or float64 for float64 tokens."""
        return self.problem.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tokens, where everything is computed."""
        return self.problem.device

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        mask = "" if self.problem.mask is None else f", mask={self.problem.mask.name()}"
        sink = "" if self.problem.sink is None else ", sink"
        score = self.problem.score
        return f"AttentionMatrix(shape={tuple(self.shape)}, {self.dtype}, score={type(score).__name__}{mask}{sink})"

    def __matmul__(self, v: Tensor | AttentionMatrix) -> Tensor:
        return self._multiply(v.to_dense() if isinstance(v, AttentionMatrix) else v, None)

    def detach(self) -> AttentionMatrix:
        """Return the same matrix without the graph of its tokens, so that keeping it keeps no graph alive."""
        problem = self.problem
        if not (problem.q.requires_grad or problem.k.requires_grad):
            return self
        sink = None if problem.sink is None else problem.sink.detach()
        problem = replace(problem, q=problem.q.detach(), k=problem.k.detach(), sink=sink)
        return AttentionMatrix(problem, self.plan, self._axes, self._lse)

    def _multiply(self, v: Tensor, dropout: Dropout | None) -> Tensor:
        vector = isinstance(v, Tensor) and v.ndim == 1
        values = check_values(
            "A @ v", v.unsqueeze(-1) if vector else v, self.problem.k, self._axes, self.problem.shape[1]
        )
        out, lse = choose.multiply(self.problem, values, self.plan, dropout)
        if self._lse is None and lse is not None:
            self._lse = lse
        out = self._axes.restore(out)
        return out.squeeze(-1) if vector else out

    @property
    def mT(self) -> TransposedMatrix:
        """The transposed matrix, lazy too: ``A.mT @ x`` gathers what each key gives to the queries."""
        return TransposedMatrix(self)

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of each row of logits, shape (..., m); -inf for a row with no allowed key."""
        return self._axes.restore(self._known_lse())

    def _known_lse(self) -> Tensor:
        if self._lse is None:
            self._lse = choose.log_sum_exp(self.problem, self.plan)
        return self._lse

    @property
    def logits(self) -> LogitMatrix:
        """The same matrix before softmax: log-weights, -inf where masked."""
        return LogitMatrix(self)

    def __getitem__(self, key: Any) -> Any:
        where = parse(key, self._axes, *self.problem.shape[2:])
        part = self._select(where)
        return part if where.rows is None else part._read(where, before_softmax=False)

    def _select(self, where: Where) -> AttentionMatrix:
        """Return the lazy matrix of the batches and heads that an index names."""
        if where.leading is None:
            return self
        batches, heads, axes = where.leading
        lse = None if self._lse is None else self._lse[batches][:, heads]
        return AttentionMatrix(self.problem.select(batches, heads), self.plan, axes, lse)

    @torch.no_grad()
    def _read(self, where: Where, *, before_softmax: bool) -> Tensor:
        """Return cells as a Tensor; an int for rows or columns drops that axis."""
        row, column = where.rows, where.columns
        row_index = range(row, row + 1) if isinstance(row, int) else row
        column_index = range(column, column + 1) if isinstance(column, int) else column
        if where.pairs and isinstance(row, Tensor) and isinstance(column, Tensor):
            chunks = [
                torch.diagonal(self._cells(r, c, before_softmax), dim1=-2, dim2=-1)
                for r, c in zip(row.split(64), column.split(64), strict=True)
            ]
            return self._axes.restore(torch.cat(chunks, dim=-1))
        out = self._axes.restore(self._cells(row_index, column_index, before_softmax))
        out = out.squeeze(-2) if isinstance(row, int) else out
        return out.squeeze(-1) if isinstance(column, int) else out

    def _cells(self, rows: range | Tensor, columns: range | Tensor, before_softmax: bool) -> Tensor:
        return tiled.read(self.problem, self.plan, rows, columns, lse=self._lse, before_softmax=before_softmax)

    @torch.no_grad()
    def collect(self, *statistics: Statistic) -> tuple[Any, ...]:
        """Compute several statistics in one pass over the matrix.

        Parameters
        ----------
        *statistics : Statistic
            Statistics of `attlas.stats`, or your own.

        Returns
        -------
        tuple
            One result for each, in order.

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
        >>> entropy, mass = A.collect(stats.Entropy(), stats.ColumnMass())
        >>> entropy.shape, mass.shape
        (torch.Size([100]), torch.Size([100]))
        """
        for statistic in statistics:
            if not isinstance(statistic, Statistic):
                raise DtypeError(
                    explain(
                        "collect()",
                        "every argument must be a Statistic, an object and not its class.",
                        {"statistic": statistic.__name__ if isinstance(statistic, type) else repr(statistic)},
                        found=kind(statistic),
                        fix=f"A.collect({statistic.__name__}())"
                        if isinstance(statistic, type)
                        else "A.collect(stats.Entropy(), stats.TopK(8))",
                    )
                )
        results, self._lse = choose.fold(self.problem, statistics, self.plan, self._lse)
        return tuple(_each(result, self._axes.restore) for result in results)

    def sum(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Sum over axes: -1 is the mass of a row (1, or less with a sink), -2 that of a key's column.

        Parameters
        ----------
        dim : int or tuple of int, optional
            -1 (keys), -2 (queries), a leading axis (heads, batch), or several; the default is all.
        keepdim : bool, default False
            Whether the axes are kept with size 1.

        Returns
        -------
        Tensor, shape of the matrix without the axes

        Raises
        ------
        ShapeError
            If `dim` is no axis.
        TooLargeError
            If only leading axes are summed, and the matrix that is left takes more than 1 GiB.

        Notes
        -----
        Cost: one pass; the memory of the result and a few tiles.
        """
        return reduced(self, "sum", dim, keepdim)

    def mean(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Mean over axes, masked cells counted as 0, as the dense tensor would.

        Parameters and errors are those of `sum`.
        """
        return reduced(self, "mean", dim, keepdim)

    def amax(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Largest weight over axes: of each row (dim -1), of each column (dim -2), over heads.

        Parameters and errors are those of `sum`.
        """
        return reduced(self, "amax", dim, keepdim)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Place of the largest weight of each row (dim -1) or of each column (dim -2).

        Parameters and errors are those of `sum`; other axes are those of the dense tensor, and refused above 1 GiB.
        """
        return reduced(self, "argmax", dim, keepdim)

    def topk(self, k: int) -> largest.Largest:
        """Return the k largest weights of each row and their keys, exact, in descending order.

        Parameters
        ----------
        k : int
            How many, at most n.

        Returns
        -------
        values, indices : Tensor, shape (..., m, k)

        Raises
        ------
        ShapeError
            If `k` is not between 1 and n.

        Notes
        -----
        Cost: one pass; no row is sorted.
        """
        found: largest.Largest = self.collect(largest.TopK(k))[0]
        return found

    def to_dense(self, limit: int | None = DENSE_LIMIT) -> Tensor:
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
        size = self.shape.numel() * self.dtype.itemsize
        if limit is not None and size > limit:
            name = "A.logits" if before_softmax else "A"
            raise TooLargeError(
                explain(
                    f"{name}.to_dense()",
                    "the whole matrix would be larger than the limit.",
                    {"A": f"shape {tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"},
                    found=f"{size:,} bytes, the limit is {limit:,}",
                    fix=f"read a part, {name}[..., :64, :], take A.topk(8) or stats.picture(A, 512, 512); "
                    "limit=None insists.",
                )
            )
        m, n = self.problem.shape[2:]
        return self._read(Where(None, range(m), range(n), False), before_softmax=before_softmax)

    @torch.no_grad()
    def check(self, rows: int = 64) -> float:
        """Compare sampled rows with the definition in float64 and return the largest error of a weight.

        Parameters
        ----------
        rows : int, default 64
            How many rows of each head are drawn; the same ones each time.

        Returns
        -------
        float
            Largest absolute difference; about 1e-6 in float32.

        Raises
        ------
        ShapeError
            If `rows` is below 1.

        Notes
        -----
        Cost: ``rows * n`` float64 scores a head, whole in memory.
        """
        if not isinstance(rows, int) or rows < 1:
            rule = "rows must be a whole number above 0."
            raise ShapeError(explain("A.check()", rule, found=f"rows = {rows!r}", fix="A.check(rows=64)"))
        batch, heads, m, n = self.problem.shape
        if 0 in (batch, heads, m, n):
            return 0.0
        sample = torch.randperm(m, generator=torch.Generator().manual_seed(0), device="cpu")[:rows].sort().values
        fast = self._cells(sample, range(n), before_softmax=False)
        exact = reference.dense(reference.in_float64(self.problem), sample).weights
        return float((fast.double() - exact).abs().max())

    def plot(self, **options: Any) -> Any:
        """Draw the matrix, or each head of it; see `attlas.pictures.plot` for the options.

        Returns
        -------
        matplotlib.figure.Figure
        """
        from attlas.pictures import plot  # drawing needs matplotlib, which reading does not

        return plot(self, **options)

    def view(self, *shape: Any, **options: Any) -> Any:
        """Open the viewer: in a notebook in the output of the cell, elsewhere in the browser.

        See `attlas.view.show` for the options. With a shape, ``A.view(2, -1)``, it is `torch.Tensor.view` of the
        written-out matrix, as code for attention tensors calls it.

        Returns
        -------
        attlas.view.widget.Viewer, None or Tensor
        """
        if shape:
            return self.to_dense().view(*shape)
        from attlas.view import show

        return show(self, **options)

    def _repr_html_(self) -> str:
        from attlas.view import preview

        return preview(self)


def _each(result: Any, restore: Callable[[Tensor], Tensor]) -> Any:
    """Give a result, a tensor or a (named) tuple of tensors, the leading axes of the matrix."""
    if isinstance(result, Tensor):
        return restore(result)
    parts = [_each(part, restore) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
