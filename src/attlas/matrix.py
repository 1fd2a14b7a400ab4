"""The lazy attention matrix, and the two functions that make and use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attlas.engine import choose, reference, tiled
from attlas.engine.dropout import Dropout
from attlas.engine.fold import Statistic
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.errors import DtypeError, ShapeError, TooLargeError, explain
from attlas.indexing import Axes, parse
from attlas.inputs import check_inputs, check_sink, check_values
from attlas.masks.base import Mask
from attlas.masks.custom import from_function, from_tensor
from attlas.scores.base import Score
from attlas.scores.dot import ScaledDot
from attlas.stats import columns, largest, rows

__all__ = ["AttentionMatrix", "LogitMatrix", "TransposedMatrix", "attend", "attention", "explain_choice"]

_DENSE_LIMIT = 2**30  # bytes that to_dense() gives without being asked twice


def attend(
    q: Tensor,
    k: Tensor,
    score: Score | None = None,
    mask: Mask | Tensor | Callable[..., Any] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    plan: Plan | None = None,
) -> AttentionMatrix:
    """Return the attention matrix softmax(score(q, k)) without computing it.

    Parameters
    ----------
    q : Tensor, shape (..., m, d)
        Queries. Leading axes are ``()``, ``(batch,)`` or ``(..., heads)``.
    k : Tensor, shape (..., n, d)
        Keys. The heads of k divide those of q (grouped heads); batch axes broadcast.
    score : Score, optional
        How alike query and key are; the default is ``ScaledDot(scale)``.
    mask : Mask, Tensor or callable, optional
        Which pairs may attend: a mask, a bool tensor (True = may attend), an additive float tensor, or a
        FlexAttention ``mask_mod(b, h, i, j)``.
    scale : float, optional
        Factor of the dot product; only without `score`.
    sink : Tensor, optional, shape (heads,)
        One more logit a head in the denominator that has no value: rows then sum to less than 1.
    plan : Plan, optional
        How to compute; the default suits the device.

    Returns
    -------
    AttentionMatrix, shape (..., m, n)

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.

    See Also
    --------
    attention : ``attend(...) @ v`` in one call, with dropout.

    Notes
    -----
    Cost: some ten microseconds, no memory. The tensors are kept, not copied.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k, v = (torch.randn(2, 12, 1024, 64) for _ in range(3))
    >>> A = attlas.attend(q, k, mask=attlas.Causal())
    >>> A.shape
    torch.Size([2, 12, 1024, 1024])
    >>> (A @ v).shape
    torch.Size([2, 12, 1024, 64])
    >>> A[0, 3, 17, :3].shape
    torch.Size([3])
    """
    inputs = check_inputs("attend()", q, k)
    if score is None:
        score = _scaled_dot(scale)
    elif not isinstance(score, Score):
        raise DtypeError(
            explain(
                "attend()",
                "score must be an attlas.Score.",
                {"score": type(score).__name__},
                found=f"a {type(score).__name__}",
                fix="make it a class: class MyScore(attlas.Score) with forward(self, q, k, at).",
            )
        )
    elif scale is not None:
        raise ShapeError(
            explain(
                "attend()",
                "scale belongs to the default score; a score of your own has its own.",
                {"score": type(score).__name__, "scale": scale},
                found="both score and scale",
                fix=f"score={scale!r} * score, or ScaledDot({scale!r}).",
            )
        )
    score.check(q, k, inputs.q.shape[1])
    lead = inputs.leading
    batch, heads = inputs.q.shape[:2]
    if mask is not None:
        mask = _as_mask(mask)
        mask.check(lead[:-1] if len(lead) >= 2 else lead, heads, q.shape[-2], k.shape[-2])
        for extra in mask.log_weights():
            score = score + extra
    if sink is not None:
        sink = check_sink("attend()", sink, inputs.q)
    if plan is not None and not isinstance(plan, Plan):
        raise DtypeError(
            explain(
                "attend()",
                "plan must be an attlas.Plan.",
                {"plan": type(plan).__name__},
                found=f"a {type(plan).__name__}",
                fix="plan=attlas.Plan(backend='tiled')",
            )
        )
    problem = Problem(inputs.q, inputs.k, score, mask, sink, torch.arange(batch), torch.arange(heads))
    return AttentionMatrix(problem, plan or _DEFAULT_PLAN, Axes(lead, (True,) * len(lead)))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score | None = None,
    mask: Mask | Tensor | Callable[..., Any] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    plan: Plan | None = None,
) -> Tensor:
    """Pool values by attention, ``softmax(score(q, k)) v``.

    Parameters
    ----------
    q, k, score, mask, scale, sink, plan
        As in `attend`.
    v : Tensor, shape (..., n, e)
        Values, of a size of their own.
    dropout_p : float, default 0.0
        Probability that a weight is dropped after softmax. The drops come from torch's default generator
        and are computed again in the backward, never stored.

    Returns
    -------
    Tensor, shape (..., m, e), dtype of v

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.

    See Also
    --------
    attend : the matrix itself.

    Notes
    -----
    Differentiable in q, k, v, the sink and the parameters of the score. A row with no allowed key gives 0.
    Cost: ``O(m n d)`` time; memory of the output and a few tiles, forward and backward.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    >>> attlas.attention(q, k, v, score=attlas.Gaussian(0.5)).shape
    torch.Size([5, 3])
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ShapeError(
            explain(
                "attention()",
                "dropout_p must be a probability, from 0 to 1.",
                found=f"dropout_p = {dropout_p!r}",
                fix="dropout_p=0.1",
            )
        )
    matrix = attend(q, k, score, mask, scale, sink, plan)
    return matrix._multiply(v, Dropout.draw(dropout_p) if dropout_p > 0 else None)


_DEFAULT_PLAN = Plan()


@lru_cache(maxsize=64)
def _scaled_dot(scale: float | None) -> ScaledDot:
    return ScaledDot(scale)


def _as_mask(mask: Mask | Tensor | Callable[..., Any]) -> Mask:
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return from_tensor(mask)
    if callable(mask):
        return from_function(mask)
    raise DtypeError(
        explain(
            "attend()",
            "mask must be a Mask, a bool or float tensor, or a function mask_mod(b, h, i, j).",
            {"mask": type(mask).__name__},
            found=f"a {type(mask).__name__}",
            fix="mask=attlas.Causal()",
        )
    )


class AttentionMatrix:
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

    def __matmul__(self, v: Tensor) -> Tensor:
        return self._multiply(v, None)

    def _multiply(self, v: Tensor, dropout: Dropout | None) -> Tensor:
        vector = isinstance(v, Tensor) and v.ndim == 1
        values = check_values("A @ v", v.unsqueeze(-1) if vector else v, self.problem.k, self._axes, self.problem.shape[1])
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
            with torch.no_grad():
                self._lse = tiled.fold(self.problem, (), self.plan)[1]
        return self._lse

    @property
    def logits(self) -> LogitMatrix:
        """The same matrix before softmax: log-weights, -inf where masked."""
        return LogitMatrix(self)

    def __getitem__(self, key: Any) -> Any:
        where = parse(key, self._axes, *self.problem.shape[2:])
        if where.leading is not None:
            batches, heads, axes = where.leading
            problem = self.problem.select(batches, heads)
            lse = None if self._lse is None else self._lse[batches][:, heads]
            part = AttentionMatrix(problem, self.plan, axes, lse)
            if where.rows is None:
                return part
        else:
            part = self
        return part._read(where.rows, where.columns, where.pairs, before_softmax=False)

    @torch.no_grad()
    def _read(self, rows: Any, columns: Any, pairs: bool, *, before_softmax: bool) -> Tensor:
        """Return cells as a Tensor; an int for rows or columns drops that axis."""
        row_index = range(rows, rows + 1) if isinstance(rows, int) else rows
        column_index = range(columns, columns + 1) if isinstance(columns, int) else columns
        if pairs:
            chunks = [
                torch.diagonal(self._cells(r, c, before_softmax), dim1=-2, dim2=-1)
                for r, c in zip(row_index.split(64), column_index.split(64), strict=True)
            ]
            return self._axes.restore(torch.cat(chunks, dim=-1))
        out = self._axes.restore(self._cells(row_index, column_index, before_softmax))
        out = out.squeeze(-1) if isinstance(columns, int) else out
        return out.squeeze(-1 if isinstance(columns, int) else -2) if isinstance(rows, int) else out

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
                        {"statistic": repr(statistic)},
                        found=f"a {type(statistic).__name__}",
                        fix="A.collect(stats.Entropy(), stats.TopK(8))",
                    )
                )
        results, self._lse = tiled.fold(self.problem, statistics, self.plan, self._lse)
        return tuple(_each(result, self._axes.restore) for result in results)

    def sum(self, dim: int, keepdim: bool = False) -> Tensor:
        """Sum over one of the last two axes: of a row (1, or less with a sink), or of a key's column.

        Parameters
        ----------
        dim : int
            -1 (keys) or -2 (queries).
        keepdim : bool, default False
            Whether the axis is kept with size 1.

        Returns
        -------
        Tensor, shape (..., m) or (..., n)

        Raises
        ------
        ShapeError
            If `dim` is another axis.
        """
        return self._reduce("sum", dim, keepdim, rows.RowMass(), columns.ColumnMass())

    def mean(self, dim: int, keepdim: bool = False) -> Tensor:
        """Mean over one of the last two axes, masked cells counted as 0, as the dense tensor would.

        Parameters
        ----------
        dim : int
            -1 (keys) or -2 (queries).
        keepdim : bool, default False
            Whether the axis is kept with size 1.

        Returns
        -------
        Tensor, shape (..., m) or (..., n)

        Raises
        ------
        ShapeError
            If `dim` is another axis.
        """
        total = self._reduce("mean", dim, keepdim, rows.RowMass(), columns.ColumnMass())
        return total / self.shape[dim]

    def amax(self, dim: int, keepdim: bool = False) -> Tensor:
        """Largest weight of each row (dim -1) or of each column (dim -2).

        Parameters
        ----------
        dim : int
            -1 (keys) or -2 (queries).
        keepdim : bool, default False
            Whether the axis is kept with size 1.

        Returns
        -------
        Tensor, shape (..., m) or (..., n)

        Raises
        ------
        ShapeError
            If `dim` is another axis.
        """
        return self._reduce("amax", dim, keepdim, rows.MaxWeight(), columns.ColumnMax())

    def argmax(self, dim: int, keepdim: bool = False) -> Tensor:
        """Place of the largest weight of each row (dim -1) or of each column (dim -2).

        Parameters
        ----------
        dim : int
            -1 (keys) or -2 (queries).
        keepdim : bool, default False
            Whether the axis is kept with size 1.

        Returns
        -------
        Tensor of int64, shape (..., m) or (..., n)

        Raises
        ------
        ShapeError
            If `dim` is another axis.
        """
        return self._reduce("argmax", dim, keepdim, rows.ArgMax(), columns.ColumnArgMax())

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

    def _reduce(self, name: str, dim: int, keepdim: bool, of_row: Statistic, of_column: Statistic) -> Tensor:
        axis = dim + self.ndim if isinstance(dim, int) and dim < 0 else dim
        if axis not in (self.ndim - 1, self.ndim - 2):
            raise ShapeError(
                explain(
                    f"A.{name}()",
                    "a lazy matrix is reduced over one of its last two axes.",
                    {"A": f"shape {tuple(self.shape)}"},
                    found=f"dim = {dim!r}",
                    fix=f"A.{name}(-1) over keys, A.{name}(-2) over queries; other axes with torch after that.",
                )
            )
        found: Tensor = self.collect(of_row if axis == self.ndim - 1 else of_column)[0]
        return found.unsqueeze(dim) if keepdim else found

    def to_dense(self, limit: int | None = _DENSE_LIMIT) -> Tensor:
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
        return self._read(range(m), range(n), False, before_softmax=before_softmax)

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
        if rows < 1:
            raise ShapeError(
                explain("A.check()", "rows must be 1 or more.", found=f"rows = {rows}", fix="A.check(rows=64)")
            )
        batch, heads, m, n = self.problem.shape
        if 0 in (batch, heads, m, n):
            return 0.0
        sample = torch.randperm(m, generator=torch.Generator().manual_seed(0))[:rows].sort().values
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


class TransposedMatrix:
    """The transposed attention matrix, shape (..., n, m), lazy; made by ``A.mT``.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.randn(5, 8), torch.randn(7, 8))
    >>> (A.mT @ torch.ones(5, 1)).shape
    torch.Size([7, 1])
    """

    def __init__(self, matrix: AttentionMatrix) -> None:
        self.mT = matrix

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, (..., n, m)."""
        *leading, m, n = self.mT.shape
        return torch.Size((*leading, n, m))

    def __repr__(self) -> str:
        return f"{self.mT!r}.mT"

    def __matmul__(self, x: Tensor) -> Tensor:
        matrix = self.mT
        vector = isinstance(x, Tensor) and x.ndim == 1
        problem, heads = matrix.problem, matrix.problem.shape[1]
        x = x.unsqueeze(-1) if vector else x
        given = check_values("A.mT @ x", x, problem.q, matrix._axes, heads, names=("x", "m", "query"))
        given = given.repeat_interleave(heads // given.shape[1], dim=1) if given.shape[1] != heads else given
        out = choose.multiply_transposed(problem, given, matrix._known_lse(), matrix.plan)
        out = matrix._axes.restore(out)
        return out.squeeze(-1) if vector else out


class LogitMatrix:
    """The log-weights before softmax, lazy, -inf where masked; made by ``A.logits``.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.ones(2, 4), torch.ones(3, 4), mask=attlas.Causal(0))
    >>> A.logits[:, :]
    tensor([[2., -inf, -inf],
            [2., 2., -inf]])
    >>> A.logits.mean()
    tensor([2., 2.])
    """

    def __init__(self, matrix: AttentionMatrix) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, (..., m, n)."""
        return self._matrix.shape

    def __repr__(self) -> str:
        return f"{self._matrix!r}.logits"

    def __getitem__(self, key: Any) -> Any:
        where = parse(key, self._matrix._axes, *self._matrix.problem.shape[2:])
        part = self._matrix
        if where.leading is not None:
            batches, heads, axes = where.leading
            part = AttentionMatrix(part.problem.select(batches, heads), part.plan, axes)
            if where.rows is None:
                return LogitMatrix(part)
        return part._read(where.rows, where.columns, where.pairs, before_softmax=True)

    def to_dense(self, limit: int | None = _DENSE_LIMIT) -> Tensor:
        """Return all log-weights as a Tensor; see `AttentionMatrix.to_dense`."""
        return self._matrix._dense(limit, before_softmax=True)

    def mean(self, dim: int = -1) -> Tensor:
        """Mean over the allowed keys of each row, shape (..., m)."""
        self._check_dim("mean", dim)
        found: Tensor = self._matrix.collect(rows.LogitMoments())[0].mean
        return found

    def var(self, dim: int = -1) -> Tensor:
        """Variance over the allowed keys of each row, shape (..., m); the mean of squared deviations."""
        self._check_dim("var", dim)
        found: Tensor = self._matrix.collect(rows.LogitMoments())[0].variance
        return found

    def amax(self, dim: int = -1) -> Tensor:
        """Largest log-weight of each row, shape (..., m)."""
        self._check_dim("amax", dim)
        found: Tensor = self._matrix.collect(rows.MaxLogit())[0]
        return found

    def _check_dim(self, name: str, dim: int) -> None:
        if dim not in (-1, len(self.shape) - 1):
            raise ShapeError(
                explain(
                    f"A.logits.{name}()",
                    "log-weights are reduced over the keys of a row.",
                    {"A": f"shape {tuple(self.shape)}"},
                    found=f"dim = {dim!r}",
                    fix=f"A.logits.{name}(-1)",
                )
            )


def explain_choice(matrix: AttentionMatrix) -> choose.Choice:
    """Say which backend computes ``A @ v``, and why the others do not; at top level `attlas.explain`.

    Parameters
    ----------
    matrix : AttentionMatrix
        The matrix.

    Returns
    -------
    Choice
        With `backend`, `because` and `others`; printed as text.

    Raises
    ------
    BackendError
        If the plan names a backend that cannot run.

    Examples
    --------
    >>> import torch, attlas
    >>> attlas.explain(attlas.attend(torch.randn(5, 8), torch.randn(7, 8)))
    backend: sdpa, since the score is a dot product
      not reference: it stores the whole matrix; ask for it with Plan(backend='reference')
      not tiled: torch's fused kernel computes the same, faster
    """
    return choose.choose(matrix.problem, matrix.plan)


def _each(result: Any, restore: Callable[[Tensor], Tensor]) -> Any:
    """Give a result, a tensor or a (named) tuple of tensors, the leading axes of the matrix."""
    if isinstance(result, Tensor):
        return restore(result)
    parts = [_each(part, restore) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
