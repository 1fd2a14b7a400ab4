"""How much softmax lets through: the size of its Jacobian, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attlas.foundation.checks import has_float64
from attlas.foundation.devices import check_float64
from attlas.foundation.tiles import Tile
from attlas.stats import Part, Statistic

if TYPE_CHECKING:
    from attlas.matrix import AttentionMatrix


class JacobianSize(NamedTuple):
    """Trace and Frobenius norm of each row's softmax Jacobian, each of shape (..., m).

    Parameters
    ----------
    trace : Tensor, shape (..., m)
        Sum of the diagonal, which is the sum of the eigenvalues.
    frobenius : Tensor, shape (..., m)
        Root of the sum of squares.

    Examples
    --------
    >>> import torch
    >>> from attlas.scaling import JacobianSize
    >>> trace, frobenius = JacobianSize(torch.zeros(3), torch.zeros(3))
    """

    trace: Tensor
    frobenius: Tensor


class Jacobian(Statistic):
    """Size of each row's softmax Jacobian ``J = diag(p) - p pᵀ``: trace and Frobenius norm.

    See Also
    --------
    jacobian : the same as a function.

    Notes
    -----
    J is what the gradient of the weights is multiplied with on its way to the logits. It is symmetric with
    eigenvalues in [0, 1/2], so its trace ``Σ p (1 - p) = 1 - Σ p²`` is also the sum of their sizes (the
    nuclear norm), and ``‖J‖_F² = Σ p² - 2 Σ p³ + (Σ p²)²``. Both are 0 where one key has all the weight:
    nothing is learned there. Uniform weights over n keys have trace ``1 - 1/n`` and norm ``sqrt(n - 1)/n``.
    With a sink, J is the block of the keys, and the trace is ``Σ p - Σ p²``. A row with no allowed key has 0.

    Sums are in float64, from weights in the matrix's own precision: a saturated row's norm is good to 1e-6.
    Cost: one pass, and a float64 copy of the tile. On a device without float64 `jacobian` computes on the CPU, and
    `A.collect` refuses.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.scaling import Jacobian
    >>> A = attlas.attend(torch.zeros(1, 8), torch.randn(4, 8))  # four keys alike
    >>> A.collect(Jacobian())[0].trace
    tensor([0.7500])
    """

    def start(self, problem: Any) -> tuple[Tensor, torch.dtype]:
        # Σ p (1 - p), Σ p² (1 - p)², Σ p², Σ p⁴
        check_float64("the sizes of Jacobians are", problem.device, 'A.to("cpu").collect(Jacobian())')
        carry = torch.zeros(*problem.shape[:3], 4, dtype=torch.float64, device=problem.device)
        return carry, problem.dtype

    def step(self, carry: tuple[Tensor, torch.dtype], part: Part, at: Tile) -> tuple[Tensor, torch.dtype]:
        # Implements `Statistic.step`: adds the four sums of `start` over the columns of a tile.
        p = part.weights.double()
        squares = p.square()
        spread = p - squares
        norms = (torch.linalg.vector_norm(t, dim=-1).square_() for t in (spread, p, squares))
        carry[0][at.place] += torch.stack([spread.sum(-1), *norms], dim=-1)
        return carry

    def finish(self, carry: tuple[Tensor, torch.dtype]) -> JacobianSize:
        sums, dtype = carry
        trace, diagonal, squares, fourths = sums.unbind(-1)
        # Off the diagonal stands p_i p_j: all pairs less those of a key with itself.
        frobenius = (diagonal + (squares.square() - fourths).clamp(min=0.0)).sqrt()
        return JacobianSize(trace.to(dtype), frobenius.to(dtype))


def jacobian(A: AttentionMatrix) -> JacobianSize:
    """Return the size of each row's softmax Jacobian; see `Jacobian`.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The matrix.

    Returns
    -------
    JacobianSize
        Trace and Frobenius norm, each of shape (..., m).

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import scaling
    >>> q, k = torch.randn(5, 64), torch.randn(100, 64)
    >>> with_scale = scaling.jacobian(attlas.attend(q, k)).trace
    >>> without = scaling.jacobian(attlas.attend(q, k, scale=1.0)).trace
    >>> bool((with_scale > without).all())
    True
    """
    found: JacobianSize = where_float64_is(A).collect(Jacobian())[0]
    return JacobianSize(found.trace.to(A.device), found.frobenius.to(A.device))


def where_float64_is(A: AttentionMatrix) -> AttentionMatrix:
    """Return a matrix where it is, or on the CPU if its device has no float64."""
    return A if has_float64(A.device) else A.cpu()
