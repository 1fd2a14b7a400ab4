"""How far the weights of one matrix are from those of another, row by row, tile by tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from attlas import stats
from attlas.engine import operations
from attlas.engine.gradient import CellGradient
from attlas.engine.online import LARGE, high_part
from attlas.engine.problem import Problem
from attlas.engine.statistic import Part
from attlas.errors import DtypeError, GradientError, ShapeError, kind, public
from attlas.foundation.checks import waits_for
from attlas.foundation.tiles import Tile
from attlas.matrix.matrix import AttentionMatrix
from attlas.stats.counts import interval_of

# Whether the log-sum-exps of each of two matrices are large; None where each tile is asked.
Large: TypeAlias = "list[bool] | None"

Distance: TypeAlias = Literal["kl", "cross_entropy", "squared", "squared_logits"]


@public("divergence()")
def divergence(
    A: AttentionMatrix, B: AttentionMatrix, kind: Distance = "kl", heads: Literal["each", "mean"] = "each"
) -> Tensor:
    """Return how far each row of weights of one matrix is from that of another.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The matrix whose weights P stand first: the target, where B is trained towards it. ``A.detach()`` takes it as it
        is.
    B : AttentionMatrix, shape (..., m, n)
        The matrix whose weights Q stand second. It may have another score, mask, sink and size of tokens.
    kind : {"kl", "cross_entropy", "squared", "squared_logits"}, default "kl"
        ``Σ_j P_ij ln(P_ij / Q_ij)``, ``-Σ_j P_ij ln Q_ij``, ``Σ_j (P_ij - Q_ij)²``, or the sum of the squared
        differences of log-weights before softmax, over the keys that the query may see in both.
    heads : {"each", "mean"}, default "each"
        Whether each head of A is compared with the same head of B, or the mean of all heads' weights, the last leading
        axis, with that of B, which may then have another number of heads.

    Returns
    -------
    Tensor, shape (..., m)
        In nats for the first two kinds. Without the axis of the heads for their mean. It carries gradients to both
        matrices.

    Raises
    ------
    DtypeError
        If an argument is no AttentionMatrix.
    ShapeError
        If the shapes do not agree, if an option is unknown, or in the first two kinds if weights are times the norms
        of values.
    GradientError
        In a second derivative (``create_graph=True``), where the tiles are not dot products.

    See Also
    --------
    attlas.stats.Entropy : the same of one matrix.

    Notes
    -----
    Weights are taken as they are, with sinks and windows in their denominators; a sink is no key, so that with sinks
    the divergence may be below 0. A key that has weight in A and none in B makes a row infinite; such a row has a
    gradient of 0. In a mean of heads, weights that the dtype rounds to 0 (1e-45 in float32) are none. A row with no
    allowed key in A has 0 in the first two kinds.

    Cost: two products of queries and keys forward, six backward, memory of a few tiles. Where B is a dot product and
    no key is hidden in B alone, ``Σ_j P_ij ln Q_ij`` is a pooled output of A, and everything runs in the kernels of the
    backends; divergences below 1e-6 of
    the logits, 1e-5 in half precision, are then lost to rounding.

    Examples
    --------
    >>> import torch, attlas
    >>> teacher, student = torch.randn(2, 8, 50, 16), torch.randn(2, 2, 50, 4, requires_grad=True)
    >>> A = attlas.attend(teacher, teacher, mask=attlas.Causal())
    >>> B = attlas.attend(student, student, mask=attlas.Causal())
    >>> loss = attlas.divergence(A, B, heads="mean")
    >>> loss.shape, bool((loss > -1e-5).all()), loss.requires_grad  # 0 but for rounding in the first row
    (torch.Size([2, 50]), True, True)
    """
    mean = _averages_heads(A, B, kind, heads)
    for matrix in (A, B):
        matrix.weights.check_unchanged()
    problems = A.problem, B.problem
    if any(problem.is_symbolic for problem in problems):
        return _divergence_of_dense(A, B, kind, mean)
    if not mean and kind in ("kl", "cross_entropy") and (quick := _divergence_by_products(A, B, kind)) is not None:
        return quick
    large = _have_large_lse(A, B)
    rows = _RowDivergence(A, B, kind, mean, large, swapped=False)
    found: Tensor = A.collect(rows)[0]
    if B.weights.needs_graph:
        # The statistic of A gives gradients in A alone. `beside` is 0 everywhere, and its gradient is that of the
        # divergence in B: to add it changes no number.
        nothing = torch.zeros(problems[1].shape[:3], dtype=B.dtype, device=B.device)
        other = _RowDivergence(A, B, kind, mean, large, swapped=True)
        (beside,), _ = operations.record(problems[1], [other], B.plan, lambda: ([nothing], _exact_lse(B)))
        beside = B.axes.restore(beside)
        beside = beside.mean(dim=-2, keepdim=True) if mean else beside
        found = found + torch.where(found.detach().isfinite(), beside, 0.0)
    return found.mean(dim=-2) if mean else found


def _exact_lse(A: AttentionMatrix) -> Tensor:
    """Return the log-sum-exp of each row in its exact form, without a graph."""
    return A.softmax_weights.lse()


def _have_large_lse(A: AttentionMatrix, B: AttentionMatrix) -> Large:
    """Return whether the log-sum-exps of each matrix are large, with one wait for both; None on the CPU.

    There each tile is asked.
    """
    if not waits_for(A.device):
        return None
    largest = torch.stack([high_part(_exact_lse(matrix)).abs().amax() for matrix in (A, B)])
    return (largest > LARGE).tolist()


def _averages_heads(A: Any, B: Any, distance: Any, heads: Any) -> bool:
    """Return whether heads are averaged (heads='mean'); raise an error for arguments that do not fit."""
    for name, matrix in (("A", A), ("B", B)):
        if not isinstance(matrix, AttentionMatrix):
            fix = "attlas.attend(q, k); of a tensor of weights the formula is one line of torch."
            raise DtypeError("A and B must be attention matrices.", kind(matrix), fix, arguments={name: kind(matrix)})
    given = {"A": f"shape {tuple(A.shape)}", "B": f"shape {tuple(B.shape)}"}
    for name, value, known in (("kind", distance, get_args(Distance)), ("heads", heads, ("each", "mean"))):
        if value not in known:
            rule = f"{name} must be one of {', '.join(map(repr, known))}."
            raise ShapeError(rule, f"{name} = {value!r}", f"{name}={known[0]!r}")
    if distance in ("kl", "cross_entropy"):
        for matrix in (A, B):
            matrix.weights.check_shares()
    mean: bool = heads == "mean"
    if mean and (A.ndim < 3 or B.ndim < 3 or distance == "squared_logits"):
        rule = "heads='mean' compares means of weights over the axis before the last two."
        raise ShapeError(rule, f"kind = {distance!r}", "heads='each'", arguments=given)
    shapes = [tuple(one.shape[:-3] + one.shape[-2:] if mean else one.shape) for one in (A, B)]
    if shapes[0] != shapes[1]:
        rule = "A and B must have the same shape, but for the number of heads where their mean is taken."
        fix = "heads='mean'" if not mean and shapes[0][-2:] == shapes[1][-2:] else "attend() with the same tokens."
        raise ShapeError(rule, f"{shapes[0]} and {shapes[1]}", fix, arguments=given)
    return mean


def _divergence_by_products(A: AttentionMatrix, B: AttentionMatrix, distance: str) -> Tensor | None:
    """Return the divergence from an output and entropy of A and the log-sum-exp of B; None where these do not tell it.

    They do where the logits of B are plain dot products:
    ``Σ_j P_ij S_ij`` of ``S_ij = scale q_i · k_j`` is ``scale q_i · (Σ_j P_ij k_j)``.
    """
    first, second = A.problem, B.problem
    with second.recording():
        dot = second.score.as_dot(*second.project())  # type: ignore[arg-type]  # tokens in the score's own form
    exact = dot is not None and (first.q.dtype.itemsize > 2 or dot.k.dtype is first.q.dtype)
    if dot is None or dot.bias is not None or dot.cap or not exact or not _sees_all_of(first, second):
        return None
    pooled, entropy, mass = A.collect(stats.Pooled(dot.k), stats.Entropy(), stats.RowMass())
    shape = first.shape[:3]
    pooled, entropy, mass = pooled.reshape(*shape, -1), entropy.reshape(shape), mass.reshape(shape)
    # With cross_i = Σ_j P_ij S_ij, Σ_j P_ij ln Q_ij is cross_i - mass_i lse_i. The cross-entropy is minus that, and the
    # divergence "kl" is the cross-entropy less the entropy of P.
    cross = dot.scale * (dot.q.to(pooled.dtype) * pooled).sum(dim=-1)
    if dot.row is not None:
        cross = cross + dot.row * mass
    total = B.lse.reshape(shape)
    seen = mass.detach() > 0
    found = mass * torch.where(seen, total, 0.0) - cross
    found = torch.where(seen, found - entropy if distance == "kl" else found, 0.0)
    return A.axes.restore(found)


def _sees_all_of(first: Problem, second: Problem) -> bool:
    """Return whether a query of the second matrix is known to see each key that it sees in the first."""
    if second.mask is None or second.mask is first.mask:
        return True
    runs, others = interval_of(first), interval_of(second)
    if runs is None or others is None:
        return False
    (start, stop), (low, high) = runs, others
    return bool(((start == stop) | ((low <= start) & (stop <= high))).all())


@dataclass(frozen=True)
class _CellWeights:
    """Weights and their logarithms of some cells; of one head, or the mean of all."""

    weights: Tensor
    logs: Tensor


def _cell_distance(distance: str, p: _CellWeights, q: _CellWeights) -> Tensor:
    """Return the contribution of each cell to the distance of its row."""
    if distance == "squared":
        return (p.weights - q.weights).square()
    if distance == "squared_logits":
        seen = (p.logs > -torch.inf) & (q.logs > -torch.inf)
        return torch.where(seen, p.logs - q.logs, 0.0).square()
    logs = p.logs - q.logs if distance == "kl" else -q.logs
    return torch.where(p.weights > 0, p.weights * torch.where(p.weights > 0, logs, 0.0), 0.0)


def _cell_distance_derivative(distance: str, p: _CellWeights, q: _CellWeights, *, by_q: bool) -> Tensor:
    """Return the derivative of what each cell adds to its row (`_cell_distance`) by its weight in p; with `by_q`, in q.

    That of "squared_logits" is by the logit and not by the weight.
    """
    sign = -1.0 if by_q else 1.0
    if distance == "squared":
        return (p.weights - q.weights) * (2.0 * sign)
    if distance == "squared_logits":
        seen = (p.logs > -torch.inf) & (q.logs > -torch.inf)
        return torch.where(seen, p.logs - q.logs, 0.0) * (2.0 * sign)
    # What is left is "kl", p (log p - log q), or "cross_entropy", -p log q: their derivatives by q are the same.
    if by_q:
        return torch.where(q.weights > 0, -(p.weights / q.weights), 0.0)
    logs = p.logs - q.logs + 1.0 if distance == "kl" else -q.logs
    return torch.where((p.weights > 0) & logs.isfinite(), logs, 0.0)


class _RowDivergence(stats.Statistic):
    """The divergence of each row, as a statistic of A, or `swapped` of B, whose gradient is that in A or in B."""

    axis = "rows"
    whole_rows = True

    def __init__(
        self, A: AttentionMatrix, B: AttentionMatrix, distance: str, mean: bool, large: Large, *, swapped: bool
    ) -> None:
        self.distance, self.mean, self.swapped = distance, mean, swapped
        self.of_logits = distance == "squared_logits"
        self.own, self.other = (B, A) if swapped else (A, B)
        self.large = large[::-1] if swapped and large is not None else large
        with torch.no_grad():  # kept for all tiles
            self.lse = _exact_lse(self.own), _exact_lse(self.other)

    def start(self, problem: Problem) -> Tensor:
        return torch.zeros(problem.shape[:3], dtype=problem.dtype, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        """Add the divergence of a part's cells to their rows."""
        if torch.is_grad_enabled():
            rule = "a divergence that is computed in tiles has no second derivative."
            fix = "the formula on A.to_dense() and B.to_dense()."
            raise GradientError(rule, "create_graph=True", fix, where="divergence()")
        carry[at.place] += _cell_distance(self.distance, *self._cells_of_both(part)).sum(dim=-1)
        return carry

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # A function of tiles, since the cells of both matrices are computed again in the backward.
        grad = torch.where(result.isfinite(), grad, 0.0)
        if self.mean:  # each head has the number of all, and a part in their mean
            grad = grad.sum(dim=1, keepdim=True).expand_as(grad) / problem.shape[1]

        def of_tile(part: Part) -> Tensor:
            """Return the gradient in the logits, or in the weights, of the cells of a part."""
            p, q = self._cells_of_both(part)
            slope = grad[part.at.place].unsqueeze(-1)
            return (
                -p.weights * slope
                if by_logits
                else _cell_distance_derivative(self.distance, p, q, by_q=self.swapped) * slope
            )

        # In the logits of B the derivative is q Σ p - p, which needs no division by q.
        by_logits = self.swapped and not self.mean and self.distance in ("kl", "cross_entropy")
        if by_logits:
            mass = self.other.detach().collect(stats.RowMass())[0].reshape(grad.shape)
            return CellGradient(lse=grad * mass, logits=(of_tile,))
        return CellGradient(logits=(of_tile,)) if self.of_logits else CellGradient(weights=(of_tile,))

    def _cells_of_both(self, part: Part) -> tuple[_CellWeights, _CellWeights]:
        """Return the cells of A and of B at the place of a part.

        Those of the matrix that the part belongs to are its own, those of the other are computed anew.
        """
        at, heads = part.at, range(self.other.problem.shape[1])
        own = _CellWeights(part.logits, part.logits) if self.of_logits else _CellWeights(part.weights, part.log_weights)
        if self.mean and len(at.heads) == part.problem.shape[1]:
            weights = part.weights.mean(dim=1, keepdim=True)
            own = _CellWeights(weights, weights.log())
        elif self.mean:
            own = self._cells_of_matrix(0, at, range(part.problem.shape[1]))
        other = self._cells_of_matrix(1, at, heads if self.mean else at.heads)
        return (other, own) if self.swapped else (own, other)

    def _cells_of_matrix(self, number: int, at: Tile, heads: range) -> _CellWeights:
        """Return cells at the places of a tile of either matrix: of its own matrix (0) or of the other (1)."""
        matrix = (self.own, self.other)[number]
        large = self.large is not None and self.large[number] and not matrix.problem.partial
        lse = None if large else self.lse[number]  # it is computed again with the tile
        place = matrix.problem.tile(at.batches, heads, at.rows, at.columns)
        logs = operations.cells(matrix.problem, place, matrix.plan, lse, "logits" if self.of_logits else "log weights")
        if self.of_logits:
            return _CellWeights(logs, logs)
        weights = logs.exp()
        if self.mean:
            weights = weights.mean(dim=1, keepdim=True)
            logs = weights.log()
        return _CellWeights(weights, logs)


def _divergence_of_dense(A: AttentionMatrix, B: AttentionMatrix, distance: str, mean: bool) -> Tensor:
    """Return the divergence from whole matrices, for programs of torch that are traced or transformed."""
    of_logits = distance == "squared_logits"
    cells = []
    for matrix in (A, B):
        weights = matrix.logits.to_dense() if of_logits else matrix.to_dense()
        weights = weights.mean(dim=-3) if mean else weights
        # Where a weight is 0, the logarithm of another number keeps its gradient from being NaN.
        logs = torch.where(weights > 0, weights.where(weights > 0, 1.0).log(), -torch.inf)
        cells.append(_CellWeights(weights, weights if of_logits else logs))
    return _cell_distance(distance, *cells).sum(dim=-1)
