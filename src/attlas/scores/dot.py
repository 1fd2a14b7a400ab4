"""Scores made of dot products: scaled, capped, cosine."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from attlas.errors import DtypeError, kind, public
from attlas.foundation.checks import finite_number
from attlas.foundation.tiles import Tile
from attlas.scores.base import Derived, Dot, Score, Tokens, check_same_size

__all__ = ["Cosine", "ScaledDot", "SoftCap"]


class ScaledDot(Score):
    """Scaled dot product, ``s_ij = scale * q_i · k_j``.

    Parameters
    ----------
    scale : float, optional
        Factor of the dot product; the default is ``1 / sqrt(d)``. ``scale=1.0`` is the plain dot product.

    Raises
    ------
    ShapeError
        If `scale` is not finite.

    See Also
    --------
    SoftCap : keeps large scores within bounds.
    Bilinear : queries and keys of different sizes.

    Notes
    -----
    For tokens of independent coordinates with mean 0 and variance 1, the variance of ``q · k`` is d, so
    dividing by ``sqrt(d)`` keeps softmax away from saturation [1]_. Cost: ``2 d`` operations a pair, no
    memory beyond the tile.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, section 3.2.1.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.ones(1, 4), torch.ones(2, 4)
    >>> attlas.attend(q, k, score=attlas.ScaledDot()).logits[:, :]
    tensor([[2., 2.]])
    """

    finite = True
    position_free = True
    rounds_tokens = True

    stored = ("scale",)

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        # A finite float, the usual case, needs no check: this is called for each matrix that is given a scale.
        if scale is not None and not (type(scale) is float and math.isfinite(scale)):
            with public("ScaledDot()"):
                self.scale = finite_number("scale", scale, "leave scale out for 1 / sqrt(d).")

    def factor(self, d: int) -> float:
        """Return the factor of the dot product for tokens of size `d`."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(max(d, 1))

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # The scale goes onto the queries: a tile has many more cells than its queries have numbers.
        return torch.matmul(q * self.factor(q.shape[-1]), k.mT)

    def as_dot(self, q: Tensor, k: Tensor) -> Dot | None:
        return Dot(q, k, self.factor(q.shape[-1]))

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        fix = f"project both to one size, or use score=Additive({q.shape[-1]}, {k.shape[-1]}, hidden_size)."
        check_same_size(f"{type(self).__name__}()", q, k, fix)

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"scale={self.scale}"


class SoftCap(Derived):
    """A score kept within ``±cap`` by a tanh, ``s = cap * tanh(score / cap)``.

    Parameters
    ----------
    score : Score
        The score that is capped.
    cap : float
        Bound of the result, above 0.

    Raises
    ------
    ShapeError
        If `cap` is not a finite number above 0.

    Notes
    -----
    Gemma 2 caps its attention scores at 50 [1]_. Cost: one tanh a pair.

    References
    ----------
    .. [1] Gemma team, "Gemma 2: improving open language models at a practical size", 2024, section 2.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = 100 * torch.ones(1, 4), torch.ones(2, 4)
    >>> attlas.attend(q, k, score=attlas.SoftCap(attlas.ScaledDot(), 50.0)).logits[:, :]
    tensor([[49.9665, 49.9665]])
    """

    stored = ("cap", "score")

    @public("SoftCap()")
    def __init__(self, score: Score, cap: float) -> None:
        if not isinstance(score, Score):
            fix = "attlas.SoftCap(attlas.ScaledDot(), 50.0)"
            raise DtypeError("score must be an attlas.Score.", kind(score), fix, score=repr(score))
        super().__init__(score)
        self.cap = finite_number("cap", cap, "leave SoftCap out if the scores need no bound.", above=0)

    @property
    def score(self) -> Score:
        """The score that is capped."""
        return self.inner

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # The log-weights of a tile.
        logits = self.inner(q, k, at)
        capped = torch.tanh(logits / self.cap) * self.cap
        if self.finite:
            return capped
        return torch.where(logits == -math.inf, logits, capped)  # a pair that the score forbids stays forbidden

    def as_dot(self, q: Tensor, k: Tensor) -> Dot | None:
        # The score as a dot product, which fused kernels compute; None where it is none.
        dot = self.inner.as_dot(q, k)
        if dot is None or dot.row is not None or dot.bias is not None or dot.cap:
            return None  # the cap of a Dot bounds its product alone, not a row or a bias, and it has only one
        return replace(dot, cap=self.cap)

    def extra_repr(self) -> str:
        return f"cap={self.cap}"


class Cosine(ScaledDot):
    """Cosine of the angle between query and key, ``s_ij = scale * q_i · k_j / (‖q_i‖ ‖k_j‖)``.

    Parameters
    ----------
    scale : float, optional
        Factor of the cosine, an inverse temperature. The default is 1.

    Raises
    ------
    ShapeError
        If `scale` is not finite.

    Notes
    -----
    A token of length 0 has cosine 0 with every other. Cost: that of ScaledDot.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0], [-3.0, -4.0]])
    >>> attlas.attend(q, k, score=attlas.Cosine()).logits[:, :]
    tensor([[ 1., -1.]])
    """

    rounds_tokens = False  # torch.autocast computes cosines in float32

    @public("Cosine()")
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = finite_number("scale", scale, "leave scale out for the plain cosine.")

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        return functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
