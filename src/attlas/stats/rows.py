"""One number for each row: entropy, effective keys, mass, largest weight, moments of the logits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.gradient import CellGradient
from attlas.engine.online import product
from attlas.engine.problem import Problem, spread_heads
from attlas.engine.statistic import Part, Statistic, TensorForm, keep_larger, lowest, merge_sums
from attlas.errors import ShapeError, public
from attlas.foundation.checks import check_floating
from attlas.foundation.tiles import Tile
from attlas.scores.base import Dot
from attlas.scores.position import TensorBias
from attlas.stats.counts import interval_of
from attlas.stats.functions import function_of


def zeros_for_rows(problem: Problem) -> Tensor:
    """Return a 0 for each row, shape (batch, heads, m)."""
    return torch.zeros(problem.shape[:3], dtype=problem.dtype, device=problem.device)


def form_of_rows(problem: Problem, *sizes: int, dtype: torch.dtype | None = None) -> TensorForm:
    """Return shape and dtype (`TensorForm`) of a result with one number for each row, or several (`sizes`)."""
    return TensorForm((*problem.shape[:3], *sizes), dtype or problem.dtype)


class PerRow(Statistic):
    """One number per row, merged from the numbers of its parts."""

    axis = "rows"
    nothing: float = 0.0  # the number of a row that has no part
    merge = merge_sums

    def start(self, problem: Problem) -> Tensor:
        # The number of a row that sees no key.
        return zeros_for_rows(problem).fill_(self.nothing)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        """Merge the numbers of a part into those of its rows."""
        carry[at.place] = self.merge(carry[at.place], self.of(part))
        return carry

    def forms(self, problem: Problem) -> TensorForm:
        # One number for each row.
        return form_of_rows(problem)

    @abstractmethod
    def of(self, part: Part) -> Tensor:
        """Return the number of each row of one part, shape (batches, heads, rows)."""


class _LargestOfRow(PerRow):
    """One number per row, the largest of the numbers of its parts."""

    merge = keep_larger


class RowMass(PerRow):
    """Sum of each row's weights: 1, or 0 for a row with no allowed key, or less than 1 with a sink.

    See Also
    --------
    ColumnMass : the sum over queries.

    Notes
    -----
    What is missing to 1 is the weight of the sink. Cost: nothing beyond the pass.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    >>> A = attlas.attend(q, k, sink=torch.tensor([0.0, -float("inf")]))
    >>> A.collect(stats.RowMass())[0][0]
    tensor([[0.7500, 0.7500, 0.7500],
            [1.0000, 1.0000, 1.0000]])
    >>> stats.row_mass(A).shape
    torch.Size([1, 2, 3])
    """

    is_sum = True

    def of(self, part: Part) -> Tensor:
        # The sum of each row's weights in the part.
        return part.mass

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # Each weight of a row has the gradient of the sum.
        return CellGradient(row=grad)

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels give the sums.
        return {"mass": True}


class AllowedKeys(PerRow):
    """Number of keys that the mask lets each query see."""

    def of(self, part: Part) -> Tensor:
        # How many keys of the part each query may see.
        return part.keys


class Entropy(PerRow):
    """Entropy of each row in nats, ``H_i = -Σ_j A_ij ln A_ij``.

    Raises
    ------
    ShapeError
        If the weights are times the norms of values, so that they are no shares of a row.

    See Also
    --------
    EffectiveKeys : the same question, answered as a number of keys.

    Notes
    -----
    Computed as ``Σ_j A_ij (lse_i - s_ij)``, which needs no logarithm. It lies between 0 (one key) and
    ``ln n`` (all keys alike) [1]_. A row with no allowed key has entropy 0. With a sink the weights of a
    row sum to less than 1 and are taken as they are. Cost: one product and one sum a cell.

    References
    ----------
    .. [1] Shannon, "A mathematical theory of communication", 1948.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(3, 8), torch.randn(3, 8), mask=attlas.Causal())
    >>> A.collect(stats.Entropy())[0].exp()  # 1, 2, 3 keys, all alike
    tensor([1., 2., 3.])
    >>> stats.entropy(A).exp()
    tensor([1., 2., 3.])
    """

    of_shares = True

    def of(self, part: Part) -> Tensor:
        # -ln A = (lse - shift) - shifted. Where masked, weight 0 meets a finite number, and the product is 0.
        products = part.row_products(part.weights, part.shifted)
        return part.lse_minus_shift * part.mass - products

    def finish(self, carry: Tensor) -> Tensor:
        # Rounding may leave a number below 0.
        return carry.clamp_(min=0.0)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # dH / dA_ij = -ln A_ij - 1. `delta` is the sum over j of A_ij (-ln A_ij), which is the entropy itself.
        return CellGradient(row=-grad, log=-grad, delta=grad * result)

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels give the entropy.
        return {"entropy": True}


class EffectiveKeys(Statistic):
    """Effective number of keys of each row, ``(Σ_j A_ij)² / Σ_j A_ij²``.

    Raises
    ------
    ShapeError
        If the weights are times the norms of values, so that they are no shares of a row.

    See Also
    --------
    Entropy : its exponential is another effective number, which counts small weights for more.
    Coverage : how many keys hold a given share of the mass.

    Notes
    -----
    Kish's effective sample size [1]_, known as inverse participation ratio too: 1 if one key has all the
    weight, n if all are alike. The square of the sum makes it independent of a sink; without one it is
    ``1 / Σ_j A_ij²``. A row with no allowed key has 0, and so has one to whose keys a sink leaves too
    little to be squared (1e-19 in float32). Cost: one norm, no memory beyond the tile.

    References
    ----------
    .. [1] Kish, "Survey sampling", 1965, section 8.2.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(3, 8), torch.randn(3, 8), mask=attlas.Causal())
    >>> A.collect(stats.EffectiveKeys())[0].round(decimals=3)
    tensor([1., 2., 3.])
    >>> stats.effective_keys(A).round(decimals=3)
    tensor([1., 2., 3.])
    """

    axis = "rows"
    of_shares = True
    merge = merge_sums

    def start(self, problem: Problem) -> tuple[Tensor, Tensor]:
        # The mass of each row, and the sum of its squared weights.
        return zeros_for_rows(problem), zeros_for_rows(problem)

    def forms(self, problem: Problem) -> TensorForm:
        # One number for each row.
        return form_of_rows(problem)

    def step(self, carry: tuple[Tensor, Tensor], part: Part, at: Tile) -> tuple[Tensor, Tensor]:
        # vector_norm sums the squares without a tile of memory for them.
        mass, squares = carry
        mass[at.place] += part.mass
        squares[at.place] += torch.linalg.vector_norm(part.weights, dim=-1).square()
        return carry

    def finish(self, carry: tuple[Tensor, Tensor]) -> Tensor:
        # The squared mass divided by the sum of squared weights; 0 for a row that sees no key.
        mass, squares = carry
        none = squares < torch.finfo(squares.dtype).tiny  # below, few digits are left
        return torch.where(none, 0.0, mass.square() / torch.where(none, 1.0, squares))

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # E = M² / Σ P² is the result, M the mass of the row: dE / dP_ij = 2 E / M - 2 E² / M² P_ij.
        def of_tile(part: Part) -> Tensor:
            """Return the gradient in the weights of a part; `ratio` is E / M."""
            slope, ratio = (t[part.at.place].unsqueeze(-1) for t in (grad, result))
            ratio = torch.where(ratio == 0, 0.0, ratio / part.mass.unsqueeze(-1))
            return torch.mul(part.weights, -ratio, out=part.scratch()).add_(1.0).mul_(2.0 * ratio * slope)

        if problem.sink is not None:
            return CellGradient(weights=(of_tile,))
        # Without a sink M is 1, and dE / dP_ij = 2 E - 2 E² P_ij. `delta` is Σ_j P_ij dP_ij of the term `square` alone:
        # -2 E² Σ_j P_ij² = -2 E. The term `row` cancels itself where the weights of a row sum to 1.
        return CellGradient(row=2.0 * grad * result, square=-2.0 * grad * result.square(), delta=-2.0 * grad * result)

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The two numbers of the carry.
        return {"mass": True, "squares": True}

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> tuple[Tensor, Tensor]:
        # The mass of each row, and the sum of its squared weights.
        return results["mass"], results["squares"]


class MaxWeight(_LargestOfRow):
    """Largest weight of each row, ``max_j A_ij``; 0 for a row with no allowed key.

    See Also
    --------
    ArgMax : the key that has it.
    TopK : the k largest.

    Notes
    -----
    Cost: nothing beyond the pass, which knows the largest logit.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(2, 8), torch.randn(4, 8))
    >>> A.collect(stats.MaxWeight())[0]
    tensor([0.2500, 0.2500])
    >>> stats.max_weight(A)
    tensor([0.2500, 0.2500])
    """

    def start(self, problem: Problem) -> Tensor:
        # 0, or -inf where weights may be negative and there are keys.
        carry = super().start(problem)
        return carry.fill_(-math.inf) if problem.signed and problem.shape[3] else carry

    def of(self, part: Part) -> Tensor:
        # The largest weight of each row in the part, from its largest logit.
        return part.as_weights(part.largest.unsqueeze(-1)).squeeze(-1)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # To the largest weight of the row; shared out where several are equal.
        return CellGradient(weights=(partial(_gradient_of_maximum, grad),))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels give the k largest weights of each row: here k = 1.
        return {"largest": 1}

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> Any:
        # The largest weight of each row.
        return results["top_values"][..., 0].clone()


class MaxLogit(_LargestOfRow):
    """Largest logit of each row before softmax, ``max_j s_ij`` over the allowed keys; -inf if there is none.

    Notes
    -----
    The true maximum, after scaling, capping and additive masks. Logits that grow during training announce
    instability [1]_. Cost: nothing beyond the pass.

    References
    ----------
    .. [1] Dehghani et al., "Scaling vision transformers to 22 billion parameters", 2023, section 3.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.ones(2, 4), torch.ones(4, 4))
    >>> A.collect(stats.MaxLogit())[0]
    tensor([2., 2.])
    >>> stats.max_logit(A)
    tensor([2., 2.])
    """

    nothing = -math.inf
    of_logits = True

    def of(self, part: Part) -> Tensor:
        # A masked logit is replaced by a very low finite number (`lowest`), which a row without keys has as its
        # largest.
        unseen = part.largest <= lowest(part.largest.dtype) / 2
        return (part.largest + part.shift).masked_fill_(unseen, -math.inf)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # To the largest logit of the row; shared out where several are equal.
        return CellGradient(logits=(lambda part: _gradient_of_maximum(grad, part).masked_fill_(part.hidden, 0.0),))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels give the largest logit.
        return {"max_logit": True}


class Moments(NamedTuple):
    """Mean and variance of each row's logits, each of shape (..., m).

    Parameters
    ----------
    mean : Tensor, shape (..., m)
        Mean over the allowed keys.
    variance : Tensor, shape (..., m)
        Mean of the squared deviations from it.

    Examples
    --------
    >>> import torch
    >>> from attlas import stats
    >>> mean, variance = stats.Moments(torch.zeros(3), torch.ones(3))
    """

    mean: Tensor
    variance: Tensor


class _RowMoments(NamedTuple):
    """Count, mean and sum of squared deviations of the logits of rows; those of two sets of keys can be joined."""

    keys: Tensor
    mean: Tensor
    squares: Tensor

    def join(self, other: _RowMoments) -> _RowMoments:
        """Return the moments over the keys of both, by Chan's formula."""
        keys = self.keys + other.keys
        share = other.keys / keys.clamp(min=1.0)
        delta = other.mean - self.mean
        squares = self.squares + other.squares + delta.square() * self.keys * share
        return _RowMoments(keys, self.mean + delta * share, squares)


class _PrefixScatter:
    """Mean and scatter matrix of keys 0 to `known`, for the heads of one tile; it grows as rows see more keys.

    The scatter matrix is ``Σ_j (k_j - mean) (k_j - mean)ᵀ``; heads that share keys have copies of it.
    """

    def __init__(self, dot: Dot, group: int) -> None:
        self.dot = dot
        self.group = group
        self.heads: tuple[range, range] | None = None
        self.known = 0
        self.mean = self.scatter = dot.k.new_zeros(())

    def rows(self, at: Tile, keys: int) -> _RowMoments:
        """Return the moments of the logits of some rows over the first keys: q·mean(k) and qᵀ Cov(k) q."""
        if self.heads != (at.batches, at.heads) or self.known > keys:  # other heads, or fewer keys: start again
            self.heads, self.known = (at.batches, at.heads), 0
        if self.known < keys:
            self._add_keys_up_to(at, keys)
        b, h, r = at.place
        q = self.dot.q[b, h, r].to(at.dtype) * self.dot.scale
        mean = torch.matmul(q, self.mean.unsqueeze(-1)).squeeze(-1)
        if self.dot.row is not None:
            mean = mean + self.dot.row[b, h, r].to(at.dtype)
        squares = (torch.matmul(q, self.scatter) * q).sum(dim=-1).clamp_(min=0.0)
        return _RowMoments(torch.full_like(mean, float(keys)), mean, squares)

    def _add_keys_up_to(self, at: Tile, keys: int) -> None:
        """Take the keys from `known` up to `keys` into the mean and the scatter matrix, for the heads of a tile."""
        batches, key_heads = at.place[0], slice(at.heads.start // self.group, -(-at.heads.stop // self.group))
        k = self.dot.k[batches, key_heads, self.known : keys].to(at.dtype)
        mean = k.mean(dim=-2)
        centred = k - mean.unsqueeze(-2)
        scatter = torch.matmul(centred.mT, centred)
        # A tile holds whole groups of heads, or a part of one: then all its heads share one key head.
        repeats = len(at.heads) // mean.shape[1]
        mean, scatter = mean.repeat_interleave(repeats, dim=1), scatter.repeat_interleave(repeats, dim=1)
        if self.known:  # join with the keys before, by Chan's formula
            delta, share = mean - self.mean, (keys - self.known) / keys
            scatter += self.scatter + delta.unsqueeze(-1) * delta.unsqueeze(-2) * (self.known * share)
            mean = self.mean + delta * share
        self.mean, self.scatter, self.known = mean, scatter, keys


class LogitMoments(Statistic):
    """Mean and variance of each row's logits over the allowed keys.

    See Also
    --------
    MaxLogit : the largest.

    Notes
    -----
    ``mean_i = 1/n Σ_j s_ij`` and ``variance_i = 1/n Σ_j (s_ij - mean_i)²`` over the n keys that the query
    may see; keys whose log-weight is -inf do not count. A row with no such key has mean 0 and variance 0.

    Deviations are taken from the mean before they are squared, and parts are joined by Chan's formula
    [1]_, so that a large mean does not drown a small variance.

    Cost: three passes over a tile. Where the score is a dot product and a query may see all keys, or all
    up to some key, no pass at all: ``q · mean(k)`` and ``qᵀ Cov(k) q``, d² operations a token.

    References
    ----------
    .. [1] Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
       variances", 1982.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.ones(2, 1), torch.tensor([[1.0], [2.0], [3.0]]))
    >>> A.collect(stats.LogitMoments())[0].variance
    tensor([0.6667, 0.6667])
    >>> mean, variance = stats.logit_moments(A)
    >>> mean
    tensor([2., 2.])
    """

    of_logits = True
    axis = "rows"

    def forms(self, problem: Problem) -> Any:
        # One mean and one variance for each row.
        form: Any = form_of_rows(problem)
        return Moments(form, form)

    def start(self, problem: Problem) -> tuple[_RowMoments, _PrefixScatter | None]:
        # The state before any part.
        q, k = problem.tokens
        dot = problem.score.as_dot(q, k)  # type: ignore[arg-type]  # a sum has a tuple of tokens
        # The moments of a plain dot product follow from the mean and scatter of the keys; those of a sum with a bias,
        # or of a capped score, need every cell.
        has_closed_form = dot is not None and dot.bias is None and not dot.cap and problem.has_finite_logits
        prefix = _PrefixScatter(dot, problem.group) if dot is not None and has_closed_form else None
        keys, mean, squares = (zeros_for_rows(problem) for _ in _RowMoments._fields)
        return _RowMoments(keys, mean, squares), prefix

    def step(
        self, carry: tuple[_RowMoments, _PrefixScatter | None], part: Part, at: Tile
    ) -> tuple[_RowMoments, _PrefixScatter | None]:
        # Join the moments of each run of allowed columns: by the closed form where it begins at key 0, else from the
        # tile.
        rows, prefix = carry
        state = _RowMoments(*(t[at.place].clone() for t in rows))
        # Logits that are replayed for a gradient have a graph, and q and k have none.
        prefix = None if isinstance(part.problem.score, TensorBias) else prefix
        for columns, cells in part.visible_columns:
            if prefix is not None and cells is None and at.columns.start + columns.start == 0:
                joined = prefix.rows(at, columns.stop)
            else:
                joined = _moments_of_rows(part, columns, cells)
            state = state.join(joined)
        for t, rows_of_tile in zip(rows, state, strict=True):
            t[at.place] = rows_of_tile
        return carry

    def merge(self, a: tuple[_RowMoments, Any], b: tuple[_RowMoments, Any]) -> tuple[_RowMoments, Any]:
        # The prefix holds keys and no rows: either will do.
        return a[0].join(b[0]), a[1]

    def finish(self, carry: tuple[_RowMoments, _PrefixScatter | None]) -> Moments:
        # The variance is the sum of squared deviations divided by the number of keys.
        rows, _ = carry
        return Moments(rows.mean, rows.squares / rows.keys.clamp(min=1.0))

    def gradient(self, problem: Problem, grad: Moments, result: Moments) -> CellGradient:
        # Closed form where each row has one run of keys and finite logits: 1 / keys for the mean, 2 (s - mean) / keys
        # for the variance.
        runs = interval_of(problem)
        if runs is not None and problem.has_finite_logits:
            keys = (runs[1] - runs[0]).clamp(min=1)
            return CellGradient(mean=grad.mean / keys, linear=2.0 * grad.variance / keys, centre=result.mean)

        def of_tile(part: Part) -> Tensor:
            """Return the gradient in the logits of a part, 0 where masked."""
            of_mean, of_variance, mean = (t[part.at.place].unsqueeze(-1) for t in (*grad, result.mean))
            keys = (~part.hidden).sum(dim=-1, keepdim=True).clamp(min=1)
            slope = (2.0 * of_variance * (part.logits - mean) + of_mean) / keys
            return slope.masked_fill_(part.hidden, 0.0)

        return CellGradient(logits=(of_tile,))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels give both.
        return {"mean": True, "variance": True}

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> tuple[_RowMoments, None] | None:
        # The kernels give no count of keys: the mask must tell it.
        runs = interval_of(problem)
        if runs is None:
            return None
        keys = (runs[1] - runs[0]).to(results["mean"]).expand_as(results["mean"])
        return _RowMoments(keys, results["mean"], results["variance"] * keys), None

    def from_outputs(self, results: Mapping[str, Any], problem: Problem) -> Moments:
        # The kernels give mean and variance as they are.
        return Moments(results["mean"], results["variance"])


def _gradient_of_maximum(grad: Tensor, part: Part) -> Tensor:
    """Return the gradient of each row's maximum: all of it at the largest logit, shared out between equal ones."""
    hit = part.shifted == part.largest.unsqueeze(-1)
    return hit * (grad[part.at.place] / hit.sum(dim=-1)).unsqueeze(-1)


def _moments_of_rows(part: Part, columns: range, cells: Tensor | None) -> _RowMoments:
    """Return the moments of a part's logits over some of its columns, from the tile."""
    x = part.shifted[..., columns.start : columns.stop]
    if not part.problem.has_finite_logits:
        cells = x > lowest(x.dtype) / 2
    if cells is None:
        count = torch.full_like(part.shift, float(len(columns)))
        mean = x.mean(dim=-1)
        deviation = x - mean.unsqueeze(-1)
    else:
        count = cells.sum(dim=-1).to(x.dtype).expand(part.shift.shape)
        mean = torch.where(cells, x, 0.0).sum(dim=-1) / count.clamp(min=1.0)
        deviation = torch.where(cells, x - mean.unsqueeze(-1), 0.0)
    if deviation.requires_grad:
        squares = deviation.square().sum(dim=-1)
    else:  # one pass; its second derivative at 0 would be NaN
        squares = torch.linalg.vector_norm(deviation, dim=-1).square()
    return _RowMoments(count, torch.where(count == 0, 0.0, mean + part.shift), squares)


class Pooled(Statistic):
    """Pooled values ``A @ v``, computed in the same pass as other statistics.

    Parameters
    ----------
    v : Tensor, shape (..., n, e)
        Values; leading axes are those of the matrix, or its key heads in the place of its heads.

    Raises
    ------
    DtypeError
        If `v` is no floating point tensor.
    ShapeError
        If it has not one row for each key, or not the leading axes of the matrix.

    Notes
    -----
    Numbers are float32 for half precision tokens.
    Cost: the product with the values, e multiplications a cell; on a processor with native kernels the
    logits of output and statistics of rows are computed once.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    >>> A = attlas.attend(q, k)
    >>> out, entropy = A.collect(stats.Pooled(v), stats.Entropy())
    >>> out.shape, bool(torch.allclose(out, A @ v, atol=1e-6))
    (torch.Size([5, 3]), True)
    """

    is_sum = True
    merge = merge_sums

    @public("Pooled()")
    def __init__(self, v: Tensor) -> None:
        check_floating("v must be a floating point tensor.", "v", v, "v.float()")
        self.v: Tensor = v

    def forms(self, problem: Problem) -> TensorForm:
        # A vector of the size of the values for each row.
        return form_of_rows(problem, self.v.shape[-1])

    def start(self, problem: Problem) -> Tensor:
        # Sums of 0.
        v = self.values_of(problem)
        return torch.zeros(*problem.shape[:3], v.shape[-1], dtype=problem.dtype, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        # Add the weights of the part times the values of its keys.
        b, h, rows = at.place
        v = spread_heads(self.values_of(part.problem), part.problem.shape[1])
        values = v[b, h, at.columns.start : at.columns.stop].to(carry.dtype)
        # `product` keeps NaN in a value from rows whose mask hides its key.
        carry[b, h, rows] += product(part.weights, values, lambda: ~part.hidden)
        return carry

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # The gradient of a product with the matrix: grad_i · v_j in each weight.
        return CellGradient(grad, self.values_of(problem), delta=(grad * result).sum(dim=-1))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels give the product with these values.
        return {"out": self.values_of(problem)}

    def values_of(self, problem: Problem) -> Tensor:
        """Return the values with four axes, (batch, value heads, n, e)."""
        batch, heads, _, n = problem.shape
        v = self.v
        leading = v.shape[:-2].numel() if v.ndim >= 2 else 0
        value_heads = leading // batch if batch and leading % batch == 0 else 0
        if not batch and not leading and v.ndim > 2:  # an empty batch: its size tells nothing of the heads
            value_heads = v.shape[-3] if v.ndim > 3 else 1
        # Their number alone would not tell (heads, n, e) from (batch, n, e).
        fits = v.ndim >= 2 and v.shape[-2] == n and value_heads and heads % value_heads == 0
        if not fits or (heads > 1 and v.ndim > 2 and v.shape[-3] != value_heads):
            rule = "v must have a row for each key, and the leading axes of the matrix."
            found, fix = f"a matrix of {batch} batches, {heads} heads and {n} keys", "v of shape (batch, heads, n, e)."
            raise ShapeError(rule, found, fix, arguments={"v (..., n, e)": v}, where="Pooled()")
        return v.reshape(batch, value_heads, n, v.shape[-1])


row_mass = function_of(RowMass, Tensor, "shape (..., m)")
entropy = function_of(Entropy, Tensor, "shape (..., m)")
effective_keys = function_of(EffectiveKeys, Tensor, "shape (..., m)")
max_weight = function_of(MaxWeight, Tensor, "shape (..., m)")
max_logit = function_of(MaxLogit, Tensor, "shape (..., m)")
logit_moments = function_of(LogitMoments, Moments, "mean and variance of shape (..., m)")
