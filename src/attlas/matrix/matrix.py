"""The lazy attention matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

import attlas
from attlas.engine import operations
from attlas.engine.autodiff import graph
from attlas.engine.backends import reference
from attlas.engine.online import share_of
from attlas.engine.problem import Problem
from attlas.foundation.checks import whole_number
from attlas.foundation.indexing import Axes, parse
from attlas.masks import Mask
from attlas.matrix import reads
from attlas.matrix.protocol import check_size, like_tensors
from attlas.matrix.reductions import Dim, axis_of, reduced
from attlas.matrix.shapes import TensorLike
from attlas.matrix.views import LogitMatrix, TransposedMatrix
from attlas.matrix.windows import spans_of, window_of
from attlas.scores import Score
from attlas.stats.largest import TopK
from attlas.stats.spans import Span


class AttentionMatrix(TensorLike):
    """softmax(score(Q, K)) as a lazy matrix: exact, and never stored. Made by `attend`.

    It behaves like the tensor of shape (..., m, n) that it stands for. Indexing rows or columns gives a Tensor;
    indexing only leading axes gives a smaller lazy matrix; ``A @ v`` pools values at the speed of a
    fused kernel and is differentiable. Everything else is a read: exact and in linear memory. Where a gradient is
    recorded and a tensor of the matrix requires it, reads carry it, at any length.

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
    log-sum-exp is kept once it is known, m numbers per head. If a tensor is changed in place after `attend`, every
    later read raises a ModifiedError.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.randn(4, 100, 8), torch.randn(4, 300, 8))
    >>> A.shape, A[0].shape, A[0, 5:9, :10].shape
    (torch.Size([4, 100, 300]), torch.Size([100, 300]), torch.Size([4, 10]))
    >>> bool(torch.allclose(A.sum(-1), torch.ones(4, 100)))
    True
    """

    def _with_problem(self, problem: Problem, axes: Axes, lse: Tensor | None) -> Any:
        return AttentionMatrix(problem, self.plan, axes, lse)

    def __repr__(self) -> str:
        mask = "" if self.problem.mask is None else f", mask={self.problem.mask.name()}"
        sink = "" if self.problem.sink is None else ", sink"
        score = self.problem.score
        return f"AttentionMatrix(shape={tuple(self.shape)}, {self.dtype}, score={type(score).__name__}{mask}{sink})"

    def __rmatmul__(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dtype is not self.problem.q.dtype or x.ndim > self.ndim:
            return self._call("__rmatmul__", x)
        return self.mT @ x if x.ndim == 1 else (self.mT @ x.mT).mT

    @property
    def q(self) -> Tensor:
        """Queries, shape (..., m, d), with the leading axes of the matrix."""
        return self._axes.restore(self.problem.q)

    @property
    def k(self) -> Tensor:
        """Keys, shape (..., n, dk), with the leading axes of the matrix; grouped heads are those of the keys."""
        k, axes = self.problem.k, self._axes
        grouped = (*axes.layout[:-1], k.shape[1]) if len(axes.layout) > 1 else axes.layout
        return replace(axes, layout=grouped).restore(k)

    score: Score = property(attrgetter("problem.score"), doc="How alike queries and keys are.")  # type: ignore[assignment]
    mask: Mask | None = property(attrgetter("problem.mask"), doc="Which pairs may attend; None allows all.")  # type: ignore[assignment]
    sink: Tensor | None = property(attrgetter("problem.sink"), doc="One more logit per head, shape (heads,), or None.")  # type: ignore[assignment]

    @property
    def mT(self) -> TransposedMatrix:
        """The transposed matrix, lazy too: ``A.mT @ x`` sums over queries, one row per key."""
        return TransposedMatrix(self)

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of each row of logits, shape (..., m); -inf for a row with no allowed key."""
        problem = self.checked_problem("A.lse")
        if problem.is_symbolic:
            lse = graph.dense("A.lse", problem).lse
        elif problem.needs_graph:
            self._gradient.mark_incomplete("the log-sum-exp was read")
            exact_lse = self._exact_lse()
            result = [exact_lse.clone()], exact_lse
            (lse,), _ = operations.record(problem, [reads.LogSumExp()], self.plan, lambda: result)
        else:
            lse = self._exact_lse()
        return self._axes.restore(lse.to(self.dtype))

    def retain_grad(self) -> None:
        """Keep the gradient of the weights when it flows back, for `grad`, as `torch.Tensor.retain_grad` does.

        Raises
        ------
        GradientError
            If something with a gradient was read that is no product of the weights, so that `grad` would lack it.

        Notes
        -----
        Under dropout the gradient is that of the weights as the matrix has them, before weights are dropped: the
        gradient of a weight that was dropped is 0. Eager attention returns the weights after dropout and their
        gradient; the product of weight and gradient is the same.

        Memory: the values and the gradient of each product. The matrix of gradients is written out by `grad` alone.

        Examples
        --------
        >>> import torch, attlas
        >>> q, k, v = (torch.randn(5, 4, requires_grad=True) for _ in range(3))
        >>> A = attlas.attend(q, k)
        >>> A.retain_grad()
        >>> (A @ v).sum().backward()
        >>> bool(torch.allclose(A.grad, v.sum(-1).expand(5, 5)))
        True
        """
        self._gradient.retain()

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the weights after ``retain_grad()`` and a backward, shape (..., m, n), whole; else None."""
        if not self._gradient.is_known:
            return None
        check_size("A.grad", [self], self.numel() * self.dtype.itemsize, graph.DENSE_LIMIT)
        return self._axes.restore(self._gradient.total(self.problem.shape, self.dtype, self.device))

    @property
    def logits(self) -> LogitMatrix:
        """The same matrix before softmax: log-weights, -inf where masked."""
        return LogitMatrix(self)

    def __getitem__(self, key: Any) -> Any:
        entries = key if isinstance(key, tuple) else (key,)
        if entries and entries[0] is None:
            expanded = self.unsqueeze(0)
            return expanded[(slice(None), *entries[1:])] if len(entries) > 1 else expanded
        where = parse(key, self._axes, *self.problem.shape[2:])
        if where is None:
            return self._call("__getitem__", key)
        part = self._select(where)
        return part if where.rows is None else part._read(where)

    def window(self, rows: Span | None = None, columns: Span | None = None) -> AttentionMatrix:
        """Return some queries and keys as a smaller lazy matrix with the same weights.

        Parameters
        ----------
        rows, columns : slice, range or (start, stop), optional
            Which queries and which keys, without a step; the default is all.

        Returns
        -------
        AttentionMatrix, shape (..., rows, columns)
            Without all keys, its rows sum to the mass of the keys that it has, and it carries no gradient.

        Raises
        ------
        ShapeError
            If `rows` or `columns` has a step or does not lie within the matrix.

        See Also
        --------
        attlas.stats.Picture : the window in blocks.

        Notes
        -----
        A smaller matrix whose log-sum-exp counts the keys that it does not have.
        Cost: one pass over the rows if columns are left out and the log-sum-exp is not known yet, else none; reads cost
        what they do of a matrix of this size.

        Examples
        --------
        >>> import torch, attlas
        >>> A = attlas.attend(torch.randn(500, 8), torch.randn(900, 8), mask=attlas.Causal())
        >>> part = A.window(slice(100, 200), slice(0, 300))
        >>> part.shape, bool(torch.allclose(part.to_dense(), A[100:200, :300]))
        (torch.Size([100, 300]), True)
        """
        return window_of(self, *spans_of(self, rows, columns))  # type: ignore[no-any-return]

    @like_tensors
    def sum(self, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        """Sum over axes: -1 is the mass of a row (1, or less with a sink), -2 that of a key's column.

        Parameters
        ----------
        dim : int or tuple of int, optional
            -1 (keys), -2 (queries), a leading axis (heads, batch), or several; the default is all.
        keepdim : bool, default False
            Whether the axes are kept with size 1.
        dtype : torch.dtype, optional
            Dtype of the result.

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
        return reduced(self, "sum", dim, keepdim).to(dtype)

    @like_tensors
    def mean(self, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        """Mean over axes, masked cells counted as 0, as the dense tensor would.

        Parameters and errors are those of `sum`.
        """
        return reduced(self, "mean", dim, keepdim).to(dtype)

    @like_tensors
    def amax(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Largest weight over axes: of each row (dim -1), of each column (dim -2), over heads.

        Parameters and errors are those of `sum`.
        """
        return reduced(self, "amax", dim, keepdim)

    @like_tensors
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Index of the largest weight of each row (dim -1) or of each column (dim -2).

        Parameters and errors are those of `sum`; other axes are those of the dense tensor, and refused above 1 GiB.
        """
        return reduced(self, "argmax", dim, keepdim)

    @like_tensors
    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
        """Return the k largest weights of each row and their keys, exact, in descending order.

        Parameters
        ----------
        k : int
            How many, at most n.
        dim, largest, sorted
            As of `torch.topk`. Other axes than the keys, and the smallest, are those of the dense tensor.

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
        if axis_of(self, "topk", dim) != self.ndim - 1 or not largest:
            return self._call("topk", k, dim, largest, sorted)
        return self.collect(TopK(k))[0]

    @torch.no_grad()
    def check(self, rows: int = 64) -> float:
        """Compare the weights of sampled rows with the definition in float64, and return the largest error.

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
        whole_number("A.check()", "rows", rows, "A.check(rows=64)")
        batch, heads, m, n = self.problem.shape
        if 0 in (batch, heads, m, n):
            return 0.0
        problem = self._concrete_problem("A.check()")
        sample = torch.randperm(m, generator=torch.Generator().manual_seed(0), device="cpu")[:rows].sort().values
        fast = self._cells(sample, range(n), before_softmax=False)
        _, window_lse, expected = reference.dense(reference.in_float64(problem), sample)
        if problem.partial:  # the definition normalizes rows over the keys of the part alone
            expected = expected * share_of(window_lse, self._exact_lse()[:, :, sample]).unsqueeze(-1)
        return float((fast.double() - expected).abs().max())

    def plot(
        self,
        *,
        rows: Span | None = None,
        columns: Span | None = None,
        size: int | None = None,
        pool: Literal["max", "mean"] = "max",
        labels: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
        log: bool = True,
        cmap: Any = None,
        ax: Any = None,
        title: str | None = None,
    ) -> Any:
        """Draw the matrix, or each head of it.

        Parameters
        ----------
        rows, columns : slice, range or (start, stop), optional
            Queries and keys to draw.
        size : int, optional
            Blocks along each side, at most: 512 for one map, 256 for several.
        pool : {"max", "mean"}
            What stands for a block of several cells.
        labels : sequence of str, or pair of sequences, optional
            Text of each token, up to 64; a pair has those of the queries and those of the keys.
        log : bool
            Logarithmic colours, or in proportion.
        cmap : str or matplotlib.colors.Colormap, optional
            Another colour map.
        ax : matplotlib.axes.Axes, optional
            Axes of yours to draw one map into.
        title : str, optional
            Title of the figure.

        Returns
        -------
        matplotlib.figure.Figure

        See Also
        --------
        attlas.pictures.plot : the same for a tensor, with cost and errors.

        Examples
        --------
        >>> import torch, attlas
        >>> A = attlas.attend(torch.randn(300, 16), torch.randn(300, 16))
        >>> figure = A.plot(rows=(-50, 300), log=False, title="the last 50 queries")
        """
        style = {"labels": labels, "log": log, "cmap": cmap, "ax": ax, "title": title}
        return attlas.pictures.plot(self, rows=rows, columns=columns, size=size, pool=pool, **style)

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
        return attlas.view.show(self, **options)

    def _repr_html_(self) -> str:
        return attlas.view.preview(self)
