"""The attention matrix as a lazy tensor: weights, the axes that users see, and the methods that users call."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

import attlas
from attlas.engine.autodiff import graph
from attlas.engine.dropout import Dropout
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.engine.statistic import Statistic
from attlas.errors import ModifiedError, public
from attlas.foundation.autocast import cast_values
from attlas.foundation.checks import check_values, whole_number
from attlas.foundation.compat import transforming
from attlas.foundation.indexing import Axes, Where, parse, span_of
from attlas.masks import Mask
from attlas.matrix import observers, products, shapes  # noqa: F401 - products enters its functions into the table
from attlas.matrix.cellwise import Cellwise
from attlas.matrix.kinds import algebra
from attlas.matrix.protocol import LazyTensor, check_are_statistics, check_size, lazy_method
from attlas.matrix.reductions import Dim, axis_of, max_along, reduced, square_root, variance
from attlas.matrix.softmax import SoftmaxWeights
from attlas.matrix.tensor import MatrixTensor
from attlas.matrix.views import LogitMatrix, TransposedMatrix
from attlas.matrix.weights import Weights
from attlas.scores import Score
from attlas.stats.largest import TopK
from attlas.stats.spans import Span, place_span

_MOST_PRINTED = 6  # rows, columns and heads up to which print() shows the weights


class AttentionMatrix(LazyTensor):
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
    layer : int or None
        Number of the layer of transformers that computed it; None where there is none, or it has no number.

    See Also
    --------
    attend : makes one.
    attlas.stats : numbers from a matrix.

    Notes
    -----
    Numbers are float32 for float16, bfloat16 and float32 tokens, float64 for float64 tokens. The
    log-sum-exp is kept once it is known, m numbers per head. If a tensor is changed in place after `attend`, every
    later read raises a ModifiedError.

    Any method of `torch.Tensor` works, and so does any function of torch or numpy: ``torch.stack(attentions)``,
    ``A.permute(0, 2, 1, 3)``, ``A * mask``, ``numpy.asarray(A)``. Products stay products: `torch.einsum`, `torch.bmm`
    and their relatives that are ``A @ v`` in other words run on the fused kernel. Sums of matrices are matrices,
    ``A - 0.3 * B``, ``A + A.mT``, lazy at any length, with gradients into their factors, and so are a stack, ``A @ B``
    and a mean over heads that would take more than 1 GiB. Functions of each weight stay lazy,
    ``(A * t).clamp(min=0)``: their sums over queries or keys, and the gradients of these, take one pass and linear
    memory, unless the tensor has a gradient of its own. What is not written for the lazy matrix acts on
    ``A.to_dense()``, with its gradient where one is recorded, and raises `TooLargeError` where the matrices of a call
    take more than 1 GiB together. Methods that would change the tensor in place are refused.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.randn(4, 100, 8), torch.randn(4, 300, 8))
    >>> A.shape, A[0].shape, A[0, 5:9, :10].shape
    (torch.Size([4, 100, 300]), torch.Size([100, 300]), torch.Size([4, 10]))
    >>> bool(torch.allclose(A.sum(-1), torch.ones(4, 100)))
    True
    >>> layers = [attlas.attend(torch.randn(1, 4, 9, 8), torch.randn(1, 4, 9, 8)) for _ in range(3)]
    >>> print(attlas.attend(torch.zeros(2, 4), torch.zeros(2, 4)))  # up to 6 × 6: the weights too
    AttentionMatrix(shape=(2, 2), torch.float32, score=ScaledDot)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    >>> torch.stack([A.squeeze(0) for A in layers]).shape
    torch.Size([3, 4, 9, 9])
    >>> layers[0].mean(1).shape, layers[0].cpu().numpy().shape
    (torch.Size([1, 9, 9]), (1, 4, 9, 9))
    >>> torch.einsum("bhij,bhjd->bihd", layers[0], torch.randn(1, 4, 9, 8)).shape
    torch.Size([1, 9, 4, 8])
    """

    layer: int | None = None

    def __init__(self, weights: Weights, axes: Axes | None = None) -> None:
        self.weights = weights
        # By default the user sees both leading axes of the weights: batch and heads.
        self.axes = Axes(weights.shape[:2], (True, True)) if axes is None else axes

    def with_weights(self, weights: Weights, axes: Axes | None = None) -> AttentionMatrix:
        """Return a matrix of other weights with the axes and the layer of this one, or with other axes."""
        other = AttentionMatrix(weights, self.axes if axes is None else axes)
        other.layer = self.layer
        return other

    # ---------------------------------------------------------------------------------------------------- what it is

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # computed here, stored elsewhere
        """Shape of the matrix, (..., m, n)."""
        return torch.Size((*self.axes.shape, *self.weights.shape[2:]))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # computed here, stored elsewhere
        """Dtype of the numbers that reads give: float32, or float64 for float64 tokens."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # computed here, stored elsewhere
        """Device of the tokens, where everything is computed."""
        return self.weights.device

    @property
    def is_cuda(self) -> bool:
        """Whether the tokens lie on an NVIDIA device."""
        return self.device.type == "cuda"

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor that the matrix depends on records a graph: q, k, the sink, or one of the score."""
        return self.weights.requires_grad

    @property
    def needs_graph(self) -> bool:
        """Whether reads of this matrix must record a graph for a gradient."""
        return self.weights.needs_graph

    @property
    def softmax_weights(self) -> SoftmaxWeights:
        """The weights as a softmax; a DtypeError names those of another kind."""
        weights: SoftmaxWeights = self.weights.of_softmax("A")
        return weights

    @property
    def problem(self) -> Problem:
        """What is computed: tokens, score, mask, sink."""
        problem: Problem = self.weights.of_softmax("A.problem").problem
        return problem

    @property
    def plan(self) -> Plan:
        """How it is computed."""
        plan: Plan = self.weights.of_softmax("A.plan").plan
        return plan

    @property
    def q(self) -> Tensor:
        """Queries, shape (..., m, d), with the leading axes of the matrix."""
        return self.axes.restore(self.problem.q)

    @property
    def k(self) -> Tensor:
        """Keys, shape (..., n, dk), with the leading axes of the matrix; grouped heads are those of the keys."""
        k, axes = self.problem.k, self.axes
        grouped = (*axes.layout[:-1], k.shape[1]) if len(axes.layout) > 1 else axes.layout
        return replace(axes, layout=grouped).restore(k)

    @property
    def score(self) -> Score:
        """How alike queries and keys are."""
        return self.problem.score

    @property
    def mask(self) -> Mask | None:
        """Which pairs may attend; None allows all."""
        return self.weights.mask

    @property
    def sink(self) -> Tensor | None:
        """One more logit per head, shape (heads,), or None."""
        return self.problem.sink

    @property
    def source(self) -> AttentionMatrix:
        """The matrix itself."""
        return self

    def __repr__(self) -> str:
        return f"AttentionMatrix(shape={tuple(self.shape)}, {self.dtype}, {self.weights.description})"

    def __str__(self) -> str:
        try:
            return shapes.as_written(self, _MOST_PRINTED)
        except ModifiedError:  # reading is an error then, printing is not
            return repr(self)

    # ------------------------------------------------------------------------------------------------------- products

    def __matmul__(self, v: Tensor | LazyTensor) -> Tensor:
        # The product with a lazy matrix stays lazy where `chained` can make it so.
        if isinstance(v, LazyTensor):
            found = algebra.chained(self, v)
            return self.full_precision().pooled(v.to_dense()) if found is NotImplemented else found
        return self.pooled(v)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        # x @ A is (A.mT @ x.mT).mT; what is no such product is computed from the dense matrix.
        if not isinstance(x, Tensor) or x.dtype is not self.weights.queries.dtype or x.ndim > self.ndim:
            return self.on_dense("__rmatmul__", x)
        return self.transposed_product(x) if x.ndim == 1 else self.transposed_product(x.mT).mT

    def matmul(self, v: Tensor) -> Tensor:
        """Return ``A @ v``."""
        return self.__matmul__(v)

    @public("A @ v")
    def pooled(self, v: Tensor, dropout_p: builtins.float = 0.0) -> Tensor:
        """Return ``A @ v`` of values with any axes that fit, as recordings hear and interventions change it.

        Parameters
        ----------
        v : Tensor, shape (..., n, e)
            The values.
        dropout_p : float, default 0
            Probability that a weight is dropped; the others are divided by ``1 - dropout_p``.
        """
        dropout = Dropout.draw(dropout_p) if dropout_p > 0.0 else None
        vector = isinstance(v, Tensor) and v.ndim == 1
        weights = self.weights
        v, dtype = cast_values(v, weights.keys)
        values = check_values(v.unsqueeze(-1) if vector else v, weights.keys, self.axes, weights.shape[1])
        out = observers.product(self, values, dropout) if observers.active else weights.product(values, dropout)
        out = self.axes.restore(out if dtype is None else out.to(dtype))
        return out.squeeze(-1) if vector else out

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` of vectors with any axes that fit."""
        vector = isinstance(x, Tensor) and x.ndim == 1
        tokens, heads = self.weights.queries, self.weights.shape[1]
        x, dtype = cast_values(x.unsqueeze(-1) if vector else x, tokens)
        out = self.weights.transposed_product(check_values(x, tokens, self.axes, heads, ("x", "m", "query")))
        out = self.axes.restore(out if dtype is None else out.to(dtype))
        return out.squeeze(-1) if vector else out

    def full_precision(self) -> AttentionMatrix:
        """Return the same matrix of tokens in the dtype of the weights, so that it is multiplied with weights."""
        weights = self.weights.full_precision()
        return self if weights is self.weights else self.with_weights(weights)

    @property
    def mT(self) -> TransposedMatrix:
        """The transposed matrix, lazy too: ``A.mT @ x`` sums over queries, one row per key."""
        return TransposedMatrix(self)

    @property
    def T(self) -> Any:  # noqa: N802 - torch's name
        """The transposed matrix, lazy; only of a matrix without leading axes, as of a tensor."""
        return self.mT if self.ndim == 2 else self.on_dense("permute", *reversed(range(self.ndim)))

    @property
    def mH(self) -> Any:  # noqa: N802 - torch's name
        """The transposed matrix, lazy: weights are real numbers."""
        return self.mT

    H = T

    # -------------------------------------------------------------------------------------------------------- gradient

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
        self.weights.gradient.retain()

    @property
    @public("A.grad")
    def grad(self) -> Tensor | None:
        """Gradient of the weights after ``retain_grad()`` and a backward, shape (..., m, n), whole; else None."""
        gradient = self.weights.gradient
        if not gradient.is_known:
            return None
        check_size([self], self.numel() * self.dtype.itemsize, graph.DENSE_LIMIT)
        return self.axes.restore(gradient.total(self.weights.shape, self.dtype, self.device))

    @lazy_method
    def detach(self) -> AttentionMatrix:
        """Return the same matrix without a graph."""
        weights = self.weights.detach()
        return self if weights is self.weights else self.with_weights(weights)

    @property
    def data(self) -> AttentionMatrix:
        """The same matrix without the graph of its tokens."""
        return self.detach()

    # ----------------------------------------------------------------------------------------------------------- reads

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of each row of logits, shape (..., m); -inf for a row with no allowed key."""
        return self.axes.restore(self.softmax_weights.recorded_lse().to(self.dtype))

    @property
    def logits(self) -> LogitMatrix:
        """The same matrix before softmax: log-weights, -inf where masked."""
        return LogitMatrix(self)

    def __getitem__(self, key: Any) -> Any:
        # Leading axes alone give a smaller lazy matrix; rows and columns are read.
        entries = key if isinstance(key, tuple) else (key,)
        if entries and entries[0] is None:
            expanded = self.unsqueeze(0)
            return expanded[(slice(None), *entries[1:])] if len(entries) > 1 else expanded
        where = parse(key, self.axes, *self.weights.shape[2:])
        if where is None:
            return self.on_dense("__getitem__", key)
        part = self.selected(where)
        return part if where.rows is None else part.read(where)

    def selected(self, where: Where) -> AttentionMatrix:
        """Return the lazy matrix of the batches and heads of an index."""
        if where.leading is None:
            return self
        batches, heads, axes = where.leading
        return self.with_weights(self.weights.part(batches, heads), axes)

    def read(self, where: Where, *, logits: bool = False) -> Tensor:
        """Return the cells of the rows and columns of an index; an int for rows or columns drops that axis."""
        row, column = where.rows, where.columns
        row_index = span_of(row, row + 1) if isinstance(row, int) else row
        column_index = span_of(column, column + 1) if isinstance(column, int) else column
        if where.pairs and isinstance(row, Tensor) and isinstance(column, Tensor):
            # Pair by pair: of 64 rows and 64 columns at a time the diagonal is kept.
            chunks = [
                torch.diagonal(self.weights.cells(r, c, logits=logits), dim1=-2, dim2=-1)
                for r, c in zip(row.split(64), column.split(64), strict=True)
            ]
            return self.axes.restore(torch.cat(chunks, dim=-1))
        return where.squeezed(self.axes.restore(self.weights.cells(row_index, column_index, logits=logits)))

    @public("A.window()")
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
        m, n = self.shape[-2:]
        queries = place_span("rows", rows, m, "queries")
        keys = place_span("columns", columns, n, "keys")
        self.weights.check_unchanged()
        weights = self.weights.part(rows=queries, columns=keys)
        return self if weights is self.weights else AttentionMatrix(weights, self.axes)

    @public("A.to_dense()")
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
        return self.written_out(limit, logits=False)

    def as_tensor(self) -> MatrixTensor:
        """Return the matrix as a `torch.Tensor` that holds no numbers, for code that asks ``isinstance(x, Tensor)``.

        Returns
        -------
        MatrixTensor, shape (..., m, n)
            A tensor by its class. What torch computes with it is what it computes with this matrix: reads, products,
            sums and statistics are lazy or small, and what needs all numbers is refused above 1 GiB.

        Notes
        -----
        Its gradient goes to queries and keys; it keeps no hook of its own. ``tolist()`` is refused above 2^20 numbers.
        Cost: none.

        Examples
        --------
        >>> import torch, attlas
        >>> t = attlas.attend(torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)).as_tensor()
        >>> isinstance(t, torch.Tensor), t.sum(-2).shape, isinstance(t[0], torch.Tensor)
        (True, torch.Size([1, 2, 50]), True)
        """
        return MatrixTensor(self)

    def written_out(self, limit: int | None, *, logits: bool) -> Tensor:
        """Return all weights or log-weights as a Tensor, or raise a TooLargeError; see `to_dense`."""
        name = "A.logits" if logits else "A"
        fix = f"read a part, {name}[..., :64, :], A.topk(8) or stats.picture(A, 512, 512), or pass limit=None."
        check_size([self], self.numel() * self.dtype.itemsize, limit, fix)
        m, n = self.weights.shape[2:]
        return self.read(Where(None, span_of(0, m), span_of(0, n), False), logits=logits)

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
        check_are_statistics(statistics)
        return tuple(map(self.axes.restore_all, self.weights.collect(statistics)))

    # --------------------------------------------------------------------------------------------------- reductions

    @lazy_method(numpy=("sum",))
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
            Where only leading axes are summed and the matrix that is left takes more than 1 GiB, a lazy matrix.

        Raises
        ------
        ShapeError
            If `dim` is no axis.

        Notes
        -----
        Cost: one pass; the memory of the result and a few tiles.
        """
        found: Tensor = reduced(self, "sum", dim, keepdim).to(dtype)
        return found

    @lazy_method(numpy=("mean",))
    def mean(self, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        """Mean over axes, masked cells counted as 0, as the dense tensor would.

        Parameters and errors are those of `sum`.
        """
        found: Tensor = reduced(self, "mean", dim, keepdim).to(dtype)
        return found

    @lazy_method(numpy=("max", "amax"))
    def amax(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Largest weight over axes: of each row (dim -1), of each column (dim -2), over heads.

        Parameters and errors are those of `sum`; a matrix of maxima over heads of more than 1 GiB is refused.
        """
        found: Tensor = reduced(self, "amax", dim, keepdim)
        return found

    @lazy_method(numpy=("argmax",))
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Index of the largest weight of each row (dim -1) or of each column (dim -2).

        Parameters and errors are those of `sum`; other axes are those of the dense tensor, and refused above 1 GiB.
        """
        found: Tensor = reduced(self, "argmax", dim, keepdim)
        return found

    @lazy_method
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
            return self.on_dense("topk", k, dim, largest, sorted)
        return self.collect(TopK(k))[0]

    @lazy_method
    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the largest weight, or with `dim` the largest along an axis and their positions.

        Parameters
        ----------
        dim : int, optional
            The axis; -1 and -2 take one pass and linear memory.
        keepdim : bool, default False
            Whether the axis is kept with size 1.

        Returns
        -------
        Tensor, or a named tuple of values and indices
        """
        if isinstance(dim, int) and axis_of(self, "max", dim) < self.ndim - 2:
            return self.on_dense("max", dim, keepdim)
        return max_along(self, dim, keepdim)

    @lazy_method
    def var(self, dim: Dim = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
        """Return the variance of the weights over axes, masked cells counted as 0, as the dense tensor would.

        Parameters and errors are those of `sum`; `correction` is that of `torch.var`. Cost: two passes.
        """
        return variance(self, dim, correction, keepdim)

    @lazy_method
    def std(self, dim: Dim = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
        """Return the standard deviation of the weights over axes; see `var`."""
        return square_root(self.var(dim, correction=correction, keepdim=keepdim))

    @lazy_method
    def count_nonzero(self, dim: Dim = None) -> Tensor:
        """Return how many weights over axes are not 0; parameters are those of `sum`."""
        if self.weights.is_symbolic or transforming():
            return self.on_dense("count_nonzero", dim)
        return Cellwise(self, lambda cells: cells != 0, (), constant=True).sum(dim)

    @lazy_method
    def norm(self, p: Any = "fro", dim: Dim = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        """Return the Euclidean norm of the weights over axes; other norms are those of the dense tensor."""
        if p not in ("fro", None, 2) or dtype is not None:
            return self.on_dense("norm", p, dim, keepdim, dtype)
        cells: Any = self
        return square_root(cells.square().sum(dim, keepdim))

    # ----------------------------------------------------------------------------------------------------------- form

    def contiguous(self, memory_format: Any = None) -> AttentionMatrix:
        """Return the matrix itself."""
        return self

    @lazy_method
    def clone(self, memory_format: Any = None) -> AttentionMatrix:
        """Return the matrix itself: nobody can write to it."""
        return self

    @lazy_method
    def squeeze(self, dim: int | None = None) -> Any:
        """Leave out a leading axis of size 1, lazily; without `dim`, every axis of size 1, as of a tensor.

        Parameters
        ----------
        dim : int, optional
            The axis; the default is all of size 1.

        Returns
        -------
        AttentionMatrix or Tensor
            A Tensor where the axis of one query or of one key is left out.
        """
        return shapes.squeezed(self, dim)

    @lazy_method
    def unsqueeze(self, dim: int) -> Any:
        """Add an axis of size 1: lazily in front of a batch, on the dense tensor elsewhere.

        Parameters
        ----------
        dim : int
            Position of the new axis.

        Returns
        -------
        AttentionMatrix or Tensor
        """
        return shapes.unsqueezed(self, dim)

    @lazy_method
    def transpose(self, dim0: int, dim1: int) -> Any:
        """Exchange two axes: lazily the last two, on the dense tensor others."""
        return shapes.transposed(self, dim0, dim1)

    @lazy_method
    def swapaxes(self, dim0: int, dim1: int) -> Any:
        """Exchange two axes; see `transpose`."""
        return shapes.transposed(self, dim0, dim1)

    @lazy_method
    def swapdims(self, dim0: int, dim1: int) -> Any:
        """Exchange two axes; see `transpose`."""
        return shapes.transposed(self, dim0, dim1)

    @lazy_method
    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """Return the weights of a diagonal; of the last two axes in linear memory.

        Parameters
        ----------
        offset : int, default 0
            Which diagonal: key minus query.
        dim1, dim2 : int
            The axes, the first two by default, as of a tensor.

        Returns
        -------
        Tensor, shape (..., length of the diagonal)
        """
        return shapes.diagonal_of(self, offset, dim1, dim2)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the matrix on another device or with another dtype.

        Parameters
        ----------
        *args, **kwargs
            As of `torch.Tensor.to`.

        Returns
        -------
        AttentionMatrix or Tensor
            Lazy for another device and for float32 and float64, where the tokens move; a Tensor for other dtypes.
        """
        return shapes.moved(self, *args, **kwargs)

    def cpu(self) -> AttentionMatrix:
        """Return the matrix on the CPU, lazy: its tokens are copied, m and n vectors per head."""
        return self.to("cpu")  # type: ignore[no-any-return]

    def cuda(self) -> AttentionMatrix:
        """Return the matrix on the present NVIDIA device, lazy."""
        return self.to("cuda")  # type: ignore[no-any-return]

    def float(self) -> AttentionMatrix:
        """Return the matrix in float32, lazy."""
        return self.to(torch.float32)  # type: ignore[no-any-return]

    def double(self) -> Any:
        """Return the matrix in float64, lazy; a Tensor where the score has parameters of its own."""
        return self.to(torch.float64)

    # ------------------------------------------------------------------------------------------------- check, pictures

    @torch.no_grad()
    @public("A.check()")
    def check(self, rows: int = 64) -> builtins.float:
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
        Cost: ``rows * n`` float64 scores per head, whole in memory.
        """
        whole_number("rows", rows, "A.check(rows=64)")
        batch, heads, m, n = self.weights.shape
        if 0 in (batch, heads, m, n):
            return 0.0
        self.weights.check_unchanged()
        self.weights.check_numbers()
        sample = torch.randperm(m, generator=torch.Generator().manual_seed(0), device="cpu")[:rows].sort().values
        found, expected = self.weights.cells(sample, range(n)), self.weights.defined_cells(sample)
        return float((found.to(expected.device).double() - expected).abs().max())

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
        theme: str = "light",
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
        theme : {"light", "dark"}
            Colours for a light or a dark page.

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
        style = {"labels": labels, "log": log, "cmap": cmap, "ax": ax, "title": title, "theme": theme}
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
        # Notebooks call it.
        return attlas.view.preview(self)


def softmax_matrix(
    problem: Problem, plan: Plan, axes: Axes | None = None, lse: Tensor | None = None
) -> AttentionMatrix:
    """Return the matrix of a problem: with the axes (batch, heads, m, n) without others.

    Parameters
    ----------
    problem : Problem
        What is computed: tokens, score, mask, sink.
    plan : Plan
        How it is computed.
    axes : Axes, optional
        The leading axes that users see.
    lse : Tensor, shape (batch, heads, m), optional
        Log-sum-exp of each row, where it is known.
    """
    return AttentionMatrix(SoftmaxWeights(problem, plan, lse), axes)
